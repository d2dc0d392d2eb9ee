"""Turns of public chat sets, in OpenAI's or ShareGPT's keys -> `Turn` of `text.tool_calls`.

A turn is {role or from, content or value}; an answer may also have tool_calls or function_call,
reasoning, and a mark of its loss: `weight: 0`, `train: false`, `loss: false` or `loss_mask: 0`.
Content may be Anthropic's parts."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import DataError
from codechat.data import call_forms
from codechat.data.sources import Padded, without_nulls
from codechat.text import chat, tool_calls
from codechat.text.tool_calls import Turn, Unreadable
from codechat.text.tool_schemas import kinds_of

Row = Mapping[str, Any]
Message = dict[str, Any]

CALL_ROLES = ("function_call", "function-call", "tool_call")  # turns that hold nothing but calls
# Where a message has what its author thought: DeepSeek, Qwen, minimind; OpenRouter, vLLM;
# gpt-oss, Ollama.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Where OpenRouter and SWE-agent repeat it. Not read: what stands there must also stand in one of
# the fields above or, as text, in the content.
_THOUGHTS = re.compile(
    r"(?:reasoning|thinking|thoughts?)(?:_(?:blocks|details|items|steps|text))?\Z"
)
CALL_OF_RESULT = ("tool_call_id", "call_id")  # the second: OpenAI's Responses
FUNCTION_OF_RESULT = ("name", "tool_name")  # the second: Ollama
OFFERED = ("tools", "functions")
AVAILABLE = ("available_tools",)
TOOL_COLUMNS = (*OFFERED, *AVAILABLE)
# the last two: verl, slime
_LOSS_MARKS = ("weight", "train", "loss", "loss_mask", "step_loss_mask")
# Other projects weigh or leave out an answer under keys with these words.
_WEIGHS = re.compile(
    r"(?:\A|_)(?:loss|masked|mask|weights?|training|trainable|train)(?:_|\Z)", re.IGNORECASE
)
# recipients that are no function
_EVERYONE = (None, "", "all", "user", "assistant")
_TEXT_PARTS = ("text", "input_text", "output_text")
MESSAGE_KEYS = (
    *"role from content value tool_calls function_call tool_call_id".split(),
    *_LOSS_MARKS,
    *REASONING,
    *TOOL_COLUMNS,
)
# Other projects keep calls, results, parts or the rest of an answer under keys with these words.
_HOLDS = re.compile(
    r"call|function|tool|refusal|image|video|audio|attachment|document|part|block|content|train_detail",
    re.IGNORECASE,
)
_SAYS_ABOUT = re.compile(r"(?:id|name|type|choice)s?\Z", re.IGNORECASE)


class Malformed(DataError):
    """A row whose values are not of the kind that its form has. reason: for counts of rows; the
    text begins with the row's place."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def is_turn(value: Any) -> bool:
    """Whether a value is an object with a role."""
    return isinstance(value, Mapping) and bool({"role", "from"} & value.keys())


def role_of(turn: Row) -> Any:
    """The role in our words; an unknown role unchanged."""
    role = turn.get("role") or turn.get("from")
    return chat.ROLE_OF.get(role, role) if isinstance(role, str) else role


def content_of(turn: Row) -> Any:
    """What the turn holds under `content` or `value`; a table may have both and fill one."""
    value = turn.get("content")
    return turn.get("value") if value is None else value


def from_json(value: Any, reason: str) -> Any:
    """The value; a text is parsed as JSON. Unreadable, with this reason, for a text that is not
    JSON."""
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
    read = tool_calls.value_at(value, 0)
    if read is None or value[read.end :].strip() or not all(map(is_turn, read.value)):
        return value
    return read.value


def continued(prompt: Any, answer: Any, where: str) -> list[Any]:
    """The turns of a prompt (text, turns or None) and of what follows it: text, a turn, or
    turns, which may begin with the prompt. Malformed if they do not fit together."""
    before = [] if prompt is None else _as_turn(prompt, "user")
    after = [answer] if isinstance(answer, Mapping) else _as_turn(answer, "assistant")
    listed = isinstance(before, list) and isinstance(after, list) and len(after) > 0
    if not listed or not all(map(is_turn, [*before, *after])):
        got = f"a prompt of {type(prompt).__name__} and an answer of {type(answer).__name__}"
        raise Malformed(
            "prompt_form", f"{where}: {got}; both must be texts, or messages with role and content"
        )
    system, asked = _split_system(before)
    other_system, told = _split_system(after)
    # Many sets of preferences repeat the prompt at the beginning of the answer.
    repeated = told[: len(asked)]
    if asked and list(map(_said, repeated)) == list(map(_said, asked)):
        if system and other_system and system != other_system:
            raise Malformed(
                "two_systems", f"{where} has two system messages; leave one of them out"
            )
        return [*(other_system or system), *told]
    same_role = before and told and role_of(told[0]) == role_of(before[-1])
    if same_role or (before and other_system):
        fault = f"{where}: the answer's messages do not continue the prompt"
        raise Malformed("prompt_not_continued", f"{fault}; begin them after it, or with it")
    return [*before, *after]


