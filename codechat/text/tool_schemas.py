"""The schema of a tool in any public form -> {"name", "description", "parameters": JSON
Schema}.

    OpenAI             {"type": "function", "function": {...}}, {"function": {...}}, or without the object around it
    MCP, Anthropic     {"name", "description", "inputSchema" or "input_schema"}; Bedrock has toolSpec around it
    xLAM, Seal-Tools   "parameters": {"city": {"type": "str, optional", ...}}, without the object around the names
    lists              "parameters": [{"name": "city", "type": "string", "required": true}]

Words for types of Python, Java, JavaScript, C and OpenAPI become JSON Schema's: `float`,
`dict`, `List[int]`, `Optional[str]`, `Map<String, Integer>`, `array of strings`, `int,
optional`, and `nullable: true`. A word that is not
known is never read as another one: the value is left unconstrained and the word is named, or it
is an error. What is JSON Schema already stays as it is."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

from codechat.core.errors import DataError

Schema = dict[str, Any]

# Words by the type of JSON Schema that they mean, in lower case.
WORDS = {
    "string": "string str text char character varchar charsequence bytes bytearray",
    "integer": (
        "integer int long short byte bigint biginteger int8 int16 "
        "int32 int64 uint uint8 uint16 uint32 uint64"
    ),
    "number": "number float double decimal numeric real float32 float64 bigdecimal",
    "boolean": "boolean bool",
    "array": "array list tuple set frozenset sequence iterable collection queue deque stack vector arraylist linkedlist"
    " hashset",
    "object": "object dict dictionary map mapping hashmap hashtable treemap linkedhashmap",
    "null": "null none nonetype nil",
    "any": "any",
}
TYPE_OF_WORD = {word: kind for kind, words in WORDS.items() for word in words.split()}
TYPES = tuple(kind for kind in WORDS if kind != "any")
# Where a tool has its parameters: usual names, and others that count where none of the usual
# ones is given.
USUAL_KEYS = ("parameters", "inputSchema", "input_schema", "parametersJsonSchema")
PARAMETER_KEYS = (*USUAL_KEYS, "input_parameters", "inputs", "arguments", "args", "args_schema")
# What holds a list of tools.
LIST_KEYS = ("tools", "functionDeclarations", "function_declarations")
# Keys of a tool that may hold a schema, but none of its parameters.
OTHER_KEYS = (
    "outputSchema output_schema output output_parameters outputs returns return response responses results result"
    " annotations metadata _meta examples example"
).split()
# Keywords whose values are schemas: one each, a list of them, one by name.
ONE_SCHEMA = (
    "items additionalItems unevaluatedItems contains additionalProperties unevaluatedProperties propertyNames"
    " not if then else"
).split()
LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
KEYWORDS = (*ONE_SCHEMA, *NAMED_SCHEMAS, "default", "const", "examples", "example")
# Keywords that say, without a type, that an object is a schema and no table of names.
COMPOSING = ("$ref", "anyOf", "oneOf", "allOf")
# characters of a type; what is longer is prose, and patterns must not search all of it
LONGEST_WORDS = 1000
DEEPEST = 100  # levels of JSON within a tool's parameters; Python cannot follow many more
_PREFIX = re.compile(r"\b(?:typing|builtins|collections|java\.util|java\.lang)\.")
_OPTIONAL = re.compile(
    r"[\s,(]+(?:optional|default)\b(?!\s*\[)[^\[\]<>]*\Z|\A\s*optional[\s,]+", re.IGNORECASE
)
_REQUIRED = re.compile(r"[\s,]+\(?required\)?\s*\Z", re.IGNORECASE)
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_][\w.]*)|(?P<number>-?\d[\d.]*)"""
    r"""|(?P<mark>\[\]|\.\.\.|[\[\]<>(),|?]))""",
    re.DOTALL,
)
_CLOSING = {"[": "]", "<": ">", "(": ")"}


@dataclass
class Report:
    """What a schema has that is not known. strict: the first of it is an error instead."""

    tool: str = ""
    strict: bool = False
    unknown: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        message = f"tool {self.tool!r}: {where}{' ' if where else ''}{what}"
        if self.strict:
            raise DataError(
                f"{message}; expected JSON Schema, such as string, integer, number, boolean, array"
            )
        if message not in self.unknown:
            self.unknown.append(message)


