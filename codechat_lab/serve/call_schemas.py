"""Schemas of functions as llguidance takes them: `calls_schema` describes every call of a list
of functions.

llguidance lacks some keywords of JSON Schema and reads others loosely. So a schema is
rewritten: numbers and patterns get bounds, objects whose keys are listed are closed, and what
has no grammar is left out with a message. More is then allowed than the schema says, never
less."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from codechat.core.errors import ConfigError, DataError
from codechat.text import tool_lists, tool_schemas

Schema = dict[str, Any]
# characters of a string with a pattern or format and no maxLength, which must end
LONGEST_TEXT = 256
# The spelling of `format_call`. lenient: keywords that llguidance lacks are left out, with a
# warning each.
CANONICAL = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": True,
}
# The spelling of templates that write objects on several lines, or without blanks.
SPACED = CANONICAL | {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True}
# Bounds of numbers that have none: JSON readers reject 1e999 and very long digits; llguidance
# has no larger range.
LARGEST = 9 * 10**18
# Where a schema says nothing: any value whose numbers every reader takes.
ANY: Schema = {"$ref": "#/$defs/any"}
FREE: Schema = {"$ref": "#/$defs/free"}  # the same with numbers of any size
ANY_VALUES: Schema = {
    "any": {
        "anyOf": [
            {"type": ["string", "boolean", "null"]},
            {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
            {"type": "array", "items": ANY},
            {"type": "object", "additionalProperties": ANY},
        ]
    },
    "free": True,
}
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ALTERNATIVES = ("anyOf", "oneOf")
COMPOSED = {"allOf", "$ref", *ALTERNATIVES}
DEFINITIONS = ("$defs", "definitions")
# Keywords without which a schema says nothing.
_VALUES = "type enum const pattern format minLength maxLength items prefixItems"
_KEYS = "properties patternProperties required additionalProperties"
SAYING = {*_VALUES.split(), *_KEYS.split(), *COMPOSED, *NUMERIC}
NOTHING: tuple[Any, ...] = ({}, True)  # of `not`: no value is allowed, as zod writes undefined
# Keywords about one kind of value; a message names them where a schema says nothing else.
OF_SOME_VALUES = (
    "not if uniqueItems minItems maxItems contains unevaluatedItems minProperties maxProperties propertyNames "
    "unevaluatedProperties dependentRequired dependentSchemas dependencies $dynamicRef $recursiveRef"
).split()
# Keywords that are read elsewhere or belong to a whole document.
_OF_A_DOCUMENT = (
    "$id id $schema $anchor $dynamicAnchor $dynamicRef $recursiveRef x-guidance $comment"
)
DOCUMENT = {*_OF_A_DOCUMENT.split(), *DEFINITIONS}


def calls_schema(
    tools: Sequence[Mapping[str, Any]],
    *,
    strict: bool,
    level: int,
    relaxed: list[str],
    arguments_key: str = "arguments",
    spaced: bool = False,
) -> Schema:
    """The schema of one call of any of the tools, of whose schemas the first `level` of LEVELS
    are skipped.

    arguments_key: the key of the arguments, "parameters" in Llama's calls. spaced: any white
    space between values. relaxed: takes a message for each part that is not enforced. strict: an
    unknown type raises ConfigError, as does a tool without a readable schema."""
    definitions: Schema = dict(ANY_VALUES)
    calls = []
    for i, tool in enumerate(tools):
        try:
            read = tool_schemas.tool_schema(tool, unknown=None if strict else relaxed)
        except DataError as error:
            raise ConfigError(f"{error}; the schema has no grammar") from None
        place = f"tool{i}"
        parameters = tool_schemas.whole_object(read["parameters"])
        definitions[place] = _arguments_schema(read["name"], parameters, place, level, relaxed)
        properties = {"name": {"const": read["name"]}, arguments_key: {"$ref": f"#/$defs/{place}"}}
        calls.append(_closed_object(properties, list(properties)))
    return {"anyOf": calls, "$defs": definitions, "x-guidance": SPACED if spaced else CANONICAL}


def _closed_object(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


# ---- how much of a schema is enforced


def _of_document(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """The schema itself."""
    return _Translator(parameters, place, relaxed).schema(parameters, "")


def _of_free_document(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """The schema itself, without bounds in values of any kind: two parts that both allow any
    value have no common grammar otherwise."""
    relaxed.append("numbers within values of any kind are not bounded")
    bounded = json.dumps(_of_document(parameters, place, relaxed))
    free: Schema = json.loads(bounded.replace(json.dumps(ANY), json.dumps(FREE)))
    return free


def _of_list(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """What a list of tools in a prompt would say of it: names, types and enumerations."""
    relaxed.append("only its names, types, enumerations and required arguments hold")
    return _of_document(tool_lists.listed_parameters(parameters), place, [])


def _of_names(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """Its names, with any values."""
    relaxed.append("only its names and required arguments hold")
    listed = tool_lists.listed_parameters(parameters)
    return _closed_object(dict.fromkeys(listed["properties"], ANY), listed["required"])


LEVELS = (_of_document, _of_free_document, _of_list, _of_names)  # from all of a schema to its names


def _arguments_schema(
    name: str, parameters: Schema, place: str, level: int, relaxed: list[str]
) -> Schema:
    """The schema of a tool's arguments at `#/$defs/place`: the first of LEVELS, from `level`
    on, that has a grammar."""
    problems: list[str] = []
    for build in LEVELS[level:]:
        notes: list[str] = []
        schema = build(parameters, place, notes)
        document = {
            "$ref": f"#/$defs/{place}",
            "$defs": ANY_VALUES | {place: schema},
            "x-guidance": CANONICAL,
        }
        wrong, messages = _checked(json.dumps(document))
        if not wrong:
            relaxed += [f"tool {name!r}: {note}" for note in (*problems, *notes, *messages)]
            return schema
        problems += messages
    raise ConfigError(
        f"the schema of {name!r} has no grammar ({' '.join(problems)[:200]}); simplify it"
    )


@lru_cache(maxsize=4096)
def _checked(schema: str) -> tuple[bool, tuple[str, ...]]:
    """(whether llguidance has no grammar for a schema, its messages)."""
    from llguidance import LLMatcher

    try:
        wrong, messages = LLMatcher.validate_grammar_with_warnings(
            LLMatcher.grammar_from_json_schema(schema), None
        )
    except (TypeError, ValueError) as error:
        return True, (str(error),)
    return wrong, tuple(" ".join(message.split())[:200] for message in messages)


def _has_grammar(schema: Schema) -> bool:
    return not _checked(json.dumps(schema))[0]


# ---- one document


class _Inlined(NamedTuple):
    """Where a schema comes from that replaces a reference: the references that led to it, and
    its path in the document."""

    pointers: tuple[str, ...]
    path: tuple[str, ...]

    def at(self, *steps: str) -> _Inlined:
        return _Inlined(self.pointers, (*self.path, *steps))


class _Translator:
    """Writes a tool's schema as llguidance takes it: numbers have bounds, objects whose keys
    are listed have no further ones, what may be any value is `ANY`, and references point to
    where the schema stands, `#/$defs/place`.

    The keys of an object are known only where all its parts are put together (allOf, $ref,
    anyOf). So a part stays open (`whole` false), and the object around it is closed."""

    def __init__(self, root: Schema, place: str, relaxed: list[str]) -> None:
        self.root = root
        self.place = place
        self.relaxed = relaxed

    def _relax(self, where: str, what: str) -> None:
        message = f"{where.replace('.properties.', '.').strip('.') or 'arguments'}: {what}"
        if message not in self.relaxed:
            self.relaxed.append(message)

    def schema(
        self, node: Any, where: str, whole: bool = True, inlined: _Inlined | None = None
    ) -> Any:
        """where: path to the node, for messages. inlined: where the node stands in the
        document, if it replaces a reference to it or is a part of a schema that does."""
        if node is False:
            return False
        if not isinstance(node, Mapping):
            return dict(ANY) if whole else {}
        if node.get("not") in NOTHING:
            return False
        if not SAYING & node.keys():
            return self._silent(node, where, whole) | self._definitions(node, where)
        out = {key: value for key, value in node.items() if key not in DOCUMENT}
        if inlined is None:
            out |= self._definitions(node, where)
        out = self._values(out, where)
        self._numbers(out, where)
        self._texts(out, where)
        self._parts(out, node, where, whole, inlined)
        out = self._reference(out, where, whole, inlined)
        self._children(out, where, inlined)
        return self._object(out, node, where, whole)

    def _silent(self, node: Mapping[str, Any], where: str, whole: bool) -> Schema:
        """A node that says nothing of its values' type: any value, unless the node is a part of
        another."""
        if not whole:
            return dict(node)
        for keyword in OF_SOME_VALUES:
            if keyword in node:
                self._relax(where, f"{keyword} {str(node[keyword])[:60]}")
        return dict(ANY)

    def _definitions(self, node: Mapping[str, Any], where: str) -> Schema:
        """The definitions of the node, which references within it point to."""
        given = {key: node[key] for key in DEFINITIONS if isinstance(node.get(key), Mapping)}
        return {key: self._each(schemas, where, None, key) for key, schemas in given.items()}

    def _each(
        self, schemas: Mapping[str, Any], where: str, inlined: _Inlined | None, key: str
    ) -> Schema:
        """The schemas by name that stand under a keyword."""
        return {
            name: self._child(one, f"{where}.{name}", inlined, key, name)
            for name, one in schemas.items()
        }

    def _child(self, node: Any, where: str, inlined: _Inlined | None, *steps: str) -> Any:
        """The schema of a value within the node. A recursive model would be inlined for ever:
        there it is a reference to where it stands."""
        if inlined and '"$ref"' in json.dumps(node):
            return {"$ref": self._address(inlined.at(*steps).path)}
        return self.schema(node, where)

    def _address(self, path: Sequence[str]) -> str:
        steps = [quote(step.replace("~", "~0").replace("/", "~1"), safe="~") for step in path]
        return "/".join(["#", "$defs", self.place, *steps])

    def _values(self, out: Schema, where: str) -> Schema:
        """An enumeration alone, of the values that have the schema's type."""
        values = [out["const"]] if "const" in out else out.get("enum")
        if values is None:
            return out
        kinds = tool_lists.kinds_of(out)
        fitting = [value for value in values if not kinds or _has_kind(value, kinds)]
        if not fitting:
            self._relax(where, f"the type {kinds} of none of its values {str(values)[:60]}")
        rest = {
            key: out[key] for key in ("$ref", *ALTERNATIVES, "allOf", *DEFINITIONS) if key in out
        }
        if values:
            return {"enum": fitting or values} | rest
        if "type" in out:
            return rest | {"type": out["type"]}
        return rest or dict(ANY)

    def _numbers(self, out: Schema, where: str) -> None:
        kinds = tool_lists.kinds_of(out)
        kind = next((kind for kind in ("number", "integer") if kind in kinds), None)
        if kind is None:
            return
        given = {key: out.pop(key) for key in NUMERIC if key in out}
        # llguidance cuts others, silently
        kept = {key: value for key, value in given.items() if _in_range(value)}
        for key in sorted(kept, key=lambda key: key != "multipleOf"):
            if _has_grammar({"type": kind} | _bounded(kept)):
                break
            del kept[key]
        for key in given:
            if key not in kept:
                self._relax(where, f"{key} {given[key]}")
        # the usual bounds must not exclude what the schema's own ones allow
        beyond = any(key != "multipleOf" and not _in_range(given[key]) for key in given)
        out |= kept if kind == "integer" and beyond else _bounded(kept)

    def _texts(self, out: Schema, where: str) -> None:
        pattern = out.get("pattern")
        if pattern is not None and not _has_grammar({"type": "string", "pattern": pattern}):
            self._relax(where, f"pattern {str(pattern)[:80]!r}")
            del out["pattern"]
        known = "format" in out and _has_grammar({"type": "string", "format": out["format"]})
        if "pattern" in out or known:
            out.setdefault("maxLength", max(LONGEST_TEXT, out.get("minLength", 0)))

    def _parts(
        self,
        out: Schema,
        node: Mapping[str, Any],
        where: str,
        whole: bool,
        inlined: _Inlined | None,
    ) -> None:
        """The alternatives, and what holds together with the node."""
        # alternatives are whole where nothing beside them adds keys
        union = (
            whole
            and not {"properties", "required", "allOf", "$ref", "patternProperties"} & out.keys()
        )
        for key in (*ALTERNATIVES, "allOf"):
            if not isinstance(out.get(key), list):
                continue
            # `_reference` puts what "$ref" points to before the parts of allOf
            first = int(key == "allOf" and "$ref" in node)
            out[key] = [
                self.schema(
                    one, where, union and key != "allOf", inlined and inlined.at(key, str(i))
                )
                for i, one in enumerate(out[key], first)
            ]

    def _reference(self, out: Schema, where: str, whole: bool, inlined: _Inlined | None) -> Schema:
        """With its reference as llguidance takes it. Beside other keywords, and in a part, the
        schema that it points to is inlined."""
        if "$ref" not in out:
            return out
        pointer = out.pop("$ref")
        alone = not SAYING & out.keys()
        path = tool_lists.path_of(self.root, pointer)
        target = None if path is None else tool_lists.at_path(self.root, path)
        if path is None or target is None:
            self._relax(
                where, f"the reference {str(pointer)[:80]!r}, which points to nothing in the schema"
            )
            return out | ANY if alone else out
        if whole and alone and self._ends(pointer):
            return out | {"$ref": self._address(path)}
        around = inlined.pointers if inlined else ()
        if pointer in around:
            self._relax(where, f"the reference {pointer!r} to itself")
            return out
        part = self.schema(target, where, False, _Inlined((*around, pointer), tuple(path)))
        parts = out.pop("allOf", [])
        return {"allOf": [part, *parts]} | out

    def _ends(self, pointer: Any) -> bool:
        """Whether a reference leads, by references alone, to a schema that is none."""
        seen: list[Any] = []
        while pointer not in seen:
            seen.append(pointer)
            target = tool_lists.pointed_at(self.root, pointer)
            if not isinstance(target, Mapping) or "$ref" not in target:
                return True
            pointer = target["$ref"]
        return False

    def _children(self, out: Schema, where: str, inlined: _Inlined | None) -> None:
        """The schemas of the values within."""
        if isinstance(out.get("prefixItems"), list):
            out["prefixItems"] = [
                self._child(one, f"{where}[{i}]", inlined, "prefixItems", str(i))
                for i, one in enumerate(out["prefixItems"])
            ]
        if "array" in tool_lists.kinds_of(out) or {"items", "prefixItems"} & out.keys():
            out["items"] = self._child(out.get("items", {}), f"{where}[]", inlined, "items")
        for key in ("properties", "patternProperties"):
            if isinstance(out.get(key), Mapping):
                out[key] = self._each(out[key], where, inlined, key)
        if _allows_more(out.get("additionalProperties")):
            further = out["additionalProperties"]
            out["additionalProperties"] = self._child(
                further, f"{where}.*", inlined, "additionalProperties"
            )

    def _object(self, out: Schema, node: Mapping[str, Any], where: str, whole: bool) -> Schema:
        if whole:
            out = self._closed(out, node)
        for key in ("minProperties", "maxProperties"):
            # of listed keys llguidance counts one: any more and it counts further ones only
            counted = "properties" not in out or (
                out.get("additionalProperties") is False and out.get(key) in (0, 1)
            )
            if key in out and not counted:
                self._relax(where, f"{key} {out.pop(key)}")
        return out

    def _closed(self, out: Schema, node: Mapping[str, Any]) -> Schema:
        """With what keys the object has, and that it has no others."""
        names: dict[str, bool] = {}
        for name, certain in self._names(node, ()):
            names[name] = names.get(name, False) or certain
        if not names:
            if "object" in tool_lists.kinds_of(out) and not COMPOSED & out.keys():
                out.setdefault("additionalProperties", False if "properties" in out else dict(ANY))
            return out
        if not {"properties", "required", "allOf"} & out.keys():
            return out
        listed = out.pop("properties", {})
        everywhere = {
            name: listed.get(name, True if certain else ANY) for name, certain in names.items()
        }
        closed: Schema = {"type": "object", "properties": everywhere, **out}
        if "additionalProperties" not in closed and not self._open(node, ()):
            closed["additionalProperties"] = False
        return closed

    def _names(
        self, node: Any, within: tuple[str, ...], certain: bool = True
    ) -> Iterator[tuple[str, bool]]:
        """Keys that an object may have, each with whether its schema stands in a part that
        always holds. certain: node is such a part. within: references around it, which are not
        followed again."""
        if not isinstance(node, Mapping):
            return
        for key, value in node.items():
            parts, inside = self._beside(key, value, within)
            if key == "properties" and isinstance(value, Mapping):
                yield from ((name, certain) for name in value)
            elif key == "required" and isinstance(value, list):
                yield from ((name, False) for name in value if isinstance(name, str))
            elif key in ("if", "then", "else"):
                parts = [value]
            elif key == "dependentSchemas" and isinstance(value, Mapping):
                parts = list(value.values())
            for part in parts:
                yield from self._names(part, inside, certain and key in ("$ref", "allOf"))

    def _beside(
        self, key: str, value: Any, within: tuple[str, ...]
    ) -> tuple[list[Any], tuple[str, ...]]:
        """The schemas of the same object under a keyword, and the references around them."""
        if key == "$ref" and isinstance(value, str) and value not in within:
            return [tool_lists.pointed_at(self.root, value)], (*within, value)
        if key in ("allOf", *ALTERNATIVES) and isinstance(value, list):
            return value, within
        return [], within

    def _open(self, node: Any, within: tuple[str, ...]) -> bool:
        """Whether a part of the schema says that further keys are possible."""
        if not isinstance(node, Mapping):
            return False
        further = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if _allows_more(further) or node.get("patternProperties"):
            return True
        for key, value in node.items():
            parts, inside = self._beside(key, value, within)
            if any(self._open(part, inside) for part in parts):
                return True
        return False


def _allows_more(further: Any) -> bool:
    """Whether the value of additionalProperties allows keys that are not listed."""
    return further is not None and further is not False


def _bounded(numeric: Schema) -> Schema:
    """The keywords with a lower and an upper bound."""
    bounds: Schema = {}
    if "exclusiveMinimum" not in numeric:
        bounds["minimum"] = -LARGEST
    if "exclusiveMaximum" not in numeric:
        bounds["maximum"] = LARGEST
    return bounds | numeric


def _in_range(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _has_kind(value: Any, kinds: Sequence[str]) -> bool:
    """Whether a JSON value has one of the types."""
    if isinstance(value, list):
        return "array" in kinds
    if isinstance(value, Mapping):
        return "object" in kinds
    return tool_lists.is_of(value, kinds)
