"""Token masks that keep an answer's tool calls readable: offered names only, valid JSON, arguments of the types and
enumerations of the schemas.

    grammar = CallGrammar(tokenizer, tags, tools, required=True)
    state = grammar.begin()                     one per completion
    state.mask(room)                            (n,) bool: ids that may come next; room: tokens that may follow it
    token = state.take(token, room)             the id that counts

The grammar is text without a call, then calls; `required`: calls only. Calls have the form of `format_call`, arguments
in the order of the schema; llguidance makes masks of it in microseconds a token. A call that has begun ends in time:
none begins that would not fit, and once the shortest way to end it would no longer fit, `take` replaces the sampled id
by that way. (Where the tag is spelled in ordinary tokens, a call that is not required may still begin too late.)
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat, tool_lists, tool_schemas
from codechat.text.tokenizer import Tokenizer

Schema = dict[str, Any]
LONGEST_CLOSING = 512  # tokens of the shortest way to end a call
LONGEST_TEXT = 256  # characters of a string with a pattern or format and no maxLength, which must end
# of `format_call`; lenient: keywords that llguidance lacks are left out, with a warning each
CANONICAL = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": True,
}
# Of numbers without bounds in the schema: JSON readers reject 1e999 and very long digits; llguidance has no larger
# range.
LARGEST = 9 * 10**18
# Where a schema says nothing: any value whose numbers every reader takes.
ANY: Schema = {"$ref": "#/$defs/any"}
ANY_VALUE: Schema = {
    "anyOf": [
        {"type": ["string", "boolean", "null"]},
        {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
        {"type": "array", "items": ANY},
        {"type": "object", "additionalProperties": ANY},
    ]
}
FREE: Schema = {"$ref": "#/$defs/free"}
ANY_VALUES: Schema = {"any": ANY_VALUE, "free": True}
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ALTERNATIVES = ("anyOf", "oneOf")
COMPOSED = {"allOf", "$ref", *ALTERNATIVES}
DEFINITIONS = ("$defs", "definitions")
# Keywords without which a schema says nothing.
SAYING = {
    *("type", "enum", "const", "properties", "patternProperties", "required", "additionalProperties"),
    *("items", "prefixItems", "pattern", "format", "minLength", "maxLength"),
    *COMPOSED,
    *NUMERIC,
}
NOTHING: tuple[Any, ...] = ({}, True)  # of `not`: no value is allowed, as zod writes undefined
# Keywords that hold of one kind of value, and that are named where a schema says nothing else.
OF_SOME_VALUES = (
    *("not", "if", "uniqueItems", "minItems", "maxItems", "contains", "unevaluatedItems"),
    *("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# Keywords that are read elsewhere or belong to a whole document.
DOCUMENT = {
    *("$id", "id", "$schema", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef"),
    *("x-guidance", "$comment"),
    *DEFINITIONS,
}
# Outside of a string: what ends an object and a list, begins a string, ends a value before another; a digit, since 0
# may go on for ever.
CLOSERS = (b"}", b"]", b'"', b",", b"1", b"0")
_QUOTE = re.compile(rb'(?<!\\)(?:\\\\)*"')


def call_grammar(
    tokenizer: Tokenizer,
    tags: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool = False,
    one_call: bool = False,
    declines: bool = False,
    strict: bool = False,
) -> CallGrammar:
    """The CallGrammar of these arguments. The last ones are kept, since reading schemas takes tens of milliseconds.
    What of a schema is not enforced is printed on stderr, once."""
    grammar = _kept(tokenizer, tags, json.dumps(list(tools)), required, one_call, declines, strict)
    for message in grammar.relaxed:
        tool_schemas.say_once(f"constrained calls do not enforce all of a schema: {message}")
    return grammar


def prompt_grammar(messages: Sequence[chat.Message], tokenizer: Tokenizer, tags: str) -> CallGrammar | None:
    """The grammar of the functions that the system messages of a prompt offer; none where they offer none."""
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    tools = chat.offered_schemas(system)
    return call_grammar(tokenizer, tags, tools, declines=chat.NOTHING_FITS in system) if tools else None


@lru_cache(maxsize=64)
def _kept(
    tokenizer: Tokenizer,
    tags: str,
    tools: str,
    required: bool,
    one_call: bool,
    declines: bool,
    strict: bool,
) -> CallGrammar:
    return CallGrammar(
        tokenizer,
        tags,
        json.loads(tools),
        required=required,
        one_call=one_call,
        declines=declines,
        strict=strict,
    )


class CallGrammar:
    """The calls that `tools` ({"name", "description", "parameters"} each) allow.

    required: the answer is a call. one_call: at most one. declines: calling `chat.NOTHING` is possible too, unless a
    call is required. strict: an unknown type raises ConfigError instead of allowing any value. A keyword that
    llguidance lacks is left out: more is allowed, never less, and `relaxed` names it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tags: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool = False,
        one_call: bool = False,
        declines: bool = False,
        strict: bool = False,
    ) -> None:
        import llguidance  # here: only constrained answers need it

        if not tools:
            raise ConfigError("no functions are offered, so no call is possible; offer one")
        self.vocabulary = _vocabulary(tokenizer, tags)
        nothing = [{"name": chat.NOTHING}] if declines and not required else []
        for level in range(len(LEVELS)):  # where all of them together have no grammar, with less of each
            self.relaxed: list[str] = []  # what of the schemas does not hold, with the tool's name
            calls = _calls_schema([*tools, *nothing], strict, level, self.relaxed)
            grammar = _lark(self.vocabulary, json.dumps(calls, ensure_ascii=False), required, one_call)
            self._start = llguidance.LLMatcher(self.vocabulary.table, grammar, log_level=0)
            problem = self._start.get_error()
            if not problem:
                break
        else:
            raise ConfigError(f"these functions have no grammar ({problem[:200]}); set --constrain off")
        if required and self.shortest is None:
            needed = f"no call of these functions was found to end within {LONGEST_CLOSING} tokens of this vocabulary"
            advice = "anchor patterns (^, $), let values that hold their own kind be absent, or set --constrain off"
            raise ConfigError(f"{needed}; {advice}")
        # ids that a call may still need whatever was sampled: names and values that are fixed stand in the schemas
        self.near_end = max(len(tokenizer.encode(json.dumps(tool, ensure_ascii=False))) for tool in tools)

    def begin(self) -> GrammarState:
        """The state of a new completion."""
        return GrammarState(self, self._start.deep_copy())

    @cached_property
    def after_tag(self) -> int:
        """Tokens that are enough for some call after its tag; 0 where the tag is no single id."""
        state = self._start.deep_copy()
        tag = self.vocabulary.tag_id
        begun = tag is not None and state.consume_token(tag)
        return len(_closing(state, self.vocabulary) or ()) if begun else 0

    @cached_property
    def shortest(self) -> int | None:
        """Tokens that are enough for some call; 0 where none is required, none where no end was found."""
        closing = _closing(self._start, self.vocabulary)
        return None if closing is None else len(closing)


