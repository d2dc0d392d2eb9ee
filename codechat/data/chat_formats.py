"""Conversations as other projects store them -> messages of our protocol (`text.chat`).

    OpenAI     {messages, tools}: content null or parts, tool_calls, role "tool" with tool_call_id
    ShareGPT   {conversations, system, tools}: human, gpt, function_call, observation
    Hermes     <tool_call> in answers, <tool_response>, and schemas between <tools> and </tools>; so does Qwen
    Qwen       {text} in ChatML (<|im_start|>role), and Qwen3-Coder's <function=NAME> <parameter=NAME> in a <tool_call>

Tools are listed after the row's own system text, as the server lists them. Several calls at once are one answer, and
their results follow in the order of the calls. An answer marked `weight: 0`, `train: false` or `loss: false` gets
"weight": 0 and carries no loss. A row that breaks the format raises DataError with its place; one that is well formed
and cannot be taught gives a reason of `REASONS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import DataError
from codechat.data.sources import without_nulls
from codechat.text import chat
from codechat.text.turns import Turn, Unreadable, messages_of_turns

Row = Mapping[str, Any]
Message = dict[str, Any]

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
CALL_ROLES = ("function_call", "tool_call")  # ShareGPT's turns that hold nothing but calls
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
PARAMETERS = ("parameters", "input_schema", "inputSchema")  # OpenAI's name, Anthropic's, MCP's
MARKS = ("weight", "train", "loss")  # 0 or false: an answer that carries no loss
REFUSED = ("reasoning_content", "reasoning", "thinking", "train_detail")  # of a message: they would be lost
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>(?=\s*[\[{])(.*?)</tools>", re.DOTALL)  # the wording before it may name the tags too
_FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def holds_conversation(row: Row) -> bool:
    """True where a row has turns that `messages_of` reads."""
    listed = row.get("messages") is not None or row.get("conversations") is not None
    return listed or (isinstance(text := row.get("text"), str) and "<|im_start|>" in text)


def messages_of(row: Row, where: str, tools_style: str = "compact") -> list[Message] | str:
    """The row's messages, its tools listed in `tools_style`; or a reason of `REASONS`. DataError, beginning with
    `where`, for a malformed row."""
    try:
        raw = _raw_turns(row, where)
        tools = schemas(row.get("tools") or row.get("functions") or _tools_in_text(raw[0]))
        turns = [turn for each in raw for turn in _turns_of(each, where, tools)]
        if system := column_text(row, SYSTEM_COLUMNS, where):
            if turns[0].role != "system":
                turns.insert(0, Turn("system", system))
            elif turns[0].content.strip() != system.strip():
                raise DataError(f"{where} has a system column and another system message; leave one of them out")
        return messages_of_turns(_without_list(_joined(turns), tools), tools, tools_style)
    except Unreadable as error:
        return error.reason


def column_text(row: Row, names: Sequence[str], where: str) -> str:
    """The text of the first of these columns that has one. DataError for a value that is no text, and for two texts."""
    given = {name: row[name] for name in names if row.get(name) not in (None, "")}
    if any(not isinstance(value, str) for value in given.values()) or len(set(given.values())) > 1:
        shown = " and ".join(f"{name} {str(value)[:40]!r}" for name, value in given.items())
        raise DataError(f"{where} has {shown}; required is one text; correct it, or leave a column out")
    return next((value for value in given.values() if value.strip()), "")


def continued(prompt: Any, value: Any, where: str) -> list[Any]:
    """The turns of a prompt (text, messages or None) and of what follows it: text, a message, or messages, which may
    begin with the prompt. DataError where they do not fit together."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [] if prompt is None else prompt
    after = {str: [{"role": "assistant", "content": value}], dict: [value]}.get(type(value), value)
    if not isinstance(before, list) or not isinstance(after, list) or not after:
        kinds = f"a prompt of type {type(prompt).__name__} and an answer of type {type(value).__name__}"
        raise DataError(f"{where} has {kinds}; required are text or messages")
    if not all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in (*before, *after)):
        raise DataError(f"{where} has a message without a role; required are role and content")
    (system, asked), (other_system, told) = map(_without_system, (before, after))
    said = [[(_role(m), m.get("content", m.get("value"))) for m in turns] for turns in (asked, told)]
    if asked and said[1][: len(asked)] == said[0]:
        if system and other_system and system != other_system:
            raise DataError(f"{where} has two system messages; leave one of them out")
        return [*(other_system or system), *told]
    if before and (other_system or (told and _role(told[0])) == _role(before[-1])):
        raise DataError(f"{where}: the answer's messages do not continue the prompt; begin them after it, or with it")
    return [*before, *after]


