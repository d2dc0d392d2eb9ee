"""Scores with intervals (pass@k), diagnosis of the training signal, behaviour probes, contamination search, counterfactual (minimal-pair) prompts, natural requests.

Every score comes from the task's own `score`. Not here: how scores are plotted and reported (`reports`).
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "behaviour_probes",
        "code_filter",
        "code_pass_rates",
        "contamination",
        "counterfactuals",
        "diagnose",
        "domain_loss",
        "evaluate",
        "intervals",
        "natural",
        "results",
        "settings",
        "training_texts",
    ],
)
