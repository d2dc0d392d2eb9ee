"""`codechat runs`: list runs, show one, compare two, replay one into a tracker.

    codechat runs                                     every run, with its state and last checkpoint
    codechat runs show nano/rl                        settings, where it came from, last metrics, evaluations
    codechat runs compare nano/sft nano/sft-s1        the settings in which they differ
    codechat runs export nano/rl --wandb --offline    replay the metrics into Weights & Biases

A loop with --wandb sends the same rows while it trains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core import config
from codechat.core.atomic_files import read_rows
from codechat.core.config import differences, opt
from codechat.core.errors import ConfigError
from codechat.runs.metrics import is_declared, metric
from codechat.runs.run import Run, compare_configs, list_runs, runs_dir
from codechat.runs.tracker import PROJECT, Tracker, tracked_row

N_RUNS = {"list": 0, "show": 1, "compare": 2, "export": 1}


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """The action and its runs."""

    action: Literal["list", "show", "compare", "export"] = opt("list", "what to do", positional=True)
    runs: tuple[str, ...] = opt((), "runs: one for show and export, two for compare", positional=True)
    wandb: bool = opt(False, "export to Weights & Biases (pip install wandb)")
    offline: bool = opt(False, "write the export into the run directory, for a later `wandb sync`")
    project: str = opt(PROJECT, "project of the tracker")

    def __post_init__(self) -> None:
        if len(self.runs) != N_RUNS[self.action]:
            raise ConfigError(f"{self.action} got {len(self.runs)} runs; it takes {N_RUNS[self.action]}")
        if self.action == "export" and not self.wandb:
            raise ConfigError("export where to? add --wandb (with --offline where there is no network)")


def show_list() -> None:
    """One line per run."""
    frame = list_runs()
    if frame.empty:
        print(f"no runs in {runs_dir()}; `codechat run nano` makes some")
        return
    frame["step"] = ["" if step is None or step != step else int(step) for step in frame["step"]]
    print(frame.drop(columns="reason", errors="ignore").fillna("").to_string(index=False))


def show_run(ref: str) -> None:
    """Status, origin, settings, the last value of each metric with its unit, and the evaluations."""
    run = Run.open(ref)
    status, env = run.status, run.env
    about = {"run": run.name, "directory": str(run.path)}
    about |= {k: status.get(k) for k in ("kind", "status", "reason", "started", "ended")}
    about |= {"parent": (env.get("parent") or {}).get("ref"), "commit": env.get("commit")}
    about |= {"checkpoints": ", ".join(map(str, run.checkpoints())), **status.get("summary", {})}
    _section("", {key: value for key, value in about.items() if value not in (None, "")})
    _section("settings", {key: value for key, (value, _) in differences(run.config, {}).items()})
    rows = read_rows(run.path / "metrics.jsonl")
    last = {k: (v, row["step"]) for row in rows for k, v in row.items() if is_declared(k)}
    units = {k: f"{_short(v)} {metric(k).unit}".rstrip() + f" at step {n}" for k, (v, n) in last.items()}
    _section("metrics (last value)", units)
    for row in read_rows(run.path / "eval.jsonl"):
        where = " ".join(str(row[key]) for key in ("checkpoint", "task", "split") if key in row)
        _section(f"evaluation at step {row['step']} {where}", {k: v for k, v in row.items() if is_declared(k)})


def _section(title: str, rows: Mapping[str, Any]) -> None:
    if title and rows:
        print(f"\n{title}")
    width = max(map(len, rows), default=0)
    for key, value in rows.items():
        print(f"  {key:<{width}}  {_short(value)}")


def _short(value: Any) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if isinstance(value, str) or len(text) <= 60 else text[:57] + "..."


def show_difference(a: str, b: str) -> None:
    """The settings in which two runs differ."""
    frame = compare_configs(a, b)
    same = f"{a} and {b} have the same settings"
    print(same if frame.empty else frame.rename(columns={"a": a, "b": b}).map(_short).to_string())


def tracker_rows(run: Run) -> Iterator[dict[str, Any]]:
    """What the tracker gets of a run, in order of steps."""
    files = {"metrics.jsonl": False, "eval.jsonl": True}
    rows = [tracked_row(row, evaluation) for file, evaluation in files.items() for row in read_rows(run.path / file)]
    yield from sorted(rows, key=lambda row: row["step"])


def export_wandb(ref: str, project: str, offline: bool) -> None:
    """Replay a run's metrics and evaluations into Weights & Biases, in the place of an earlier replay."""
    run, count = Run.open(ref), 0
    mode = "offline" if offline else "online"
    tracker = Tracker(run.name, run.config, run.status["kind"], run.path, project=project, mode=mode)
    for count, row in enumerate(tracker_rows(run), 1):
        tracker.run.log(row)
    tracker.finish()
    where = f"{run.path / 'wandb'}; upload with `wandb sync`" if offline else f"project {project}"
    print(f"{run.name}: {count} rows in {where}")


def main(argv: list[str] | None = None) -> None:
    """`codechat runs`."""
    cfg = config.parse(RunsConfig, sys.argv[1:] if argv is None else argv, prog="codechat runs", epilog=__doc__)
    if cfg.action == "export":
        export_wandb(*cfg.runs, cfg.project, cfg.offline)
    else:
        {"list": show_list, "show": show_run, "compare": show_difference}[cfg.action](*cfg.runs)
