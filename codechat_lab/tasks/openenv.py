"""Environments of OpenEnv, on their own server: reset and step, where a call of `act` is an action.

    codechat evaluate --ckpt RUN --task openenv:http://127.0.0.1:8000 --n 1 --ks 1
    codechat grpo --init-from RUN --task openenv:http://127.0.0.1:8000,worlds=16,max_turns=4

A problem is a seed of reset; splits have seeds of their own. The server's schema of an action is
that of `act`. Observations come back as JSON. The reward is the sum of the steps' rewards, which
must be from 0 to 1. A session of /ws is an episode: POST /step starts a new environment each
time. Tried with openenv 0.10.0."""

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from codechat.core.errors import ConfigError, RunError
from codechat.core.http_client import Link
from codechat.tasks.base import BaseTask, Message, Problem, Score, play
from codechat.text import tool_calls
from codechat.text.tool_functions import misfit
from codechat.text.tool_lists import tools_prompt
from codechat.text.tool_worlds import as_json

ACT = "act"
SETUP = "start the environment's own server, such as uvicorn my_env.server:app --port 8000"
FIRST_SEEDS = {"train": 0, "select": 1_000_000, "test": 2_000_000}
LONGEST = 2000  # characters of an observation
PATIENCE_S = 60.0
TOLERANCE = 1e-6  # by which a sum of rewards may miss 1


class OpenEnvTask(BaseTask):
    """url: of the server. size: seeds of a split. worlds: sessions that the server allows at a
    time (its max_concurrent_envs). goal: text before the first observation."""

    name = "openenv"
    first_option: ClassVar[str] = "url"
    tiers: tuple[str, ...] = ("none", "error", "some", "full")
    splits = ("train", "select", "test")
    no_references = "an environment of OpenEnv has no reference solutions"

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        source: None = None,
        size: int = 100,
        max_turns: int = 8,
        worlds: int = 1,
        goal: str = "",
    ) -> None:
        if source is not None:
            raise ConfigError("openenv's problems are seeds of its server; leave out --data-dir")
        if min(size, max_turns, worlds) < 1:
            raise ConfigError(
                f"got size {size}, max_turns {max_turns}, worlds {worlds}; expected 1 or more of each"
            )
        link = Link(url, flag="the OpenEnv server's URL", kind="OpenEnv server", remedy=SETUP)
        self.url = link.url
        try:
            action = dict(link.ask("/schema")["action"])
            fields = dict(action["properties"])
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{url}/schema has no schema of an action; {SETUP}") from None
        fields.pop("metadata", None)  # of every action; nothing that a model should write
        self.action = action | {"properties": fields, "type": "object"}
        self.size = size
        self.max_turns = max_turns
        self.episodes_at_once = worlds
        self.goal = goal
        self.told = False

    def read(self, split: str) -> list[Problem]:
        first = FIRST_SEEDS[split]
        return [
            Problem(
                f"openenv-{first + i}",
                [{"role": "user", "content": self.goal or "Begin."}],
                None,
                split,
                {"seed": first + i},
            )
            for i in range(self.size)
        ]

    def opening(self, observation: str) -> list[Message]:
        """The messages before the first answer."""
        about = str(self.action.get("description") or "Take a step.").split("\n")[0]
        tool = {"name": ACT, "description": about, "parameters": self.action}
        system = {"role": "system", "content": tools_prompt([tool], self.tools_style)}
        asked = f"{self.goal}\n{observation}".strip()
        return [system, {"role": "user", "content": tool_calls.escape_tags(asked)}]

    def gold(self, problem: Problem) -> str:
        return ""

    def environment(self) -> "OpenEnvEnvironment":
        return OpenEnvEnvironment(self)

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def say(self, total: float) -> None:
        """The first sum of rewards that is no number from 0 to 1."""
        if not self.told:
            print(
                f"task {self.name}: the rewards of an episode add up to {total}; expected a "
                "number from 0 to 1, so it counts 0; scale them at the server",
                file=sys.stderr,
            )
        self.told = True


