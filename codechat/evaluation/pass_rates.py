"""How often a checkpoint solves code problems, measured before RL, and which of them are worth training on.

    codechat passk  --ckpt my-sft --task mbpp --data-dir mbpp/full --split train --k 8 --max-new-tokens 256 --run-name rates
    codechat filter --rates rates --window 0.05 0.95 --out data/mbpp-kept
    codechat grpo   --init-from my-sft --task mbpp --data-dir data/mbpp-kept

`passk` evaluates with the tiered reward and prints two verdicts: by pass@1 (would RL stall?), and that of `diagnose` over the tiered reward
(do groups have variance?). `pass_rates.jsonl` has a row for each problem.

`filter` keeps problems with a pass rate in the window; if there are none, those with a mean tiered reward of at least --min-tiered. The other
splits are copied unchanged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat import tasks
from codechat.core import config
from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError, DataError, MissingFile, RunError
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.evaluation.evaluate import Sampling, checked_problems, evaluate_split, find_contamination, label
from codechat.evaluation.results import ProblemResult, TaskResult, append_rows, clean_and_exposed
from codechat.evaluation.settings import ProblemSettings
from codechat.models import loading
from codechat.runs.run import Run, find_checkpoint
from codechat.tasks.base import row_of
from codechat.tasks.coding.rewards import PARSEABLE, RUNNABLE
from codechat.tasks.coding.task import CodingTask

Rates = Mapping[str, Any]
RATES = "pass_rates.jsonl"
DEAD_BELOW, WEAK_BELOW = 0.01, 0.05  # pass@1
REMEDIES = {
    "DEAD": "hardly anything is solved and RL would stall: strengthen the base (more pretraining, SFT on such problems) or ease the problems",
    "WEAK": "some problems are solved: use the tiered reward, --group-size 8 or more, and `codechat filter`",
    "LIVE": "enough is solved for standard RL",
    "SATURATED": "the task is solved at this temperature: take harder problems",
}


# ---- codechat passk


@dataclass(frozen=True, kw_only=True)
class PasskConfig(ProblemSettings):
    """Which problems to try, and how often."""

    run_name: str = default("passk")
    ckpt: str = opt(config.REQUIRED, "checkpoint: run name, run@best, run@STEP, run directory or checkpoint")
    task: str = default("micro")
    split: Literal["train", "select", "test", "test_hard"] = opt("train", "split to try; only train can be filtered")
    k: int = opt(8, "completions per problem", least=2)
    max_new_tokens: int = default(128)
    gate_parseable: float = opt(0.0, "share of completions that must be Python before RL; 0 = no gate", least=0, most=1)
    gate_pass_at_k: float = opt(0.0, "pass@k that must be reached before RL; 0 = no gate", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: all completions would be the same")


def load_task(cfg: PasskConfig) -> CodingTask:
    """The code task with the tiered reward. ConfigError for a task of another kind."""
    kind = tasks.task_class(cfg.task.partition(":")[0])
    if isinstance(kind, type) and not issubclass(kind, CodingTask):
        raise ConfigError(f"task {cfg.task!r} has no programs to run; passk takes micro, mbpp or humaneval")
    return tasks.load(cfg.task, **cfg.source, reward="tiered")


def run_passk(cfg: PasskConfig) -> Run:
    """The reference-solution check, then samples, then rates and verdicts."""
    task = load_task(cfg)
    problems, failing = checked_problems(cfg, task, cfg.split)
    path = find_checkpoint(cfg.ckpt)
    run = Run.create(cfg.run_name, cfg, kind="passk", parent=cfg.ckpt, overwrite=cfg.overwrite)
    with dist.session() as world, run:
        loaded = loading.load_model(path, world.device, cfg.tags)
        report = find_contamination(cfg, loaded, problems)
        sampling = Sampling(cfg.temperature, cfg.k, tuple(sorted({1, cfg.k})))
        result = evaluate_split(cfg, loaded, task, problems, cfg.split, sampling)
        row = summary(result, cfg)
        if world.is_main:
            print(format_summary(result, row, f"{label(path)} on {cfg.task} {cfg.split}"))
            append_rows(run.path / RATES, (rates_row(p, cfg.split) for p in result.problems))
        if report:
            row |= clean_and_exposed(result, report.how, seed=cfg.seed)
        step = int(loaded.meta["step"])
        run.log_eval(step, dict(result.row(), **row, checkpoint=label(path), split=cfg.split, task=cfg.task))
        run.log_samples(step, [dict(s, split=cfg.split) for s in result.samples])
        kept = {k: row[k] for k in ("verdict", "remedy", "reward_verdict", "gate") if k in row}
        run.finish(kept | ({"left_out": {cfg.split: failing}} if failing else {}))
    return run


def summary(result: TaskResult, cfg: PasskConfig) -> dict[str, Any]:
    """Shares of completions that are Python, verdicts by pass@1 and by `diagnose`, and the gate where one is set (it stops nothing)."""
    import torch

    rewards = torch.tensor([p.rewards for p in result.problems])  # (P, G)
    correct = torch.tensor([[i < p.c for i in range(p.n)] for p in result.problems])  # (P, G); only counts matter
    diagnosis, pass_at_1 = diagnose.judge(rewards, correct, min_groups=1), result.pass_at[1].value
    verdict = diagnose.verdict_of(pass_at_1, pass_at_1, DEAD_BELOW, WEAK_BELOW)
    row = dict(
        parseable_frac=result.tier_share(PARSEABLE),
        runnable_frac=result.tier_share(RUNNABLE),
        frac_zero_std_groups=diagnosis.frac_zero_std,
        effective_groups=diagnosis.effective_groups,
        verdict=verdict,
        remedy=REMEDIES[verdict],
        reward_verdict=diagnosis.verdict,
        reward_remedy=diagnosis.remedy,
    )
    if cfg.gate_parseable or cfg.gate_pass_at_k:
        passed = row["parseable_frac"] >= cfg.gate_parseable and result.pass_at[cfg.k].value >= cfg.gate_pass_at_k
        row["gate"] = "pass" if passed else "fail"
    return row


def format_summary(result: TaskResult, row: Mapping[str, Any], title: str) -> str:
    """The report for people."""
    few = f" (of {result.N} groups; a firm verdict takes {diagnose.MIN_GROUPS})"
    lines = [
        f"{title}: {result}",
        f"  mean tiered reward {result.reward}, parseable {row['parseable_frac']:.1%}, runnable {row['runnable_frac']:.1%}",
        "  " + ", ".join(f"{t} {result.tier_share([t]):.1%}" for t in result.tiers),
        *_by_level(result.problems),
        f"VERDICT by pass@1: {row['verdict']}: {row['remedy']}",
        f"verdict of diagnose on the tiered reward: {row['reward_verdict']}: {row['reward_remedy']}"
        + few * (result.N < diagnose.MIN_GROUPS),
        *([f"GATE {row['gate']}"] if "gate" in row else []),
    ]
    return "\n".join(lines)


def _by_level(problems: Sequence[ProblemResult]) -> list[str]:
    """A line for each level, if the problems have levels."""
    by_level: dict[int, list[ProblemResult]] = {}
    for p in problems:
        if "level" in p.meta:
            by_level.setdefault(p.meta["level"], []).append(p)
    return [
        f"  level {level}: pass@1 {sum(p.c / p.n for p in members) / len(members):.3f}, solved at least once "
        f"{sum(p.c > 0 for p in members)} of {len(members)}, mean tiered {sum(p.reward_mean for p in members) / len(members):.3f}"
        for level, members in sorted(by_level.items())
    ]


def rates_row(p: ProblemResult, split: str) -> dict[str, Any]:
    """A line of pass_rates.jsonl."""
    share = lambda tiers: sum(p.tiers[t] for t in tiers) / p.n  # noqa: E731
    row = dict(id=p.id, split=split, n=p.n, c=p.c, pass_rate=p.c / p.n, tiered_mean=p.reward_mean)
    return row | dict(parseable=share(PARSEABLE), runnable=share(RUNNABLE), tiers=dict(p.tiers))


def main(argv: list[str] | None = None) -> None:
    """`codechat passk`."""
    run_passk(config.parse(PasskConfig, sys.argv[1:] if argv is None else argv, prog="codechat passk", epilog=__doc__))


# ---- codechat filter


@dataclass(frozen=True, kw_only=True)
class FilterConfig(config.Settings):
    """Which problems to keep."""

    rates: str = opt(config.REQUIRED, "run of codechat passk, on split train")
    window: tuple[float, ...] = opt((0.05, 0.95), "smallest and largest pass rate to keep")
    min_tiered: float = opt(0.1, "smallest mean tiered reward to keep, if the window leaves nothing", least=0, most=1)
    out: str = opt(config.REQUIRED, "directory to write TASK.SPLIT.jsonl to")
    allow_empty: bool = opt(False, "if nothing is left, write a directory without training problems")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window) != 2 or not 0 <= self.window[0] <= self.window[1] <= 1:
            raise ConfigError(f"window {list(self.window)}; required two shares, the smaller first: --window 0.05 0.95")


def choose(rates: Sequence[Rates], window: Sequence[float], min_tiered: float) -> tuple[list[Rates], str]:
    """The rows to keep, and by which rule: "window", "tiered" or "nothing"."""
    low, high = window
    kept = [r for r in rates if low <= r["pass_rate"] <= high]
    if kept:
        return kept, "window"
    kept = [r for r in rates if r["tiered_mean"] >= min_tiered and r["pass_rate"] < low]
    return kept, "tiered" if kept else "nothing"


def filter_problems(cfg: FilterConfig) -> dict[str, int]:
    """Write the directory; rows of each file. RunError if nothing is left, DataError if the task's problems have changed since."""
    run = Run.open(cfg.rates)
    if not (run.path / RATES).exists():
        raise MissingFile(f"run {run.name} has no {RATES}; `codechat passk` writes it; give one of its runs to --rates")
    passk = config.from_dict(PasskConfig, run.config)
    if passk.split != "train":
        raise ConfigError(f"run {run.name} tried split {passk.split!r}; run passk with --split train")
    rates = list(read_rows(run.path / RATES))
    kept, rule = choose(rates, cfg.window, cfg.min_tiered)
    print(describe(rates, kept, rule, cfg))
    if rule == "nothing" and not cfg.allow_empty:
        raise RunError(
            f"no problem of run {run.name} is left; strengthen the base, take easier problems, or widen --window"
        )
    task = load_task(passk)
    by_id = {p.id: p for p in task.problems("train", limit=passk.limit, seed=passk.seed)}
    if lost := [r["id"] for r in kept if r["id"] not in by_id]:
        raise DataError(f"{len(lost)} problems of run {run.name} (such as {lost[0]}) are gone; run passk again")
    others = {split: task.problems(split) for split in task.splits if split != "train"} | {"prompt": task.worked}
    files = {"train": [by_id[r["id"]] for r in kept]} | {split: rows for split, rows in others.items() if rows}
    write_problems(Path(cfg.out), task.name, files)
    return {split: len(problems) for split, problems in files.items()}


