"""How often a checkpoint solves code problems, measured before RL, and which of them are worth training on.

    codechat passk  --ckpt my-sft --task mbpp --data-dir mbpp/full --split train --k 8 --max-new-tokens 256 --run-name rates
    codechat filter --rates rates --window 0.05 0.95 --out data/mbpp-kept
    codechat grpo   --init-from my-sft --task mbpp --data-dir data/mbpp-kept

`passk` is `evaluate` with the tiered reward, two verdicts and a row for each problem in `pass_rates.jsonl`. The verdict
by pass@1 says whether RL would stall, that of `diagnose` over the tiered reward whether groups have variance.

`filter` keeps problems with a pass rate in the window; if there are none, those with a mean tiered reward of at least
--min-tiered. The other splits are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from codechat import tasks
from codechat.core import config
from codechat.core.atomic_files import json_lines, read_rows, write_atomic
from codechat.core.command import parse_and_run
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError, MissingFile, RunError
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.evaluation.evaluate import EvaluateConfig, run_evaluation
from codechat.evaluation.results import TaskResult, append_rows
from codechat.runs.run import Run
from codechat.tasks.base import row_of
from codechat.tasks.coding.rewards import PARSEABLE, RUNNABLE

RATES = "pass_rates.jsonl"
DEAD_BELOW, WEAK_BELOW = 0.01, 0.05  # pass@1
REMEDIES = {
    "DEAD": "hardly anything is solved and RL would stall: strengthen the base (more pretraining, SFT on such problems) "
    "or ease the problems",
    "WEAK": "some problems are solved: use the tiered reward, --group-size 8 or more, and `codechat filter`",
    "LIVE": "enough is solved for standard RL",
    "SATURATED": "the task is solved at this temperature: take harder problems",
}


# ---- codechat passk


@dataclass(frozen=True, kw_only=True)
class PasskConfig(EvaluateConfig):
    """Which problems to try, and how often."""

    run_name: str = "passk"
    task: str = "micro"
    split: tuple[Literal["train", "select", "test", "test_hard"], ...] = ("train",)
    max_new_tokens: int = 128
    k: int = opt(8, "completions per problem; sets n, and ks to 1 and k", least=2)
    gate_parseable: float = opt(0.0, "share of completions that must be Python before RL; 0 = no gate", least=0, most=1)
    gate_pass_at_k: float = opt(0.0, "pass@k that must be reached before RL; 0 = no gate", least=0, most=1)

    def __post_init__(self) -> None:
        if self.n not in (8, self.k):
            raise ConfigError(f"n {self.n}; passk takes --k")
        object.__setattr__(self, "n", self.k)
        object.__setattr__(self, "ks", (1, self.k))
        super().__post_init__()


def run_passk(cfg: PasskConfig) -> Run:
    """The evaluation with rates and verdicts."""

    def judge(run: Run, result: TaskResult, which: Mapping[str, str], exposed: Mapping[str, Any]) -> dict[str, Any]:
        row = verdicts(result, cfg)
        if dist.is_main():
            print(*_report(result, row), sep="\n")
            append_rows(run.path / RATES, ({"split": which["split"]} | row for row in rates(result)))
        return row

    return run_evaluation(cfg, "passk", judge, reward="tiered")


def verdicts(result: TaskResult, cfg: PasskConfig) -> dict[str, Any]:
    """Shares of completions that are Python, verdicts by pass@1 and by `diagnose`, and the gate where one is set (it
    stops nothing)."""
    import torch

    table = {key: torch.tensor([e[key] for e in result.examples]).view(-1, result.n) for key in ("reward", "correct")}
    diagnosis, pass_at_1 = diagnose.judge(table["reward"], table["correct"], min_groups=1), result.pass_at[1].value
    verdict = diagnose.verdict_of(pass_at_1, pass_at_1, DEAD_BELOW, WEAK_BELOW)
    row = dict(parseable_frac=result.tier_share(PARSEABLE), runnable_frac=result.tier_share(RUNNABLE))
    row |= dict(frac_zero_std_groups=diagnosis.frac_zero_std, effective_groups=diagnosis.effective_groups)
    row |= dict(verdict=verdict, remedy=REMEDIES[verdict])
    row |= dict(reward_verdict=diagnosis.verdict, reward_remedy=diagnosis.remedy)
    if cfg.gate_parseable or cfg.gate_pass_at_k:
        passed = row["parseable_frac"] >= cfg.gate_parseable and result.pass_at[cfg.k].value >= cfg.gate_pass_at_k
        row["gate"] = "pass" if passed else "fail"
    return row


def _report(result: TaskResult, row: Mapping[str, Any]) -> list[str]:
    """The lines for people, after those of the evaluation."""
    few = f" (of {result.N} groups; a firm verdict takes {diagnose.MIN_GROUPS})" * (result.N < diagnose.MIN_GROUPS)
    python = f"parseable {row['parseable_frac']:.1%}, runnable {row['runnable_frac']:.1%}"
    levels = {level: values for level, values in result.groups("level").items() if level != "other"}
    return [
        f"  mean tiered reward {result.reward}, {python}",
        *(f"  level {level}: pass@1 {passes} (N={size})" for level, (passes, size) in levels.items()),
        f"VERDICT by pass@1: {row['verdict']}: {row['remedy']}",
        f"verdict of diagnose on the tiered reward: {row['reward_verdict']}: {row['reward_remedy']}{few}",
        *([f"GATE {row['gate']}"] if "gate" in row else []),
    ]


def rates(result: TaskResult) -> list[dict[str, Any]]:
    """A row for each problem."""
    rows = []
    for p in result.counts:
        row = dict(id=p["id"], n=p["n"], c=p["c"], pass_rate=p["c"] / p["n"], tiered_mean=p["reward_mean"])
        for name, tiers in (("parseable", PARSEABLE), ("runnable", RUNNABLE)):
            row[name] = sum(p["tiers"][t] for t in tiers) / p["n"]
        rows.append(row | {"tiers": p["tiers"]})
    return rows


main = partial(parse_and_run, PasskConfig, run_passk, "passk", __doc__)


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


def choose(rows: Sequence[Mapping[str, Any]], cfg: FilterConfig) -> tuple[list[Mapping[str, Any]], str]:
    """The rows to keep, and what was kept and why, for people."""
    low, high = cfg.window
    kept = [r for r in rows if low <= r["pass_rate"] <= high]
    why = f"kept {len(kept)}"
    if not kept:
        kept = [r for r in rows if r["tiered_mean"] >= cfg.min_tiered and r["pass_rate"] < low]
        enough = f"with a mean tiered reward of at least {cfg.min_tiered:g}: train with reward=tiered"
        why = f"the window is empty; kept {len(kept)} {enough}" if kept else "nothing is left to train on"
    never, always = sum(r["pass_rate"] < low for r in rows), sum(r["pass_rate"] > high for r in rows)
    counts = f"{never} below a pass rate of {low:g}, {always} above {high:g}, {len(rows) - never - always} between"
    return kept, f"{len(rows)} problems: {counts}\n{why}"


def filter_problems(cfg: FilterConfig) -> dict[str, int]:
    """Write the directory; rows of each file."""
    run = Run.open(cfg.rates)
    if not (run.path / RATES).exists():
        raise MissingFile(f"run {run.name} has no {RATES}; `codechat passk` writes it; give one of its runs to --rates")
    passk = config.from_dict(PasskConfig, run.config)
    if passk.split != ("train",):
        raise ConfigError(f"run {run.name} tried split {', '.join(passk.split)}; run passk with --split train")
    kept, words = choose(list(read_rows(run.path / RATES)), cfg)
    print(words)
    if not kept and not cfg.allow_empty:
        raise RunError(f"nothing of run {run.name} is left; strengthen the base, ease the problems, or widen --window")
    task = tasks.load(passk.task, **passk.source, reward="tiered")
    by_id = {p.id: p for p in task.problems("train", limit=passk.limit, seed=passk.seed)}
    if lost := [r["id"] for r in kept if r["id"] not in by_id]:
        raise DataError(f"{len(lost)} problems of run {run.name} (such as {lost[0]}) are gone; run passk again")
    files = {split: task.problems(split) for split in task.splits} | {"prompt": task.worked}
    files["train"] = [by_id[r["id"]] for r in kept]
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{task.name}.train.jsonl").unlink(missing_ok=True)
    for split, problems in files.items():
        if problems:
            write_atomic(out / f"{task.name}.{split}.jsonl", json_lines(map(row_of, problems)))
            print(f"{out / task.name}.{split}.jsonl: {len(problems)} problems")
    return {split: len(problems) for split, problems in files.items()}


main_filter = partial(parse_and_run, FilterConfig, filter_problems, "filter", __doc__)
