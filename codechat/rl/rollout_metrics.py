"""What a loop logs of the rollouts that it trains on: one definition of each metric, over all ranks.

reward_mean, reward_std    over all completions; the task's own reward, without penalties
exact_match, tier/*        shares of completions; reward/*: mean of each term of the reward
frac_zero_std_groups       share of groups whose rewards are all equal; effective_groups: how many differ
completion_tokens_mean     tokens that the policy wrote, per completion
truncated_frac             share of completions that were cut off within an answer
entropy                    nats per token: mean -log p of the sampled tokens under the sampler
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from codechat.distributed import dist
from codechat.rl.advantages import zero_variance
from codechat.rl.rollout import RolloutBatch

Values = Mapping[str, float]
Pairs = Mapping[str, tuple[float, float]]


class RankMetrics(NamedTuple):
    """Rewards (P, G) of one rank, and values by the rule that combines ranks. means: (sum, count) of items. sums: added.
    maxima: the largest, NaN if any is."""

    rewards: Tensor
    means: Pairs
    sums: Values = {}
    maxima: Values = {}


def rollout_metrics(
    batch: RolloutBatch, tiers: Sequence[str], *, means: Pairs = {}, sums: Values = {}, maxima: Values = {}
) -> dict[str, float]:
    """Metrics of the batch that all ranks train on, and the loop's own values. A collective; every rank passes the same
    names and equally many groups."""
    nats = -math.fsum(x for c in batch.completions for x in c.logprobs)  # 0 where an environment spoke
    mine = dict(
        exact_match=float(batch.correct.double().mean()),
        completion_tokens_mean=batch.n_tokens / len(batch.completions),
        truncated_frac=float(batch.cut_off().double().mean()),
        **batch.tier_shares(tiers),
    )
    means = {name: (value, 1) for name, value in mine.items()} | {"entropy": (nats, batch.n_tokens)} | dict(means)
    return combine_ranks(dist.gather(RankMetrics(batch.rewards.double(), means, sums, maxima)))


def combine_ranks(ranks: Sequence[RankMetrics]) -> dict[str, float]:
    """One value of each name, from the values of every rank."""
    rewards, means, sums, maxima = zip(*ranks)
    every = torch.cat(rewards)
    equal = equal_groups(rewards)
    row = dict(reward_mean=float(every.mean()), reward_std=math.sqrt(every.var(correction=0)))
    row |= dict(frac_zero_std_groups=int(equal.sum()) / len(equal), effective_groups=float((~equal).sum()))
    row |= {name: sum(r[name] for r in sums) for name in sums[0]}
    row |= {name: float(torch.tensor([r[name] for r in maxima], dtype=torch.float64).max()) for name in maxima[0]}
    for name in means[0]:
        total, count = (sum(part) for part in zip(*(r[name] for r in means)))
        row[name] = total / max(1.0, count)
    return row


def equal_groups(ranks: Sequence[Tensor]) -> Tensor:
    """bool: of each group of all ranks, whether its rewards are all equal. Groups of one completion are one group."""
    rewards = torch.cat(list(ranks))
    return zero_variance(rewards if rewards.shape[1] > 1 else rewards.T)


def live_completions(rewards: Tensor) -> Tensor:
    """(P, G) bool, all equal: whether rewards differ within any group of any rank. A collective."""
    return torch.full(rewards.shape, not bool(equal_groups(dist.gather(rewards)).all()))
