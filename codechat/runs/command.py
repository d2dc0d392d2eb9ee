"""`codechat runs`: list runs, show one, compare two.

codechat runs                                     every run, with its state and last checkpoint
codechat runs show nano/rl                        settings, origin, last metrics, evaluations
codechat runs compare nano/sft nano/sft-s1        the settings that differ
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.atomic_files import read_rows
from codechat.core.config import differences, opt
from codechat.core.errors import ConfigError
from codechat.runs.run import Run, declared, list_runs, runs_dir, unit_of

N_RUNS = {"list": 0, "show": 1, "compare": 2}


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """The action and its runs."""

    action: Literal["list", "show", "compare"] = opt("list", "what to do", positional=True)
    runs: tuple[str, ...] = opt((), "runs: one for show, two for compare", positional=True)

    def __post_init__(self) -> None:
        if len(self.runs) != N_RUNS[self.action]:
            raise ConfigError(
                f"{self.action} got {len(self.runs)} runs; it takes {N_RUNS[self.action]}"
            )


def show_list() -> None:
    """One line per run."""
    frame = list_runs()
    if frame.empty:
        print(f"no runs in {runs_dir()}; `codechat run nano` makes some")
        return
    frame["step"] = ["" if step is None or step != step else int(step) for step in frame["step"]]
    print(frame.drop(columns="reason", errors="ignore").fillna("").to_string(index=False))


def show_run(ref: str) -> None:
    """Status, origin, settings, the last value of each metric with its unit, and the
    evaluations."""
    run = Run.open(ref)
    status = run.status
    env = run.env
    about: dict[str, Any] = {"run": run.name, "directory": str(run.path)}
    for key in ("kind", "status", "reason", "started", "ended"):
        about[key] = status.get(key)
    about["parent"] = (env.get("parent") or {}).get("ref")
    about["commit"] = env.get("commit")
    about["checkpoints"] = ", ".join(map(str, run.checkpoints()))
    about |= status.get("summary", {})
    _section("", {key: value for key, value in about.items() if value not in (None, "")})
    _section("settings", {key: value for key, (value, _) in differences(run.config, {}).items()})
    last = {}  # name -> (value, step)
    for row in read_rows(run.path / "metrics.jsonl"):
        for name, value in row.items():
            if declared(name):
                last[name] = (value, row["step"])
    texts = {}
    for name, (value, step) in last.items():
        texts[name] = f"{_short(value)} {unit_of(name)}".rstrip() + f" at step {step}"
    _section("metrics (last value)", texts)
    for row in read_rows(run.path / "eval.jsonl"):
        where = " ".join(str(row[key]) for key in ("checkpoint", "task", "split") if key in row)
        _section(
            f"evaluation at step {row['step']} {where}",
            {k: v for k, v in row.items() if declared(k)},
        )


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
    changes = differences(Run.open(a).config, Run.open(b).config)
    print(f"{a} -> {b}" if changes else f"{a} and {b} have the same settings")
    _section("", {name: f"{_short(x)} -> {_short(y)}" for name, (x, y) in changes.items()})


def main(cfg: RunsConfig) -> None:
    """`codechat runs`."""
    if cfg.action == "list":
        show_list()
    elif cfg.action == "show":
        show_run(*cfg.runs)
    else:
        show_difference(*cfg.runs)
