"""Calls in a model's own words under a mask: only valid ones, in the form that its template
writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imported import both

from codechat.core.errors import ConfigError
from codechat.text import chat, native_calls
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


def tokenizer(name: str) -> Any:
    return both("bytes", (TEMPLATES / f"tools_{name}.jinja").read_text().removesuffix("\n"))[0]


def sampled(name: str, seed: int, **rules: Any) -> list[int]:
    """Ids drawn at random among those that the mask allows."""
    tok = tokenizer(name)
    state = call_grammar(tok, "native", TOOLS, Rules(**rules)).begin()
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for room in range(200, 0, -1):
        mask = state.mask(room)
        if mask is None:
            break
        ids.append(state.take(int(rng.choice(np.flatnonzero(mask))), room))
    return ids


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_a_required_call_is_one_of_the_offered_functions(name: str, seed: int) -> None:
    tok = tokenizer(name)
    written = native_calls.read(
        chat.transcript(sampled(name, seed, required=True, one_call=True), tok, "native")
    )
    (call,) = written.calls
    assert call.name in ("get_weather", "now")
    assert set(call.arguments or ()) == ({"city", "unit"} if call.name == "get_weather" else set())


@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_the_call_of_the_template_is_allowed_to_its_last_token(name: str) -> None:
    tok = tokenizer(name)
    content = f"{chat.CALL_TAG} {json.dumps({'name': 'get_weather', 'arguments': {'city': 'Oslo', 'unit': 'c'}})}"
    state = call_grammar(tok, "native", TOOLS).begin()
    for token in chat.completion_ids(content, tok, "native"):
        mask = state.mask(100)
        assert mask is None or mask[token], tok.decode_inside([token])
        state.take(token, 100)
    assert state.ended


def test_words_stay_possible_where_no_call_is_required() -> None:
    tok = tokenizer("hermes")
    state = call_grammar(tok, "native", TOOLS).begin()
    for token in chat.completion_ids("It is cold.", tok, "native"):
        mask = state.mask(100)
        assert mask is None or mask[token]
        state.take(token, 100)


@pytest.mark.parametrize("name", ["xml", "python", "mistral"])
def test_a_form_that_no_mask_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="writes calls that no mask knows"):
        call_grammar(tokenizer(name), "native", TOOLS)
