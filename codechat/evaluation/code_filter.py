"""Keep the training problems that a policy learns from: solved sometimes, not never and not always.

    codechat passk  --ckpt my-sft --task mbpp --data-dir mbpp/full --k 8 --run-name rates
    codechat filter --rates rates --window 0.05 0.95 --out data/mbpp-kept
    codechat grpo   --init-from my-sft --task mbpp --data-dir data/mbpp-kept

A group whose completions are all right or all wrong has no gradient under a reward of right or wrong. If no problem's pass rate is in the window,
problems with a mean tiered reward of at least --min-tiered are kept: none is solved, but completions reach different tiers. If that leaves nothing
either, nothing is written.

The other splits are copied unchanged, so that the directory holds all that a loop needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core import config
from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError, MissingFile, RunError
from codechat.evaluation.code_pass_rates import RATES, PasskConfig, load_task, problems_of
from codechat.runs.run import Run
from codechat.tasks.base import row_of
from codechat.tasks.coding.task import CodingTask

Rates = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which problems to keep."""

    rates: str = opt(config.REQUIRED, "run of codechat passk, on split train")
    window: tuple[float, ...] = opt((0.05, 0.95), "smallest and largest pass rate to keep")
    min_tiered: float = opt(0.1, "smallest mean tiered reward to keep, if the window leaves nothing", least=0, most=1)
    out: str = opt(config.REQUIRED, "directory to write TASK.SPLIT.jsonl to")
    allow_empty: bool = opt(False, "if nothing is left, write a directory without training problems")

    def __post_init__(self) -> None:
        if len(self.window) != 2 or not 0 <= self.window[0] <= self.window[1] <= 1:
            raise ConfigError(
                f"window {list(self.window)}; two shares, the smaller first, are required, such as --window 0.05 0.95"
            )


def choose(rates: Sequence[Rates], window: Sequence[float], min_tiered: float) -> tuple[list[Rates], str]:
    """The rows to keep, and by which rule: "window", "tiered" or "nothing"."""
    low, high = window
    kept = [r for r in rates if low <= r["pass_rate"] <= high]
    if kept:
        return kept, "window"
    kept = [r for r in rates if r["tiered_mean"] >= min_tiered and r["pass_rate"] < low]
    return kept, "tiered" if kept else "nothing"


def filter_problems(cfg: FilterConfig) -> dict[str, int]:
    """Write the directory; rows of each file. RunError if nothing is left, ConfigError for rates of another split than train, DataError if the
    task's problems have changed since."""
    run = Run.open(cfg.rates)
    if not (run.path / RATES).exists():
        raise MissingFile(f"run {run.name} has no {RATES}; `codechat passk` writes it; give one of its runs to --rates")
    passk = config.from_dict(PasskConfig, run.config)
    if passk.split != "train":
        raise ConfigError(
            f"run {run.name} tried split {passk.split!r}; problems to train on must come from train; run passk with --split train"
        )
    rates = list(read_rows(run.path / RATES))
    kept, rule = choose(rates, cfg.window, cfg.min_tiered)
    print(describe(rates, kept, rule, cfg))
    if rule == "nothing" and not cfg.allow_empty:
        raise RunError(
            f"no problem of run {run.name} is left: none of {len(rates)} has a pass rate from {cfg.window[0]:g} to {cfg.window[1]:g}, "
            f"none a mean tiered reward of {cfg.min_tiered:g}; strengthen the base (SFT), take easier problems, or widen --window"
        )
    task = load_task(passk.task, passk.data_dir)
    by_id = {p.id: p for p in problems_of(task, passk)}
    if lost := [r["id"] for r in kept if r["id"] not in by_id]:
        raise DataError(
            f"{len(lost)} problems of run {run.name} (such as {lost[0]}) are not in task {passk.task} any more; run passk again"
        )
    files = {"train": [by_id[r["id"]] for r in kept]} | other_splits(task)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{task.name}.train.jsonl").unlink(missing_ok=True)
    for split, problems in files.items():
        if problems:
            lines = [json.dumps(row_of(p), ensure_ascii=False) + "\n" for p in problems]
            write_atomic(out / f"{task.name}.{split}.jsonl", "".join(lines))
            print(f"{out / task.name}.{split}.jsonl: {len(problems)} problems")
    return {split: len(problems) for split, problems in files.items()}


def other_splits(task: CodingTask) -> dict[str, list[Any]]:
    """The problems of the splits other than train, where there are any."""
    found = {split: task.problems(split) for split in task.splits if split != "train"} | {"prompt": task.worked}
    return {split: problems for split, problems in found.items() if problems}


def describe(rates: Sequence[Rates], kept: Sequence[Rates], rule: str, cfg: FilterConfig) -> str:
    """What was kept and why, for people."""
    low, high = cfg.window
    never, always = sum(r["pass_rate"] < low for r in rates), sum(r["pass_rate"] > high for r in rates)
    between = len(rates) - never - always
    reasons = {
        "window": f"kept {len(kept)}",
        "tiered": f"the window is empty; kept {len(kept)} with a mean tiered reward of at least {cfg.min_tiered:g}: train with reward=tiered",
        "nothing": "nothing is left to train on",
    }
    return f"{len(rates)} problems: {never} below a pass rate of {low:g}, {always} above {high:g}, {between} between\n{reasons[rule]}"


def main(argv: list[str] | None = None) -> None:
    """`codechat filter`, `python -m codechat.evaluation.code_filter`."""
    filter_problems(
        config.parse(FilterConfig, sys.argv[1:] if argv is None else argv, prog="codechat filter", epilog=__doc__)
    )


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
