"""Rollouts of a step: sampled when they are needed, or one batch ahead by a server; code is judged beside sampling.

    batch = sample(at, n, seed, key=first)     # waits for what was begun, else samples now
    sample.ahead(step + 1, at_next, first)     # with --sample-ahead: the server draws the next batch while this process learns

With --sample-ahead the batch of step s + 1 is drawn from the weights before update s, so it is one step off-policy (arXiv:2410.18252). Nothing of it
is a collective until it is taken: the order of collectives stays that of one thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

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


class RolloutSampler:
    """Samples and scores groups of a task's problems. `key` and the seed decide the draws, so a resumed run and another number of ranks draw the same."""

    def __init__(
        self, cfg: Any, engine: Engine, model: GPT, task: Task, problems: list[Problem], tok: Tokenizer
    ) -> None:
        self.cfg, self.engine, self.model, self.task = cfg, engine, model, task
        self.problems, self.tok = problems, tok
        self.at_once = cfg.device_batch_size if cfg.grad_accum > 1 else None  # problems sampled together; none = all
        self._background = ThreadPoolExecutor(1, "sampling ahead")
        self._begun: tuple[int | None, Future[RolloutBatch]] | None = None

    def __call__(self, at: int, n: int, seed: int, key: int = 0, group_size: int | None = None) -> RolloutBatch:
        """A batch, begun earlier or sampled now: n problems from number `at` on, wrapping around. key: the first group's number within its step
        over all ranks. A collective."""
        begun, self._begun = self._begun, None
        with self.engine.policy(self.model) as policy:  # once, however many parts a rank samples
            if begun is None:
                batch = self._draw(policy, at, n, seed, key, group_size or self.cfg.group_size)
            else:
                self.engine.sampled_from, later = begun
                batch = later.result()
        return replace(batch, longest_row=self.longest_row)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of a training row with the longest prompt and completion. 0 on a CPU, whose rows need no common shape, and for episodes, which
        are as long as they become."""
        if packed_attention.dense(dist.device()) or episodes.has_environment(self.task):
            return 0
        prompts = (chat.prompt(self.task.prompt(p), self.tok, self.cfg.tags) for p in self.problems)
        return min(max(map(len, prompts)) - 1 + self.cfg.max_new_tokens, self.model.cfg.block_size)

    def ahead(self, step: int, at: int, key: int) -> None:
        """Begin the batch of `step`, the next one, where the run samples ahead. A collective."""
        if not self.cfg.sample_ahead or step >= self.cfg.max_steps:
            return
        self.engine.push(self.model, step - 1, learned_at=step)
        request = (at, self.cfg.problems_per_rank, step_seed(self.cfg, step), key, self.cfg.group_size)
        self._begun = self.engine.step, self._background.submit(self._draw, self.model, *request)

    def _draw(self, policy: GPT, at: int, n: int, seed: int, key: int, group_size: int) -> RolloutBatch:
        """No collective. Where the task judges in other processes, it judges one part while the next one is sampled."""
        how = {name: getattr(self.cfg, name) for name in ("max_new_tokens", "temperature", "top_k")} | {"seed": seed}
        how |= dict(group_size=group_size, sampler=self.engine.sample)

        def sample(numbers: range) -> RolloutBatch:
            problems = [self.problems[(at + i) % len(self.problems)] for i in numbers]
            keys = [key + i for i in numbers]
            return rollout.draw(policy, self.task, problems, self.tok, self.cfg.tags, keys=keys, **how)

        part = self.at_once or max(n, 1)
        drawn = (sample(range(first, min(first + part, n))) for first in range(0, max(n, 1), part))
        if n <= part or not hasattr(self.task, "scores"):
            return rollout.join([rollout.judged(self.task, batch) for batch in drawn])
        with ThreadPoolExecutor(1, "judging") as judging:
            waiting = [judging.submit(rollout.judged, self.task, batch) for batch in drawn]
            return rollout.join([batch.result() for batch in waiting])
