"""The repair task on generated repositories, and `codechat data repair`, which writes experts' repairs (domain "repairs")
and problems. SFT never sees the constants of the training problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.tasks.base import Message, Problem, Score, check_levels
from codechat.tasks.coding.task import pool_of
from codechat.tasks.preparation import GeneratedConfig, GeneratedTask, prepare_generated
from codechat.tasks.repair import edits, generator, scoring

DOMAIN = "repairs"


class RepairTask(GeneratedTask):
    """source: None generates problems; a directory has them in repair.SPLIT.jsonl. levels: of the problems; a repeated
    level is sampled more often. timeout_s: wall seconds of each test. isolation: see `Pool`.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name, tiers, max_reward = "repair", scoring.TIERS, 1.0
    gold_fields = ("files", "imports", "tests", "FAIL_TO_PASS", "PASS_TO_PASS", "fix")
    meta_fields = ("level",)

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = generator.LEVELS,
        timeout_s: float = 3.0,
        isolation: str = "auto",
    ) -> None:
        check_levels(levels, generator.LEVELS)
        self.source, self.levels = source, tuple(levels)
        self.timeout_s, self.isolation = float(timeout_s), isolation

    def generate(self, split: str, n: int, seed: int) -> list[Problem]:
        return generator.problems(split, n, seed, self.levels)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        """The expert's search/replace block."""
        fix = problem.gold["fix"]
        return edits.as_block(fix["path"], fix["search"], fix["replace"])

    def score(self, problem: Problem, completion: str) -> Score:
        return next(self.scores([(problem, completion)]))

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        """Scores in the order of the pairs, judged in parallel. Equal repositories run once."""
        read = [(problem, *scoring.edited(problem.gold["files"], text)) for problem, text in pairs]
        keys = [(problem.id, repr(sorted(files.items()))) if files is not None else None for problem, files, _ in read]
        programs = {
            key: scoring.program(problem, files, self.timeout_s)
            for (problem, files, _), key in zip(read, keys)
            if files is not None
        }
        verdicts = dict(zip(programs, pool_of(self.isolation).map(programs.values()))) if programs else {}
        for (problem, _, score), key in zip(read, keys):
            yield scoring.of_verdict(problem, verdicts[key]) if key else score


@dataclass(frozen=True, kw_only=True)
class RepairConfig(GeneratedConfig):
    """Small repositories with a bug -> repairs.SPLIT.jsonl (conversations), repair.SPLIT.jsonl (problems)."""

    out: str = "data/repair"
    levels: tuple[int, ...] = generator.LEVELS

    def __post_init__(self) -> None:
        check_levels(self.levels, generator.LEVELS)


def prepare_repair(cfg: RepairConfig) -> dict[str, Any]:
    """Write conversations and problems. Returns the manifest of the directory."""

    def repairs(split: str, n: int) -> Iterator[dict[str, Any]]:
        return dialogues(split, n, cfg.seed, cfg.levels)

    return prepare_generated(cfg, RepairTask(levels=cfg.levels), DOMAIN, repairs)


def dialogues(split: str, n: int, seed: int = 0, levels: Sequence[int] = generator.LEVELS) -> Iterator[dict[str, Any]]:
    """n conversations of an expert. In "train" they use constants that no problem has."""
    task = RepairTask(levels=levels)
    for problem in generator.problems(split, n, seed, levels, part="sft" if split == "train" else ""):
        messages = [*problem.messages, {"role": "assistant", "content": task.gold(problem)}]
        meta = {"split": split, "asked": "code", "level": problem.meta["level"]}
        yield {"id": f"{DOMAIN}-{problem.id}", "messages": messages, "domain": DOMAIN, "meta": meta}
