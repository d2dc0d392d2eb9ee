"""Values of Java and JavaScript, which the leaderboard's calls hold as text.

A function of these languages is offered with texts for parameters, whose descriptions name the
type; the text of a call's argument becomes a value by the rules of gorilla's type converters
(BFCL v4), with their quirks: `new String[]{"a"}` keeps its quotation marks, an int without L is
no long, commas inside texts separate items. A text that is no literal of its type is a
variable's name and stays a text."""

import copy
import re
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
PYTHON = "python"
NAMES = {"java": "Java", "javascript": "JavaScript"}
SYNTAX = {"java": "Java 8 SDK", "javascript": "JavaScript"}
# Characters; a limit against texts on which the patterns would take long.
LONGEST = 4_000
_WHOLE = re.compile(r"^-?\d+$")
_PLAIN = re.compile(r"^-?\d+(\.\d+)?$")
_POINT = re.compile(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?$")
_SUFFIXED = {
    "float": re.compile(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?[fF]$"),
    "long": re.compile(r"^-?\d+[lL]$"),
    "Bigint": re.compile(r"^-?\d+n$"),
}
_AS_LIST = re.compile(r"new\s+ArrayList<\w*>\(Arrays\.asList\((.+?)\)\)")
_ADDING = re.compile(r"new\s+ArrayList<\w*>\(\)\s*\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_NEW_LIST = re.compile(r"new\s+ArrayList<\w*>\(\)")
_NEW_ARRAY = re.compile(r"new\s+\w+\[\]\s*\{(.*?)\}")
_PUTTING = re.compile(r"new\s+HashMap<.*?>\s*\(\)\s*\{\s*\{?\s*(.*?)\s*\}?\s*\}", re.DOTALL)
_NEW_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)")
_PUT = re.compile(r"put\(\"(.*?)\",\s*(.*?)\)")
_TABLE = re.compile(
    r"\[\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\]|\bnew\s+Array\(\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\)"
)
_ARRAY = re.compile(r"\[(.*?)\]|\bnew\s+Array\((.*?)\)")
_OBJECT = re.compile(r"\{(.*?)\}")
_PAIR = re.compile(r"([^:]+):\s*(.*?)(?:,\s*(?=[^,]+:)|$)")


def as_texts(function: Row, language: str) -> Row:
    """The schema of a function of this language, whose parameters are texts."""
    tool = copy.deepcopy(function)
    tool["description"] += f" Note that the provided function is in {SYNTAX[language]} syntax."
    for schema in tool["parameters"]["properties"].values():
        schema["description"] = f"{schema.get('description', '')}{_hint(schema, language)}"
        schema["type"] = "string"
        schema.pop("items", None)
        schema.pop("properties", None)
    return tool


def _hint(schema: Row, language: str) -> str:
    kind = schema["type"]
    name = NAMES[language]
    if kind == "any":
        return f" This parameter can be of any type of {name} object in string representation."
    hint = f" This is {name} {kind} type parameter in string representation."
    if "items" in schema:
        of = schema["items"]["type"]
        hint += f" The list elements are of type {of}; they are not in string representation."
    if kind == "dict" and "properties" in schema:
        entries = f"The dictionary entries have the following schema: {schema['properties']}"
        hint += f" {entries}; they are not in string representation."
    return hint


def value_of(text: str, schema: Mapping[str, Any], language: str) -> Any:
    """The value of an argument's text, for a parameter of the original schema."""
    kind = schema["type"]
    items = (schema.get("items") or {}).get("type")
    if len(text) > LONGEST:
        return text
    return java(text, kind, items) if language == "java" else javascript(text, kind, items)


def java(text: str, kind: str, items: str | None = None) -> Any:
    """The value of a Java literal of this type; the text where it is none."""
    if kind in ("byte", "short", "integer") and _WHOLE.match(text):
        return int(text)
    if kind == "double" and _POINT.match(text):
        return float(text)
    if kind == "float" and _SUFFIXED[kind].match(text):
        return float(text[:-1])
    if kind == "long" and _SUFFIXED[kind].match(text):
        return int(text[:-1])
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "ArrayList":
        return _array_list(text, items)
    if kind == "Array":
        return _java_array(text, items)
    if kind == "HashMap":
        return _hash_map(text)
    return text


def _java_array(text: str, items: str | None) -> Any:
    found = _NEW_ARRAY.search(text)
    if not found:
        return text
    parts = [part.strip() for part in found[1].split(",")]
    return [_item(part, items) for part in parts if part]


def _array_list(text: str, items: str | None) -> Any:
    listed = _AS_LIST.search(text)
    adding = _ADDING.search(text)
    if listed:
        parts = listed[1].split(",")
    elif adding:
        parts = re.findall(r"add\((.+?)\)", adding[1])
    else:
        return [] if _NEW_LIST.search(text) else text
    found: list[Any] = []
    for part in parts:
        value = part.strip()
        if items in ("char", "String"):
            found.append(value[1:-1])  # without its quotation marks
        else:
            found.append(_item(value, items))
    return found


def _item(text: str, kind: str | None) -> Any:
    return java(text, kind) if kind else untyped(text, java_suffixes=True)


def _hash_map(text: str) -> Any:
    putting = _PUTTING.search(text)
    if putting:
        pairs = _PUT.findall(putting[1])
        return {key: untyped(value.strip(), java_suffixes=True) for key, value in pairs}
    return {} if _NEW_MAP.search(text) else text


def untyped(text: str, java_suffixes: bool = False) -> Any:
    """The value of a literal whose type is not declared; the text where it is none."""
    if text in ("true", "false"):
        return text == "true"
    quotes = '"' if java_suffixes else "\"'"
    if any(text.startswith(quote) and text.endswith(quote) for quote in quotes):
        return text[1:-1]
    if java_suffixes and _SUFFIXED["long"].match(text):
        return int(text[:-1])
    if java_suffixes and _SUFFIXED["float"].match(text):
        return float(re.sub(r"[fF]$", "", text))
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def javascript(text: str, kind: str, items: str | None = None) -> Any:
    """The value of a JavaScript literal of this type; the text where it is none."""
    if kind == "String" and any(text.startswith(q) and text.endswith(q) for q in "\"'"):
        return text[1:-1]
    if kind == "integer" and _WHOLE.match(text):
        return int(text)
    if kind == "float" and _PLAIN.match(text):
        return float(text)
    if kind == "Bigint" and _SUFFIXED[kind].match(text):
        return int(text[:-1])
    if kind == "Boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "array":
        return _array(text.strip(), items)
    if kind == "dict":
        return _object(text.strip())
    return text


def _array(text: str, items: str | None) -> Any:
    table = _TABLE.match(text)
    if table:
        rows = re.findall(r"\[(.*?)\]", table[0])
        rows[0] = rows[0].strip().removeprefix("[")
        return [[untyped(part.strip()) for part in row.strip().split(",")] for row in rows]
    found = _ARRAY.match(text)
    if not found:
        return text
    inner = (found[1] if found[1] is not None else found[2]).strip()
    parts = [part.strip() for part in inner.split(",")] if inner else []
    return [javascript(part, items) if items else untyped(part) for part in parts]


def _object(text: str) -> Any:
    found = _OBJECT.match(text)
    if not found:
        return text
    entries = {}
    for name, value in _PAIR.findall(found[1]):
        entries[name.strip().strip("'\"")] = _entry(value.strip())
    return entries


def _entry(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return _array(text, None)
    if text.startswith("{") and text.endswith("}"):
        return _object(text)
    return untyped(text.strip("'\"").strip())


def written(value: Any, schema: Mapping[str, Any], language: str) -> str:
    """A text that `value_of` reads as this value, where there is one."""
    ways = _java_texts(value, schema) if language == "java" else _javascript_texts(value)
    return next((text for text in ways if value_of(text, schema, language) == value), ways[0])


def _java_texts(value: Any, schema: Mapping[str, Any]) -> list[str]:
    if isinstance(value, dict):
        puts = " ".join(f'put("{key}", {_plain(each)});' for key, each in value.items())
        return [f"new HashMap<>() {{{{ {puts} }}}}"]
    if isinstance(value, list):
        ways = []
        suffix = _suffix(schema.get("items"))
        for quote in ('"', ""):
            parts = ", ".join(_plain(each, quote, suffix) for each in value)
            if schema["type"] == "ArrayList":
                ways.append(f"new ArrayList<>(Arrays.asList({parts}))")
            else:
                ways.append(f"new Object[]{{{parts}}}")
        return ways
    return [_plain(value, "", _suffix(schema))]


def _javascript_texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        entries = ", ".join(f"{key}: {_javascript_texts(each)[0]}" for key, each in value.items())
        return [f"{{{entries}}}"]
    if isinstance(value, list):
        return [f"[{', '.join(_javascript_texts(each)[0] for each in value)}]"]
    return [_plain(value, ""), _plain(value), f"{value}n"]


def _plain(value: Any, quote: str = '"', suffix: str = "") -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    return f"{value}{suffix}"


def _suffix(schema: Any) -> str:
    kind = schema["type"] if schema else ""
    return {"long": "L", "float": "f"}.get(kind, "")
