"""What a loop logs of the rollouts that it trains on: one definition of each metric, global over ranks.

reward_mean, reward_std    over all completions; the task's own reward, without penalties
exact_match, tier/*        shares of completions; reward/*: mean of each term of the reward
frac_zero_std_groups       share of groups whose rewards are all equal
effective_groups           how many groups differ, on all ranks
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
    """Values of one rank, by the rule that combines ranks.

    means: over equally many items on each rank. sums: added. maxima: the largest, NaN if any is. ratios: (sum, count),
    the sum of sums over the sum of counts, at least 1. stds: (mean, variance) of equally many items. ends: least and
    greatest reward where groups have one completion: these are one group of all ranks."""

    means: Values = {}
    sums: Values = {}
    maxima: Values = {}
    ratios: Pairs = {}
    stds: Pairs = {}
    ends: tuple[float, ...] = ()


def rollout_metrics(
    batch: RolloutBatch,
    tiers: Sequence[str],
    *,
    rewards: Tensor | None = None,
    means: Values = {},
    sums: Values = {},
    maxima: Values = {},
    ratios: Pairs = {},
) -> dict[str, float]:
    """Metrics of the batch that all ranks train on, and the loop's own values, see `RankMetrics`. A collective; every
    rank passes the same names and equally many groups.

    rewards (P, G): what advantages are made of, where that is not `batch.rewards` (PPO's penalty); it decides which
    groups differ."""
    mine = rank_metrics(batch, tiers, rewards)
    added = mine._replace(
        means={**mine.means, **means}, sums={**mine.sums, **sums}, maxima=maxima, ratios={**mine.ratios, **ratios}
    )
    return combine_ranks(dist.gather(added))


def rank_metrics(batch: RolloutBatch, tiers: Sequence[str], rewards: Tensor | None = None) -> RankMetrics:
    """The metrics of this rank's batch."""
    rewards = batch.rewards if rewards is None else rewards  # (P, G)
    equal = zero_variance(rewards if rewards.shape[1] > 1 else rewards.T)
    logged = batch.rewards.double()
    nats = -math.fsum(x for c in batch.completions for x in c.logprobs)  # 0 where an environment spoke
    return RankMetrics(
        means=dict(
            reward_mean=float(logged.mean()),
            exact_match=float(batch.correct.double().mean()),
            frac_zero_std_groups=int(equal.sum()) / len(equal),
            completion_tokens_mean=batch.n_tokens / len(batch.completions),
            truncated_frac=float(batch.cut_off().double().mean()),
            **batch.tier_shares(tiers),
        ),
        sums=dict(effective_groups=float((~equal).sum())),
        ratios=dict(entropy=(nats, batch.n_tokens)),
        stds=dict(reward_std=(float(logged.mean()), float(logged.var(correction=0)))),
        ends=lone_range(rewards),
    )


def live_completions(rewards: Tensor) -> Tensor:
    """(P, G) bool, all equal: whether rewards (P, G) differ within any group of this rank. Groups of one completion are
    one group of all ranks; a collective there."""
    if rewards.shape[1] > 1:
        differ = bool((~zero_variance(rewards)).any())
    else:
        differ = ranges_differ(dist.gather(lone_range(rewards))) > 0
    return torch.full(rewards.shape, differ)


def lone_range(rewards: Tensor) -> tuple[float, ...]:
    """Least and greatest reward where groups have one completion; nothing elsewhere."""
    return () if rewards.shape[1] > 1 else (float(rewards.min()), float(rewards.max()))


def ranges_differ(ends: Sequence[tuple[float, ...]]) -> float:
    """1 if the rewards of all ranks' lone completions differ, else 0."""
    return float(~zero_variance(torch.tensor(ends, dtype=torch.float64).view(1, -1)))


def combine_ranks(ranks: Sequence[RankMetrics]) -> dict[str, float]:
    """One value of each name, from the values of every rank. Of one rank: its own values, unchanged."""
    first, n = ranks[0], len(ranks)
    row = {name: sum(r.means[name] for r in ranks) / n for name in first.means}
    row |= {name: sum(r.sums[name] for r in ranks) for name in first.sums}
    for name in first.maxima:
        row[name] = float(torch.tensor([r.maxima[name] for r in ranks], dtype=torch.float64).max())
    for name in first.ratios:
        total, count = (sum(part) for part in zip(*(r.ratios[name] for r in ranks)))
        row[name] = total / max(1.0, count)
    for name in first.stds:  # the law of total variance; the second term is exactly 0 of one rank
        means, variances = zip(*(r.stds[name] for r in ranks))
        between = sum(m * m for m in means) / n - (sum(means) / n) * (sum(means) / n)
        row[name] = math.sqrt(sum(variances) / n + max(0.0, between))
    if first.ends:
        live = ranges_differ([r.ends for r in ranks])
        row |= dict(effective_groups=live, frac_zero_std_groups=1.0 - live)
    return row
