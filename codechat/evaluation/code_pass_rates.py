"""How often a checkpoint solves code problems before RL is paid for: pass@1, pass@k, how far completions come.

    codechat passk --ckpt nano/sft --task micro --k 8
    codechat passk --ckpt my-sft --task mbpp --data-dir mbpp/full --split train --k 8 --max-new-tokens 256

Two verdicts are printed. The first goes by pass@1: under 1 % RL would stall, so strengthen the base; from 1 to
5 % take the tiered reward, groups of 8 or more and filtered problems; from 5 % on RL as usual; above 85 % the
task is saturated. The second is `diagnose`'s, over the tiered reward: do groups have any variance? A task that
is DEAD by the first and LIVE by the second has a reward to climb and nothing solved yet.

`pass_rates.jsonl` in the run directory has a row for each problem; `codechat filter` reads it. The reward mode
of the task is left aside: rates are of solved problems, means of the tiered reward.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from codechat import tasks
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.evaluation import contamination, diagnose
from codechat.evaluation.evaluate import evaluate_task, label
from codechat.evaluation.results import ProblemResult, TaskResult, parts_of
from codechat.models import loading
from codechat.runs.run import Run, find_checkpoint
from codechat.tasks.base import Problem
from codechat.tasks.coding.rewards import PARSEABLE, RUNNABLE
from codechat.tasks.coding.task import CodingTask

RATES = "pass_rates.jsonl"
STALLS_BELOW, WEAK_BELOW, SATURATED_ABOVE = 0.01, 0.05, 0.85
REMEDIES = {
    "DEAD": "hardly anything is solved and RL would stall: strengthen the base (more pretraining, SFT on such problems) or ease the problems",
    "WEAK": "some problems are solved: use the tiered reward, --group-size 8 or more, and `codechat filter`",
    "LIVE": "enough is solved for standard RL",
    "SATURATED": "the task is solved at this temperature: take harder problems",
}


@dataclass(frozen=True, kw_only=True)
class PasskConfig:
    """Which problems to try, and how often."""

    run_name: str = opt("passk", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    ckpt: str = opt(config.REQUIRED, "checkpoint: run name, run@best, run@STEP, run directory or checkpoint")
    task: str = opt("micro", "code task: micro, mbpp, humaneval, with options as in mbpp:variant=sanitized")
    data_dir: str | None = opt(
        None, "the task's files: a directory or a file; none = what the task has (mbpp: the hub)"
    )
    split: Literal["train", "select", "test", "test_hard"] = opt("train", "split to try; only train can be filtered")
    limit: int | None = opt(None, "problems to try; none = all that the task has")
    k: int = opt(8, "completions per problem")
    temperature: float = opt(1.0, "sampling temperature, the one that RL will use")
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all")
    max_new_tokens: int = opt(128, "longest completion, tokens")
    device_batch_size: int | None = opt(None, "completions sampled at a time; none = what memory allows")
    gate_parseable: float = opt(0.0, "share of completions that must be Python before RL; 0 = no gate", late=True)
    gate_pass_at_k: float = opt(0.0, "pass@k that must be reached before RL; 0 = no gate", late=True)
    contamination: bool = opt(True, "search what the checkpoint was trained on for the problems", identity=False)
    seed: int = opt(0, "seed of problem order and sampling")

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ConfigError(f"k {self.k}: one completion says nothing about variance; set --k 2 or more")
        if not (0 <= self.gate_parseable <= 1 and 0 <= self.gate_pass_at_k <= 1):
            raise ConfigError(
                f"gate_parseable {self.gate_parseable} and gate_pass_at_k {self.gate_pass_at_k}; both are shares from 0 to 1"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: all completions would be the same")


def verdict_of(pass_at_1: float) -> str:
    """DEAD, WEAK, LIVE or SATURATED by the share of completions that are right; see the module's text."""
    if pass_at_1 > SATURATED_ABOVE:
        return "SATURATED"
    if pass_at_1 < STALLS_BELOW:
        return "DEAD"
    return "WEAK" if pass_at_1 < WEAK_BELOW else "LIVE"


def load_task(name: str, data_dir: str | None) -> CodingTask:
    """The code task, its reward set to tiered. ConfigError for a task of another kind."""
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
    """The gold gate, then samples, then rates and verdicts. Raises UserError before anything is written for bad settings
    or failing gold answers."""
    task = load_task(cfg.task, cfg.data_dir)
    problems = problems_of(task, cfg)
    gate = tasks.gold_gate(task, problems).require()
    path = find_checkpoint(cfg.ckpt)
    run = Run.create(cfg.run_name, cfg, kind="passk", parent=cfg.ckpt, overwrite=cfg.overwrite)
    with dist.session() as world, run:
        print(f"gold gate: {gate.passed} of {gate.n} reference programs pass all tests")
        loaded = loading.load_model(path, device=world.device)
        report = contamination.check(problems, loaded.meta.get("lineage", ())) if cfg.contamination else None
        if report and world.is_main:
            print(report)
        result = evaluate_task(
            loaded.model, loaded.tokenizer, loaded.tags, task, problems, n=cfg.k, temperature=cfg.temperature, top_k=cfg.top_k,
            max_new_tokens=cfg.max_new_tokens, ks=sorted({1, cfg.k}), seed=cfg.seed, batch_size=cfg.device_batch_size,
            progress=f"{label(path)} on {cfg.split}",
        )  # fmt: skip
        row = summary(result)
        if world.is_main:
            print(format_summary(result, row, f"{label(path)} on {cfg.task} {cfg.split}"))
        if cfg.gate_parseable or cfg.gate_pass_at_k:
            row |= passes_gate(row["parseable_frac"], result.pass_at[cfg.k].value, cfg)
        if world.is_main:
            write_rates(run, result, cfg)
        if report:
            row |= parts_of(result, report.how, seed=cfg.seed)
        step = int(loaded.meta["step"])
        run.log_eval(step, dict(result.row(), **row, checkpoint=label(path), split=cfg.split, task=cfg.task))
        run.log_samples(step, [dict(s, split=cfg.split) for s in result.samples])
        run.finish({k: row[k] for k in ("verdict", "remedy", "reward_verdict", "gate") if k in row})
    return run


