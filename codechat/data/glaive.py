"""glaive-function-calling-v2 and rows in its layout: {system, chat} -> messages.

`system` is "SYSTEM: ..." followed by JSON schemas of functions, or says that there are none. `chat` holds turns that
open with USER:, ASSISTANT: (some rows A:) and FUNCTION RESPONSE:. Calls are `<functioncall> {...}`, sometimes after
prose; text after one is a reason to drop the row, since the canonical form has none.
"""

from __future__ import annotations

import re
from typing import Any

from codechat.core.errors import DataError
from codechat.data import chat_formats
from codechat.text import chat
from codechat.text.turns import Unreadable

Row = dict[str, Any]
Message = dict[str, str]

COLUMNS = ("system", "chat")
REASONS = ("no_turns", "no_assistant", "unreadable_call", "text_after_call", "unreadable_tools")
CALL = chat.CALL_TAG
_TURN = re.compile(r"(?:\A|\n[ \t]*\n)\s*(USER|ASSISTANT|A|FUNCTION RESPONSE):[ \t]?")
_END = "<|endoftext|>"


def turns(text: str) -> list[Message]:
    """The turns of a `chat` cell, contents stripped, without empty ones."""
    marks: list[tuple[str, int, int]] = []
    for match in _TURN.finditer(text):
        role = "assistant" if match[1] == "A" else chat.ROLE_OF[match[1].lower().replace(" ", "_")]
        if match[1] == "A" and marks and marks[-1][0] == "assistant":
            continue  # a paragraph of the answer that happens to begin with "A:"
        marks.append((role, match.start(), match.end()))
    ends = [start for _, start, _ in marks[1:]] + [len(text)]
    contents = [(role, text[begin:end].replace(_END, "").strip()) for (role, _, begin), end in zip(marks, ends)]
    return [{"role": role, "content": content} for role, content in contents if content]


def conversation(row: Row, tools_style: str = "compact") -> list[Message] | str:
    """Messages with the tools listed in `tools_style` and every call in canonical form; or a reason of `REASONS`."""
    chat_cell, system_cell = row.get("chat"), row.get("system")
    messages = turns(chat_cell) if isinstance(chat_cell, str) else []
    if not messages:
        return "no_turns"
    if not any(m["role"] == "assistant" for m in messages):
        return "no_assistant"
    if not isinstance(system_cell, str):
        return "unreadable_tools"
    try:
        offered = chat_formats.schemas(system_cell)
        system = chat.tools_prompt(offered, tools_style) if offered else system_cell.removeprefix("SYSTEM:").strip()
    except DataError:
        return "unreadable_tools"
    try:
        messages = [m | {"content": _canonical(m["content"])} if m["role"] == "assistant" else m for m in messages]
    except Unreadable as error:
        return error.reason
    return [{"role": "system", "content": system}, *messages] if system else messages


def _canonical(content: str) -> str:
    """An assistant turn with its calls in canonical form after its prose."""
    calls = chat.parse_calls(content)
    if any(call.after for call in calls):
        raise Unreadable("text_after_call")
    if CALL in content and not calls:
        raise Unreadable("unreadable_call")
    prose = content.partition(CALL)[0].strip() if calls else content
    return "\n".join([*([prose] if prose else []), *map(chat_formats.written, calls)])
