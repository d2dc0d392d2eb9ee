"""The metrics of a step, each defined once, over all ranks. Names and units are declared in `runs.metrics`."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from torch import Tensor

from codechat.core.errors import RunError
from codechat.distributed import dist, hardware
from codechat.rl import advantages
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Task

RATIOS = ("clipped_low", "clipped_high", "kl_old")


class Meter:
    """Sums and maxima over the microbatches of one step, and where its time goes."""

    def __init__(self, *sums: str, ratios: bool = False) -> None:
        """sums: what `add` will be given, beside tokens; ratios: the loop clips ratios. Every rank logs the same names, also where it had nothing to do."""
        self.sums: Counter[str] = Counter(dict.fromkeys(("tokens", *sums, *(RATIOS if ratios else ())), 0.0))
        self.maxima = {"logprob_mismatch": 0.0} | ({"ratio_max": 0.0} if ratios else {})
        self.policy_loss = 0.0  # of the step: microbatches add up, each divided by the counts of the whole step
        self.trained = 0  # tokens that went through a forward and a backward pass, prompts included
        self.began = self.sampled = time.perf_counter()

    def rolled_out(self) -> None:
        """Sampling ends here and learning begins."""
        self.sampled = time.perf_counter()

    def loss(self, loss: Tensor, trained: int) -> None:
        self.policy_loss += loss.item()
        self.trained += trained

    def add(self, **values: Tensor | float) -> None:
        self.sums.update({name: float(value) for name, value in values.items()})

    def peak(self, name: str, value: Tensor | float) -> None:
        self.maxima[name] = max(self.maxima[name], float(value))

    def clipped(self, ratio_max: Tensor, **sums: Tensor) -> None:
        """What `losses.clipped_policy_loss` says of a microbatch."""
        self.peak("ratio_max", ratio_max)
        self.add(**sums)

    def gap(self, logprobs: Tensor, sampled: Tensor, on: Tensor) -> None:
        """logprob_mismatch: largest difference between the trainer's and the sampler's log-probabilities where `on`."""
        found = (logprobs.detach() - sampled)[on].abs()
        self.peak("logprob_mismatch", found.max() if len(found) else 0.0)

    def row(
        self, cfg: Any, batch: RolloutBatch, task: Task, rewards: Tensor | None = None, **means: float
    ) -> dict[str, float]:
        """The step's metrics over all ranks. rewards: as `rollout_means` takes them. means: more values to average over ranks. A collective."""
        seconds = time.perf_counter() - self.began
        peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())
        own = dict(
            policy_loss=dist.world_size() * self.policy_loss,
            mfu=batch.flops(cfg.model, self.trained) / (seconds * peak),
        )
        found = over_ranks({**rollout_means(batch, task, rewards), **own, **self.maxima, **means}, self.sums)
        if "kl_old" in found:
            found["approx_kl"] = found.pop("kl_old")
            found["clip_frac"] = found["clipped_low"] + found["clipped_high"]
        return found

    def seconds(self) -> float:
        """Since the step began."""
        return time.perf_counter() - self.began

    def rates(self, n_tokens: float) -> dict[str, float]:
        """Seconds of the step's parts, and completion tokens of all ranks per second."""
        now = time.perf_counter()
        return dict(
            sample_s=self.sampled - self.began,
            train_s=now - self.sampled,
            step_s=now - self.began,
            tok_per_s=n_tokens / (now - self.began),
        )


class Pace:
    """Tokens per second and MFU between logged steps; evaluations do not count."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        self.began, self.step = time.perf_counter(), step

    def rates(self, step: int, tokens_per_step: int, flops_per_token: float = 0.0) -> dict[str, float]:
        """tok_per_s of all ranks since the last restart, with mfu where FLOPs are given; restarts."""
        rate = tokens_per_step * (step - self.step) / (time.perf_counter() - self.began)
        self.restart(step)
        if not flops_per_token:
            return dict(tok_per_s=rate)
        peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())
        return dict(tok_per_s=rate, mfu=rate * flops_per_token / (peak * dist.world_size()))


def check_finite(step: int, **values: float) -> None:
    """RunError for a metric that is not finite: the run ends before it is saved."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise RunError(f"{name} is {value} at step {step}; lower --lr or --muon-lr; the last checkpoint is kept")


def over_ranks(means: dict[str, float], sums: Counter[str] | dict[str, float], per: str = "tokens") -> dict[str, float]:
    """One row for all ranks: the mean of each of `means`, and the sum of each of `sums` over that named `per`, which itself is left out.

    A collective: every rank passes the same names."""
    row = dist.mean({**means, **{f"sum/{name}": value for name, value in sums.items()}})
    count = max(1.0, row.pop(f"sum/{per}", 0.0))
    return {
        name.removeprefix("sum/"): value / count if name.startswith("sum/") else value for name, value in row.items()
    }


def silent(batch: RolloutBatch, rewards: Tensor | None = None) -> Tensor:
    """(P,) bool: groups that carry no gradient, all of whose rewards are equal. Where groups are of one, the batch is a group.

    rewards (P, G): what advantages are made of, where that is not the task's reward alone."""
    paid = batch.rewards if rewards is None else rewards
    return advantages.zero_variance(paid if batch.group_size > 1 else paid.T)


def rollout_means(batch: RolloutBatch, task: Task, rewards: Tensor | None = None) -> dict[str, float]:
    """What is logged of the rollouts that are trained on: means of this rank's batch, to be averaged over ranks of equal batches.

    entropy: the mean of -log p over the tokens that the policy wrote, p under the sampler: an unbiased estimate of the entropy of its
    distribution over all completions, in nats. The task's reward is logged, also where advantages are made of another."""
    flat = silent(batch, rewards)
    return dict(
        reward_mean=float(batch.rewards.double().mean()),
        reward_std=float(batch.rewards.double().std(correction=0)),
        exact_match=float(batch.correct.double().mean()),
        frac_zero_std_groups=int(flat.sum()) / len(flat),
        effective_groups=dist.world_size() * float((~flat).sum()),
        completion_tokens_mean=batch.n_tokens / len(batch.completions),
        truncated_frac=batch.truncated_frac,
        entropy=-float(batch.logprobs().double().sum()) / max(1, batch.n_tokens),
        **batch.tier_shares(task.tiers),
    )
