"""Finished runs as DataFrames (`run_frames`), figures (`plots`), reports (`build`, `articles`), notebooks, and web
pages: of notebooks (`html`), and interactive ones (`pages`, `dashboard`).

Trains nothing. Loops write runs; this room reads them.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "articles",
        "build",
        "comparisons",
        "dashboard",
        "dense_rewards",
        "frozen_rows",
        "html",
        "notebooks",
        "pages",
        "plots",
        "run_checks",
        "run_frames",
        "style",
        "token_attribution",
        "xray_steps",
    ],
)