def listed_tools(content: Any) -> list[Any]:
    """The tools of a list, of an object that holds one (MCP's {"tools": [...]}, Gemini's
    {"functionDeclarations": [...]}), or of one tool."""
    if isinstance(content, list | tuple):
        return [tool for item in content for tool in listed_tools(item)]
    for key in LIST_KEYS:
        if (
            isinstance(content, Mapping)
            and "name" not in content
            and isinstance(content.get(key), list)
        ):
            return listed_tools(content[key])
    return [content]


def tool_schema(item: Any, unknown: list[str] | None = None) -> Schema:
    """The tool in OpenAI's form, other keys as they are. What is so already is returned as it is.

    unknown: takes a message for each type that is not known; without it such a type raises
    DataError, as does a tool without a name or with parameters in no known form."""
    inner = _unwrapped(item)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise DataError(
            f"tool {str(item)[:80]}; expected an object with name, description and parameters"
        )
    # who takes the messages will show them; who does not needs the error
    report = Report(name, strict=unknown is None)
    given = _parameters_of(inner, name)
    if _is_deeper(given, DEEPEST):
        raise DataError(
            f"tool {name!r} has parameters deeper than {DEEPEST} "
            "levels; name the inner ones in $defs"
        )
    parameters = _object_schema(given, inner.get("required"), report)
    if unknown is not None:
        unknown += report.unknown
    tool = {"name": name, "description": ""}
    tool |= {
        key: value
        for key, value in inner.items()
        if key == "parameters" or key not in PARAMETER_KEYS
    }
    if tool.get("description") is None:
        tool["description"] = ""
    return tool | {"parameters": parameters}


def _unwrapped(item: Any) -> Any:
    """The object with the tool's name."""
    if not isinstance(item, Mapping):
        return None
    for key in ("function", "toolSpec"):
        if isinstance(item.get(key), Mapping):
            return item[key]
    return item


