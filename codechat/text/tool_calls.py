"""Tool calls as text: `<functioncall> {"name": "f", "arguments": {...}}`. `tool_lists` has how tools are listed.

Calls are written in one form (`format_call`) and read in all that real data and half-trained models write
(`parse_calls`); each names its form (`FORMS`). Reading never raises and takes time linear in the text, since a model is
rewarded for that text: strict JSON first, then a tolerant reader that never looks past the next tag. JSON that was cut
off or holds unescaped quotes is not repaired (`bad_json`): a reward must not guess."""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.text.tool_lists import NOTHING, split_offer, tools_prompt

CALL_TAG = "<functioncall>"
# The tags of a conversation; here because the canonical text of a call spells none of them but its own.
TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|function_response|>", "<|end|>", CALL_TAG)
# How a readable call was written; where several fit, the first counts.
READABLE = (
    "no_arguments",  # absent, null or an empty string, and no other object in the call: read as {}
    "single_quoted",  # "arguments": '{"q": "You've won"}', as glaive's original rows have it
    "json_string",  # "arguments": "{\"q\": 1}"
    "python_literal",  # {'name': 'f', 'arguments': {'q': None}}
    "trailing_comma",  # {"a": 1,}
    "parameters",  # the object stands under "parameters", "args" or "input"
    "object",  # canonical
)
FORMS = (*READABLE, "bad_arguments", "no_name", "bad_json")
DECLINED = "None of my functions can do that."
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
DEEPEST = 64
_SPACE = re.compile(r"\s*")
# a mark, a string, or a number or word; the string's kind of quote ends it, as in Python
_TOKEN = re.compile(
    r"""\s*+(?:([{}\[\],:])|("(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')|([A-Za-z]+|-?[0-9][0-9.eE+-]*))""", re.DOTALL
)
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = dict(zip("\n\\'\"abfnrtv", ("", "\\", "'", '"', "\a", "\b", "\f", "\n", "\r", "\t", "\v")))


class Call(NamedTuple):
    """A function call. name is None in "no_name" and "bad_json"; arguments may be None in these and
    "bad_arguments". after: the text between its end and the next tag, stripped; "" in "bad_json", which has no end."""

    name: str | None
    arguments: dict[str, Any] | None
    form: str
    after: str = ""


def format_call(name: str | None, arguments: Mapping[str, Any] | None) -> str:
    """The canonical text of a call. A tag inside a string is written with \\u003c for its first character.

    Raises DataError for an empty name and for arguments that JSON cannot hold (NaN and infinities included).
    """
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping):
        raise DataError(f"got {name!r} and {arguments!r}; required are a name and an object of arguments")
    try:
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"arguments of {name} are not JSON ({error}); give what JSON holds") from None
    return f"{CALL_TAG} {escape_tags(body)}"


def escape_tags(text: str) -> str:
    """JSON whose strings spell no tag, so they open no turn where tags are plain text; it reads as the same value."""
    return re.sub("<(?=" + "|".join(re.escape(tag[1:]) for tag in TAGS) + ")", r"\\u003c", escape_surrogates(text))


def escape_surrogates(text: str) -> str:
    """JSON with halves of characters escaped, which no encoding can hold; it reads as the same value."""
    return text.encode(errors="backslashreplace").decode()


DECLINE = format_call(NOTHING, {})  # what a model writes that declines; `in_words` for people
_DECLINES = re.compile(rf'\s*{CALL_TAG}\s*\{{\s*"name"\s*:\s*"{NOTHING}"')


def parse_calls(text: str) -> list[Call]:
    """Every call of a text, in order: one per tag, several where a list follows the tag. `DECLINE` is none. Never
    raises."""
    tags = [*(match.start() for match in re.finditer(CALL_TAG, text)), len(text)]
    calls, n = [], 0
    while n < len(tags) - 1:
        value, end, form = _value_after(text, tags, n)
        calls += [read_call(item, form) for item in (value if isinstance(value, list) and value else [value])]
        n = max(n + 1, bisect_left(tags, end))
        if calls[-1].form != "bad_json":
            calls[-1] = calls[-1]._replace(after=text[end : tags[n]].strip())
    return [call for call in calls if call.name != NOTHING]


