"""Problems with their own reward, by name.

The library has one task of its own, `toy`, and reads rows of one's own (`custom`). Every other task is a class of a
file, or of an installed package that names it in its entry points `codechat.tasks`; the laboratory's tasks are
found so too.
`load` imports a task's module at that moment, so names and help texts cost nothing.
"""

import inspect
import json
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError, UserError, check_choice
from codechat.tasks.base import (
    SPLITS,
    Problem,
    ReferenceCheck,
    Score,
    Task,
    check_reference_solutions,
    check_reward,
    score_all,
)
from codechat.tasks.custom import RowsTask
from codechat.tasks.toy import ToyTask
from codechat.text.tool_functions import run_file

GROUP = "codechat.tasks"  # of the entry points
# name -> class; a program may add one of its own: tasks.TASKS["mine"] = MyTask
TASKS: dict[str, Callable[..., Task]] = {"toy": ToyTask}
OWN = tuple(TASKS)  # of the library itself
NAMES = tuple(sorted({*TASKS, *entry_points(group=GROUP).names}))
_FILE = re.compile(r"(?P<path>.+?\.py)(?::(?P<cls>[A-Za-z_]\w*))?(?::(?P<options>.*))?")
_SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma inside brackets is no separator
__all__ = [
    "NAMES",
    "SPLITS",
    "TASKS",
    "Problem",
    "ReferenceCheck",
    "RowsTask",
    "Score",
    "Task",
    "check_reference_solutions",
    "check_reward",
    "find_class",
    "load",
    "name_of",
    "score_all",
]


def find_installed(name: str) -> Callable[..., Task] | None:
    """The class that an installed distribution declares under this name in its entry points; None where no one
    does. ConfigError where the name is of this package or of two distributions; DataError where the class cannot be
    imported."""
    points = [*entry_points(group=GROUP, name=name)]
    owners = ["codechat"] * (name in OWN) + [point.dist.name for point in points]
    if points and len(owners) > 1:
        raise ConfigError(f"task {name!r} is declared by {' and '.join(owners)}; uninstall or rename one of them")
    try:
        if points and not isinstance(made := points[0].load(), Task):
            raise TypeError(f"{points[0].value} is no task")
    except (Exception, SystemExit) as error:  # the package is the user's and may raise anything
        raise DataError(f"task {name!r} of {owners[0]}: {type(error).__name__}: {error}; correct it") from error
    return made if points else None


def find_class(name: str) -> tuple[Callable[..., Task], str]:
    """(class of the task called NAME:OPTIONS or FILE.py:CLASS:OPTIONS, the options); without CLASS the only task of
    the file. NAME is of this package or of an installed one.

    MissingFile, DataError (the file or package fails); ConfigError names the nearest known task."""
    match = _FILE.fullmatch(name)
    if match:
        module = run_file(Path(match["path"]), "task", "--task takes a file and a class, such as my_task.py:MyTask")
        classes = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
        tasks = {k: v for k, v in classes.items() if isinstance(v, Task)}
        cls = match["cls"] or (next(iter(tasks)) if len(tasks) == 1 else None)
        check_choice(f"{match['path']}: task class", cls, tasks)
        return tasks[cls], match["options"] or ""
    name, _, words = name.partition(":")
    made = find_installed(name)
    if made:
        return made, words
    check_choice("task", name, [*TASKS, *entry_points(group=GROUP).names])
    return TASKS[name], words


def load(name: str, *, source: Any = None, **options: Any) -> Task:
    """The task called `name`, with options in the name or as keywords: "mbpp:variant=sanitized,timeout_s=3". A file
    of your own is "my_task.py:MyTask" or "my_task.py:MyTask:level=2". source: where its problems are; none = what
    the task has.

    ConfigError for an unknown name or option, and for a value of the wrong type."""
    make, words = find_class(name)
    options = _options(words) | ({"source": source} if source else {}) | options
    try:
        return make(**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        known = ", ".join(inspect.signature(make).parameters) or "none"
        raise ConfigError(f"task {name!r} does not accept {options} ({error}); its options: {known}") from None


def name_of(task: str | Task | type) -> str:
    """The name under which `load` finds a task: itself, or that of an object or a class, which is registered for
    this process.

    ConfigError for what is no task, and for a name that this package uses."""
    if isinstance(task, str):
        return task
    instance = task() if isinstance(task, type) else task
    if not isinstance(instance, Task):
        needed = (
            "a task, its name, or FILE.py:CLASS; a task has name, tiers, max_reward, problems, prompt, score and gold"
        )
        raise ConfigError(f"{type(instance).__name__} is no task; give {needed}")
    if instance.name in NAMES:
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