class GrammarState:
    """Where one completion is in the grammar."""

    def __init__(self, grammar: CallGrammar, matcher: Any) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.ended = False
        self._closing: deque[int] = deque()  # ids that must come next
        self._text = b""  # what was written
        self._endless = False  # no way to end was found once; looking again at each token would hold up all other rows

    @property
    def inside(self) -> bool:
        """Whether the answer is inside a call, where no stop sequence ends it."""
        return not self.ended and not self.matcher.is_accepting()

    def mask(self, room: int) -> np.ndarray | None:
        """(n,) bool: ids that may come next, with `room` tokens after it; None = all. A call begins only if it could
        end."""
        if self.ended:
            return None
        allowed = _allowed(self.matcher, self.grammar.vocabulary)
        tag = self.grammar.vocabulary.tag_id
        if tag is not None and allowed[tag] and allowed.sum() > 1 and room < self.grammar.after_tag:
            allowed[tag] = False
        return allowed

    def take(self, token: int, room: int) -> int:
        """Go on with the sampled id, or with the next one of the shortest ending where that would no longer fit into
        `room` tokens after it. Sets `ended` with the end of the answer."""
        if self.ended or room < 0:
            return token
        if not self._closing:
            may_end = not self.inside or room >= self.grammar.near_end or self._endless
            before = self._text
            self._step(token)
            if may_end:
                return token
            closing = self._way_out()
            if closing is not None and len(closing) <= room:
                return token
            self.matcher.rollback(1)
            self._text = before
            self._closing.extend(self._way_out() or ())
            self._endless = not self._closing
        if self._closing:
            token = self._closing.popleft()
        self._step(token)
        return token

    def _way_out(self) -> list[int] | None:
        """A short way to end the call that is being written."""
        call = self._text.rpartition(chat.CALL_TAG.encode())[2]
        return _closing(self.matcher, self.grammar.vocabulary, call)

    def _step(self, token: int) -> None:
        # not consumed: the mask was not applied, or llguidance reached one of its limits
        self.ended = not self.matcher.consume_token(token) or self.matcher.is_stopped()
        self._text += self.grammar.vocabulary.tokens[token]


