"""What a loop measures within a step, and what it logs of the rollouts that it trains on: one definition of each metric, over all ranks.

reward_mean, reward_std    over all completions; the task's own reward, without penalties
exact_match, tier/*        shares of completions; reward/*: mean of each term of the reward
frac_zero_std_groups       share of groups whose rewards are all equal; effective_groups: how many differ
completion_tokens_mean     tokens that the policy wrote, per completion
truncated_frac             share of completions that were cut off within an answer
entropy                    nats per token: mean -log p of the sampled tokens under the sampler
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.rl.advantages import equal_groups
from codechat.rl.rollout import RolloutBatch

MAXIMA = ("logprob_mismatch", "ratio_max")
CLIPPING = ("clipped_low", "clipped_high", "kl_old", "ratio_max")  # measures of loops that clip ratios

Values = Mapping[str, float]
Pairs = Mapping[str, tuple[float, float]]
Rank = tuple[Tensor, Pairs, Values, Values]


class Meter:
    """Sums and maxima over the microbatches of one step, and where its time goes."""

    def __init__(self, measures: Sequence[str] = ()) -> None:
        """measures: what `add` will be given, so that every rank logs the same names, also where it had nothing to do."""
        self.sums = Counter({name: 0.0 for name in ("tokens", "policy_loss", *measures) if name not in MAXIMA})
        self.maxima = {name: 0.0 for name in ("logprob_mismatch", *measures) if name in MAXIMA}
        self.updates = 0
        self.unread: list[tuple[str, Tensor | float]] = []
        self.trained = 0  # tokens that went through a forward and a backward pass, prompts included
        self.began = self.sampled = time.perf_counter()

    def begin_learning(self, model: nn.Module) -> None:
        """Sampling ends here; the weights are as they are before learning."""
        self.sampled = time.perf_counter()
        self.model, self.before = model, diagnose.bf16_snapshot(model)

    def add(self, **values: Tensor | float) -> None:
        """Values of a microbatch: sums, or maxima where `maxima` has the name."""
        self.unread += values.items()

    def read(self, *more: Tensor) -> list[float]:
        """Note what the microbatches left on the device, in one copy: the host waits for a GPU once a step. Returns the values of `more`, scalars
        that come with it."""
        unread, self.unread = self.unread, []
        tensors = [value for _, value in unread if isinstance(value, Tensor)] + [*more]
        values = iter(torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else [])
        for name, given in unread:
            value = next(values) if isinstance(given, Tensor) else float(given)
            if name in self.maxima:
                self.maxima[name] = float(np.maximum(self.maxima[name], value))  # NaN where either is
            else:
                self.sums.update({name: value})
        return [*values]

    def read_changed(self) -> dict[str, float]:
        """`read`, and the share of weights that learning changed in bfloat16. A collective."""
        differ, n_weights = diagnose.count_changed_bf16(self.before, self.model)
        (changed,) = self.read(differ)
        return dict(weights_changed_bf16=diagnose.share_of_all(changed, n_weights, self.model))


def rollout_metrics(
    batch: RolloutBatch, tiers: Sequence[str], *, means: Pairs = {}, sums: Values = {}, maxima: Values = {}
) -> dict[str, float]:
    """Metrics of the batch that all ranks train on, and the loop's own values. means: (sum, count) of items. sums: added. maxima: the largest,
    NaN if any is. A collective; every rank passes the same names and equally many groups."""
    nats = -math.fsum(x for c in batch.completions for x in c.logprobs)  # 0 where an environment spoke
    mine = dict(
        exact_match=float(batch.correct.double().mean()),
        completion_tokens_mean=batch.n_tokens / len(batch.completions),
        truncated_frac=float(batch.cut_off().double().mean()),
        **batch.tier_shares(tiers),
    )
    means = {name: (value, 1) for name, value in mine.items()} | {"entropy": (nats, batch.n_tokens)} | dict(means)
    return combine_ranks(dist.gather((batch.rewards.double(), means, sums, maxima)))


def combine_ranks(ranks: Sequence[Rank]) -> dict[str, float]:
    """One value of each name, from rewards (P, G), means, sums and maxima of every rank."""
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