def in_words(text: str) -> str:
    """An answer as people read it: `DECLINED` instead of calling `NOTHING`; any other text is unchanged."""
    tagged = CALL_TAG in text and _DECLINES.match(text)
    return DECLINED if tagged and not parse_calls(text) else text


def _value_after(text: str, tags: list[int], n: int) -> tuple[Any, int, str]:
    """(value after tag n or None, its end, form of its JSON). tags: where they begin, and the end of the text."""
    start = _after_space(text, tags[n] + len(CALL_TAG))
    if not text.startswith(("{", "["), start):
        return None, start, "bad_json"
    stop = n + 1
    while True:
        try:
            value, used = _JSON.raw_decode(text[start : tags[stop]])
            return value, start + used, "object"
        except json.JSONDecodeError as error:
            # what cut a string off may be a tag inside it; doubling the text keeps all attempts linear
            if not error.msg.startswith("Unterminated string") or stop == len(tags) - 1:
                return _literal(text, start, tags[n + 1])
            stop = min(n + 2 * (stop - n), len(tags) - 1)
        except (ValueError, RecursionError):
            return _literal(text, start, tags[n + 1])


def value_at(text: str, start: int) -> tuple[Any, int] | None:
    """(value, its end) of the JSON or Python literal that begins at `start`: an object, a list, a string, a number, true
    or None. None where there is no such value. A tag inside a string is part of the string."""
    token = _TOKEN.match(text, start)
    if not token or token[1] not in (None, "{", "["):
        return None
    if token[1]:
        if strict := _strict(text, token.start(1)):
            return strict
        value, end, form = _literal(text, token.start(1), len(text))
        return None if form == "bad_json" else (value, end)
    listed = f"[{token[0]}]"
    value, _, form = _literal(listed, 0, len(listed), quoted=False)
    return None if form == "bad_json" else (value[0], token.end())


def read_call(item: Any, form: str = "object") -> Call:
    """The call of an object, as data sets hold it in fields; parse_calls reads the same from text."""
    if not isinstance(item, Mapping):
        return Call(None, None, "bad_json")
    arguments, form = _arguments_of(item, form)
    name = item.get("name")
    named = isinstance(name, str) and bool(name.strip())
    return Call(name, arguments, form) if named else Call(None, arguments, "no_name")


def _arguments_of(item: Mapping[str, Any], form: str) -> tuple[dict[str, Any] | None, str]:
    """(arguments or None, form): what stands under the known keys, where they agree. An object under another key may
    be the arguments, so a call that holds one is not read as a call without arguments."""
    given = {key: item[key] for key in ARGUMENT_KEYS if item.get(key) is not None and str(item[key]).strip()}
    others = [value for key, value in item.items() if key not in ARGUMENT_KEYS]
    if not given:
        return (None, "bad_arguments") if any(_holds_object(v, True) for v in others) else ({}, "no_arguments")
    first, *rest = (_object(value) for value in given.values())
    if first is None or any(value != first for value in rest) or not first and any(map(_holds_object, others)):
        return None, "bad_arguments"
    key, value = next(iter(given.items()))
    if isinstance(value, str):
        form = form if form == "single_quoted" else "json_string"
    elif form == "object" and key != "arguments":
        form = "parameters"
    return first, form


def _object(value: Any) -> dict[str, Any] | None:
    """An object, or the one that a text consists of."""
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else None
    text = value.strip()
    value, end = _strict(text) or _literal(text, 0, len(text), quoted=False)[:2]
    return value if isinstance(value, dict) and end == len(text) else None


