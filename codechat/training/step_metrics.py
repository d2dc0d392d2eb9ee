"""Metrics of one step of reinforcement learning: measured while it learns (`Meter`), and
combined over ranks.

Metrics of a batch, over all ranks:

reward_mean, reward_std    over all completions; the task's own reward, without penalties
exact_match, tier/*        shares of completions; reward/*: mean of each term of the reward
frac_zero_std_groups       share of groups whose rewards are all equal; effective_groups: how
many differ completion_tokens_mean     tokens that the policy wrote, per completion
truncated_frac             share of completions that were cut off within an answer
entropy                    nats per token: mean -log p of the sampled tokens under the
sampler"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.rl.advantages import equal_groups
from codechat.rl.rollout import RolloutBatch

MAXIMA = ("logprob_mismatch", "ratio_max")
# measures of loops that clip ratios
CLIPPING = (
    "clipped_low",
    "clipped_high",
    "kl_old",
    "ratio_max",
)


class Meter:
    """Sums and maxima over the microbatches of one step, and the seconds of its phases."""

    def __init__(self, measures: Sequence[str] = ()) -> None:
        """measures: the names that `add` will get, so that every rank logs the same ones, even
        if it had nothing to learn from."""
        self.sums = Counter(
            {name: 0.0 for name in ("tokens", "policy_loss", *measures) if name not in MAXIMA}
        )
        self.maxima = {name: 0.0 for name in ("logprob_mismatch", *measures) if name in MAXIMA}
        self.updates = 0
        self.unread: list[tuple[str, Tensor | float]] = []
        self.trained = 0  # tokens that went through a forward and a backward pass, prompts included
        self.began = time.perf_counter()
        self.sampled = self.began

    def begin_learning(self, model: nn.Module) -> None:
        """Sampling ends here. Remembers the weights, for `read_changed`."""
        self.sampled = time.perf_counter()
        self.model = model
        self.before = diagnose.bf16_snapshot(model)

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Values of a microbatch: maxima for the names in MAXIMA, else sums."""
        # tensors stay on the device until `read`: reading each would make the host wait for the
        # GPU
        self.unread += values.items()

    def read(self, *more: Tensor) -> list[float]:
        """Copy the values of all microbatches from the device at once: the host waits for a GPU
        once a step. more: further scalars to copy; returns their values."""
        unread = self.unread
        self.unread = []
        tensors = [value for _, value in unread if isinstance(value, Tensor)] + [*more]
        values = iter(
            torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else []
        )
        for name, given in unread:
            value = next(values) if isinstance(given, Tensor) else float(given)
            if name in self.maxima:
                # NaN where either is
                self.maxima[name] = float(np.maximum(self.maxima[name], value))
            else:
                self.sums.update({name: value})
        return [*values]

    def read_changed(self) -> float:
        """`read`; returns the share of weights that learning changed in bfloat16. A collective."""
        differ, n_weights = diagnose.count_changed_bf16(self.before, self.model)
        (changed,) = self.read(differ)
        return diagnose.share_of_all(changed, n_weights, self.model)


class Mean(NamedTuple):
    """This rank's part of a mean over the items of all ranks."""

    total: float
    items: float


Means = Mapping[str, Mean]
Values = Mapping[str, float]


@dataclass(frozen=True)
class StepMetrics:
    """This rank's part of the metrics of a step. Every rank has the same names and equally many
    groups."""

    rewards: Tensor  # (P, G) float64
    means: Means
    sums: Values
    maxima: Values


def rollout_metrics(
    batch: RolloutBatch,
    tiers: Sequence[str],
    *,
    means: Means = {},
    sums: Values = {},
    maxima: Values = {},
) -> dict[str, float]:
    """Metrics of the batch that all ranks train on, with a loop's own. maxima: NaN if any is. A
    collective."""
    # 0 where an environment spoke
    nats = -math.fsum(x for c in batch.completions for x in c.logprobs)
    shares = dict(
        exact_match=float(batch.correct.double().mean()),
        completion_tokens_mean=batch.n_tokens / len(batch.completions),
        truncated_frac=float(batch.cut_off().double().mean()),
        **batch.tier_shares(tiers),
    )
    of_batch = {name: Mean(value, 1) for name, value in shares.items()}
    of_batch["entropy"] = Mean(nats, batch.n_tokens)
    mine = StepMetrics(batch.rewards.double(), of_batch | dict(means), sums, maxima)
    return combine_ranks(dist.gather(mine))


def combine_ranks(ranks: Sequence[StepMetrics]) -> dict[str, float]:
    """Metrics over all ranks: sums are added, means weighted by their items, maxima NaN if any
    is."""
    first = ranks[0]
    rewards = torch.cat([rank.rewards for rank in ranks])
    equal = equal_groups([rank.rewards for rank in ranks])
    row = dict(
        reward_mean=float(rewards.mean()),
        reward_std=math.sqrt(rewards.var(correction=0)),
        frac_zero_std_groups=int(equal.sum()) / len(equal),
        effective_groups=float((~equal).sum()),
    )
    for name in first.sums:
        row[name] = sum(rank.sums[name] for rank in ranks)
    for name in first.maxima:
        row[name] = float(np.max([rank.maxima[name] for rank in ranks]))  # NaN where any is
    for name in first.means:
        total = sum(rank.means[name].total for rank in ranks)
        row[name] = total / max(1.0, sum(rank.means[name].items for rank in ranks))
    return row
