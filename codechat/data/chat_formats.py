"""Rows of any public form -> messages of our protocol (`text.chat`).

    OpenAI        {messages, tools}: content null or parts, tool_calls, role "tool" with tool_call_id
    ShareGPT      {conversations, system, tools}: human, gpt, function_call, observation
    Hermes, Qwen  <tool_call> in answers, <tool_response>, schemas between <tools> and </tools>; {text} in ChatML
    glaive        {system, chat}: schemas, then USER:, ASSISTANT: and FUNCTION RESPONSE: with <functioncall> {...}
    tool sets     {question, functions, ground_truth}: messages, schemas and the calls that answer them, also as json text
    instructions  {instruction, input, output}, {prompt, completion}, {question, answer}, ..., with system and history

Tools are listed after the row's own system text, as the server lists them. Several calls at once are one answer, and
their results follow in the order of the calls. An answer marked `weight: 0` or `train: false` gets "weight": 0
and carries no loss.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import DataError
from codechat.data.sources import without_nulls
from codechat.text import chat
from codechat.text.tool_calls import Turn, Unreadable, messages_of_turns

Row = Mapping[str, Any]
Message = dict[str, Any]

REQUESTS = ("instruction", "prompt", "question", "query", "text")
ANSWERS = ("output", "completion", "code", "answer", "response")
INPUTS = ("input", "context")
NO_INPUT = ("", "n/a", "none", "<noinput>", "no input", "not applicable")
SYSTEM_COLUMNS = ("system", "system_prompt")
NO_CALL = "I have no function for that."
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_GLAIVE = re.compile(r"(?:\A|\n[ \t]*\n)\s*(USER|ASSISTANT|A|FUNCTION RESPONSE):[ \t]?")
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>(?=\s*[\[{])(.*?)</tools>", re.DOTALL)  # the wording before it may name the tags too
_FENCED = re.compile(
    r'\A\s*```(?:json)?\s*([\[{].*"name".*[\]}])\s*```\s*\Z', re.DOTALL
)  # calls in the turns of tool sets
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def messages_of(row: Row, where: str, tools_style: str = "compact") -> list[Message] | str:
    """The row's messages, its tools listed in `tools_style`; or the reason why it cannot be taught. DataError, beginning
    with `where`, for a malformed row."""
    try:
        row = _glaive(row) if row.get("chat") is not None else row
        row = _tool_set(row) if row.get("ground_truth") is not None else row
        raw = _raw_turns(row, where)
        first = raw[0].get("content", raw[0].get("value")) if isinstance(raw[0], Mapping) else None
        listed = _TOOLS.search(first) if isinstance(first, str) else None  # in the system message
        tools = schemas(row.get("tools") or (listed[1] if listed else ""))
        turns = [turn for each in raw for turn in _turns_of(each, where, tools)]
        if system := system_text(row, where):
            if turns[0].role != "system":
                turns.insert(0, Turn("system", system))
            elif turns[0].content.strip() != system.strip():
                raise DataError(f"{where} has a system column and another system message; leave one of them out")
        if tools and turns[0].role == "system" and (listed := _TOOLS.search(turns[0].content)):  # they are written anew
            text, heading, _ = turns[0].content[: listed.start()].partition("# Tools")
            turns[0] = Turn("system", text.strip() if heading else "")
        return messages_of_turns(_joined(turns), tools, tools_style)
    except Unreadable as error:
        return error.reason


def _raw_turns(row: Row, where: str) -> list[Any]:
    """The turns of a row as it has them."""
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    text, prompt = row.get("text"), row.get("prompt")
    if turns is None and isinstance(text, str) and "<|im_start|>" in text:
        turns = [{"role": role, "content": content.strip("\n")} for role, content in _CHATML.findall(text)]
        if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
            turns.pop()  # the beginning of an answer that a prompt ends with
    elif turns is None and isinstance(prompt, list):
        turns = continued(prompt, row.get("completion"), where)
    elif turns is None:
        user, answer = request_text(row), cleaned(_text_column(row, ANSWERS))
        if not user or not answer:
            raise Unreadable("no_answer" if user else "no_instruction")
        turns = [*turns_before(row, where), {"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where}: messages is a {type(turns).__name__}; required is a list of {{role, content}}")
    if not turns:
        raise Unreadable("no_turns")
    return list(turns)


def glaive_turns(text: str) -> list[Message]:
    """The turns of a `chat` cell, contents stripped, without empty ones."""
    marks = [*_GLAIVE.finditer(text)]
    # a paragraph of an answer may happen to begin with "A:"
    marks = [m for before, m in zip([None, *marks], marks) if not (m[1] == "A" and before and before[1][0] == "A")]
    ends = [m.start() for m in marks[1:]] + [len(text)]
    contents = [(m[1], text[m.end() : end].replace("<|endoftext|>", "").strip()) for m, end in zip(marks, ends)]
    roles = {"USER": "user", "FUNCTION RESPONSE": "function"}
    return [{"role": roles.get(name, "assistant"), "content": content} for name, content in contents if content]


def _glaive(row: Row) -> Row:
    """The row in OpenAI's form, calls tagged as Hermes does."""
    text, system = row["chat"], row.get("system")
    turns = glaive_turns(text) if isinstance(text, str) else []
    for turn in turns:
        if turn["role"] == "assistant":
            turn["content"] = turn["content"].replace(chat.CALL_TAG, "<tool_call>")
    if not turns or not isinstance(system, str):
        raise Unreadable("unreadable_tools" if turns else "no_turns")
    tools = schemas(system)
    return {"messages": turns, "tools": tools, "system": "" if tools else system.removeprefix("SYSTEM:").strip()}