def write_problems(out: Path, name: str, files: Mapping[str, Sequence[Any]]) -> None:
    """OUT/NAME.SPLIT.jsonl for each split that has problems."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.train.jsonl").unlink(missing_ok=True)
    for split, problems in files.items():
        if problems:
            lines = [json.dumps(row_of(p), ensure_ascii=False) + "\n" for p in problems]
            write_atomic(out / f"{name}.{split}.jsonl", "".join(lines))
            print(f"{out / name}.{split}.jsonl: {len(problems)} problems")


def describe(rates: Sequence[Rates], kept: Sequence[Rates], rule: str, cfg: FilterConfig) -> str:
    """What was kept and why, for people."""
    low, high = cfg.window
    never, always = sum(r["pass_rate"] < low for r in rates), sum(r["pass_rate"] > high for r in rates)
    reasons = {
        "window": f"kept {len(kept)}",
        "tiered": f"the window is empty; kept {len(kept)} with a mean tiered reward of at least {cfg.min_tiered:g}: train with reward=tiered",
        "nothing": "nothing is left to train on",
    }
    between = len(rates) - never - always
    return f"{len(rates)} problems: {never} below a pass rate of {low:g}, {always} above {high:g}, {between} between\n{reasons[rule]}"


def main_filter(argv: list[str] | None = None) -> None:
    """`codechat filter`."""
    words = sys.argv[1:] if argv is None else argv
    filter_problems(config.parse(FilterConfig, words, prog="codechat filter", epilog=__doc__))
