"""Tasks by name. A data set carries its own reward; `load` is the only place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from codechat.config import ConfigError
from codechat.tasks.base import SPLITS, Gate, Problem, Score, Task, gold_gate
from codechat.tasks.funcall import FuncallTask
from codechat.tasks.toy import ToyTask

__all__ = ["SPLITS", "TASKS", "Gate", "Problem", "Score", "Task", "gold_gate", "load"]

TASKS: dict[str, Callable[..., Task]] = {"funcall": FuncallTask, "toy": ToyTask}


def load(name: str, **options: Any) -> Task:
    """The task called `name`. ConfigError for a name or an option that it does not have."""
    if name not in TASKS:
        near = get_close_matches(name, TASKS, 1, 0.0)[0]
        raise ConfigError(f"task {name!r} is unknown; tasks are {', '.join(TASKS)}; did you mean {near!r}?")
    try:
        return TASKS[name](**options)
    except TypeError as error:
        raise ConfigError(f"task {name!r} was given options {sorted(options)}; {error}") from error
