"""The rows of a recipe's stages that walk-throughs read: committed ones, or those of this machine's own runs.

    python -m codechat.reports.frozen_rows nano       freeze the finished runs of recipe nano under reports/frozen/

Source "frozen" is what is committed, so that the numbers of a walk-through hold on any machine. Any other source is a recipe whose runs are read
(`nano` for runs/nano/sft). Both give the same frames.
"""

from __future__ import annotations

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
STAGES = ("pretrain", "sft", "diagnose", "rl", "choose", "evaluate")
DATA = ("corpus", "sft")
READ = {"per_problem": ("evaluate",), "samples": ("rl", "evaluate")}  # stages whose rows of a table are read


def frozen_dir() -> Path:
    """Rows frozen in this root, or those that came with the package."""
    own = paths.ROOT / "reports" / FROZEN
    return own if own.is_dir() else paths.SHIPPED / "reports" / FROZEN


def rows(source: str, stage: str, table: str) -> pd.DataFrame:
    """The rows of one stage's run in table runs, metrics, evals, per_problem or samples; of several samplings (greedy, T=1) the first.

    MissingFile if there are none, RunError if the run is not finished."""
    frames = _frozen() if source == FROZEN else _of_runs(source, [f"{source}/{stage}"])
    found = run_frames.rows_of(frames[table], f"{_recipe(frames)}/{stage}")
    return found[found["sampling"] == found["sampling"].iloc[0]] if "sampling" in found else found


def settings(source: str, stage: str) -> dict[str, Any]:
    """The resolved configuration of a stage's run."""
    return json.loads(rows(source, stage, "runs")["config"].iloc[0])


def manifest(source: str, data: str) -> dict[str, Any]:
    """What the preparation of `data` (corpus or sft) kept, dropped and counted."""
    if source != FROZEN:
        return _manifest(source, data)
    frames = _frozen()
    return run_frames.rows_of(frames["manifests"], f"{_recipe(frames)}/{data}")["manifest"].iloc[0]


def seeds(source: str) -> pd.DataFrame:
    """A row per evaluated seed and comparison of two checkpoints: value, lo, hi and N of the paired difference in pass@1."""
    frames = _frozen() if source == FROZEN else _of_runs(source, run_frames.seeds_of(f"{source}/evaluate"))
    found = frames["runs"].query("kind == 'evaluate'")
    gaps = [
        {"run": run, "comparison": name, **gap}
        for run, summary in zip(found["run"], found["summary"])
        for name, gap in json.loads(summary).items()
        if isinstance(gap, dict)
    ]
    return pd.DataFrame(gaps)


def _frozen() -> Frames:
    return run_frames.load_frozen(frozen_dir())


def _recipe(frames: Frames) -> str:
    return frames["runs"]["run"].iloc[0].rpartition("/")[0]


def _of_runs(source: str, runs: Sequence[str]) -> Frames:
    try:
        return run_frames.collect(runs, samples=None)
    except MissingFile as error:
        raise _missing(source, error) from error


def _manifest(recipe: str, data: str) -> dict[str, Any]:
    path = paths.ROOT / "data" / recipe / data / "manifest.json"
    if not path.is_file():
        raise _missing(recipe, f"{path} does not exist")
    return read_json(path)


def _missing(source: str, reason: object) -> MissingFile:
    make = "`make lab`" if source == "nano" else f"`codechat run {source}`"
    return MissingFile(f"source={source!r}: {reason}; run {make}, or keep source={FROZEN!r}")


def freeze(recipe: str = "nano") -> Frames:
    """Write the rows of the recipe's finished runs below reports/frozen; returns them as read back.

    MissingFile for a missing run, RunError for an unfinished one, ConfigError above 1 MB; nothing is written then."""
    frames = run_frames.collect([f"{recipe}/{stage}" for stage in STAGES], samples=None)
    for table, stages in READ.items():
        frames[table] = frames[table][frames[table]["run"].isin([f"{recipe}/{s}" for s in stages])]
    if siblings := run_frames.seeds_of(f"{recipe}/evaluate")[1:]:  # of other seeds only the result is kept
        frames["runs"] = pd.concat([frames["runs"], run_frames.collect(siblings, samples=None)["runs"]])
    frames["manifests"] = pd.DataFrame(
        [{"run": f"{recipe}/{data}", "manifest": _manifest(recipe, data)} for data in DATA]
    )
    return run_frames.freeze(frames, paths.ROOT / "reports" / FROZEN)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(lambda argv: print(*freeze(*argv)["runs"]["run"], "in", frozen_dir()))
