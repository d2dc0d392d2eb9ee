"""The rows of a recipe's stages that walk-throughs read: committed ones, or those of this machine's own runs.

    python -m codechat.reports.frozen_rows nano       freeze the finished runs of recipe nano under reports/frozen/

Source "frozen" is what is committed, so that the numbers of a walk-through hold on any machine. Any other source is a recipe whose runs are read
(`nano` for runs/nano/sft). Both give the same frames.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
T = TypeVar("T")


def frozen_dir() -> Path:
    """Rows frozen in this root, or those that came with the package."""
    own = paths.ROOT / "reports" / FROZEN
    return own if own.is_dir() else paths.SHIPPED / "reports" / FROZEN


def rows(source: str, stage: str, table: str) -> pd.DataFrame:
    """The rows of one stage's run in table runs, metrics, evals, per_problem or samples; of several samplings (greedy, T=1) the first.

    MissingFile if there are none, RunError if the run is not finished."""
    if source == FROZEN:
        found = _frozen(table, stage)
    else:
        frames = _live(source, lambda: _frames([f"{source}/{stage}"]))
        found = run_frames.rows_of(frames[table], f"{source}/{stage}")
    several = "sampling" in found and found["sampling"].nunique() > 1
    return found[found["sampling"] == found["sampling"].iloc[0]] if several else found


def settings(source: str, stage: str) -> dict[str, Any]:
    """The resolved configuration of a stage's run."""
    return json.loads(rows(source, stage, "runs")["config"].iloc[0])


def manifest(source: str, data: str) -> dict[str, Any]:
    """What the preparation of `data` (corpus or sft) kept, dropped and counted."""
    if source == FROZEN:
        return _frozen("manifests", data)["manifest"].iloc[0]
    return _live(source, lambda: _manifest(source, data))


def seeds(source: str) -> pd.DataFrame:
    """A row per evaluated seed and comparison of two checkpoints: value, lo, hi and N of the paired difference in pass@1."""
    if source == FROZEN:
        found = run_frames.load_frozen(frozen_dir())["runs"]
    else:
        found = _live(source, lambda: _frames(run_frames.seeds_of(f"{source}/evaluate")))["runs"]
    found = found[found["kind"] == "evaluate"]
    gaps = [
        {"run": run, "comparison": name, **gap}
        for run, summary in zip(found["run"], found["summary"])
        for name, gap in json.loads(summary).items()
        if isinstance(gap, dict)
    ]
    return pd.DataFrame(gaps)


def _frozen(table: str, stage: str) -> pd.DataFrame:
    frames = run_frames.load_frozen(frozen_dir())
    recipe = frames["runs"]["run"].iloc[0].rpartition("/")[0]
    return run_frames.rows_of(frames[table], f"{recipe}/{stage}")


def _live(source: str, read: Callable[[], T]) -> T:
    """What `read` returns; a run or file that this machine lacks: how to make it, and the other source."""
    try:
        return read()
    except MissingFile as error:
        make = "`make lab`" if source == "nano" else f"`codechat run {source}`"
        raise MissingFile(f"source={source!r}: {error}; run {make}, or keep source={FROZEN!r}") from error


def _frames(runs: Sequence[str]) -> Frames:
    return run_frames.collect(runs, samples=None)


def _manifest(recipe: str, data: str) -> dict[str, Any]:
    path = paths.ROOT / "data" / recipe / data / "manifest.json"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; `codechat run {recipe}` writes it")
    return read_json(path)


def freeze(recipe: str = "nano") -> Frames:
    """Write the rows of the recipe's finished runs below reports/frozen; returns them as read back.

    Raises MissingFile for a missing run, RunError for an unfinished one, ConfigError above 1 MB; nothing is written then."""
    frames = _frames([f"{recipe}/{stage}" for stage in STAGES])
    for table, stages in READ.items():
        frames[table] = frames[table][frames[table]["run"].isin([f"{recipe}/{s}" for s in stages])]
    siblings = run_frames.seeds_of(f"{recipe}/evaluate")[1:]
    if siblings:  # other seeds: only the result is kept
        frames["runs"] = pd.concat([frames["runs"], _frames(siblings)["runs"]], ignore_index=True)
    manifests = [{"run": f"{recipe}/{data}", "manifest": _manifest(recipe, data)} for data in DATA]
    return run_frames.freeze(frames | {"manifests": pd.DataFrame(manifests)}, paths.ROOT / "reports" / FROZEN)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(lambda argv: print(*freeze(*argv)["runs"]["run"], "in", frozen_dir()))
