"""Pocket apps: mail, calendar, contacts, notes, shop and files with state, 78 tools, and
requests of five levels scored
by what has changed: `AppsTask(levels=[1, 2])`, or `AppsTask("data/apps")` for problems of
`codechat data apps`."""

from codechat_lab.tasks.apps.task import LEVELS, AppsTask, gold_steps, trajectory
from codechat_lab.tasks.apps.tools import TOOLS

__all__ = ["LEVELS", "TOOLS", "AppsTask", "gold_steps", "trajectory"]
