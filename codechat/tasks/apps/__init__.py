"""Pocket apps: mail, calendar, contacts, notes, shop and files with state, 78 tools, and requests of five levels scored
by what has changed.

task = AppsTask(levels=[1, 2])                   generated problems
task = AppsTask("data/apps")                     problems of apps.SPLIT.jsonl, written by `codechat data apps`
world = task.environment()
world.reset(task.problems("train", 1)[0], seed=0)
world.step({"role": "assistant", "content": "..."})
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["app", "catalogue", "easy", "environment", "generator", "hard", "people", "plans", "prepare", "store"]
    + ["task", "things", "world"],
    {
        "catalogue": ["TOOLS"],
        "environment": ["TIERS", "AppsEnvironment", "score_changes"],
        "generator": ["DOMAIN", "LEVELS", "dialogues", "gold_steps", "problems", "trajectory"],
        "task": ["AppsTask"],
    },
)
