"""The pocket apps as an environment: calls in, results out, and a reward that depends only on state changes.

The changes at the end are compared with those of the scripted expert. A required change that was made is matched, one
that was not is missing, and any other change is collateral. Answering and declining are changes too (`task_answer`,
`task_decline`), so saying "done" earns nothing, and neither does doing everything.

    done        every required change and no other: reward 1, the only success
    collateral  every required change, and others: 0.5 halved for each other change
    partial     some of the required changes: 0.5 x their share, halved for each other change
    idle        no change: 0
    harm        only changes that were not required: 0
"""

from __future__ import annotations

from typing import Any

from codechat.tasks.apps import tools
from codechat.tasks.apps.store import Change, Store, compare
from codechat.tasks.base import Message, Problem, Score
from codechat.text import chat

TIERS = ("harm", "idle", "partial", "collateral", "done")
MAX_CALLS = 16  # of one message


def score_changes(required: list[Change], changes: list[Change]) -> Score:
    """The score of the changes; see the module docstring. parts: matched, required, missing and collateral, the latter
    two in words."""
    matched, missing, collateral = compare(required, changes)
    parts = {"matched": matched, "required": len(required), "missing": missing, "collateral": collateral}
    if not missing and not collateral:
        return Score(1.0, "done", parts, True)
    if not matched:
        return Score(0.0, "harm" if collateral else "idle", parts, False)
    reward = 0.5 * matched / len(required) * 0.5 ** len(collateral)
    return Score(reward, "partial" if missing else "collateral", parts, False)


class AppsEnvironment:
    """One episode at a time. A message without a call ends it. So does a call of `task_answer` or `task_decline`."""

    def __init__(self) -> None:
        self.store = Store()
        self.closed = True

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode. The problem holds the whole world; the seed has no effect."""
        self.problem, self.closed = problem, False
        self.store.reset(problem.gold["world"])
        self._judge()
        return problem.messages

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the calls of an answer. After the episode's end nothing happens."""
        if self.closed:
            return [], 0.0, True
        before = self.verdict.reward
        told = self._calls(message["content"])
        if not told:
            self.closed = True
        self._judge()
        return told, self.verdict.reward - before, self.closed

    def state_diff(self) -> list[Change]:
        return self.changes

    def score(self) -> Score:
        return self.verdict

    def _calls(self, text: str) -> list[Message]:
        return [{"role": "function", "content": self._respond(call)} for call in chat.parse_calls(text)[:MAX_CALLS]]

    def _respond(self, call: chat.Call) -> str:
        if call.form not in chat.READABLE or call.name is None or call.arguments is None:
            return tools.as_text("error", f"this call cannot be read ({call.form})")
        try:
            return tools.as_text("result", self._call(call.name.strip(), call.arguments))
        except tools.AppError as error:
            return tools.as_text("error", str(error))

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self.closed:
            raise tools.AppError("the episode has ended")
        if name not in self.problem.meta["tools"]:
            raise tools.AppError(f"there is no function {name[:60]!r}")
        result = tools.call(self.store, name, arguments)
        self.closed = name in tools.CLOSING
        return result

    def _judge(self) -> None:
        self.changes = self.store.diff()
        self.verdict = score_changes(self.problem.gold["changes"], self.changes)