def _holds_object(value: Any, empty: bool = False) -> bool:
    """Whether a value is, spells or lists an object; empty: one without keys counts too."""
    items = value if isinstance(value, list | tuple) else [value]
    objects = (_object(item) for item in items if isinstance(item, Mapping) or str(item).lstrip()[:1] == "{")
    return any(item is not None and (empty or item) for item in objects)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is no number of JSON")
    return value


_JSON = json.JSONDecoder(strict=False, parse_constant=_finite, parse_float=_finite)


def _strict(text: str, start: int = 0) -> tuple[Any, int] | None:
    """(value, end) by the json module, line ends in strings allowed."""
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _literal(text: str, start: int, stop: int, quoted: bool = True) -> tuple[Any, int, str]:
    """(value or None, end, form) of a Python literal, of JSON with commas too many, or of a mixture: rewritten as JSON
    token by token. Equal to `ast.literal_eval` where that reads the text too, or nothing. quoted: it is a call, whose
    arguments may be JSON in single quotes."""
    out, nesting, at, form = [""], "", start, "trailing_comma"
    while True:
        if not (token := _TOKEN.match(text, at, stop)) or len(nesting) > DEEPEST:
            return None, start, "bad_json"
        mark, string, atom = token.groups()
        at = token.end()
        if string:
            form = "python_literal" if form == "trailing_comma" and string[0] == "'" else form
            value = _unescaped(string[1:-1])
            if (
                quoted
                and string[0] == "'"
                and nesting in ("{", "[{")
                and out[-1] == ":"
                and out[-2][1:-1] in ARGUMENT_KEYS
            ):
                value, at, quoted = _quoted_object(text, token.start(2), at, value)
                form = "single_quoted" if quoted else form
            if value is None:
                return None, start, "bad_json"
            out.append(json.dumps(value))
        elif atom:
            form = "python_literal" if form == "trailing_comma" and atom in _PYTHON else form
            out.append(_PYTHON.get(atom, atom))
        else:
            if mark in "}]" and out[-1] == "," and out[-2] not in "{[,:":
                out.pop()
            nesting = nesting + mark if mark in "{[" else nesting[:-1] if mark in "}]" else nesting
            out.append(mark)
            if not nesting:
                break
    value = _strict(" ".join(out).strip())
    return (value[0], at, form) if value else (None, start, "bad_json")


def _quoted_object(text: str, begin: int, end: int, value: str | None) -> tuple[str | None, int, bool]:
    """(a text that spells an object, its end, True) for arguments in single quotes: a Python string, or JSON as it
    stands, where an apostrophe does not end it. Otherwise the string as it was read, and False."""
    if value is not None and _object(value) is not None and text.startswith((",", "}"), _after_space(text, end)):
        return value, end, True
    raw, last = _strict(text, _after_space(text, begin + 1)) or (None, begin)
    if isinstance(raw, dict) and text.startswith("'", last := _after_space(text, last)):
        return json.dumps(raw), last + 1, True
    return value, end, False


def _unescaped(body: str) -> str | None:
    """The value of a Python string between its quotes; None for what is no string, or half a character."""
    try:
        return _ESCAPE.sub(_escaped, body)
    except ValueError:
        return None


