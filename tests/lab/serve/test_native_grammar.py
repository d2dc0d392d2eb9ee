"""Calls in a model's own words under a mask: only valid ones, in the form that its template
writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imported import both

from codechat.core.errors import ConfigError
from codechat.text import chat, native_calls, tool_calls
from codechat.text.native_template import native_template_of
from codechat_lab.serve.call_grammar import Rules, call_grammar

TEMPLATES = Path(__file__).parents[2] / "codechat/text/templates"
TOOLS = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["c", "f"]},
            },
            "required": ["city", "unit"],
        },
    },
    {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
]


# What else templates write around calls in JSON, made of two of ours.
VARIANTS = {
    "own": ("hermes", ("tool_call>", "use_tool>")),
    "lead": ("hermes", ("'\\n<tool_call>", "'\\n\\n<tool_call>")),
    "lines": (
        "list",
        ("| list | tojson", "| list | tojson(indent=4)"),
        ("assistant\\n' + (", "assistant\\n<calls>' + ("),
        ("+ '<|im_end|>\\n' }}\n{%- else", "+ '</calls><|im_end|>\\n' }}\n{%- else"),
    ),
    "commas": (
        "list",
        ("list | tojson) +", "map('tojson') | join(',\\n')) +"),
    ),
    "beside": (
        "list",
        ("list | tojson) +", "map('tojson') | join) +"),
    ),
}


def tokenizer(name: str) -> Any:
    file, *changes = VARIANTS.get(name, (name,))
    template = (TEMPLATES / f"tools_{file}.jinja").read_text().removesuffix("\n")
    for old, new in changes:
        assert old in template
        template = template.replace(old, new)
    return both("bytes", template)[0]


def sampled(name: str, seed: int, n: int = 200, **rules: Any) -> list[int]:
    """Ids drawn at random among those that the mask allows."""
    tok = tokenizer(name)
    state = call_grammar(tok, "native", TOOLS, Rules(**rules)).begin()
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for room in range(n - 1, -1, -1):
        mask = state.mask(room)
        if mask is None:
            break
        ids.append(state.take(int(rng.choice(np.flatnonzero(mask))), room))
    return ids


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "name",
    [
        "hermes",
        "llama",
        "list",
        "lines",
        "thought",
    ],
)
def test_a_required_call_is_one_of_the_offered_functions(name: str, seed: int) -> None:
    tok = tokenizer(name)
    written = native_calls.read(
        chat.transcript(sampled(name, seed, required=True, one_call=True), tok, "native"),
        native_template_of(tok).own,
    )
    (call,) = written.calls
    assert call.name in ("get_weather", "now")
    assert set(call.arguments or ()) == ({"city", "unit"} if call.name == "get_weather" else set())


CITY = {"city": "Oslo", "unit": "c"}
ONE = f"{tool_calls.CALL_TAG} {json.dumps({'name': 'get_weather', 'arguments': CITY})}"
TWO = f"{ONE}\n{tool_calls.CALL_TAG} {json.dumps({'name': 'now', 'arguments': {}})}"
FORMS = [(name, TWO) for name in ("hermes", "list", "thought", *VARIANTS)]


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("name", "content"), [("llama", ONE), ("hermes", ONE), *FORMS])
def test_the_calls_of_the_template_are_allowed_to_their_last_token(
    name: str, content: str, required: bool
) -> None:
    tok = tokenizer(name)
    state = call_grammar(tok, "native", TOOLS, Rules(required=required)).begin()
    for token in chat.completion_ids(content, tok, "native"):
        mask = state.mask(200)
        assert mask is None or mask[token], tok.decode_inside([token])
        state.take(token, 200)
    assert state.ended


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "name",
    [
        "hermes",
        "list",
        "lines",
        "beside",
        "thought",
    ],
)
def test_no_further_call_begins_that_could_not_end(name: str, seed: int) -> None:
    tok = tokenizer(name)
    written = native_calls.read(
        chat.transcript(sampled(name, seed, n=80, required=True), tok, "native"),
        native_template_of(tok).own,
    )
    assert written.calls
    assert {call.name for call in written.calls} <= {"get_weather", "now"}


@pytest.mark.parametrize(
    "name",
    [
        "hermes",
        "list",
        "lines",
        "lead",
        "thought",
    ],
)
def test_words_stay_possible_where_no_call_is_required(name: str) -> None:
    tok = tokenizer(name)
    state = call_grammar(tok, "native", TOOLS).begin()
    for token in chat.completion_ids("It is [cold] {now}.", tok, "native"):
        mask = state.mask(100)
        assert mask is None or mask[token]
        state.take(token, 100)


@pytest.mark.parametrize("name", ["xml", "python", "mistral"])
def test_a_form_that_no_mask_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="writes calls that no mask knows"):
        call_grammar(tokenizer(name), "native", TOOLS)
