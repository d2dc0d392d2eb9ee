"""Before and around a run: recipes, the planner of memory and hours, launch scripts, live metrics.

The loops know nothing of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=["job_scripts", "launcher", "live_metrics", "memory_tape", "planner", "recipes", "step_memory"],
)
