"""Problems with their own reward, by name.

The library has one task of its own, `toy`, and reads rows and functions of one's own (`custom`,
`tools`). Every other
task is a class of a file or module, or of an installed package that names it in its entry
points `codechat.tasks`, as the laboratory does. `load` imports a task's module at that moment,
so names and help texts cost nothing."""

import inspect
import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import file_record
from codechat.core.errors import ConfigError, DataError, UserError, check_choice
from codechat.tasks.base import (
    SPLITS as SPLITS,
)
from codechat.tasks.base import (
    Problem as Problem,
)
from codechat.tasks.base import (
    Score as Score,
)
from codechat.tasks.base import (
    Task as Task,
)
from codechat.tasks.base import (
    check_reference_solutions as check_reference_solutions,
)
from codechat.tasks.base import (
    check_reward as check_reward,
)
from codechat.tasks.base import (
    score_all as score_all,
)
from codechat.tasks.custom import RowsTask as RowsTask
from codechat.tasks.tools import ToolsTask
from codechat.tasks.toy import ToyTask
from codechat.text.tool_functions import run_file

GROUP = "codechat.tasks"  # of the entry points
# name -> class; a program may add one of its own: tasks.TASKS["mine"] = MyTask
TASKS: dict[str, Callable[..., Task]] = {"tools": ToolsTask, "toy": ToyTask}
OWN = tuple(TASKS)  # of the library itself
NAMES = tuple(sorted({*TASKS, *entry_points(group=GROUP).names}))
_FILE = re.compile(r"(?P<path>.+?\.py)(?::(?P<cls>[A-Za-z_]\w*))?(?::(?P<options>.*))?")
_MODULE = re.compile(
    r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):(?P<cls>[A-Za-z_]\w*)(?::(?P<options>.*))?"
)
_SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma inside brackets is no separator


def find_installed(name: str) -> Callable[..., Task] | None:
    """The class that an installed distribution declares under this name in its entry points;
    None if there is none. ConfigError if the name belongs to this package too, or to two
    distributions; DataError if the class cannot be imported."""
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        return None
    owners = [point.dist.name if point.dist else point.value for point in points]
    if name in OWN:
        owners.insert(0, "codechat")
    if len(owners) > 1:
        raise ConfigError(
            f"task {name!r} is declared by {' and '.join(owners)}; uninstall or rename one of them"
        )
    return _load_class(points[0], owners[0])


def _load_class(point: EntryPoint, owner: str) -> Callable[..., Task]:
    """DataError if the class cannot be imported, or is no task."""
    try:
        made: Callable[..., Task] = point.load()
        if not isinstance(made, Task):
            raise TypeError(f"{point.value} is no task")
    except (Exception, SystemExit) as error:  # the package is the user's and may raise anything
        remedy = "correct it, or install its package"
        raise DataError(
            f"task {point.name!r} of {owner}: {type(error).__name__}: {error}; {remedy}"
        ) from error
    return made


def find_class(name: str) -> tuple[Callable[..., Task], str]:
    """(class of the task called NAME:OPTIONS, FILE.py:CLASS:OPTIONS or
    PACKAGE.MODULE:CLASS:OPTIONS, the options); without CLASS the only task of the file. NAME is
    of this package or of an installed one.

    MissingFile, DataError (the file or package fails); ConfigError names the nearest known task."""
    known = sorted({*TASKS, *entry_points(group=GROUP).names})
    named = name.partition(":")[0] in known  # tools:my_tools.py is no file
    match = None if named else _FILE.fullmatch(name)
    if match:
        module = run_file(
            Path(match["path"]),
            "task",
            "--task takes a file and a class, such as my_task.py:MyTask",
        )
        own = [
            value
            for value in vars(module).values()
            if getattr(value, "__module__", "") == module.__name__
        ]
        tasks = {
            value.__name__: value
            for value in own
            if isinstance(value, type) and isinstance(value, Task)
        }
        cls = match["cls"] or (next(iter(tasks)) if len(tasks) == 1 else "")
        check_choice(f"{match['path']}: task class", cls, tasks)
        return tasks[cls], match["options"] or ""
    match = _MODULE.fullmatch(name)
    if match:
        point = EntryPoint(name=name, value=f"{match['module']}:{match['cls']}", group=GROUP)
        return _load_class(point, match["module"]), match["options"] or ""
    name, _, words = name.partition(":")
    made = find_installed(name)
    if made:
        return made, words
    check_choice("task", name, known)
    return TASKS[name], words


def load(name: str, *, source: Any = None, **options: Any) -> Task:
    """The task called `name`, with options in the name or as keywords:
    "sums:digits=3,timeout_s=2". A task of a file is "my_task.py:MyTask" or
    "my_task.py:MyTask:level=2", one of a module "my_package.my_task:MyTask". source: where its
    problems are; none = the task's own.

    ConfigError for an unknown name or option, and for a value of the wrong type."""
    make, words = find_class(name)
    options = _options(words, getattr(make, "first_option", "")) | options
    if source:
        options.setdefault("source", source)
    try:
        return make(**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        known = ", ".join(inspect.signature(make).parameters) or "none"
        raise ConfigError(
            f"task {name!r} does not accept {options} ({error}); its options: {known}"
        ) from None


def hash_code(task: Task) -> str:
    """Of the file that defines the task; "" where there is none, as in a notebook."""
    try:
        return str(file_record(Path(inspect.getfile(type(task))))["sha256"])
    except (TypeError, OSError):
        return ""


def name_of(task: str | Task | type) -> str:
    """The name under which `load` finds a task: itself, or that of an object or a class, which
    is registered for this process.

    ConfigError for what is no task, and for a name that this package uses."""
    if isinstance(task, str):
        return task
    instance = task() if isinstance(task, type) else task
    if not isinstance(instance, Task):
        needed = (
            "a task, its name, or FILE.py:CLASS; a task has name, tiers, "
            "max_reward, problems, prompt, score and gold"
        )
        raise ConfigError(f"{type(instance).__name__} is no task; give {needed}")
    if instance.name in NAMES:
        raise ConfigError(
            f"task name {instance.name!r} is taken; set another `name` in {type(instance).__name__}"
        )
    TASKS[instance.name] = lambda: instance
    return instance.name


def _options(words: str, first: str) -> dict[str, Any]:
    """{"timeout_s": 3} from "timeout_s=3". Values are JSON where they parse, else text. first:
    the option whose name the first word may leave out; empty for none."""
    options: dict[str, Any] = {}
    for place, word in enumerate(_SEPARATOR.split(words) if words else ()):
        if first and not place and "=" not in word:
            word = f"{first}={word}"
        option, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(
                f"task option {word!r}; options are written NAME:option=value,option=value"
            )
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return options
