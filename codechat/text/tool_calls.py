"""Tool calls as text: `<functioncall> {"name": "f", "arguments": {...}}`. `tool_lists` has how
tools are listed.

Calls are written in one form (`format_call`) and read in all that real data and half-trained
models write (`parse_calls`); each names its form (`Call`). Reading never raises and takes time
linear in the text, since a model is
rewarded for that text: strict JSON first, then a tolerant reader that never looks past the next
tag. JSON that was cut off or holds unescaped quotes is not repaired (`bad_json`): a reward must
not guess."""

import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.text.tool_lists import NOTHING, split_offer, tools_prompt

CALL_TAG = "<functioncall>"
# The tags of a conversation; here because the canonical text of a call spells none of them but
# its own.
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
DECLINED = "None of my functions can do that."
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
DEEPEST = 64  # open brackets in a value; what compares or checks values may call itself at each
_TAG_START = re.compile("<(?=" + "|".join(re.escape(tag.removeprefix("<")) for tag in TAGS) + ")")
_SPACE = re.compile(r"\s*")
_THOUGHT = re.compile(r"\A\s*<(think|thinking|reasoning|scratch_pad)>.*?</\1>\s*", re.DOTALL)
# a mark, a string, or a number or word; the string's kind of quote ends it, as in Python
# possessive (*+, ++), so that no text of a model makes it backtrack
_TOKEN = re.compile(
    r"""\s*+(?:([{}\[\],:])|("(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')|([A-Za-z]+|-?[0-9][0-9.eE+-]*))""",
    re.DOTALL,
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = dict(
    zip("\n\\'\"abfnrtv", ("", "\\", "'", '"', "\a", "\b", "\f", "\n", "\r", "\t", "\v"))
)


class Call(NamedTuple):
    """A function call."""

    name: str | None  # None in "no_name" and "bad_json"
    arguments: dict[str, Any] | None  # may be None in these and in "bad_arguments"
    form: str  # one of READABLE, or "bad_arguments", "no_name", "bad_json"
    # the text between its end and the next tag, stripped; "" in "bad_json", which has no end
    after: str = ""


class Read(NamedTuple):
    """A value that was read from a text."""

    value: Any
    end: int
    form: str  # of its JSON, as that of a call


def format_call(name: str | None, arguments: Mapping[str, Any] | None) -> str:
    """The canonical text of a call. A tag inside a string is written with \\u003c for its first
    character.

    Raises DataError for an empty name and for arguments that JSON cannot hold (NaN and
    infinities included)."""
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping):
        raise DataError(
            f"got {name!r} and {arguments!r}; expected a name and an object of arguments"
        )
    try:
        body = json.dumps(
            {"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"arguments of {name} are not JSON ({error}); give what JSON holds"
        ) from None
    return f"{CALL_TAG} {escape_tags(body)}"


def escape_tags(text: str) -> str:
    """JSON whose strings spell no tag, so they open no turn where tags are plain text; it reads
    as the same value."""
    # the first character is enough, and JSON reads the same string
    return _TAG_START.sub(r"\\u003c", escape_surrogates(text))


def without_tags(text: Any) -> str:
    """A world's text that spells no tag, so it opens no turn."""
    return _TAG_START.sub("< ", str(text))


def escape_surrogates(text: str) -> str:
    """JSON with halves of characters escaped, which no encoding can hold; it reads as the same
    value."""
    return text.encode(errors="backslashreplace").decode()


DECLINE = format_call(NOTHING, {})  # what a model writes that declines; `in_words` for people
_DECLINES = re.compile(rf'\s*{CALL_TAG}\s*\{{\s*"name"\s*:\s*"{NOTHING}"')


def parse_calls(text: str) -> list[Call]:
    """Every call of a text, in order: one per tag, several where a list follows the tag.
    `DECLINE` is none. Never raises."""
    tags = [match.start() for match in re.finditer(CALL_TAG, text)]
    tags.append(len(text))
    calls: list[Call] = []
    n = 0
    while n < len(tags) - 1:
        read = _value_after(text, tags, n)
        n = max(n + 1, bisect_left(tags, read.end))  # a tag inside the value begins no call
        items = read.value if isinstance(read.value, list) and read.value else [read.value]
        *listed, last = [read_call(item, read.form) for item in items]
        if last.form != "bad_json":
            last = last._replace(after=text[read.end : tags[n]].strip())
        calls += [*listed, last]
    return [call for call in calls if call.name != NOTHING]


def in_words(text: str) -> str:
    """An answer as people read it: `DECLINED` instead of calling `NOTHING`; any other text is
    unchanged."""
    tagged = CALL_TAG in text and _DECLINES.match(text)
    return DECLINED if tagged and not parse_calls(text) else text


def _value_after(text: str, tags: list[int], n: int) -> Read:
    """The value after tag n; "bad_json" where there is none. tags: where they begin, and the
    end of the text."""
    start = after_space(text, tags[n] + len(CALL_TAG))
    bad = Read(None, start, "bad_json")
    if not text.startswith(("{", "["), start):
        return bad
    stop = n + 1
    while True:
        try:
            value, used = _JSON.raw_decode(text[start : tags[stop]])
            return Read(value, start + used, "object")
        except json.JSONDecodeError as error:
            # what cut a string off may be a tag inside it; doubling the text keeps all attempts
            # linear
            if not error.msg.startswith("Unterminated string") or stop == len(tags) - 1:
                return _literal(text, start, tags[n + 1]) or bad
            stop = min(n + 2 * (stop - n), len(tags) - 1)
        except (ValueError, RecursionError):
            return _literal(text, start, tags[n + 1]) or bad


def value_at(text: str, start: int) -> Read | None:
    """The JSON or Python literal that begins at `start`; None where there is none. A tag inside
    a string is part of the string."""
    token = _TOKEN.match(text, start)
    if not token or token[1] not in (None, "{", "["):
        return None
    if token[1]:
        return _strict(text, token.start(1)) or _literal(text, token.start(1), len(text))
    listed = f"[{token[0]}]"  # the reader ends a value with its bracket
    read = _literal(listed, 0, len(listed), quoted=False)
    return read and read._replace(value=read.value[0], end=token.end())


def function_of(item: Any) -> Any:
    """What OpenAI's {"type": "function", "function": {...}} holds; any other value unchanged."""
    inner = item.get("function") if isinstance(item, Mapping) else None
    return inner if isinstance(inner, Mapping) else item


def read_call(item: Any, form: str = "object") -> Call:
    """The call of an object, as data sets hold it in fields; parse_calls reads the same from
    text."""
    if not isinstance(item, Mapping) or _is_too_deep(item):
        return Call(None, None, "bad_json")
    arguments, form = _arguments_of(item, form)
    name = item.get("name")
    named = isinstance(name, str) and bool(name.strip())
    return Call(name, arguments, form) if named else Call(None, arguments, "no_name")


def _arguments_of(item: Mapping[str, Any], form: str) -> tuple[dict[str, Any] | None, str]:
    """(arguments or None, form): what stands under the known keys, where they agree. An object
    under another key may be the arguments, so a call that holds one is not read as a call
    without arguments."""
    given = {
        key: item[key]
        for key in ARGUMENT_KEYS
        if item.get(key) is not None and str(item[key]).strip()
    }
    others = [value for key, value in item.items() if key not in ARGUMENT_KEYS]
    if not given:
        elsewhere = any(_holds_object(value, empty=True) for value in others)
        return (None, "bad_arguments") if elsewhere else ({}, "no_arguments")
    objects = [_object(value) for value in given.values()]
    arguments = objects[0]
    # keys that disagree: which of them a function would get is a guess
    if arguments is None or any(other != arguments for other in objects):
        return None, "bad_arguments"
    if not arguments and any(_holds_object(value) for value in others):
        return None, "bad_arguments"
    key = next(iter(given))
    if isinstance(given[key], str):
        return arguments, form if form == "single_quoted" else "json_string"
    return arguments, "parameters" if form == "object" and key != "arguments" else form


def _object(value: Any) -> dict[str, Any] | None:
    """An object, or the one that a text consists of."""
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else None
    text = value.strip()
    read = _strict(text) or _literal(text, 0, len(text), quoted=False)
    if read is None or read.end < len(text) or _is_too_deep(read.value):
        return None
    return read.value if isinstance(read.value, dict) else None


def _is_too_deep(value: Any) -> bool:
    """Whether a value nests more than DEEPEST lists and objects."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = [each for each in level if isinstance(each, list | dict)]
        if not inner:
            return False
        level = []
        for each in inner:
            level += each.values() if isinstance(each, dict) else each
    return True


def _holds_object(value: Any, empty: bool = False) -> bool:
    """Whether a value is, spells or lists an object; empty: one without keys counts too."""
    items = value if isinstance(value, list | tuple) else [value]
    objects = (
        _object(item)
        for item in items
        if isinstance(item, Mapping) or str(item).lstrip()[:1] == "{"
    )
    return any(item is not None and (empty or item) for item in objects)


def finite(digits: str) -> float:
    """A number that JSON can hold; ValueError for others."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is no number of JSON")
    return value


