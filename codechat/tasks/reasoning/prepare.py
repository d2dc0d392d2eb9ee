"""Worked solutions and problems of the reasoning tasks.

The embedded word problems (`tasks.reasoning.stories`) give worked solutions for SFT (domain "worked") and problems reasoning.SPLIT.jsonl, whose
questions SFT never sees. GSM8K gives worked solutions and problems from its training file, `select` from a part of it that is held out, and
problems from its test file. The layout of a solution is that of the template, and the same template must be asked for in RL and evaluation
(--task reasoning:template=r1_zero).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data.prepared import print_ledgers, require_kind, write
from codechat.data.sources import Ledger
from codechat.tasks import gold_gate
from codechat.tasks.base import Problem
from codechat.tasks.reasoning import AnswerTask, Gsm8kTask, ReasoningTask, sources, stories

Row = dict[str, Any]
DOMAIN = "worked"
HELD_OUT = ("select", "test")


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """Word problems or GSM8K -> worked.SPLIT.jsonl (conversations), reasoning.SPLIT.jsonl or gsm8k.SPLIT.jsonl (problems)."""

    source: str = opt("embedded", "embedded (our own word problems), hub (GSM8K), or a path to GSM8K's files")
    out: str = opt("data/reasoning", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    template: Literal["xml", "r1_zero", "question_only", "alpaca", "zero_shot"] = opt(
        "xml", "prompt, and layout of a worked solution"
    )
    max_examples: int = opt(4000, "worked solutions for training")
    problems: int = opt(2000, "training problems of the embedded generator; of GSM8K all are taken")
    eval_examples: int = opt(500, "conversations and problems of each split but train")
    levels: tuple[int, ...] = opt(stories.LEVELS, "levels of the embedded problems; repeat one to draw it more often")
    seed: int = opt(0, "seed of names, numbers and wordings")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.levels) - set(stories.LEVELS)):
            raise ConfigError(f"levels {unknown} are unknown; give some of {', '.join(map(str, stories.LEVELS))}")
        for name in ("max_examples", "problems", "eval_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


def prepare_reasoning(cfg: ReasoningConfig) -> Row:
    """Write conversations and problems; returns the manifest of the directory. Raises UserError, also where a gold answer does not pass its own reward."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    task, worked, problems = _embedded(cfg) if cfg.source == "embedded" else _gsm8k(cfg)
    ledger = Ledger(task.name if cfg.source != "embedded" else "word problems")
    files: dict[str, list[Row]] = {}
    for split, found in worked.items():
        gold_gate(task, found).require()
        files[f"{DOMAIN}.{split}"] = list(ledger.counted(conversations(task, found)))
    files |= {f"{task.name}.{split}": [sources.row_of(p) for p in found] for split, found in problems.items()}
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)


def conversations(task: AnswerTask, problems: Iterable[Problem]) -> Iterator[Row]:
    """A conversation of each problem: its prompt and its solution, as the task's template and grading have them."""
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
    task = Gsm8kTask(cfg.source, template=cfg.template)
    train = task.problems("train", seed=cfg.seed)
    held_out = {
        split: found for split in HELD_OUT if (found := task.problems(split, limit=cfg.eval_examples, seed=cfg.seed))
    }
    worked = {
        "train": train[: cfg.max_examples],
        "select": held_out.get("select", []),
    }  # the test file is for evaluation only
    return task, {split: found for split, found in worked.items() if found}, {"train": train, **held_out}
