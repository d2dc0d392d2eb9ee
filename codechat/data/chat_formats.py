"""Conversations as other projects store them -> messages of our protocol (`text.chat`).

    OpenAI     {messages, tools}: content null or parts, tool_calls (arguments as JSON in a string or an object), role "tool" with tool_call_id
    ShareGPT   {conversations, system, tools}: human, gpt, function_call, observation
    Hermes     <tool_call> {...} </tool_call> in answers, <tool_response>, and schemas between <tools> and </tools>; so does Qwen
    Qwen       {text} in ChatML (<|im_start|>role), and Qwen3-Coder's <function=NAME> <parameter=NAME> in a <tool_call>

Tools are listed by `chat.tools_prompt` after the row's own system text, as the server lists them. Every call is written by `chat.format_call`;
several at once are one answer, and their results follow in the order of the calls. A message of our own form is unchanged.

A row that breaks the format raises DataError with its place. A row that is well formed and cannot be taught gives a reason of `REASONS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import DataError
from codechat.text import chat
from codechat.text.turns import Misplaced, Turn, messages_of_turns

Row = Mapping[str, Any]
Message = dict[str, str]

REASONS = (
    "no_turns",  # text that is not ChatML, or an empty list
    "not_text",  # an image or sound
    "empty_turn",  # an answer without text and without a call
    "unreadable_call",
    "text_after_call",
    "unreadable_tools",
    "result_without_call",  # the tool_call_id of no call
    "call_without_result",  # the conversation goes on without the result
)
ROLES = {
    **{role: role for role in chat.ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "ipython"), "function"),
    "developer": "system",
}
CALL_ROLES = ("function_call", "tool_call")  # ShareGPT's turns that hold nothing but calls
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>(?=\s*[\[{])(.*?)</tools>", re.DOTALL)  # the wording before it may name the tags too
_FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Unusable(Exception):
    """A row that cannot be taught; its text is one of `REASONS`."""


def holds_conversation(row: Row) -> bool:
    """True where a row has turns that `messages_of` reads."""
    text = row.get("text")
    return "messages" in row or "conversations" in row or (isinstance(text, str) and "<|im_start|>" in text)


def messages_of(row: Row, where: str, tools_style: str = "compact") -> list[Message] | str:
    """The row's messages, its tools listed in `tools_style`; or a reason of `REASONS`. DataError, beginning with `where`, for a malformed row."""
    try:
        raw = _raw_turns(row, where)
        tools = schemas(row.get("tools") or row.get("functions") or _tools_in_text(raw[0]))
        turns = [turn for each in raw for turn in _turns_of(each, where, tools)]
        turns = _with_system(_joined(turns), row, tools)
    except Unusable as reason:
        return str(reason)
    try:
        return messages_of_turns(turns, tools, tools_style)
    except Misplaced as error:
        return error.reason
    except DataError:
        return "unreadable_tools"


# ------------------------------------------------------------------ turns


def _raw_turns(row: Row, where: str) -> list[Any]:
    found = row.get("messages", row.get("conversations"))
    if found is None:
        found = [{"role": role, "content": text.strip("\n")} for role, text in _CHATML.findall(str(row.get("text")))]
        if found and found[-1]["role"] == "assistant" and not found[-1]["content"].strip():
            found.pop()  # the beginning of an answer that a prompt ends with
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise DataError(f"{where}: messages is a {type(found).__name__}; required is a list of {{role, content}}")
    if not found:
        raise Unusable("no_turns")
    return list(found)


def _turns_of(raw: Any, where: str, tools: Sequence[Row]) -> Iterator[Turn]:
    """One turn, or one for each of several results."""
    if not isinstance(raw, Mapping) or not ({"role", "from"} & raw.keys()):
        raise DataError(f"{where}: a message is {str(raw)[:80]!r}; required is an object with role and content")
    name, value = raw.get("role", raw.get("from")), raw.get("content", raw.get("value"))
    if name in CALL_ROLES:
        yield Turn("assistant", "", _calls_in(str(value)))
        return
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{where}: role {name!r} is unknown; required is one of {', '.join(ROLES)}")
    text = _text(value, role, raw, where)
    results = _RESULT.findall(text)
    if role == "assistant":
        yield _answer(text, raw, tools)
    elif results and role in ("function", "user") and not _RESULT.sub("", text).strip():
        yield from (Turn("function", result) for result in results)
    else:
        yield Turn(role, text, result_of=raw.get("tool_call_id") if role == "function" else None)


def _text(value: Any, role: str, raw: Row, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in value):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in value):
            raise Unusable("not_text")
        return "".join(str(part.get("text", "")) for part in value)
    if role == "function" and isinstance(value, (Mapping, Sequence)):
        return json.dumps(value, ensure_ascii=False)
    if role == "assistant" and value is None:
        if not (raw.get("tool_calls") or raw.get("function_call")):
            raise Unusable("empty_turn")
        return ""
    raise DataError(f"{where}: a message is {str(dict(raw))[:80]!r}; required is an object with role and content")


