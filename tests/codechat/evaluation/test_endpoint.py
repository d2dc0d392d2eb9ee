"""`evaluate --endpoint` with servers of other makers: what they are asked for, and how their
answers are read."""

import json
from typing import Any

import pytest
from http_stub import Handler, Stub

from codechat import tasks
from codechat.evaluation.endpoint import Endpoint
from codechat.rl.rollout import RolloutBatch


class Server(Handler):
    """Answers each request with `answer`; refuses fields that are in `unknown`."""

    answer: dict[str, Any] = {}
    unknown: tuple[str, ...] = ()
    seen: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self.reply(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.seen.append(body)
        refused = [name for name in body if name in self.unknown]
        if refused:
            text = f"Unrecognized request arguments supplied: {', '.join(refused)}"
            self.reply(400, json.dumps({"error": {"message": text}}).encode())
        else:
            self.reply(200, json.dumps(self.answer).encode())


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "seen", [])
    said = {
        "choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 2},
    }
    monkeypatch.setattr(Server, "answer", said)


def collected(top_k: int | None = None) -> RolloutBatch:
    task = tasks.load("toy")
    with Stub(Server) as server:
        return Endpoint(server.url).collect(
            None,
            task,
            task.problems("test", limit=2),
            None,
            None,
            keys=["a", "b"],
            group_size=2,
            max_new_tokens=7,
            temperature=1.0,
            top_k=top_k,
            seed=0,
        )


def test_a_server_is_asked_to_sample_from_the_whole_distribution() -> None:
    collected()
    assert len(Server.seen) == 4
    for body in Server.seen:
        assert (body["temperature"], body["top_p"], body["min_p"], body["top_k"]) == (
            1.0,
            1.0,
            0.0,
            0,
        )
    assert len({body["seed"] for body in Server.seen}) == 4


def test_a_top_k_that_is_set_goes_along_and_is_never_left_out() -> None:
    collected(top_k=20)
    assert {body["top_k"] for body in Server.seen} == {20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "unknown", ("top_k",))
        with pytest.raises(Exception, match="Unrecognized request arguments supplied: top_k"):
            collected(top_k=20)


def test_a_server_that_knows_only_openais_fields_answers_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "unknown", ("min_p", "top_k"))
    batch = collected()
    assert batch.texts == ["ab"] * 4
    answered = [body for body in Server.seen if not {"min_p", "top_k"} & body.keys()]
    assert len(answered) == 4
    assert all(body["top_p"] == 1.0 for body in answered)
    notes = capsys.readouterr().err
    assert "min_p" in notes
    assert "top_k" in notes
    assert "top_p" not in notes


def test_an_answer_without_usage_is_scored_and_its_missing_length_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        Server, "answer", {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    )
    batch = collected()
    assert batch.texts == [""] * 4
    assert {completion.stop for completion in batch.completions} == {"length"}
    assert "without usage" in capsys.readouterr().err
