"""Train the committed rows of notebooks 06 (`starts`) and 31 (`rates`) again.

    python tools/reward_rows.py starts --out reports/frozen/thesis.jsonl
    python tools/reward_rows.py rates --out reports/frozen/rates.jsonl --seeds 3 4

starts: every reward from every start of `codechat_lab.instruments.reward_starts`, with the same
requests and settings. AdamW divides a constant factor of the reward out; what remains is how the
rewards weigh groups against each other.
rates: learning rate, group size and temperature at equal compute: 1,152 completions a run, 48 an
update, so a larger group means fewer requests. The reward is binary: a group carries a gradient
where its answers differ. Every learning rate meets every group size at temperature 1; the other
temperatures have the middle learning rate and group size.

Each finished run appends one row to `--out`, and a second start of the command skips it.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from codechat.core.atomic_files import append_rows, read_rows
from codechat.models import optim
from codechat.models.gpt import GPT
from codechat.rl.advantages import group_advantages, zero_variance
from codechat_lab.instruments import reward_starts
from codechat_lab.instruments.reward_starts import (
    SHAPES,
    STARTS,
    Setting,
    backward,
    reshaped,
    update,
)

COMPLETIONS, PER_UPDATE = 1152, 48
LRS = (2e-4, 1e-3, 5e-3)
GROUP_SIZES = (2, 8, 24)
TEMPERATURES = (0.5, 1.0, 1.5)
Row = dict[str, Any]


@dataclass
class RL:
    """Settings of one run of REINFORCE."""

    shape: str = "binary"
    baseline: str = "mean"
    lr: float = 5e-4
    updates: int = 200
    problems: int = 6
    group_size: int = 8
    temperature: float = 1.0


Plan = Iterator[tuple[Row, str, RL]]  # what names a run, its start, its settings


def plan_starts(seeds: Sequence[int], baselines: Sequence[str] = ("mean",)) -> Plan:
    """Seeds are outermost, so that what is done so far is balanced."""
    for seed, start, shape, baseline in product(seeds, STARTS, SHAPES, baselines):
        yield (
            dict(seed=seed, start=start, reward=shape, baseline=baseline),
            start,
            RL(shape, baseline),
        )


def plan_rates(seeds: Sequence[int]) -> Plan:
    cells = [(lr, size, 1.0) for lr in LRS for size in GROUP_SIZES]
    cells += [(LRS[1], GROUP_SIZES[1], t) for t in TEMPERATURES if t != 1.0]
    for seed, (lr, size, temperature) in product(seeds, cells):
        how = dict(lr=lr, problems=PER_UPDATE // size, group_size=size, temperature=temperature)
        name = dict(seed=seed, lr=lr, group_size=size, temperature=temperature)
        yield name, "weak", RL(updates=COMPLETIONS // PER_UPDATE, **how)


def evaluate(setting: Setting, policy: GPT) -> Row:
    """Per held-out request: whether the greedy answer is exact, and how many answers at
    temperature 1 are; their tiers."""
    greedy = setting.sampled(policy, setting.held_out, group_size=1, temperature=0.0, seed=0)
    drawn = setting.sampled(policy, setting.held_out, group_size=setting.samples, seed=0)
    tiers = dict(sorted(Counter(score.tier for score in drawn.scores).items()))
    return dict(
        greedy=[int(x) for x in greedy.correct[:, 0]],
        correct=drawn.correct.sum(1).tolist(),
        tiers=tiers,
    )


def reinforce(
    setting: Setting,
    rl: RL,
    policy: GPT,
    seed: int,
    stream: str = "reinforce",
) -> Iterator[dict[str, float]]:
    """REINFORCE in place; yields the mean reward, the share of exact answers and of groups with
    variance of each update.

    Requests and sampling seeds depend on seed and update only, so all rewards meet the same
    requests."""
    rng = random.Random(f"{stream} {seed}")
    optimizers = optim.build(policy, lr=rl.lr, weight_decay=0.0)
    for step in range(rl.updates):
        asked = rng.sample(setting.train, rl.problems)
        how = dict(
            group_size=rl.group_size, temperature=rl.temperature, seed=seed * 1_000_003 + step
        )
        batch = setting.sampled(policy, asked, **how)
        rewards = torch.tensor([reshaped(score, rl.shape) for score in batch.scores]).view_as(
            batch.rewards
        )
        live = int((~zero_variance(rewards)).sum())
        if live:
            backward(policy, batch, group_advantages(rewards, rl.baseline), rl.temperature)
            update(optimizers)
        yield dict(
            reward=float(rewards.mean()),
            exact=float(batch.correct.float().mean()),
            live=live / rl.problems,
        )


def train(out: Path, setting: Setting, plan: Plan, every: int, stream: str) -> list[Row]:
    """Train the runs of the plan that `out` does not have and append their rows; returns all
    rows of the plan."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = list(read_rows(out))
    append_rows(out, [])  # removes a last line that was cut
    begin = starts_of(setting)
    rows = []
    for name, start, rl in plan:
        row = next((r for r in done if name.items() <= r.items()), None)
        if row is None:
            row = name | train_one(
                setting, rl, *begin(name["seed"], start), name["seed"], every, stream
            )
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
            print(summary(name, row), flush=True)
        rows.append(row)
    return rows


