"""Multiple choice: MMLU, ARC and HellaSwag. Sampled, a problem asks for a letter; `evaluate
--score loglik` takes the likeliest choice, with the contexts and continuations of EleutherAI's
lm-evaluation-harness (tasks mmlu, arc_challenge, arc_easy, hellaswag)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.tasks.base import Problem
from codechat_lab.tasks.preparation import PublicTask, Row
from codechat_lab.tasks.reasoning.task import GOLD, AnswerTask, make_problem

LETTERS = "ABCDE"


class Question(NamedTuple):
    """answer: the index of the right choice. context, continuations: the texts whose
    log-likelihood is taken, one continuation for each choice."""

    text: str
    choices: Sequence[str]
    answer: int
    context: str
    continuations: list[str]


def _listed(choices: Sequence[Any]) -> list[str]:
    return [f"{letter}. {text}" for letter, text in zip(LETTERS, choices)]


class ChoiceTask(AnswerTask, PublicTask):
    """Three to five choices. source: hub, or a path to parquet, jsonl or csv files."""

    kind = "letter"
    default_template = "zero_shot"
    gold_fields = GOLD
    splits: tuple[str, ...] = ("select", "test")

    def __init__(self, source: str = "hub", template: str = "", reward: str | None = None) -> None:
        super().__init__(template, reward)
        self.source = str(source)

    def problem(
        self, id: str, part: str, question: Question, meta: Mapping[str, Any] | None = None
    ) -> Problem:
        """meta: what is known beside the context and the continuations."""
        n_choices = len(question.choices)
        if not 3 <= n_choices <= len(LETTERS) or not 0 <= question.answer < n_choices:
            raise ValueError(
                f"got {n_choices} choices and answer {question.answer}; "
                "expected 3 to 5, and one of them"
            )
        text = "\n".join([question.text, "", *_listed(question.choices)])
        split = {"validation": "select", "dev": "prompt"}.get(part, part)
        known = {
            **(meta or {}),
            "context": question.context,
            "continuations": question.continuations,
        }
        return make_problem(id, text, LETTERS[question.answer], "", split, known)

    def choices(self, problem: Problem) -> tuple[str, dict[str, str]]:
        """The context, and {completion that `score` reads: continuation whose log-likelihood
        counts} of each choice."""
        written = [self.gold(make_problem("", "", letter, "", "")) for letter in LETTERS]
        return problem.meta["context"], dict(zip(written, problem.meta["continuations"]))


class MmluTask(ChoiceTask):
    """Massive multitask language understanding (Hendrycks et al., 2021, arXiv:2009.03300), all
    subjects; also reads its authors' csv files. shots: how many of its subject's `dev` rows
    stand, answered, before a context."""

    name = "mmlu"
    accepted = [("question", "choices", "answer"), ("question", *"ABCD", "answer")]
    hub = {part: ("cais/mmlu", f"all/{part}-*.parquet") for part in ("validation", "test", "dev")}

    def __init__(
        self,
        source: str = "hub",
        template: str = "",
        reward: str | None = None,
        shots: int = 5,
    ) -> None:
        super().__init__(source, template, reward)
        self.shots = shots

    def _parts(self) -> Iterator[tuple[str, str, Iterable[Row]]]:
        for part, origin, rows in super()._parts():  # such as abstract_algebra_test.csv
            yield (
                part,
                origin,
                ({"subject": Path(origin).stem.rpartition("_")[0]} | row for row in rows),
            )

    def make(self, row: Row, number: int, part: str) -> Problem:
        text = row["question"].strip()
        subject = row["subject"]
        answer = row["answer"]
        id = f"mmlu-{part}-{number - 1}"
        choices = row.get("choices")
        if choices is None:  # the authors' csv files, one for each subject
            id = f"mmlu-{part}-{subject}-{number - 1}"
            choices = [row[letter] for letter in "ABCD"]
        if len(choices) != 4:
            raise ValueError(f"got {len(choices)} choices; expected 4")
        question = Question(
            text,
            choices=list(map(str, choices)),
            answer="ABCD".index(answer) if isinstance(answer, str) else int(answer),
            context="\n".join([text, *_listed(choices), "Answer:"]),
            continuations=[f" {letter}" for letter in "ABCD"],
        )
        return self.problem(id, part, question, {"subject": subject})

    @cached_property
    def worked(self) -> list[Problem]:
        return [problem for problem in self.rows if problem.split == "prompt"]

    def choices(self, problem: Problem) -> tuple[str, dict[str, str]]:
        context, choices = super().choices(problem)
        subject = problem.meta["subject"]
        shots = [p for p in self.worked if p.meta["subject"] == subject][: self.shots]
        if len(shots) < self.shots:
            missing = f"mmlu, {subject}: {len(shots)} dev rows for {self.shots} shots"
            raise DataError(f"{missing}; add the dev files, or set --task mmlu:shots={len(shots)}")
        about = (
            "The following are multiple choice questions (with "
            f"answers) about {subject.replace('_', ' ')}."
        )
        worked = [f"{p.meta['context']} {p.gold['answer']}" for p in shots]
        return "\n\n".join([about, *worked, context]), choices


class ArcTask(ChoiceTask):
    """AI2's reasoning challenge (Clark et al., 2018, arXiv:1803.05457)."""

    name = "arc_challenge"
    accepted = [("question", "choices", "answerKey")]
    hub = {
        part: ("allenai/ai2_arc", f"ARC-Challenge/{part}-*.parquet")
        for part in ("validation", "test")
    }

    def make(self, row: Row, number: int, part: str) -> Problem:
        texts = list(row["choices"]["text"])
        answer = list(row["choices"]["label"]).index(row["answerKey"])
        question = Question(
            row["question"],
            texts,
            answer,
            context=f"Question: {row['question']}\nAnswer:",
            continuations=[f" {text}" for text in texts],
        )
        return self.problem(f"arc-{row.get('id', number - 1)}", part, question)


class ArcEasyTask(ArcTask):
    """Its easy part."""

    name = "arc_easy"
    hub = {
        part: ("allenai/ai2_arc", f"ARC-Easy/{part}-*.parquet") for part in ("validation", "test")
    }


class HellaswagTask(ChoiceTask):
    """How does it go on? (Zellers et al., 2019, arXiv:1905.07830). `test` is the public
    validation set: the test set has no labels."""

    name = "hellaswag"
    splits = ("test",)
    accepted = [("activity_label", "ctx_a", "ctx_b", "endings", "label")]
    hub = {"validation": ("Rowan/hellaswag", "data/validation-*.parquet")}

    def make(self, row: Row, number: int, part: str) -> Problem:
        begun = _without_marks(
            f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        )
        endings = [_without_marks(ending) for ending in row["endings"]]
        question = Question(
            begun, endings, int(row["label"]), begun, [f" {ending}" for ending in endings]
        )
        return self.problem(f"hellaswag-{number - 1}", "test", question)


def _without_marks(text: str) -> str:
    """WikiHow's, such as [title] and [step], as lm-evaluation-harness removes them."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
