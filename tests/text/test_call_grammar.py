"""Token masks: every path through the grammar is a readable call of what is offered, in every vocabulary and tag mode."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codechat.core.errors import ConfigError
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.text import chat, tokenizer
from codechat.text.call_grammar import CallGrammar, GrammarState, call_grammar

VOCABULARIES = ("bytes", "gpt2:4096", "gpt2")
CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
ODD = CASES["odd"]
OFFERED = [TOOLS[name].schema for name in ("square", "days_between", "color_channel")] + [ODD, {"name": "bare"}]


def wander(grammar: CallGrammar, room: int, rng: np.random.Generator) -> tuple[list[int], GrammarState]:
    """Ids of a completion whose every token is drawn evenly among the allowed ones."""
    state, ids = grammar.begin(), []
    while len(ids) < room and not state.ended:
        token = int(rng.choice(np.flatnonzero(state.mask(room - len(ids) - 1))))
        ids.append(state.take(token, room - len(ids) - 1))
    return ids, state


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}
    kind = schema.get("type", "any")
    return kind == "any" or isinstance(kind, list) or isinstance(value, kinds[kind])


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize("spec", VOCABULARIES)
def test_a_required_call_is_readable_offered_and_of_the_schemas_types(spec: str, tags: str) -> None:
    tok, rng = tokenizer.load(spec), np.random.default_rng(0)
    grammar, seen = call_grammar(tok, tags, OFFERED, required=True), set()
    schemas = {schema["name"]: schema.get("parameters", {}) for schema in OFFERED}
    for _ in range(20):
        ids, _ = wander(grammar, int(rng.integers(grammar.shortest, grammar.shortest + 60)), rng)
        first = chat.parse_calls(chat.completion_text(ids, tok, tags))[0]
        assert first.form == "object" and first.name in schemas
        properties = schemas[first.name].get("properties", {})
        assert set(schemas[first.name].get("required", ())) <= first.arguments.keys() <= properties.keys()
        assert all(fits(value, properties[name]) for name, value in first.arguments.items())
        seen.add(first.name)
    assert len(seen) >= 3


def test_definitions_of_several_functions_are_followed() -> None:
    """As pydantic writes models within models; the definitions of two functions may have one name."""
    tok, rng, seen = tokenizer.load("gpt2:4096"), np.random.default_rng(0), set()
    offered = [CASES["nested"], CASES["other"]]
    grammar = call_grammar(tok, "reserved", offered, required=True, strict=True)
    for _ in range(30):
        call = chat.parse_calls(chat.completion_text(wander(grammar, 120, rng)[0], tok, "reserved"))[0]
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
    tok, rng = tokenizer.load("gpt2:4096"), np.random.default_rng(0)
    text = {"type": "string"} | text
    pattern = text.pop("ends as")
    several = {"type": "array", "items": text, "minItems": 3}
    for value, least in ((text, 1), (several, 3)):
        properties = {"type": "object", "properties": {"x": value}, "required": ["x"]}
        grammar = call_grammar(tok, "reserved", [{"name": "f", "parameters": properties}], required=True, strict=True)
        for room in (grammar.shortest, grammar.shortest + 5, 80):
            call = chat.parse_calls(chat.completion_text(wander(grammar, room, rng)[0], tok, "reserved"))[0]
            found = call.arguments["x"] if least > 1 else [call.arguments["x"]]
            assert len(found) >= least and all(re.search(pattern, one) for one in found)


def test_a_call_whose_end_is_not_found_goes_on_as_it_is_sampled() -> None:
    tok, rng = tokenizer.load("gpt2:4096"), np.random.default_rng(0)
    properties = {"type": "object", "properties": {"x": {"type": "string", "minLength": 9000}}, "required": ["x"]}
    grammar = call_grammar(tok, "reserved", [{"name": "f", "parameters": properties}], strict=True)
    state, begun = (
        grammar.begin(),
        [*chat.layout(tok, "reserved").call, *tok.encode(' {"name": "f", "arguments": {"x": "')],
    )
    for room in range(60, -1, -1):
        token = begun.pop(0) if begun else int(rng.choice(np.flatnonzero(state.mask(room))))
        assert state.take(token, room) == token
    with pytest.raises(ConfigError):
        call_grammar(tok, "reserved", [{"name": "f", "parameters": properties}], required=True)


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize("spec", VOCABULARIES)
def test_texts_and_calls_pass_as_they_are_trained_even_where_little_room_is_left(spec: str, tags: str) -> None:
    tok = tokenizer.load(spec)
    odd = chat.format_call("odd", {"unit": "ü", "list": [1, -2], "free": {"a": 1}})
    calls = [(name, chat.format_call(name, arguments)) for name, arguments in CASES["samples"].items()]
    several = [(None, text) for text in ("Hi.\nx < 1", odd, f"First: {odd}", odd + odd)]
    for name, content in calls + (several if spec == "gpt2:4096" else []):
        state = CallGrammar(tok, tags, [TOOLS[name].schema] if name else OFFERED).begin()
        ids = chat.completion_ids(content, tok, tags)
        for i, token in enumerate(ids):
            room = len(ids) - i + 8 if name else 200
            assert state.mask(room)[token] and state.take(token, room) == token, chat.decode(ids[: i + 1], tok)
        assert state.ended or content.startswith("Hi")


def test_what_is_no_call_of_the_offered_is_not_allowed() -> None:
    tok = tokenizer.load("bytes")
    for text, why in CASES["not allowed"]:
        state, taken = CallGrammar(tok, "reserved", OFFERED).begin(), 0
        ids = chat.layout(tok, "reserved").call + tok.encode(text)
        while taken < len(ids) and state.mask(200)[ids[taken]]:
            state.take(ids[taken], 500)
            taken += 1
        assert 0 < taken < len(ids), why


def test_one_call_and_a_second_one() -> None:
    tok = tokenizer.load("gpt2:4096")
    ids = chat.completion_ids(chat.format_call("square", {"x": 12}), tok)[:-2]  # without the end
    for one_call in (False, True):
        state = CallGrammar(tok, "reserved", OFFERED, one_call=one_call).begin()
        for token in ids:
            state.take(token, 200)
        assert bool(state.mask(200)[ids[0]]) is not one_call


def test_schemas_without_a_grammar_allow_any_object_or_are_rejected() -> None:
    tok, rng = tokenizer.load("gpt2:4096"), np.random.default_rng(0)
    odd = {"name": "f", "parameters": {"properties": {"x": {"type": "no such type"}}}}
    with pytest.raises(ConfigError, match="'f'"):
        CallGrammar(tok, "reserved", [odd], strict=True)
    ids, _ = wander(CallGrammar(tok, "reserved", [odd], required=True), 40, rng)
    call = chat.parse_calls(chat.completion_text(ids, tok))[0]
    assert call.name == "f" and isinstance(call.arguments, dict)
    with pytest.raises(ConfigError):
        CallGrammar(tok, "reserved", [])


def test_an_alphabet_that_cannot_write_a_call_is_rejected(tmp_path: Any) -> None:
    (tmp_path / "letters.txt").write_text("abcdefghijklmnopqrstuvwxyz\n ")
    with pytest.raises(ConfigError):
        CallGrammar(tokenizer.load(f"chars:{tmp_path / 'letters.txt'}"), "reserved", OFFERED, required=True)
