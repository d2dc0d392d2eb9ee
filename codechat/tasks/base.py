"""What a task is: problems, a prompt for each, and one `score` that training and evaluation share.

A task carries its own reward, so that the number that is optimised and the number that is quoted cannot drift
apart. `Score.reward` may be shaped; `Score.correct` never is. Each task must also score its own gold answers
at its maximum reward: `gold_gate` checks that and counts the failures by reason, because a reward that
rejects right answers looks exactly like a policy that cannot learn.

A task of several turns makes environments besides: `Environment` is what an episode is played in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from codechat.core.errors import DataError

Message = dict[str, str]
SPLITS = ("train", "select", "test", "test_hard")


@dataclass(frozen=True)
class Problem:
    """One task item. messages: what the policy is shown. gold: json data that `Task.score` compares with."""

    id: str
    messages: list[Message]
    gold: Any
    split: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """reward: in [0, max_reward], may be shaped. tier: a rung of the task. parts: counts behind the reward.
    correct: the exact answer, nothing less. terms: what the reward is the sum of, where it is one; the same
    names in every score of a task, each logged by itself."""

    reward: float
    tier: str
    parts: Mapping[str, Any]
    correct: bool
    terms: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """tiers are ordered from worst to best; max_reward is what a gold answer must score."""

    name: str
    tiers: tuple[str, ...]
    max_reward: float

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems, the same ones for the same seed. ConfigError for an unknown split."""

    def prompt(self, problem: Problem) -> list[Message]:
        """The messages before the completion."""

    def score(self, problem: Problem, completion: str) -> Score:
        """Judge a completion's text. Never raises, whatever the text holds."""

    def gold(self, problem: Problem) -> str:
        """A completion text that must score `max_reward`."""


@runtime_checkable
class Environment(Protocol):
    """A world that keeps state over the turns of one episode. A task that makes them has `environment() -> Environment` and `max_turns`, the
    largest number of answers of an episode; and `episodes_at_once` where its worlds are few."""

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        """Start an episode; the messages before the first answer: the same ones for the same problem and seed."""

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Take one answer. Returns what the world says, the reward gained by it, and whether the episode has ended. Never raises, whatever
        the answer holds. The rewards of an episode add up to `score().reward`."""

    def state_diff(self) -> list[Any]:
        """What the episode has changed since its reset, as json data."""

    def score(self) -> Score:
        """The verdict on the state as it is now."""


def score_all(task: Task, problems: Sequence[Problem], texts: Sequence[str]) -> Iterator[Score]:
    """Scores in order. A task that has `scores(pairs)` judges the completions side by side."""
    if hasattr(task, "scores"):
        yield from task.scores(list(zip(problems, texts, strict=True)))
    else:
        yield from (task.score(problem, text) for problem, text in zip(problems, texts, strict=True))


@dataclass(frozen=True)
class Gate:
    """How many of n gold answers score the task's maximum; the others by reason, with a few of their ids. unknown: why there are no gold answers."""

    task: str
    n: int
    passed: int
    reasons: Counter[str]
    examples: Mapping[str, list[str]]
    unknown: str = ""

    @property
    def ok(self) -> bool:
        """True when there was something to check and all of it passed, or where gold answers cannot be had."""
        return bool(self.unknown) or (self.n > 0 and self.passed == self.n)

    def require(self) -> Gate:
        """Itself when every gold answer passes; DataError with the counts otherwise."""
        if not self.n and not self.unknown:
            raise DataError(
                f"the gold gate of task {self.task} saw no problems; at least one is required; "
                "check the split, the path and the limit"
            )
        if not self.ok:
            counts = ", ".join(
                f"{reason}: {n} (such as {self.examples[reason][0]})" for reason, n in self.reasons.most_common()
            )
            raise DataError(
                f"{self.n - self.passed} of {self.n} gold answers of task {self.task} do not score the "
                f"maximum: {counts}; every one must; mend the task's reader or its reward before training"
            )
        return self


def gold_gate(task: Task, problems: Iterable[Problem], examples: int = 3) -> Gate:
    """Score every gold answer of `problems`. A gold answer that fails counts under the tier it reached. A task whose gold answers nobody
    has says why in `gold_unknown`; nothing is scored then."""
    n, reasons, ids = 0, Counter[str](), dict[str, list[str]]()
    asked = list(problems)
    if asked and (why := getattr(task, "gold_unknown", "")):
        return Gate(task.name, 0, 0, reasons, ids, why)
    for problem, score in zip(asked, score_all(task, asked, [task.gold(p) for p in asked]), strict=True):
        n += 1
        if score.correct and score.reward == task.max_reward:
            continue
        reason = score.tier if score.reward < task.max_reward else "maximum reward but not correct"
        reasons[reason] += 1
        if len(ids.setdefault(reason, [])) < examples:
            ids[reason].append(problem.id)
    return Gate(task.name, n, n - reasons.total(), reasons, ids)
