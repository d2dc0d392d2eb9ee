"""Finished runs as figures, tables, notebooks and pages.

Trains nothing.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
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
