"""How often a checkpoint solves code problems, measured before RL: pass@1, pass@k, and the tiers that completions reach.

    codechat passk --ckpt nano/sft --task micro --k 8
    codechat passk --ckpt my-sft --task mbpp --data-dir mbpp/full --split train --k 8 --max-new-tokens 256

Two verdicts are printed. The first is by pass@1. Under 1 % RL would stall: strengthen the base. From 1 to 5 %: take the tiered reward, groups of
8 or more and filtered problems. From 5 % on: RL as usual. Above 85 % the task is saturated. The second verdict is that of `diagnose` over the
tiered reward: do groups have variance? A task that is DEAD by the first and LIVE by the second has a reward to climb, but nothing is solved yet.

`pass_rates.jsonl` in the run directory has a row for each problem; `codechat filter` reads it. The task's own reward mode is ignored: rates are
shares of solved completions, means are of the tiered reward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from codechat import tasks  # dist and loading import torch: only when a model is used
from codechat.core import config
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.evaluation.evaluate import evaluate_split, find_contamination, label
from codechat.evaluation.results import ProblemResult, TaskResult, append_rows, clean_and_exposed
from codechat.evaluation.settings import SamplingSettings, skipping
from codechat.models import loading
from codechat.runs.run import Run, find_checkpoint
from codechat.tasks.base import Problem
from codechat.tasks.coding.rewards import PARSEABLE, RUNNABLE
from codechat.tasks.coding.task import CodingTask

RATES = "pass_rates.jsonl"
DEAD_BELOW, WEAK_BELOW = 0.01, 0.05  # pass@1
REMEDIES = {
    "DEAD": "hardly anything is solved and RL would stall: strengthen the base (more pretraining, SFT on such problems) or ease the problems",
    "WEAK": "some problems are solved: use the tiered reward, --group-size 8 or more, and `codechat filter`",
    "LIVE": "enough is solved for standard RL",
    "SATURATED": "the task is solved at this temperature: take harder problems",
}


@dataclass(frozen=True, kw_only=True)
class PasskConfig(SamplingSettings):
    """Which problems to try, and how often."""

    run_name: str = default("passk")
    ckpt: str = opt(config.REQUIRED, "checkpoint: run name, run@best, run@STEP, run directory or checkpoint")
    task: str = opt("micro", "code task: micro, mbpp, humaneval, with options as in mbpp:variant=sanitized")
    split: Literal["train", "select", "test", "test_hard"] = opt("train", "split to try; only train can be filtered")
    limit: int | None = opt(None, "problems to try; none = all that the task has", least=0)
    k: int = opt(8, "completions per problem")
    max_new_tokens: int = default(128)
    device_batch_size: int | None = opt(None, "completions sampled at a time; none = what memory allows", least=1)
    skip_failing_references: bool = skipping()
    gate_parseable: float = opt(0.0, "share of completions that must be Python before RL; 0 = no gate")
    gate_pass_at_k: float = opt(0.0, "pass@k that must be reached before RL; 0 = no gate")
    contamination: bool = opt(True, "search what the checkpoint was trained on for the problems", identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 2:
            raise ConfigError(f"k {self.k}: one completion says nothing about variance; set --k 2 or more")
        if not (0 <= self.gate_parseable <= 1 and 0 <= self.gate_pass_at_k <= 1):
            raise ConfigError(
                f"gate_parseable {self.gate_parseable} and gate_pass_at_k {self.gate_pass_at_k}; both are shares from 0 to 1"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: all completions would be the same")


def verdict_of(pass_at_1: float) -> diagnose.Verdict:
    """DEAD, WEAK, LIVE or SATURATED by the share of correct completions; see the module's docstring."""
    return diagnose.verdict_of(pass_at_1, pass_at_1, DEAD_BELOW, WEAK_BELOW)


def load_task(name: str, data_dir: str | None) -> CodingTask:
    """The code task with the tiered reward. ConfigError for a task of another kind."""
    known = name.partition(":")[0]
    found = tasks.task_class(known)
    if isinstance(found, type) and not issubclass(found, CodingTask):
        raise ConfigError(
            f"task {known!r} has no programs to run; passk takes micro, mbpp or humaneval, and diagnose any task"
        )
    task = tasks.load(name, **({"source": data_dir} if data_dir else {}), reward="tiered")
    assert isinstance(task, CodingTask)
    return task


def problems_of(task: CodingTask, cfg: PasskConfig) -> list[Problem]:
    return task.problems(cfg.split, limit=cfg.limit, seed=cfg.seed)


