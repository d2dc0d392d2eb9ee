"""Token masks: every path through the grammar is a readable call of what is offered, in every
vocabulary and tag mode."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonl import rows_of

from codechat.core.errors import ConfigError
from codechat.text import chat, tokenizer
from codechat.text.tool_schemas import tool_schema
from codechat_lab.serve.call_grammar import (
    CallGrammar,
    GrammarState,
    Rules,
    call_grammar,
    prompt_grammar,
)
from codechat_lab.tasks.toolbox.catalogue import TOOLS

VOCABULARIES = ("bytes", "gpt2:4096", "gpt2")
CASES = json.loads(Path(__file__).with_name("call_cases.json").read_text(encoding="utf-8"))
# {"what", "schema", "right" and "wrong" arguments, "refused too": valid, but refused;
# "relaxed": number of messages}
SCHEMAS = rows_of(Path(__file__).with_name("call_schemas.jsonl"))
ODD = CASES["odd"]
OFFERED = [TOOLS[name].schema for name in ("square", "days_between", "color_channel")] + [
    ODD,
    {"name": "bare"},
]


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


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    kind = schema.get("type", "any")
    return kind == "any" or isinstance(kind, list) or isinstance(value, kinds[kind])


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize("spec", VOCABULARIES)
def test_a_required_call_is_readable_offered_and_of_the_schemas_types(spec: str, tags: str) -> None:
    tok = tokenizer.load(spec)
    rng = np.random.default_rng(0)
    grammar = call_grammar(tok, tags, OFFERED, Rules(required=True))
    seen = set()
    schemas = {schema["name"]: schema.get("parameters", {}) for schema in OFFERED}
    for _ in range(20):
        ids, _ = wander(grammar, int(rng.integers(grammar.shortest, grammar.shortest + 60)), rng)
        first = chat.parse_calls(chat.completion_text(ids, tok, tags))[0]
        assert first.form == "object"
        assert first.name in schemas
        properties = schemas[first.name].get("properties", {})
        assert (
            set(schemas[first.name].get("required", ()))
            <= first.arguments.keys()
            <= properties.keys()
        )
        assert all(fits(value, properties[name]) for name, value in first.arguments.items())
        seen.add(first.name)
    assert len(seen) >= 3


def test_definitions_of_several_functions_are_followed() -> None:
    """As pydantic writes models within models; the definitions of two functions may have one
    name."""
    tok = tokenizer.load("gpt2:4096")
    rng = np.random.default_rng(0)
    seen = set()
    offered = [CASES["nested"], CASES["other"]]
    grammar = call_grammar(tok, "reserved", offered, Rules(required=True, strict=True))
    for _ in range(30):
        call = chat.parse_calls(
            chat.completion_text(wander(grammar, 120, rng)[0], tok, "reserved")
        )[0]
        seen.add(call.name)
        if call.name == "other":
            assert call.arguments["x"] in (1, 2)
        else:
            item = call.arguments["item"]
            while item is not None:
                assert item["colour"] in ("red", "blue")
                item = item["inner"]
    assert seen == {"paint", "other"}


@pytest.mark.parametrize("text", CASES["endless"], ids=str)
def test_a_call_ends_in_time_where_a_string_must_leave_a_repetition(text: dict[str, str]) -> None:
    """Strings that go on for ever if the next token is always one that may be repeated."""
    tok = tokenizer.load("gpt2:4096")
    rng = np.random.default_rng(0)
    text = {"type": "string"} | text
    pattern = text.pop("ends as")
    several = {"type": "array", "items": text, "minItems": 3}
    for value, least in ((text, 1), (several, 3)):
        properties = {"type": "object", "properties": {"x": value}, "required": ["x"]}
        grammar = call_grammar(
            tok,
            "reserved",
            [{"name": "f", "parameters": properties}],
            Rules(required=True, strict=True),
        )
        for room in (grammar.shortest, grammar.shortest + 5, 80):
            call = chat.parse_calls(
                chat.completion_text(wander(grammar, room, rng)[0], tok, "reserved")
            )[0]
            found = call.arguments["x"] if least > 1 else [call.arguments["x"]]
            assert len(found) >= least
            assert all(re.search(pattern, one) for one in found)


def test_a_call_whose_end_is_not_found_goes_on_as_it_is_sampled() -> None:
    tok = tokenizer.load("gpt2:4096")
    rng = np.random.default_rng(0)
    properties = {
        "type": "object",
        "properties": {"x": {"type": "string", "minLength": 9000}},
        "required": ["x"],
    }
    grammar = call_grammar(
        tok, "reserved", [{"name": "f", "parameters": properties}], Rules(strict=True)
    )
    state = grammar.begin()
    begun = [*chat.layout(tok, "reserved").call, *tok.encode(' {"name": "f", "arguments": {"x": "')]
    for room in range(60, -1, -1):
        token = begun.pop(0) if begun else int(rng.choice(np.flatnonzero(state.mask(room))))
        assert state.take(token, room) == token
    with pytest.raises(ConfigError):
        call_grammar(
            tok, "reserved", [{"name": "f", "parameters": properties}], Rules(required=True)
        )


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize("spec", VOCABULARIES)
def test_texts_and_calls_pass_as_they_are_trained_even_where_little_room_is_left(
    spec: str, tags: str
) -> None:
    tok = tokenizer.load(spec)
    odd = chat.format_call("odd", {"unit": "ü", "list": [1, -2], "free": {"a": 1}})
    calls = [
        (name, chat.format_call(name, arguments)) for name, arguments in CASES["samples"].items()
    ]
    several = [(None, text) for text in ("Hi.\nx < 1", odd, f"First: {odd}", odd + odd)]
    for name, content in calls + (several if spec == "gpt2:4096" else []):
        state = CallGrammar(tok, tags, [TOOLS[name].schema] if name else OFFERED).begin()
        ids = chat.completion_ids(content, tok, tags)
        for i, token in enumerate(ids):
            room = len(ids) - i + 8 if name else 200
            assert state.mask(room)[token] and state.take(token, room) == token, chat.decode(
                ids[: i + 1], tok
            )
        assert state.ended or content.startswith("Hi")


def test_what_is_no_call_of_the_offered_is_not_allowed() -> None:
    tok = tokenizer.load("bytes")
    for text, why in CASES["not allowed"]:
        state = CallGrammar(tok, "reserved", OFFERED).begin()
        taken = 0
        ids = chat.layout(tok, "reserved").call + tok.encode(text)
        while taken < len(ids) and state.mask(200)[ids[taken]]:
            state.take(ids[taken], 500)
            taken += 1
        assert 0 < taken < len(ids), why


def test_one_call_and_a_second_one() -> None:
    tok = tokenizer.load("gpt2:4096")
    ids = chat.completion_ids(chat.format_call("square", {"x": 12}), tok)[:-2]  # without the end
    for one_call in (False, True):
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
    ids = chat.completion_ids(chat.format_call(name, arguments), tok)
    return grammar.begin().matcher.validate_tokens(ids) >= len(ids) - 1  # but for the line end


@pytest.mark.parametrize("row", SCHEMAS, ids=[row["what"] for row in SCHEMAS])
def test_correct_calls_are_possible_and_wrong_ones_are_not(row: dict[str, Any]) -> None:
    """As jsonschema judges them; beyond it, keys that are not listed and other formats are
    refused."""
    tok = tokenizer.load("bytes")
    tool = {"name": "f", "parameters": row["schema"]}
    judge = jsonschema.Draft202012Validator(tool_schema(tool)["parameters"])
    assert [judge.is_valid(one) for one in row["right"]] == [True] * len(row["right"])
    assert not any(judge.is_valid(one) for one in row["wrong"])
    grammar = call_grammar(tok, "reserved", [tool], Rules(required=True, strict=True))
    assert [one for one in row["right"] if not accepts(grammar, one, tok)] == []
    assert [
        one for one in row["wrong"] + row.get("refused too", []) if accepts(grammar, one, tok)
    ] == []
    assert len(grammar.relaxed) == row.get("relaxed", 0)
    assert all("'f'" in message for message in grammar.relaxed)


@pytest.mark.parametrize("spec", VOCABULARIES)
@pytest.mark.parametrize(
    ("value", "most"),
    [
        (
            {
                "type": "array",
                "minItems": 3,
                "items": {"type": "array", "minItems": 3, "items": {"type": "string"}},
            },
            80,
        ),
        (
            {
                "type": "array",
                "minItems": 3,
                "items": {"type": "array", "minItems": 3, "items": {"type": "number"}},
            },
            80,
        ),
        ({"$ref": "#/$defs/expression"}, 140),
    ],
    ids=["texts", "numbers", "expression"],
)
def test_the_shortest_call_of_nested_values_is_short(
    spec: str, value: dict[str, Any], most: int
) -> None:
    operation = {
        "operator": {"enum": ["+"]},
        "left": {"$ref": "#/$defs/expression"},
        "right": {"type": "integer"},
    }
    alternatives = [
        {"type": "object", "properties": operation, "required": [*operation]},
        {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
    ]
    properties = {"type": "object", "properties": {"x": value}, "required": ["x"]}
    parameters = properties | {"$defs": {"expression": {"anyOf": alternatives}}}
    tok = tokenizer.load(spec)
    tool = {"name": "f", "parameters": parameters}
    assert call_grammar(tok, "reserved", [tool], Rules(required=True, strict=True)).shortest <= most


def test_what_a_schema_says_beyond_the_grammar_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    far = {"$ref": "https://example.com/far.json"}
    text = {"type": "string", "pattern": "^(?=.*x).*$"}
    properties = {
        "numbers": numbers,
        "far": far,
        "text": text,
        "t": {"type": "integer", "maximum": 2**64},
    }
    tool = {
        "name": "bounds",
        "parameters": {"type": "object", "properties": properties, "required": [*properties]},
    }
    tok = tokenizer.load("bytes")
    for _ in range(2):
        grammar = call_grammar(tok, "reserved", [tool], Rules(required=True, strict=True))
    said = capsys.readouterr().err
    assert said.count("\n") == len(grammar.relaxed) == 4
    assert all(
        word in said
        for word in ("uniqueItems", "far.json", "text: pattern", "t: maximum 18446744073709551616")
    )
    assert accepts(
        grammar,
        {"numbers": [1, 1], "far": {"a": [None]}, "text": "y", "t": 10**19},
        tok,
        "bounds",
    )
    assert not accepts(grammar, {"numbers": [1]}, tok, "bounds")


def test_a_type_that_is_not_known_is_left_open_by_name_or_refused_where_strict() -> None:
    tok = tokenizer.load("bytes")
    tool = {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "no such type"}}, "required": ["x"]},
    }
    with pytest.raises(ConfigError, match="'f': x has the unknown type 'no such type'"):
        CallGrammar(tok, "reserved", [tool], Rules(strict=True))
    grammar = CallGrammar(tok, "reserved", [tool], Rules(required=True))
    assert accepts(grammar, {"x": {"a": 1}}, tok)
    assert not accepts(grammar, {}, tok)
    assert grammar.relaxed == ["tool 'f': x has the unknown type 'no such type'"]
    with pytest.raises(ConfigError):
        CallGrammar(tok, "reserved", [])


def test_a_schema_that_nothing_satisfies_keeps_its_names_and_required_keys() -> None:
    tok = tokenizer.load("bytes")
    closed = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    other = {
        "type": "object",
        "properties": {"b": {"type": "integer"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    grammar = CallGrammar(
        tok,
        "reserved",
        [{"name": "f", "parameters": {"allOf": [closed, other]}}],
        Rules(required=True),
    )
    assert accepts(grammar, {"a": "x", "b": 1}, tok)
    assert not accepts(grammar, {"a": "x"}, tok)
    assert not accepts(grammar, {"a": 1, "b": 1}, tok)
    assert any("names, types, enumerations" in message for message in grammar.relaxed)


def test_the_list_of_a_prompt_constrains_as_its_schemas_do() -> None:
    tok = tokenizer.load("bytes")
    properties = {
        "degrees": {"type": "float"},
        "to": {"type": "string", "enum": ["C|F", "\n", "1"]},
        "on": {"enum": [True]},
    }
    tool = {
        "name": "f",
        "parameters": {"type": "dict", "properties": properties, "required": ["degrees", "to"]},
    }
    for style in chat.STYLES:
        prompt = [{"role": "system", "content": chat.tools_prompt([tool], style)}]
        grammar = prompt_grammar(prompt, tok, "reserved")
        assert grammar is not None
        for arguments in ({"degrees": 21.5, "to": "C|F", "on": True}, {"degrees": -3, "to": "\n"}):
            assert accepts(grammar, arguments, tok)
        for arguments in (
            {"degrees": "x", "to": "1"},
            {"degrees": 1, "to": "C"},
            {"degrees": 1, "to": 1},
        ):
            assert not accepts(grammar, arguments, tok)


def test_an_alphabet_that_cannot_write_a_call_is_rejected(tmp_path: Any) -> None:
    (tmp_path / "letters.txt").write_text("abcdefghijklmnopqrstuvwxyz\n ")
    with pytest.raises(ConfigError):
        CallGrammar(
            tokenizer.load(f"chars:{tmp_path / 'letters.txt'}"),
            "reserved",
            OFFERED,
            Rules(required=True),
        )
