"""How a system text lists tools, and how that list is read back.

    Functions:
    get_weather(city: string, unit?: c|f, days?: integer[]) - Weather of a city
    add_note(note: {text: string, tags?: string[]}, colour?: red|"a|b"|null)

`?` = optional; `a|b` = one of these values or types; `[]` = a list of what stands before it;
`{...}` = an object of these keys, `...: type` in it = any further keys. A value is written as
JSON where its plain text would be read as another one. A line reads back as what it was written
for, whatever names, values and descriptions hold: each is read before it is used.

A list of style `arguments` has a line below a tool for each argument, or key of an object, with
a description:

    Weather of a city: get_weather(city: string, span: {days: integer})
      city: as City, ST
      span.days: 1 to 7
    Nothing fits: none()

Lists keep names, types, enumerations, which arguments are required, and nested objects.
References, `anyOf`, `allOf` and `const` are written as what they allow. What a list cannot say
it leaves open: bounds, patterns, and the inside of a recursive model."""

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

from codechat.core.errors import DataError, check_choice
from codechat.text.tool_schemas import TYPES, Schema, kinds_of, tool_schema, type_named

NO_TOOLS = "You are a helpful assistant, with no access to external functions."
WITH_TOOLS = (
    "You are a helpful assistant with access to the following functions. Use them if required -"
)
STYLES = ("compact", "described", "arguments", "json")  # of `tools_prompt`
DECLINING = ("described", "arguments")  # whose lists end with `NOTHING_FITS`
# The last entry of a described list: calling it is how a model says that nothing on the list fits.
NOTHING = "none"
NOTHING_FITS = f"Nothing fits: {NOTHING}()"
# that one tool's line follows; a further one is written as the type it points to
MOST_REFERENCES = 200
DEEPEST = 20  # levels of a type that are read and written
# what of a line is written as JSON: nothing, values that are no plain words, all
PLAIN, VALUES, ALL = range(3)
FURTHER = "..."  # the name under which an object's further keys stand
NESTED = 4  # levels of objects whose keys are described

# The quantifiers *+ and ++ are possessive, so that no list makes a pattern backtrack.
_BLANK = re.compile(r"\s*")
_LISTED = re.compile(r"(?:\A\s*|\n)Functions:\n")
_STRING = r'"(?:[^"\\\n]|\\.)*+"'
_KEY = rf"(?:{_STRING}|[^\s,:\"(){{}}?][^\s,:\"{{}}]*?)\??: "
_ARGUMENT = re.compile(rf"(?P<name>{_STRING}|[^\s,:\"(){{}}?][^\s,:\"{{}}]*?)(?P<optional>\??): ")
# A value or type as it is: a comma in it does not begin the next argument, a bracket in it is
# closed.
_BARE = re.compile(rf"[^\s|,(){{}}\[\]\"](?:[^|,(){{}}\[\n]|\([^()|\n]*\)|\[(?!\])|,(?! {_KEY}))*+")
_LITERAL = re.compile(_STRING)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN_WORDS = re.compile(r"[^\W\d][\w.-]*(?: [\w.-]+)*")
_WORDS = {"true": True, "false": False, "null": None}
_NAME = re.compile(rf"(?P<name>{_STRING}|[^\s\"(][^\s(]*)\(")
_SPACED_NAME = re.compile(r"(?P<name>[^\s\"(][^(\n]*)\(")
# a description of an argument: keys that lead to it, joined by dots
_STEP = rf"(?:{_STRING}|[^\s,:\"(){{}}?.]+)"
_STEPS = re.compile(_STEP)
_ABOUT = re.compile(rf"  (?P<path>{_STEP}(?:\.{_STEP})*+): (?P<text>\S.*)")
_BEFORE_NAME = re.compile(rf"(?:\A|: )(?=(?:{_STRING}|[^\s\"(][^\s(]*)\()")
_KIND_OF = {str: "string", type(None): "null"}


class Line(NamedTuple):
    """A line of a list."""

    name: str
    description: str
    parameters: Schema  # {"type", "properties", "required"} in the words of a list
    end: int  # where the text of its name and arguments ends


# ---- writing


