"""What a loop measures within a step, and how fast it is. `rl.rollout_metrics` defines the metrics of rollouts, `runs.metrics` names and units."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from codechat.core.errors import RunError
from codechat.distributed import dist, hardware
from codechat.evaluation import diagnose
from codechat.rl.rollout import RolloutBatch
from codechat.rl.rollout_metrics import Pairs, rollout_metrics
from codechat.tasks.base import Task

RATIOS = ("clipped_low", "clipped_high", "kl_old")


class Meter:
    """Sums and maxima over the microbatches of one step, and where its time goes."""

    def __init__(self, *sums: str, ratios: bool = False) -> None:
        """sums: what `add` will be given, beside tokens; ratios: the loop clips ratios. Every rank logs the same names, also where it had nothing to do."""
        self.sums: Counter[str] = Counter(dict.fromkeys(("tokens", *sums, *(RATIOS if ratios else ())), 0.0))
        self.maxima = {"logprob_mismatch": 0.0} | ({"ratio_max": 0.0} if ratios else {})
        self.policy_loss = 0.0  # microbatches add up, each divided by the counts of its whole update
        self.updates = 0  # counted by loops that make several in a step: what is logged is their mean loss
        self.unread: list[tuple[str, Tensor | float]] = []  # what `read` will note, in order
        self.trained = 0  # tokens that went through a forward and a backward pass, prompts included
        self.began = self.sampled = time.perf_counter()

    def rolled_out(self, model: nn.Module) -> None:
        """Sampling ends here and learning begins, with the weights as they are."""
        self.sampled = time.perf_counter()
        self.model, self.before = model, diagnose.bf16_snapshot(model)

    def loss(self, loss: Tensor, trained: int) -> None:
        self.add(policy_loss=loss.detach())
        self.trained += trained

    def add(self, **values: Tensor | float) -> None:
        """Values of a microbatch: sums, or maxima where `maxima` has the name."""
        self.unread += values.items()

    def read(self, *more: Tensor) -> list[float]:
        """Note what the microbatches left on the device, in one copy: the host waits for a GPU once a step. Returns the values of `more`, scalars
        that come with it."""
        unread, self.unread = self.unread, []
        tensors = [value for _, value in unread if isinstance(value, Tensor)] + [*more]
        found = torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else []
        values = iter(found)
        for name, given in unread:
            value = next(values) if isinstance(given, Tensor) else float(given)
            if name in self.maxima:
                # NaN where either is, which `max` may drop
                self.maxima[name] = float(np.maximum(self.maxima[name], value))
            elif name == "policy_loss":
                self.policy_loss += value
            else:
                self.sums.update({name: value})
        return [*values]

    def gap(self, logprobs: Tensor, sampled: Tensor, on: Tensor) -> None:
        """logprob_mismatch: largest difference between the trainer's and the sampler's log-probabilities where `on`."""
        self.add(logprob_mismatch=torch.where(on, logprobs.detach() - sampled, 0.0).abs().max())

    def row(
        self,
        cfg: Any,
        batch: RolloutBatch,
        task: Task,
        rewards: Tensor | None = None,
        *,
        ratios: Pairs = {},
        **means: float,
    ) -> dict[str, float]:
        """The step's metrics over all ranks; rewards, ratios and means as `rollout_metrics` takes them. A collective."""
        differ, n_weights = diagnose.count_changed_bf16(self.before, self.model)
        (changed,) = self.read(differ)
        peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())
        mfu = batch.flops(cfg.model, self.trained) / (self.seconds() * peak)
        tokens = self.sums["tokens"]
        row = rollout_metrics(
            batch,
            task.tiers,
            rewards=rewards,
            means={**means, "mfu": mfu},
            sums={"policy_loss": self.policy_loss / max(1, self.updates)},
            maxima=self.maxima,
            ratios={**ratios, **{name: (value, tokens) for name, value in self.sums.items() if name != "tokens"}},
        )
        row["weights_changed_bf16"] = diagnose.share_of_all(changed, n_weights, self.model)
        if "kl_old" in row:
            row["approx_kl"] = row.pop("kl_old")
            row["clip_frac"] = row["clipped_low"] + row["clipped_high"]
        return row

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
