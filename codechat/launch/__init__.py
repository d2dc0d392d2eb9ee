"""Before and around a run: recipes, the planner of memory and hours, launch scripts, live metrics.

The loops do not depend on it.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "job_scripts",
        "launcher",
        "live_metrics",
        "memory_tape",
        "planner",
        "portable_scripts",
        "recipe_process",
        "recipes",
        "step_memory",
    ],  # fmt: skip
)
