"""The task of a command: by its name, or a file of functions. No torch here: `--help` reads this
class."""

import json
import re
from dataclasses import dataclass

from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError
from codechat.tasks import NAMES, name_of

TOOLS = (
    "functions to call, a task with the rows of --data-dir: a Python file, names of its functions"
)
TRUST = "run the functions of --tools in this process instead of the sandbox"


@dataclass(frozen=True, kw_only=True)
class TaskChoice(Settings):
    """What is trained on or measured."""

    task: str = opt(
        "",
        f"task: {', '.join(NAMES)}, FILE.py:CLASS, or "
        "PACKAGE.MODULE:CLASS; with options NAME:OPTION=VALUE",
        reads="path",
    )
    tools: tuple[str, ...] = opt((), TOOLS, reads="path")
    trust: bool = opt(False, TRUST)

    def __post_init__(self) -> None:
        super().__post_init__()
        # an object or a class of a notebook, by its name
        name = name_of(self.task) if self.task else ""
        made = tools_task(self.tools, self.trust) if self.tools else name
        if not made:
            raise ConfigError(
                "got no task; set --task NAME, or --tools FILE.py and --data-dir ROWS"
            )
        if name and name != made:
            raise ConfigError(f"got --task {name} and --tools {' '.join(self.tools)}; keep one")
        object.__setattr__(self, "task", made)


def tools_task(words: tuple[str, ...], trust: bool) -> str:
    """The name of the task of --tools."""
    named = f"tools={json.dumps(words)}"
    if len(words) == 1 and re.fullmatch(r"[\w./-]+", words[0]):
        named = words[0]
    if trust:
        named += ",trust=true"
    return f"tools:{named}"
