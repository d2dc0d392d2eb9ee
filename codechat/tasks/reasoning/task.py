"""The reasoning tasks: generated word problems, GSM8K, MMLU, with five prompt templates.

    tasks.load("reasoning:levels=[1,2],template=r1_zero")      generated word problems: no files, no network
    tasks.load("gsm8k", source="hub")                          or a path; "gsm8k:template=question_only"
    tasks.load("mmlu")                                         evaluation only

A template makes messages, which are rendered like any other conversation; with tags "raw" they are the text itself, as the papers ran base models.
A grader scores the completion (`rewards`); without `reward` it is the template's own. `Score.correct` is the answer alone, `Score.tier` the outcome.

    xml            a system prompt that requests <reasoning> and <answer>, each on their own lines
    r1_zero        DeepSeek-R1-Zero's prompt for a base model (arXiv:2501.12948, table 1); it ends in <think>
    question_only  only the question (Dr. GRPO, arXiv:2503.20783, section 2, "no template")
    alpaca         Stanford Alpaca's instruction template
    zero_shot      a system prompt that requests steps and "The answer is N."
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from codechat.core.errors import check_choice
from codechat.data.sources import digest
from codechat.tasks.base import SPLITS, Message, Problem, Score, check_split, shuffled
from codechat.tasks.preparation import GeneratedTask
from codechat.tasks.reasoning import rewards, sources, stories

XML_SYSTEM = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first thinks about the "
    "reasoning process in the mind and then provides the User with the answer. The reasoning process is enclosed within <think> </think> and "
    "answer is enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
    "User: {question}\nAssistant: <think>"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{question}\n\n### Response:\n"
)
ZERO_SHOT_SYSTEM = {
    "number": 'Solve the problem step by step. End with the sentence "The answer is N.", where N is a number.',
    "letter": 'Answer the question with one of the choices. End with the sentence "The answer is X.", where X is A, B, C or D.',
}


class Template(NamedTuple):
    """grader: of `rewards`. user: the request. system: before it, by the kind of the answer ("number" or "letter")."""

    grader: str
    user: str = "{question}"
    system: dict[str, str] = {}
    stop_texts: tuple[str, ...] = ()

    def messages(self, question: str, kind: str) -> list[Message]:
        """The prompt of a question whose answer is of this kind."""
        system = [{"role": "system", "content": self.system[kind]}] if self.system else []
        return [*system, {"role": "user", "content": self.user.format(question=question)}]


TEMPLATES = {
    "xml": Template("xml", system=dict.fromkeys(("number", "letter"), XML_SYSTEM)),
    "r1_zero": Template("r1_zero", user=R1_ZERO, stop_texts=("</answer>",)),
    "question_only": Template("question_only"),
    "alpaca": Template("plain", user=ALPACA),
    "zero_shot": Template("plain", system=ZERO_SHOT_SYSTEM),
}


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
