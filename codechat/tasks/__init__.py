"""Tasks by name. A data set carries its own reward; `load` is the only place that knows all of them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from codechat.core.errors import ConfigError, UserError, nearest
from codechat.tasks.apps import AppsTask
from codechat.tasks.appworld.task import AppWorldTask
from codechat.tasks.base import SPLITS, Gate, Problem, Score, Task, gold_gate, score_all
from codechat.tasks.bfcl.task import BfclTask
from codechat.tasks.coding.task import HumanEvalTask, MbppTask
from codechat.tasks.funcall.task import FuncallTask
from codechat.tasks.micro import MicroTask
from codechat.tasks.reasoning import Gsm8kTask, MmluTask, ReasoningTask
from codechat.tasks.toy import ToyTask

__all__ = ["SPLITS", "TASKS", "Gate", "Problem", "Score", "Task", "gold_gate", "load", "score_all"]

TASKS: dict[str, Callable[..., Task]] = {
    "apps": AppsTask,
    "appworld": AppWorldTask,
    "bfcl": BfclTask,
    "funcall": FuncallTask,
    "gsm8k": Gsm8kTask,
    "humaneval": HumanEvalTask,
    "mbpp": MbppTask,
    "micro": MicroTask,
    "mmlu": MmluTask,
    "reasoning": ReasoningTask,
    "toy": ToyTask,
}


def load(name: str, **options: Any) -> Task:
    """The task called `name`, which may carry options: "mbpp:variant=sanitized,shots=3", "micro:levels=[1,2]".

    ConfigError for a name or an option that it does not have, and for a value of the wrong kind."""
    name, _, words = name.partition(":")
    options = _options(words) | options
    if name not in TASKS:
        raise ConfigError(f"task {name!r} is unknown; a known one is needed{nearest(name, TASKS)}")
    known = inspect.signature(TASKS[name]).parameters
    for option in options:
        if option not in known:
            raise ConfigError(f"task {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    try:
        return TASKS[name](**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {name!r} cannot be made with {options} ({error}); mend the value") from None


def _options(words: str) -> dict[str, Any]:
    """{"shots": 3} of "shots=3": values are json where they can be, else text; a comma in brackets does not part."""
    found: dict[str, Any] = {}
    for word in re.split(r",(?![^\[]*\])", words) if words else ():
        option, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"task option {word!r}; options are written NAME:option=value,option=value")
        try:
            found[option] = json.loads(value)
        except ValueError:
            found[option] = value
    return found
