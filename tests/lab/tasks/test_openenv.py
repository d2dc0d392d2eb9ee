"""Environments of OpenEnv behind a stand-in for their server, which answers as openenv 0.10.0 was seen to."""

import json
from typing import Any

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError, RunError
from codechat.text.tool_calls import format_call
from codechat_lab.tasks import openenv

SCHEMA = {
    "action": {
        "description": "Guess a number.",
        "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
        "required": ["number"],
        "additionalProperties": False,
    }
}


class Server:
    """Sessions of a game whose number is the last digit of the seed. reward: for the number."""

    def __init__(self) -> None:
        self.reward = 1.0
        self.open = 0

    def session(self, url: str) -> "Session":
        self.open += 1
        return Session(self)


class Session:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.number = -1
        self.answer: dict[str, Any] = {}

    def send(self, text: str) -> None:
        asked = json.loads(text)
        hit = False
        if asked["type"] == "reset":
            self.number = asked["data"]["seed"] % 10
        else:
            hit = asked["data"]["number"] == self.number
        seen = {"hint": "right" if hit else "guess"}
        reward = self.server.reward if hit else None
        self.answer = {
            "type": "observation",
            "data": {"observation": seen, "reward": reward, "done": hit},
        }

    def recv(self) -> str:
        return json.dumps(self.answer)

    def close(self) -> None:
        self.server.open -= 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(openenv.Link, "ask", lambda link, path: SCHEMA)
    monkeypatch.setattr(openenv, "_connected", made.session)
    return made


def act(number: Any) -> dict[str, str]:
    return {"role": "assistant", "content": format_call("act", {"number": number})}


def loaded(words: str = "") -> Any:
    return tasks.load(f"openenv:http://127.0.0.1:1{words}")


def test_an_episode_is_a_session_whose_action_is_a_call(server: Server) -> None:
    task = loaded(",goal=Play.")
    problem = next(p for p in task.problems("train") if p.meta["seed"] % 10 == 3)
    world = task.environment()
    system, asked = world.reset(problem)
    assert "act(number: integer) - Guess a number." in system["content"]
    assert asked["content"] == 'Play.\n{"hint": "guess"}'
    assert world.step(act("x"))[0][0]["content"].startswith('{"error": "number')
    assert world.step(act(2)) == (
        [{"role": "function", "content": '{"hint": "guess"}'}],
        0.0,
        False,
    )
    assert world.step(act(3)) == ([{"role": "function", "content": '{"hint": "right"}'}], 1.0, True)
    assert world.score().correct
    assert server.open == 0


def test_a_session_is_free_again_after_an_episode_that_its_world_did_not_end(
    server: Server,
) -> None:
    task = loaded()
    world = task.environment()
    world.reset(task.problems("test")[0])
    assert server.open == 1
    assert world.score().reward == 0
    assert server.open == 0


def test_splits_have_seeds_of_their_own(server: Server) -> None:
    task = loaded(",size=5")
    seeds = [{p.meta["seed"] for p in task.problems(split)} for split in task.splits]
    assert len(set.union(*seeds)) == 15


def test_every_call_of_an_answer_has_a_result(server: Server) -> None:
    task = loaded()
    world = task.environment()
    world.reset(task.problems("train")[0])
    told, _, _ = world.step({"role": "assistant", "content": 2 * f"{act(99)['content']}\n"})
    assert [m["content"] for m in told] == [
        '{"hint": "guess"}',
        '{"error": "only the first call was taken"}',
    ]


def test_an_answer_of_the_server_that_is_no_object_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "recv", lambda session: "[1]")
    task = loaded()
    with pytest.raises(RunError, match="it sent .1., no object with data"):
        task.environment().reset(task.problems("train")[0])


@pytest.mark.parametrize("reward", [2.0, -1.0, float("nan"), "high", [1]])
def test_rewards_that_are_not_from_0_to_1_count_as_error_and_are_said_once(
    server: Server, reward: Any, capsys: pytest.CaptureFixture
) -> None:
    server.reward = reward
    task = loaded()
    for problem in task.problems("train")[:2]:
        world = task.environment()
        world.reset(problem)
        world.step(act(problem.meta["seed"] % 10))
        assert (world.score().reward, world.score().tier) == (0.0, "error")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_is_away_or_has_no_schema_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="127.0.0.1:1 .*uvicorn"):
        loaded()
    monkeypatch.setattr(openenv.Link, "ask", lambda link, path: {})
    with pytest.raises(RunError, match="no schema of an action"):
        loaded()
    with pytest.raises(ConfigError, match="worlds 0"):
        loaded(",worlds=0")
