"""The rows of a recipe's stages that walk-throughs read: committed ones, or those of this machine's own runs.

Source "frozen" is what is committed (`tools/freeze_rows.py`), so that the numbers of a walk-through hold on any machine. Any other source is a recipe
whose runs are read (`nano` for runs/nano/sft). Both give the same frames.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from codechat.core.atomic_files import read_json
from codechat.core.errors import MissingFile
from codechat.reports import run_frames
from codechat.reports.run_frames import Frames
from codechat.runs import paths

FROZEN = "frozen"


def frozen_dir() -> Path:
    """Rows frozen in this root, or those that came with the package."""
    own = paths.ROOT / "reports" / FROZEN
    return own if own.is_dir() else paths.SHIPPED / "reports" / FROZEN


def rows(source: str, stage: str, table: str) -> pd.DataFrame:
    """The rows of one stage's run in table runs, metrics, evals, per_problem or samples; of several samplings (greedy, T=1) the first.

    MissingFile if there are none, RunError if the run is not finished."""
    frames = _frames(source, [f"{source}/{stage}"])
    found = run_frames.rows_of(frames[table], f"{_recipe(frames)}/{stage}")
    return found[found["sampling"] == found["sampling"].iloc[0]] if "sampling" in found else found


def settings(source: str, stage: str) -> dict[str, Any]:
    """The resolved configuration of a stage's run."""
    return json.loads(rows(source, stage, "runs")["config"].iloc[0])


def manifest(source: str, data: str) -> dict[str, Any]:
    """What the preparation of `data` (corpus or sft) kept, dropped and counted."""
    if source == FROZEN:
        frames = _frames(source, [])
        return run_frames.rows_of(frames["manifests"], f"{_recipe(frames)}/{data}")["manifest"].iloc[0]
    path = paths.ROOT / "data" / source / data / "manifest.json"
    if not path.is_file():
        raise _missing(source, f"{path} does not exist")
    return read_json(path)


def seeds(source: str) -> pd.DataFrame:
    """A row per evaluated seed and comparison of two checkpoints: value, lo, hi and N of the paired difference in pass@1."""
    runs = _frames(source, run_frames.seeds_of(f"{source}/evaluate"))["runs"].query("kind == 'evaluate'")
    gaps = [
        {"run": run, "comparison": name, **gap}
        for run, summary in zip(runs["run"], runs["summary"])
        for name, gap in json.loads(summary).items()
        if isinstance(gap, dict)
    ]
    return pd.DataFrame(gaps)


def _frames(source: str, runs: Sequence[str]) -> Frames:
    if source == FROZEN:
        return run_frames.load_frozen(frozen_dir())
    try:
        return run_frames.collect(runs, samples=None)
    except MissingFile as error:
        raise _missing(source, error) from error


def _recipe(frames: Frames) -> str:
    return frames["runs"]["run"].iloc[0].rpartition("/")[0]


def _missing(source: str, reason: object) -> MissingFile:
    return MissingFile(f"source={source!r}: {reason}; run `codechat run {source}`, or keep source={FROZEN!r}")