def _as_turn(given: Any, role: str) -> Any:
    """A text as a list of one turn; anything else as it is."""
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _split_system(turns: list[Row]) -> tuple[list[Row], list[Row]]:
    """The system turn, if it comes first, and the turns after it."""
    if turns and role_of(turns[0]) == "system":
        return turns[:1], turns[1:]
    return [], turns


def _said(turn: Row) -> tuple[Any, Any]:
    return role_of(turn), content_of(turn)


def read_turn(raw: Any, where: str, tools: Sequence[Row], marked: bool) -> Iterator[Turn]:
    """One turn, or one for each of several results. marked: whether only tags mark calls.
    Malformed, Unreadable."""
    if not is_turn(raw):
        got = f"{where}: a message is {str(raw)[:80]!r}"
        raise Malformed("message_form", f"{got}; expected an object with role and content")
    _reject_unread_keys(raw)
    role = role_of(raw)
    if role == "user":
        raw, results = _without_results(raw)
        for result in results:
            said = text_of(result.get("content") or "", "function", raw, where)
            yield Turn("function", said, result_of=result["tool_use_id"])
        if results and not content_of(raw):
            return
    elif role == "assistant":
        raw = _with_fields_of_parts(raw)
    weight = _weight(raw, where) if role in ("assistant", *CALL_ROLES) else 1
    if role in CALL_ROLES:
        yield Turn(
            "assistant",
            _with_reasoning("", raw),
            call_forms.calls_in(content_of(raw)),
            weight=weight,
        )
        return
    if role not in chat.ROLES:
        known = ", ".join(chat.ROLE_OF)
        raise Malformed(
            "unknown_role", f"{where}: role {role!r} is unknown; required is one of {known}"
        )
    if role != "assistant" and any(raw.get(name) for name in REASONING):
        raise Unreadable("reasoning_of_another")
    text = text_of(content_of(raw), role, raw, where)
    if role == "assistant":
        yield _answer(text, raw, tools, weight, marked)
        return
    # Qwen's template puts the results of several calls into one turn of the user.
    tagged = call_forms.results_in(text) if role in ("function", "user") else []
    if tagged:
        yield from (Turn("function", result) for result in tagged)
    elif role == "function":
        yield Turn(
            role,
            text,
            result_of=_first(raw, CALL_OF_RESULT),
            own_id=_first(raw, ("id",)),
            function=_first(raw, FUNCTION_OF_RESULT),
        )
    else:
        yield Turn(role, text)


def _first(turn: Row, names: Sequence[str]) -> str | None:
    """What the turn holds under the first of the names that it has, as text; None for none."""
    for name in names:
        if turn.get(name) is not None:
            return str(turn[name])
    return None


def _reject_unread_keys(raw: Row) -> None:
    """Unreadable for a turn with something under a key that may hold a part of what it says."""
    for key, value in raw.items():
        if key in MESSAGE_KEYS or not isinstance(value, (str, Mapping, list, tuple)) or not value:
            continue
        if _HOLDS.search(key) and not _SAYS_ABOUT.search(key):
            raise Unreadable(f"message_has ({key})")
        thought = _THOUGHTS.match(key) and not any(raw.get(name) for name in REASONING)
        if thought and str(value) not in texts_in(content_of(raw)):
            raise Unreadable(f"message_has ({key})")
    if role_of(raw) != "assistant":
        return
    # harmony: reasoning, and calls whose function is the recipient
    if raw.get("channel") == "analysis":
        raise Unreadable("message_has (channel)")
    if raw.get("recipient") not in _EVERYONE and not raw.get("tool_calls"):
        raise Unreadable("message_has (recipient)")


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(each)


def _split_parts(raw: Row, kinds: Sequence[str]) -> tuple[Row, list[Row]]:
    """A turn without the parts of its content that are of these types, and these parts; none
    where the content is no list of parts."""
    parts = raw.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return raw, []
    taken = [part for part in parts if part.get("type") in kinds]
    rest = [part for part in parts if part.get("type") not in kinds]
    return (dict(raw) | {"content": rest}, taken) if taken else (raw, [])


def _without_results(raw: Row) -> tuple[Row, list[Row]]:
    """A turn of the user without Anthropic's parts that are results, and these."""
    rest, results = _split_parts(raw, ("tool_result",))
    if any("tool_use_id" not in result for result in results):
        raise Unreadable("result_without_call")
    return rest, results


