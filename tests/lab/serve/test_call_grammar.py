"""Token masks: every path through the grammar is a readable call of what is offered, in every
vocabulary and tag mode."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
from jsonl import rows_of

from codechat.core.errors import ConfigError
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat.text.tool_schemas import tool_schema
from codechat_lab.serve.call_grammar import (
    CallGrammar,
    GrammarState,
    Rules,
    call_grammar,
    prompt_grammar,
)
from codechat_lab.tasks.toolbox.catalogue import TOOLS

BYTES = tokenizer.load("bytes")
VOCABULARIES = ("bytes", "gpt2:4096", "gpt2")
CASES = json.loads(Path(__file__).with_name("call_cases.json").read_text(encoding="utf-8"))
# {"what", "schema", "right" and "wrong" arguments, "refused too": valid, but refused;
# "relaxed": number of messages}
SCHEMAS = rows_of(Path(__file__).with_name("call_schemas.jsonl"))
ODD = CASES["odd"]
OFFERED = [
    TOOLS["square"].schema,
    TOOLS["days_between"].schema,
    TOOLS["color_channel"].schema,
    ODD,
    {"name": "bare"},
]
STRICT = Rules(required=True, strict=True)


def one_argument(value: dict[str, Any]) -> dict[str, Any]:
    """A tool f whose one argument x is required."""
    properties = {"type": "object", "properties": {"x": value}, "required": ["x"]}
    return {"name": "f", "parameters": properties}


def wander(
    grammar: CallGrammar, room: int, rng: np.random.Generator
) -> tuple[list[int], GrammarState]:
    """Ids of a completion whose every token is drawn evenly among the allowed ones."""
    state = grammar.begin()
    ids = []
    while len(ids) < room and not state.ended:
        token = int(rng.choice(np.flatnonzero(state.mask(room - len(ids) - 1))))
        ids.append(state.take(token, room - len(ids) - 1))
    return ids, state


KINDS = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type", "any")
    return kind == "any" or isinstance(kind, list) or isinstance(value, KINDS[kind])


def wandered(
    grammar: CallGrammar,
    room: int,
    rng: np.random.Generator,
    tok: tokenizer.Tokenizer,
    tags: str = "reserved",
) -> tool_calls.Call:
    """The call of a completion whose every token is drawn among the allowed ones."""
    ids, _ = wander(grammar, room, rng)
    return tool_calls.parse_calls(chat.completion_text(ids, tok, tags))[0]


class Drawn(NamedTuple):
    """A call, and the schema of its function's arguments."""

    call: tool_calls.Call
    parameters: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[(spec, tags) for spec in VOCABULARIES for tags in chat.MODES],
    ids=lambda given: f"{given[0]}-{given[1]}",
)
def drawn(request: pytest.FixtureRequest) -> list[Drawn]:
    """Twenty random calls that were required, in a vocabulary and a mode of tags."""
    spec, tags = request.param
    tok = tokenizer.load(spec)
    rng = np.random.default_rng(0)
    grammar = call_grammar(tok, tags, OFFERED, Rules(required=True))
    schemas = {schema["name"]: schema.get("parameters", {}) for schema in OFFERED}
    calls = []
    for _ in range(20):
        room = int(rng.integers(grammar.shortest, grammar.shortest + 60))
        call = wandered(grammar, room, rng, tok, tags)
        calls.append(Drawn(call, schemas[call.name]))
    return calls


def test_a_required_call_is_readable(drawn: list[Drawn]) -> None:
    assert {call.form for call, _ in drawn} == {"object"}


def test_required_calls_are_of_several_functions_that_are_offered(drawn: list[Drawn]) -> None:
    names = {call.name for call, _ in drawn}
    assert len(names) >= 3
    assert names <= {schema["name"] for schema in OFFERED}


def test_a_required_call_has_the_required_arguments_and_none_that_is_not_listed(
    drawn: list[Drawn],
) -> None:
    for call, parameters in drawn:
        properties = parameters.get("properties", {})
        assert set(parameters.get("required", ())) <= call.arguments.keys() <= properties.keys()


def test_the_arguments_of_a_required_call_have_the_schemas_types(drawn: list[Drawn]) -> None:
    for call, parameters in drawn:
        for name, value in call.arguments.items():
            assert fits(value, parameters["properties"][name])


