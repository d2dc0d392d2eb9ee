"""Learning rate, group size and temperature at equal compute: the same number of completions for every choice.

    python -m codechat.labs.rates --out reports/frozen/rates.jsonl
    python -m codechat.labs.rates --out reports/frozen/rates.jsonl --seeds 3 4

The task and the start are those of `reward_starts`: calls of eight tools with two whole numbers, and the policy that its SFT calls "weak". Every
run trains on `completions` completions, `per_update` of them an update, so all runs have equally many updates; a larger group means fewer requests
an update. The reward is binary, so that a group carries a gradient exactly where some of its answers are correct and some are not. All runs of a
seed begin from the same weights. Each finished run appends one row to `out`, and a second start of the command skips it.

The grid: every learning rate with every group size at temperature 1, and every other temperature at the middle learning rate and group size.

Left out: KL, entropy, schedules, several updates of one batch; a factorial of all three settings.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.labs import reward_starts
from codechat.labs.resumed_rows import Row, thinned, train_missing
from codechat.labs.reward_starts import Setting, StartsConfig
from codechat.models import optim
from codechat.models.gpt import GPT
from codechat.rl import losses, rollout
from codechat.rl.advantages import group_advantages, zero_variance

START, SFT_STEPS, WIDTH = "weak", (35, 60, 150, 151), 64  # SFT ends behind the start
LRS, GROUP_SIZES, TEMPERATURES = (2e-4, 1e-3, 5e-3), (2, 8, 24), (0.5, 1.0, 1.5)
THINNED = 4
ROW_TOKENS, ROWS = 256, 16


@dataclass(frozen=True, kw_only=True)
class RatesConfig(config.Settings):
    """Which runs, and their budget."""

    out: str = opt("reports/frozen/rates.jsonl", "file of rows; runs that it has are skipped", identity=False)
    seeds: tuple[int, ...] = opt((0, 1, 2), "seeds, the outermost loop", identity=False)
    lrs: tuple[float, ...] = opt(
        LRS, "learning rates; the middle one, with the middle group size, at every temperature", identity=False
    )
    group_sizes: tuple[int, ...] = opt(GROUP_SIZES, "completions per request", identity=False)
    temperatures: tuple[float, ...] = opt(TEMPERATURES, "temperatures of sampling and of the loss", identity=False)
    completions: int = opt(1152, "completions of a run", least=1)
    per_update: int = opt(48, "completions of an update; every group size must divide it", least=2)
    held_out: int = opt(48, "held-out requests", least=1)
    samples: int = opt(4, "completions of each at temperature 1, the k of pass@k", least=1)
    width: int = opt(WIDTH, "width of the model", least=16)

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.group_sizes:
            if size < 2 or self.per_update % size:
                raise ConfigError(f"group size {size} and per_update {self.per_update}; required: 2 or more, a divisor")
        if self.completions % self.per_update:
            raise ConfigError(f"completions {self.completions}; required: a multiple of per_update {self.per_update}")

    @property
    def updates(self) -> int:
        return self.completions // self.per_update


def planned(cfg: RatesConfig) -> list[tuple[int, float, int, float]]:
    """The runs as (seed, learning rate, group size, temperature). Seeds are outermost, so that what is done so far is balanced."""
    middle = cfg.lrs[len(cfg.lrs) // 2], cfg.group_sizes[len(cfg.group_sizes) // 2]
    cells = [(lr, size, 1.0) for lr in cfg.lrs for size in cfg.group_sizes]
    cells += [(*middle, t) for t in cfg.temperatures if t != 1.0]
    return [(seed, *cell) for seed in cfg.seeds for cell in cells]


def setting_of(cfg: RatesConfig) -> Setting:
    """Task, requests and model of `reward_starts`, with these held-out requests."""
    return Setting(StartsConfig(held_out=cfg.held_out, samples=cfg.samples, width=cfg.width, sft_steps=SFT_STEPS))


# ---------------------------------------------------------------- a run


def backward(policy: GPT, batch: rollout.RolloutBatch, temperature: float) -> None:
    """Add the gradient of REINFORCE's loss with the group's mean as baseline, at the temperature of sampling."""
    advantages = group_advantages(batch.correct.float())
    for packed in rollout.pack(batch, advantages != 0, row_tokens=ROW_TOKENS, rows=ROWS):
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, temperature=temperature, **packed.where())
        advantage = advantages.view(-1, 1)[packed.numbers]  # (B, 1)
        losses.policy_gradient_loss(packed.unpack(logprobs), advantage, packed.mask(), batch.n_tokens).backward()


def reinforce(
    setting: Setting, cfg: RatesConfig, policy: GPT, seed: int, lr: float, group_size: int, temperature: float
) -> Iterator[dict[str, float]]:
    """REINFORCE in place; yields the share of exact answers and of groups with variance of each update."""
    rng, optimizers = random.Random(f"rates {seed}"), optim.build(policy, lr=lr, weight_decay=0.0)
    for step in range(cfg.updates):
        asked = rng.sample(setting.train, cfg.per_update // group_size)
        how = dict(group_size=group_size, temperature=temperature, seed=seed * 1_000_003 + step)
        batch = setting.sampled(policy, asked, **how)
        live = int((~zero_variance(batch.correct)).sum())
        if live:
            backward(policy, batch, temperature)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        yield dict(exact=float(batch.correct.float().mean()), live=live / len(asked))


def train_one(setting: Setting, cfg: RatesConfig, seed: int, lr: float, group_size: int, temperature: float) -> Row:
    """The row of one run."""
    first = reward_starts.start_policies(setting, seed)[START]
    if (seed, START) not in setting.before:
        setting.before = {(seed, START): reward_starts.evaluate(setting, first)}
    began, policy = time.process_time(), copy.deepcopy(first)
    steps = list(reinforce(setting, cfg, policy, seed, lr, group_size, temperature))
    spent = round(time.process_time() - began, 2)
    about = dict(seed=seed, lr=lr, group_size=group_size, temperature=temperature, settings=config.config_hash(cfg))
    about |= dict(completions=cfg.completions, updates=cfg.updates, samples=cfg.samples, seconds=spent)
    curve = {name: thinned([step[name] for step in steps], THINNED) for name in steps[0]}
    return about | dict(before=setting.before[seed, START], after=reward_starts.evaluate(setting, policy), curve=curve)


# ---------------------------------------------------------------- all of them


def name_of(row: Mapping[str, Any]) -> tuple[int, float, int, float]:
    return row["seed"], row["lr"], row["group_size"], row["temperature"]


def try_rates(cfg: RatesConfig) -> list[Row]:
    """Train what `out` does not have yet, and append each run's row when it ends. Returns the rows of this plan.

    ConfigError where `out` has rows of other settings."""
    setting = cache(lambda: setting_of(cfg))  # made where something is left to train
    return train_missing(
        cfg.out,
        config.config_hash(cfg),
        planned(cfg),
        name_of=name_of,
        train=lambda *run: train_one(setting(), cfg, *run),
        summary=summary,
    )


def summary(row: Row) -> str:
    """One line of a run: exact match at temperature 1 before and after, groups with variance."""
    before, after = (sum(row[w]["correct"]) / len(row[w]["correct"]) / row["samples"] for w in ("before", "after"))
    live, name = (
        row["curve"]["live"],
        f"seed {row['seed']} lr {row['lr']:g} G {row['group_size']} T {row['temperature']:g}",
    )
    return f"{name}: {before:.2f} -> {after:.2f}; live {live[0]:.2f} -> {live[-1]:.2f}; {row['seconds']:.0f} s"


def main(argv: list[str] | None = None) -> None:
    """`python -m codechat.labs.rates`."""
    argv = sys.argv[1:] if argv is None else argv
    try_rates(config.parse(RatesConfig, argv, prog="python -m codechat.labs.rates", epilog=__doc__))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
