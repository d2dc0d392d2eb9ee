"""What a loop of reinforcement learning measures within a step. `rl.rollout_metrics` defines the metrics of rollouts, `runs.metrics` names and units."""

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
        self.unread: list[tuple[str, Tensor | float]] = []  # what `read` will note, in order
        self.trained = 0  # tokens that went through a forward and a backward pass, prompts included
        self.began = self.sampled = time.perf_counter()

    def rolled_out(self, model: nn.Module) -> None:
        """Sampling ends here and learning begins, with the weights as they are."""
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

    def gap(self, logprobs: Tensor, sampled: Tensor, on: Tensor) -> None:
        """logprob_mismatch: largest difference between the trainer's and the sampler's log-probabilities where `on`."""
        self.add(logprob_mismatch=torch.where(on, logprobs.detach() - sampled, 0.0).abs().max())

    def row(
        self,
        cfg: Any,
        batch: RolloutBatch,
        task: Task,
        *,
        ratios: Mapping[str, tuple[float, float]] = {},
        **means: float,
    ) -> dict[str, float]:
        """The step's metrics over all ranks; ratios and means as `rollout_metrics` takes them. A collective."""
        differ, n_weights = diagnose.count_changed_bf16(self.before, self.model)
        (changed,) = self.read(differ)
        peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())
        mfu = batch.flops(cfg.model, self.trained) / ((time.perf_counter() - self.began) * peak)
        tokens = self.sums["tokens"]
        row = rollout_metrics(
            batch,
            task.tiers,
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

    def rates(self, n_tokens: float) -> dict[str, float]:
        """Seconds of the step's parts, and completion tokens of all ranks per second."""
        now = time.perf_counter()
        return dict(
            sample_s=self.sampled - self.began,
            train_s=now - self.sampled,
            step_s=now - self.began,
            tok_per_s=n_tokens / (now - self.began),
        )