# line ends in strings are allowed, since models write them; numbers must be finite, since JSON
# cannot write others back
_JSON = json.JSONDecoder(strict=False, parse_constant=finite, parse_float=finite)


def _strict(text: str, start: int = 0) -> Read | None:
    """The value at `start` by the json module, line ends in strings allowed."""
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return Read(value, end, "object")


def _literal(text: str, start: int, stop: int, quoted: bool = True) -> Read | None:
    """A Python literal, JSON with commas too many, or a mixture. Equal to `ast.literal_eval`
    where that reads the text too, or nothing. quoted: it is a call, whose arguments may be JSON
    in single quotes."""
    return _LiteralReader(text, start, stop, quoted).read()


class _LiteralReader:
    """Rewrites a literal as JSON token by token, up to the bracket that ends it."""

    def __init__(self, text: str, start: int, stop: int, quoted: bool) -> None:
        self.text = text
        self.at = start
        self.stop = stop
        self.quoted = quoted
        self.nesting = ""  # the open brackets, such as "[{"
        self.json = [""]  # tokens so far
        self.form = "trailing_comma"

    def read(self) -> Read | None:
        """The value; None where the text is no literal."""
        while len(self.nesting) <= DEEPEST:
            token = _TOKEN.match(self.text, self.at, self.stop)
            if not token:
                return None
            self.at = token.end()
            mark, string, atom = token.groups()
            if string:
                value = self._string(string, token.start(2))
                if value is None:
                    return None
                self.json.append(json.dumps(value))
            elif atom:
                self._atom(atom)
            else:
                self._mark(mark)
                if not self.nesting:
                    read = _strict(" ".join(self.json).strip())
                    return Read(read.value, self.at, self.form) if read else None
        return None

    def _string(self, string: str, begin: int) -> str | None:
        """The value of a string that begins at `begin`; of arguments in single quotes, the text
        of their object."""
        value = _unescaped(string[1:-1])
        if string.startswith("'"):
            self._python()
            if self.quoted and self._at_arguments():
                spelled = _quoted_object(self.text, begin, self.at, value)
                if spelled:
                    value, self.at = spelled
                    self.form = "single_quoted"
                else:
                    self.quoted = False  # tried once only, so that reading stays linear
        return value

    def _at_arguments(self) -> bool:
        """Whether the call's own arguments come next."""
        return (
            self.nesting in ("{", "[{")
            and self.json[-1] == ":"
            and self.json[-2] in _ARGUMENT_KEYS_AS_JSON
        )

    def _atom(self, atom: str) -> None:
        if atom in _PYTHON_WORDS:
            self._python()
        self.json.append(_PYTHON_WORDS.get(atom, atom))

    def _mark(self, mark: str) -> None:
        if mark in "{[":
            self.nesting += mark
        elif mark in "}]":
            self.nesting = self.nesting[:-1]
            if self.json[-1] == "," and self.json[-2] not in ("{", "[", ",", ":"):
                self.json.pop()
        self.json.append(mark)

    def _python(self) -> None:
        if self.form == "trailing_comma":
            self.form = "python_literal"