@pytest.fixture(scope="module")
def defined() -> dict[str, list[dict[str, Any]]]:
    """The arguments of thirty calls of two functions whose schemas have definitions, by name.

    As pydantic writes models within models; the definitions of both have one name."""
    tok = tokenizer.load("gpt2:4096")
    rng = np.random.default_rng(0)
    grammar = call_grammar(tok, "reserved", [CASES["nested"], CASES["other"]], STRICT)
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(30):
        call = wandered(grammar, 120, rng, tok)
        found.setdefault(call.name, []).append(call.arguments)
    return found


def test_definitions_that_name_themselves_are_followed(
    defined: dict[str, list[dict[str, Any]]],
) -> None:
    for arguments in defined["paint"]:
        item = arguments["item"]
        while item is not None:
            assert item["colour"] in ("red", "blue")
            item = item["inner"]


def test_definitions_of_another_function_with_the_same_name_are_its_own(
    defined: dict[str, list[dict[str, Any]]],
) -> None:
    assert defined.keys() == {"paint", "other"}
    for arguments in defined["other"]:
        assert arguments["x"] in (1, 2)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("text", CASES["endless"], ids=str)
def test_a_call_ends_in_time_where_a_string_must_leave_a_repetition(
    text: dict[str, Any], several: bool
) -> None:
    """Strings that go on for ever if the next token is always one that may be repeated."""
    tok = tokenizer.load("gpt2:4096")
    rng = np.random.default_rng(0)
    value = {"type": "string"} | text
    pattern = value.pop("ends as")
    if several:
        value = {"type": "array", "items": value, "minItems": 3}
    grammar = call_grammar(tok, "reserved", [one_argument(value)], STRICT)
    for room in (grammar.shortest, grammar.shortest + 5, 80):
        found = wandered(grammar, room, rng, tok).arguments["x"]
        texts = found if several else [found]
        assert len(texts) >= (3 if several else 1)
        assert all(re.search(pattern, one) for one in texts)


ENDLESS = one_argument({"type": "string", "minLength": 9000})


def test_a_call_whose_end_is_not_found_goes_on_as_it_is_sampled() -> None:
    tok = tokenizer.load("gpt2:4096")
    rng = np.random.default_rng(0)
    state = call_grammar(tok, "reserved", [ENDLESS], Rules(strict=True)).begin()
    begun = [*chat.layout(tok, "reserved").call, *tok.encode(' {"name": "f", "arguments": {"x": "')]
    for room in range(60, -1, -1):
        token = begun.pop(0) if begun else int(rng.choice(np.flatnonzero(state.mask(room))))
        assert state.take(token, room) == token


def test_a_call_whose_end_is_not_found_cannot_be_required() -> None:
    tok = tokenizer.load("gpt2:4096")
    with pytest.raises(ConfigError):
        call_grammar(tok, "reserved", [ENDLESS], Rules(required=True))


def assert_passes(
    grammar: CallGrammar, ids: list[int], tok: tokenizer.Tokenizer, room: int | None
) -> GrammarState:
    """Every token is allowed and taken as it is, in this room or in one just large enough."""
    state = grammar.begin()
    for i, token in enumerate(ids):
        left = len(ids) - i + 8 if room is None else room
        assert state.mask(left)[token], chat.decode(ids[: i + 1], tok)
        assert state.take(token, left) == token, chat.decode(ids[: i + 1], tok)
    return state


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize("spec", VOCABULARIES)
def test_calls_pass_as_they_are_trained_even_where_little_room_is_left(
    spec: str, tags: str
) -> None:
    tok = tokenizer.load(spec)
    for name, arguments in CASES["samples"].items():
        ids = chat.completion_ids(tool_calls.format_call(name, arguments), tok, tags)
        grammar = CallGrammar(tok, tags, [TOOLS[name].schema])
        assert assert_passes(grammar, ids, tok, room=None).ended


ODD_CALL = tool_calls.format_call("odd", {"unit": "ü", "list": [1, -2], "free": {"a": 1}})


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize(
    "text, is_call",
    [
        ("Hi.\nx < 1", False),
        (ODD_CALL, True),
        (f"First: {ODD_CALL}", True),
        (ODD_CALL + ODD_CALL, True),
    ],
    ids=["text", "call", "text and call", "two calls"],
)
def test_texts_and_calls_pass_where_several_functions_are_offered(
    text: str, is_call: bool, tags: str
) -> None:
    tok = tokenizer.load("gpt2:4096")
    ids = chat.completion_ids(text, tok, tags)
    state = assert_passes(CallGrammar(tok, tags, OFFERED), ids, tok, room=200)
    assert state.ended or not is_call


