"""The client of a json server: answers, and user errors for all that can go wrong."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_stub import Handler, Stub
from raising import raising

from codechat.core import http_client
from codechat.core.errors import ConfigError
from codechat.core.http_client import Link, NoAnswer, Refused

ANSWERS = {
    "/v1/models": (200, b'{"data": [{"id": "tiny"}]}'),
    "/empty": (200, b" "),
    "/openai": (404, b'{"error": {"message": "no such model"}}'),
    "/fastapi": (422, b'{"detail": "too long"}'),
    "/proxy": (502, b"<h1>Bad Gateway</h1>"),
    "/silent": (500, b""),
    "/cut": (200, b'{"a": 1'),
    "/text": (200, b"hello"),
}


BUSY: list[int] = []  # statuses of the next answers to a body that says so


class Server(Handler):
    def do_GET(self) -> None:
        key = f'"{self.headers["Authorization"]}"'.encode()
        status, body = ANSWERS.get(self.path, (200, key))
        self.close_connection = self.path == "/cut"
        self.reply(status, body, len(body) + (self.path == "/cut"))

    def do_POST(self) -> None:
        body = self.body()
        self.reply(BUSY.pop() if b"busy" in body and BUSY else 200, body)


@pytest.fixture
def url() -> Iterator[str]:
    with Stub(Server) as server:
        yield server.url


@pytest.mark.parametrize("ending", ["", "/v1", "/"])
def test_answers_are_json_however_the_address_ends(
    ending: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy is not asked for this machine
    link = Link(url + ending)
    assert link.ask("/echo", {"é": [1, None]}) == {"é": [1, None]}
    assert link.ask("/empty") is None
    assert link.model() == "tiny"


def test_a_key_is_the_first_line_of_its_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\nnot this\n")
    assert Link(url, tmp_path / "key").ask("/key") == "Bearer secret"


ASKING = {"busy": 1, "choices": [{"message": {"content": "hi"}}]}


def test_a_busy_server_is_asked_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "PAUSES_S", (0.01, 0.02))
    BUSY[:] = [503, 429]
    assert Link(url).answer(ASKING, 60)[0] == {"content": "hi"}
    assert not BUSY


@pytest.mark.parametrize(
    "statuses, patience, left",
    [([400, 429], 60, 0), ([503, 429], 0, 1)],
    ids=["refuses", "no patience"],
)
def test_a_server_that_refuses_or_has_had_its_time_is_not_asked_again(
    statuses: list[int], patience: int, left: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the statuses is that of the first answer."""
    monkeypatch.setattr(http_client, "PAUSES_S", (0.01, 0.02))
    BUSY[:] = statuses
    with pytest.raises(Refused):
        Link(url).answer(ASKING, patience)
    assert len(BUSY) == left


class Picky(Handler):
    """Refuses fields that it does not know, in the words of a public server."""

    known = {"model", "messages", "temperature"}
    # status and body; FIELDS: the unknown ones, FIRST: the first of them
    words: tuple[int, str] = (
        400,
        "",
    )
    seen: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.seen.append(body)
        unknown = [name for name in body if name not in self.known]
        if unknown:
            status, text = self.words
            self.reply(
                status,
                text.replace("FIELDS", ", ".join(unknown)).replace("FIRST", unknown[0]).encode(),
            )
        else:
            self.reply(200, b'{"choices": [{"message": {"content": "hi"}}]}')


REFUSALS = pytest.mark.parametrize(
    "status, words",
    [
        (
            400,
            (
                '{"error": {"message": "Unrecognized request arguments '
                'supplied: FIELDS", "type": "invalid_request_error"}}'
            ),
        ),
        (
            400,
            '{"error": {"message": "Unknown parameter: \'FIRST\'.", "code": "unknown_parameter"}}',
        ),
        (
            400,
            '{"error": {"message": "property \'FIRST\' is unsupported, did you mean \'top_p\'?"}}',
        ),
        (
            422,
            (
                '{"object": "error", "message": {"detail": [{"type": '
                '"extra_forbidden", "loc": ["body", "FIRST"]}]}}'
            ),
        ),
        (
            422,
            (
                '{"detail": [{"type": "extra_forbidden", "loc": '
                '["body", "FIRST"], "msg": "Extra inputs"}]}'
            ),
        ),
        (
            422,
            (
                '{"error": "Input validation error: `FIRST` must be '
                'strictly positive", "error_type": "validation"}'
            ),
        ),
        (400, '{"error": "bad request"}'),
        (400, "Bad Request"),
    ],
)
REQUEST = {"model": "m", "messages": [], "temperature": 0.5}


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """A link to a server that refuses, in the words of a test."""
    monkeypatch.setattr(Picky, "seen", [])
    with Stub(Picky) as server:
        yield Link(server.url)