def _lark(vocabulary: _Vocabulary, calls: str, required: bool, one_call: bool) -> str:
    """The grammar in llguidance's dialect of Lark."""
    tag = vocabulary.call_tag
    closing = vocabulary.closing
    more = "" if one_call else f'("\\n"? {tag} call)*'
    end = f"{vocabulary.end}?" if closing is None else f"({vocabulary.end}? {closing})?"
    rules = f'call: " " object\nobject: %json {calls}\n'
    if required:
        return f"start: first call {more} {end}\n{rules}first: {vocabulary.opening} {tag}"
    # a text that may go on takes in all it can, so a tag of ordinary tokens must be said to end it
    first = f"first: TEXT {tag} | {tag}" if tag.startswith("<[") else f"first[suffix={tag}]: /(?s:.*)/"
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){chat.CALL_TAG}(?s:.*)/"
    return f"start: TEXT | first call {more} {end}\n{rules}{first}\n{text}"


# ---- the schemas of the tools as llguidance takes them


def _calls_schema(
    tools: Sequence[Mapping[str, Any]],
    strict: bool,
    level: int,
    relaxed: list[str],
) -> Schema:
    """The schema of one call of any of the tools; `relaxed` takes a message for all that does not hold. strict: an
    unknown type raises ConfigError."""
    definitions: Schema = dict(ANY_VALUES)
    calls = []
    for i, tool in enumerate(tools):
        name, parameters = _read(tool, strict, relaxed)
        place = f"tool{i}"
        definitions[place] = _arguments_schema(name, parameters, place, level, relaxed)
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{place}"}}
        calls.append(_closed_object(properties, list(properties)))
    return {"anyOf": calls, "$defs": definitions, "x-guidance": CANONICAL}


def _read(tool: Mapping[str, Any], strict: bool, relaxed: list[str]) -> tuple[str, Schema]:
    """The name and the parameters of a tool. ConfigError for what is none."""
    try:
        unknown: list[str] | None = None if strict else []
        read = tool_schemas.tool_schema(tool, unknown)
    except DataError as error:
        raise ConfigError(f"{error}; the schema has no grammar") from None
    relaxed += unknown or []
    return read["name"], tool_schemas.whole_object(read["parameters"])


