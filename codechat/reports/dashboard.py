"""A page about runs: curves, evaluations, probes, samples and settings, of finished, running and failed runs alike.

    codechat dashboard nano/rl                     write runs/nano/rl/dashboard.html
    codechat dashboard nano --open                 every run of a recipe in one page, runs/nano/dashboard.html, in a browser
    codechat dashboard runs/* --out all.html --standalone     one file that can be sent

The page shows the state at the time it was written; a run that is still training is drawn as far as it got. Curves of
more than 400 logged steps are drawn at 400 of them, at equal distances.

Left out: updates while a run trains (TensorBoard reads runs/NAME/tb), and judgement: `codechat report` rejects runs that
must not be compared.
"""

from __future__ import annotations

import json
import math
import sys
import time
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codechat import tasks  # they import pandas and torch: when a page is written
from codechat.core import config
from codechat.core.config import differences, opt
from codechat.core.errors import ConfigError, UserError
from codechat.evaluation import behaviour_probes
from codechat.reports import frozen_rows, pages, run_frames
from codechat.runs import paths
from codechat.runs.metrics import METRICS, is_declared
from codechat.runs.run import Run

if TYPE_CHECKING:
    import pandas as pd

STEPS = 400  # points of a curve
SAMPLES = 60  # samples of a run
TEXT = 2_000  # characters of a text
SHOWN = (
    "problem",
    "which",
    "reward",
    "tier",
    "request",
    "gold",
    "completion",
    "checkpoint",
    "split",
    "step",
    "correct",
)
WHAT = ("step", "checkpoint", "split", "sampling", "temperature", "n_problems", "n_samples")  # first in the table
FAMILIES = ("probe", "heldout_loss", "heldout_nats", "loss_domain", "tier", "reward", "kept")
# curves in this order, then the others in that of METRICS
LEADING = (
    "train_loss",
    "val_bpb",
    "val_loss",
    "reward_mean",
    "exact_match",
    "pass@1",
    "pass@8",
    "tier/",
    "frac_zero_std_groups",
    "entropy",
)
FIRST = ("verdict", "pass@1", "pass@8", "exact_match", "reward_mean", "val_bpb", "train_loss")


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Which runs to show, and where to write the page."""

    runs: tuple[str, ...] = opt((), "runs, or a recipe's name for all of its runs", positional=True)
    out: Path | None = opt(
        None, "file to write; none = dashboard.html in the folder of the run or recipe, in runs/ for released models"
    )
    open: bool = opt(False, "open the page in the browser")
    standalone: bool = opt(False, "put the charts' library into the page (0.8 MB), so that it can be sent alone")

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError(
                "no run given; name runs or a recipe: codechat dashboard nano; `codechat runs` lists them"
            )


def chosen(refs: Iterable[str]) -> list[Run]:
    """The runs of these references; a folder of runs stands for each of them, in the order in which they began.

    MissingFile for a reference without a run."""
    found: dict[Path, Run] = {}
    for ref in refs:
        folder = _folder(ref)
        inside = [Run(p.parent) for p in (folder.glob("*/status.json") if folder else ()) if paths.is_run(p.parent)]
        for run in sorted(inside, key=lambda run: str(run.status.get("started"))) or [Run.open(ref)]:
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _folder(ref: str) -> Path | None:
    """The folder of runs that a reference names, such as runs/nano of "nano"; None where it names a run."""
    return next((p for p in (paths.runs_dir() / ref, Path(ref)) if p.is_dir() and not paths.is_run(p)), None)


def of_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows of runs on this machine."""
    return _page([_of_run(run) for run in runs])


def of_frozen() -> dict[str, Any]:
    """What the page shows of the committed rows of the recipe's runs."""
    frames = run_frames.load_frozen(frozen_rows.frozen_dir())
    return _page([_of_row(row, frames) for row in frames["runs"].to_dict("records")])


