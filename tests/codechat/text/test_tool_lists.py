"""Lists of tools: what is written is read back, and the text of tools that released models were
trained on stays."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from codechat.text import tool_lists
from codechat.text.tool_calls import as_openai
from codechat.text.tool_lists import (
    NOTHING_FITS,
    described,
    offered_names,
    offered_schemas,
    tools_prompt,
)
from codechat_lab.tasks.toolbox.catalogue import TOOLS

Schema = dict[str, Any]
LISTS = ("compact", "described", "arguments")
TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# what ends a value, an argument, a line or a list, words for types and values, and what looks
# like another line
PIECES = [
    "|",
    "||",
    ", ",
    ",",
    ": ",
    ":",
    "?",
    "?: ",
    "(",
    ")",
    "()",
    ") - ",
    " - ",
    "[",
    "]",
    "[]",
    "{",
    "}",
    "{}",
    '"',
    "\\",
]
PIECES += [
    "\n",
    "\n\n",
    "\r\n",
    "\u2028",
    "\t",
    " ",
    "  ",
    "a",
    "b c",
    "é",
    "東京",
    "null",
    "None",
    "true",
    "False",
    "0.5",
    "1",
    "-1",
]
PIECES += [
    "1e5",
    "007",
    "string",
    "integer",
    "any",
    "float",
    "str",
    "List[int]",
    "x: f(a",
    "f(x: string)",
    "f() - g",
    "...",
]
PIECES += [
    NOTHING_FITS,
    "Functions:\n",
    "San Francisco, CA",
    "#FFF",
    "a/b",
    "2024-01-02",
    "'",
    "none",
    "<|end|>",
]


def any_text(draw: random.Random, most: int = 4) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(0, most)))


def any_value(draw: random.Random) -> Any:
    plain = (None, True, False, 0, 1, -7, 10**18, 0.5, -1e-9, 1e300)
    return any_text(draw) if draw.random() < 0.7 else draw.choice(plain)


def enumeration(draw: random.Random) -> Schema:
    values: list[Any] = []
    for value in [any_value(draw) for _ in range(draw.randint(1, 4))]:
        if not any(
            isinstance(one, bool) == isinstance(value, bool) and one == value for one in values
        ):
            values.append(value)
    return {"type": "null"} if values == [None] else {"enum": values}


def an_object(draw: random.Random, depth: int) -> Schema:
    names = list({any_text(draw) or "x": None for _ in range(draw.randint(0, 3))})
    properties = {name: a_schema(draw, depth + 1) for name in names}
    further = a_schema(draw, depth + 1) if draw.random() < 0.2 else None
    if not properties:
        return {"type": "object"} | ({"additionalProperties": further} if further else {})
    required = [name for name in names if draw.random() < 0.5]
    whole = {"type": "object", "properties": properties, "required": required}
    return whole | ({} if further is None else {"additionalProperties": further or True})


def an_array(draw: random.Random, depth: int) -> Schema:
    return {"type": "array", "items": a_schema(draw, depth + 1)}


def a_union(draw: random.Random, depth: int) -> Schema:
    kinds = draw.sample(TYPES, draw.randint(1, 3))
    values = enumeration(draw)
    members = [
        {"type": kinds[0] if len(kinds) == 1 else kinds},
        an_array(draw, depth),
        an_object(draw, depth),
    ]
    members[-1] = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}
    if "enum" in values and "null" not in kinds:
        members.append(values)
    return {"anyOf": draw.sample(members, draw.randint(2, len(members)))}


def a_schema(draw: random.Random, depth: int = 0) -> Schema:
    """A schema of what a list can say, in the words in which it is read back."""
    kind = draw.randrange(8 if depth < 3 else 4)
    if kind == 0:
        return {}
    if kind == 1:
        return {"type": draw.choice(TYPES)}
    if kind == 2:
        return {"type": draw.sample(TYPES, draw.randint(2, 3))}
    if kind in (3, 4):
        return enumeration(draw)
    return (an_array, an_object, a_union)[kind - 5](draw, depth)


@pytest.mark.parametrize("style", LISTS)
def test_any_list_of_tools_reads_back_equal(style: str) -> None:
    draw = random.Random(0)
    for _ in range(200):
        tools = {}
        for _ in range(draw.randint(1, 3)):
            name = any_text(draw).strip() or "f"
            if name == "none":
                continue
            names = list({any_text(draw) or "x": None for _ in range(draw.randint(0, 3))})
            properties = {one: a_schema(draw) for one in names}
            required = [one for one in names if draw.random() < 0.5]
            parameters = {"type": "object", "properties": properties, "required": required}
            description = " ".join(any_text(draw, 6).split())
            tools[name] = {"name": name, "description": description, "parameters": parameters}
        offered = list(tools.values())
        assert offered_schemas(tools_prompt(offered, style)) == offered
        assert (
            offered_schemas(f"Be brief.\n{tools_prompt(offered, style)}\n\nToday is Monday.")
            == offered
        )
        assert offered_schemas(described(tools_prompt(offered))) == offered


def with_descriptions(draw: random.Random, schema: Schema) -> Schema:
    """The schema of an object, some of whose properties say what they are."""
    properties = {}
    for name, one in schema["properties"].items():
        if one.get("properties"):
            one = with_descriptions(draw, one)
        elif one.get("items", {}).get("properties"):
            one = one | {"items": with_descriptions(draw, one["items"])}
        text = " ".join(any_text(draw, 6).split())
        properties[name] = one | {"description": text} if text and draw.random() < 0.7 else one
    return schema | {"properties": properties}


def test_any_description_of_an_argument_reads_back() -> None:
    draw = random.Random(1)
    told = 0
    for _ in range(300):
        names = list({any_text(draw) or "x": None for _ in range(draw.randint(1, 3))})
        properties = {one: a_schema(draw) for one in names}
        plain = {"type": "object", "properties": properties, "required": names}
        parameters = with_descriptions(draw, plain)
        offered = [{"name": "f", "description": "g", "parameters": parameters}]
        text = tools_prompt(offered, "arguments")
        assert offered_schemas(text) == offered
        assert tools_prompt(offered_schemas(text), "arguments") == text
        told += str(parameters).count("'description'")
    assert told > 300


PLACE: Schema = {"type": "string", "description": "as City, ST"}
SPAN: Schema = {
    "type": "object",
    "properties": {"days": {"type": "integer", "description": "1 to 7"}},
    "required": ["days"],
}


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        (PLACE, "  x: as City, ST"),
        ({"type": "array", "items": SPAN}, "  x.days: 1 to 7"),
        ({"anyOf": [SPAN, {"type": "null"}]}, "  x.days: 1 to 7"),
        ({"$ref": "#/$defs/Span"}, "  x.days: 1 to 7"),
        ({"type": "string", "description": " two\nlines "}, "  x: two lines"),
        ({"type": "string"}, None),
        ({"type": "string", "description": " "}, None),
    ],
)
def test_an_argument_has_a_line_where_it_is_described(schema: Schema, line: str | None) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {"Span": SPAN},
    }
    text = tools_prompt([{"name": "f", "parameters": parameters}], "arguments")
    assert text.split("\n")[2:-1] == ([line] if line else [])
    assert text.endswith(NOTHING_FITS)


def test_a_recursive_model_has_lines_of_a_few_levels() -> None:
    node: Schema = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    node["properties"]["next"]["description"] = "another one"
    parameters = {
        "type": "object",
        "properties": {"x": node},
        "$defs": {"Node": node},
    }
    text = tools_prompt([{"name": "f", "parameters": parameters}], "arguments")
    assert text.count("another one") == 2  # as deep as the line of the tool goes
    assert tools_prompt(offered_schemas(text), "arguments") == text


def test_indented_prose_is_no_argument() -> None:
    text = "Functions:\nf(x: string)\n  y: no argument\n  x: its name"
    (tool,) = offered_schemas(text)
    assert tool["parameters"]["properties"] == {"x": {"type": "string", "description": "its name"}}


def test_released_models_find_the_text_that_they_were_trained_on() -> None:
    """Digests of the lists as they were when the released models were trained."""
    offered = [tool.schema for tool in TOOLS.values()]
    digests = {
        style: hashlib.sha256(tools_prompt(offered, style).encode()).hexdigest()[:16]
        for style in tool_lists.STYLES
    }
    assert digests == DIGESTS
    assert described(tools_prompt(offered)) == tools_prompt(offered, "described")


DIGESTS = {
    "compact": "d64bcebfc56e3cff",
    "described": "5ed0e01157482352",
    # no argument of a released model's tool has a description
    "arguments": "5ed0e01157482352",
    "json": "63e59d031a980f50",
}

LINES: list[tuple[Schema, str]] = [
    ({"type": "string"}, "string"),
    ({"type": ["integer", "null"]}, "integer|null"),
    ({"type": "array", "items": {"type": "number"}}, "number[]"),
    ({"type": "array", "items": {"enum": ["a", "b"]}}, "a|b[]"),
    ({"type": "array", "items": {}}, "any[]"),
    ({"type": "array"}, "array"),
    ({"type": "object"}, "object"),
    ({"description": "anything"}, "any"),
    ({"type": "integer", "enum": [1, 2, 3]}, "1|2|3"),
    ({"type": "string", "enum": ["kilometres per hour", "km/h"]}, "kilometres per hour|km/h"),
    ({"enum": ["San Francisco, CA", "Los Angeles (CA)"]}, "San Francisco, CA|Los Angeles (CA)"),
    ({"enum": ["string", "other"]}, "string|other"),
    ({"enum": ["True", "False"]}, "True|False"),
    ({"type": "string", "default": "x", "maxLength": 3}, "string"),
]


@pytest.mark.parametrize(("schema", "text"), LINES, ids=[text for _, text in LINES])
def test_a_simple_argument_has_the_text_that_it_always_had(schema: Schema, text: str) -> None:
    tool = {
        "name": "f",
        "description": "d",
        "parameters": {"properties": {"a": schema, "b": schema}, "required": ["a"]},
    }
    assert tools_prompt([tool]) == f"Functions:\nf(a: {text}, b?: {text}) - d"


ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name"],
}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["v"],
}
DEFS = {"Colour": {"enum": ["red", "blue"], "type": "string"}, "Item": ITEM, "Node": NODE}
OPTIONAL_ITEM = {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}
WRITTEN: list[tuple[Schema, str]] = [
    ({"enum": [True, False, None, 0.5]}, "true|false|null|0.5"),
    ({"enum": ["true", "false"]}, '"true"|"false"'),
    ({"enum": ["1", 2]}, '"1"|2'),
    ({"enum": ["a|b", "c"]}, '"a|b"|c'),
    ({"enum": ["\n\n", "\n", ","]}, '"\\n\\n"|"\\n"|","'),
    ({"enum": ["string", "integer"]}, '"string"|"integer"'),
    ({"enum": ["float"]}, '"float"'),
    ({"const": "fixed"}, "fixed"),
    ({"$ref": "#/$defs/Colour", "default": "red"}, "red|blue"),
    ({"allOf": [{"$ref": "#/$defs/Colour"}], "description": "d"}, "red|blue"),
    ({"$ref": "#/$defs/Item"}, "{name: string, n?: integer}"),
    ({"type": "array", "items": {"$ref": "#/$defs/Item"}}, "{name: string, n?: integer}[]"),
    ({"$ref": "#/$defs/Node"}, "{v: integer, next?: object}"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer|null"),
    ({"type": "integer", "nullable": True}, "integer|null"),
    ({"oneOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}, "red|blue|null"),
    (OPTIONAL_ITEM, "{name: string, n?: integer}|null"),
    (
        {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "(string[])|null",
    ),
    ({"anyOf": [{"type": "string"}, {"enum": ["auto", 1]}]}, 'string|"auto"|1'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, "{...: integer}"),
    ({"type": "float"}, "number"),
    ({"type": "List[int]"}, "integer[]"),
    ({"$ref": "https://example.com/elsewhere.json"}, "any"),
]


@pytest.mark.parametrize(("schema", "text"), WRITTEN, ids=[text for _, text in WRITTEN])
def test_what_pydantic_and_mcp_write_is_listed_as_what_it_allows(schema: Schema, text: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFS}
    listed = tools_prompt([{"name": "f", "parameters": parameters}])
    assert listed == f"Functions:\nf(a: {text})"
    (read,) = offered_schemas(listed)
    allowed = jsonschema.Draft202012Validator(read["parameters"])
    for value in (
        1,
        0.5,
        "1",
        "red",
        "fixed",
        "auto",
        "a|b",
        "float",
        None,
        [1],
        ["x"],
        [],
        {},
        {"name": "x"},
        {"v": 1},
    ):
        standard = {key: one for key, one in schema.items() if key != "type" or one in TYPES}
        whole = {"$defs": DEFS, **standard} if "://" not in str(schema.get("$ref")) else {}
        if schema.get("type") not in ("float", "List[int]") and jsonschema.Draft202012Validator(
            whole
        ).is_valid(value):
            assert allowed.is_valid({"a": value}), value


@pytest.mark.parametrize("definitions", [[DEFS], "Colour", 1])
def test_a_reference_to_definitions_that_are_no_object_is_any(definitions: object) -> None:
    properties = {"a": {"$ref": "Colour"}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    listed = tools_prompt([{"name": "f", "parameters": parameters}])
    assert listed == "Functions:\nf(a?: any)"


ROOTS: list[tuple[Schema, str]] = [
    ({"$ref": "#/$defs/Item", "$defs": DEFS}, "name: string, n?: integer"),
    (
        {
            "allOf": [{"$ref": "#/$defs/Item"}, {"properties": {"b": {}}, "required": ["b"]}],
            "$defs": DEFS,
        },
        "name: string, n?: integer, b: any",
    ),
    (
        {
            "oneOf": [
                {
                    "properties": {"k": {"const": "cat"}, "m": {"type": "string"}},
                    "required": ["k", "m"],
                },
                {"properties": {"k": {"const": "dog"}}, "required": ["k"]},
            ]
        },
        "k: cat|dog, m?: string",
    ),
    (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "a?: any, b?: any",
    ),
    ({"type": "object", "properties": {}, "required": ["z"]}, "z: any"),
    ({"type": "object", "additionalProperties": True}, "...: any"),
    ({"type": "object"}, ""),
]


@pytest.mark.parametrize(
    ("parameters", "arguments"), ROOTS, ids=[text or "none" for _, text in ROOTS]
)
def test_a_union_or_reference_at_the_root_is_listed_with_its_arguments(
    parameters: Schema, arguments: str
) -> None:
    assert tools_prompt([{"name": "f", "parameters": parameters}]) == f"Functions:\nf({arguments})"


def test_a_line_end_in_a_value_does_not_hide_the_next_tool() -> None:
    split = {
        "type": "object",
        "properties": {"delimiter": {"type": "string", "enum": ["\n\n", "\n", ","]}},
    }
    tools = [{"name": "split_text", "parameters": split}, {"name": "get_weather", "parameters": {}}]
    for style in tool_lists.STYLES:
        assert offered_names(tools_prompt(tools, style)) == {"split_text", "get_weather"}


def test_servers_get_the_words_of_json_schema() -> None:
    old = (
        "Functions:\nf(a: float, b?: List[int], c?: dict, d?: int, "
        "optional, e?: list(str), g: celsius) - words"
    )
    for content in (
        old,
        tools_prompt(
            [{"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "float"}}}}]
        ),
    ):
        _, (tool,) = as_openai([{"role": "system", "content": content}])
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
        assert tool["function"]["parameters"]["properties"]["a"] == {"type": "number"}
    (read,) = offered_schemas(old)
    assert read["parameters"]["required"] == ["a", "g"]
    assert read["parameters"]["properties"] == {
        "a": {"type": "number"},
        "b": {"type": "array", "items": {"type": "integer"}},
        "c": {"type": "object"},
        "d": {"type": "integer"},
        "e": {"type": "array", "items": {"type": "string"}},
        "g": {"enum": ["celsius"]},
    }


def test_schemas_that_point_to_each_other_many_times_stay_short() -> None:
    defs = {
        f"L{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/L{i + 1}"} for k in "ab"}}
        for i in range(30)
    }
    tool = {"name": "f", "parameters": {"properties": {"x": {"$ref": "#/$defs/L0"}}, "$defs": defs}}
    assert len(tools_prompt([tool])) < 20_000


def test_hostile_lists_take_linear_time(quick: Callable[..., Any]) -> None:
    for unit in (
        ": f(",
        "f(a: ",
        ", a: ",
        "|",
        "(",
        "[]",
        '"',
        "\\",
        "{a: ",
        "x(y) - ",
        "a, ",
        ": ",
    ):
        quick(1.0, offered_schemas, "Functions:\n" + unit * (20_000 // len(unit)))
        quick(
            1.0, offered_schemas, f"Functions:\nf(a: {unit * (20_000 // len(unit))}\n{NOTHING_FITS}"
        )
