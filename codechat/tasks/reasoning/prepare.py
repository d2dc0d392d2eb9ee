"""`codechat data reasoning`: worked solutions for SFT (domain "worked") and problems, generated or of GSM8K.

SFT never sees the questions of the generated problems. GSM8K's test file gives problems only. A solution has the layout of the template; RL and
evaluation must set the same template (--task reasoning:template=r1_zero).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.config import opt
from codechat.data.sources import Ledger, check_columns
from codechat.tasks import preparation
from codechat.tasks.base import Problem, check_levels, check_reference_solutions, row_of
from codechat.tasks.reasoning import stories
from codechat.tasks.reasoning.task import AnswerTask, Gsm8kTask, ReasoningTask

Row = dict[str, Any]
DOMAIN = "worked"


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(preparation.GeneratedConfig):
    """Word problems or GSM8K -> worked.SPLIT.jsonl (conversations), reasoning.SPLIT.jsonl or gsm8k.SPLIT.jsonl
    (problems)."""

    source: str = opt(
        "embedded", "embedded (generated word problems), hub (GSM8K), a path to GSM8K's files, or a hub set's name"
    )
    out: str = "data/reasoning"
    template: Literal["xml", "r1_zero", "question_only", "alpaca", "zero_shot"] = opt(
        "xml", "prompt, and layout of a worked solution"
    )
    max_examples: int = 4000
    eval_examples: int = 500
    levels: tuple[int, ...] = stories.LEVELS
    columns: tuple[str, ...] = opt((), "OURS=THEIRS where GSM8K's columns have other names, such as question=query")

    def __post_init__(self) -> None:
        check_columns(self.columns)
        check_levels(self.levels, stories.LEVELS)


def prepare_reasoning(cfg: ReasoningConfig) -> Row:
    """Write conversations and problems. Returns the manifest of the directory. Raises UserError, also where a solution
    does not score the maximum."""
    if cfg.source != "embedded":
        return _prepare_gsm8k(cfg)
    task = ReasoningTask(levels=cfg.levels, template=cfg.template)

    def dialogues(split: str, n: int) -> Iterator[Row]:
        return conversations(task, task.sampled("worked" if split == "train" else split, split, n, cfg.seed))

    return preparation.prepare_generated(cfg, task, DOMAIN, dialogues)


def _prepare_gsm8k(cfg: ReasoningConfig) -> Row:
    task = Gsm8kTask(cfg.source, template=cfg.template, columns=cfg.columns)

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        ledgers.append(ledger := Ledger(task.name))
        problems = {"train": task.problems("train", seed=cfg.seed)}
        problems |= {split: task.problems(split, cfg.eval_examples, cfg.seed) for split in preparation.HELD_OUT}
        worked = {"train": problems["train"][: cfg.max_examples], "select": problems["select"]}
        for solved in worked.values():
            if solved:
                check_reference_solutions(task, solved).require()
        files = {f"{DOMAIN}.{split}": list(ledger.counted(conversations(task, p))) for split, p in worked.items()}
        return files | {f"{task.name}.{split}": [row_of(p) for p in part] for split, part in problems.items()}

    return preparation.prepare(cfg, collect)


def conversations(task: AnswerTask, problems: Iterable[Problem]) -> Iterator[Row]:
    """A conversation of each problem: its prompt and its solution, in the layout of the task's template and grader."""
    for problem in problems:
        messages = [*task.prompt(problem), {"role": "assistant", "content": task.gold(problem)}]
        yield {
            "id": f"{DOMAIN}-{problem.id}",
            "messages": messages,
            "domain": DOMAIN,
            "meta": {"split": problem.split, "asked": "text", **problem.meta},
        }