def tools_prompt(tools: Sequence[Mapping[str, Any]], style: str = "compact") -> str:
    """System text that offers tools in any form of `tool_schema`. DataError for what is none.

    compact: "Functions:" and a line `name(arg: type, other?: a|b) - description` per tool.
    described: `description: name(arg: type)`, and at the end `Nothing fits: none()`; small
    models learn it sooner, and to decline (`DECLINE`).
    arguments: as described, and what its schema says of each argument in a line below the tool.
    json: whole schemas in glaive's wording."""
    check_choice("tools_style", style, STYLES)
    read = [tool_schema(tool, unknown=[]) for tool in tools]
    if any(tool["name"] == NOTHING for tool in read):
        raise DataError(
            f"a tool is called {NOTHING}, which is how a model declines; give it another name"
        )
    if not read:
        return NO_TOOLS
    if style == "json":
        texts = [_json_text(given, tool) for given, tool in zip(tools, read, strict=True)]
        return f"{WITH_TOOLS}\n" + "\n\n".join(texts)
    lines = ["Functions:"]
    for tool in read:
        lines.append(tool_line(tool, style))
        if style == "arguments":
            lines += _about_lines(tool)
    if style in DECLINING:
        lines.append(NOTHING_FITS)
    return "\n".join(lines)


def _json_text(given: Mapping[str, Any], tool: Schema) -> str:
    """The tool as it was given where that says the same."""
    told = given if _says_the_same(given, tool) else tool
    return json.dumps(told, indent=4, ensure_ascii=False)


def _says_the_same(given: Mapping[str, Any], tool: Schema) -> bool:
    """But for keys that it lacks."""
    return {"description": "", **given, "parameters": given.get("parameters") or {}} == tool


def tool_line(tool: Mapping[str, Any], style: str) -> str:
    """The line of a tool of `tool_schema` in a list of any style but json."""
    parameters = json.dumps(tool.get("parameters") or {})
    return _line(tool["name"], _flat(tool.get("description")), parameters, style in DECLINING)


def _flat(text: Any) -> str:
    """A description on one line."""
    return " ".join(str(text or "").split())


def _about_lines(tool: Mapping[str, Any]) -> Iterator[str]:
    """What the schema of a tool says of its arguments, as far as it reads back."""
    parameters = tool.get("parameters") or {}
    for path, text in _abouts(parameters, parameters, ()):
        steps = [step if _is_step(step) else _json(step) for step in path]
        line = f"  {'.'.join(steps)}: {text}"
        listed = listed_parameters(parameters)
        if "\n" not in line and _read_about(line, listed) and _at(listed, path) is not None:
            yield line


def _is_step(name: str) -> bool:
    return _STEPS.fullmatch(name) is not None and not name.startswith('"')