def _parameters_of(tool: Mapping[str, Any], name: str) -> Any:
    """The tool's parameters. DataError where they stand under an unknown key, or twice."""
    given = {key: tool[key] for key in PARAMETER_KEYS if tool.get(key) not in (None, "", [], {})}
    if not given:
        for key, value in tool.items():
            if key not in (*PARAMETER_KEYS, *OTHER_KEYS) and _may_be_parameters(key, value):
                known = ", ".join(USUAL_KEYS[:3])
                raise DataError(
                    f"tool {name!r} has a schema under {key!r}; "
                    f"its parameters are read from {known}"
                )
        return {}
    given = {key: given[key] for key in USUAL_KEYS if key in given} or given
    key, parameters = next(iter(given.items()))
    if any(other != parameters for other in given.values()):
        raise DataError(
            f"tool {name!r} has different parameters under {' and '.join(given)}; keep one of them"
        )
    if isinstance(parameters, str):
        try:
            parameters = json.loads(parameters)
        except ValueError:
            text = parameters[:60]
            raise DataError(
                f"tool {name!r}: {key} is the text {text!r}; expected JSON Schema"
            ) from None
    if (
        isinstance(parameters, Mapping)
        and parameters.keys() == {"json"}
        and isinstance(parameters["json"], Mapping)
    ):
        return parameters["json"]  # Bedrock
    return parameters


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has more levels of lists and objects than that."""
    level = [value]
    for _ in range(levels):  # no recursion: the value may be deeper than Python can follow
        level = list(chain.from_iterable(map(_values_within, level)))
        if not level:
            return False
    return True


def _values_within(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _may_be_parameters(key: str, value: Any) -> bool:
    if isinstance(value, Mapping) and (
        isinstance(value.get("properties"), Mapping) or value.get("type") == "object"
    ):
        return True
    return bool(value) and isinstance(value, Mapping | list) and "param" in key.lower()


def _object_schema(given: Any, required: Any, report: Report) -> Schema:
    """The schema of an object of parameters. required: names that the tool itself lists."""
    names = (
        [name for name in required if isinstance(name, str)]
        if isinstance(required, list | tuple)
        else []
    )
    if isinstance(given, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in given
    ):
        return _of_names({one["name"]: _without(one, "name") for one in given}, names, report)
    if not isinstance(given, Mapping):
        raise DataError(
            f"tool {report.tool!r} has parameters {str(given)[:60]!r}; "
            "expected an object: JSON Schema"
        )
    properties = given.get("properties")
    due = given.get("required")
    if not _is_schema(given, report):
        if isinstance(due, list):
            given = _without(given, "required")
            names += map(str, due)
        return _of_names(given, names, report)
    if not isinstance(properties or {}, Mapping):
        raise DataError(
            f"tool {report.tool!r} has properties {str(properties)[:60]!r}; expected an object"
        )
    if not isinstance(due or [], list | tuple):
        raise DataError(f"tool {report.tool!r} has required {str(due)[:60]!r}; expected a list")
    schema = _normal({key: value for key, value in given.items() if value is not None}, "", report)
    if names and not due and isinstance(properties, Mapping):
        schema["required"] = [name for name in names if name in properties]
    return dict(schema)


def _without(mapping: Mapping[str, Any], key: str) -> Schema:
    return {other: value for other, value in mapping.items() if other != key}


def _is_schema(given: Mapping[str, Any], report: Report) -> bool:
    """Whether parameters are a schema of an object, not a table of the parameters' names, one
    of which may be `type` or `properties`. DataError for a type that an object of parameters
    cannot have."""
    properties = given.get("properties")
    kind = given.get("type")
    named = isinstance(properties, Mapping) and all(
        isinstance(one, Mapping | bool) for one in properties.values()
    )
    if _may_be_object(given):
        stray = [
            k
            for k, v in given.items()
            if isinstance(v, Mapping) and "type" in v and k not in KEYWORDS
        ]
        if stray and properties is None:
            raise DataError(
                f"tool {report.tool!r} has {stray[0]!r} beside "
                "its type; expected {'properties': ...}"
            )
        return True
    if isinstance(kind, Mapping):  # a parameter is called `type`; a schema may stand beside it
        return False
    if kind is None:
        composed = any(isinstance(given.get(key), list) for key in LISTED_SCHEMAS) or isinstance(
            given.get("$ref"), str
        )
        rest = _without(given, "required") if isinstance(given.get("required"), list) else given
        return named or composed or not rest or not _names_only(rest)
    if named:
        return True
    if _names_only(_without(given, "type")) and len(given) > 1:
        return False
    raise DataError(
        f"tool {report.tool!r} has parameters of type {kind!r}; expected an object: JSON Schema"
    )


def _may_be_object(given: Mapping[str, Any]) -> bool:
    """Whether the type of parameters says that an object is possible."""
    named = [type_named(word) for word in kinds_of(given) if isinstance(word, str)]
    return any(kind and kind.get("type") == "object" for kind in named)


def _names_only(given: Mapping[str, Any]) -> bool:
    """Whether each value may describe a parameter: a schema, or words for its type."""
    words = (
        "description",
        "title",
        "$schema",
        "$id",
        "additionalProperties",
        "$defs",
        "definitions",
        "strict",
    )
    return all(
        isinstance(v, Mapping) or (isinstance(v, str) and k not in words) for k, v in given.items()
    )


def _of_names(given: Mapping[str, Any], required: Sequence[str], report: Report) -> Schema:
    """The object of parameters that are given by name. One is required unless its type says
    `optional`, it has a default, or it says so itself."""
    properties: Schema = {}
    due = []
    for name, value in given.items():
        about = {"type": value} if isinstance(value, str) else value
        if not isinstance(about, Mapping):
            raise DataError(
                f"tool {report.tool!r} has parameters {str(dict(given))[:80]!r}; "
                "expected JSON Schema"
            )
        says = about.get("required")
        optional = (
            says is False
            or about.get("optional") is True
            or "default" in about
            or _is_optional(about)
        )
        if name in required or says is True or not (required or optional):
            due.append(name)
        properties[name] = _normal(_without(about, "optional"), name, report)
    return {"type": "object", "properties": properties, "required": due}


def _is_optional(about: Mapping[str, Any]) -> bool:
    kind = about.get("type")
    return isinstance(kind, str) and bool(
        _OPTIONAL.search(kind) or re.match(r"\s*(?:typing\.)?Optional\[", kind)
    )


def say_unknown(messages: Sequence[str]) -> None:
    """What `tool_schema` found unknown, on stderr, each message once."""
    for message in messages:
        say_once(f"{message}; it is offered as any")


@lru_cache(maxsize=2000)
def say_once(message: str) -> None:
    """Print on stderr what was not said before."""
    print(message, file=sys.stderr)


def whole_object(parameters: Schema) -> Schema:
    """Parameters with the type and the properties of an object, also where there are none."""
    if any(key in parameters for key in COMPOSING):
        return parameters
    return {"type": "object", "properties": {}} | parameters


def _normal(schema: Any, where: str, report: Report) -> Any:
    """The schema with the words of JSON Schema. where: the path to it, for messages."""
    if isinstance(schema, bool):
        return schema
    if isinstance(schema, str):
        schema = {"type": schema}
    if not isinstance(schema, Mapping):
        report.add(where, f"has {str(schema)[:60]!r} in place of a schema")
        return {}
    out: Schema = {}
    for key, value in schema.items():
        out |= _keyword(key, value, schema, where, report)
    return _nullable(_lifted(out, schema), schema)


def _keyword(key: str, value: Any, schema: Mapping[str, Any], where: str, report: Report) -> Schema:
    """What one keyword of `schema` says in JSON Schema of 2020-12; nothing where it has no
    meaning."""
    if key == "type":
        typed = _typed(value, where, report)
        return {part: typed[part] for part in typed if part == "type" or part not in schema}
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        inside = where if key == "properties" else f"{where}.{key}"
        named = {}
        for name, one in value.items():
            named[name] = _normal(one, f"{inside}.{name}".lstrip("."), report)
        return {key: named}
    if key == "items" and isinstance(value, list):  # before 2020-12
        out: Schema = {
            "prefixItems": [_normal(one, f"{where}[{i}]", report) for i, one in enumerate(value)]
        }
        if "additionalItems" in schema:
            out["items"] = _normal(schema["additionalItems"], f"{where}[]", report)
        return out
    if key == "additionalItems" and isinstance(schema.get("items"), list):
        return {}
    if key in LISTED_SCHEMAS and isinstance(value, list):
        return {key: [_normal(one, where, report) for one in value]}
    if key in ONE_SCHEMA:
        return {key: _normal(value, f"{where}[]" if key == "items" else where, report)}
    if key == "enum" and not isinstance(value, list):
        report.add(where, f"has an enum {str(value)[:60]!r} that is no list; any value is allowed")
        return {}
    if key == "required" and isinstance(value, list | tuple):
        return {key: list(value)}
    if key == "required":
        if not isinstance(value, bool):  # a bool belongs to the object around, see `_lifted`
            report.add(where, f"has required {str(value)[:60]!r} that is no list")
        return {}
    if key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):  # draft 4
        bound = key.removeprefix("exclusive").lower()
        return {key: schema[bound]} if value and bound in schema else {}
    return {key: value}


def _lifted(out: Schema, schema: Mapping[str, Any]) -> Schema:
    """The object's schema with the names of properties that say `required: true` themselves, as
    before draft 4."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return out
    due = [
        name
        for name, one in properties.items()
        if isinstance(one, Mapping) and one.get("required") is True
    ]
    if due:
        out["required"] = list(dict.fromkeys([*out.get("required", []), *due]))
    return out