_ARGUMENT_KEYS_AS_JSON = [json.dumps(key) for key in ARGUMENT_KEYS]


def _quoted_object(text: str, begin: int, end: int, value: str | None) -> tuple[str, int] | None:
    """(a text that spells an object, its end) for arguments in single quotes from `begin` to
    `end`: the `value` of a Python string, or JSON as it stands, where an apostrophe does not
    end it. None for another string."""
    if (
        value is not None
        and _object(value) is not None
        and text.startswith((",", "}"), after_space(text, end))
    ):
        return value, end
    raw = _strict(text, after_space(text, begin + 1))
    if raw is None or not isinstance(raw.value, dict):
        return None
    closing = after_space(text, raw.end)
    return (json.dumps(raw.value), closing + 1) if text.startswith("'", closing) else None


def _unescaped(body: str) -> str | None:
    """The value of a Python string between its quotes; None for what is no string, or half a
    character."""
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
    # ValueError for what lacks its digits
    number = int(code, 8) if code[0] in "01234567" else int(code[1:], 16)
    if number in range(0xD800, 0xE000):  # half a character
        raise ValueError(code)
    return chr(number)


def after_thought(text: str) -> int:
    """The place behind the reasoning in tags with which an answer begins, and the space after
    it."""
    thought = _THOUGHT.match(text)
    return thought.end() if thought else 0