def _answer(text: str, raw: Row, tools: Sequence[Row]) -> Turn:
    """An assistant's turn: text, then calls, from fields or from <tool_call> tags in the text."""
    given = raw.get("tool_calls") or []
    if not isinstance(given, Sequence):
        raise Unusable("unreadable_call")
    given = list(given)
    if raw.get("function_call"):  # OpenAI's first form, one call
        given.append({"function": raw["function_call"]})
    calls = [
        _written(chat.read_call(call.get("function", call) if isinstance(call, Mapping) else call)) for call in given
    ]
    ids = [str(call["id"]) for call in given if isinstance(call, Mapping) and call.get("id")]
    if "<tool_call>" in text:
        if _CALL.sub("", text[text.index("<tool_call>") :]).strip():
            raise Unusable("text_after_call")
        for inner in _CALL.findall(text):
            calls += (
                [_xml_call(*_FUNCTION.fullmatch(inner).groups(), tools)]
                if _FUNCTION.fullmatch(inner)
                else _calls_in(inner)
            )
        text = text.partition("<tool_call>")[0]
    return Turn("assistant", text.strip() if calls else text, calls, ids if len(ids) == len(calls) else [])


def _calls_in(text: str) -> list[str]:
    """Canonical calls of JSON (an object, a list, or one after the other) with or without <tool_call> around each."""
    inner = _CALL.findall(text) or [text]
    found = [call for part in inner for call in chat.parse_calls(f"{chat.CALL_TAG} {part}")]
    if any(call.after for call in found):
        raise Unusable("text_after_call")
    return [_written(call) for call in found]


def _written(call: chat.Call) -> str:
    if call.form not in chat.READABLE:
        raise Unusable("unreadable_call")
    try:
        return chat.format_call(call.name, call.arguments)
    except DataError:
        raise Unusable("unreadable_call") from None


def _xml_call(name: str, body: str, tools: Sequence[Row]) -> str:
    """Qwen3-Coder's call: each value is text, which the tool's schema says how to read."""
    tool = next((t for t in tools if t["name"] == name.strip()), {})
    properties = (tool.get("parameters") or {}).get("properties") or {}
    arguments = {key.strip(): _typed(value, properties.get(key.strip(), {})) for key, value in _PARAMETER.findall(body)}
    return _written(chat.Call(name.strip(), arguments, "object"))


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return value


# ------------------------------------------------------------------ tools


def schemas(value: Any) -> list[dict[str, Any]]:
    """Tool schemas of a column or of the text between <tools> and </tools>, without {"type": "function", "function": ...} around them."""
    items = _scanned(value) if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    return [_schema(item) for item in items if item is not None]


def _tools_in_text(first: Any) -> str:
    """What stands between <tools> and </tools> in the system message."""
    text = first.get("content", first.get("value")) if isinstance(first, Mapping) else None
    found = _TOOLS.search(text) if isinstance(text, str) else None
    return found[1] if found else ""


def _scanned(text: str) -> list[Any]:
    """The JSON objects of a text: a list of them, one a line, or one after the other."""
    found, decoder, at = [], json.JSONDecoder(strict=False), text.find("{")
    while at >= 0:
        try:
            item, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise Unusable("unreadable_tools") from None
        found.append(item)
        at = text.find("{", end)
    return found


def _schema(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        (item,) = _scanned(item) or [None]
    inner = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise Unusable("unreadable_tools")
    parameters = inner.get("parameters") or {}
    if isinstance(parameters, str):
        (parameters,) = _scanned(parameters) or [{}]
    whole = isinstance(parameters, Mapping) and isinstance(parameters.get("required") or [], (list, tuple))
    if not whole or not isinstance(parameters.get("properties") or {}, Mapping):
        raise Unusable("unreadable_tools")
    if not {"properties", "type"} & parameters.keys():
        parameters = {"properties": dict(parameters)}  # names and types without the object around them
    described = {"name": inner["name"], "description": inner.get("description") or "", **inner}
    return described | {"parameters": {"type": "object", "properties": {}} | dict(parameters)}


def _with_system(turns: list[Turn], row: Row, tools: list[dict[str, Any]]) -> list[Turn]:
    """The turns, opened by the row's own system message without a list of tools, which is written anew."""
    if turns[0].role != "system" and isinstance(row.get("system"), str) and row["system"].strip():
        turns = [Turn("system", row["system"]), *turns]
    if not tools or turns[0].role != "system":
        return turns
    own = turns[0].content
    if listed := _TOOLS.search(own):
        own = own.partition("# Tools")[0].strip() if "# Tools" in own[: listed.start()] else ""
    return [Turn("system", own), *turns[1:]]


def _joined(turns: list[Turn]) -> list[Turn]:
    """Answer and calls that a format keeps in turns of their own as one turn."""
    made: list[Turn] = []
    for turn in turns:
        before = made[-1] if made else None
        if before and before.role == turn.role == "assistant" and turn.calls and not turn.content and not before.ids:
            before.calls += turn.calls
            before.content = before.content.strip()
        else:
            made.append(turn)
    return made