def starts_of(setting: Setting) -> Callable[[int, str], tuple[Any, Row]]:
    """(seed, start) -> the policy and its scores, made where something is left to train and
    kept for one seed."""
    policies = lru_cache(1)(lambda seed: reward_starts.start_policies(setting, seed))
    scores = lru_cache(len(STARTS))(lambda seed, start: evaluate(setting, policies(seed)[start]))
    return lambda seed, start: (policies(seed)[start], scores(seed, start))


def train_one(
    setting: Setting,
    rl: RL,
    first: Any,
    before: Row,
    seed: int,
    every: int,
    stream: str,
) -> Row:
    began = time.process_time()
    policy = copy.deepcopy(first)
    steps = list(reinforce(setting, rl, policy, seed, stream))
    spent = round(time.process_time() - began, 2)
    curve = {name: thinned([step[name] for step in steps], every) for name in steps[0]}
    about = dict(
        steps=rl.updates,
        updates=rl.updates,
        completions=rl.updates * rl.problems * rl.group_size,
    )
    after = evaluate(setting, policy)
    return about | dict(
        samples=setting.samples, before=before, after=after, curve=curve, seconds=spent
    )


def thinned(values: Sequence[float], every: int) -> list[float]:
    """Means of `every` values each: a curve short enough for a row."""
    parts = [values[at : at + every] for at in range(0, len(values), every)]
    return [round(sum(part) / len(part), 4) for part in parts]


def summary(name: Row, row: Row) -> str:
    """One line of a run: exact match at temperature 1 before and after, groups with variance."""
    before, after = (
        sum(row[w]["correct"]) / len(row[w]["correct"]) / row["samples"]
        for w in ("before", "after")
    )
    live = row["curve"]["live"]
    told = " ".join(f"{key} {value}" for key, value in name.items())
    return (
        f"{told}: {before:.2f} -> {after:.2f}; live {live[0]:.2f} "
        f"-> {live[-1]:.2f}; {row['seconds']:.0f} s"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=("starts", "rates"))
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="file of rows; runs that it has are skipped",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--baselines",
        nargs="+",
        default=["mean"],
        choices=("mean", "zscore"),
        help="of `starts`",
    )
    args = parser.parse_args(argv)
    if args.experiment == "starts":
        train(args.out, Setting(), plan_starts(args.seeds, args.baselines), 5, "reinforce")
    else:  # SFT ends just behind the weak start
        setting = Setting(held_out_requests=48, samples=4, sft_steps=(35, 60, 150, 151))
        train(args.out, setting, plan_rates(args.seeds), 4, "rates")


if __name__ == "__main__":
    main()
