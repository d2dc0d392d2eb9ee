"""Multiple choice: MMLU, ARC and HellaSwag. Sampled, a problem asks for a letter; `evaluate --score loglik` takes
the likeliest choice, with the contexts and continuations of EleutherAI's lm-evaluation-harness (tasks mmlu,
arc_challenge, arc_easy, hellaswag)."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError
from codechat.tasks.base import Problem
from codechat_lab.tasks.preparation import PublicTask, Row
from codechat_lab.tasks.reasoning.task import GOLD, AnswerTask, make_problem

LETTERS = "ABCDE"


class ChoiceTask(AnswerTask, PublicTask):
    """Three to five choices. source: hub, or a path to parquet, jsonl or csv files."""

    kind, default_template, gold_fields = "letter", "zero_shot", GOLD
    splits: tuple[str, ...] = ("select", "test")

    def problem(self, id: str, part: str, question: str, choices: Sequence[str], answer: int, **meta: Any) -> Problem:
        """answer: the index of the right choice. meta: at least the context and its continuations."""
        if not 3 <= len(choices) <= len(LETTERS) or not 0 <= answer < len(choices):
            raise ValueError(f"{len(choices)} choices and answer {answer}; required are 3 to 5, and one of them")
        lines = [question, "", *(f"{letter}. {text}" for letter, text in zip(LETTERS, choices))]
        split = {"validation": "select", "dev": "prompt"}.get(part, part)
        return make_problem(id, "\n".join(lines), LETTERS[answer], "", split, **meta)

    def choices(self, problem: Problem) -> tuple[str, dict[str, str]]:
        """The context, and {completion that `score` reads: continuation whose log-likelihood counts} of each choice."""
        written = [self.gold(make_problem("", "", letter, "", "")) for letter in LETTERS]
        return problem.meta["context"], dict(zip(written, problem.meta["continuations"]))


class MmluTask(ChoiceTask):
    """Massive multitask language understanding (Hendrycks et al., 2021, arXiv:2009.03300), all subjects; also reads
    its authors' csv files.
    shots: how many of its subject's `dev` rows stand, answered, before a context."""

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
            yield part, origin, ({"subject": Path(origin).stem.rpartition("_")[0]} | row for row in rows)

    def make(self, row: Row, number: int, part: str) -> Problem:
        question = row["question"].strip()
        subject = row["subject"]
        answer = row["answer"]
        id = f"mmlu-{part}-{number - 1}"
        choices = row.get("choices")
        if choices is None:
            id = f"mmlu-{part}-{subject}-{number - 1}"
            choices = [row[letter] for letter in "ABCD"]
        context = "\n".join(
            [question, *(f"{letter}. {text}" for letter, text in zip("ABCD", choices, strict=True)), "Answer:"]
        )
        meta = dict(subject=subject, context=context, continuations=[f" {letter}" for letter in "ABCD"])
        answer = "ABCD".index(answer) if isinstance(answer, str) else int(answer)
        return self.problem(id, part, question, list(map(str, choices)), answer, **meta)

    @cached_property
    def worked(self) -> list[Problem]:
        return [problem for problem in self.rows if problem.split == "prompt"]

    def choices(self, problem: Problem) -> tuple[str, dict[str, str]]:
        (context, choices), subject = super().choices(problem), problem.meta["subject"]
        shots = [p for p in self.worked if p.meta["subject"] == subject][: self.shots]
        if len(shots) < self.shots:
            missing = f"mmlu, {subject}: {len(shots)} dev rows for {self.shots} shots"
            raise DataError(f"{missing}; add the dev files, or set --task mmlu:shots={len(shots)}")
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
        worked = [f"{p.meta['context']} {p.gold['answer']}" for p in shots]
        return "\n\n".join([about, *worked, context]), choices


class ArcTask(ChoiceTask):
    """AI2's reasoning challenge (Clark et al., 2018, arXiv:1803.05457)."""

    name = "arc_challenge"
    accepted = [("question", "choices", "answerKey")]
    hub = {part: ("allenai/ai2_arc", f"ARC-Challenge/{part}-*.parquet") for part in ("validation", "test")}

    def make(self, row: Row, number: int, part: str) -> Problem:
        texts = list(row["choices"]["text"])
        answer = list(row["choices"]["label"]).index(row["answerKey"])
        meta = dict(context=f"Question: {row['question']}\nAnswer:", continuations=[f" {text}" for text in texts])
        return self.problem(f"arc-{row.get('id', number - 1)}", part, row["question"], texts, answer, **meta)


class ArcEasyTask(ArcTask):
    """Its easy part."""

    name = "arc_easy"
    hub = {part: ("allenai/ai2_arc", f"ARC-Easy/{part}-*.parquet") for part in ("validation", "test")}


class HellaswagTask(ChoiceTask):
    """How does it go on? (Zellers et al., 2019, arXiv:1905.07830). `test` is the public validation set: the test
    set has no labels."""

    name = "hellaswag"
    splits = ("test",)
    accepted = [("activity_label", "ctx_a", "ctx_b", "endings", "label")]
    hub = {"validation": ("Rowan/hellaswag", "data/validation-*.parquet")}

    def make(self, row: Row, number: int, part: str) -> Problem:
        begun = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        begun, *endings = (
            re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")  # WikiHow's marks
            for text in (begun, *row["endings"])
        )
        meta = dict(context=begun, continuations=[f" {ending}" for ending in endings])
        return self.problem(f"hellaswag-{number - 1}", "test", begun, endings, int(row["label"]), **meta)
