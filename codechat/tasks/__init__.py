"""Problems with their own reward and data preparation, by name: a folder or a file for each task.

`load` builds a task and imports its module at that moment, so names and help texts cost nothing.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, UserError, check_choice
from codechat.tasks.base import (  # fmt: skip
    SPLITS,
    Problem,
    ReferenceCheck,
    Score,
    Task,
    check_reference_solutions,
    checked_problems,
    score_all,
)
from codechat.tasks.custom import RowsTask, file_class, require_task


class TaskEntry(NamedTuple):
    """Where a task is, and one line of help."""

    module: str
    cls: str
    about: str


# A class may stand here too, so that a program can add a task: tasks.TASKS["mine"] = MyTask.
TASKS: dict[str, TaskEntry | Callable[..., Task]] = {
    "apps": TaskEntry("apps.task", "AppsTask", "multi-turn requests in simulated apps with state"),
    "appworld": TaskEntry("appworld", "AppWorldTask", "AppWorld episodes on an AppWorld server"),
    "bfcl": TaskEntry("bfcl.task", "BfclTask", "Berkeley Function Calling Leaderboard, single turn; evaluation only"),
    "funcall": TaskEntry("funcall.task", "FuncallTask", "one function call, graded by the staircase reward"),
    "gsm8k": TaskEntry("reasoning.task", "Gsm8kTask", "GSM8K grade school mathematics"),
    "humaneval": TaskEntry("coding.task", "HumanEvalTask", "HumanEval programs, run against tests; evaluation only"),
    "mbpp": TaskEntry("coding.task", "MbppTask", "MBPP programs, run against tests"),
    "micro": TaskEntry("micro", "MicroTask", "generated small Python functions, run against tests"),
    "mmlu": TaskEntry("reasoning.task", "MmluTask", "MMLU multiple choice; evaluation only"),
    "natural": TaskEntry("natural", "NaturalTask", "fixed prompts as people type them; evaluation only"),
    "reasoning": TaskEntry("reasoning.task", "ReasoningTask", "generated arithmetic word problems"),
    "repair": TaskEntry("repair.task", "RepairTask", "small repositories with a bug, repaired by edits"),
    "toy": TaskEntry("toy", "ToyTask", "write bytes of the class that the prompt names; learned in a minute"),
}
NAMES = tuple(TASKS)
_FILE = re.compile(r"(?P<path>.+?\.py)(?::(?P<cls>[A-Za-z_]\w*))?(?::(?P<options>.*))?")
_SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma inside brackets is no separator
__all__ = [
    "NAMES", "SPLITS", "TASKS", "Problem", "ReferenceCheck", "RowsTask", "Score", "Task", "TaskEntry", "check_reference_solutions",
    "checked_problems", "load", "name_of", "score_all", "task_class",
]  # fmt: skip


def task_class(name: str) -> Callable[..., Task]:
    """The class of the task called `name`, or of FILE.py:CLASS. ConfigError names the nearest known task."""
    return _find(name)[0]


def _find(name: str) -> tuple[Callable[..., Task], str]:
    """(the class, the options behind the name)."""
    if match := _FILE.fullmatch(name):
        return file_class(match["path"], match["cls"]), match["options"] or ""
    name, _, words = name.partition(":")
    check_choice("task", name, TASKS)
    entry = TASKS[name]
    if isinstance(entry, TaskEntry):
        return getattr(importlib.import_module(f"{__name__}.{entry.module}"), entry.cls), words
    return entry, words


def load(name: str, **options: Any) -> Task:
    """The task called `name`, with options in the name or as keywords: "mbpp:variant=sanitized,timeout_s=3". A file of your own is
    "my_task.py:MyTask" or "my_task.py:MyTask:level=2".

    ConfigError for an unknown name or option, and for a value of the wrong type."""
    make, words = _find(name)
    options = _options(words) | options
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known:
            raise ConfigError(f"task {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    try:
        return make(**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {name!r} does not accept {options} ({error}); correct the value") from None


def name_of(task: str | Task | type) -> str:
    """The name under which `load` finds a task: itself, or that of an object or a class, which is registered for this process.

    ConfigError for what is no task, and for a name that this package uses."""
    if isinstance(task, str):
        return task
    instance = require_task(task)
    if isinstance(TASKS.get(instance.name), TaskEntry):
        raise ConfigError(f"task name {instance.name!r} is taken; set another `name` in {type(instance).__name__}")
    TASKS[instance.name] = lambda: instance
    return instance.name


def _options(words: str) -> dict[str, Any]:
    """{"timeout_s": 3} from "timeout_s=3". Values are JSON where they parse, else text."""
    options: dict[str, Any] = {}
    for word in _SEPARATOR.split(words) if words else ():
        option, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"task option {word!r}; options are written NAME:option=value,option=value")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return options
