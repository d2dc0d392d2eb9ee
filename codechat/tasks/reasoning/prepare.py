"""`codechat data reasoning`: worked solutions and problems of the reasoning tasks.

The generated word problems (`tasks.reasoning.stories`) give worked solutions for SFT (domain "worked") and problems
reasoning.SPLIT.jsonl, whose questions SFT never sees. GSM8K gives worked solutions and problems from its training file,
`select` from a held-out part of it, and problems from its test file. A solution has the layout of the template; RL and
evaluation must set the same template (--task reasoning:template=r1_zero).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import opt
from codechat.data.prepared import print_ledgers, require_kind, write
from codechat.data.sources import Ledger, check_columns
from codechat.tasks.base import Problem, check_reference_solutions, row_of
from codechat.tasks.preparation import check_generated
from codechat.tasks.reasoning import stories
from codechat.tasks.reasoning.task import AnswerTask, Gsm8kTask, ReasoningTask

Row = dict[str, Any]
DOMAIN = "worked"
HELD_OUT = ("select", "test")


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """Word problems or GSM8K -> worked.SPLIT.jsonl (conversations), reasoning.SPLIT.jsonl or gsm8k.SPLIT.jsonl
    (problems)."""

    source: str = opt(
        "embedded", "embedded (generated word problems), hub (GSM8K), a path to GSM8K's files, or a hub set's name"
    )
    out: str = opt("data/reasoning", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    template: Literal["xml", "r1_zero", "question_only", "alpaca", "zero_shot"] = opt(
        "xml", "prompt, and layout of a worked solution"
    )
    max_examples: int = opt(4000, "worked solutions for training")
    problems: int = opt(2000, "training problems of the embedded generator; of GSM8K all are taken")
    eval_examples: int = opt(500, "conversations and problems of each split but train")
    levels: tuple[int, ...] = opt(stories.LEVELS, "levels of the embedded problems; repeat one to sample it more often")
    seed: int = opt(0, "seed of names, numbers and wordings")
    columns: tuple[str, ...] = opt(
        (), "OURS=THEIRS where GSM8K's columns have other names, such as question=query", late=True
    )
    preview: int = opt(0, "conversations to show as training sees them, with their loss mask", identity=False, least=0)

    def __post_init__(self) -> None:
        check_columns(self.columns)
        check_generated(self, stories.LEVELS)


def prepare_reasoning(cfg: ReasoningConfig) -> Row:
    """Write conversations and problems. Returns the manifest of the directory. Raises UserError, also where a solution
    does not score the maximum."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    task, worked, problems = _embedded(cfg) if cfg.source == "embedded" else _gsm8k(cfg)
    ledger = Ledger(task.name if cfg.source != "embedded" else "word problems")
    files: dict[str, list[Row]] = {}
    for split, found in worked.items():
        check_reference_solutions(task, found).require()
        files[f"{DOMAIN}.{split}"] = list(ledger.counted(conversations(task, found)))
    files |= {f"{task.name}.{split}": [row_of(p) for p in found] for split, found in problems.items()}
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)


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


Parts = dict[str, list[Problem]]


def _embedded(cfg: ReasoningConfig) -> tuple[AnswerTask, Parts, Parts]:
    task = ReasoningTask(levels=cfg.levels, template=cfg.template)
    held_out = {split: task.sampled(split, split, cfg.eval_examples, cfg.seed) for split in HELD_OUT}
    worked = {"train": task.sampled("worked", "train", cfg.max_examples, cfg.seed), **held_out}
    problems = {
        "train": task.sampled("train", "train", cfg.problems, cfg.seed),
        **held_out,
        "test_hard": task.sampled("test_hard", "test_hard", cfg.eval_examples, cfg.seed),
    }
    return task, worked, problems


def _gsm8k(cfg: ReasoningConfig) -> tuple[AnswerTask, Parts, Parts]:
    task = Gsm8kTask(cfg.source, template=cfg.template, columns=cfg.columns)
    train = task.problems("train", seed=cfg.seed)
    held_out = {
        split: found for split in HELD_OUT if (found := task.problems(split, limit=cfg.eval_examples, seed=cfg.seed))
    }
    worked = {
        "train": train[: cfg.max_examples],
        "select": held_out.get("select", []),
    }  # the test file is for evaluation only
    return task, {split: found for split, found in worked.items() if found}, {"train": train, **held_out}