def summary(result: TaskResult) -> dict[str, Any]:
    """parseable and runnable: shares of completions; verdict by pass@1, reward_verdict by `diagnose`."""
    counts, total = result.tier_counts, result.n * result.N
    rewards = torch.tensor([p.rewards for p in result.problems])  # (P, G)
    correct = torch.tensor([[i < p.c for i in range(p.n)] for p in result.problems])  # (P, G), counts are what matters
    found = diagnose.judge(rewards, correct, min_groups=1)
    verdict = verdict_of(result.pass_at[1].value)
    return {
        "parseable_frac": sum(counts[t] for t in PARSEABLE) / total, "runnable_frac": sum(counts[t] for t in RUNNABLE) / total,
        "frac_zero_std_groups": found.frac_zero_std, "effective_groups": found.effective_groups,
        "verdict": verdict, "remedy": REMEDIES[verdict], "reward_verdict": found.verdict, "reward_remedy": found.remedy,
    }  # fmt: skip


def passes_gate(parseable: float, pass_at_k: float, cfg: PasskConfig) -> dict[str, str]:
    """{"gate": "pass" or "fail"}, printed with both numbers. It states and does not stop: what follows a gate is the caller's choice."""
    met = parseable >= cfg.gate_parseable and pass_at_k >= cfg.gate_pass_at_k
    print(
        f"GATE {'pass' if met else 'fail'}: parseable {parseable:.1%} (required {cfg.gate_parseable:.0%}), "
        f"pass@{cfg.k} {pass_at_k:.1%} (required {cfg.gate_pass_at_k:.0%})"
    )
    return {"gate": "pass" if met else "fail"}


def format_summary(result: TaskResult, row: dict[str, Any], title: str) -> str:
    """The report for people."""
    few = (
        f" (of {result.N} groups; a firm verdict takes {diagnose.MIN_GROUPS})" if result.N < diagnose.MIN_GROUPS else ""
    )
    levels = _by_level(result.problems)
    tiers = ", ".join(f"{t} {result.tier_counts[t] / (result.n * result.N):.1%}" for t in result.tiers)
    return "\n".join([
        f"{title}: {result}",
        f"  mean tiered reward {result.reward}, parseable {row['parseable_frac']:.1%}, runnable {row['runnable_frac']:.1%}",
        f"  {tiers}",
        *levels,
        f"VERDICT by pass@1: {row['verdict']}: {row['remedy']}",
        f"verdict of diagnose on the tiered reward: {row['reward_verdict']}: {row['reward_remedy']}{few}",
    ])  # fmt: skip


def _by_level(problems: Sequence[ProblemResult]) -> list[str]:
    """A line for each level, where the problems have levels."""
    by_level: dict[int, list[ProblemResult]] = {}
    for p in problems:
        if "level" in p.meta:
            by_level.setdefault(p.meta["level"], []).append(p)
    return [
        f"  level {level}: pass@1 {sum(p.c / p.n for p in found) / len(found):.3f}, solved at least once "
        f"{sum(p.c > 0 for p in found)} of {len(found)}, mean tiered {sum(p.reward_mean for p in found) / len(found):.3f}"
        for level, found in sorted(by_level.items())
    ]  # fmt: skip


def write_rates(run: Run, result: TaskResult, cfg: PasskConfig) -> None:
    """One row for each problem: id, split, n, c, pass_rate, tiered_mean, parseable, runnable, tiers."""
    rows = (
        dict(id=p.id, split=cfg.split, n=p.n, c=p.c, pass_rate=p.c / p.n, tiered_mean=p.reward_mean,
             parseable=sum(p.tiers[t] for t in PARSEABLE) / p.n, runnable=sum(p.tiers[t] for t in RUNNABLE) / p.n, tiers=dict(p.tiers))
        for p in result.problems
    )  # fmt: skip
    with (run.path / RATES).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main(argv: list[str] | None = None) -> None:
    """`codechat passk`, `python -m codechat.evaluation.code_pass_rates`."""
    run_passk(config.parse(PasskConfig, sys.argv[1:] if argv is None else argv, prog="codechat passk", epilog=__doc__))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
