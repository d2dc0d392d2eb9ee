"""Scores with intervals, diagnosis of the training signal, behaviour probes."""
