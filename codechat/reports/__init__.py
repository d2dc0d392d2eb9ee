"""Finished runs as DataFrames (`run_frames`), figures (`plots`), reports (`build`), notebooks and web pages.

Trains nothing. Loops write runs; this room reads them.
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
        "run_checks",
        "run_frames",
        "style",
        "token_attribution",
    ],
)