@pytest.mark.parametrize("text, why", CASES["not allowed"], ids=str)
def test_what_is_no_call_of_the_offered_is_not_allowed(text: str, why: str) -> None:
    tok = tokenizer.load("bytes")
    state = CallGrammar(tok, "reserved", OFFERED).begin()
    taken = 0
    ids = chat.layout(tok, "reserved").call + tok.encode(text)
    while taken < len(ids) and state.mask(200)[ids[taken]]:
        state.take(ids[taken], 500)
        taken += 1
    assert 0 < taken < len(ids), why


@pytest.mark.parametrize("one_call", [False, True])
def test_a_second_call_is_allowed_but_where_there_may_be_one_alone(one_call: bool) -> None:
    tok = tokenizer.load("gpt2:4096")
    ids = chat.completion_ids(tool_calls.format_call("square", {"x": 12}), tok)[
        :-2
    ]  # without the end
    state = CallGrammar(tok, "reserved", OFFERED, Rules(one_call=one_call)).begin()
    for token in ids:
        state.take(token, 200)
    assert bool(state.mask(200)[ids[0]]) is not one_call


def accepts(
    grammar: CallGrammar,
    arguments: dict[str, Any],
    tok: tokenizer.Tokenizer,
    name: str = "f",
) -> bool:
    ids = chat.completion_ids(tool_calls.format_call(name, arguments), tok)
    return grammar.begin().matcher.validate_tokens(ids) >= len(ids) - 1  # but for the line end


def grammar_of(row: dict[str, Any]) -> CallGrammar:
    tool = {"name": "f", "parameters": row["schema"]}
    return call_grammar(BYTES, "reserved", [tool], STRICT)


def judge_of(row: dict[str, Any]) -> jsonschema.Draft202012Validator:
    tool = {"name": "f", "parameters": row["schema"]}
    return jsonschema.Draft202012Validator(tool_schema(tool)["parameters"])


@pytest.mark.parametrize("row", SCHEMAS, ids=lambda row: row["what"])
def test_correct_calls_are_possible(row: dict[str, Any]) -> None:
    """As jsonschema judges them."""
    judge = judge_of(row)
    grammar = grammar_of(row)
    assert [one for one in row["right"] if not judge.is_valid(one)] == []
    assert [one for one in row["right"] if not accepts(grammar, one, BYTES)] == []


@pytest.mark.parametrize("row", SCHEMAS, ids=lambda row: row["what"])
def test_wrong_calls_are_not_possible(row: dict[str, Any]) -> None:
    """As jsonschema judges them; beyond it, keys that are not listed and other formats are
    refused."""
    judge = judge_of(row)
    grammar = grammar_of(row)
    refused = row["wrong"] + row.get("refused too", [])
    assert [one for one in row["wrong"] if judge.is_valid(one)] == []
    assert [one for one in refused if accepts(grammar, one, BYTES)] == []


@pytest.mark.parametrize("row", SCHEMAS, ids=lambda row: row["what"])
def test_what_a_grammar_leaves_out_of_a_schema_is_said_with_its_function(
    row: dict[str, Any],
) -> None:
    grammar = grammar_of(row)
    assert len(grammar.relaxed) == row.get("relaxed", 0)
    assert all("'f'" in message for message in grammar.relaxed)


def three_by_three(kind: str) -> dict[str, Any]:
    row = {"type": "array", "minItems": 3, "items": {"type": kind}}
    return {"type": "array", "minItems": 3, "items": row}