def _nullable(out: Schema, schema: Mapping[str, Any]) -> Schema:
    """The schema with null beside its type where it says so, as OpenAPI 3.0 does; an
    enumeration takes null too where the type has it by such a word."""
    kinds = out.get("type")
    if "enum" in out and None not in out["enum"]:
        by_word = (
            isinstance(schema.get("type"), str) and isinstance(kinds, list) and "null" in kinds
        )
        if by_word or schema.get("nullable") is True:
            out["enum"] = [*out["enum"], None]
    if not isinstance(schema.get("nullable"), bool):
        return out
    del out["nullable"]
    if not schema["nullable"]:
        return out
    if isinstance(kinds, str) and kinds != "null":
        return out | {"type": [kinds, "null"]}
    if any(key in out for key in (*COMPOSING, "const")):
        return {"anyOf": [out, {"type": "null"}]}
    return (
        out | {"type": [*kinds, "null"]} if isinstance(kinds, list) and "null" not in kinds else out
    )


def _typed(value: Any, where: str, report: Report) -> Schema:
    """The part of a schema that the value of `type` says."""
    listed = value if isinstance(value, list) else [value]
    if listed and all(isinstance(one, str) and one in TYPES for one in listed):
        return {"type": value}
    read = [type_named(one) if isinstance(one, str) else None for one in listed]
    known = [one for one in read if one is not None]
    if not known or len(known) < len(read):
        report.add(where, f"has the unknown type {str(value)[:60]!r}")
        return {}
    return _union(known)


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The types of a schema; none where it says none."""
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _union(parts: Sequence[Schema]) -> Schema:
    """The schema of a value that fits one of them."""
    parts = [part for i, part in enumerate(parts) if part not in parts[:i]]
    if {} in parts:
        return {}
    if len(parts) == 1:
        return parts[0]
    if all(part.keys() == {"type"} for part in parts):
        return {"type": list(dict.fromkeys(chain.from_iterable(map(kinds_of, parts))))}
    return {"anyOf": list(parts)}


def type_named(text: str) -> Schema | None:
    """The schema that words for a type of any language mean; None where they are not known."""
    if text == "enum":  # its values stand beside it
        return {}
    text = _PREFIX.sub("", _REQUIRED.sub("", _OPTIONAL.sub("", text[:LONGEST_WORDS])))
    tokens = _Tokens(text)
    try:
        read = _alternatives(tokens)
    except (LookupError, RecursionError):
        return None
    return read if not tokens.rest() else None


class _Tokens:
    """The words and marks of a type, taken one after the other; LookupError where another one
    is required."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self.text, self.at)

    def next_is(self, *marks: str) -> str | None:
        """The mark or word that comes next, in lower case, if it is one of these; it is taken."""
        token = self.peek()
        found = (token["mark"] or token["word"] or "").lower() if token else ""
        if not token or found not in marks:
            return None
        self.at = token.end()
        return found

    def take(self, kind: str) -> str:
        token = self.peek()
        if not token or token[kind] is None:
            raise LookupError(kind)
        self.at = token.end()
        return token[kind]

    def rest(self) -> str:
        return self.text[self.at :].strip()


