"""`codechat data repair`: expert repairs for SFT (domain "repairs"), and problems for RL, validation and test.

SFT never sees the constants of the training problems. With --actions tools a conversation is an episode: the messages of the
environment carry no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.config import default, opt
from codechat.tasks import preparation
from codechat.tasks.base import check_levels
from codechat.tasks.repair import generator
from codechat.tasks.repair.environment import RepairEnvironment
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
        return dialogues(split, n, cfg.seed, cfg.levels, cfg.actions)

    return preparation.prepare_generated(cfg, task, generator.DOMAIN, repairs)


def dialogues(
    split: str, n: int, seed: int = 0, levels: Sequence[int] = generator.LEVELS, actions: str = "edits"
) -> Iterator[dict[str, Any]]:
    """n conversations {"id", "messages", "domain", "meta"} of experts. In "train" they use constants that no problem has."""
    world = RepairEnvironment()
    for problem in generator.problems(split, n, seed, levels, actions, part="sft" if split == "train" else ""):
        messages = list(problem.messages)
        if actions == "tools":
            world.reset(problem, 0)
        for text in generator.gold_steps(problem):
            message = {"role": "assistant", "content": text}
            messages += [message, *(world.step(message)[0] if actions == "tools" else [])]
        meta = {"split": split, "asked": "tool" if actions == "tools" else "code", "level": problem.meta["level"]}
        yield {"id": f"{generator.DOMAIN}-{problem.id}", "messages": messages, "domain": generator.DOMAIN, "meta": meta}
