"""Tool calls as text: how tools are listed, and `<functioncall> {"name": "f", "arguments": {...}}`.

Calls are written in one form (`format_call`) and read in all that real data and half-trained models write
(`parse_calls`); each names its form (`FORMS`). Reading never raises and takes time linear in the text, since a model is
rewarded for that text: strict JSON first, then a tolerant reader that never looks past the next tag. JSON that was cut
off or holds unescaped quotes is not repaired (`bad_json`): a reward must not guess.
"""

from __future__ import annotations

import json
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError

CALL_TAG = "<functioncall>"
# The tags of a conversation; here because the canonical text of a call spells none of them but its own.
TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|function_response|>", "<|end|>", CALL_TAG)
# How a readable call was written; where several fit, the first counts.
READABLE = (
    "no_arguments",  # absent, null or an empty string: read as {}
    "single_quoted",  # "arguments": '{"q": "You've won"}', as glaive's original rows have it
    "json_string",  # "arguments": "{\"q\": 1}"
    "python_literal",  # {'name': 'f', 'arguments': {'q': None}}
    "trailing_comma",  # {"a": 1,}
    "parameters",  # the object stands under "parameters"
    "object",  # canonical
)
FORMS = (*READABLE, "bad_arguments", "no_name", "bad_json")
NO_TOOLS = "You are a helpful assistant, with no access to external functions."
WITH_TOOLS = "You are a helpful assistant with access to the following functions. Use them if required -"

