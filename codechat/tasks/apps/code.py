"""Actions as Python: a block of code that calls `apis.<app>.<tool>(...)`, run in the sandbox with the calls bridged to the episode.

The code never meets the database: each call crosses the sandbox's walls as a name and arguments, is checked like any other call, and its result
crosses back. What the code prints is what the policy gets to see. Names do not outlive a block: each runs in a process of its own.
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
    """A call as the expert writes it."""
    return f"print({spelling(tool)}({', '.join(f'{name}={value!r}' for name, value in arguments.items())}))"


def as_block(source: str) -> str:
    return f"```python\n{source}\n```"


def block_of(text: str) -> str | None:
    """The source of a message's blocks, in order, or none where it has none."""
    found = _BLOCK.findall(text)
    return "\n".join(found) if found else None


def run(
    source: str, offered: Mapping[str, Sequence[str]], call: Callable[[str, dict[str, Any]], Any]
) -> tuple[str, str]:
    """(what it printed, why it failed or nothing). offered: the names of each tool's parameters."""

    def answer(name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        try:
            return True, call(name, arguments)
        except AppError as error:
            return False, str(error)

    output, problem = bridge.run(source, offered, answer)
    return output[:LONGEST], problem
