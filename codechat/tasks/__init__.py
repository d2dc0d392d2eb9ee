"""Problems with their own reward and data preparation, by name: a folder or a file for each task.

`load` builds a task. Its module is imported at that moment and not before, so names and help texts cost nothing.

Not here: what a policy is trained with (`rl` and the loops) and how scores are reported (`evaluation`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, UserError, nearest
from codechat.core.lazy import attach
from codechat.tasks.base import (
    SPLITS,
    Problem,
    ReferenceCheck,
    Score,
    Task,
    check_reference_solutions,
    checked_problems,
    score_all,
)


class TaskEntry(NamedTuple):
    """Where a task is, and one line of help. late: options added when runs existed, {name: (default, what the task did
    before)}; see `hashed`."""

    module: str
    cls: str
    about: str
    late: Mapping[str, tuple[str, str]] = {}


# A class may stand here too, so that a program can add a task of its own: tasks.TASKS["mine"] = MyTask.
TASKS: dict[str, TaskEntry | Callable[..., Task]] = {
    "apps": TaskEntry("apps.task", "AppsTask", "multi-turn requests in simulated apps with state"),
    "appworld": TaskEntry("appworld.task", "AppWorldTask", "AppWorld episodes on a server of its own"),
    "bfcl": TaskEntry("bfcl.task", "BfclTask", "Berkeley Function Calling Leaderboard, single turn; evaluation only"),
    "funcall": TaskEntry(
        "funcall.task",
        "FuncallTask",
        "one function call, graded by the staircase reward",
        late={"staircase": ("ours", "published")},
    ),
    "gsm8k": TaskEntry("reasoning.task", "Gsm8kTask", "GSM8K grade school mathematics"),
    "humaneval": TaskEntry("coding.task", "HumanEvalTask", "HumanEval programs, run against tests; evaluation only"),
    "mbpp": TaskEntry("coding.task", "MbppTask", "MBPP programs, run against tests"),
    "micro": TaskEntry("micro", "MicroTask", "generated small Python functions, run against tests"),
    "mmlu": TaskEntry("reasoning.task", "MmluTask", "MMLU multiple choice; evaluation only"),
    "reasoning": TaskEntry("reasoning.task", "ReasoningTask", "generated arithmetic word problems"),
    "repair": TaskEntry("repair.task", "RepairTask", "small repositories with a bug, repaired by edits or tools"),
    "swebench": TaskEntry(
        "repair.swebench", "SweBenchTask", "SWE-bench rows in checkouts of your own; evaluation only"
    ),
    "toy": TaskEntry("toy", "ToyTask", "write bytes of the class that the prompt names; learned in a minute"),
}
NAMES = tuple(TASKS)
_FILE = re.compile(r"(?P<path>.+?\.py)(?::(?P<cls>[A-Za-z_]\w*))?(?::(?P<options>.*))?")
_SEPARATOR = re.compile(r",(?![^\[]*\])")

__getattr__, _, _modules = attach(
    __name__,
    [
        "appworld",
        "apps",
        "bfcl",
        "chars",
        "coding",
        "funcall",
        "micro",
        "own",
        "presets",
        "reasoning",
        "redteam",
        "repair",
        "toolbox",
        "toy",
    ],
    {"own": ["RowsTask"]},
)
__all__ = [
    "NAMES",
    "SPLITS",
    "TASKS",
    "Problem",
    "ReferenceCheck",
    "Score",
    "Task",
    "TaskEntry",
    "check_reference_solutions",
    "checked_problems",
    "hashed",
    "load",
    "name_of",
    "score_all",
    "task_class",
    *_modules,
]


def task_class(name: str) -> Callable[..., Task]:
    """The class of the task called `name`, or of FILE.py:CLASS. ConfigError names the nearest known task."""
    if own := _in_file(name):
        return own[0]
    if name not in TASKS:
        raise ConfigError(f"task {name!r} is unknown; required: one of {', '.join(TASKS)}{nearest(name, TASKS)}")
    entry = TASKS[name]
    if not isinstance(entry, TaskEntry):
        return entry
    return getattr(importlib.import_module(f"{__name__}.{entry.module}"), entry.cls)


def load(name: str, **options: Any) -> Task:
    """The task called `name`, with options in the name or as keywords: "mbpp:variant=sanitized,shots=3". A file of your own is
    "my_task.py:MyTask" or "my_task.py:MyTask:level=2".

    ConfigError for an unknown name or option, and for a value of the wrong type."""
    if own := _in_file(name):
        make, words = own
    else:
        name, _, words = name.partition(":")
        make = task_class(name)
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


def _in_file(name: str) -> tuple[type, str] | None:
    """(class, options) of "FILE.py:CLASS:options"; None for the name of a task."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    from codechat.tasks import own

    return own.file_class(match["path"], match["cls"]), match["options"] or ""


def name_of(task: str | Task | type) -> str:
    """The name under which `load` finds a task: itself, or that of an object or a class, which is registered for this process.

    ConfigError for what is no task, and for a name that this package uses."""
    if isinstance(task, str):
        return task
    from codechat.tasks import own

    made = own.require_task(task)
    if isinstance(TASKS.get(made.name), TaskEntry):
        raise ConfigError(f"the name {made.name!r} of {type(made).__name__} is taken; give your task another `name`")
    TASKS[made.name] = lambda: made
    return made.name


def hashed(name: str | None) -> str | None:
    """What `config_hash` uses for a task and its options: an option that was added later is left out where it asks for
    what the task did before, and written out elsewhere, also where it is the default.

    So "funcall:staircase=published" has the hash of the runs that were begun as "funcall", and "funcall" has a new
    one: a run that was paid by another reward is never taken for this one."""
    task, _, words = (name or "").partition(":")
    entry = TASKS.get(task)
    late = entry.late if isinstance(entry, TaskEntry) else {}
    if not late:
        return name
    given = [word.partition("=") for word in _SEPARATOR.split(words) if word]
    kept = ["".join(word) for word in given if word[0] not in late]
    values = {option: value for option, _, value in given}
    for option, (default, before) in late.items():
        if (value := values.get(option, default)) != before:
            kept.append(f"{option}={value}")
    return task + (":" if kept else "") + ",".join(kept)


def _options(words: str) -> dict[str, Any]:
    """{"shots": 3} from "shots=3". Values are JSON where they parse, else text. A comma inside brackets is no
    separator."""
    found: dict[str, Any] = {}
    for word in _SEPARATOR.split(words) if words else ():
        option, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"task option {word!r}; options are written NAME:option=value,option=value")
        try:
            found[option] = json.loads(value)
        except ValueError:
            found[option] = value
    return found
