"""The client of a json server: answers, and user errors for all that can go wrong."""

import pickle
from collections.abc import Iterator
from pathlib import Path

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


def test_answers_are_json_and_a_key_is_read_from_its_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy is not asked for this machine
    for link in (Link(url), Link(url + "/v1"), Link(url + "/")):
        assert link.ask("/echo", {"é": [1, None]}) == {"é": [1, None]} and link.ask("/empty") is None
        assert link.model() == "tiny"
    (tmp_path / "key").write_text("secret\nnot this\n")
    assert Link(url, tmp_path / "key").ask("/key") == "Bearer secret"


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"busy": 1, "choices": [{"message": {"content": "hi"}}]}
    monkeypatch.setattr(http_client, "PAUSES_S", (0.01, 0.02))
    BUSY[:] = [503, 429]
    assert Link(url).answer(body, 60)[0] == {"content": "hi"} and not BUSY
    for statuses, patience, left in ([400, 429], 60, 0), ([503, 429], 0, 1):
        BUSY[:] = statuses
        with pytest.raises(Refused):
            Link(url).answer(body, patience)
        assert len(BUSY) == left


def test_what_goes_wrong_keeps_its_status_and_the_servers_words(url: str) -> None:
    complaints = {"/openai": "no such model", "/fastapi": "too long", "/proxy": "Bad Gateway", "/silent": "500"}
    for path, words in complaints.items():
        status = ANSWERS[path][0]
        with pytest.raises(Refused, match=words) as e:
            Link(url).ask(path)
        again = pickle.loads(pickle.dumps(e.value))  # it is sent to other ranks
        assert e.value.status == again.status == status and str(again) == str(e.value)
    for broken in ({}, {"choices": []}, {"choices": [{"text": "x"}]}):  # the server sends it back
        with raising(ConfigError, "without a message"):
            Link(url).answer(broken)
    for path in ("/cut", "/text"):
        with pytest.raises(NoAnswer, match=url):
            Link(url).ask(path)
    with raising(NoAnswer, "engine", "http://127.0.0.1:1", "start one"):
        Link("http://127.0.0.1:1", kind="engine", remedy="start one").ask("/v1/models")
    for bad in ("127.0.0.1:8000", "ftp://x", "http://", "http://[::1", "http://x:port"):
        with pytest.raises(ConfigError, match="--engine-url"):
            Link(bad, flag="--engine-url")