def _tool_set(row: Row) -> Row:
    """The row in OpenAI's form; where no call is right, the answer says so."""
    try:
        turns, calls = (json.loads(v) if isinstance(v := row[k], str) else v for k in ("question", "ground_truth"))
        answer = {"tool_calls": list(calls)} if calls else {"content": NO_CALL}
        for at, turn in enumerate(turns := list(turns)):
            if turn.get("role") == "assistant" and isinstance(text := turn.get("content"), str):
                turns[at] = {**turn, "content": _FENCED.sub(r"<tool_call>\1", text)}
        return {"messages": [*turns, {"role": "assistant", **answer}], "tools": row["functions"]}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Unreadable("bad_row") from None


def request_text(row: Row) -> str:
    """The request of an instruction row, with its input."""
    user, extra = cleaned(_text_column(row, REQUESTS)), cleaned(_text_column(row, INPUTS))
    return user if extra.lower() in NO_INPUT or not user else f"{user}\n\n{extra}"


def turns_before(row: Row, where: str) -> list[Message]:
    """The turns before an instruction: its system column, and `history`, a list of [request, answer] or of messages."""
    system = system_text(row, where)
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    for entry in history if isinstance(history := row.get("history") or [], list) else [history]:
        if isinstance(entry, list) and [*map(type, entry)] == [str, str]:
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), entry)]
        elif isinstance(entry, dict):
            turns.append(entry)
        else:
            raise DataError(f"{where} has {str(entry)[:80]} in history; required is [[request, answer], ...]")
    return turns


def system_text(row: Row, where: str) -> str:
    """The text of the system columns. DataError for a value that is no text, and for two texts."""
    given = {row[name] for name in SYSTEM_COLUMNS if isinstance(row.get(name), str) and row[name].strip()}
    if len(given) > 1 or any(row.get(name) and not isinstance(row[name], str) for name in SYSTEM_COLUMNS):
        shown = " and ".join(f"{name} {str(row[name])[:40]!r}" for name in SYSTEM_COLUMNS if row.get(name))
        raise DataError(f"{where} has {shown}; required is one text; correct it, or leave a column out")
    return next(iter(given), "")


def _text_column(row: Row, columns: Sequence[str]) -> str:
    return next((text for c in columns if isinstance(text := row.get(c), str) and text.strip()), "")


def cleaned(text: str) -> str:
    """The text without blank lines before it and space after it. The indentation of its first line stays."""
    return _BLANK_LINES.sub("", text.replace("\r\n", "\n")).rstrip()