def run_passk(cfg: PasskConfig) -> Run:
    """The reference-solution check, then samples, then rates and verdicts. UserError before anything is written for bad settings or failing
    reference solutions."""
    task = load_task(cfg.task, cfg.data_dir)
    problems, check = tasks.checked_problems(task, problems_of(task, cfg), skip=cfg.skip_failing_references)
    path = find_checkpoint(cfg.ckpt)
    run = Run.create(cfg.run_name, cfg, kind="passk", parent=cfg.ckpt, overwrite=cfg.overwrite)
    with dist.session() as world, run:
        print(f"reference-solution check: {check.passed} of {check.n} pass all tests")
        loaded = loading.load_model(path, world.device, cfg.tags)
        report = find_contamination(cfg, loaded, problems)
        result = evaluate_split(cfg, loaded, task, problems, cfg.split, cfg.k, sorted({1, cfg.k}))
        row = summary(result)
        if world.is_main:
            print(format_summary(result, row, f"{label(path)} on {cfg.task} {cfg.split}"))
            write_rates(run, result, cfg)
        if cfg.gate_parseable or cfg.gate_pass_at_k:
            row |= passes_gate(row["parseable_frac"], result.pass_at[cfg.k].value, cfg)
        if report:
            row |= clean_and_exposed(result, report.how, seed=cfg.seed)
        step = int(loaded.meta["step"])
        run.log_eval(step, dict(result.row(), **row, checkpoint=label(path), split=cfg.split, task=cfg.task))
        run.log_samples(step, [dict(s, split=cfg.split) for s in result.samples])
        kept = {k: row[k] for k in ("verdict", "remedy", "reward_verdict", "gate") if k in row}
        run.finish(kept | ({"left_out": {cfg.split: list(check.failed)}} if check.failed else {}))
    return run


def summary(result: TaskResult) -> dict[str, Any]:
    """parseable_frac, runnable_frac: shares of completions. verdict: by pass@1. reward_verdict: that of `diagnose`."""
    import torch

    rewards = torch.tensor([p.rewards for p in result.problems])  # (P, G)
    correct = torch.tensor([[i < p.c for i in range(p.n)] for p in result.problems])  # (P, G); only counts matter
    found, verdict = diagnose.judge(rewards, correct, min_groups=1), verdict_of(result.pass_at[1].value)
    return dict(
        parseable_frac=result.tier_share(PARSEABLE),
        runnable_frac=result.tier_share(RUNNABLE),
        frac_zero_std_groups=found.frac_zero_std,
        effective_groups=found.effective_groups,
        verdict=verdict,
        remedy=REMEDIES[verdict],
        reward_verdict=found.verdict,
        reward_remedy=found.remedy,
    )


def passes_gate(parseable: float, pass_at_k: float, cfg: PasskConfig) -> dict[str, str]:
    """{"gate": "pass" or "fail"}, printed with both numbers. It does not stop anything: what follows a gate is the caller's choice."""
    gate = "pass" if parseable >= cfg.gate_parseable and pass_at_k >= cfg.gate_pass_at_k else "fail"
    print(
        f"GATE {gate}: parseable {parseable:.1%} (required {cfg.gate_parseable:.0%}), "
        f"pass@{cfg.k} {pass_at_k:.1%} (required {cfg.gate_pass_at_k:.0%})"
    )
    return {"gate": gate}


def format_summary(result: TaskResult, row: dict[str, Any], title: str) -> str:
    """The report for people."""
    least = diagnose.MIN_GROUPS
    few = f" (of {result.N} groups; a firm verdict takes {least})" if result.N < least else ""
    lines = [
        f"{title}: {result}",
        f"  mean tiered reward {result.reward}, parseable {row['parseable_frac']:.1%}, runnable {row['runnable_frac']:.1%}",
        "  " + ", ".join(f"{t} {result.tier_share([t]):.1%}" for t in result.tiers),
        *_by_level(result.problems),
        f"VERDICT by pass@1: {row['verdict']}: {row['remedy']}",
        f"verdict of diagnose on the tiered reward: {row['reward_verdict']}: {row['reward_remedy']}{few}",
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


def write_rates(run: Run, result: TaskResult, cfg: PasskConfig) -> None:
    """One row for each problem: id, split, n, c, pass_rate, tiered_mean, parseable, runnable, tiers."""

    def share(p: ProblemResult, tiers: Sequence[str]) -> float:
        return sum(p.tiers[t] for t in tiers) / p.n

    append_rows(
        run.path / RATES,
        (
            dict(id=p.id, split=cfg.split, n=p.n, c=p.c, pass_rate=p.c / p.n, tiered_mean=p.reward_mean)
            | dict(parseable=share(p, PARSEABLE), runnable=share(p, RUNNABLE), tiers=dict(p.tiers))
            for p in result.problems
        ),
    )


def main(argv: list[str] | None = None) -> None:
    """`codechat passk`, `python -m codechat.evaluation.code_pass_rates`."""
    run_passk(config.parse(PasskConfig, sys.argv[1:] if argv is None else argv, prog="codechat passk", epilog=__doc__))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