def after_space(text: str, start: int) -> int:
    """Where the white space that begins at `start` ends."""
    space = _SPACE.match(text, start)
    assert space  # an empty one matches too
    return space.end()


def as_openai(
    messages: Sequence[Mapping[str, str]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages in OpenAI's form, and the `tools` that their system texts list. Calls with
    results are `tool_calls`."""
    said: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls whose results come next
    for number, message in enumerate(messages):
        role = message["role"]
        content = message["content"]
        calls = _answered_calls(messages, number)
        if role == "system":
            content, offered = split_offer(content)
            tools += [{"type": "function", "function": schema} for schema in offered]
            if content:
                said.append({"role": role, "content": content})
        elif role == "function":
            said.append(
                {
                    "role": "tool",
                    "content": content,
                    "tool_call_id": waiting.pop(0) if waiting else "",
                }
            )
        elif calls:
            waiting = [f"call_{number}_{k}" for k in range(len(calls))]
            called = [_openai_call(id, call) for id, call in zip(waiting, calls)]
            said.append(
                {
                    "role": role,
                    "content": content.partition(CALL_TAG)[0].strip(),
                    "tool_calls": called,
                }
            )
        else:
            said.append({"role": role, "content": content})
    return said, tools


def _answered_calls(messages: Sequence[Mapping[str, str]], number: int) -> list[Call]:
    """The calls of an answer if all can be read and each has a result; else none."""
    if messages[number]["role"] != "assistant":
        return []
    calls = parse_calls(messages[number]["content"])
    results = takewhile(lambda later: later["role"] == "function", messages[number + 1 :])
    answered = len(calls) == len(list(results)) and all(call.form in READABLE for call in calls)
    return calls if answered else []


def _openai_call(id: str, call: Call) -> dict[str, Any]:
    return dict(
        id=id, type="function", function=dict(name=call.name, arguments=json.dumps(call.arguments))
    )


def answer_text(message: Mapping[str, Any]) -> str:
    """An answer in OpenAI's form as the text of the chat format: what it says, then its calls
    as the model wrote them.

    Other servers' forms of it are read too: content in parts (Mistral), arguments as an object
    (Ollama), one `function_call` (OpenAI's of 2023). Reasoning beside the content is no part of
    the answer."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(
            str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text")
        )
    lines = [str(content)] if content else []
    calls = message.get("tool_calls") or []
    if not calls and message.get("function_call"):
        calls = {"function": message["function_call"]}
    for call in calls if isinstance(calls, list) else [calls]:
        given = isinstance(call, Mapping) and call.get("function")
        # what is no function is a call that cannot be read: it has no name
        function = given if isinstance(given, Mapping) else {}
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"))
        named = f'{{"name": {name}, "arguments": {arguments}}}'
        lines.append(f"{CALL_TAG} {escape_tags(named)}")
    return "\n".join(lines)


@dataclass
class Turn:
    """A message of another project's conversation."""

    role: str
    content: str
    calls: list[str] = field(default_factory=list)  # canonical texts
    ids: list[str] = field(default_factory=list)  # one per call, or none
    result_of: str | None = None  # id of the call that a function's result answers
    weight: int = 1  # 0 = an answer that carries no loss
    own_id: str | None = None  # of a result; some sets give it that of its call
    function: str | None = None  # the name of the function that gave a result

    def message(self) -> dict[str, Any]:
        """Prose, then calls, one per line."""
        content = self.content
        if self.calls:
            prose = self.content.strip()
            content = "\n".join([prose, *self.calls] if prose else self.calls)
        message: dict[str, Any] = dict(role=self.role, content=content)
        if self.role == "assistant" and not self.weight:
            message["weight"] = 0
        return message


class Unreadable(DataError):
    """A conversation without messages. reason: for counts of rows; turn: the one at fault; none
    = the tools are."""

    def __init__(self, reason: str, turn: Turn | None = None, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.turn = turn


def messages_of_turns(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], style: str
) -> list[dict[str, Any]]:
    """Messages, results in the order of their calls, tools listed after the system's own words.
    Unreadable."""
    turns = list(turns)  # the caller's stay in their order
    for at, turn in enumerate(turns):
        if turn.role != "function" or at == 0:
            results = list(takewhile(lambda later: later.role == "function", turns[at + 1 :]))
            end = at + 1 + len(results)
            turns[at + 1 : end] = _in_call_order(turn, results, goes_on=end < len(turns))
    if tools:
        try:
            offer = tools_prompt(tools, style)
        except DataError as error:
            raise Unreadable("unreadable_tools", None, str(error)) from None
        if turns[0].role == "system":
            system = turns.pop(0).content
            offer = f"{system}\n{offer}" if system else offer
        turns.insert(0, Turn("system", offer))
    return [turn.message() for turn in turns]


def _in_call_order(turn: Turn, results: list[Turn], goes_on: bool) -> list[Turn]:
    """The results of a turn in the order of its calls, where they name one. goes_on: other
    turns follow the results. Unreadable where ids do not match one to one."""
    if len(set(turn.ids)) < len(turn.ids):
        raise Unreadable("unreadable_call", turn)
    # results without ids are those of the calls in their order, as OpenAI's first form had it
    named = [one for one in (turn, *results) if one.result_of is not None]
    if named and not turn.ids and not turn.calls and CALL_TAG not in turn.content:
        raise Unreadable("result_without_call", named[0])
    if turn.ids and named:
        left = list(turn.ids)
        for result in results:
            if result.result_of not in left:
                raise Unreadable("result_without_call", result)
            left.remove(result.result_of)
        results.sort(key=lambda result: turn.ids.index(str(result.result_of)))
    else:
        results = _matched(turn, results)
    if len(results) < len(turn.ids) and (results or goes_on):
        raise Unreadable("call_without_result", turn)
    return results


def _matched(turn: Turn, results: list[Turn]) -> list[Turn]:
    """Results that name no call, in the order of the calls with their ids or, if they have none
    of these, with their functions; else as they are. Unreadable where a result stands in the
    place of another function's."""
    ids = [one.own_id for one in results]
    if Counter(ids) == Counter(turn.ids):
        return _placed(results, ids, turn.ids)
    functions = [one.function for one in results]
    called = [call.name for text in turn.calls for call in parse_calls(text)]
    if Counter(functions) == Counter(called):
        return _placed(results, functions, called)
    for function, name in zip(functions, called):
        if function != name and function in called:
            raise Unreadable("call_without_result", turn)
    return results


def _placed(
    results: Sequence[Turn], marks: Sequence[str | None], order: Sequence[str | None]
) -> list[Turn]:
    """The results in the order of their marks; those with the same mark stay in theirs."""
    results = list(results)
    marks = list(marks)
    placed = []
    for mark in order:
        at = marks.index(mark)
        del marks[at]
        placed.append(results.pop(at))
    return placed
