"""`codechat data micro`: worked solutions for SFT (domain "solutions"), and problems for RL, selection and test.

SFT never sees the parameters of the problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.config import opt
from codechat.data.prepared import SPLITS, print_ledgers, require_kind, write
from codechat.data.sources import Ledger
from codechat.tasks.base import row_of
from codechat.tasks.micro import task as micro
from codechat.tasks.micro.family import LEVELS
from codechat.tasks.preparation import check_generated


@dataclass(frozen=True, kw_only=True)
class MicroConfig:
    """Small code problems -> solutions.SPLIT.jsonl (conversations), micro.SPLIT.jsonl (problems)."""

    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    max_examples: int = opt(8000, "worked solutions for training")
    problems: int = opt(2000, "training problems")
    eval_examples: int = opt(500, "conversations and problems of each split but train")
    levels: tuple[int, ...] = opt(LEVELS, "levels of the families; repeat one to sample it more often")
    seed: int = opt(0, "seed of names, wordings, examples and tests")

    def __post_init__(self) -> None:
        check_generated(self, LEVELS)


def prepare_micro(cfg: MicroConfig) -> dict[str, Any]:
    """Write conversations and problems. Returns the manifest of the directory. Raises UserError."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    ledger, held_out = Ledger("micro"), dict.fromkeys(SPLITS[1:], cfg.eval_examples)
    files = {
        f"{micro.DOMAIN}.{split}": list(ledger.counted(micro.dialogues(split, n, cfg.seed, cfg.levels)))
        for split, n in {"train": cfg.max_examples, **held_out}.items()
    }
    for split, n in {"train": cfg.problems, **held_out, "test_hard": cfg.eval_examples}.items():
        files[f"micro.{split}"] = [row_of(p) for p in micro.problems(split, n, cfg.seed, cfg.levels)]
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)
