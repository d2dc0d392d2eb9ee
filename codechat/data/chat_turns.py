"""Turns of public chat sets, in OpenAI's or ShareGPT's keys -> `Turn` of `text.tool_calls`.

A turn is {role or from, content or value}; an answer may also have tool_calls or function_call, and a mark of its loss:
`weight: 0`, `train: false` or `loss: false`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import DataError
from codechat.data import call_forms
from codechat.data.sources import without_nulls
from codechat.text import chat, tool_calls
from codechat.text.tool_calls import Turn, Unreadable

Row = Mapping[str, Any]
Message = dict[str, Any]

CALL_ROLES = ("function_call", "tool_call")  # turns that hold nothing but calls
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_LOSS_MARKS = ("weight", "train", "loss")
_TEXT_PARTS = ("text", "input_text", "output_text")


def is_turn(value: Any) -> bool:
    """Whether a value is an object with a role."""
    return isinstance(value, Mapping) and bool({"role", "from"} & value.keys())


def role_of(turn: Row) -> Any:
    """The role in our words; an unknown role unchanged."""
    role = turn.get("role") or turn.get("from")
    return chat.ROLE_OF.get(role, role) if isinstance(role, str) else role


def content_of(turn: Row) -> Any:
    """What the turn holds under `content` or `value`."""
    return turn.get("content", turn.get("value"))


def from_json(value: Any, reason: str) -> Any:
    """The value; a text is parsed as JSON. Unreadable, with this reason, for a text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Unreadable(reason) from None


def turns_in(value: Any) -> Any:
    """The turns that a JSON text holds; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = tool_calls.value_at(value, 0)
    if found is None:
        return value
    turns, end = found
    if value[end:].strip() or not all(map(is_turn, turns)):
        return value
    return turns


def continued(prompt: Any, answer: Any, where: str) -> list[Any]:
    """The turns of a prompt (text, turns or None) and of what follows it: text, a turn, or turns, which may begin with
    the prompt. DataError if they do not fit together."""
    before = prompt
    if prompt is None:
        before = []
    elif isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
    after = answer
    if isinstance(answer, str):
        after = [{"role": "assistant", "content": answer}]
    elif isinstance(answer, dict):
        after = [answer]
    listed = isinstance(before, list) and isinstance(after, list) and len(after) > 0
    if not listed or not all(map(is_turn, [*before, *after])):
        got = f"a prompt of {type(prompt).__name__} and an answer of {type(answer).__name__}"
        raise DataError(f"{where}: {got}; both must be texts, or messages with role and content")
    system, asked = _split_system(before)
    other_system, told = _split_system(after)
    # Many sets of preferences repeat the prompt at the beginning of the answer.
    repeated = told[: len(asked)]
    if asked and list(map(_said, repeated)) == list(map(_said, asked)):
        if system and other_system and system != other_system:
            raise DataError(f"{where} has two system messages; leave one of them out")
        return [*(other_system or system), *told]
    if before and (other_system or (told and role_of(told[0])) == role_of(before[-1])):
        raise DataError(f"{where}: the answer's messages do not continue the prompt; begin them after it, or with it")
    return [*before, *after]


def _split_system(turns: list[Row]) -> tuple[list[Row], list[Row]]:
    """The system turn, if it comes first, and the turns after it."""
    n = int(bool(turns) and role_of(turns[0]) == "system")
    return turns[:n], turns[n:]


def _said(turn: Row) -> tuple[Any, Any]:
    return role_of(turn), content_of(turn)


def read_turn(raw: Any, where: str, tools: Sequence[Row], marked: bool) -> Iterator[Turn]:
    """One turn, or one for each of several results. marked: whether only tags mark calls. DataError, Unreadable."""
    if not is_turn(raw):
        raise DataError(f"{where}: a message is {str(raw)[:80]!r}; expected an object with role and content")
    thoughts = [key for key in _THOUGHTS if raw.get(key)]
    if thoughts:  # training would silently lose them
        raise DataError(f"{where}: a message has {thoughts[0]}, which is not read; write it into content, or remove it")
    role = role_of(raw)
    weight = _weight(raw, where) if role in ("assistant", *CALL_ROLES) else 1
    if role in CALL_ROLES:
        yield Turn("assistant", "", call_forms.calls_in(content_of(raw)), weight=weight)
        return
    if role not in chat.ROLES:
        raise DataError(f"{where}: role {role!r} is unknown; expected one of {', '.join(chat.ROLE_OF)}")
    text = text_of(content_of(raw), role, raw, where)
    if role == "assistant":
        yield _answer(text, raw, tools, weight, marked)
        return
    # Qwen's template puts the results of several calls into one turn of the user.
    results = call_forms.results_in(text) if role in ("function", "user") else []
    if results:
        yield from (Turn("function", result) for result in results)
    else:
        yield Turn(role, text, result_of=raw.get("tool_call_id") if role == "function" else None)


def _weight(raw: Row, where: str) -> int:
    """0 for an answer that is marked as carrying no loss, else 1."""
    marks = {name: raw[name] for name in _LOSS_MARKS if raw.get(name) is not None}
    if any(isinstance(mark, str) or mark not in (0, 1) for mark in marks.values()):
        raise DataError(f"{where}: a message has {marks}; expected 0, 1, true or false")
    return int(all(marks.values()))


def text_of(value: Any, role: str, raw: Row, where: str) -> str:
    """The text of a turn's content. Unreadable for a part that is no text or has none."""
    if isinstance(value, str):
        return value
    calls = role == "assistant" and bool(raw.get("tool_calls") or raw.get("function_call"))
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in value):
        return _text_of_parts(value, calls)
    # Some sets keep results as objects; a model reads them as JSON.
    if role == "function" and isinstance(value, (Mapping, Sequence)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if role == "assistant" and value is None:
        if not calls:
            raise Unreadable("empty_turn")
        return ""
    raise DataError(f"{where}: a message is {str(dict(raw))[:80]!r}; expected an object with role and content")


def _text_of_parts(parts: Sequence[Row], calls: bool) -> str:
    """calls: whether the turn has calls beside its parts, which may then all be empty."""
    if any(part["type"] not in _TEXT_PARTS for part in parts):
        raise Unreadable("not_text")  # an image or sound
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts) and (not calls or any(texts)):
        raise Unreadable("part_without_text")
    return "\n".join(text for text in texts if text)  # as the server joins them