def continued(prompt: Any, value: Any, where: str) -> list[Any]:
    """The turns of a prompt (text, messages or None) and of what follows it: text, a message, or messages, which may
    begin with the prompt. DataError where they do not fit together."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [] if prompt is None else prompt
    after = {str: [{"role": "assistant", "content": value}], dict: [value]}.get(type(value), value)
    listed = isinstance(before, list) and isinstance(after, list) and len(after) > 0
    if not listed or not all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in (*before, *after)):
        got = f"a prompt of {type(prompt).__name__} and an answer of {type(value).__name__}"
        raise DataError(f"{where}: {got}; both must be texts, or messages with role and content")
    (system, asked), (other_system, told) = (
        (turns[:n], turns[n:]) for turns in (before, after) for n in [sum(_role(m) == "system" for m in turns[:1])]
    )
    first, again = ([(_role(m), m.get("content", m.get("value"))) for m in turns] for turns in (asked, told))
    if asked and again[: len(asked)] == first:
        if system and other_system and system != other_system:
            raise DataError(f"{where} has two system messages; leave one of them out")
        return [*(other_system or system), *told]
    if before and (other_system or (told and _role(told[0])) == _role(before[-1])):
        raise DataError(f"{where}: the answer's messages do not continue the prompt; begin them after it, or with it")
    return [*before, *after]


def _role(message: Row) -> Any:
    role = message.get("role") or message.get("from")
    return chat.ROLE_OF.get(role, role) if isinstance(role, str) else role


def _turns_of(raw: Any, where: str, tools: Sequence[Row]) -> Iterator[Turn]:
    """One turn, or one for each of several results."""
    if not isinstance(raw, Mapping) or not ({"role", "from"} & raw.keys()):
        raise DataError(f"{where}: a message is {str(raw)[:80]!r}; required is an object with role and content")
    role, value, weight = _role(raw), raw.get("content", raw.get("value")), 1
    if dropped := [key for key in ("reasoning_content", "reasoning", "thinking") if raw.get(key)]:  # it would be lost
        raise DataError(f"{where}: a message has {dropped[0]}, which is not read; write it into content, or remove it")
    if role in ("assistant", "function_call", "tool_call"):
        marks = {name: raw[name] for name in ("weight", "train") if raw.get(name) is not None}
        if any(isinstance(mark, str) or mark not in (0, 1) for mark in marks.values()):
            raise DataError(f"{where}: a message has {marks}; required are 0, 1, true or false")
        weight = int(all(marks.values()))
    if role in ("function_call", "tool_call"):  # ShareGPT's turns that hold nothing but calls
        yield Turn("assistant", "", _calls_in(str(value)), weight=weight)
        return
    if role not in chat.ROLES:
        raise DataError(f"{where}: role {role!r} is unknown; required is one of {', '.join(chat.ROLE_OF)}")
    text = _text(value, role, raw, where)
    results = _RESULT.findall(text)
    if role == "assistant":
        yield _answer(text, raw, tools, weight)
    elif results and role in ("function", "user") and not _RESULT.sub("", text).strip():
        yield from (Turn("function", result) for result in results)
    else:
        yield Turn(role, text, result_of=raw.get("tool_call_id") if role == "function" else None)


def _text(value: Any, role: str, raw: Row, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in value):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in value):
            raise Unreadable("not_text")  # an image or sound
        return "".join(str(part.get("text", "")) for part in value)
    if role == "function" and isinstance(value, (Mapping, Sequence)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if role == "assistant" and value is None and raw.get("tool_calls"):
        return ""
    if role == "assistant" and value is None:
        raise Unreadable("empty_turn")
    raise DataError(f"{where}: a message is {str(dict(raw))[:80]!r}; required is an object with role and content")


def _answer(text: str, raw: Row, tools: Sequence[Row], weight: int) -> Turn:
    """An assistant's turn: text, then calls, from fields or from <tool_call> tags in the text."""
    if not isinstance(given := raw.get("tool_calls") or [], Sequence):
        raise Unreadable("unreadable_call")
    calls = [_call(call.get("function", call) if isinstance(call, Mapping) else call, tools) for call in given]
    ids = [str(call["id"]) for call in given if isinstance(call, Mapping) and call.get("id")]
    text, tag, tagged = text.partition("<tool_call>")
    if _CALL.sub("", tag + tagged).strip():
        raise Unreadable("text_after_call")
    if tag and not (calls := calls + _calls_in(tag + tagged)):
        raise Unreadable("unreadable_call")
    ids = ids if len(ids) == len(calls) else []
    return Turn("assistant", text.strip() if calls else text, calls, ids, None, weight)


def _calls_in(text: str) -> list[str]:
    """Canonical calls of JSON (an object, a list, or one after the other) with or without <tool_call> around each."""
    return _written(c for part in _CALL.findall(text) or [text] for c in chat.parse_calls(f"{chat.CALL_TAG} {part}"))


def _call(function: Any, tools: Sequence[Row]) -> str:
    """The canonical call of a field. A null argument that the tool does not have is padding (`sources.without_nulls`)."""
    call = chat.read_call(function)
    known = next((tool["parameters"]["properties"] for tool in tools if tool["name"] == call.name), None)
    if known is not None and call.form in ("object", "parameters"):
        kept = {k: without_nulls(v) for k, v in call.arguments.items() if v is not None or k in known}
        call = call._replace(arguments=kept)
    return _written([call])[0]


def _written(calls: Iterable[chat.Call]) -> list[str]:
    """The canonical texts of calls that were read."""
    calls = list(calls)
    if any(call.after for call in calls):
        raise Unreadable("text_after_call")
    try:
        return [chat.format_call(call.name, call.arguments) for call in calls]
    except DataError:
        raise Unreadable("unreadable_call") from None


def _joined(turns: list[Turn]) -> list[Turn]:
    """Answer and calls that a format keeps in turns of their own as one turn."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else turn
        both = joined and before.role == turn.role == "assistant" and before.weight == turn.weight
        if both and turn.calls and not turn.content and not before.ids:
            before.calls += turn.calls
        else:
            joined.append(turn)
    return joined


def schemas(value: Any) -> list[dict[str, Any]]:
    """Tool schemas of a column or of a text that holds them, without the object around a function."""
    items = _objects(value) if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    return [_schema(item) for item in items if item is not None]


def _objects(text: str) -> list[Any]:
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
    inner = without_nulls(item.get("function") or item) if isinstance(item, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise Unreadable("unreadable_tools")
    parameters = inner.get("parameters") or {}
    whole = isinstance(parameters, Mapping) and isinstance(parameters.get("required") or [], (list, tuple))
    if not whole or not isinstance(parameters.get("properties") or {}, Mapping):
        raise Unreadable("unreadable_tools")
    if not {"properties", "type"} & parameters.keys():
        parameters = {"properties": dict(parameters)}  # names and types without the object around them
    parameters = {"type": "object", "properties": {}} | dict(parameters)
    return {"name": inner["name"], "description": "", **inner, "parameters": parameters}
