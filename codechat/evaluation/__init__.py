"""Is a score real, and is there a gradient: pass@k with intervals, signal diagnosis, behaviour probes, contamination, minimal pairs.

Every score comes from the task's own `score`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
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
        "training_texts",
    ],
)
