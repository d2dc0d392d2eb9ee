"""Freeze the finished runs of a recipe below reports/frozen: the rows that walk-throughs read.

python tools/freeze_rows.py nano
python tools/freeze_rows.py strata RUN ...     of these evaluations, the strata of each checkpoint: pretrained.jsonl
"""

from __future__ import annotations

import pandas as pd

from codechat.core.atomic_files import json_lines, read_rows, write_atomic
from codechat.reports import run_frames
from codechat.reports.run_frames import STRATA, Frames
from codechat.runs import paths
from codechat.runs.run import Run

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


def freeze_strata(names: list[str]) -> tuple[int, int]:
    """A row per checkpoint and stratum: n, share right with its interval, share without a call, share of other tools. A row per natural request,
    with its answer in the last run."""
    parts = {
        "right": "pass@1",
        "lo": "pass@1/lo",
        "hi": "pass@1/hi",
        "no_call": "named_no_call",
        "other": "named_other",
    }
    said = {"checkpoint", "id", "kind", "trained", "verdict"}
    strata: list[dict[str, object]] = []
    natural: list[dict[str, object]] = []
    for run in map(Run.open, names):
        texts = {"request", "answer"} if run.name == names[-1] else set()  # of the last run only: the rows stay small
        if (path := run.path / "natural.jsonl").exists():
            natural += [{k: v for k, v in row.items() if k in said | texts} for row in read_rows(path)]
            continue
        strata += [
            {
                "checkpoint": row["checkpoint"],
                "sampling": row["sampling"],
                "stratum": stratum,
                "n": int(row[f"{stratum}/n"]),
            }
            | {key: round(row[f"{stratum}/{part}"], 4) for key, part in parts.items()}
            for row in run.evals().to_dict("records")
            for stratum in STRATA
            if row.get(f"{stratum}/n", 0) > 0  # the other split has it
        ]
    for name, rows in (("pretrained", strata), ("pretrained_natural", natural)):
        write_atomic(paths.ROOT / "reports" / "frozen" / f"{name}.jsonl", json_lines(rows))
    return len(strata), len(natural)


def main(argv: list[str]) -> None:
    if argv[:1] == ["strata"]:
        return print("{} rows of strata, {} of natural requests".format(*freeze_strata(argv[1:])))
    print(*freeze(*argv)["runs"]["run"])


if __name__ == "__main__":
    import sys

    from codechat.cli import guarded

    sys.exit(guarded(main, sys.argv[1:]))
