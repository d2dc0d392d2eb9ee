"""Freeze the finished runs of a recipe below reports/frozen: the rows that walk-throughs read.

python tools/freeze_rows.py nano
"""

from __future__ import annotations

import pandas as pd

from codechat.reports import run_frames
from codechat.reports.run_frames import Frames
from codechat.runs import paths

STAGES = ("pretrain", "sft", "diagnose", "rl", "choose", "evaluate")
DATA = ("corpus", "sft")
READ = {"per_problem": ("evaluate",), "samples": ("rl", "evaluate")}  # stages whose rows of a table are read


def freeze(recipe: str) -> Frames:
    """Write the rows of the recipe's finished runs; returns them as read back.

    MissingFile for a missing run, RunError for an unfinished one, ConfigError above 1 MB; nothing is written then."""
    frames = run_frames.collect([f"{recipe}/{stage}" for stage in STAGES], samples=None)
    for table, stages in READ.items():
        rows = frames[table][frames[table]["run"].isin([f"{recipe}/{s}" for s in stages])]
        first = rows["sampling"].dropna().iloc[:1] if "sampling" in rows else []
        frames[table] = rows[rows["sampling"].isna() | rows["sampling"].isin(first)] if len(first) else rows
    if siblings := run_frames.seeds_of(f"{recipe}/evaluate")[1:]:  # of other seeds only the result is kept
        frames["runs"] = pd.concat([frames["runs"], run_frames.collect(siblings, samples=None)["runs"]])
    manifests = [{"run": f"{recipe}/{data}", "manifest": run_frames.manifest(recipe, data)} for data in DATA]
    return run_frames.freeze(frames | {"manifests": pd.DataFrame(manifests)}, paths.ROOT / "reports" / "frozen")


if __name__ == "__main__":
    import sys

    from codechat.cli import guarded

    sys.exit(guarded(lambda argv: print(*freeze(*argv)["runs"]["run"]), sys.argv[1:]))