@REFUSALS
def test_a_server_that_refuses_a_dispensable_field_is_asked_without_it(
    status: int, words: str, picky: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not asked with it again."""
    monkeypatch.setattr(Picky, "words", (status, words))
    for _ in range(2):
        answer = picky.answer(REQUEST, dispensable=http_client.UNCUT)
        assert answer.message == {"content": "hi"}
    assert Picky.seen[0] == REQUEST | {"top_p": 1.0, "min_p": 0.0, "top_k": 0}
    assert Picky.seen[-2:] == [REQUEST, REQUEST]


@REFUSALS
def test_fields_that_a_server_refuses_are_named_once(
    status: int,
    words: str,
    picky: Link,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Picky, "words", (status, words))
    for _ in range(2):
        picky.answer(REQUEST, dispensable=http_client.UNCUT)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(name in err for name in http_client.UNCUT)


@REFUSALS
def test_a_field_that_is_needed_and_refused_is_an_error(
    status: int, words: str, picky: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Picky, "words", (status, words))
    named = "seed" if "FIRST" in words or "FIELDS" in words else "400"
    with raising(Refused, named):
        picky.answer(REQUEST | {"seed": 1}, dispensable=http_client.UNCUT)


def test_only_the_refused_field_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Picky, "known", {"model", "top_p", "min_p"})
    monkeypatch.setattr(
        Picky,
        "words",
        (400, '{"error": {"message": "FIRST is unknown; valid: top_p, min_p, model"}}'),
    )
    monkeypatch.setattr(Picky, "seen", [])
    with Stub(Picky) as server:
        Link(server.url).answer({"model": "m"}, dispensable=http_client.UNCUT)
    assert Picky.seen[-1] == {"model": "m", "top_p": 1.0, "min_p": 0.0}
    assert "refuses top_k;" in capsys.readouterr().err


@pytest.mark.parametrize(
    "choice, usage, cut, n_tokens",
    [
        ({"finish_reason": "stop"}, {"completion_tokens": 3}, False, 3),
        ({"finish_reason": "length"}, {"completion_tokens": 0}, True, 0),
        ({"finish_reason": "model_length"}, None, True, None),
        ({"finish_reason": "MAX_TOKENS"}, {"completion_tokens": None}, True, None),
        ({"finish_reason": None}, {}, False, None),
        ({}, {"completion_tokens": 3.0}, False, 3),
    ],
)
def test_other_servers_ends_and_counts_are_read(
    url: str,
    choice: dict[str, Any],
    usage: Any,
    cut: bool,
    n_tokens: int | None,
) -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    # it comes back
    answer = Link(url).answer({"choices": [{"message": message, **choice}], "usage": usage})
    assert answer == (message, cut, n_tokens)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no credits", "code": 402}},
        {"choices": None, "error": "no credits"},
    ],
    ids=["object", "text"],
)
def test_an_error_in_place_of_an_answer_is_told(body: dict[str, Any], url: str) -> None:
    with raising(ConfigError, "without a message", "no credits"):
        Link(url).answer(body)


@pytest.mark.parametrize(
    "path, words",
    [
        ("/openai", "no such model"),
        ("/fastapi", "too long"),
        ("/proxy", "Bad Gateway"),
        ("/silent", "500"),
    ],
)
def test_a_refusal_keeps_its_status_and_the_servers_words(path: str, words: str, url: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        Link(url).ask(path)
    assert refused.value.status == ANSWERS[path][0]
    again = pickle.loads(pickle.dumps(refused.value))  # it is sent to other ranks
    assert again.status == refused.value.status
    assert str(again) == str(refused.value)


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [{"text": "x"}]}], ids=str)
def test_an_answer_without_a_message_is_an_error(broken: dict[str, Any], url: str) -> None:
    with raising(ConfigError, "without a message"):  # the server sends it back
        Link(url).answer(broken)


@pytest.mark.parametrize("path", ["/cut", "/text"])
def test_an_answer_that_is_cut_or_no_json_is_none(path: str, url: str) -> None:
    with pytest.raises(NoAnswer, match=url):
        Link(url).ask(path)


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    link = Link("http://127.0.0.1:1", kind="engine", remedy="start one")
    with raising(NoAnswer, "engine", "http://127.0.0.1:1", "start one"):
        link.ask("/v1/models")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8000", "ftp://x", "http://", "http://[::1", "http://x:port"]
)
def test_what_is_no_address_is_refused_by_its_flag(address: str) -> None:
    with pytest.raises(ConfigError, match="--engine-url"):
        Link(address, flag="--engine-url")
