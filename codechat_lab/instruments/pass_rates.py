"""Before RL: how often does a checkpoint solve code problems, and which are worth training on?

    codechat passk  --ckpt my-sft --task my_programs.py --split train --max-new-tokens 256 \\
        --run-name rates
    codechat filter --rates rates --window 0.05 0.95 --out data/kept
    codechat grpo   --init-from my-sft --task my_programs.py --data-dir data/kept

`passk` is `evaluate` with the tiered reward and two verdicts: by pass@1, and by the variance of
groups (`diagnose`). `filter` keeps problems with a pass rate in the window; if there are none,
those with a mean tiered reward of at least 0.1. It copies the other splits unchanged."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codechat import tasks
from codechat.core.atomic_files import json_lines, write_atomic
from codechat.core.errors import ConfigError, DataError
from codechat.data.prepared import written_by_one
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.evaluation.evaluate import run_evaluation
from codechat.evaluation.results import TaskResult, read_per_problem
from codechat.evaluation.settings import MIN_GROUPS
from codechat.runs.run import Run
from codechat.tasks.base import row_of
from codechat_lab.instruments.pass_rates_settings import FilterConfig, PasskConfig

DEAD_BELOW = 0.01  # pass@1
WEAK_BELOW = 0.05
MIN_TIERED = 0.1  # mean tiered reward of a problem that is kept although nothing solves it


# ---- codechat passk


def run_passk(cfg: PasskConfig) -> Run:
    """The evaluation with verdicts."""

    def judge(run: Run, result: TaskResult, *_: Any) -> dict[str, Any]:
        row = verdicts(result, cfg)
        if dist.is_main():
            print(*_report(result, row), sep="\n")
        return row

    if not hasattr(tasks.find_class(cfg.task)[0], "tier_groups"):
        raise ConfigError(
            f"task {cfg.task!r} has no tiered reward; passk takes tasks of programs, "
            "such as micro; set --task micro, or use codechat diagnose"
        )
    return run_evaluation(cfg, "passk", judge, reward="tiered")


def verdicts(result: TaskResult, cfg: PasskConfig) -> dict[str, Any]:
    """Shares of completions that are Python, verdicts by pass@1 and by `diagnose`, and a gate
    if one is set. The gate stops nothing."""
    import torch

    rewards = torch.tensor([e["reward"] for e in result.examples]).view(-1, result.n)
    correct = torch.tensor([e["correct"] for e in result.examples]).view(-1, result.n)
    signal = diagnose.judge(rewards, correct, min_groups=1)
    solved = result.pass_at[1].value
    verdict = diagnose.verdict_of(solved, solved, DEAD_BELOW, WEAK_BELOW)
    row: dict[str, Any] = {
        name: result.tier_share(tiers) for name, tiers in tier_groups(result).items()
    }
    row |= dict(
        frac_zero_std_groups=signal.frac_zero_std_groups,
        effective_groups=signal.effective_groups,
        verdict=verdict,
        remedy=diagnose.REMEDIES["pass@1"][verdict],
        reward_verdict=signal.verdict,
        reward_remedy=signal.remedy,
    )
    if cfg.gate_parseable or cfg.gate_pass_at_k:
        solves = result.pass_at[max(cfg.ks)].value >= cfg.gate_pass_at_k
        parses = row.get("parseable_frac", 1.0) >= cfg.gate_parseable
        row["gate"] = "pass" if solves and parses else "fail"
    return row


def tier_groups(result: TaskResult) -> Mapping[str, Sequence[str]]:
    """Metric -> the tiers whose share it is, as the task declares them; none for most tasks."""
    return getattr(result.task, "tier_groups", {})


def _report(result: TaskResult, row: Mapping[str, Any]) -> list[str]:
    """The lines for people, after those of the evaluation."""
    shares = [f", {name.removesuffix('_frac')} {row[name]:.1%}" for name in tier_groups(result)]
    lines = [f"  mean tiered reward {result.reward}{''.join(shares)}"]
    for level, group in result.groups("level").items():
        if level != "other":
            lines.append(f"  level {level}: pass@1 {group.passes} (N={group.n})")
    few = f" (of {result.N} groups; a firm verdict takes {MIN_GROUPS})"
    lines += [
        f"VERDICT by pass@1: {row['verdict']}: {row['remedy']}",
        f"verdict of diagnose on the tiered reward: {row['reward_verdict']}: {row['reward_remedy']}"
        + (few if result.N < MIN_GROUPS else ""),
    ]
    if "gate" in row:
        lines.append(f"GATE {row['gate']}")
    return lines


# ---- codechat filter


def choose(rows: Sequence[Mapping[str, Any]], window: tuple[float, ...]) -> tuple[list[str], str]:
    """The ids of problems to keep, and what was kept and why, for people. rows: of
    per_problem.jsonl."""
    low, high = window
    rates = {row["id"]: row["c"] / row["n"] for row in rows}
    kept = [id for id, rate in rates.items() if low <= rate <= high]
    why = f"kept {len(kept)}"
    if not kept:
        unsolved = [row for row in rows if rates[row["id"]] < low]
        kept = [row["id"] for row in unsolved if row["reward_mean"] >= MIN_TIERED]
        enough = f"with a mean tiered reward of at least {MIN_TIERED:g}: train with reward=tiered"
        why = f"the window is empty; kept {len(kept)} {enough}"
    if not kept:
        why = "nothing is left to train on"
    never = sum(rate < low for rate in rates.values())
    always = sum(rate > high for rate in rates.values())
    counts = (
        f"{never} below a pass rate of {low:g}, {always} above {high:g}, "
        f"{len(rows) - never - always} between"
    )
    return kept, f"{len(rows)} problems: {counts}\n{why}"


def filter_problems(cfg: FilterConfig) -> dict[str, int]:
    """Write the directory; rows of each file."""
    run = Run.open(cfg.rates)
    run.require_finished()
    tried = run.config
    rows = read_per_problem(run)
    if {row["split"] for row in rows} != {"train"}:
        raise ConfigError(f"run {run.name} tried another split; run passk with --split train")
    first = [row for row in rows if row["sampling"] == rows[0]["sampling"]]
    kept, words = choose(first, cfg.window)
    print(words)
    # with splits and worked examples
    task: Any = tasks.load(tried["task"], source=tried["data_dir"], reward="tiered")
    by_id = {p.id: p for p in task.problems("train", limit=tried["limit"], seed=tried["seed"])}
    lost = [id for id in kept if id not in by_id]
    if lost:
        raise DataError(
            f"{len(lost)} problems of run {run.name} (such as {lost[0]}) are gone; run passk again"
        )
    files = {split: task.problems(split) for split in task.splits} | {"prompt": task.worked}
    files["train"] = [by_id[id] for id in kept]
    out = Path(cfg.out)
    if tried["data_dir"] and out.resolve() == Path(tried["data_dir"]).resolve():
        raise ConfigError(
            f"--out {cfg.out} holds the problems that are filtered; choose another --out"
        )
    with written_by_one(out, wait=True):
        # where none is kept, nothing would replace the problems of an earlier call
        (out / f"{task.name}.train.jsonl").unlink(missing_ok=True)
        for split, problems in files.items():
            if problems:
                file = out / f"{task.name}.{split}.jsonl"
                write_atomic(file, json_lines(map(row_of, problems)))
                print(f"{file}: {len(problems)} problems")
    return {split: len(problems) for split, problems in files.items()}