class OpenEnvEnvironment:
    """One session of the server, from reset to the end of the episode."""

    def __init__(self, task: OpenEnvTask) -> None:
        self.task = task
        self.link: Any = None  # a connection, while the episode runs

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode with the problem's seed. RunError where the server is away or has no
        free session."""
        self.close()
        self.total = 0.0
        self.steps: list[Any] = []
        self.link = _connected(self.task.url)
        given = self._ask("reset", {"seed": problem.meta["seed"]})
        if "error" in given:
            raise RunError(f"{self.task.url}: reset failed: {given['error']}; {SETUP}")
        return self.task.opening(_text(given))

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Take the first call of an answer as an action, and refuse others; without one the
        episode ends."""
        calls = tool_calls.parse_calls(message["content"])
        if self.link is None or not calls:
            self.close()
            return [], 0.0, True
        call = calls[0]
        problem = ""
        if call.form not in tool_calls.READABLE or call.name != ACT:
            problem = f"there is no function {str(call.name)[:60]!r}; call {ACT}"
        problem = problem or misfit(call.arguments or {}, self.task.action)
        refusal = _told(as_json("error", "only the first call was taken"))
        refused = [refusal for _ in calls[1:]]
        if problem:
            return [_told(as_json("error", problem)), *refused], 0.0, False
        given = self._ask("step", call.arguments or {})
        self.steps.append(call.arguments)
        before = self._verdict().reward
        self.total += _number(given.get("reward"))
        done = bool(given.get("done"))
        if done:
            self.close()
        return [_told(_text(given)), *refused], self._verdict().reward - before, done

    def state_diff(self) -> list[Any]:
        """The actions so far."""
        return self.steps

    def score(self) -> Score:
        """The score of the current state. This ends the session."""
        self.close()
        return self._verdict()

    def _verdict(self) -> Score:
        if not 0 <= self.total <= 1 + TOLERANCE:  # NaN too
            self.task.say(self.total)
            return Score(0.0, "error", {"error": f"reward {self.total}"}, False)
        reward = min(self.total, 1.0)
        tier = "some"
        if reward == 0:
            tier = "none"
        elif reward >= 1 - TOLERANCE:
            tier = "full"
        return Score(reward, tier, {"steps": len(self.steps)}, tier == "full")

    def close(self) -> None:
        """End the session, so that the server has it free for another episode."""
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.close()
        self.link = None

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer: {"observation", "reward", "done"} or {"error"}."""
        import websocket

        try:
            self.link.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self.link.recv())
            has_data = isinstance(answer, dict) and isinstance(answer.get("data") or {}, dict)
            if not has_data:
                raise ValueError(f"it sent {str(answer)[:60]}, no object with data")
        except (OSError, ValueError, websocket.WebSocketException) as error:
            raise RunError(f"{self.task.url} went away ({error}); {SETUP}") from None
        found = dict(answer.get("data") or {})
        if answer.get("type") == "error":
            return {"error": str(found.get("message", answer))[:300]}
        return found


def _connected(url: str) -> Any:
    """A connection to /ws. ConfigError without the package; RunError where none answers."""
    try:
        import websocket
    except ImportError:
        raise ConfigError(
            "openenv needs websocket-client; run pip install 'codechat[openenv]'"
        ) from None
    try:
        return websocket.create_connection(
            f"ws{url.removeprefix('http')}/ws", timeout=PATIENCE_S, suppress_origin=True
        )
    except (OSError, websocket.WebSocketException) as error:
        raise RunError(f"{url}/ws does not answer ({error}); {SETUP}") from None


def _number(reward: Any) -> float:
    """The reward of a step; NaN, which `_verdict` reports, for what is no number."""
    if reward is None:
        return 0.0
    return float(reward) if isinstance(reward, int | float) else math.nan


def _text(given: Mapping[str, Any]) -> str:
    """An observation, or an error, as the model reads it."""
    if "error" in given:
        return as_json("error", given["error"])
    shown = given.get("observation")
    if isinstance(shown, Mapping):
        shown = {
            name: value
            for name, value in shown.items()
            if name not in ("reward", "done", "metadata")
        }
    return json.dumps(shown, ensure_ascii=False)[:LONGEST]


def _told(text: str) -> Message:
    return {"role": "function", "content": tool_calls.escape_tags(text)}
