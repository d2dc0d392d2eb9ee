"""The rows of a recipe's stages that walk-throughs read: committed ones, or those of this machine's own runs.

    python -m codechat.reports.frozen_rows nano       freeze the finished runs of recipe nano under reports/frozen/

A walk-through reads the rows of a stage from a source. Source "frozen" is what is committed, so that its numbers hold
on any machine. Any other source is the prefix of run names (`nano` for runs/nano/sft), so that a copy shows the runs
just made. Both give the same frames.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from codechat.core.atomic_files import read_json, read_rows
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
    found = _all_rows(source, stage, table)
    several = "sampling" in found and found["sampling"].nunique() > 1
    return found[found["sampling"] == found["sampling"].iloc[0]] if several else found


def _all_rows(source: str, stage: str, table: str) -> pd.DataFrame:
    if source == FROZEN:
        return _of_stage(run_frames.load_frozen(frozen_dir())[table], stage)
    return run_frames.rows_of(_live(source, [f"{source}/{stage}"])[table], f"{source}/{stage}")


def settings(source: str, stage: str) -> dict[str, Any]:
    """The resolved configuration of a stage's run."""
    return json.loads(rows(source, stage, "runs")["config"].iloc[0])


def manifest(source: str, data: str) -> dict[str, Any]:
    """What the preparation of `data` (corpus or sft) kept, dropped and counted."""
    if source == FROZEN:
        return _of_stage(run_frames.load_frozen(frozen_dir())["manifests"], data)["manifest"].iloc[0]
    with _told_what_to_do(source):
        return _manifest(source, data)


def _live(source: str, runs: Sequence[str]) -> Frames:
    with _told_what_to_do(source):
        return _frames(runs)


@contextlib.contextmanager
def _told_what_to_do(source: str) -> Iterator[None]:
    """A run or file that a notebook's `source` names and this machine lacks: how to make it, and the other source."""
    try:
        yield
    except MissingFile as error:
        make = "`make lab`" if source == "nano" else f"`codechat run {source}`"
        raise MissingFile(f"source={source!r}: {error}; run {make}, or keep source={FROZEN!r}") from error


def _of_stage(frame: pd.DataFrame, stage: str) -> pd.DataFrame:
    """The rows of run RECIPE/stage, whatever the recipe."""
    runs = [run for run in frame["run"].unique() if run.rpartition("/")[2] == stage]
    return run_frames.rows_of(frame, runs[0] if runs else stage)


def seeds(source: str) -> pd.DataFrame:
    """A row per evaluated seed and comparison of two checkpoints: value, lo, hi and N of the paired difference in
    pass@1."""
    if source == FROZEN:
        found = run_frames.load_frozen(frozen_dir())["runs"]
    else:
        found = _live(source, run_frames.seeds_of(f"{source}/evaluate"))["runs"]
    found = found[found["kind"] == "evaluate"]
    gaps = [
        {"run": run, "comparison": name, **gap}
        for run, summary in zip(found["run"], found["summary"])
        for name, gap in json.loads(summary).items()
        if isinstance(gap, dict)
    ]
    return pd.DataFrame(gaps)


def freeze(recipe: str = "nano", directory: Path | str | None = None) -> Frames:
    """Write the rows of the recipe's finished runs below `directory` (reports/frozen); returns them as read back.

    Raises MissingFile for a missing run, RunError for an unfinished one, ConfigError above 1 MB; nothing is written
    then."""
    frames = _frames([f"{recipe}/{stage}" for stage in STAGES])
    for table, stages in READ.items():
        frames[table] = frames[table][frames[table]["run"].isin([f"{recipe}/{s}" for s in stages])]
    siblings = run_frames.seeds_of(f"{recipe}/evaluate")[1:]
    if siblings:  # other seeds: only the result is kept
        frames["runs"] = pd.concat([frames["runs"], _frames(siblings)["runs"]], ignore_index=True)
    found = [{"run": f"{recipe}/{data}", "manifest": _manifest(recipe, data)} for data in DATA]
    frames["manifests"] = pd.DataFrame(found)
    return run_frames.freeze(frames, paths.ROOT / "reports" / FROZEN if directory is None else directory)


def _frames(runs: Sequence[str]) -> Frames:
    """Frames of finished runs with every sample they hold; `run_frames.collect` keeps fewer."""
    frames, kept = run_frames.collect(runs), []
    for run in runs:
        path = paths.find_run(run)
        found = pd.DataFrame(read_rows(path / "samples.jsonl")).drop(columns="time", errors="ignore")
        kept.append(found.assign(run=paths.name_of(path)))
    return frames | {"samples": pd.concat(kept, ignore_index=True)}


def _manifest(recipe: str, data: str) -> dict[str, Any]:
    path = paths.ROOT / "data" / recipe / data / "manifest.json"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; `codechat run {recipe}` writes it")
    return read_json(path)


def main(argv: list[str] | None = None) -> None:
    """`python -m codechat.reports.frozen_rows nano`."""
    frames = freeze(*(sys.argv[1:] if argv is None else argv))
    print(f"{', '.join(frames['runs']['run'])} in {frozen_dir()}")


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
