"""Rollouts of a step: sampled when they are needed, or one batch ahead by a server; code is judged beside sampling.

    batch = sample(at, n, seed, key=first)     # waits for what was begun, else samples now
    sample.ahead(step + 1, at_next, first)     # with --sample-ahead: the server draws the next batch while this process learns

With --sample-ahead the batch of step s + 1 is drawn from the weights before update s, so it is one step off-policy (arXiv:2410.18252). Nothing of it
is a collective until it is taken: the order of collectives stays that of one thread.

Left out: batches further ahead, and rollouts that continue under newer weights.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.models import packed_attention
from codechat.models.gpt import GPT
from codechat.rl import episodes, rollout
from codechat.rl.engines import Engine
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


def step_seed(cfg: Any, step: int) -> int:
    """Seed of a step's draws; 0 and 1 above cfg.seed are taken by new weights and the diagnosis."""
    return cfg.seed * 1_000_003 + step + 2


class Wish(NamedTuple):
    """n problems from number `at` on, wrapping around. key: the first group's number within its step over all ranks."""

    at: int
    n: int
    seed: int
    key: int
    group_size: int


def spread_strata(task: Task, problems: Sequence[Problem]) -> list[Problem]:
    """The problems in an order of which every part has the strata in their shares, to within one problem; ConfigError where the task has none."""
    by, members = getattr(task, "grouped_by", ""), dict[str, list[Problem]]()
    for problem in problems if by else ():
        members.setdefault(str(problem.meta.get(by)), []).append(problem)
    if len(members) < 2:
        raise ConfigError(
            f"strata true, but the training problems of task {task.name} have {len(members)} strata; at least 2 are required; leave out --strata"
        )
    places = [((i + 0.5) / len(own), problem) for own in members.values() for i, problem in enumerate(own)]
    return [problem for _, problem in sorted(places, key=lambda place: place[0])]


class Solved:
    """Kinds of problems whose last group was all correct, on whatever rank: such a group has no gradient. With probability 1 - share such a problem
    is replaced by one that is of no solved kind: of its stratum, or of any where the whole stratum is solved.

    A kind is what a task counts as one, such as the requests of one stratum for one tool; else a problem. A function of the seed, the place and
    the groups before, so a resumed run draws the same."""

    def __init__(self, task: Task, problems: Sequence[Problem], seed: int, share: float) -> None:
        keys = [getattr(task, name, "") for name in ("grouped_by", "clustered_by")]
        named = [tuple(str(p.meta.get(key) or "") if key else "" for key in keys) for p in problems]
        self.strata = [stratum for stratum, _ in named]
        self.kinds = {p.id: "/".join(n) if any(n) else p.id for p, n in zip(problems, named, strict=True)}
        self.ids, self.seed, self.share = [p.id for p in problems], seed, share
        self.solved: set[str] = set()

    def update(self, batch: RolloutBatch) -> None:
        """A collective."""
        own = [(self.kinds[p.id], bool(right)) for p, right in zip(batch.problems, batch.correct.all(1), strict=True)]
        for kind, right in (row for rows in dist.all_gather_objects(own) for row in rows):
            (self.solved.add if right else self.solved.discard)(kind)

    def number(self, place: int) -> int:
        """The number of the problem that is drawn for a place."""
        n, rng = len(self.ids), random.Random(f"solved {self.seed} {place}")
        if not self._is_solved(place % n) or rng.random() < self.share:
            return place % n
        start, stratum = rng.randrange(n), self.strata[place % n]
        unsolved = [i for i in (*range(start, n), *range(start)) if not self._is_solved(i)]
        return next((i for i in unsolved if self.strata[i] == stratum), unsolved[0] if unsolved else place % n)

    def _is_solved(self, number: int) -> bool:
        return self.kinds[self.ids[number]] in self.solved

    def state(self) -> list[str]:
        return sorted(self.solved)

    def load_state(self, state: Sequence[str]) -> None:
        self.solved = set(state)


