"""The task of the pocket apps: its problems are episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import read_jsonl
from codechat.tasks.apps import generator as made
from codechat.tasks.apps.environment import TIERS, AppsEnvironment
from codechat.tasks.base import SPLITS, Message, Problem, Score

DEFAULT_LIMIT = 500


class AppsTask:
    """source: "apps" makes problems as they are asked for; a path reads apps.SPLIT.jsonl of it. levels: of the problems, one given twice is drawn
    twice as often. apps: those that levels 1 and 2 keep to; none = all. actions: "call" or "code". max_turns: answers of an episode.

    ConfigError for settings that cannot be, MissingFile and DataError for files that cannot be read."""

    name, tiers, max_reward = "apps", TIERS, 1.0

    def __init__(
        self,
        source: str | Path = "apps",
        levels: Sequence[int] = made.LEVELS,
        actions: str = "call",
        max_turns: int = 8,
        apps: Sequence[str] = (),
    ) -> None:
        if actions not in ("call", "code"):
            raise ConfigError(f"actions {actions!r}; call or code is needed")
        if max_turns < 1:
            raise ConfigError(f"max_turns {max_turns}; at least 1 is needed")
        self.source, self.levels, self.actions, self.max_turns, self.only = (
            str(source),
            tuple(levels),
            actions,
            max_turns,
            tuple(apps),
        )
        if self.source != "apps" and not Path(self.source).is_dir():
            raise MissingFile(
                f"{source} is no directory; make problems with `codechat data apps --out {source}`, or leave --data-dir out"
            )

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems; without one DEFAULT_LIMIT, or all that the file has."""
        if self.source == "apps":
            return made.problems(
                split, DEFAULT_LIMIT if limit is None else limit, seed, self.levels, self.actions, self.only
            )
        if split not in SPLITS:
            raise ConfigError(f"split {split!r} is unknown; splits are {', '.join(SPLITS)}")
        path = Path(self.source) / f"apps.{split}.jsonl"
        if not path.is_file():
            raise MissingFile(f"{path} does not exist; make it with `codechat data apps --out {self.source}`")
        rows = [_read(row, f"{path}:{number}") for number, row in read_jsonl(path)]
        rows = [p for p in rows if p.meta["level"] in self.levels and p.meta["actions"] == self.actions]
        random.Random(seed).shuffle(rows)
        return rows[:limit]

    def environment(self) -> AppsEnvironment:
        return AppsEnvironment(self.actions)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        """The verdict on an episode in which the policy answers this and nothing more."""
        world = self.environment()
        world.reset(problem, 0)
        world.step({"role": "assistant", "content": completion})
        world.store.close()
        return world.score()

    def gold(self, problem: Problem) -> str:
        """The expert's calls in one answer; they do not depend on what is said in between."""
        return "\n".join(made.gold_steps(problem))


def row_of(problem: Problem) -> dict[str, Any]:
    """The row that a file of problems has."""
    return {
        "id": problem.id,
        "messages": problem.messages,
        "gold": problem.gold,
        "split": problem.split,
        "meta": dict(problem.meta),
    }


def _read(row: dict[str, Any], where: str) -> Problem:
    gold, meta = row.get("gold"), row.get("meta")
    if not (
        isinstance(gold, dict)
        and {"world", "calls", "changes"} <= gold.keys()
        and isinstance(meta, dict)
        and {"level", "tools", "actions"} <= meta.keys()
    ):
        raise DataError(
            f"{where} is no problem of the apps: gold with world, calls and changes, and meta with level, tools and actions are needed; "
            "make the file with `codechat data apps`"
        )
    return Problem(row["id"], row["messages"], gold, row["split"], meta)
