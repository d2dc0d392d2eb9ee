"""Estimate what a configuration needs: memory per GPU by category, hours, cost, the largest
microbatch, a setting that makes it fit.

    codechat plan --preset 8b --gpus 8 --gpu a800-80gb --device-batch-size 4
    codechat plan sft --preset 8b --gpus 16 --shard-over 8 --gpu h100-80gb \\
        --model.recompute blocks --price 2.5
    codechat plan sft --preset 8b --gpus 1 --gpu h200-141gb --lora-rank 16 --device-batch-size 1
    codechat plan rl --preset 2b --gpus 1 --gpu h200-141gb --group-size 16 --max-new-tokens 512

Memory comes from a step on fake tensors (`step_memory`) plus a stated reserve. A plan fits if
HEADROOM and the prefetch buffers of the gathers remain free. Time is FLOPs per token over an
assumed share (MFU) of the data sheet's peak. For RL the plan covers the memory of both phases
but no time, because the policy decides how long completions are. With --engine, rollouts use
the server's memory instead."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from codechat.core import config, registry
from codechat.core.errors import MissingFile, check_choice
from codechat.distributed import gpu_specs
from codechat.models.config import GPTConfig
from codechat.models.fast import memory as decoding
from codechat.runs import checkpoint
from codechat_lab.instruments import step_memory
from codechat_lab.instruments.plan_settings import (
    BF16,
    GIB,
    HEADROOM,
    HOPPER_SOURCE,
    MFU,
    MFU_SOURCE,
    PLANNED_LOOPS,
    PROMPT_TOKENS,
    PlanConfig,
    shared_settings,
)

CONTEXT_GIB = 1.5  # of the CUDA context and NCCL's buffers; an assumption, not measured here
FRAGMENTATION = 0.05  # share that the allocator cannot use between blocks; an assumption too
MOST_ROWS = 256  # per microbatch, where the search ends
# what a training step holds that stays while RL samples
STAYS = (
    "weights",
    "optimizer states",
    "reference",
)


class Sampling(NamedTuple):
    """The sampling phase of RL on one GPU; memory in GiB."""

    held: float  # stays from training
    copy: float  # a whole copy of the weights in bfloat16
    kept: float  # keys and values of `rows`
    rows: int  # fit beside them at a time
    needed: int  # rows of a step
    batches: int


@dataclass(frozen=True)
class Plan:
    """The result. Memory in GiB per GPU, with the reserve. knobs: {flags: GiB} of settings that
    need less, if it does not fit."""

    cfg: PlanConfig
    peaks: step_memory.Peaks
    largest_batch: int | None = None
    knobs: dict[str, float] = field(default_factory=dict)

    @property
    def memory(self) -> dict[str, float]:
        """GiB by category at the peak, with the reserve."""
        return with_reserve(self.peaks.largest)

    @property
    def total_gib(self) -> float:
        return gib_with_reserve(self.peaks.total)

    @property
    def fits(self) -> bool:  # RL samples a prompt's group at a time, or all
        return self.total_gib <= self.cfg.room_gib and (
            self.sampling is None or self.sampling.rows > 1
        )

    @property
    def sampling(self) -> Sampling | None:
        """The other phase of RL; None for other loops."""
        cfg = self.cfg
        model = cfg.model
        if cfg.loop != "rl":
            return None
        held = sum(self.peaks.training.get(name, 0) for name in STAYS)
        copy = decoding.weight_bytes(model, BF16)
        if cfg.over > 1:  # what is gathered has its embedding in float32, as training has
            copy += 4 * model.padded_vocab * model.n_embd
        free = (cfg.usable_gib - CONTEXT_GIB) * GIB - held - copy
        needed = cfg.device_batch_size * cfg.group_size
        row_bytes = decoding.row_bytes(
            model,
            BF16,
            samples=cfg.group_size,
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=cfg.max_new_tokens,
        )
        fit = decoding.rows_in_memory(model, free, BF16, row_bytes, copies=False) if free > 0 else 1
        rows = min(fit, decoding.bucket(needed))
        return Sampling(
            held=held / GIB,
            copy=copy / GIB,
            kept=rows * row_bytes / GIB,
            rows=rows,
            needed=needed,
            batches=-(-needed // rows),
        )

    @property
    def tokens_per_s(self) -> float:
        peak = self.cfg.gpus * gpu_specs.find(self.cfg.gpu).bf16_flops
        return self.cfg.share * peak / self.cfg.flops_per_token

    @property
    def hours(self) -> float:
        return self.cfg.max_steps * self.cfg.tokens_per_step / self.tokens_per_s / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.cfg.gpus

    @property
    def verdict(self) -> str:
        """One line: does it fit, how long, which setting to change."""
        cfg = self.cfg
        phase = self.sampling
        memory = f"{self.total_gib:.1f} of {cfg.usable_gib:.1f} GiB on {cfg.gpus} x {cfg.gpu}"
        if not self.fits:
            return f"does not fit: {memory}; {self._advice()}"
        if phase:
            return (
                f"fits: {memory} while it learns; samples {phase.rows:,} "
                f"rows at a time, {phase.batches} batches a step"
            )
        cost = "" if cfg.price is None else f", cost {self.gpu_hours * cfg.price:,.0f}"
        larger = (self.largest_batch or 0) > cfg.device_batch_size
        room = f"; room for --device-batch-size {self.largest_batch}" if larger else ""
        return f"fits: {memory}, {self.hours:,.1f} h at MFU {cfg.share}{cost}{room}"

    def _advice(self) -> str:
        """What to change if the plan does not fit."""
        for flags, gib in self.knobs.items():
            if gib <= self.cfg.room_gib:
                return f"set {flags} ({gib:.1f} GiB)"
        if self.cfg.loop == "rl":
            return (
                "lower --rows, --row-tokens or --max-new-tokens, take "
                "more GPUs, or sample on a server (--engine)"
            )
        return "no single setting is enough: combine them, take more GPUs, or a smaller model"

    def rows(self) -> dict[str, str]:
        """What is printed below the verdict."""
        cfg = self.cfg
        at = "a training step"
        if self.peaks.largest is self.peaks.evaluation:
            at = "an evaluation, which gathers a whole copy of the weights"
        rows = {name: f"{gib:.2f} GiB" for name, gib in self.memory.items() if gib}
        rows |= {
            "peak per GPU": (
                f"{self.total_gib:.2f} of {cfg.usable_gib:.1f} "
                f"GiB, in {at}; {HEADROOM:.0%} are left free"
            ),
            "buffers of gathers ahead": f"{cfg.buffers_gib:.2f} GiB",
            "copies of the weights": f"one on {cfg.over} GPUs"
            if cfg.over > 1
            else "one on every GPU",
        }
        phase = self.sampling
        if phase:
            gib = f"{phase.held:.2f} + {phase.copy:.2f} + {phase.kept:.2f} GiB"
            return rows | {
                "while it samples": (
                    f"{gib}: weights and states, a whole copy in bfloat16, keys and values"
                ),
                "batches of a step": (
                    f"{phase.batches} for {phase.needed:,} rows, {phase.rows:,} at a time"
                ),
            }
        source = MFU_SOURCE if cfg.share == MFU else HOPPER_SOURCE
        if cfg.mfu:
            source = "as set"
        largest = "not searched" if self.largest_batch is None else str(self.largest_batch)
        rows |= {
            "largest microbatch": largest,
            "tokens per step": f"{cfg.tokens_per_step:,}",
            "tokens per second": f"{self.tokens_per_s:,.0f} at MFU {cfg.share} ({source})",
            "time": (
                f"{self.hours:,.2f} hours for {cfg.max_steps:,} "
                f"steps, {self.gpu_hours:,.0f} GPU-hours"
            ),
        }
        return rows | {flags: f"{gib:.1f} GiB" for flags, gib in self.knobs.items()}

    def __str__(self) -> str:
        cfg = self.cfg
        trained = f", frozen, and {cfg.adapters:,} in LoRA adapters" if cfg.lora_rank else ""
        lines = [
            f"{cfg.model.n_params:,} parameters{trained}, {cfg.batch} x {cfg.length} tokens per GPU",
            self.verdict,
        ]
        return "\n".join([*lines, *(f"  {name:<35} {text}" for name, text in self.rows().items())])

    __repr__ = __str__


def gib_with_reserve(n_bytes: float) -> float:
    return n_bytes / GIB * (1 + FRAGMENTATION) + CONTEXT_GIB


def with_reserve(held: step_memory.Bytes) -> dict[str, float]:
    """Bytes by category as GiB, and the reserve."""
    total = sum(held.values())
    return {name: n / GIB for name, n in held.items()} | {
        "reserve": gib_with_reserve(total) - total / GIB
    }


def make(cfg: PlanConfig, search: bool = False) -> Plan:
    """The plan of these settings, with a setting that makes it fit where it does not. search:
    also the largest microbatch."""
    plan = Plan(cfg, step_memory.measure(cfg))
    if cfg.loop == "rl" or plan.fits and not search:  # of RL, rows and row_tokens decide
        return plan

    def fails(rows: int) -> bool:
        return _total(replace(cfg, device_batch_size=rows)) > cfg.room_gib

    plan = replace(plan, largest_batch=bisect_left(range(1, MOST_ROWS + 1), True, key=fails))
    return plan if plan.fits else replace(plan, knobs=try_knobs(plan))


def _total(cfg: PlanConfig) -> float:
    return gib_with_reserve(step_memory.measure(cfg).total)


def try_knobs(plan: Plan) -> dict[str, float]:
    """{flags: GiB per GPU} of settings that need less, cheapest first, until one fits."""
    tried = {}
    for flags, changed in _knobs(plan.cfg, rows=max(1, plan.largest_batch or 0)):
        gib = _total(changed)
        if gib < plan.total_gib:
            tried[flags] = gib
        if gib <= changed.room_gib:
            break
    return tried


def _knobs(cfg: PlanConfig, rows: int) -> Iterator[tuple[str, PlanConfig]]:
    """Flags and the settings with them, cheapest first. rows: of the largest microbatch that
    fits."""
    recompute = replace(cfg.model, recompute="blocks")
    accum = -(-cfg.device_batch_size * cfg.grad_accum // rows)
    yield (
        f"--device-batch-size {rows} --grad-accum {accum}",
        replace(cfg, device_batch_size=rows, grad_accum=accum),
    )
    yield "--model.recompute blocks", replace(cfg, model=recompute)
    if not cfg.lora_rank:  # frozen weights are not sharded
        yield "--shard", replace(cfg, shard=True)
    yield (
        "--model.recompute blocks --device-batch-size 1",
        replace(cfg, model=recompute, device_batch_size=1),
    )


# ---- of a loop's settings


def from_settings(cfg: Any, *, gpus: int, gpu: str, price: float | None = None) -> PlanConfig:
    """The plan's settings for a configuration of a loop. ConfigError for a loop that is not
    planned."""
    loop = check_choice("loop to plan", registry.entry_of(cfg, registry.ENTRIES).id, PLANNED_LOOPS)
    settings = shared_settings(vars(cfg)) | {
        "loop": PLANNED_LOOPS[loop],
        "gpus": gpus,
        "gpu": gpu,
        "reference": getattr(cfg, "kl_coef", 0) > 0,
        "price": price,
    }
    if loop != "pretrain" and cfg.init_from:
        with suppress(MissingFile):  # a parent that has not been trained yet
            settings["model"] = config.from_dict(
                GPTConfig, checkpoint.read_meta(cfg.init_from)["model_config"]
            )
    return PlanConfig(**settings)


def main(cfg: PlanConfig) -> int:
    """`codechat plan`; 0 where it fits, 1 where it does not."""
    plan = make(cfg, search=True)
    print(plan)
    return 0 if plan.fits else 1
