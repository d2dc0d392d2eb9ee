"""Is a score real, and is there a gradient: pass@k with intervals, signal diagnosis, behaviour probes, contamination, minimal pairs.

Every score comes from the task's own `score`.
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
        "results",
        "settings",
        "training_texts",
    ],
)