STYLES = ("compact", "described", "json")  # of `tools_prompt`
# The last entry of a described list: calling it is how a model says that nothing on the list fits.
NOTHING = "none"
NOTHING_FITS = f"Nothing fits: {NOTHING}()"
DECLINED = "None of my functions can do that."
ARGUMENT_KEYS = ("arguments", "parameters")
DEEPEST = 64
_TAG_IN_JSON = re.compile("<(?=" + "|".join(re.escape(tag[1:]) for tag in TAGS) + ")")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"\s*")
_LISTED = re.compile(r"(?:\A\s*|\n)Functions:\n")
_COMPACT_LINE = re.compile(r"^([^\s(]+\(.*?\)) - (.+)$")
_NAME_IN_LINE = re.compile(r"([^\s(]+)\(|.*: ([^\s(]+)\(|([^(]+)\(")  # compact, described, a name with spaces
_NEXT_ARGUMENT = re.compile(r", (?=[^\s,:]+: )")
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_DOUBLE = re.compile(r'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
# An apostrophe ends a single-quoted string only before punctuation, so that 'You've won' is one string.
_SINGLE = re.compile(r"'((?:[^'\\]++|\\.|'(?!\s*[,:}\]]))*+)'", re.DOTALL)
_ATOM = re.compile(r"[A-Za-z]+|-?[0-9][0-9.eE+-]*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class Call(NamedTuple):
    """A function call. name is None in "no_name" and "bad_json"; arguments may be None in these and
    "bad_arguments". after: the text between its end and the next tag, stripped; "" in "bad_json", which has no end."""

    name: str | None
    arguments: dict[str, Any] | None
    form: str
    after: str = ""


# ------------------------------------------------------------------ writing


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The canonical text of a call. A tag inside a string is written with \\u003c for its first character.

    Raises DataError for an empty name and for arguments that JSON cannot hold (NaN and infinities included).
    """
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping):
        raise DataError(f"got {name!r} and {arguments!r}; required are a name and an object of arguments")
    try:
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        needed = "give strings, finite numbers, booleans, None, lists and dicts with string keys"
        raise DataError(f"arguments of {name} are not JSON ({error}); {needed}") from None
    return f"{CALL_TAG} {escape_tags(body)}"


def escape_tags(text: str) -> str:
    """JSON whose strings spell no tag, so they open no turn where tags are plain text; it reads as the same value."""
    return _TAG_IN_JSON.sub(r"\\u003c", escape_surrogates(text))


def escape_surrogates(text: str) -> str:
    """JSON with halves of characters escaped, which no encoding can hold; it reads as the same value."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


DECLINE = format_call(NOTHING, {})  # what a model writes that declines; `in_words` for people
_DECLINES = re.compile(rf'\s*{CALL_TAG}\s*\{{\s*"name"\s*:\s*"{NOTHING}"')


def check_style(style: str) -> None:
    """ConfigError for a style that `tools_prompt` does not have."""
    if style not in STYLES:
        raise ConfigError(f"tools_style is {style!r}; it must be one of {', '.join(STYLES)}; correct --tools-style")


def tools_prompt(tools: Sequence[Mapping[str, Any]], style: str = "compact") -> str:
    """System text that offers tools: {"name", "description", "parameters": {"properties", "required"}} each.

    compact: "Functions:" and a line `name(arg: type, other?: a|b) - description` per tool; "?" = optional. described:
    `description: name(arg: type)`,
    and at the end `Nothing fits: none()`; small models learn it sooner, and to decline (`DECLINE`). json: whole schemas
    in glaive's wording."""
    check_style(style)
    lines = [_signature(tool) for tool in tools]
    if not lines:
        return NO_TOOLS
    if style == "json":
        return f"{WITH_TOOLS}\n" + "\n\n".join(json.dumps(tool, indent=4, ensure_ascii=False) for tool in tools)
    text = "\n".join(["Functions:", *lines])
    return described(text) if style == "described" else text


def described(prompt: str) -> str:
    """A system text whose compact list has each line as `description: name(arguments)` and ends with `NOTHING_FITS`;
    other text is unchanged."""
    if not (listed := _LISTED.search(prompt)):
        return prompt
    lines, rest = _split_list(prompt, listed)
    return prompt[: listed.end()] + "\n".join([*(_COMPACT_LINE.sub(r"\2: \1", x) for x in lines), NOTHING_FITS]) + rest


def _split_list(prompt: str, listed: re.Match[str]) -> tuple[list[str], str]:
    """The lines of a list, and the text after it."""
    text, gap, rest = prompt[listed.end() :].partition("\n\n")
    return [line for line in text.split("\n") if line != NOTHING_FITS], gap + rest


@lru_cache(maxsize=4096)
def offered_names(prompt: str) -> frozenset[str]:
    """Names of the functions that a system text offers in any style of `tools_prompt`; empty where none can be read."""
    return frozenset(schema["name"].strip() for schema in offered_schemas(prompt))


def offered_schemas(prompt: str) -> list[dict[str, Any]]:
    """{"name", "parameters"} of the functions that a system text offers in any style of `tools_prompt`, as far as it
    says: a choice of words in a list may be a number in the schema, so both are allowed."""
    if listed := _LISTED.search(prompt):
        named = [(_NAME_IN_LINE.match(line), line) for line in _split_list(prompt, listed)[0]]
        return [{"name": m[m.lastindex], "parameters": _parameters(line[m.end() :])} for m, line in named if m]
    schemas, at = [], prompt.find("{")
    while at >= 0:
        schema, end = _strict(prompt, at, len(prompt)) or (None, at + 1)
        if isinstance(schema, dict) and isinstance(schema.get("name"), str):
            schemas.append(schema)
        at = prompt.find("{", end)
    return schemas


def _parameters(rest: str) -> dict[str, Any]:
    """The schema of what stands after the bracket of a line: `a: type, b?: x|y) - description`."""
    properties, required = {}, []
    for argument in _NEXT_ARGUMENT.split(rest.partition(") - ")[0].removesuffix(")")):
        name, _, kind = argument.partition(": ")
        if name:
            properties[name.removesuffix("?")] = _schema_of(kind)
            required += [] if name.endswith("?") else [name]
    return {"type": "object", "properties": properties, "required": required}


def _schema_of(kind: str) -> dict[str, Any]:
    """The schema that `_type` wrote as this."""
    if kind.endswith("[]"):
        return {"type": "array", "items": _schema_of(kind.removesuffix("[]"))}
    parts = kind.split("|")
    if kind == "any":
        return {}
    if _JSON_TYPES.issuperset(parts):
        return {"type": parts if len(parts) > 1 else kind}
    return {"enum": [*parts, *(int(part) for part in parts if re.fullmatch("-?[0-9]{1,15}", part))]}


def _signature(tool: Mapping[str, Any]) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    parameters = (tool.get("parameters") or {}) if name else {}
    properties = (parameters.get("properties") or {}) if isinstance(parameters, Mapping) else None
    if not isinstance(name, str) or not isinstance(properties, Mapping):
        raise DataError(f"tool {str(tool)[:80]}; required are a name and parameters with properties")
    if name == NOTHING:
        raise DataError(f"a tool is called {NOTHING}, which is how a model declines; give it another name")
    required = parameters.get("required") or []
    if not isinstance(required, list):
        raise DataError(f"tool {name} has required {str(required)[:60]}; required is a list of parameter names")
    arguments = ", ".join(f"{p}{'' if p in required else '?'}: {_type(s)}" for p, s in properties.items())
    description = " ".join(str(tool.get("description") or "").split())
    return f"{name}({arguments})" + (f" - {description}" if description else "")


def _type(schema: Any) -> str:
    """Such as string, a|b|c (an enum), string[] (a list), or any where the schema gives no type."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return "|".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return f"{_type(schema['items'])}[]"
    return "|".join(map(str, kind)) if isinstance(kind, list) else str(kind)


# ------------------------------------------------------------------ reading


def parse_calls(text: str) -> list[Call]:
    """Every call of a text, in order: one per tag, several where a list follows the tag. `DECLINE` is none. Never
    raises."""
    tags = [*(match.start() for match in re.finditer(CALL_TAG, text)), len(text)]
    calls, n = [], 0
    while n < len(tags) - 1:
        value, end, form = _read_call(text, tags, n)
        items = value if isinstance(value, list) and value else [value]
        calls += [_call_of(item, form) for item in items]
        n = max(n + 1, bisect_left(tags, end))
        if calls[-1].form != "bad_json":
            calls[-1] = calls[-1]._replace(after=text[end : tags[n]].strip())
    return [call for call in calls if call.name != NOTHING]


def in_words(text: str) -> str:
    """An answer as people read it: `DECLINED` instead of calling `NOTHING`; any other text is unchanged."""
    tagged = CALL_TAG in text and _DECLINES.match(text)
    return DECLINED if tagged and not parse_calls(text) else text


def _read_call(text: str, tags: list[int], n: int) -> tuple[Any, int, str]:
    """(value after tag n or None, its end, form of its JSON). tags: where they begin, and the end of the text."""
    start = _after_space(text, tags[n] + len(CALL_TAG))
    if text[start : start + 1] not in ("{", "["):
        return None, start, "bad_json"
    stop = n + 1
    while True:
        try:
            value, used = _JSON.raw_decode(text[start : tags[stop]])
            return value, start + used, "object"
        except json.JSONDecodeError as error:
            # what cut a string off may be a tag inside it; doubling the text keeps all attempts linear
            if not error.msg.startswith("Unterminated string") or stop == len(tags) - 1:
                return _tolerant(text, start, tags[n + 1])
            stop = min(n + 2 * (stop - n), len(tags) - 1)
        except (ValueError, RecursionError):
            return _tolerant(text, start, tags[n + 1])


def _call_of(item: Any, form: str) -> Call:
    if not isinstance(item, dict):
        return Call(None, None, "bad_json")
    key = next((key for key in ARGUMENT_KEYS if key in item), None)
    arguments, special = _arguments_of(item.get(key))
    name = item.get("name")
    if not isinstance(name, str) or not name.strip():
        return Call(None, arguments, "no_name")
    if (key, form) == ("parameters", "object"):
        form = "parameters"
    return Call(name, arguments, special or form)


def _arguments_of(raw: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(arguments, form if they are not simply an object)."""
    if isinstance(raw, _Quoted):
        return dict(raw), "single_quoted"
    if isinstance(raw, dict):
        return raw, None
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}, "no_arguments"
    inner = _whole_object(raw) if isinstance(raw, str) else None
    return inner, "bad_arguments" if inner is None else "json_string"


def _whole_object(text: str) -> dict[str, Any] | None:
    """The object that a text consists of, or None."""
    start = _after_space(text)
    value, end = _strict(text, start, len(text)) or _tolerant(text, start, len(text))[:2]
    return value if isinstance(value, dict) and _after_space(text, end) == len(text) else None


def _after_space(text: str, start: int = 0, stop: int = sys.maxsize) -> int:
    return _SPACE.match(text, start, stop).end()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large")
    return value


_JSON = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def _strict(text: str, start: int, stop: int) -> tuple[Any, int] | None:
    """(value, end) by the json module, line ends in strings allowed. It decodes a copy: its errors count lines from the
    start."""
    try:
        value, used = _JSON.raw_decode(text[start:stop])
    except (ValueError, RecursionError):
        return None
    return value, start + used


def _tolerant(text: str, start: int, stop: int) -> tuple[Any, int, str]:
    reader = _Reader(text, start, stop)
    try:
        value = reader.value(0)
    except _Unreadable:
        return None, start, "bad_json"
    return value, reader.at, "trailing_comma" if reader.comma and not reader.python else "python_literal"


class _Unreadable(Exception):
    """Not even the tolerant reader understands the text."""


class _Quoted(dict[str, Any]):
    """Arguments that stood in single quotes."""


class _Reader:
    """A tolerant reader of JSON and Python literals: one pass over text[start:stop] without backtracking."""

    def __init__(self, text: str, start: int, stop: int, *, quoted: bool = True) -> None:
        self.text, self.at, self.stop = text, start, stop
        self.may_be_quoted = quoted
        self.python = self.comma = False

    def peek(self) -> str:
        self.at = _after_space(self.text, self.at, self.stop)
        return self.text[self.at] if self.at < self.stop else ""

    def take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at, self.stop)
        if match is None:
            raise _Unreadable
        self.at = match.end()
        return match

    def value(self, depth: int, key: str | None = None) -> Any:
        char = self.peek()
        if depth > DEEPEST:
            raise _Unreadable
        if char == "{":
            return self.object(depth)
        if char == "[":
            return self.array(depth)
        if char == "'" and key in ARGUMENT_KEYS and self.may_be_quoted:
            return self.quoted_object()
        return self.string() if char in ("'", '"') else self.atom()

    def object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        out: dict[str, Any] = {}
        while self.peek() != "}":
            key = self.string()
            if self.peek() != ":":
                raise _Unreadable
            self.at += 1
            out[key] = self.value(depth + 1, key)
            self.separator("}")
        self.at += 1
        return out

    def array(self, depth: int) -> list[Any]:
        self.at += 1
        out = []
        while self.peek() != "]":
            out.append(self.value(depth + 1))
            self.separator("]")
        self.at += 1
        return out

    def separator(self, closing: str) -> None:
        char = self.peek()
        if char == ",":
            self.at += 1
            self.comma |= self.peek() == closing
        elif char != closing:
            raise _Unreadable

    def string(self) -> str:
        if self.text[self.at : self.at + 1] == "'":
            self.python = True
            return _unescape(self.take(_SINGLE)[1])
        return _unescape(self.take(_DOUBLE)[1])

    def atom(self) -> Any:
        token = self.take(_ATOM)[0]
        if token in _LITERALS:
            self.python |= token[0].isupper()
            return _LITERALS[token]
        try:
            return _JSON.decode(token)
        except ValueError:
            raise _Unreadable from None

    def quoted_object(self) -> _Quoted | str:
        """An object in single quotes: raw as glaive has it, or escaped as Python writes it, or loosely.

        Among other Python strings the escapes are Python's: \\\\n is then a line end, raw two characters."""
        raw_first = [self.raw_object, self.escaped_object, self.loose_object]
        python_first = [self.escaped_object, self.raw_object, self.loose_object]
        for attempt in python_first if self.python else raw_first:
            value, end = attempt(_after_space(self.text, self.at + 1, self.stop)) or (None, 0)
            end = _after_space(self.text, end, self.stop)
            if isinstance(value, dict) and end < self.stop and self.text[end] == "'":
                self.at = end + 1
                return _Quoted(value)
        self.may_be_quoted = False  # trying again at every key could make the reading quadratic
        return self.string()

    def raw_object(self, start: int) -> tuple[Any, int] | None:
        return _strict(self.text, start, self.stop)

    def escaped_object(self, start: int) -> tuple[Any, int] | None:
        match = _SINGLE.match(self.text, self.at, self.stop)
        text = _unescape(match[1]) if match else ""
        value, end = _strict(text, 0, len(text)) or (None, 0)
        return (value, match.end() - 1) if match and not text[end:].strip() else None

    def loose_object(self, start: int) -> tuple[Any, int] | None:
        reader = _Reader(self.text, start, self.stop, quoted=False)
        try:
            return reader.value(1), reader.at
        except _Unreadable:
            return None


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_unescape_one, text)
    # Two \u escapes may be the halves of one character.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _unescape_one(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)