def _with_fields_of_parts(raw: Row) -> Row:
    """An answer whose content is Anthropic's parts with its calls and its reasoning in fields,
    as OpenAI has them. Unreadable for text after a call."""
    rest, parts = _split_parts(raw, ("thinking", "tool_use"))
    calls = [part for part in parts if part["type"] == "tool_use"]
    thoughts = [part.get("thinking") for part in parts if part["type"] == "thinking"]
    fields: dict[str, Any] = {}
    if calls:
        first = raw["content"].index(calls[0])
        if any(part.get("type") == "text" for part in raw["content"][first:]):
            raise Unreadable("text_after_call")
        fields["tool_calls"] = [
            dict(id=call.get("id"), name=call.get("name"), arguments=call.get("input"))
            for call in calls
        ]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise Unreadable("reasoning_not_text")
    if thoughts:
        kinds = [part.get("type") for part in raw["content"]]
        if "thinking" in kinds[len(thoughts) :]:  # in tags it would come before the rest
            raise Unreadable("reasoning_after_answer")
        fields["thinking"] = "\n".join(map(str, thoughts))
    return dict(rest) | fields


def _with_reasoning(text: str, raw: Row) -> str:
    """An answer with its reasoning before it in tags. Unreadable for reasoning that is no text,
    and for two of them."""
    given = {name: raw[name] for name in REASONING if raw.get(name)}
    if not all(isinstance(thought, str) for thought in given.values()):
        raise Unreadable("reasoning_not_text")
    thoughts = {thought.strip() for thought in given.values()} - {""}
    if len(thoughts) > 1:
        raise Unreadable(f"two_reasonings ({', '.join(given)})")
    thought = next(iter(thoughts), "")
    before = text[: tool_calls.after_thought(text)]
    if thought in before:  # none, or the text begins with it already
        return text
    return f"<think>\n{thought}\n</think>\n\n{text}".rstrip()


def _weight(raw: Row, where: str) -> int:
    """0 for an answer that is marked as carrying no loss, else 1. Unreadable for another mark."""
    for key, value in raw.items():
        given = value not in (None, "", [], {}) and key not in _LOSS_MARKS
        if given and _WEIGHS.search(key) and not _SAYS_ABOUT.search(key):
            raise Unreadable(f"message_has ({key})")
    marks = {name: raw[name] for name in _LOSS_MARKS if raw.get(name) is not None}
    if any(isinstance(mark, str) or mark not in (0, 1) for mark in marks.values()):
        raise Malformed(
            "weight_form", f"{where}: a message has {marks}; expected 0, 1, true or false"
        )
    return int(all(marks.values()))


def text_of(value: Any, role: str, raw: Row, where: str) -> str:
    """The text of a turn's content. Unreadable for a part that is no text or has none."""
    if isinstance(value, str):
        return value
    calls = role == "assistant" and bool(raw.get("tool_calls") or raw.get("function_call"))
    if isinstance(value, Sequence) and all(
        isinstance(part, Mapping) and "type" in part for part in value
    ):
        return _text_of_parts(value, calls)
    # Some sets keep results as objects; a model reads them as JSON.
    if role == "function" and isinstance(value, (Mapping, Sequence)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if role == "assistant" and value is None:
        if not calls:
            raise Unreadable("empty_turn")
        return ""
    if role == "function" and isinstance(value, (bool, int, float)):
        return json.dumps(value)
    got = f"{where}: a message is {str(dict(raw))[:80]!r}"
    raise Malformed("content_not_text", f"{got}; expected an object with role and content")


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
        _with_reasoning(said.prose if calls else text, raw),
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
    name = function.get("name") if isinstance(function, Mapping) else None
    parameters: Row = next((tool["parameters"] for tool in tools if tool["name"] == name), {})
    if isinstance(function, Mapping):
        function = {key: _with_meant_nulls(value, parameters) for key, value in function.items()}
    call = tool_calls.read_call(function)
    known = parameters.get("properties")
    if known is not None and call.form in ("object", "parameters"):
        arguments = call.arguments or {}
        # Arrow tables pad objects to one set of keys (`sources.arrow_row`). A null under a name
        # that the tool does not have shows such padding, so the other nulls of the call are
        # padding, too.
        if any(value is None and name not in known for name, value in arguments.items()):
            call = call._replace(arguments=without_nulls(arguments))
    return call_forms.written([call])[0]


def _with_meant_nulls(value: Any, schema: Any) -> Any:
    """A value of an Arrow table with those of its null fields that its schema requires: no
    other object has put them there, or the call would lack an argument."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_with_meant_nulls(each, schema.get("items")) for each in value]
    properties = schema.get("properties")
    if not isinstance(value, Padded) or not isinstance(properties, Mapping):
        return value
    required = schema.get("required", ())
    meant = {
        name for name in value.fields if name in required and _allows_null(properties.get(name))
    }
    names = [name for name in value.fields if name in value or name in meant]
    return {name: _with_meant_nulls(value.get(name), properties.get(name)) for name in names}


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    parts = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return "null" in kinds_of(schema) or any(map(_allows_null, parts))


def joined(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, with the calls that a format keeps in turns after the answer as part of that
    answer."""
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
