"""The repair task on generated repositories, and `codechat data repair`, which writes experts' repairs (domain "repairs")
and problems. SFT never sees the constants of the training problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codechat.sandbox import Program, Verdict
from codechat.tasks.base import Problem, Score
from codechat.tasks.coding.task import JudgedTask
from codechat.tasks.preparation import GeneratedConfig, GeneratedTask, prepare_generated
from codechat.tasks.repair import edits, generator, scoring


class RepairTask(GeneratedTask, JudgedTask):
    """source: None generates problems; a directory has them in repair.SPLIT.jsonl. levels: of the problems; a repeated
    level is sampled more often. timeout_s: wall seconds of each test. isolation: see `Pool`.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name, domain, tiers, known_levels = "repair", "repairs", scoring.TIERS, generator.LEVELS
    gold_fields = ("files", "imports", "tests", "FAIL_TO_PASS", "PASS_TO_PASS", "fix")
    meta_fields = ("level",)

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = generator.LEVELS,
        timeout_s: float = 3.0,
        isolation: str = "auto",
    ) -> None:
        self.set_levels(source, levels)
        self.timeout_s, self.isolation = float(timeout_s), isolation

    def generate(self, split: str, n: int, seed: int, worked: bool = False) -> list[Problem]:
        return generator.problems(split, n, seed, self.levels, "sft" if worked and split == "train" else split)

    def gold(self, problem: Problem) -> str:
        """The expert's search/replace block."""
        fix = problem.gold["fix"]
        return edits.as_block(fix["path"], fix["search"], fix["replace"])

    def answer(self, problem: Problem, text: str) -> tuple[Score, Program | None]:
        files, score = scoring.edited(problem.gold["files"], text)
        return score, None if files is None else scoring.program(problem, files, self.timeout_s)

    def scored(self, problem: Problem, answer: Score, verdict: Verdict | None) -> Score:
        return scoring.of_verdict(problem, verdict) if verdict else answer


@dataclass(frozen=True, kw_only=True)
class RepairConfig(GeneratedConfig):
    """Small repositories with a bug -> repairs.SPLIT.jsonl (conversations), repair.SPLIT.jsonl (problems)."""

    make = RepairTask
    out: str = "data/repair"
    levels: tuple[int, ...] = generator.LEVELS


prepare_repair = prepare_generated
