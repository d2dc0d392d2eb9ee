"""`codechat data apps`: expert episodes and problems of the pocket apps.

The experts' trajectories are conversations for SFT (domain "episodes"). They include the environment's messages, which
carry no loss. Training problems differ from the experts' problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from codechat.core.config import default, opt
from codechat.tasks import apps, preparation
from codechat.tasks.base import check_levels


@dataclass(frozen=True, kw_only=True)
class AppsConfig(preparation.GeneratedConfig):
    """Pocket apps -> episodes.SPLIT.jsonl (expert trajectories), apps.SPLIT.jsonl (problems)."""

    out: str = default("data/apps")
    max_examples: int = default(500)
    levels: tuple[int, ...] = default(apps.LEVELS)
    apps: tuple[str, ...] = opt((), "apps that levels 1 and 2 use, such as notes contacts; empty = all")

    def __post_init__(self) -> None:
        check_levels(self.levels, apps.LEVELS)


def prepare_apps(cfg: AppsConfig) -> dict[str, Any]:
    """Write episodes and problems. Returns the manifest of the directory. Raises UserError, also where an expert's
    solution does not score the maximum."""
    task = apps.AppsTask(levels=cfg.levels, apps=cfg.apps)

    def episodes(split: str, n: int) -> Iterator[dict[str, Any]]:
        return apps.dialogues(split, n, cfg.seed, cfg.levels, cfg.apps)

    return preparation.prepare_generated(cfg, task, apps.DOMAIN, episodes, splits=("train", *preparation.HELD_OUT))
