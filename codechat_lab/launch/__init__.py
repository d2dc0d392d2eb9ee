"""Before and around a run: recipes, the planner of memory and hours, launch scripts, live metrics.

The loops do not depend on it.
"""
