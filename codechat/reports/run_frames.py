"""Finished runs as DataFrames, the rows that a report freezes, and published tables.

    frames = run_frames.gather(["nano/sft", "nano/rl"], "reports/nano/data")    # from the runs, or from the frozen rows
    metrics = run_frames.rows_of(frames["metrics"], "nano/rl")

`gather` writes the rows it read below `data` and returns them as read back, so that a figure can be redrawn from committed bytes. Runs that
`run_checks` rejects raise. Columns of published tables end in "(published)", so that they never join measured ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.errors import ConfigError, MissingFile, RunError, nearest
from codechat.reports import run_checks
from codechat.runs import paths
from codechat.runs.run import Run

Frames = dict[str, pd.DataFrame]

MAX_BYTES = 1_000_000
NUMBERS = "headline.json"  # beside the frozen rows
SAMPLES_PER_RUN = 40
TABLES = (
    "runs",
    "metrics",
    "evals",
)  # frozen as csv, and per_problem without its column tiers; others hold text and are frozen as jsonl
COUNTS = ("n", "c")  # of a problem: completions, and how many of them are correct
STRATA = {  # of the task funcall: what a request of the stratum asks for
    "call": "known tools, new values",
    "chain_1": "first call of two",
    "chain_2": "second call of two",
    "phrasing": "known tools, new words",
    "renamed": "known tools, other names",
    "tool": "unseen tools",
    "unfitting": "no tool fits: declined",
    "no_tools": "no tools: answered",
    "code": "code: answered",
}


# ---------------------------------------------------------------- runs to frames


def collect(runs: Sequence[str | Path], samples: int | None = SAMPLES_PER_RUN) -> Frames:
    """The frames runs, metrics, evals, per_problem and samples (at most so many of a run), each with a column `run`.

    Raises MissingFile for a run that does not exist, RunError for one that `run_checks` rejects."""
    opened = [Run.open(ref) for ref in runs]
    run_checks.check(opened)
    return {
        "runs": pd.DataFrame([_describe(run) for run in opened]),
        "metrics": _stack((run, run.metrics()) for run in opened),
        "evals": _stack((run, run.evals()) for run in opened),
        "per_problem": _stack((run, pd.DataFrame(read_rows(run.path / "per_problem.jsonl"))) for run in opened),
        "samples": _stack((run, pd.DataFrame(_spread(run.samples(), samples))) for run in opened),
    }


def _describe(run: Run) -> dict[str, Any]:
    status, env = run.status, run.env
    seconds = (pd.Timestamp(status["ended"]) - pd.Timestamp(status["started"])).total_seconds()
    return {
        "run": run.name,
        "kind": status["kind"],
        "parent": (env.get("parent") or {}).get("run"),
        "seconds": seconds,
        "started": status["started"],
        "commit": str(env.get("commit", "unknown"))[:9],
        "dirty": bool(env.get("dirty")),
        "config_hash": env.get("config_hash"),
        "config": json.dumps(run.config),
        "summary": json.dumps(status.get("summary") or {}),
    }


def _stack(parts: Iterable[tuple[Run, pd.DataFrame]]) -> pd.DataFrame:
    """One frame of all runs, the run's name in front, without the column `time`, which would differ in every copy."""
    frames = [f.drop(columns="time", errors="ignore").assign(run=run.name) for run, f in parts if len(f)]
    if not frames:
        return _empty()
    whole = pd.concat(frames, ignore_index=True)
    return whole[["run", *(c for c in whole if c != "run")]]


def _empty() -> pd.DataFrame:
    return pd.DataFrame({"run": pd.Series(dtype=str)})


