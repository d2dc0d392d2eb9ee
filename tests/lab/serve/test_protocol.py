"""Requests and answers without a server: conversations are rendered as in training, any text
can be answered."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from taught import CALL, CODE, SQUARE, TOK

from codechat.core.errors import DataError
from codechat.data import chat_formats
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import chat, tokenizer, tool_calls
from codechat.text.tool_calls import as_openai
from codechat_lab.serve import parsing, protocol, responses
from codechat_lab.serve.app import error_response, json_response
from codechat_lab.serve.detokenizer import Detokenizer, stable_text
from codechat_lab.serve.engine import Job, Request
from codechat_lab.serve.protocol import ChatRequest, Message
from codechat_lab.serve.request_errors import ApiError
from codechat_lab.tasks.toolbox import problems

MODEL = GPT(GPTConfig(depth=1, n_embd=16, n_head=2, block_size=2048, vocab_size=512))
LOADED = LoadedModel(MODEL, TOK, "reserved", {}, Path())
USER = {"role": "user", "content": "Rome and Oslo?"}
TOOL = {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}


def asks(*given: tuple[str, str], content: Any = None) -> dict[str, Any]:
    """An assistant's turn with calls, each an id and a value of x."""
    calls = [(i, {"name": "f", "arguments": json.dumps({"x": x})}) for i, x in given]
    calls = [{"id": i, "type": "function", "function": function} for i, function in calls]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(of: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": content}


TWO = asks(("a", "Rome"), ("b", "Oslo"))


def prompted(
    messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), loaded: Any = None
) -> list[int]:
    return parsing.prompt_of(
        [Message.model_validate(message) for message in messages], tools, loaded or LOADED
    )


def test_a_conversation_has_the_ids_that_training_gives_it() -> None:
    brief = {"role": "developer", "content": "Be brief."}
    parts = [{"type": "text", "text": "So: "}]
    both = [USER, TWO, result("b", "2"), result("a", "1")]
    for messages in (
        [USER, TWO, result("a", "1"), result("b", "2")],
        both,
        [
            {"role": "system", "content": ""},
            USER,
            asks(("a", "<|end|>"), content="Let me look.\n"),
            result("a", "1"),
        ],
        [brief, USER, asks(("a", "é"), content=parts), result("a", "1")],
        [
            *both,
            {"role": "assistant", "content": " Both.\n"},
            USER,
            asks(("a", "Bonn")),
            result("a", "3"),
        ],
    ):
        for tools in ([], [TOOL]):
            trained = chat_formats.messages_of(
                {"messages": messages, "tools": tools}, "row", LOADED.tools_style
            )
            assert prompted(messages, tools) == chat.prompt(trained, TOK), messages


def test_parts_of_a_content_are_lines_here_and_in_training() -> None:
    parts = [{"type": "text", "text": text} for text in ("Compare", "", "Rome", "Oslo")]
    for role, before in (("user", []), ("system", []), ("tool", [USER, asks(("a", "1"))])):
        more = {"tool_call_id": "a"} if role == "tool" else {}
        inside = [*before, {"role": role, "content": parts, **more}]
        plain = [*before, {"role": role, "content": "Compare\nRome\nOslo", **more}]
        assert prompted(inside) == prompted(plain)
        answer = {"role": "assistant", "content": parts}
        trained = chat_formats.messages_of({"messages": [*inside, answer]}, "row")
        assert [message["content"] for message in trained[-2:]] == ["Compare\nRome\nOslo"] * 2


def test_what_a_model_wrote_comes_back_as_the_ids_that_it_wrote() -> None:
    written = "\n".join(
        [
            "Both.",
            tool_calls.format_call("f", {"x": "Rome"}),
            tool_calls.format_call("f", {"x": "Oslo"}),
        ]
    )
    (choice,) = body(chat.completion_ids(written, TOK), calls=True)["choices"]
    said = choice["message"]
    answers = [result(call["id"], "1") for call in said["tool_calls"]]
    told = [
        USER,
        {"role": "assistant", "content": written},
        *[{"role": "function", "content": "1"}] * 2,
    ]
    assert prompted([USER, said, *answers]) == chat.prompt(told, TOK)


