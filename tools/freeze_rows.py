"""Freeze the finished runs of a recipe below reports/frozen: the rows that walk-throughs read.

python tools/freeze_rows.py nano python tools/freeze_rows.py strata RUN ...     of these
evaluations, the strata of each checkpoint: pretrained.jsonl python tools/freeze_rows.py seeds RUN
...      of evaluations of one list of checkpoints, a run per seed: each answer, 0 or 1:
distillation.jsonl
"""

from __future__ import annotations

import pandas as pd

from codechat.core.atomic_files import json_lines, read_rows, write_atomic
from codechat.runs import paths
from codechat.runs.run import Run
from codechat_lab.reports import run_frames
from codechat_lab.reports.run_frames import STRATA, Frames

STAGES = ("pretrain", "sft", "diagnose", "rl", "choose", "evaluate")
DATA = ("corpus", "sft")
# stages whose rows of a table are read
READ = {
    "per_problem": ("evaluate",),
    "samples": ("rl", "evaluate"),
}


def freeze(recipe: str) -> Frames:
    """Write the rows of the recipe's finished runs; returns them as read back.

    MissingFile for a missing run, RunError for an unfinished one; nothing is written then."""
    frames = run_frames.collect([f"{recipe}/{stage}" for stage in STAGES], samples=None)
    for table, stages in READ.items():
        rows = frames[table][frames[table]["run"].isin([f"{recipe}/{s}" for s in stages])]
        first = rows["sampling"].dropna().iloc[:1] if "sampling" in rows else []
        frames[table] = (
            rows[rows["sampling"].isna() | rows["sampling"].isin(first)] if len(first) else rows
        )
    siblings = run_frames.seeds_of(f"{recipe}/evaluate")[1:]
    if siblings:  # of other seeds only the result is kept
        frames["runs"] = pd.concat(
            [frames["runs"], run_frames.collect(siblings, samples=None)["runs"]]
        )
    manifests = [
        {"run": f"{recipe}/{data}", "manifest": run_frames.manifest(recipe, data)} for data in DATA
    ]
    return run_frames.freeze(
        frames | {"manifests": pd.DataFrame(manifests)}, paths.ROOT / "reports" / "frozen"
    )


def freeze_strata(names: list[str]) -> tuple[int, int]:
    """A row per checkpoint and stratum: n, share right with its interval, share without a call,
    share of other tools. A row per natural request, with its answer in the last run."""
    parts = {
        "right": "pass@1",
        "lo": "pass@1/lo",
        "hi": "pass@1/hi",
        "no_call": "named_no_call",
        "other": "named_other",
    }
    said = {"checkpoint", "id", "kind", "verdict"}
    strata: list[dict[str, object]] = []
    natural: list[dict[str, object]] = []
    for run in map(Run.open, names):
        # of the last run only: the rows stay small
        texts = {"request", "answer"} if run.name == names[-1] else set()
        path = run.path / "natural.jsonl"
        if path.exists():
            natural += [
                {k: v for k, v in row.items() if k in said | texts}
                for row in read_rows(path)
                if row["kind"] != "chat"
            ]
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
    for name, rows in (("pretrained", strata), ("everyday/pretrained", natural)):
        write_atomic(paths.ROOT / "reports" / "frozen" / f"{name}.jsonl", json_lines(rows))
    return len(strata), len(natural)


def freeze_seeds(names: list[str]) -> int:
    """A row per training, seed and stratum: greedy answers right (a text of 0 and 1) in the
    order of the problems; and a row per stratum with their tools."""
    found: dict[tuple[str, int, str], list[int]] = {}
    tools: dict[str, list[str]] = {}
    for seed, run in enumerate(map(Run.open, names)):
        for row in sorted(
            read_rows(run.path / "per_problem.jsonl"), key=lambda row: (row["split"], row["id"])
        ):
            stratum = row["id"].rsplit("-", 2)[1]
            found.setdefault(
                (row["checkpoint"].partition("@")[0].removesuffix(f"-s{seed}"), seed, stratum), []
            ).append(row["c"])
            if seed == 0 and row["checkpoint"].partition("@")[0] == run.config["ckpt"][0]:
                tools.setdefault(stratum, []).append(row.get("cluster", row["id"]))
    rows = [
        {"arm": arm, "seed": seed, "stratum": stratum, "correct": "".join(map(str, right))}
        for (arm, seed, stratum), right in found.items()
    ]
    rows += [
        {"arm": "problems", "stratum": stratum, "tools": names} for stratum, names in tools.items()
    ]
    write_atomic(paths.ROOT / "reports" / "frozen" / "distillation.jsonl", json_lines(rows))
    return len(rows)


def main(argv: list[str]) -> None:
    if argv[:1] == ["seeds"]:
        return print(f"{freeze_seeds(argv[1:])} rows of answers")
    if argv[:1] == ["strata"]:
        return print("{} rows of strata, {} of natural requests".format(*freeze_strata(argv[1:])))
    print(*freeze(*argv)["runs"]["run"])


if __name__ == "__main__":
    import sys

    from codechat.cli import guarded

    sys.exit(guarded(main, sys.argv[1:]))
