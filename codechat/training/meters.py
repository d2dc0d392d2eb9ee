"""What a loop measures within a step. `rl.rollout_metrics` defines the metrics of rollouts, `runs.metrics` names and units."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from codechat.distributed import dist, hardware
from codechat.evaluation import diagnose
from codechat.rl.rollout import RolloutBatch
from codechat.rl.rollout_metrics import rollout_metrics
from codechat.tasks.base import Task

MAXIMA = ("logprob_mismatch", "ratio_max")
CLIPPING = ("clipped_low", "clipped_high", "kl_old", "ratio_max")  # measures of loops that clip ratios


class Meter:
    """Sums and maxima over the microbatches of one step, and where its time goes."""

    def __init__(self, measures: Sequence[str] = ()) -> None:
        """measures: what `add` will be given, so that every rank logs the same names, also where it had nothing to do."""
        self.sums: Counter[str] = Counter({name: 0.0 for name in ("tokens", *measures) if name not in MAXIMA})
        self.maxima = {name: 0.0 for name in ("logprob_mismatch", *measures) if name in MAXIMA}
        self.policy_loss = 0.0  # microbatches add up, each divided by the counts of its whole update
        self.updates = 0  # what is logged is their mean loss
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
            elif name == "policy_loss":
                self.policy_loss += value
            else:
                self.sums.update({name: value})
        return [*values]

    def read_changed(self) -> dict[str, float]:
        """`read`, and the share of weights that learning changed in bfloat16. A collective."""
        differ, n_weights = diagnose.count_changed_bf16(self.before, self.model)
        (changed,) = self.read(differ)
        return dict(weights_changed_bf16=diagnose.share_of_all(changed, n_weights, self.model))

    def row(
        self, cfg: Any, batch: RolloutBatch, task: Task, n_tokens: float, means: Mapping[str, tuple[float, float]]
    ) -> dict[str, float]:
        """The step's metrics over all ranks, whose completions have n_tokens; means as `rollout_metrics` takes them. A collective."""
        row = self.read_changed()
        peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())
        mfu = batch.flops(cfg.model, self.trained) / ((time.perf_counter() - self.began) * peak)
        tokens = self.sums["tokens"]
        means = {**means, "mfu": (mfu, 1)} | {name: (v, tokens) for name, v in self.sums.items() if name != "tokens"}
        loss = {"policy_loss": self.policy_loss / max(1, self.updates)}
        row |= rollout_metrics(batch, task.tiers, means=means, sums=loss, maxima=self.maxima)
        if "kl_old" in row:
            row |= dict(approx_kl=row.pop("kl_old"), clip_frac=row["clipped_low"] + row["clipped_high"])
        step_s = time.perf_counter() - self.began
        times = dict(sample_s=self.sampled - self.began, step_s=step_s, tok_per_s=n_tokens / step_s)
        return row | times | dict(train_s=step_s - times["sample_s"])