def _abouts(
    root: Mapping[str, Any], schema: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys that lead to each argument, or key of an object, and its description."""
    properties = schema.get("properties")
    for name, one in properties.items() if isinstance(properties, Mapping) else ():
        if not isinstance(one, Mapping):
            continue
        here = (*path, name)
        text = _flat(one.get("description"))
        if text:
            yield here, text
        inner = _object_in(root, one) if len(here) < NESTED else None
        if inner is not None:
            yield from _abouts(root, inner, here)


def _object_in(root: Mapping[str, Any], schema: Any, depth: int = 0) -> Mapping[str, Any] | None:
    """The object with named keys that a schema allows: itself, the items of its list, what it
    refers to, or the first such of its alternatives."""
    if not isinstance(schema, Mapping) or depth > NESTED:
        return None
    if isinstance(schema.get("properties"), Mapping):
        return schema
    further = [schema.get("items"), pointed_at(root, schema.get("$ref"))]
    for key in ("anyOf", "oneOf", "allOf"):
        further += _listed(schema.get(key))
    found = (_object_in(root, one, depth + 1) for one in further)
    return next((one for one in found if one is not None), None)


@lru_cache(maxsize=4096)
def _line(name: str, description: str, parameters: str, described: bool) -> str:
    """The plainest line that reads back."""
    wanted = listed_parameters(json.loads(parameters))
    # what a reader makes of a name or description cannot be said in advance, so each candidate
    # is read
    for line in _candidates(name, description, wanted, described):
        read = read_line(line, described) if "\n" not in line else None
        if read and (read.name, read.description, read.parameters) == (name, description, wanted):
            break
    return line


def _candidates(name: str, description: str, parameters: Schema, described: bool) -> Iterator[str]:
    """Lines of a tool from the plainest to the one with the most JSON."""
    descriptions = [description]
    if described and description:
        descriptions.append(_json(description))
    for quoted in (PLAIN, VALUES, ALL):
        signature = (
            f"{_json(name) if quoted == ALL else name}({_arguments_text(parameters, quoted)})"
        )
        turned = described and (quoted == ALL or not re.search(r"\s", name))
        for text in descriptions:
            yield _joined(signature, text, turned)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(signature: str, description: str, described: bool) -> str:
    if not description:
        return signature
    return f"{description}: {signature}" if described else f"{signature} - {description}"


def described(prompt: str) -> str:
    """A system text whose compact list has each line as `description: name(arguments)` and ends
    with `NOTHING_FITS`; other text is unchanged."""
    listed = _LISTED.search(prompt)
    if not listed:
        return prompt
    lines, rest = _split_list(prompt, listed)
    if NOTHING_FITS in lines:
        return prompt
    return prompt[: listed.end()] + "\n".join([*map(_turned, lines), NOTHING_FITS]) + rest


def _turned(line: str) -> str:
    """A line of a compact list as one of a described list. One whose name has spaces stays as
    it is."""
    compact = _compact(line, _NAME)
    read = compact or read_line(line, described=False)
    if read is None:
        return line
    turned = _joined(line[: compact.end], compact.description, described=True) if compact else line
    again = read_line(turned, described=True)
    if again and again[:3] == read[:3]:
        return turned
    return _line(read.name, read.description, json.dumps(read.parameters), True)


def _arguments_text(schema: Schema, quoted: int) -> str:
    """The arguments or keys of an object."""
    required = schema.get("required", ())
    texts = []
    for name, one in schema.get("properties", {}).items():
        plain = quoted < ALL and name != FURTHER and _ARGUMENT.fullmatch(f"{name}: ")
        written = name if plain else _json(name)
        optional = "" if name in required else "?"
        texts.append(f"{written}{optional}: {_type_text(one, quoted)}")
    further = schema.get("additionalProperties")
    if further:
        texts.append(
            f"{FURTHER}: {_type_text(further if isinstance(further, dict) else {}, quoted)}"
        )
    return ", ".join(texts)


def _type_text(schema: Schema, quoted: int) -> str:
    """The text of a schema of `_Simplifier`."""
    if "anyOf" in schema:
        # beside a type, a plain word would be read as one
        quoted_values = ALL if any(one.keys() == {"type"} for one in schema["anyOf"]) else quoted
        return "|".join(_member_text(one, quoted, quoted_values) for one in schema["anyOf"])
    if "enum" in schema:
        return "|".join(_value_text(value, quoted) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        return f"{_type_text(schema['items'], quoted)}[]"
    if kind == "object" and ("properties" in schema or "additionalProperties" in schema):
        return "{" + _arguments_text(schema, quoted) + "}"
    return "|".join(kind) if isinstance(kind, list) else str(kind)


def _member_text(schema: Schema, quoted: int, quoted_values: int) -> str:
    text = _type_text(schema, quoted_values if "enum" in schema else quoted)
    return f"({text})" if schema.get("type") == "array" and "items" in schema else text


def _value_text(value: Any, quoted: int) -> str:
    if isinstance(value, str) and value not in _WORDS and not _NUMBER.fullmatch(value):
        if quoted == PLAIN or (
            quoted == VALUES and _PLAIN_WORDS.fullmatch(value) and not type_named(value)
        ):
            return value
    return _json(value)


# ---- reading


def _split_list(prompt: str, listed: re.Match[str]) -> tuple[list[str], str]:
    """The lines of a list, and the text after it."""
    text, gap, rest = prompt[listed.end() :].partition("\n\n")
    return text.split("\n"), gap + rest


@lru_cache(maxsize=4096)
def offered_names(prompt: str) -> frozenset[str]:
    """Names of the functions that a system text offers in any style of `tools_prompt`; empty
    where none can be read."""
    return frozenset(schema["name"].strip() for schema in offered_schemas(prompt))


def offered_schemas(prompt: str) -> list[Schema]:
    """{"name", "description", "parameters": JSON Schema} of the functions that a system text
    offers in any style of `tools_prompt`, as far as it says."""
    return split_offer(prompt)[1]


def split_offer(prompt: str, as_given: bool = False) -> tuple[str, list[Schema]]:
    """A system text without its list of functions, and `offered_schemas`. as_given: of JSON
    objects without the keys that they lack."""
    listed = _LISTED.search(prompt)
    if not listed:
        return _split_objects(prompt, as_given)
    lines, rest = _split_list(prompt, listed)
    turned = NOTHING_FITS in lines
    tools: list[Schema] = []
    for line in lines:
        if tools and _read_about(line, tools[-1]["parameters"]):
            continue
        # prose among the lines is no tool, and no error
        read = read_line(line, turned) if line != NOTHING_FITS else None
        if read:
            tools.append(
                dict(name=read.name, description=read.description, parameters=read.parameters)
            )
    return prompt[: listed.start()] + rest, tools


def _split_objects(prompt: str, as_given: bool) -> tuple[str, list[Schema]]:
    """`split_offer` of a list of JSON objects. Text behind the list stays. Where none stands
    behind the header, the tools are all objects of the text, and none is cut out."""
    before, _, behind = prompt.partition(WITH_TOOLS)
    end = 0
    decoder = json.JSONDecoder(strict=False)
    while True:
        place = _BLANK.match(behind, end)
        assert place is not None
        if not behind.startswith("{", place.end()):
            break
        try:
            _, end = decoder.raw_decode(behind, place.end())
        except (ValueError, RecursionError):
            break
    schemas = list(_json_schemas(behind[:end], as_given))
    if not schemas:
        return prompt, list(_json_schemas(prompt, as_given))
    texts = (before.rstrip("\n"), behind[end:].strip("\n"))
    return "\n\n".join(filter(None, texts)), schemas


def _read_about(line: str, parameters: Schema) -> bool:
    """Whether a line describes an argument of a tool, whose schema then gets the description."""
    about = _ABOUT.fullmatch(line)
    path = [_unquoted(step) for step in _STEPS.findall(about["path"])] if about else []
    argument = _at(parameters, path) if about else None
    if about is None or argument is None:
        return False
    argument["description"] = about["text"]
    return True


def _at(parameters: Schema, path: Sequence[str]) -> Schema | None:
    """The schema of an argument, or of a key of an object in it."""
    found: Schema | None = parameters
    for step in path:
        inner = _object_in({}, found)
        found = inner["properties"].get(step) if inner else None
    return found


def _json_schemas(prompt: str, as_given: bool) -> Iterable[Schema]:
    """The tools among the JSON objects of a text; parameters that cannot be read are left open."""
    decoder = json.JSONDecoder(strict=False)
    at = prompt.find("{")
    while at >= 0:
        try:
            item, end = decoder.raw_decode(prompt, at)
        except (ValueError, RecursionError):
            item = None
            end = at + 1
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            try:
                tool = tool_schema(item, unknown=[])
                yield item if as_given and _says_the_same(item, tool) else tool
            except DataError:
                yield item | {"parameters": {"type": "object", "additionalProperties": True}}
        at = prompt.find("{", end)


def read_line(line: str, described: bool) -> Line | None:
    """A line of a list, or none. described: of a list that ends with `NOTHING_FITS`, whose
    lines are `description: name(arguments)`, or compact where the name has spaces."""
    if described:
        return _described(line) or _compact(line, _NAME) or _compact(line, _SPACED_NAME)
    return _compact(line, _NAME) or _described(line) or _compact(line, _SPACED_NAME)


def _compact(line: str, naming: re.Pattern[str]) -> Line | None:
    name = naming.match(line)
    if not name:
        return None
    reader = _Reader(line, name.end())
    parameters = reader.arguments()
    rest = line[reader.at :]
    if parameters is None:
        return None
    if rest and not rest.startswith(" - "):
        return None
    return Line(_unquoted(name["name"]), rest.removeprefix(" - "), parameters, reader.at)


def _described(line: str) -> Line | None:
    starts = [before.end() for before in _BEFORE_NAME.finditer(line)]
    quoted = _LITERAL.match(line)  # a description that is written as JSON
    if quoted and line.startswith(": ", quoted.end()):
        starts.insert(0, quoted.end() + len(": "))
    for start in starts:
        name = _NAME.match(line, start)
        if not name:
            continue
        reader = _Reader(line, name.end())
        parameters = reader.arguments()
        if parameters is not None and reader.at == len(line):
            description = _unquoted(line[:start].removesuffix(": "))
            return Line(_unquoted(name["name"]), description, parameters, reader.at)
    return None


def _unquoted(text: str) -> str:
    """The text that a JSON string spells; any other text as it is."""
    if not _LITERAL.fullmatch(text):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


class _NoList(Exception):
    """The text is no argument list."""


class _Reader:
    """Reads what `_arguments_text` and `_type_text` write."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self.depth = 0

    def arguments(self) -> Schema | None:
        """The schema of the arguments that begin here and end with a bracket; None where these
        are none."""
        try:
            return self._object(")")
        except _NoList:
            return None

    def _object(self, closing: str) -> Schema:
        properties: Schema = {}
        required: list[str] = []
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        while not self._takes(closing):
            if (properties or "additionalProperties" in schema) and not self._takes(", "):
                raise _NoList
            argument = _ARGUMENT.match(self.text, self.at)
            if not argument:
                raise _NoList
            self.at = argument.end()
            kind = self._type()
            if argument["name"] == FURTHER:
                schema["additionalProperties"] = kind or True
                continue
            name = _unquoted(argument["name"])
            properties[name] = kind
            if not argument["optional"]:
                required.append(name)
        return schema

    def _takes(self, mark: str) -> bool:
        taken = self.text.startswith(mark, self.at)
        self.at += len(mark) if taken else 0
        return taken

    def _type(self) -> Schema:
        self.depth += 1
        if self.depth > 4 * DEEPEST:
            raise _NoList
        parts = [self._member()]
        while self._takes("|"):
            parts.append(self._member())
        schema = _read_union(parts)
        while self._takes("[]"):
            schema = {"type": "array", "items": schema}
        self.depth -= 1
        return schema

    def _member(self) -> "str | Schema":
        """The text of a value or type, or the schema of one that is quoted, in brackets or an
        object."""
        if self._takes("("):
            schema = self._type()
            if not self._takes(")"):
                raise _NoList
            return schema
        if self._takes("{"):
            schema = self._object("}")
            if schema["properties"]:
                return schema
            further = schema.get("additionalProperties")
            if further:
                return {"type": "object", "additionalProperties": further}
            return schema | {"additionalProperties": False}
        literal = _LITERAL.match(self.text, self.at)
        if literal:
            self.at = literal.end()
            return {"enum": [_unquoted(literal[0])]}
        bare = _BARE.match(self.text, self.at)
        if not bare:
            raise _NoList
        self.at = bare.end()
        return bare[0]


def _read_union(parts: Sequence[str | Schema]) -> Schema:
    """The schema of alternatives: where one is a plain word that is no type, words for types
    are values too."""
    texts = [part for part in parts if isinstance(part, str)]
    words = [text for text in texts if text not in _WORDS and not _NUMBER.fullmatch(text)]
    if len(parts) == 1 and words and words[0] not in TYPES:
        named = type_named(words[0])  # of another language, as lists had it
        return {"enum": words} if named is None else named
    types = all(word in TYPES or word == "any" for word in words)
    members = [_read_member(part, types) for part in parts]
    others = [one for part, one in zip(parts, members) if part != "null"]
    if not any("enum" in one for one in others):  # beside values, null is one of them
        members = [{"type": "null"} if part == "null" else one for part, one in zip(parts, members)]
    return union(members)


def _read_member(part: str | Schema, types: bool) -> Schema:
    if not isinstance(part, str):
        return part
    if part in _WORDS:
        return {"enum": [_WORDS[part]]}
    if _NUMBER.fullmatch(part):
        return {"enum": [json.loads(part)]}
    if not types:
        return {"enum": [part]}
    return {} if part == "any" else {"type": part}


# ---- schemas in the words of a list


def listed_parameters(parameters: Mapping[str, Any]) -> Schema:
    """{"type", "properties", "required"} of a tool's parameters as far as a list can say it; a
    union's alternatives are put together: what is required in all of them is required."""
    schema = _Simplifier(parameters).simple(parameters)
    alternatives = [one for one in schema.get("anyOf", [schema]) if one.get("type") == "object"]
    properties: Schema = {}
    further: list[Schema] = []
    for one in alternatives:
        for name, about in one.get("properties", {}).items():
            properties[name] = union([properties[name], about]) if name in properties else about
        more = one.get("additionalProperties")
        if more:
            further.append(more if isinstance(more, dict) else {})
    # a name that one alternative does without may be left out
    due = set(properties).intersection(*(one.get("required", ()) for one in alternatives))
    explicit = parameters.get("additionalProperties")
    asks_for_more = explicit is True or explicit == {}
    if asks_for_more and not further and not properties:
        further = [{}]  # the tool takes any object
    return _object_of(properties, due, (union(further) or True) if further else None)


def texts_of(tools: Sequence[Schema]) -> dict[tuple[str, str], bool]:
    """(name of a tool, argument) -> whether null is allowed too, of the arguments of
    `offered_schemas` that are declared as texts: by type, union, reference or enumeration."""
    found: dict[tuple[str, str], bool] = {}
    for tool in tools:
        properties = listed_parameters(tool["parameters"])["properties"]
        for key, schema in properties.items():
            kinds = set(kinds_of(schema))
            if "enum" in schema:
                kinds = {_KIND_OF.get(type(value), "other") for value in schema["enum"]}
            if "string" in kinds and kinds <= {"string", "null"}:
                found[tool["name"], key] = "null" in kinds
    return found


class _Place(NamedTuple):
    """Where a schema stands."""

    references: tuple[str, ...] = ()  # that led to it
    depth: int = 0


class _Simplifier:
    """Writes the schemas of one tool without references and with few keywords. What they allow
    is allowed after it; it may allow more."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.left = MOST_REFERENCES  # references that may still be followed

    def simple(self, schema: Any, place: _Place = _Place()) -> Schema:
        """The simple schema of one that stands at a place."""
        if not isinstance(schema, Mapping) or place.depth > DEEPEST - 2:
            return {}
        out = self._own(schema, place)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            out = both(out, self._referred(reference, place))
        for one in _listed(schema.get("allOf")):
            out = both(out, self.simple(one, place))
        for key in ("anyOf", "oneOf"):
            alternatives = _listed(schema.get(key))
            if alternatives:
                out = both(out, union([self.simple(one, place) for one in alternatives]))
        return out

    def _referred(self, reference: str, place: _Place) -> Schema:
        target = pointed_at(self.root, reference)
        # counted over the whole tool: models that refer to each other multiply at every level
        self.left -= 1
        if reference in place.references or self.left < 0:  # a recursive model
            kind = target.get("type") if isinstance(target, Mapping) else None
            return {"type": kind} if kind in TYPES else {}
        return self.simple(target, _Place((*place.references, reference), place.depth))

    def _own(self, schema: Mapping[str, Any], place: _Place) -> Schema:
        """What the schema says itself."""
        kinds = [kind for kind in kinds_of(schema) if kind in TYPES]
        if "const" in schema:
            return _of_values([schema["const"]], [])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return _of_values(schema["enum"], kinds)
        if not kinds and isinstance(schema.get("properties"), Mapping):
            kinds = ["object"]
        if not kinds and ({"items", "prefixItems"} & schema.keys()):
            kinds = ["array"]
        inner = _Place(place.references, place.depth + 1)
        return union([self._of_kind(kind, schema, inner) for kind in kinds]) if kinds else {}

    def _of_kind(self, kind: str, schema: Mapping[str, Any], inner: _Place) -> Schema:
        """One type of a schema. inner: the place of what the schema holds."""
        if kind == "array":
            return self._array(schema, inner)
        return self._object(schema, inner) if kind == "object" else {"type": kind}

    def _array(self, schema: Mapping[str, Any], inner: _Place) -> Schema:
        items = schema.get("items")
        several = list(_listed(schema.get("prefixItems")))
        if several:
            closed = items is False or schema.get("maxItems") == len(several)
            if not closed:
                several.append(items)
            return {"type": "array", "items": union([self.simple(one, inner) for one in several])}
        if not isinstance(items, Mapping):
            return {"type": "array"}
        return {"type": "array", "items": self.simple(items, inner)}

    def _object(self, schema: Mapping[str, Any], inner: _Place) -> Schema:
        named = schema.get("properties")
        named = named if isinstance(named, Mapping) else {}
        required = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        properties = {name: self.simple(one, inner) for name, one in named.items()}
        properties |= {name: {} for name in required if name not in properties}
        further = schema.get("additionalProperties")
        open_: Any = None  # the schema of further keys, or true
        if further is True or isinstance(further, Mapping):
            open_ = self.simple(further, inner) or True
        if not properties:
            if isinstance(open_, dict):
                return {"type": "object", "additionalProperties": open_}
            if further is False and "properties" in schema:
                return {
                    "type": "object",
                    "properties": {},
                    "required": [],
                    "additionalProperties": False,
                }
            return {"type": "object"}
        return _object_of(properties, required, open_)


def pointed_at(root: Mapping[str, Any], reference: Any) -> Any:
    """What a reference within a document ("#/$defs/Item") points to; none where it is nothing
    or elsewhere."""
    path = path_of(root, reference)
    return None if path is None else at_path(root, path)


def path_of(root: Mapping[str, Any], reference: Any) -> list[str] | None:
    """The keys that lead to what a reference points to: a pointer, or the name or address of a
    part."""
    if not isinstance(reference, str):
        return None
    if reference in ("#", root.get("$id")):
        return []
    if reference.startswith("#/"):
        return [
            unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")
        ]
    for key in ("$defs", "definitions"):
        parts = root.get(key)
        for name, one in parts.items() if isinstance(parts, Mapping) else ():
            if not isinstance(one, Mapping):
                continue
            if reference in (one.get("$id"), one.get("id"), f"#{one.get('$anchor')}"):
                return [key, name]
    return None


def at_path(root: Any, path: Iterable[str]) -> Any:
    """What stands under keys and numbers; none where nothing does."""
    for step in path:
        if isinstance(root, list):
            root = root[int(step)] if step.isdecimal() and int(step) < len(root) else None
        else:
            root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def is_of(value: Any, kinds: Iterable[str]) -> bool:
    """Whether a plain value has one of the types."""
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and float(value).is_integer())
    return ("null" if value is None else "string") in kinds


def _of_values(values: Sequence[Any], kinds: Sequence[str]) -> Schema:
    """The schema of an enumeration, whose lists and objects are any. kinds: its types, where
    they are given; values of other types are left out, unless all are."""
    plain = [value for value in values if not isinstance(value, list | Mapping)]
    parts = [
        {"type": "array" if isinstance(value, list) else "object"}
        for value in values
        if value not in plain
    ]
    fitting = [value for value in plain if is_of(value, kinds)] if kinds else plain
    return union([*({"enum": [value]} for value in fitting or plain), *parts])


def union(schemas: Iterable[Schema]) -> Schema:
    """The schema of a value that fits one of them: types and values are put together where the
    first of them stands."""
    members: list[Schema] = []
    for schema in schemas:
        for one in schema.get("anyOf", [schema]):
            if one == {}:
                return {}
            _add_member(members, one)
    if {"enum": [None]} in members:  # alone, null is a type
        members.remove({"enum": [None]})
        _add_member(members, {"type": "null"})
    values = _values_of(members)
    types = _types_of(members)
    if values and types and "null" in types:  # beside values, null is one of them
        types.remove("null")
        if None not in values:
            values.append(None)
    members = [_plain_member(one) for one in members if one != {"type": []}]
    if len(members) > 1:
        return {"anyOf": members}
    return members[0] if members else {}


def _add_member(members: list[Schema], one: Schema) -> None:
    """Add an alternative: to the values or types among them, if it is one."""
    if "enum" in one:
        values = _values_of(members)
        if values is None:
            values = []
            members.append({"enum": values})
        for value in one["enum"]:
            if not any(_same(value, other) for other in values):
                values.append(value)
    elif one.keys() == {"type"}:
        types = _types_of(members)
        if types is None:
            types = []
            members.append({"type": types})
        types += [kind for kind in dict.fromkeys(kinds_of(one)) if kind not in types]
    elif one not in members:
        members.append(one)


def _values_of(members: Iterable[Schema]) -> list[Any] | None:
    return next((one["enum"] for one in members if "enum" in one), None)


def _types_of(members: Iterable[Schema]) -> list[str] | None:
    return next((one["type"] for one in members if one.keys() == {"type"}), None)


def _plain_member(one: Schema) -> Schema:
    """A single type as a word, not a list."""
    kinds = one.get("type", "")
    return {"type": kinds[0]} if isinstance(kinds, list) and len(kinds) == 1 else one


def both(a: Schema, b: Schema) -> Schema:
    """A schema that allows at least what both allow."""
    if not a or not b or a == b:
        return a or b
    if "anyOf" in a and "anyOf" in b:
        return a
    if "anyOf" in a or "anyOf" in b:
        many, one = (a, b) if "anyOf" in a else (b, a)
        fitting = [both(member, one) for member in many["anyOf"] if _overlap(member, one)]
        return union(fitting) if fitting else a
    if not _overlap(a, b):
        return a
    if "enum" in a or "enum" in b:
        values, other = (a, b) if "enum" in a else (b, a)
        shared = [value for value in values["enum"] if _allows(other, value)]
        return union([{"enum": [value]} for value in shared])
    if a.get("type") == b.get("type") == "object":
        return _both_objects(a, b)
    if a.get("type") == b.get("type") == "array":
        items = both(a.get("items", {}), b.get("items", {}))
        return {"type": "array", "items": items} if items else {"type": "array"}
    if a.keys() == {"type"} and b.keys() == {"type"}:
        return _both_types(kinds_of(a), kinds_of(b)) or a
    return b if a.keys() == {"type"} else a


def _both_types(a: Sequence[str], b: Sequence[str]) -> Schema:
    """The types that stand in both; an integer is a number too."""
    kinds = [kind for kind in a if kind in b]
    for some, others in ((a, b), (b, a)):
        if "integer" in some and "number" in others and "integer" not in kinds:
            kinds.append("integer")
    return union([{"type": kinds}]) if kinds else {}


def _allows(schema: Schema, value: Any) -> bool:
    """Whether an enumeration or a type allows a plain value."""
    if "enum" in schema:
        return any(_same(value, one) for one in schema["enum"])
    return is_of(value, kinds_of(schema))


def _overlap(a: Schema, b: Schema) -> bool:
    """Whether a value may fit both."""
    if "enum" in a or "enum" in b:
        values, other = (a, b) if "enum" in a else (b, a)
        return any(_allows(other, value) for value in values["enum"])
    return bool(_with_integers(a) & _with_integers(b))


def _with_integers(schema: Schema) -> set[str]:
    kinds = set(kinds_of(schema))
    return kinds | {"integer"} if "number" in kinds else kinds


def _both_objects(a: Schema, b: Schema) -> Schema:
    first = a.get("properties", {})
    second = b.get("properties", {})
    properties = {name: both(first.get(name, {}), second.get(name, {})) for name in first | second}
    if not properties:
        return a if "additionalProperties" in a else b
    due = {*a.get("required", ()), *b.get("required", ())}
    return _object_of(
        properties, due, a.get("additionalProperties") or b.get("additionalProperties")
    )


def _object_of(properties: Schema, due: Container[str], further: Any) -> Schema:
    """The schema of an object. due: the required names; further: the schema of further keys, or
    true, or nothing."""
    required = [name for name in properties if name in due]
    out: Schema = {"type": "object", "properties": properties, "required": required}
    if further:
        out["additionalProperties"] = further
    return out