def _role(message: Row) -> Any:
    role = message.get("role") or message.get("from")
    return chat.ROLE_OF.get(role, role) if isinstance(role, str) else role


def _without_system(turns: list[Any]) -> tuple[list[Any], list[Any]]:
    first = [turn for turn in turns[:1] if _role(turn) == "system"]
    return first, turns[len(first) :]


# ------------------------------------------------------------------ turns


def _raw_turns(row: Row, where: str) -> list[Any]:
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is None:
        turns = [{"role": role, "content": text.strip("\n")} for role, text in _CHATML.findall(str(row.get("text")))]
        if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
            turns.pop()  # the beginning of an answer that a prompt ends with
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where}: messages is a {type(turns).__name__}; required is a list of {{role, content}}")
    if not turns:
        raise Unreadable("no_turns")
    return list(turns)


def _turns_of(raw: Any, where: str, tools: Sequence[Row]) -> Iterator[Turn]:
    """One turn, or one for each of several results."""
    if not isinstance(raw, Mapping) or not ({"role", "from"} & raw.keys()):
        raise DataError(f"{where}: a message is {str(raw)[:80]!r}; required is an object with role and content")
    name, value = raw.get("role") or raw.get("from"), raw.get("content", raw.get("value"))
    if dropped := [key for key in REFUSED if raw.get(key)]:
        raise DataError(f"{where}: a message has {dropped[0]}, which is not read; write it into content, or remove it")
    if name in CALL_ROLES:
        yield Turn("assistant", "", _calls_in(str(value)), weight=_weight(raw, where))
        return
    role = _role(raw)
    if role not in chat.ROLES:
        raise DataError(f"{where}: role {name!r} is unknown; required is one of {', '.join(chat.ROLE_OF)}")
    text = _text(value, role, raw, where)
    results = _RESULT.findall(text)
    if role == "assistant":
        yield _answer(text, raw, tools, _weight(raw, where))
    elif results and role in ("function", "user") and not _RESULT.sub("", text).strip():
        yield from (Turn("function", result) for result in results)
    else:
        yield Turn(role, text, result_of=raw.get("tool_call_id") if role == "function" else None)


def _weight(raw: Row, where: str) -> int:
    """0 where a mark says that the answer carries no loss, else 1."""
    marks = {name: raw[name] for name in MARKS if raw.get(name) is not None}
    for name, value in marks.items():
        if isinstance(value, str) or value not in (0, 1):
            raise DataError(f"{where}: a message has {name} {value!r}; required is 0, 1, true or false")
    return int(all(marks.values()))


