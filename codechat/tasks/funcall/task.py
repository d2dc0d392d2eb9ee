"""Function calling: one request, the tools on offer, one call, graded by the staircase.

Problems come from the toolbox (generated, any number) or from a file (`sources`). The same `score_call` gives the
training reward and the exact match of evaluation.

Left out: problems that need several calls. The staircase grades the first call, and further ones cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import codechat.tasks.funcall.sources as sources
from codechat.core import config
from codechat.core.errors import ConfigError, nearest
from codechat.data.sources import Ledger
from codechat.tasks.base import Message, Problem, Score, check_split, shuffled
from codechat.tasks.funcall.staircase import NAMED, STAIRCASES, TIERS, Staircase, score_call
from codechat.tasks.toolbox import problems
from codechat.text import chat

DEFAULT_LIMIT = 500
NO_CALL = "I have no function for that."


class FuncallTask:
    """source: "toolbox", or a file for `sources.read` (MissingFile, DataError). staircase: the reward's values, a name of
    STAIRCASES. weights: a staircase of one's own, or changes to that one.

    shares: strata of the toolbox's problems (`problems.SHARES`; none = those of the split). tools_style: how prompts list
    the tools of a file. ledger: counts of a file's rows, or None."""

    name = "funcall"
    tiers = TIERS
    grouped_by = "stratum"  # the key of a problem's meta by which evaluations group scores
    clustered_by = "tool"  # the key of a problem's meta whose values name what is not independent
    classified_by, classes = "named", NAMED  # the key of a score's parts whose values evaluations count

    def __init__(
        self,
        source: str | Path = "toolbox",
        weights: Staircase | Mapping[str, Any] | None = None,
        shares: Mapping[str, float] | None = None,
        tools_style: str = "compact",
        staircase: str = "ours",
    ) -> None:
        if staircase not in STAIRCASES:
            raise ConfigError(
                f"staircase {staircase!r}; required: one of {', '.join(STAIRCASES)}{nearest(staircase, STAIRCASES)}"
            )
        own = config.plain(STAIRCASES[staircase])
        given = isinstance(weights, Staircase)
        self.weights = weights if given else config.from_dict(Staircase, own | dict(weights or {}))
        self.max_reward = self.weights.full
        self.shares = shares
        self.ledger: Ledger | None = None
        self._rows: list[Problem] | None = None
        if str(source) != "toolbox":
            self._rows, self.ledger = sources.read(Path(source), tools_style)
            if not any("stratum" in row.meta for row in self._rows):
                self.grouped_by = ""

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. Without a limit: DEFAULT_LIMIT generated ones, or all of a
        file."""
        check_split(split)
        if self._rows is None:
            n = DEFAULT_LIMIT if limit is None else limit
            return shuffled(problems.draw(split, n, seed, shares=self.shares), n, seed)
        return shuffled((p for p in self._rows if p.split == split), limit, seed)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        offered = chat.offered_names("\n".join(m["content"] for m in problem.messages if m["role"] == "system"))
        return score_call(completion, problem.gold, self.weights, offered)

    def gold(self, problem: Problem) -> str:
        """The source's own text of a call, if it has one: the reference-solution check then covers its call format."""
        if problem.gold is None:
            return NO_CALL
        own = problem.meta.get("gold_text")
        return own or chat.format_call(problem.gold["name"], problem.gold["arguments"])
