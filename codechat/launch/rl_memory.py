"""What an RL step holds while it samples, beside what it holds while it learns (`planner`): weights and states, a whole copy in the compute dtype,
keys and values of the rows that fit into what is left.

Left out: rollouts on a server of their own (--engine), whose memory is the server's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codechat.launch.planner import CONTEXT_GIB, GIB, Plan
from codechat.models import sampling_memory

BF16 = 2  # bytes
STAYS = ("weights", "optimizer states", "reference")  # of a training step, while it samples


@dataclass(frozen=True)
class Sampling:
    """GiB per GPU while sampling. rows: sampled at a time; batches: of a step, which samples `wanted` rows."""

    held: float
    copy: float
    kept: float
    rows: int
    wanted: int

    @property
    def batches(self) -> int:
        return math.ceil(self.wanted / self.rows)

    @property
    def fits(self) -> bool:
        """Whether a useful number of rows fits: one prompt's group, or all."""
        return self.rows > 1

    def table(self) -> list[tuple[str, str]]:
        return [
            ("sampling: weights and states", f"{self.held:.2f} GiB"),
            ("sampling: whole copy in bfloat16", f"{self.copy:.2f} GiB"),
            ("sampling: keys and values", f"{self.kept:.2f} GiB, {self.rows:,} rows at a time"),
            ("sampling: batches of a step", f"{self.batches} for {self.wanted:,} rows"),
        ]


def sampling(plan: Plan) -> Sampling:
    """The sampling phase of a plan of RL."""
    cfg, model = plan.cfg, plan.cfg.model
    held = sum(plan.peaks.training.get(name, 0) for name in STAYS)
    copy = sampling_memory.weight_bytes(model, BF16)
    if cfg.over > 1:  # what is gathered has its embedding in float32, as training has
        copy += 4 * model.padded_vocab * model.n_embd
    how = dict(prompt_tokens=cfg.prompt_tokens, new_tokens=cfg.max_new_tokens, samples=cfg.group_size)
    free = (plan.gpu.usable_gib - CONTEXT_GIB) * GIB - held - copy
    wanted = cfg.device_batch_size * cfg.group_size
    fit = sampling_memory.rows(model, free, BF16, copies=False, **how) if free > 0 else 1
    rows = min(fit, sampling_memory.bucket(wanted))
    kept = rows * sampling_memory.row_bytes(model, BF16, **how)
    return Sampling(held / GIB, copy / GIB, kept / GIB, rows, wanted)
