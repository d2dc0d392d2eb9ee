"""Pocket apps: mail, calendar, contacts, notes, shop and files with state, 78 tools, and requests of five levels scored
by what has changed.

task = AppsTask(levels=[1, 2])                   generated problems
task = AppsTask("data/apps")                     problems of apps.SPLIT.jsonl, written by `codechat data apps`
world = task.environment()
world.reset(task.problems("train", 1)[0], seed=0)
world.step({"role": "assistant", "content": "..."})
"""

from codechat.tasks.apps.task import LEVELS, AppsEnvironment, AppsTask, dialogues, gold_steps, problems, trajectory
from codechat.tasks.apps.tools import TOOLS

__all__ = ["LEVELS", "TOOLS", "AppsEnvironment", "AppsTask", "dialogues", "gold_steps", "problems", "trajectory"]
