"""Finished runs as figures, tables, notebooks and pages.

Trains nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        "build",
        "comparisons",
        "frozen_rows",
        "html",
        "notebooks",
        "plots",
        "report_plots",
        "reward_plots",
        "run_checks",
        "style",
        "token_attribution",
    ],
)