class RolloutSampler:
    """Samples and scores groups of a task's problems. `key` and the seed decide the draws, so a resumed run and another number of ranks draw the same.

    at_once: problems that are sampled together; none = all. solved_share: below 1, kinds of problems whose last group was all correct are drawn
    less (`Solved`)."""

    def __init__(
        self,
        cfg: Any,
        engine: Engine,
        model: GPT,
        task: Task,
        problems: list[Problem],
        tok: Tokenizer,
        at_once: int | None = None,
        solved_share: float = 1.0,
    ) -> None:
        self.cfg, self.engine, self.model, self.task = cfg, engine, model, task
        self.problems, self.tok, self.at_once = problems, tok, at_once
        self.solved = Solved(task, problems, cfg.seed, solved_share) if solved_share < 1 else None
        self._begun: tuple[Wish, int | None, Future[RolloutBatch]] | None = None

    def __call__(self, at: int, n: int, seed: int, key: int = 0, group_size: int | None = None) -> RolloutBatch:
        """A batch, begun earlier or sampled now. A collective."""
        wish = Wish(at, n, seed, key, group_size or self.cfg.group_size)
        begun, self._begun = self._begun, None
        with self.engine.policy(self.model) as policy:  # once, however many parts a rank samples
            if begun is None:
                batch = self._draw(policy, wish)
            else:
                what, self.engine.sampled_from, later = begun
                assert what == wish, f"{what} was begun, {wish} is requested"
                batch = later.result()
        if self.solved:
            self.solved.update(batch)
        return replace(batch, longest_row=self.longest_row)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of a training row with the longest prompt and completion. 0 on a CPU, whose rows need no common shape, and for episodes, which
        are as long as they become."""
        if packed_attention.dense(dist.device()) or episodes.made_by(self.task):
            return 0
        prompts = (chat.prompt(self.task.prompt(p), self.tok, self.cfg.tags) for p in self.problems)
        return min(max(map(len, prompts)) - 1 + self.cfg.max_new_tokens, self.model.cfg.block_size)

    def ahead(self, step: int, at: int, key: int) -> None:
        """Begin the batch of `step`, the next one, where the run samples ahead. A collective."""
        if not self.cfg.sample_ahead or step >= self.cfg.max_steps:
            return
        self.engine.push(self.model, step - 1, learned_at=step)
        wish = Wish(at, self.cfg.problems_per_rank, step_seed(self.cfg, step), key, self.cfg.group_size)
        batch: Future[RolloutBatch] = Future()
        self._begun = wish, self.engine.step, batch

        def draw() -> None:
            try:
                batch.set_result(self._draw(self.model, wish))
            except BaseException as error:  # whatever it is, the loop's own thread raises it
                batch.set_exception(error)

        threading.Thread(target=draw, name="sampling ahead", daemon=True).start()

    def _draw(self, policy: GPT, wish: Wish) -> RolloutBatch:
        """No collective. Where the task judges in other processes, it judges one part while the next one is sampled."""
        part = self.at_once or max(wish.n, 1)
        parts = [range(first, min(first + part, wish.n)) for first in range(0, max(wish.n, 1), part)]
        drawn = (self._sampled(policy, wish, numbers) for numbers in parts)
        if len(parts) == 1 or not hasattr(self.task, "scores"):
            return rollout.join([rollout.judged(self.task, d) for d in drawn])
        with ThreadPoolExecutor(1, "judging") as judging:
            waiting = [judging.submit(rollout.judged, self.task, d) for d in drawn]
            return rollout.join([batch.result() for batch in waiting])

    def _number(self, place: int) -> int:
        return self.solved.number(place) if self.solved else place % len(self.problems)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps for a resumed run to draw the same problems."""
        return {"solved": self.solved.state()} if self.solved else {}

    def load_state(self, extra: dict[str, Any]) -> None:
        if self.solved:
            self.solved.load_state(extra["solved"])

    def _sampled(self, policy: GPT, wish: Wish, numbers: Sequence[int]) -> rollout.Drawn:
        cfg = self.cfg
        return rollout.draw(
            policy,
            self.task,
            [self.problems[self._number(wish.at + i)] for i in numbers],
            self.tok,
            cfg.tags,
            group_size=wish.group_size,
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            seed=wish.seed,
            keys=[wish.key + i for i in numbers],
            sampler=self.engine.sample,
        )
