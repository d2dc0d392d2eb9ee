"""Answers of a model that calls in its own words, as the server gives them."""

import json
from pathlib import Path
from typing import Any

from imported import both

from codechat.text import chat
from codechat_lab.serve.detokenizer import Detokenizer

TEMPLATE = (
    (Path(__file__).parents[2] / "codechat/text/templates/tools_hermes.jinja")
    .read_text()
    .removesuffix("\n")
)
TOK = both("bytes", TEMPLATE)[0]
CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}


def ids_of(text: str) -> list[int]:
    """A sampled answer."""
    return [*TOK.encode_behind("", text)[0], *chat.stop_sequences(TOK, "native")[0]]


def parts(text: str, calls: bool = True) -> tuple[str, Any]:
    return Detokenizer(TOK, "native", calls=calls).split(ids_of(text))


def test_a_call_in_tags_is_given_apart_from_the_text() -> None:
    text, calls = parts(f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
    assert text.strip() == "Let me see."
    assert calls == [("get_weather", {"city": "Oslo"})]


def test_a_call_in_a_fence_is_a_call() -> None:
    assert parts(f"```json\n{json.dumps(CALL)}\n```") == ("", [("get_weather", {"city": "Oslo"})])


def test_a_call_that_cannot_be_read_stays_as_it_was_written() -> None:
    for text in ("Write `<tool_call>` before a call.", '<tool_call>\n{"name": "get_we'):
        assert parts(text) == (text, [])


def test_json_of_an_answer_without_tools_stays_text() -> None:
    assert parts(json.dumps(CALL), calls=False) == (json.dumps(CALL), [])


def test_a_stream_never_shows_what_becomes_a_call() -> None:
    detokenizer = Detokenizer(TOK, "native", calls=True)
    ids = ids_of(f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
    shown = [detokenizer.growing(ids[:n]) for n in range(len(ids))]
    assert shown[-1] == "Let me see."
    assert all(later.startswith(part) for part, later in zip(shown, shown[1:]))


def test_a_call_between_marks_of_the_template_alone_is_given_apart() -> None:
    tok = both("bytes", TEMPLATE.replace("tool_call>", "use_tool>"))[0]
    text = f"Let me see.\n<use_tool>\n{json.dumps(CALL)}\n</use_tool>"
    ids = [*tok.encode_behind("", text)[0], *chat.stop_sequences(tok, "native")[0]]
    detokenizer = Detokenizer(tok, "native", calls=True)
    said, calls = detokenizer.split(ids)
    assert said.strip() == "Let me see."
    assert calls == [("get_weather", {"city": "Oslo"})]
    shown = [detokenizer.growing(ids[:n]) for n in range(len(ids))]
    assert shown[-1] == "Let me see."
    assert all(later.startswith(part) for part, later in zip(shown, shown[1:]))
    assert chat.form_of_calls(ids, tok, "native") == "tagged"
