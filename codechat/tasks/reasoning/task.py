"""The reasoning tasks: our own word problems, GSM8K, MMLU.

    tasks.load("reasoning")                                    word problems, sampled: no files, no network
    tasks.load("reasoning:levels=[1,2],template=r1_zero")
    tasks.load("gsm8k", source="hub")                          or a path; "gsm8k:template=question_only"
    tasks.load("mmlu")                                         evaluation only

A template puts the question, a grading judges the completion (`templates`, `rewards`); without a `reward` the grading is the template's own.
`Score.correct` is the answer alone, `Score.tier` the outcome, `Score.terms` what the reward is the sum of.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.tasks.base import SPLITS, Message, Problem, Score
from codechat.tasks.reasoning import rewards, sources, stories, templates

DEFAULT_LIMIT = 500
# What the RL loops' `--preset lora` sets: adapters on an imported checkpoint, whose own chat template stays around the prompt.
LORA_RUN: dict[str, Any] = {
    "task": "gsm8k",
    "lora_rank": 16,
    "lora_alpha": 64.0,
    "lora_targets": ("qkv", "out", "gate", "up", "down"),
    "group_size": 16,
    "device_batch_size": 4,
    "lr": 5e-6,
    "schedule": "cosine",
    "max_steps": 500,
    "warmup_steps": 50,
    "max_new_tokens": 256,
    "row_tokens": 1024,
    "eval_every": 50,
    "save_every": 50,
}


class AnswerTask:
    """One question, one answer. source: "embedded", "hub" or a path. max_reward: of the grading (4 for xml, else 1)."""

    name: str
    kind = "number"
    splits: tuple[str, ...] = SPLITS
    tiers = rewards.OUTCOMES
    formatted = rewards.FORMATTED

    def __init__(self, source: str, template: str, reward: str | None) -> None:
        templates.check(template)
        self.source, self.template, self.reward = str(source), template, reward or templates.GRADING[template]
        rewards.check(self.reward)
        self.max_reward = rewards.MAXIMUM[self.reward]
        self._rows: dict[str, list[Problem]] = {}

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. ConfigError for a split that the task does not have."""
        if split not in self.splits:
            raise ConfigError(f"split {split!r} is not one of task {self.name}'s; it has {', '.join(self.splits)}")
        if split not in self._rows:
            found = sources.read(self.name, self.source, split)
            self._rows[split] = [row if isinstance(row, Problem) else self._problem(*row) for row in found]
        rows = list(self._rows[split])
        random.Random(seed).shuffle(rows)
        return rows[:limit]

    def _problem(self, name: str, question: str, answer: str, steps: str, split: str, meta: dict[str, Any]) -> Problem:
        return Problem(name, [{"role": "user", "content": question}], {"answer": answer, "steps": steps}, split, meta)

    def prompt(self, problem: Problem) -> list[Message]:
        return templates.messages(self.template, problem.messages[-1]["content"], self.kind)

    def score(self, problem: Problem, completion: str) -> Score:
        graded = rewards.GRADERS[self.reward](completion, problem.gold["answer"], self.kind)
        return Score(graded.reward, graded.outcome, {"answer": graded.answer}, graded.correct, graded.terms)

    def gold(self, problem: Problem) -> str:
        return rewards.written(self.reward, problem.gold["steps"], problem.gold["answer"])


class ReasoningTask(AnswerTask):
    """Our own word problems. source: "embedded" samples them, any number; a path reads reasoning.SPLIT.jsonl. levels: those of the sampled ones."""

    name = "reasoning"

    def __init__(
        self,
        source: str = "embedded",
        levels: Sequence[int] = stories.LEVELS,
        template: str = "xml",
        reward: str | None = None,
    ) -> None:
        super().__init__(source, template, reward)
        self.levels = tuple(levels)

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems; without one DEFAULT_LIMIT, or all that a file has."""
        if self.source != "embedded":
            return [p for p in super().problems(split, None, seed) if p.meta.get("level", 1) in self.levels][:limit]
        if split not in self.splits:
            raise ConfigError(f"split {split!r} is unknown; splits are {', '.join(self.splits)}")
        return self.sampled(split, split, DEFAULT_LIMIT if limit is None else limit, seed)

    def sampled(self, part: str, split: str, n: int, seed: int) -> list[Problem]:
        """Problems of a part of the questions (`stories.PARTS`)."""
        return [
            self._problem(f"reasoning-{digest(q.text)[:12]}", q.text, str(q.answer), q.steps, split, stories.about(q))
            for q in stories.questions(part, n, seed, self.levels)
        ]


class Gsm8kTask(AnswerTask):
    """Grade school mathematics (Cobbe et al., 2021, arXiv:2110.14168). source: hub, or a path."""

    name = "gsm8k"
    splits = ("train", "select", "test")

    def __init__(self, source: str = "hub", template: str = "xml", reward: str | None = None) -> None:
        super().__init__(source, template, reward)


class MmluTask(AnswerTask):
    """Massive multitask language understanding (Hendrycks et al., 2021, arXiv:2009.03300), all subjects. source: hub, or a path."""

    name = "mmlu"
    kind = "letter"
    splits = ("select", "test")

    def __init__(self, source: str = "hub", template: str = "zero_shot", reward: str | None = None) -> None:
        super().__init__(source, template, reward)
