"""The task of the pocket apps, whose problems are episodes, and `codechat data apps`, which writes problems and experts'
episodes. In these the environment's messages carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.tasks.apps import generator
from codechat.tasks.apps.environment import TIERS, AppsEnvironment
from codechat.tasks.base import Message, Problem, Score, check_levels
from codechat.tasks.preparation import HELD_OUT, GeneratedConfig, GeneratedTask, prepare_generated


class AppsTask(GeneratedTask):
    """source: None generates problems; a directory has them in apps.SPLIT.jsonl. levels: of the problems; a repeated level
    is sampled more often. apps: the apps that levels 1 and 2 use; empty = all. max_turns: most answers of an episode.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name, tiers, max_reward = "apps", TIERS, 1.0
    gold_fields = ("world", "calls", "changes")
    meta_fields = ("level", "tools")

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = generator.LEVELS,
        max_turns: int = 8,
        apps: Sequence[str] = (),
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns {max_turns}; it must be at least 1")
        self.source, self.levels, self.only = source, tuple(levels), tuple(apps)
        self.max_turns = max_turns

    def generate(self, split: str, n: int, seed: int) -> list[Problem]:
        return generator.problems(split, n, seed, self.levels, self.only)

    def environment(self) -> AppsEnvironment:
        return AppsEnvironment()

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        """The score of an episode with this one answer."""
        world = self.environment()
        world.reset(problem, 0)
        world.step({"role": "assistant", "content": completion})
        world.store.close()
        return world.score()

    def gold(self, problem: Problem) -> str:
        """The expert's calls in one answer; they do not depend on the responses in between."""
        return "\n".join(generator.gold_steps(problem))


@dataclass(frozen=True, kw_only=True)
class AppsConfig(GeneratedConfig):
    """Pocket apps -> episodes.SPLIT.jsonl (experts' episodes), apps.SPLIT.jsonl (problems)."""

    out: str = "data/apps"
    max_examples: int = 500
    levels: tuple[int, ...] = generator.LEVELS
    apps: tuple[str, ...] = opt((), "apps that levels 1 and 2 use, such as notes contacts; empty = all")

    def __post_init__(self) -> None:
        check_levels(self.levels, generator.LEVELS)


def prepare_apps(cfg: AppsConfig) -> dict[str, Any]:
    """Write episodes and problems; training problems are none of the experts'. Returns the manifest of the directory."""

    def episodes(split: str, n: int) -> Any:
        return generator.dialogues(split, n, cfg.seed, cfg.levels, cfg.apps)

    task = AppsTask(levels=cfg.levels, apps=cfg.apps)
    return prepare_generated(cfg, task, generator.DOMAIN, episodes, splits=("train", *HELD_OUT))
