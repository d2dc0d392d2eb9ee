"""Actions as Python: a block of code calls `apis.<app>.<tool>(...)`. It runs in the sandbox; its calls run in the
episode.

The code never accesses the database. Each call leaves the sandbox as a name and arguments, is checked like any other
call, and its result is sent back. The policy sees what the code prints. Each block runs in its own process, so
variables do not persist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codechat.sandbox import bridge
from codechat.tasks.apps.store import AppError

INTRODUCTION = "Write Python between ```python and ``` that calls these and prints what you need. "
LONGEST = 1500  # characters of output that are shown
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def spelling(tool: str) -> str:
    """notes_set_tag -> apis.notes.set_tag."""
    app, _, name = tool.partition("_")
    return f"apis.{app}.{name}"


def format_line(tool: str, arguments: Mapping[str, Any]) -> str:
    """A line of the expert's code."""
    return f"print({spelling(tool)}({', '.join(f'{name}={value!r}' for name, value in arguments.items())}))"


def as_block(source: str) -> str:
    return f"```python\n{source}\n```"


def block_of(text: str) -> str | None:
    """The source of a message's blocks, in order, or None without a block."""
    found = _BLOCK.findall(text)
    return "\n".join(found) if found else None


def run(
    source: str, offered: Mapping[str, Sequence[str]], call: Callable[[str, dict[str, Any]], Any]
) -> tuple[str, str]:
    """(printed output, reason of a failure or ""). offered: {tool: names of its parameters}."""

    def answer(name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        try:
            return True, call(name, arguments)
        except AppError as error:
            return False, str(error)

    output, problem = bridge.run(source, offered, answer)
    return output[:LONGEST], problem