OPERATION = {
    "operator": {"enum": ["+"]},
    "left": {"$ref": "#/$defs/expression"},
    "right": {"type": "integer"},
}
ALTERNATIVES = [
    {"type": "object", "properties": OPERATION, "required": [*OPERATION]},
    {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
]


@pytest.mark.parametrize("spec", VOCABULARIES)
@pytest.mark.parametrize(
    "value, most",
    [
        (three_by_three("string"), 80),
        (three_by_three("number"), 80),
        ({"$ref": "#/$defs/expression"}, 140),
    ],
    ids=["texts", "numbers", "expression"],
)
def test_the_shortest_call_of_nested_values_is_short(
    spec: str, value: dict[str, Any], most: int
) -> None:
    tool = one_argument(value)
    tool["parameters"] |= {"$defs": {"expression": {"anyOf": ALTERNATIVES}}}
    tok = tokenizer.load(spec)
    assert call_grammar(tok, "reserved", [tool], STRICT).shortest <= most


BEYOND = {
    "numbers": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "far": {"$ref": "https://example.com/far.json"},
    "text": {"type": "string", "pattern": "^(?=.*x).*$"},
    "t": {"type": "integer", "maximum": 2**64},
}
BOUNDS = {
    "name": "bounds",
    "parameters": {"type": "object", "properties": BEYOND, "required": [*BEYOND]},
}


def test_what_a_schema_says_beyond_the_grammar_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = call_grammar(BYTES, "reserved", [BOUNDS], STRICT)
    call_grammar(BYTES, "reserved", [BOUNDS], STRICT)
    said = capsys.readouterr().err
    assert said.count("\n") == len(first.relaxed) == 4
    assert "uniqueItems" in said
    assert "far.json" in said
    assert "text: pattern" in said
    assert "t: maximum 18446744073709551616" in said


def test_what_a_schema_says_beyond_the_grammar_is_left_open() -> None:
    grammar = call_grammar(BYTES, "reserved", [BOUNDS], STRICT)
    arguments = {"numbers": [1, 1], "far": {"a": [None]}, "text": "y", "t": 10**19}
    assert accepts(grammar, arguments, BYTES, "bounds")
    assert not accepts(grammar, {"numbers": [1]}, BYTES, "bounds"), "the others are required"


UNKNOWN = one_argument({"type": "no such type"})


def test_a_type_that_is_not_known_is_left_open_by_name() -> None:
    grammar = CallGrammar(BYTES, "reserved", [UNKNOWN], Rules(required=True))
    assert accepts(grammar, {"x": {"a": 1}}, BYTES)
    assert not accepts(grammar, {}, BYTES)
    assert grammar.relaxed == ["tool 'f': x has the unknown type 'no such type'"]


def test_a_type_that_is_not_known_is_refused_where_strict() -> None:
    with pytest.raises(ConfigError, match="'f': x has the unknown type 'no such type'"):
        CallGrammar(BYTES, "reserved", [UNKNOWN], Rules(strict=True))


def test_a_grammar_of_no_functions_is_refused() -> None:
    with pytest.raises(ConfigError):
        CallGrammar(BYTES, "reserved", [])


def closed(key: str, kind: str) -> dict[str, Any]:
    """An object of one key alone."""
    return {
        "type": "object",
        "properties": {key: {"type": kind}},
        "required": [key],
        "additionalProperties": False,
    }


def test_a_schema_that_nothing_satisfies_keeps_its_names_and_required_keys() -> None:
    both = {"allOf": [closed("a", "string"), closed("b", "integer")]}
    tool = {"name": "f", "parameters": both}
    grammar = CallGrammar(BYTES, "reserved", [tool], Rules(required=True))
    assert accepts(grammar, {"a": "x", "b": 1}, BYTES)
    assert not accepts(grammar, {"a": "x"}, BYTES)
    assert not accepts(grammar, {"a": 1, "b": 1}, BYTES)
    assert any("names, types, enumerations" in message for message in grammar.relaxed)


DEGREES = {
    "name": "f",
    "parameters": {
        "type": "dict",
        "properties": {
            "degrees": {"type": "float"},
            "to": {"type": "string", "enum": ["C|F", "\n", "1"]},
            "on": {"enum": [True]},
        },
        "required": ["degrees", "to"],
    },
}


@pytest.mark.parametrize("style", tool_lists.STYLES)
@pytest.mark.parametrize(
    "arguments, right",
    [
        ({"degrees": 21.5, "to": "C|F", "on": True}, True),
        ({"degrees": -3, "to": "\n"}, True),
        ({"degrees": "x", "to": "1"}, False),
        ({"degrees": 1, "to": "C"}, False),
        ({"degrees": 1, "to": 1}, False),
    ],
)
def test_the_list_of_a_prompt_constrains_as_its_schemas_do(
    arguments: dict[str, Any], right: bool, style: str
) -> None:
    prompt = [{"role": "system", "content": tool_lists.tools_prompt([DEGREES], style)}]
    grammar = prompt_grammar(prompt, BYTES, "reserved")
    assert grammar is not None
    assert accepts(grammar, arguments, BYTES) == right


def test_an_alphabet_that_cannot_write_a_call_is_rejected(tmp_path: Path) -> None:
    letters = tmp_path / "letters.txt"
    letters.write_text("abcdefghijklmnopqrstuvwxyz\n ")
    tok = tokenizer.load(f"chars:{letters}")
    with pytest.raises(ConfigError):
        CallGrammar(tok, "reserved", OFFERED, Rules(required=True))