def _closed_object(properties: Mapping[str, Any], required: Sequence[str]) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _of_document(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """The schema itself."""
    return _Translator(parameters, place, relaxed).schema(parameters, "")


def _of_free_document(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """The schema itself, where two of its parts that both allow any value have no common grammar."""
    relaxed.append("numbers within values of any kind are not bounded")
    bounded = json.dumps(_of_document(parameters, place, relaxed))
    free: Schema = json.loads(bounded.replace(json.dumps(ANY), json.dumps(FREE)))
    return free


def _of_list(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """What a list of tools would say of it: names, types and enumerations."""
    relaxed.append("only its names, types, enumerations and required arguments hold")
    return _of_document(tool_lists.listed_parameters(parameters), place, [])


def _of_names(parameters: Schema, place: str, relaxed: list[str]) -> Schema:
    """Its names, with any values."""
    relaxed.append("only its names and required arguments hold")
    listed = tool_lists.listed_parameters(parameters)
    return _closed_object(dict.fromkeys(listed["properties"], ANY), listed["required"])


LEVELS = (_of_document, _of_free_document, _of_list, _of_names)


def _arguments_schema(
    name: str,
    parameters: Schema,
    place: str,
    level: int,
    relaxed: list[str],
) -> Schema:
    """The schema of a tool's arguments at `#/$defs/place`: the first of LEVELS, from `level` on, that has a grammar."""
    problems: list[str] = []
    for build in LEVELS[level:]:
        notes: list[str] = []
        schema = build(parameters, place, notes)
        definitions = ANY_VALUES | {place: schema}
        wrong, messages = _checked(
            json.dumps({"$ref": f"#/$defs/{place}", "$defs": definitions, "x-guidance": CANONICAL})
        )
        if not wrong:
            relaxed += [f"tool {name!r}: {note}" for note in (*problems, *notes, *messages)]
            return schema
        problems += messages
    raise ConfigError(f"the schema of {name!r} has no grammar ({' '.join(problems)[:200]}); simplify it")


@lru_cache(maxsize=4096)
def _checked(schema: str) -> tuple[bool, tuple[str, ...]]:
    """(whether llguidance has no grammar for a schema, its messages)."""
    from llguidance import LLMatcher

    try:
        wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema), None)
    except (TypeError, ValueError) as error:
        return True, (str(error),)
    return wrong, tuple(" ".join(message.split())[:200] for message in messages)


def _has_grammar(schema: Schema) -> bool:
    return not _checked(json.dumps(schema))[0]


class _Inlined(NamedTuple):
    """Of a schema that stands in place of a reference: the references that led to it, and its place in the document."""

    pointers: tuple[str, ...]
    path: tuple[str, ...]

    def at(self, *steps: str) -> _Inlined:
        return _Inlined(self.pointers, (*self.path, *steps))


class _Translator:
    """Writes a tool's schema as llguidance takes it: numbers have bounds, objects whose keys are listed have no further
    ones, what may be any value is `ANY`, and references point to where the schema stands, `#/$defs/place`.

    What an object's keys are is known only where all its parts are put together (allOf, $ref, anyOf). So a part stays
    open (`whole` false), and the object around it is closed."""

    def __init__(self, root: Schema, place: str, relaxed: list[str]) -> None:
        self.root = root
        self.place = place
        self.relaxed = relaxed

    def _relax(self, where: str, what: str) -> None:
        message = f"{where.replace('.properties.', '.').strip('.') or 'arguments'}: {what}"
        if message not in self.relaxed:
            self.relaxed.append(message)

    def schema(self, node: Any, where: str, whole: bool = True, inlined: _Inlined | None = None) -> Any:
        """where: path to the node, for messages. inlined: where the node stands in the document, if it was put in
        place of a reference to it or is a part of what was."""
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
        # alternatives are whole where nothing beside them adds keys
        union = whole and not {"properties", "required", "allOf", "$ref", "patternProperties"} & out.keys()
        for key, whole_part in (("anyOf", union), ("oneOf", union), ("allOf", False)):
            if isinstance(out.get(key), list):
                # `_reference` puts what "$ref" points to before the parts of allOf
                first = int(key == "allOf" and "$ref" in node)
                out[key] = [
                    self.schema(one, where, whole_part, inlined and inlined.at(key, str(i)))
                    for i, one in enumerate(out[key], first)
                ]
        out = self._reference(out, where, whole, inlined)
        self._array(out, where, inlined)
        return self._object(out, node, where, whole, inlined)

    def _silent(self, node: Mapping[str, Any], where: str, whole: bool) -> Schema:
        """Of a node that says nothing of its values' type: any value, where it is no part."""
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

    def _each(self, schemas: Mapping[str, Any], where: str, inlined: _Inlined | None, key: str) -> Schema:
        """The schemas by name that stand under a keyword."""
        return {name: self._child(one, f"{where}.{name}", inlined, key, name) for name, one in schemas.items()}

    def _child(self, node: Any, where: str, inlined: _Inlined | None, *steps: str) -> Any:
        """The schema of a value within the node. What holds its own kind would be put in place of itself for ever:
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
        rest = {key: out[key] for key in ("$ref", *ALTERNATIVES, "allOf", *DEFINITIONS) if key in out}
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
        kept = {key: value for key, value in given.items() if _in_range(value)}  # llguidance cuts others, silently
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

    def _reference(self, out: Schema, where: str, whole: bool, inlined: _Inlined | None) -> Schema:
        """With its reference as llguidance takes it. Beside other keywords, and in a part, what it points to stands
        itself."""
        if "$ref" not in out:
            return out
        pointer = out.pop("$ref")
        alone = not SAYING & out.keys()
        path = tool_lists.path_of(self.root, pointer)
        target = None if path is None else tool_lists.at_path(self.root, path)
        if path is None or target is None:
            self._relax(where, f"the reference {str(pointer)[:80]!r}, which points to nothing in the schema")
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
        """Whether a reference leads, by references alone, to something that is none."""
        seen: list[Any] = []
        while pointer not in seen:
            seen.append(pointer)
            target = tool_lists.pointed_at(self.root, pointer)
            if not isinstance(target, Mapping) or "$ref" not in target:
                return True
            pointer = target["$ref"]
        return False

    def _array(self, out: Schema, where: str, inlined: _Inlined | None) -> None:
        if isinstance(out.get("prefixItems"), list):
            out["prefixItems"] = [
                self._child(one, f"{where}[{i}]", inlined, "prefixItems", str(i))
                for i, one in enumerate(out["prefixItems"])
            ]
        if "array" in tool_lists.kinds_of(out) or {"items", "prefixItems"} & out.keys():
            out["items"] = self._child(out.get("items", {}), f"{where}[]", inlined, "items")

    def _object(
        self,
        out: Schema,
        node: Mapping[str, Any],
        where: str,
        whole: bool,
        inlined: _Inlined | None,
    ) -> Schema:
        for key in ("properties", "patternProperties"):
            if isinstance(out.get(key), Mapping):
                out[key] = self._each(out[key], where, inlined, key)
        further = out.get("additionalProperties")
        if further is not None and further is not False:
            out["additionalProperties"] = self._child(further, f"{where}.*", inlined, "additionalProperties")
        if whole:
            out = self._closed(out, node)
        for key in ("minProperties", "maxProperties"):
            # of listed keys llguidance counts one: any more and it counts further ones only
            counted = "properties" not in out or (out.get("additionalProperties") is False and out.get(key) in (0, 1))
            if key in out and not counted:
                self._relax(where, f"{key} {out.pop(key)}")
        return out

    def _closed(self, out: Schema, node: Mapping[str, Any]) -> Schema:
        """With what keys the object has, and that it has no others."""
        names = self._names(node, ())
        if not names:
            if "object" in tool_lists.kinds_of(out) and not COMPOSED & out.keys():
                out.setdefault("additionalProperties", False if "properties" in out else dict(ANY))
            return out
        if not {"properties", "required", "allOf"} & out.keys():
            return out
        listed = out.pop("properties", {})
        everywhere = {name: listed.get(name, True if certain else ANY) for name, certain in names.items()}
        closed: Schema = {"type": "object", "properties": everywhere, **out}
        if "additionalProperties" not in closed and not self._open(node, ()):
            closed["additionalProperties"] = False
        return closed

    def _names(self, node: Any, within: tuple[str, ...], certain: bool = True) -> dict[str, bool]:
        """{key that an object may have: whether its schema stands in a part that always holds}. certain: node is such
        a part."""
        found: dict[str, bool] = {}
        if not isinstance(node, Mapping):
            return found
        for key, value in node.items():
            parts: list[tuple[Any, bool]] = []  # schemas of the same object, and whether they always hold
            inside = within
            if key == "properties" and isinstance(value, Mapping):
                found |= {name: certain or found.get(name, False) for name in value}
            elif key == "required" and isinstance(value, list):
                found |= {name: found.get(name, False) for name in value if isinstance(name, str)}
            elif key == "$ref" and isinstance(value, str) and value not in within:
                parts = [(tool_lists.pointed_at(self.root, value), certain)]
                inside = (*within, value)
            elif key == "allOf" and isinstance(value, list):
                parts = [(one, certain) for one in value]
            elif key in ALTERNATIVES and isinstance(value, list):
                parts = [(one, False) for one in value]
            elif key in ("if", "then", "else"):
                parts = [(value, False)]
            elif key == "dependentSchemas" and isinstance(value, Mapping):
                parts = [(one, False) for one in value.values()]
            for part, sure in parts:
                for name, known in self._names(part, inside, sure).items():
                    found[name] = found.get(name, False) or known
        return found

    def _open(self, node: Any, within: tuple[str, ...]) -> bool:
        """Whether a part of the schema says that further keys are possible."""
        if not isinstance(node, Mapping):
            return False
        further = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if (further is not None and further is not False) or node.get("patternProperties"):
            return True
        reference = node.get("$ref")
        parts = [one for key in ("allOf", *ALTERNATIVES) if isinstance(node.get(key), list) for one in node[key]]
        if isinstance(reference, str) and reference not in within:
            parts.append(tool_lists.pointed_at(self.root, reference))
            within = (*within, reference)
        return any(self._open(one, within) for one in parts)


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
    if isinstance(value, list | Mapping):
        return ("array" if isinstance(value, list) else "object") in kinds
    return tool_lists.is_of(value, kinds)


class _Vocabulary:
    """The ids of a tokenizer and its tags, as llguidance reads them."""

    def __init__(self, tokenizer: Tokenizer, tags: str) -> None:
        import llguidance

        layout = chat.layout(tokenizer, tags)
        self.tokenizer = tokenizer
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        if tags == "reserved":
            self.tokens += [tag.encode() for tag in chat.TAGS]
            call = layout.call
        else:
            call = tokenizer.encode_inside(chat.CALL_TAG)
        special = {tokenizer.eot_id, *range(tokenizer.n_vocab, len(self.tokens)), *tokenizer.special_tokens.values()}
        self.special_token_ids = sorted(special)
        # terms of the grammar
        self.opening = f"{json.dumps(layout.opening, ensure_ascii=False)}?" if layout.opening else ""
        self.end = json.dumps(layout.closing or "\n", ensure_ascii=False)
        self.call_tag = self._term(call)
        self.tag_id = call[0] if len(call) == 1 else None
        self.closing = None if len(layout.stop) == 1 else self._term(layout.stop)  # None where one id ends an answer
        self.eos_token_id = layout.stop[0] if len(layout.stop) == 1 else tokenizer.eot_id
        self.lengths = np.array([len(token) for token in self.tokens])
        self.lengths[self.special_token_ids] = 0
        # the end of an answer too: where its tag is text, it begins as that of another call does
        self.closers = [*(self.tokens.index(text) for text in CLOSERS if text in self.tokens), *layout.stop]
        self.text_closers = [i for i in self.closers if self.tokens[i] == b'"']
        try:
            self.table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        except ValueError as error:
            raise ConfigError(f"{tokenizer.spec} allows no constrained calls ({error}); set --constrain off") from None

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text that the grammar forces."""
        try:
            return self.tokenizer.encode_inside(text if isinstance(text, str) else text.decode("utf-8", "replace"))
        except DataError:  # a character that the alphabet lacks
            return []

    def _term(self, ids: Sequence[int]) -> str:
        """Ids as a term of the grammar: special ones by number, others as text."""
        if any(i in self.special_token_ids for i in ids):
            return " ".join(f"<[{i}]>" for i in ids)
        return json.dumps(chat.decode(ids, self.tokenizer), ensure_ascii=False)


_vocabulary = lru_cache(maxsize=4)(_Vocabulary)


def _allowed(matcher: Any, vocabulary: _Vocabulary) -> np.ndarray:
    """(n,) bool: ids that the grammar allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(bits, bitorder="little")[: len(vocabulary.tokens)].astype(bool)
    if vocabulary.closing is not None:  # the end of a text is written out; llguidance's own end would be shown as text
        without = allowed.copy()
        without[vocabulary.eos_token_id] = False
        return without if without.any() else allowed
    return allowed


@dataclass
class _Visit:
    """Of a mask, in `_closing`: quotes before the last visit, the largest depth, and which of its bytes is taken."""

    quotes: int
    depth: int
    byte: int = -1


def _closing(matcher: Any, vocabulary: _Vocabulary, before: bytes = b"") -> list[int] | None:
    """A short way from a state to where the answer may end, not always the shortest; none beyond LONGEST_CLOSING.

    before: what was written since the call began, which tells whether the state is inside a string."""
    probe = matcher.deep_copy()
    ids: list[int] = []
    text = before
    visits: dict[bytes, _Visit] = {}  # by the mask of the state
    while not probe.is_accepting():
        forced = probe.compute_ff_tokens()
        if forced:
            ids += forced
            text += b"".join(vocabulary.tokens[token] for token in forced)
            if not probe.consume_tokens(forced):
                return None
            continue
        allowed = _allowed(probe, vocabulary)
        known = np.flatnonzero(allowed)
        if len(ids) >= LONGEST_CLOSING or not len(known):
            return None
        quotes = len(_QUOTE.findall(text))
        closers = vocabulary.text_closers if quotes % 2 else vocabulary.closers
        token = next((closer for closer in closers if allowed[closer]), None)
        if token is None:
            mask = allowed.tobytes()
            visit = visits.get(mask)
            single = known[vocabulary.lengths[known] == 1]
            depth = text.count(b"{") + text.count(b"[") - text.count(b"}") - text.count(b"]")
            if visit and len(single):
                # again in this string, or deeper in a value that holds its own kind: the next byte, until one leads
                # out, as the "@" of an address or the name of a leaf
                visit.byte += visit.quotes == quotes or depth > visit.depth
                visit.quotes = quotes
                visit.depth = max(depth, visit.depth)
                token = int(single[visit.byte % len(single)])
            else:  # among what is forced, the longest piece leaves the fewest to write
                token = int(known[vocabulary.lengths[known].argmax()])
                visits[mask] = _Visit(quotes, depth)
        if not probe.consume_token(token):
            return None
        ids.append(token)
        text += vocabulary.tokens[token]
    return ids