@pytest.mark.parametrize(
    "messages, param, reason",
    [
        ([USER, TWO, result("a", "1")], "messages.1", "call_without_result"),
        ([USER, TWO, result("a", "1"), USER], "messages.1", "call_without_result"),
        ([USER, TWO, USER], "messages.1", "call_without_result"),
        ([USER, TWO, result("a", "1"), result("a", "1")], "messages.3", "result_without_call"),
        ([USER, TWO, *map(result, "aba", "123")], "messages.4", "result_without_call"),
        ([USER, TWO, *map(result, "ac", "12")], "messages.3", "result_without_call"),
        (
            [USER, asks(("a", "1"), ("a", "2")), *map(result, "aa", "12")],
            "messages.1",
            "unreadable_call",
        ),
        ([USER, asks(("a", "1")), {"role": "tool", "content": "1"}], "messages.2", None),
    ],
)
def test_every_call_has_one_result_by_its_id_here_and_in_training(
    messages: list[dict[str, Any]], param: str, reason: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        prompted(messages)
    assert (caught.value.status, caught.value.param) == (400, param)
    answered = [*messages, {"role": "assistant", "content": "Done."}]
    assert reason is None or chat_formats.messages_of({"messages": answered}, "row") == reason


def test_calls_over_a_server_are_the_text_that_is_rendered_here() -> None:
    two = "\n".join(
        [
            "Both.",
            tool_calls.format_call("f", {"x": "Rome"}),
            tool_calls.format_call("f", {"x": "\ud83d"}),
        ]
    )
    unread = f'{tool_calls.CALL_TAG} {{"name": "f", "arg'
    told = [{"role": "function", "content": "1"}, {"role": "function", "content": "2"}]
    for messages in (
        [USER, {"role": "assistant", "content": two}, *told],
        [USER, {"role": "assistant", "content": unread}, told[0]],
        [USER, {"role": "assistant", "content": two}, USER],  # shown, not run
        [
            USER,
            {"role": "assistant", "content": two},
            *told,
            {"role": "assistant", "content": two},
            USER,
        ],
    ):
        assert prompted(as_openai(messages)[0]) == chat.prompt(messages, TOK)
    for problem in problems.draw("test", 60):  # functions go as schemas and come back as the list
        said, tools = as_openai(problem.messages)
        schemas = [protocol.Tool.model_validate(tool).function.schema_ for tool in tools]
        assert prompted(said, schemas) == chat.prompt(problem.messages, TOK)


@pytest.mark.parametrize(
    "content, detokenizer",
    [
        (CODE, Detokenizer(TOK, "reserved")),
        (CODE, Detokenizer(TOK, "reserved", stops=("x > 2",))),
        (f"so: {CALL}", Detokenizer(TOK, "reserved", calls=True)),
        ("a\n<", Detokenizer(TOK, "reserved")),
        (CODE, Detokenizer(TOK, None)),
    ],
    ids=["whole", "stop", "call", "begun tag", "plain"],
)
def test_what_a_stream_has_said_stays_true(content: str, detokenizer: Detokenizer) -> None:
    ids = chat.completion_ids(content, TOK) if detokenizer.tags else TOK.encode(content)
    whole = detokenizer.split(ids)[0]
    parts = [detokenizer.growing(ids[:k]) for k in range(len(ids) + 1)]
    assert all(map(whole.startswith, parts))
    assert any(parts)


@pytest.mark.parametrize("tags", chat.MODES)
@pytest.mark.parametrize("end", ["", "\n", "\n\n"], ids=["none", "one line", "two lines"])
def test_nothing_of_the_end_of_an_answer_is_said(tags: str, end: str) -> None:
    detokenizer = Detokenizer(TOK, tags)
    ids = [*TOK.encode("abc" + end), *chat.stop_sequences(TOK, tags)[0]]
    whole = detokenizer.split(ids)[0]
    assert whole.strip() == "abc"
    assert all(whole.startswith(detokenizer.growing(ids[:k])) for k in range(len(ids) + 1))


@pytest.mark.parametrize(
    "text, stable",
    [("a < b\n", "a < b"), ("a\n<|en", "a"), ("a\n<|x", "a\n<|x"), ("caf\ufffd", "caf")],
)
def test_a_begun_ending_and_half_a_character_are_not_stable(text: str, stable: str) -> None:
    assert stable_text(text, "\n<|end|>") == stable


def test_an_unreadable_later_call_leaves_the_readable_first_one() -> None:
    detokenizer = Detokenizer(TOK, "reserved", calls=True)
    bad = f'{tool_calls.CALL_TAG} {{"name": "square", "arg'
    found = detokenizer.split(chat.completion_ids(f"Well. {CALL}{bad}{CALL}", TOK))
    assert found == ("Well. ", [("square", {"x": 12})])
    assert detokenizer.split(chat.completion_ids(bad + CALL, TOK)) == (bad + CALL, [])


@pytest.mark.parametrize(
    "written, content, n_calls",
    [
        (CALL + "\nDone.", "Done.", 1),
        (f"Well. {CALL}\nDone.", "Well. \nDone.", 1),
        (f"Well.\n{CALL}\nDone.", "Well.\nDone.", 1),
        (f"{CALL} and {CALL} or so", "and\nor so", 2),
        (f"Both.\n{CALL}\n{CALL}", "Both.\n", 2),
        (f"{CALL}\n", "", 1),
        (
            f'{CALL} then\n{tool_calls.CALL_TAG} {{"name": "sq',
            "then",
            1,
        ),  # the unreadable call is left out
        (f'{tool_calls.CALL_TAG} [{{"name": "f"}}, {{"name": "g"}}] all', "all", 2),
    ],
)
def test_text_after_a_call_is_content(written: str, content: str, n_calls: int) -> None:
    detokenizer = Detokenizer(TOK, "reserved", calls=True)
    ids = chat.completion_ids(written, TOK)
    text, calls = detokenizer.split(ids)
    assert (text, len(calls)) == (content, n_calls)
    assert all(text.startswith(detokenizer.growing(ids[:n])) for n in range(len(ids) + 1))
    (choice,) = body(ids, calls=True)["choices"]
    assert choice["message"]["content"] == (content or None)


@pytest.mark.parametrize("calls", [False, True])
def test_declining_by_a_call_is_read_as_words_however_it_grows(calls: bool) -> None:
    detokenizer = Detokenizer(TOK, "reserved", calls=calls)
    ids = chat.completion_ids(tool_calls.DECLINE, TOK)
    assert detokenizer.split(ids) == (tool_calls.DECLINED, [])
    assert {detokenizer.growing(ids[:n]) for n in range(len(ids) + 1)} == {""}
    assert detokenizer.growing(chat.completion_ids(CALL, TOK)) == ("" if calls else CALL)


def test_a_model_that_declines_by_a_call_may_and_reads_it_again() -> None:
    class Declining:
        tokenizer, tags, tools_style, declines = TOK, "reserved", "described", True

    def passes(choice: str) -> bool:
        body = ChatRequest(model="x", messages=[USER], tools=[strict], tool_choice=choice)
        state = parsing.tools_of(body, Declining())[1].begin()
        ids = chat.completion_ids(tool_calls.DECLINE, TOK)
        return all(
            state.mask(200) is not None and state.mask(200)[i] and state.take(i, 99) == i
            for i in ids
        )

    strict = {"type": "function", "function": {**SQUARE, "strict": True}}
    assert passes("auto")
    assert not passes("required")
    declined = [USER, {"role": "assistant", "content": tool_calls.DECLINED}, USER]
    assert tool_calls.DECLINE in chat.decode(prompted(declined, [SQUARE], Declining()), TOK)


def test_a_character_that_the_alphabet_lacks_is_an_error_of_the_request(tmp_path: Path) -> None:
    (tmp_path / "abc.txt").write_text("abc\n")
    letters = tokenizer.load(f"chars:{tmp_path / 'abc.txt'}")
    served = parsing.ServedModel(LoadedModel(MODEL, letters, "text", {}, tmp_path), "m", 0, 2048)
    for prompt in ("a\0b", "z"):
        with pytest.raises(DataError):
            parsing.parse_completion(protocol.CompletionRequest(model="m", prompt=prompt), served)


def body(*completions: list[int], **how: Any) -> dict[str, Any]:
    """The answer that holds these completions."""
    jobs = []
    for ids in completions:
        job = Job(
            Request(prompt=[1], max_new_tokens=99, draws=0), lambda: None, False, 0.0, end="stop"
        )
        job.ids = ids
        job.logprobs = [-1.0] * len(ids)
        job.details = [(0.0, [])] * len(ids)
        jobs.append(job)
    request = ChatRequest(model="m", messages=[USER], logprobs=True)
    return responses.response_of(request, jobs, Detokenizer(TOK, "reserved", **how)).body()


def test_a_lone_surrogate_in_a_call_is_answered_and_read_again() -> None:
    """One half of a character, which UTF-8 cannot hold: json can, escaped."""
    odd = f'{tool_calls.CALL_TAG} {{"name": "f", "arguments": {{"x": "a\\ud83d", "\\ude00": [1]}}}}'
    fine = tool_calls.format_call("f", {"x": "日本 🎉"})
    named = f'{tool_calls.CALL_TAG} {{"name": "\\ud83d", "arguments": {{}}}}'
    answer = json_response(
        body(*(chat.completion_ids(text, TOK) for text in (odd, fine, named)), calls=True)
    )
    first, second, third = json.loads(answer.body)["choices"]
    assert json.loads(first["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "x": "a\ud83d",
        "\ude00": [1],
    }
    assert second["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "日本 🎉"}'
    assert third["message"]["content"] == named
    assert "tool_calls" not in third["message"]
    again = [USER, first["message"], result(first["message"]["tool_calls"][0]["id"], "1")]
    (call,) = tool_calls.parse_calls(chat.decode(prompted(again), TOK))
    assert call.arguments == {"x": "a\ud83d", "\ude00": [1]}
    assert (
        json.loads(error_response(None, ApiError(400, "unknown", "\ud83d")).body)["error"]["param"]
        == "\ud83d"
    )


def test_parameters_of_a_function_are_read_in_the_forms_of_mcp_and_anthropic_or_refused() -> None:
    city = {"type": "object", "properties": {"city": {"type": "str"}}, "required": ["city"]}
    for key in ("parameters", "inputSchema", "input_schema"):
        function = protocol.Function.model_validate({"name": "f", key: city})
        assert function.schema_["parameters"]["properties"] == {"city": {"type": "string"}}
    unknown = {"parameters": {"properties": {"x": {"type": "frob"}}}}
    assert protocol.Function.model_validate({"name": "f", **unknown}).schema_["parameters"] == {
        "properties": {"x": {}}
    }
    for wrong in ({"strict": True, **unknown}, {"schema": city}):
        with pytest.raises(ApiError, match="'f'") as raised:
            _ = protocol.Function.model_validate({"name": "f", **wrong}).schema_
        assert (raised.value.status, raised.value.param) == (400, "tools")
