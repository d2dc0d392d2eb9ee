"""`codechat data repair`: expert repairs for SFT (domain "repairs"), and problems for RL, validation and test.

SFT never sees the constants of the training problems. With --actions tools a conversation is an episode: the messages of the
environment carry no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import opt
from codechat.data.prepared import SPLITS, print_ledgers, require_kind, write
from codechat.data.sources import Ledger
from codechat.tasks.base import check_reference_solutions, row_of
from codechat.tasks.preparation import check_generated
from codechat.tasks.repair import generator
from codechat.tasks.repair.task import RepairTask


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Small repositories with a bug -> repairs.SPLIT.jsonl (conversations), repair.SPLIT.jsonl (problems)."""

    out: str = opt("data/repair", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    max_examples: int = opt(2000, "expert repairs for training")
    problems: int = opt(2000, "training problems")
    eval_examples: int = opt(200, "conversations and problems of each split but train")
    levels: tuple[int, ...] = opt(
        generator.LEVELS, "levels, 1 (3 files) to 3 (9 files); repeat one to sample it more often"
    )
    actions: Literal["edits", "tools"] = opt(
        "edits", "how a repository is repaired: edits in one answer, or tools over turns"
    )
    seed: int = opt(0, "seed of names, constants, bugs and tests")

    def __post_init__(self) -> None:
        check_generated(self, generator.LEVELS)


def prepare_repair(cfg: RepairConfig) -> dict[str, Any]:
    """Write conversations and problems. Returns the manifest of the directory. Raises UserError, also where an expert's repair does not score the
    maximum."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    ledger, held_out = Ledger("repair"), dict.fromkeys(SPLITS[1:], cfg.eval_examples)
    task, files = RepairTask(levels=cfg.levels, actions=cfg.actions), {}
    for split, n in {"train": cfg.max_examples, **held_out}.items():
        found = generator.dialogues(split, n, cfg.seed, cfg.levels, cfg.actions)
        files[f"{generator.DOMAIN}.{split}"] = list(ledger.counted(found))
    for split, n in {"train": cfg.problems, **held_out, "test_hard": cfg.eval_examples}.items():
        problems = task.problems(split, n, cfg.seed)
        check_reference_solutions(task, problems[:64]).require()
        files[f"repair.{split}"] = list(map(row_of, problems))
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)