def _escaped(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    if code[0] not in "01234567xuUN\r":
        return match[0]
    number = int(code, 8) if code[0] in "01234567" else int(code[1:], 16)  # ValueError for what lacks its digits
    if number in range(0xD800, 0xE000):
        raise ValueError(code)
    return chr(number)


def _after_space(text: str, start: int) -> int:
    return _SPACE.match(text, start).end()


def as_openai(messages: Sequence[Mapping[str, str]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages in OpenAI's form, and the `tools` that their system texts list. Calls that have results are `tool_calls`."""
    said, tools, waiting = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for number, message in enumerate(messages):
        role, content, more = message["role"], message["content"], dict[str, Any]()
        calls = parse_calls(content) if role == "assistant" else []
        results = takewhile(lambda later: later["role"] == "function", messages[number + 1 :])
        if role == "system":
            content, offered = split_offer(content)
            tools += [{"type": "function", "function": schema} for schema in offered]
        elif calls and len(calls) == len([*results]) and all(call.form in READABLE for call in calls):
            waiting, content = [f"call_{number}_{k}" for k in range(len(calls))], content.partition(CALL_TAG)[0].strip()
            named = [dict(name=c.name, arguments=json.dumps(c.arguments)) for c in calls]
            more["tool_calls"] = [dict(id=id, type="function", function=f) for id, f in zip(waiting, named)]
        elif role == "function":
            role, more = "tool", {"tool_call_id": waiting.pop(0) if waiting else ""}
        if content or role != "system":
            said.append({"role": role, "content": content, **more})
    return said, tools


def answer_text(message: Mapping[str, Any]) -> str:
    """An answer in OpenAI's form as the text of the chat format: what it says, then its calls as the model wrote them.

    Other servers' forms of it are read too: content in parts (Mistral), arguments as an object (Ollama), one
    `function_call` (OpenAI's of 2023). Reasoning beside the content is no part of the answer."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text"))
    lines = [str(content)] if content else []
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if not functions and message.get("function_call"):
        functions = [message["function_call"]]
    for function in functions:
        arguments = function.get("arguments") or "{}"
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        named = f'{{"name": {json.dumps(function.get("name"))}, "arguments": {written}}}'
        lines.append(f"{CALL_TAG} {escape_tags(named)}")
    return "\n".join(lines)


@dataclass
class Turn:
    """calls: canonical texts. ids: one per call, or none. result_of: id of the call that a function's result answers.
    weight: 0 = an answer that carries no loss."""

    role: str
    content: str
    calls: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    result_of: str | None = None
    weight: int = 1

    def message(self) -> dict[str, Any]:
        """Prose, then calls, one per line."""
        prose = self.content.strip() if self.calls else self.content
        lines = [*([prose] if prose or not self.calls else []), *self.calls]
        weight = {} if self.weight or self.role != "assistant" else {"weight": 0}
        return {"role": self.role, "content": "\n".join(lines), **weight}


class Unreadable(DataError):
    """A conversation without messages. reason: for counts of rows; turn: the one at fault; none = the tools are."""

    def __init__(self, reason: str, turn: Turn | None = None, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason, self.turn = reason, turn


def messages_of_turns(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], style: str) -> list[dict[str, Any]]:
    """Messages, results in the order of their calls, tools listed after the system's own words. Unreadable."""
    turns = list(turns)
    for at, turn in enumerate(turns):
        if turn.role != "function" or at == 0:
            results = list(takewhile(lambda turn: turn.role == "function", turns[at + 1 :]))
            end = at + 1 + len(results)
            turns[at + 1 : end] = _in_call_order(turn, results, goes_on=end < len(turns))
    if tools:
        system, rest = (turns[0].content, turns[1:]) if turns[0].role == "system" else ("", turns)
        try:
            offer = tools_prompt(tools, style)
        except DataError as error:
            raise Unreadable("unreadable_tools", None, str(error)) from None
        turns = [Turn("system", f"{system}\n{offer}" if system else offer), *rest]
    return [turn.message() for turn in turns]


def _in_call_order(turn: Turn, results: list[Turn], goes_on: bool) -> list[Turn]:
    """The results of a turn in the order of its calls where they name one. Unreadable where ids do not match one to one."""
    if len(set(turn.ids)) < len(turn.ids):
        raise Unreadable("unreadable_call", turn)
    named, left = [one for one in (turn, *results) if one.result_of is not None], list(turn.ids)
    if named and not turn.ids and not turn.calls and CALL_TAG not in turn.content:
        raise Unreadable("result_without_call", named[0])
    if turn.ids and named:
        for result in results:
            if result.result_of not in left:
                raise Unreadable("result_without_call", result)
            left.remove(result.result_of)
        results.sort(key=lambda result: turn.ids.index(str(result.result_of)))
    if len(results) < len(turn.ids) and (results or goes_on):
        raise Unreadable("call_without_result", turn)
    return results
