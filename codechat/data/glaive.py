"""glaive-function-calling-v2 and rows in its layout: {system, chat} -> messages.

`system` is "SYSTEM: ..." followed by JSON schemas of functions, or says that there are none. `chat` holds turns that open with USER:, ASSISTANT:
(some rows A:) and FUNCTION RESPONSE:, two or three line ends apart; assistant turns close with <|endoftext|>. Calls are `<functioncall> {...}`
with arguments as an object, as JSON in single quotes, or worse, sometimes after prose. `chat.parse_calls` reads them and `conversation` writes
each one in the canonical form. A row with text after a call is dropped for that reason: the canonical form has none, and a model that learned
to write it would be marked down by the staircase.

Left out: judging whether a call is right (tasks.funcall).
"""

from __future__ import annotations

import json
import re
from typing import Any

from codechat.core.errors import DataError
from codechat.data.chat_formats import ROLES
from codechat.text import chat

Row = dict[str, Any]
Message = dict[str, str]

COLUMNS = ("system", "chat")
REASONS = ("no_turns", "no_assistant", "unreadable_call", "text_after_call", "unreadable_tools")
CALL = chat.CALL_TAG
_TURN = re.compile(r"(?:\A|\n[ \t]*\n)\s*(USER|ASSISTANT|A|FUNCTION RESPONSE):[ \t]?")
_END = "<|endoftext|>"


def turns(text: str) -> list[Message]:
    """The turns of a `chat` cell, contents stripped, without empty ones."""
    found: list[tuple[str, int, int]] = []
    for match in _TURN.finditer(text):
        role = "assistant" if match.group(1) == "A" else ROLES[match.group(1).lower().replace(" ", "_")]
        if match.group(1) == "A" and found and found[-1][0] == "assistant":
            continue  # a paragraph of the answer that happens to begin with "A:"
        found.append((role, match.start(), match.end()))
    made = []
    for (role, _, begin), (_, end, _) in zip(found, [*found[1:], ("", len(text), 0)], strict=False):
        content = text[begin:end].replace(_END, "").strip()
        if content:
            made.append({"role": role, "content": content})
    return made


def tools(system: str) -> list[dict[str, Any]]:
    """Function schemas of a `system` cell, [] where it offers none. ValueError where they are not JSON."""
    made, decoder, at = [], json.JSONDecoder(), system.find("{")
    while at >= 0:
        schema, end = decoder.raw_decode(system, at)
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            raise ValueError("a function schema without a name")
        made.append({"description": "", "parameters": {"type": "object", "properties": {}}} | schema)
        at = system.find("{", end)
    return made


def conversation(row: Row, tools_style: str = "compact") -> list[Message] | str:
    """Messages with the tools listed in `tools_style` (see `chat.tools_prompt`) and every call in canonical form; or a reason of `REASONS`."""
    chat_cell, system_cell = row.get("chat"), row.get("system")
    messages = turns(chat_cell) if isinstance(chat_cell, str) else []
    if not messages:
        return "no_turns"
    if not any(m["role"] == "assistant" for m in messages):
        return "no_assistant"
    if not isinstance(system_cell, str):
        return "unreadable_tools"
    try:
        offered = tools(system_cell)
        listed = chat.tools_prompt(offered, tools_style) if offered else ""
    except ValueError:  # not JSON, or a DataError: a schema that cannot be listed
        return "unreadable_tools"
    for message in messages:
        if message["role"] == "assistant" and CALL in message["content"]:
            if any(call.after for call in chat.parse_calls(message["content"])):
                return "text_after_call"
            content = canonical(message["content"])
            if content is None:
                return "unreadable_call"
            message["content"] = content
    system = listed or system_cell.removeprefix("SYSTEM:").strip()
    return [{"role": "system", "content": system}, *messages] if system else messages


def canonical(content: str) -> str | None:
    """An assistant turn with its calls in canonical form, after the prose before them, without text after one of them; None where one cannot be
    read."""
    calls = chat.parse_calls(content)
    if not calls or any(not call.name or not isinstance(call.arguments, dict) for call in calls):
        return None
    prose = content.partition(CALL)[0].strip()
    try:
        written = [chat.format_call(call.name, call.arguments) for call in calls]
    except DataError:  # NaN and infinities, which Python's reader takes and JSON does not know
        return None
    return "\n".join([*([prose] if prose else []), *written])