def _page(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    metrics = {name: {"unit": m.unit, "help": m.help} for name, m in METRICS.items()}
    tiers = {run["name"]: _tiers(run["settings"]) for run in found}
    last = [run for run in found if run["series"]] or found
    return dict(runs=found, metrics=metrics, expected=behaviour_probes.EXPECTED, tiers=tiers, first=last[-1]["name"])


def _tiers(settings: Mapping[str, Any]) -> list[str]:
    """The rungs of the run's task, worst first; none if it has no task that this machine can load."""
    try:
        return list(tasks.load(str(settings["task"])).tiers)
    except (KeyError, UserError):
        return []


def _of_run(run: Run) -> dict[str, Any]:
    import pandas as pd

    status = run.status
    ended = pd.Timestamp(status.get("ended") or pd.Timestamp.now("UTC"))
    started = pd.Timestamp(status["started"]) if status.get("started") else None
    seconds = None if started is None else (ended.tz_localize(None) - started.tz_localize(None)).total_seconds()
    about = dict(name=run.name, kind=status["kind"], status=status["status"], started=str(status.get("started")))
    about |= dict(reason=status.get("reason") or "", seconds=seconds)
    return about | _rows(run.config, run.metrics(), run.evals(), pd.DataFrame(run.samples()))


def _of_row(row: Mapping[str, Any], frames: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    about = dict(name=row["run"], kind=row["kind"], status="finished", started=row["started"], reason="")
    parts = (_mine(frames[table], row["run"]) for table in ("metrics", "evals", "samples"))
    return about | dict(seconds=row["seconds"]) | _rows(json.loads(row["config"]), *parts)


def _mine(frame: pd.DataFrame, run: str) -> pd.DataFrame:
    return frame[frame["run"] == run].dropna(axis="columns", how="all") if "run" in frame else frame


def _rows(
    settings: Mapping[str, Any], metrics: pd.DataFrame, evals: pd.DataFrame, samples: pd.DataFrame
) -> dict[str, Any]:
    series = {name: _series(metrics, name) for name in _in_order(metrics)}
    points = {name: _points(evals, name) for name in _in_order(evals)}
    last = {name: rows[-1] for name, rows in [*series.items(), *points.items()] if rows}
    steps = [int(frame["step"].max()) for frame in (metrics, evals) if len(frame)]
    kept = samples.iloc[_spread(len(samples), SAMPLES)] if len(samples) else samples
    return dict(
        settings=_plain(settings),
        changed=sorted(differences(dict(settings), {})),
        max_steps=settings.get("max_steps"),
        step=max(steps, default=None),
        headline=[_headline(name, last[name]) for name in FIRST if name in last][:3],
        series={name: rows for name, rows in series.items() if rows},
        points={name: rows for name, rows in points.items() if rows},
        evals=_table(evals),
        samples=[_sample(row) for row in kept.to_dict("records")],
        n_samples=len(samples),
    )


def _headline(name: str, point: Sequence[Any]) -> list[Any]:
    return [name, point[1], f"at step {point[0]}"]


def _in_order(frame: pd.DataFrame) -> list[str]:
    """Declared numeric columns, what was learned first, so that every run shows its curves in one order."""
    order = {name: i for i, name in enumerate(dict.fromkeys([*LEADING, *(m.rstrip("*") for m in METRICS)]))}
    names = [c for c in frame if is_declared(c) and not c.endswith(("/lo", "/hi")) and _numeric(frame[c])]
    return sorted(names, key=lambda name: order.get(name, order.get(name.partition("/")[0] + "/", len(order))))


def _numeric(column: pd.Series) -> bool:
    return column.dtype.kind in "iuf" and column.notna().any()


def _series(frame: pd.DataFrame, name: str) -> list[list[float]]:
    known = frame[frame[name].notna()]
    known = known.iloc[_spread(len(known), STEPS)]
    return [[int(step), _short(value)] for step, value in zip(known["step"], known[name])]


def _points(frame: pd.DataFrame, name: str) -> list[list[Any]]:
    """[step, value, low, high, what was measured] of each evaluation; low and high equal the value without an
    interval."""
    rows = []
    for row in frame[frame[name].notna()].to_dict("records"):
        value = _short(row[name])
        bounds = [row.get(f"{name}/{end}") for end in ("lo", "hi")]
        bounds = [value if b is None or b != b else _short(b) for b in bounds]
        measured = [str(row[k]) for k in ("checkpoint", "split", "sampling") if isinstance(row.get(k), str)]
        rows.append([int(row["step"]), value, *bounds, " ".join(measured)])
    return rows


def _table(evals: pd.DataFrame) -> list[dict[str, Any]]:
    """The evaluations as rows: what was measured, then single metrics, with 95 % intervals in the text."""
    names = [n for n in _in_order(evals) if n.partition("/")[0] not in FAMILIES]
    texts = [c for c in ("verdict", "remedy") if c in evals]
    rows = []
    for row in evals.to_dict("records"):
        found = {k: row[k] for k in (*WHAT, *texts) if k in row and row[k] == row[k] and row[k] is not None}
        for name in names:
            if (value := row.get(name)) is not None and value == value:
                low, high = row.get(f"{name}/lo"), row.get(f"{name}/hi")
                shown = _short(value)
                found[name] = shown if low is None or low != low else f"{shown:.3g} ({low:.3g} to {high:.3g})"
        rows.append(_plain(found))
    return rows


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: row[k] for k in SHOWN if k in row and row[k] == row[k] and row[k] is not None}
    return _plain({k: v if len(str(v)) <= TEXT else f"{str(v)[:TEXT]} ..." for k, v in found.items()})


def _spread(n: int, most: int) -> list[int]:
    """At most `most` of n places at equal distances, the first and the last among them."""
    return list(range(n)) if n <= most else [round(i * (n - 1) / (most - 1)) for i in range(most)]


def _short(value: Any) -> float:
    """A number with 5 significant digits: what a chart can show."""
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")


def _plain(value: Any) -> Any:
    """Plain JSON without NaN."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else str(value)
    return value if isinstance(value, (int, str, bool)) or value is None else str(value)


# ---------------------------------------------------------------- the page


def write(refs: Sequence[str], out: Path | None = None, standalone: bool = False) -> Path:
    """Write the dashboard of these runs; returns its path. MissingFile for a run that does not exist, ConfigError above
    2 MB."""
    runs = chosen(refs)
    names = [run.name for run in runs]
    common = (_folder(refs[0]) if len(refs) == 1 else runs[0].path.parent) or runs[0].path
    if runs[0].name.startswith(f"{paths.RELEASED}/"):  # those lie in the package
        common = paths.runs_dir()
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    lead = f"{', '.join(names)}. Written {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC; `codechat dashboard {' '.join(refs)}` writes it again."
    return pages.write_page(
        "dashboard", out or common / "dashboard.html", of_runs(runs), title=title, lead=lead, standalone=standalone
    )


def main(argv: list[str] | None = None) -> None:
    """`codechat dashboard RUN ...`."""
    argv = sys.argv[1:] if argv is None else argv
    cfg = config.parse(DashboardConfig, argv, prog="codechat dashboard", epilog=__doc__)
    path = write(cfg.runs, cfg.out, cfg.standalone)
    print(f"dashboard: {path}")
    if cfg.open and not webbrowser.open(path.resolve().as_uri()):
        print("no browser was found; open the file above")


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