def _alternatives(tokens: _Tokens) -> Schema:
    parts = [_one_type(tokens)]
    while tokens.next_is("|", "or"):
        parts.append(_one_type(tokens))
    return _union(parts)


def _one_type(tokens: _Tokens) -> Schema:
    if tokens.next_is("("):
        schema = _alternatives(tokens)
        if not tokens.next_is(")"):
            raise LookupError(")")
    else:
        schema = _word(tokens)
    while mark := tokens.next_is("[]", "?"):
        schema = (
            {"type": "array", "items": schema}
            if mark == "[]"
            else _union([schema, {"type": "null"}])
        )
    return schema


def _word(tokens: _Tokens) -> Schema:
    word = tokens.take("word").lower()
    if word == "literal" and tokens.next_is("["):
        return {"enum": list(_literals(tokens))}
    if word in ("optional", "union", "annotated"):
        inside = _inside(tokens)
        if not inside:
            raise LookupError(word)
        return _union([*inside, {"type": "null"}] if word == "optional" else inside)
    # "strings", but not "short"
    kind = TYPE_OF_WORD.get(word) or TYPE_OF_WORD.get(word.removesuffix("s"))
    if kind is None:
        raise LookupError(word)
    if kind == "any":
        return {}
    out: Schema = {"type": kind}
    if kind == "array":
        inside = _inside(tokens)
        if inside is None and tokens.next_is("of"):
            inside = [_alternatives(tokens)]
        items = _union(inside or [{}])
        if items:
            out["items"] = items
    elif kind == "object":
        inside = _inside(tokens)
        if inside and len(inside) == 2 and inside[1]:  # of keys and of values
            out["additionalProperties"] = inside[1]
    return out


def _inside(tokens: _Tokens) -> list[Schema] | None:
    """The types in brackets behind a word; None without brackets."""
    opening = tokens.next_is(*_CLOSING)
    return list(_arguments(tokens, _CLOSING[opening])) if opening else None


def _arguments(tokens: _Tokens, closing: str) -> Iterator[Schema]:
    while not tokens.next_is(closing):
        if not tokens.next_is("..."):
            yield _alternatives(tokens)
        if not tokens.next_is(","):
            if not tokens.next_is(closing):
                raise LookupError(closing)
            return


def _literals(tokens: _Tokens) -> Iterator[Any]:
    words = {"true": True, "false": False, "none": None}
    while not tokens.next_is("]"):
        token = tokens.peek()
        word = tokens.next_is(*words)
        if word:
            yield words[word]
        elif token and token["text"]:
            yield tokens.take("text")[1:-1]
        else:
            yield json.loads(tokens.take("number"))
        tokens.next_is(",")