def _text(value: Any, role: str, raw: Row, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in value):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in value):
            raise Unreadable("not_text")
        return "".join(str(part.get("text", "")) for part in value)
    if role == "function" and isinstance(value, (Mapping, Sequence)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if role == "assistant" and value is None:
        if not (raw.get("tool_calls") or raw.get("function_call")):
            raise Unreadable("empty_turn")
        return ""
    raise DataError(f"{where}: a message is {str(dict(raw))[:80]!r}; required is an object with role and content")


def _answer(text: str, raw: Row, tools: Sequence[Row], weight: int) -> Turn:
    """An assistant's turn: text, then calls, from fields or from <tool_call> tags in the text."""
    given = raw.get("tool_calls") or []
    if not isinstance(given, Sequence):
        raise Unreadable("unreadable_call")
    given = [*given, *([{"function": raw["function_call"]}] if raw.get("function_call") else [])]  # OpenAI's first form
    calls = [_call(call.get("function", call) if isinstance(call, Mapping) else call, tools) for call in given]
    ids = [str(call["id"]) for call in given if isinstance(call, Mapping) and call.get("id")]
    if "<tool_call>" in text:
        text, tagged = text[: text.index("<tool_call>")], text[text.index("<tool_call>") :]
        if _CALL.sub("", tagged).strip():
            raise Unreadable("text_after_call")
        for inner in _CALL.findall(tagged):
            xml = _FUNCTION.fullmatch(inner)
            calls += [_xml_call(*xml.groups(), tools)] if xml else _calls_in(inner)
    content = text.strip() if calls else text
    return Turn("assistant", content, calls, ids if len(ids) == len(calls) else [], weight=weight)


def _calls_in(text: str) -> list[str]:
    """Canonical calls of JSON (an object, a list, or one after the other) with or without <tool_call> around each."""
    calls = [call for part in _CALL.findall(text) or [text] for call in chat.parse_calls(f"{chat.CALL_TAG} {part}")]
    if any(call.after for call in calls):
        raise Unreadable("text_after_call")
    return [written(call) for call in calls]


def _call(function: Any, tools: Sequence[Row]) -> str:
    """The canonical call of a field. A null argument that the tool does not have is padding (`sources.unpadded`)."""
    call = chat.read_call(function)
    tool = next((tool for tool in tools if tool["name"] == call.name), None)
    if tool and call.form in ("object", "parameters"):
        known = tool["parameters"]["properties"]
        kept = {k: without_nulls(v) for k, v in call.arguments.items() if v is not None or k in known}
        call = call._replace(arguments=kept)
    return written(call)


def written(call: chat.Call) -> str:
    """The canonical text of a call that was read."""
    if call.form not in chat.READABLE:
        raise Unreadable("unreadable_call")
    try:
        return chat.format_call(call.name, call.arguments)
    except DataError:
        raise Unreadable("unreadable_call") from None


def _xml_call(name: str, body: str, tools: Sequence[Row]) -> str:
    """Qwen3-Coder's call: each value is text, which the tool's schema says how to read."""
    properties = next((t["parameters"]["properties"] for t in tools if t["name"] == name.strip()), {})
    arguments = {key.strip(): _typed(value, properties.get(key.strip(), {})) for key, value in _PARAMETER.findall(body)}
    return written(chat.Call(name.strip(), arguments, "object"))


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return value


# ------------------------------------------------------------------ tools


def schemas(value: Any) -> list[dict[str, Any]]:
    """Tool schemas of a column or of the text between <tools> and </tools>, without the object around a function."""
    items = scanned(value) if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    return [_schema(item) for item in items if item is not None]


def _tools_in_text(first: Any) -> str:
    """What stands between <tools> and </tools> in the system message."""
    text = first.get("content", first.get("value")) if isinstance(first, Mapping) else None
    listed = _TOOLS.search(text) if isinstance(text, str) else None
    return listed[1] if listed else ""


def scanned(text: str) -> list[Any]:
    """The JSON objects of a text: a list of them, one a line, or one after the other."""
    items, decoder, at = [], json.JSONDecoder(strict=False), text.find("{")
    while at >= 0:
        try:
            item, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise Unreadable("unreadable_tools") from None
        items.append(item)
        at = text.find("{", end)
    return items


def _schema(item: Any) -> dict[str, Any]:
    """A schema with name, description and an object of parameters, without null fields."""
    if isinstance(item, str):
        item = items[0] if len(items := scanned(item)) == 1 else None
    inner = without_nulls(item.get("function") or item) if isinstance(item, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise Unreadable("unreadable_tools")
    parameters = next((inner[name] for name in PARAMETERS if inner.get(name)), {})
    if isinstance(parameters, str):
        parameters = without_nulls((scanned(parameters) or [{}])[0])
    whole = isinstance(parameters, Mapping) and isinstance(parameters.get("required") or [], (list, tuple))
    if not whole or not isinstance(parameters.get("properties") or {}, Mapping):
        raise Unreadable("unreadable_tools")
    if not {"properties", "type"} & parameters.keys():
        parameters = {"properties": dict(parameters)}  # names and types without the object around them
    parameters = {"type": "object", "properties": {}} | dict(parameters)
    rest = {key: value for key, value in inner.items() if key not in PARAMETERS}
    return {"name": inner["name"], "description": "", **rest, "parameters": parameters}


def _without_list(turns: list[Turn], tools: list[dict[str, Any]]) -> list[Turn]:
    """The turns without the row's own list of tools in the system message: it is written anew."""
    listed = _TOOLS.search(turns[0].content) if tools and turns[0].role == "system" else None
    if not listed:
        return turns
    text = turns[0].content
    text = text.partition("# Tools")[0].strip() if "# Tools" in text[: listed.start()] else ""
    return [Turn("system", text), *turns[1:]]


def _joined(turns: list[Turn]) -> list[Turn]:
    """Answer and calls that a format keeps in turns of their own as one turn."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else None
        both = before and before.role == turn.role == "assistant" and before.weight == turn.weight
        if both and turn.calls and not turn.content and not before.ids:
            before.calls += turn.calls
            before.content = before.content.strip()
        else:
            joined.append(turn)
    return joined
