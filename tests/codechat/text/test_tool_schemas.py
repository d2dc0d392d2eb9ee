"""Schemas of tools in all public forms become JSON Schema; what is not known is named, never
read as something else."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from codechat.core.errors import DataError
from codechat.data.offered_tools import schemas
from codechat.text.tool_schemas import listed_tools, tool_schema
from codechat_lab.tasks.toolbox.catalogue import TOOLS

Schema = dict[str, Any]
CITY: Schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

WORDS: list[tuple[Any, Schema]] = [
    ("str", {"type": "string"}),
    ("String", {"type": "string"}),
    ("char", {"type": "string"}),
    ("STRING", {"type": "string"}),
    ("int", {"type": "integer"}),
    ("long", {"type": "integer"}),
    ("byte", {"type": "integer"}),
    ("short", {"type": "integer"}),
    ("Bigint", {"type": "integer"}),
    ("float", {"type": "number"}),
    ("double", {"type": "number"}),
    ("Boolean", {"type": "boolean"}),
    ("bool", {"type": "boolean"}),
    ("dict", {"type": "object"}),
    ("HashMap", {"type": "object"}),
    ("tuple", {"type": "array"}),
    ("ArrayList", {"type": "array"}),
    ("queue", {"type": "array"}),
    ("set", {"type": "array"}),
    ("NoneType", {"type": "null"}),
    ("any", {}),
    ("Any", {}),
    ("int, optional", {"type": "integer"}),
    ("str, optional (default: x)", {"type": "string"}),
    ("List[int]", {"type": "array", "items": {"type": "integer"}}),
    ("bytes", {"type": "string"}),
    ("list(str)", {"type": "array", "items": {"type": "string"}}),
    ("string[]", {"type": "array", "items": {"type": "string"}}),
    ("array of strings", {"type": "array", "items": {"type": "string"}}),
    (
        "List<Map<String, Integer>>",
        {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}},
    ),
    ("Dict[str, Any]", {"type": "object"}),
    ("typing.Dict[str, float]", {"type": "object", "additionalProperties": {"type": "number"}}),
    ("Tuple[float, float]", {"type": "array", "items": {"type": "number"}}),
    ("Optional[int]", {"type": ["integer", "null"]}),
    ("string | null", {"type": ["string", "null"]}),
    (
        "Union[int, List[str]]",
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
    ),
    ("Literal['a', 2, None]", {"enum": ["a", 2, None]}),
    (["str", "null"], {"type": ["string", "null"]}),
]


@pytest.mark.parametrize(("word", "schema"), WORDS, ids=[str(word) for word, _ in WORDS])
def test_words_for_types_of_any_language_are_read(word: Any, schema: Schema) -> None:
    tool = {
        "name": "f",
        "parameters": {"type": "dict", "properties": {"x": {"type": word, "description": "d"}}},
    }
    read = tool_schema(tool)["parameters"]
    assert read == {"type": "object", "properties": {"x": {**schema, "description": "d"}}}


@pytest.mark.parametrize(
    "word", ["frobnicate", "Callable[[float], float]", "np.ndarray", "date", "List[", "", 7, {}]
)
def test_a_word_that_is_not_known_is_named_and_left_open_or_refused(word: Any) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": word}}}}
    unknown: list[str] = []
    assert tool_schema(tool, unknown)["parameters"]["properties"] == {"x": {}}
    assert len(unknown) == 1
    assert "'f'" in unknown[0]
    assert str(word) in unknown[0]
    with pytest.raises(DataError, match="x has the unknown type"):
        tool_schema(tool)


@pytest.mark.parametrize("levels", [120, 400, 900])
def test_parameters_that_no_reader_can_follow_are_refused_by_name(levels: int) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        deep = {"type": "array", "items": deep}
    with pytest.raises(DataError, match="'f' has parameters deeper than 100 levels"):
        tool_schema({"name": "f", "parameters": {"type": "object", "properties": {"x": deep}}})


FORMS: dict[str, Any] = {
    "OpenAI": {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": CITY},
    },
    "Responses API": {
        "type": "function",
        "name": "f",
        "description": "d",
        "parameters": CITY,
        "strict": False,
    },
    "bare": {"name": "f", "description": "d", "parameters": CITY},
    "MCP": {
        "name": "f",
        "description": "d",
        "inputSchema": CITY,
        "outputSchema": {"type": "object"},
    },
    "Anthropic": {"name": "f", "description": "d", "input_schema": CITY},
    "Bedrock": {"toolSpec": {"name": "f", "description": "d", "inputSchema": {"json": CITY}}},
    "xLAM": {"name": "f", "description": "d", "parameters": {"city": {"type": "str"}}},
    "smolagents": {
        "name": "f",
        "description": "d",
        "inputs": {"city": {"type": "string"}},
        "output_type": "string",
    },
    "a list": {
        "name": "f",
        "description": "d",
        "parameters": [{"name": "city", "type": "string", "required": True}],
    },
    "draft 3": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "required": True}},
        },
    },
    "as text": {"name": "f", "description": "d", "parameters": json.dumps(CITY)},
    "beside the names": {
        "name": "f",
        "description": "d",
        "parameters": {"city": {"type": "str"}},
        "required": ["city"],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tool_gives_the_same_parameters(form: str) -> None:
    (tool,) = schemas([FORMS[form]])
    assert (tool["name"], tool["description"], tool["parameters"]) == ("f", "d", CITY)
    assert not {"inputSchema", "input_schema", "inputs"} & tool.keys()


def test_a_list_of_tools_is_found_in_what_holds_it() -> None:
    for held in (
        {"tools": [CITY]},
        {"functionDeclarations": [CITY]},
        [{"function_declarations": [CITY]}],
        [CITY],
        CITY,
    ):
        assert listed_tools(held) == [CITY]


NAMED: list[tuple[Schema, list[str], list[str]]] = [
    (
        {"type": {"type": "str", "default": "dog"}, "city": {"type": "str"}},
        ["type", "city"],
        ["city"],
    ),
    ({"type": {"type": "str"}}, ["type"], ["type"]),
    ({"type": "str", "city": "str"}, ["type", "city"], ["type", "city"]),
    (
        {"properties": {"type": "dict", "description": "d"}, "n": {"type": "int"}},
        ["properties", "n"],
        ["properties", "n"],
    ),
    (
        {"required": {"type": "bool"}, "n": {"type": "int, optional"}},
        ["required", "n"],
        ["required"],
    ),
    ({"items": {"type": "list"}, "n": {"type": "Optional[int]"}}, ["items", "n"], ["items"]),
    ({"description": {"type": "str"}}, ["description"], ["description"]),
    ({"enum": {"type": "str"}, "required": ["enum"]}, ["enum"], ["enum"]),
    (
        {
            "type": "object",
            "properties": {"type": {"type": "string"}, "properties": {"type": "object"}},
        },
        ["type", "properties"],
        [],
    ),
    ({"properties": {"type": {"type": "string"}}, "required": ["type"]}, ["type"], ["type"]),
]


@pytest.mark.parametrize(
    ("parameters", "names", "required"), NAMED, ids=[str(list(one)) for one, *_ in NAMED]
)
def test_a_parameter_may_have_the_name_of_a_keyword(
    parameters: Schema, names: list[str], required: list[str]
) -> None:
    read = tool_schema({"name": "f", "parameters": parameters})["parameters"]
    assert list(read["properties"]) == names
    assert read.get("required", []) == required
    jsonschema.Draft202012Validator.check_schema(read)


def test_older_drafts_and_openapi_become_json_schema() -> None:
    old = {
        "a": {"type": "string", "nullable": True},
        "b": {"type": "string", "enum": ["x"], "nullable": True},
        "c": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
        "d": {
            "type": "array",
            "items": [{"type": "int"}, {"type": "str"}],
            "additionalItems": False,
        },
        "e": {"type": "dict", "properties": {"z": {"type": "float", "required": True}}},
    }
    read = tool_schema({"name": "f", "parameters": {"type": "object", "properties": old}})[
        "parameters"
    ]["properties"]
    assert read == {
        "a": {"type": ["string", "null"]},
        "b": {"type": ["string", "null"], "enum": ["x", None]},
        "c": {"type": "integer", "minimum": 0, "exclusiveMinimum": 0},
        "d": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
        },
        "e": {"type": "object", "properties": {"z": {"type": "number"}}, "required": ["z"]},
    }


def test_json_schema_stays_as_it_is() -> None:
    node = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}], "default": None}
        },
    }
    full = {
        "$defs": {"N": node},
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/N"}, "t": {"enum": [None, "x"]}},
    }
    full |= {
        "allOf": [{"required": ["n"]}],
        "additionalProperties": False,
        "examples": [{"type": "float"}],
    }
    for tool in [
        {"name": "f", "description": "d", "parameters": full},
        *(tool.schema for tool in TOOLS.values()),
    ]:
        before = copy.deepcopy(tool)
        assert json.dumps(tool_schema(tool)) == json.dumps(before)
        assert tool == before


REFUSED: list[tuple[Any, str]] = [
    ({"description": "d"}, "expected an object with name"),
    ({"name": " "}, "expected an object with name"),
    ("f", "expected an object with name"),
    ({"name": "f", "parameters": {"type": "string"}}, "parameters of type 'string'"),
    ({"name": "f", "parameters": [1]}, "has parameters"),
    ({"name": "f", "parameters": "words"}, "is the text 'words'"),
    ({"name": "f", "parameters": {"type": "object", "properties": ["a"]}}, "has properties"),
    ({"name": "f", "parameters": {"type": "object", "required": "a"}}, "has required"),
    (
        {"name": "f", "parameters": {"type": "object", "city": {"type": "string"}}},
        "'city' beside its type",
    ),
    ({"name": "f", "schema": CITY}, "a schema under 'schema'"),
    ({"name": "f", "required_parameters": [{"name": "a"}]}, "a schema under 'required_parameters'"),
    (
        {"name": "f", "parameters": CITY, "inputSchema": {"type": "object"}},
        "different parameters under",
    ),
]


@pytest.mark.parametrize(("tool", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_parameters_in_no_known_form_are_refused_not_dropped(tool: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        tool_schema(tool)
    assert "\n" not in str(raised.value)


def test_the_rows_of_public_sets_keep_every_parameter(shared_data: Path) -> None:
    shared_rows = shared_data.parent / "rows"
    row = json.loads(
        (shared_rows / "parameter_named_type.jsonl").read_text(encoding="utf-8").splitlines()[0]
    )
    (pets,) = schemas(row["tools"])
    assert list(pets["parameters"]["properties"]) == ["type", "city"]
    assert pets["parameters"]["required"] == ["city"]
    (convert,) = schemas(json.loads((shared_rows / "float_tools.json").read_text(encoding="utf-8")))
    assert convert["parameters"]["properties"]["degrees"] == {"type": "number"}
    (weather,) = schemas(json.loads((shared_rows / "mcp_tools.json").read_text(encoding="utf-8")))
    assert weather["parameters"] == CITY
