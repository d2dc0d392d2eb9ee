"""`codechat data repair`: expert repairs for SFT (domain "repairs"), and problems for RL, validation and test.

SFT never sees the constants of the training problems. With --actions tools a conversation is an episode: the messages of the
environment carry no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.config import default, opt
from codechat.tasks import preparation
from codechat.tasks.base import check_levels
from codechat.tasks.repair import generator
from codechat.tasks.repair.task import RepairTask


@dataclass(frozen=True, kw_only=True)
class RepairConfig(preparation.GeneratedConfig):
    """Small repositories with a bug -> repairs.SPLIT.jsonl (conversations), repair.SPLIT.jsonl (problems)."""

    out: str = default("data/repair")
    levels: tuple[int, ...] = default(generator.LEVELS)
    actions: Literal["edits", "tools"] = opt(
        "edits", "how a repository is repaired: edits in one answer, or tools over turns"
    )

    def __post_init__(self) -> None:
        check_levels(self.levels, generator.LEVELS)


def prepare_repair(cfg: RepairConfig) -> dict[str, Any]:
    """Write conversations and problems. Returns the manifest of the directory. Raises UserError, also where an expert's repair does not score the
    maximum."""
    task = RepairTask(levels=cfg.levels, actions=cfg.actions)

    def repairs(split: str, n: int) -> Iterator[dict[str, Any]]:
        return generator.dialogues(split, n, cfg.seed, cfg.levels, cfg.actions)

    return preparation.prepare_generated(cfg, task, generator.DOMAIN, repairs)
