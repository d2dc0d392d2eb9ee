"""The task of the pocket apps. Its problems are episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import read_jsonl
from codechat.tasks.apps import generator
from codechat.tasks.apps.environment import TIERS, AppsEnvironment
from codechat.tasks.base import Message, Problem, Score, check_split, problem_of, shuffled

DEFAULT_LIMIT = 500


class AppsTask:
    """source: "apps" generates problems; a path reads apps.SPLIT.jsonl there. levels: of the problems; a repeated level
    is sampled more often. apps: the apps that levels 1 and 2 use; empty = all. actions: "call" or "code". max_turns:
    most answers of an episode.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name, tiers, max_reward = "apps", TIERS, 1.0

    def __init__(
        self,
        source: str | Path = "apps",
        levels: Sequence[int] = generator.LEVELS,
        actions: str = "call",
        max_turns: int = 8,
        apps: Sequence[str] = (),
    ) -> None:
        if actions not in ("call", "code"):
            raise ConfigError(f"actions {actions!r}; required: call or code")
        if max_turns < 1:
            raise ConfigError(f"max_turns {max_turns}; it must be at least 1")
        self.source, self.levels, self.only = str(source), tuple(levels), tuple(apps)
        self.actions, self.max_turns = actions, max_turns
        if self.source != "apps" and not Path(self.source).is_dir():
            raise MissingFile(
                f"{source} is no directory; write problems with `codechat data apps --out {source}`, or leave --data-dir out"
            )

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems. Without a limit: DEFAULT_LIMIT generated ones, or all of the file."""
        if self.source == "apps":
            n = DEFAULT_LIMIT if limit is None else limit
            return generator.problems(split, n, seed, self.levels, self.actions, self.only)
        check_split(split)
        path = Path(self.source) / f"apps.{split}.jsonl"
        if not path.is_file():
            raise MissingFile(f"{path} does not exist; write it with `codechat data apps --out {self.source}`")
        rows = (_problem(row, f"{path}:{number}") for number, row in read_jsonl(path))
        rows = (p for p in rows if p.meta["level"] in self.levels and p.meta["actions"] == self.actions)
        return shuffled(rows, limit, seed)

    def environment(self) -> AppsEnvironment:
        return AppsEnvironment(self.actions)

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


def _problem(row: dict[str, object], where: str) -> Problem:
    try:
        return problem_of(row, gold=("world", "calls", "changes"), meta=("level", "tools", "actions"))
    except DataError as error:
        raise DataError(f"{where}: {error} with `codechat data apps`") from None