def _answer(text: str, raw: Row, tools: Sequence[Row], weight: int, marked: bool) -> Turn:
    """An assistant's turn: text, then calls, from the fields or from the text."""
    given = from_json(raw.get("tool_calls") or [], "unreadable_call")
    if not isinstance(given, Sequence):
        raise Unreadable("unreadable_call")
    calls = [_call(_function_of(call), tools) for call in given]
    ids = [str(call["id"]) for call in given if isinstance(call, Mapping) and call.get("id")]
    legacy = raw.get("function_call")
    if legacy:
        calls = _agreed(calls, [_call(from_json(legacy, "unreadable_call"), tools)])
    # A row may have its calls twice, in a field and in the text.
    said = call_forms.read_answer(text, [tool["name"] for tool in tools], marked)
    calls = _agreed(calls, said.calls)
    return Turn(
        "assistant",
        said.prose.strip() if calls else text,
        calls,
        ids=ids if len(ids) == len(calls) else [],  # calls without ids have their results in order
        weight=weight,
    )


def _agreed(calls: list[str], again: list[str]) -> list[str]:
    """The calls of an answer, which two places may repeat. Unreadable if they differ."""
    if calls and again and calls != again:
        raise Unreadable("calls_differ")
    return calls or again


def _function_of(call: Any) -> Any:
    """The function inside a call of `tool_calls`, if there is an object around it."""
    return call.get("function", call) if isinstance(call, Mapping) else call


def _call(function: Any, tools: Sequence[Row]) -> str:
    """The canonical call of a field."""
    call = tool_calls.read_call(function)
    known = next((tool["parameters"]["properties"] for tool in tools if tool["name"] == call.name), None)
    if known is not None and call.form in ("object", "parameters"):
        arguments = call.arguments or {}
        # Arrow tables pad objects to one set of keys (`sources.arrow_row`). A null under a name that the tool does not
        # have shows such padding, so the other nulls of the call are padding, too.
        if any(value is None and name not in known for name, value in arguments.items()):
            call = call._replace(arguments=without_nulls(arguments))
    return call_forms.written([call])[0]


def joined(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, with the calls that a format keeps in turns after the answer as part of that answer."""
    merged: list[Turn] = []
    for turn in turns:
        before = merged[-1] if merged else None
        if before and _adds_calls(turn, before):
            before.calls += turn.calls
        else:
            merged.append(turn)
    return merged


def _adds_calls(turn: Turn, before: Turn) -> bool:
    # More calls would no longer match the ids of an answer that has them.
    same = before.role == turn.role == "assistant" and before.weight == turn.weight
    return same and bool(turn.calls) and not turn.content and not before.ids
