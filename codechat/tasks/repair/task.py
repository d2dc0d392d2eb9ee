"""The repair task on generated repositories. `swebench` has the real rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from codechat.core.errors import ConfigError
from codechat.tasks.base import Message, Problem, Score, check_levels
from codechat.tasks.coding.task import pool_of
from codechat.tasks.preparation import GeneratedTask
from codechat.tasks.repair import generator, scoring
from codechat.tasks.repair.environment import RepairEnvironment


class RepairTask(GeneratedTask):
    """source: None generates problems; a directory has them in repair.SPLIT.jsonl. levels: of the problems; a repeated level is sampled more often.
    actions: "edits" (one answer with search/replace blocks or a unified diff) or "tools" (episodes). max_turns: most answers of an episode.
    timeout_s: wall seconds of each test. isolation: see `Pool`.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name, tiers, max_reward = "repair", scoring.TIERS, 1.0
    gold_fields = ("files", "imports", "tests", "FAIL_TO_PASS", "PASS_TO_PASS", "fix")
    meta_fields = ("level", "actions")

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = generator.LEVELS,
        actions: str = "edits",
        max_turns: int = 6,
        timeout_s: float = 3.0,
        isolation: str = "auto",
    ) -> None:
        check_levels(levels, generator.LEVELS)
        if actions not in generator.ACTIONS:
            raise ConfigError(f"actions {actions!r}; required: {' or '.join(generator.ACTIONS)}")
        if max_turns < 1:
            raise ConfigError(f"max_turns {max_turns}; it must be at least 1")
        self.source, self.levels, self.actions = source, tuple(levels), actions
        self.max_turns, self.timeout_s, self.isolation = max_turns, float(timeout_s), isolation
        if actions == "tools":  # what has environments is played as episodes
            self.environment = lambda: RepairEnvironment(self.timeout_s, self.isolation)

    def generate(self, split: str, n: int, seed: int) -> list[Problem]:
        return generator.problems(split, n, seed, self.levels, self.actions)

    def keeps(self, problem: Problem) -> bool:
        return super().keeps(problem) and problem.meta["actions"] == self.actions

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        """The expert's block, or the expert's calls in one answer."""
        return "\n".join(generator.gold_steps(problem))

    def score(self, problem: Problem, completion: str) -> Score:
        """The score of one answer; with tools, of an episode of this one."""
        return next(self.scores([(problem, completion)]))

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        """Scores in the order of the pairs, judged in parallel. Equal repositories run once."""
        if self.actions == "tools":
            yield from (self._played(problem, text) for problem, text in pairs)
            return
        read = [scoring.read(problem, text) for problem, text in pairs]
        keys = [(p.id, repr(sorted(files.items()))) if files else None for (p, _), (files, _) in zip(pairs, read)]
        programs = {
            key: scoring.program(problem, files, self.timeout_s)
            for (problem, _), (files, _), key in zip(pairs, read, keys)
            if files and key
        }
        verdicts = dict(zip(programs, pool_of(self.isolation).map(programs.values()))) if programs else {}
        for (problem, _), (_, score), key in zip(pairs, read, keys):
            yield scoring.of_verdict(problem, verdicts[key]) if key else score

    def _played(self, problem: Problem, text: str) -> Score:
        world = RepairEnvironment(self.timeout_s, self.isolation)
        world.reset(problem)
        world.step({"role": "assistant", "content": text})
        return world.score()
