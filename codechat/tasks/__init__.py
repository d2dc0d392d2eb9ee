"""Tasks by name. A data set carries its own reward; `load` is the only place that knows all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from codechat.config import ConfigError, nearest
from codechat.tasks.base import SPLITS, Gate, Problem, Score, Task, gold_gate
from codechat.tasks.funcall import FuncallTask
from codechat.tasks.toy import ToyTask

__all__ = ["SPLITS", "TASKS", "Gate", "Problem", "Score", "Task", "gold_gate", "load"]

TASKS: dict[str, Callable[..., Task]] = {"funcall": FuncallTask, "toy": ToyTask}


def load(name: str, **options: Any) -> Task:
    """The task called `name`. ConfigError for a name or an option that it does not have."""
    if name not in TASKS:
        raise ConfigError(f"task {name!r} is unknown; a known one is needed{nearest(name, TASKS)}")
    known = inspect.signature(TASKS[name]).parameters
    for option in options:
        if option not in known:
            raise ConfigError(f"task {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return TASKS[name](**options)
