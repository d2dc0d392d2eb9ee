"""Scores with intervals (pass@k), diagnosis of the training signal, behaviour probes, contamination search, counterfactual (minimal-pair) prompts, natural requests.

Every score comes from the task's own `score`. Not here: how scores are plotted and reported (`reports`).
"""
