"""Requests and answers without a server: conversations are rendered as in training, any text can be answered, offsets are those of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from codechat.data import chat_formats
from codechat.inference.app import AsciiJson, error_response
from codechat.inference.detokenizer import Detokenizer
from codechat.inference.engine import Detail, Job, Request
from codechat.inference.protocol import ApiError, Message, ParsedRequest, ServedModel, prompt_of
from codechat.inference.responses import ResponseBuilder
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import chat, tokenizer

TOK = tokenizer.load("gpt2:512")
LOADED = LoadedModel(
    GPT(GPTConfig(depth=1, n_embd=16, n_head=2, block_size=2048, vocab_size=512)), TOK, "reserved", {}, Path()
)
SERVED = ServedModel(LOADED, "m", 0)
USER, TOOL = (
    {"role": "user", "content": "Rome and Oslo?"},
    {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}},
)


def asks(*given: tuple[str, str], content: Any = None) -> dict[str, Any]:
    """An assistant's turn with calls, each an id and a value of x."""
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": x})}} for i, x in given
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(of: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": content}


TWO = asks(("a", "Rome"), ("b", "Oslo"))


@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize(
    "messages",
    [
        [USER, TWO, result("a", "1"), result("b", "2")],
        [USER, TWO, result("b", "2"), result("a", "1")],
        [{"role": "system", "content": ""}, USER, asks(("a", "<|end|>"), content="Let me look.\n"), result("a", "1")],
        [
            {"role": "developer", "content": "Be brief."},
            USER,
            asks(("a", "é"), content=[{"type": "text", "text": "So: "}]),
            result("a", "1"),
        ],
        [
            USER,
            TWO,
            result("b", "2"),
            result("a", "1"),
            {"role": "assistant", "content": " Both.\n"},
            USER,
            asks(("a", "Bonn")),
            result("a", "3"),
        ],
    ],
)
def test_a_conversation_has_the_ids_that_training_gives_it(messages: list[dict[str, Any]], tools: list[Any]) -> None:
    trained = chat_formats.messages_of({"messages": messages, "tools": tools}, "row", LOADED.tools_style)
    read = [Message.model_validate(message) for message in messages]
    assert chat.decode(prompt_of(read, tools, LOADED), TOK) == chat.decode(chat.prompt(trained, TOK), TOK)
    assert prompt_of(read, tools, LOADED) == chat.prompt(trained, TOK)


def test_what_a_model_wrote_comes_back_as_the_ids_that_it_wrote() -> None:
    written = "\n".join(["Both.", chat.format_call("f", {"x": "Rome"}), chat.format_call("f", {"x": "Oslo"})])
    (choice,) = body(chat.completion_ids(written, TOK), calls=True)["choices"]
    said = choice["message"]
    answers = [result(call["id"], "1") for call in said["tool_calls"]]
    ids = prompt_of([Message.model_validate(m) for m in (USER, said, *answers)], [], LOADED)
    told = [USER, {"role": "assistant", "content": written}, *[{"role": "function", "content": "1"}] * 2]
    assert ids == chat.prompt(told, TOK)


@pytest.mark.parametrize(
    "messages, param, reason",
    [
        ([USER, TWO, result("a", "1")], "messages[1].tool_calls", "call_without_result"),
        ([USER, TWO, result("a", "1"), USER], "messages[1].tool_calls", "call_without_result"),
        ([USER, TWO, USER], "messages[1].tool_calls", "call_without_result"),
        ([USER, TWO, result("a", "1"), result("a", "1")], "messages[3].tool_call_id", "result_without_call"),
        ([USER, TWO, *map(result, "aba", "123")], "messages[4].tool_call_id", "result_without_call"),
        ([USER, TWO, *map(result, "ac", "12")], "messages[3].tool_call_id", "result_without_call"),
        ([USER, asks(("a", "1"), ("a", "2")), *map(result, "aa", "12")], "messages[1].tool_calls", "unreadable_call"),
    ],
)
def test_every_call_has_one_result_by_its_id_here_and_in_training(messages: list[Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompt_of([Message.model_validate(message) for message in messages], [], LOADED)
    assert (caught.value.status, caught.value.param) == (400, param)
    answered = [*messages, {"role": "assistant", "content": "Done."}]
    assert chat_formats.messages_of({"messages": answered}, "row") == reason


def test_a_result_without_an_id_is_rejected() -> None:
    with pytest.raises(ApiError) as caught:
        prompt_of(
            [Message.model_validate(m) for m in (USER, asks(("a", "1")), {"role": "tool", "content": "1"})], [], LOADED
        )
    assert caught.value.param == "messages[2].tool_call_id"


# ---- any text can be answered

LONE = "\ud83d"


def body(*completions: list[int], **how: Any) -> dict[str, Any]:
    """The answer that holds these completions."""
    chat_like = how.pop("chat", True)
    jobs = []
    for ids in completions:
        details = [Detail(0.0, [])] * len(ids)
        jobs.append(
            Job(
                Request(prompt=[1], max_new_tokens=99, draws=0),
                lambda: None,
                False,
                0.0,
                ids,
                [-1.0] * len(ids),
                details,
                "stop",
            )
        )
    parsed = ParsedRequest([], Detokenizer(TOK, "reserved" if chat_like else None, **how), 1, True)
    return ResponseBuilder(parsed, jobs, SERVED, chat=chat_like).body(False)


def test_a_lone_surrogate_in_a_call_is_answered_and_read_again() -> None:
    """One half of a character, which UTF-8 cannot hold: json can, escaped. The other choices are answered as they are."""
    odd = f'{chat.CALL_TAG} {{"name": "f", "arguments": {{"x": "a\\ud83d", "\\ude00": [1]}}}}'
    fine = chat.format_call("f", {"x": "日本 🎉"})
    named = f'{chat.CALL_TAG} {{"name": "\\ud83d", "arguments": {{}}}}'
    answer = AsciiJson(body(*(chat.completion_ids(text, TOK) for text in (odd, fine, named)), calls=True))
    first, second, third = json.loads(answer.body)["choices"]
    assert json.loads(first["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": "a" + LONE, "\ude00": [1]}
    assert second["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "日本 🎉"}'
    assert third["message"]["content"] == named and "tool_calls" not in third["message"]
    again = [
        Message.model_validate(m)
        for m in (USER, first["message"], result(first["message"]["tool_calls"][0]["id"], "1"))
    ]
    (call,) = chat.parse_calls(chat.decode(prompt_of(again, [], LOADED), TOK))
    assert call.arguments == {"x": "a" + LONE, "\ude00": [1]}


def test_a_lone_surrogate_in_an_error_is_an_answer() -> None:
    assert json.loads(error_response(ApiError(400, f"{LONE} is unknown", LONE)).body)["error"]["param"] == LONE


def test_offsets_are_those_of_the_text_where_tokens_cut_characters() -> None:
    text = "日本 🎉 é\ud7ff!"
    cut = TOK.encode(text)
    half, eot = TOK.encode("🎉")[:-1], TOK.eot_id
    for ids in (
        cut,
        [*half, *TOK.encode("ab")],
        [*half, *half, *TOK.encode("é")],
        [*TOK.encode("a"), eot, *cut],
        [*half, 513, *cut],
    ):
        (choice,) = body(ids, chat=False)["choices"]
        offsets = choice["logprobs"]["text_offset"]
        assert len(offsets) == len(ids) and offsets[0] == 0 and max(offsets) <= len(choice["text"])
        for t, offset in enumerate(offsets):
            before = Detokenizer(TOK, None).text(ids[:t])
            if not before.endswith("\ufffd"):  # the token begins a character
                assert offset == len(before), (t, before)
            assert choice["text"][:offset] == before[:offset]