def _spread(rows: Sequence[Any], count: int | None) -> list[Any]:
    """At most `count` rows at equal distances: the first ones would all be of one checkpoint."""
    return [rows[i * len(rows) // count] for i in range(count)] if count and len(rows) > count else list(rows)


def gather(
    runs: Sequence[str],
    data: Path | str,
    frozen: bool = False,
    drop: Mapping[str, Sequence[str]] | None = None,
    keep: Mapping[str, str] | None = None,
    more: Callable[[], Frames] | None = None,
) -> Frames:
    """The frames that a report draws from: those of its runs, frozen into `data`; or those already frozen there, with `frozen` or where this machine
    has none of the runs.

    drop: {table: columns that no figure uses}. keep: {table: pandas query on its rows, "" = none}. more: returns frames that no run holds."""
    here = any(paths.exists(run) for run in runs)
    if frozen or (not here and (Path(data) / "runs.csv").is_file()):
        frames = load_frozen(data)
        print(f"drawn from the frozen rows{'' if frozen else ': none of the runs is on this machine'}")
        return frames
    frames = collect(runs) | (more() if more else {})
    for table, query in (keep or {}).items():
        frames[table] = frames[table].query(query) if query and len(frames[table]) else frames[table][:0]
    for table, columns in (drop or {}).items():
        frames[table] = frames[table].drop(columns=list(columns), errors="ignore")
    (Path(data) / NUMBERS).unlink(missing_ok=True)
    return freeze(frames, data)


def rows_of(frame: pd.DataFrame, run: str) -> pd.DataFrame:
    """The rows of one run, without columns that it does not have. MissingFile if there are none."""
    rows = frame[frame["run"] == run]
    if rows.empty:
        raise MissingFile(f"no rows of run {run}; there are rows of {', '.join(frame['run'].unique()) or 'no run'}")
    return rows.dropna(axis="columns", how="all").reset_index(drop=True)


def name_of(ref: str | Path) -> str:
    """The name of a run in the frames."""
    return Run.open(ref).name


def seeds_of(run: str) -> list[str]:
    """The run and its finished siblings RUN-s1, RUN-s2, ... in the order of the seeds; the run alone if it is not on this machine."""
    if not paths.exists(run):
        return [run]
    path = paths.find_run(run)
    seeds = {p: p.name.rpartition("-s")[2] for p in path.parent.glob(f"{path.name}-s*")}
    siblings = sorted((int(seed), p) for p, seed in seeds.items() if seed.isdecimal() and paths.is_run(p))
    return [run, *(str(p) for _, p in siblings if Run.open(p).status["status"] == "finished")]


# ---------------------------------------------------------------- frozen rows


def freeze(frames: Frames, directory: Path | str) -> Frames:
    """Write the frames below `directory` as csv and jsonl with 8 significant digits; returns them as `load_frozen` reads them.

    Raises ConfigError above 1 MB in all; nothing is written then."""
    directory = Path(directory)
    texts = {name: (".csv", _csv(frame)) if _flat(name, frame) else (".jsonl", _jsonl(frame)) for name, frame in frames.items()}  # fmt: skip
    sizes = {name: len(text.encode()) for name, (_, text) in texts.items()}
    if sum(sizes.values()) > MAX_BYTES:
        raise ConfigError(f"{sum(sizes.values()):,} bytes to freeze ({sizes}); at most {MAX_BYTES:,}; take fewer rows")
    directory.mkdir(parents=True, exist_ok=True)
    for name, (suffix, text) in texts.items():
        (directory / f"{name}{'.jsonl' if suffix == '.csv' else '.csv'}").unlink(missing_ok=True)
        write_atomic(directory / f"{name}{suffix}", text)
    return load_frozen(directory)


def _flat(name: str, frame: pd.DataFrame) -> bool:
    return name in TABLES or (name == "per_problem" and len(frame) > 0 and "tiers" not in frame)


def _csv(frame: pd.DataFrame) -> str:
    wide = widened(frame) if {"sampling", *COUNTS} <= set(frame) else frame
    return wide.to_csv(index=False, float_format="%.8g", lineterminator="\n")


def _jsonl(frame: pd.DataFrame) -> str:
    rows = (row.dropna().to_dict() for _, row in frame.iterrows())
    return "".join(json.dumps(_rounded(row), ensure_ascii=False) + "\n" for row in rows)


def widened(counts: pd.DataFrame) -> pd.DataFrame:
    """Counts per problem with a row for each sampling (greedy, T=1), as a row for all: columns "n SAMPLING" and "c SAMPLING"."""
    keys = [c for c in counts if c not in ("sampling", *COUNTS)]
    wide = counts[keys].drop_duplicates()
    for sampling, rows in counts.groupby("sampling", sort=False):
        named = rows[[*keys, *COUNTS]].rename(columns={c: f"{c} {sampling}" for c in COUNTS})
        wide = wide.merge(named, on=keys, how="left")
    return wide


def lengthened(wide: pd.DataFrame) -> pd.DataFrame:
    """The rows that `widened` was given; frames without such columns as they are."""
    samplings = [c[2:] for c in wide if c.startswith("n ")]
    if not samplings:
        return wide
    keys = [c for c in wide if c[:2] not in ("n ", "c ")]
    parts = [
        wide[keys].assign(sampling=s, **{c: wide[f"{c} {s}"] for c in COUNTS}).dropna(subset="n") for s in samplings
    ]
    rows = pd.concat(parts, ignore_index=True).astype(dict.fromkeys(COUNTS, int))
    place = rows.groupby(["run", "checkpoint", "split"], sort=False).ngroup()
    return rows.loc[place.sort_values(kind="stable").index].reset_index(drop=True)


def _rounded(value: Any) -> Any:
    """Plain json with floats of 8 significant digits."""
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return float(f"{value:.8g}") if isinstance(value, float) else value


def load_frozen(directory: Path | str) -> Frames:
    """The frames that `freeze` wrote. MissingFile if there are none."""
    directory = Path(directory)
    if not (directory / "runs.csv").is_file():
        raise MissingFile(f"{directory} holds no frozen rows (runs.csv); `codechat report` writes them")
    named = {name: directory / f"{name}.csv" for name in (*TABLES, "per_problem")}
    tables = {name: lengthened(pd.read_csv(path)) for name, path in named.items() if path.is_file()}
    rows = {p.stem: pd.DataFrame(read_rows(p)) for p in sorted(directory.glob("*.jsonl"))}
    return tables | {name: frame if len(frame) else _empty() for name, frame in rows.items()}


def headline(numbers: Mapping[str, float], data: Path | str) -> None:
    """Store the numbers that a report prints beside its frozen rows; if they are stored already, RunError names those that differ in four digits."""
    path, found = Path(data) / NUMBERS, {name: float(f"{value:.4g}") for name, value in numbers.items()}
    if not path.is_file():
        return write_atomic(path, json.dumps(found, indent=1) + "\n")
    kept = json.loads(path.read_text())
    changed = [name for name in kept | found if kept.get(name) != found.get(name)]
    if changed:
        listed = "; ".join(f"{name} is {found.get(name)} and was {kept.get(name)}" for name in changed)
        raise RunError(f"the headline does not follow from the rows in {data}: {listed}; build it from its runs again")


def published(table: str) -> pd.DataFrame:
    """A table of reports/published; every column is named "... (published)". MissingFile names the tables there are."""
    folder = paths.SHIPPED / "reports" / "published"
    if not (folder / f"{table}.csv").is_file():
        known = sorted(path.stem for path in folder.glob("*.csv"))
        raise MissingFile(f"no published table {table!r}{nearest(table, known)}; there are {', '.join(known)}")
    return pd.read_csv(folder / f"{table}.csv").add_suffix(" (published)")
