"""The reasoning tasks: generated word problems, GSM8K, MMLU.

    tasks.load("reasoning")                                    generated word problems: no files, no network
    tasks.load("reasoning:levels=[1,2],template=r1_zero")
    tasks.load("gsm8k", source="hub")                          or a path; "gsm8k:template=question_only"
    tasks.load("mmlu")                                         evaluation only

A template writes the prompt (`templates`); a grader scores the completion (`rewards`). Without `reward`, the template's
own grader is used. `Score.correct` is the answer alone, `Score.tier` the outcome, `Score.terms` the addends of the
reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codechat.core.errors import check_choice
from codechat.data.sources import digest
from codechat.tasks.base import SPLITS, Message, Problem, Score, check_split, shuffled
from codechat.tasks.preparation import GeneratedTask
from codechat.tasks.reasoning import rewards, sources, stories
from codechat.tasks.reasoning.templates import TEMPLATES


class AnswerTask:
    """One question, one answer. source: "hub" or a path. max_reward: that of the grader (4 for xml, else 1)."""

    name: str
    kind = "number"
    splits: tuple[str, ...] = SPLITS
    tiers = rewards.OUTCOMES
    formatted = rewards.FORMATTED
    columns: Sequence[str] = ()

    def __init__(self, source: str | Path | None, template: str, reward: str | None) -> None:
        check_choice("template", template, TEMPLATES)
        self.source, self.template = source, TEMPLATES[template]
        self.reward = reward or self.template.grader
        check_choice("reward", self.reward, rewards.GRADERS)
        self.max_reward = rewards.MAXIMUM[self.reward]
        self.stop_texts = self.template.stop_texts
        self._problems: dict[str, list[Problem]] = {}  # of each split that was read

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. ConfigError for a split that the task does not have."""
        check_split(split, self.splits, f"task {self.name}")
        if split not in self._problems:
            self._problems[split] = sources.read(self.name, str(self.source), split, self.columns)
        return shuffled(self._problems[split], limit, seed)

    def prompt(self, problem: Problem) -> list[Message]:
        return self.template.messages(problem.messages[-1]["content"], self.kind)

    def score(self, problem: Problem, completion: str) -> Score:
        return rewards.GRADERS[self.reward](completion, problem.gold["answer"], self.kind)

    def gold(self, problem: Problem) -> str:
        return rewards.written(self.reward, problem.gold["steps"], problem.gold["answer"])


class ReasoningTask(GeneratedTask, AnswerTask):
    """Generated word problems. levels: a repeated level is sampled more often."""

    name = "reasoning"
    gold_fields = sources.GOLD

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = stories.LEVELS,
        template: str = "xml",
        reward: str | None = None,
    ) -> None:
        super().__init__(source, template, reward)
        self.levels = tuple(levels)

    def generate(self, split: str, n: int, seed: int) -> list[Problem]:
        return self.sampled(split, split, n, seed)

    def sampled(self, part: str, split: str, n: int, seed: int) -> list[Problem]:
        """n problems from one part of the questions (`stories.PARTS`)."""
        return [
            sources.make_problem(
                f"reasoning-{digest(q.text)[:12]}", q.text, str(q.answer), q.steps, split, story=q.story, level=q.level
            )
            for q in stories.questions(part, n, seed, self.levels)
        ]


class Gsm8kTask(AnswerTask):
    """Grade school mathematics (Cobbe et al., 2021, arXiv:2110.14168). source: hub, a path, or a hub set with training rows by its name. columns:
    OURS=THEIRS where it has no question and answer."""

    name = "gsm8k"
    splits = ("train", "select", "test")

    def __init__(
        self, source: str = "hub", template: str = "xml", reward: str | None = None, columns: Sequence[str] = ()
    ) -> None:
        super().__init__(source, template, reward)
        self.columns = (columns,) if isinstance(columns, str) else tuple(columns)


class MmluTask(AnswerTask):
    """Massive multitask language understanding (Hendrycks et al., 2021, arXiv:2009.03300), all subjects. source: hub,
    or a path."""

    name = "mmlu"
    kind = "letter"
    splits = ("select", "test")

    def __init__(self, source: str = "hub", template: str = "zero_shot", reward: str | None = None) -> None:
        super().__init__(source, template, reward)
