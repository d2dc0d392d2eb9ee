"""Finished runs as DataFrames, the rows that are frozen of them, and what reports and
walk-throughs compute from these.

    frames = run_frames.gather(["nano/sft", "nano/rl"], "reports/nano/data", frozen=False)    # from the runs, or from
    the frozen rows
    metrics = run_frames.rows_of(frames["metrics"], "nano/rl")
    metrics = run_frames.stage_rows("frozen", "rl", "metrics")                  # what a walk-through reads

`gather` writes the rows it read below `data` and returns them as read back, so that a figure
can be redrawn from committed bytes. Columns of published tables end in "(published)", so that
they never join measured ones. A walk-through reads rows of source "frozen", which
`tools/freeze_rows.py` committed, so that its numbers hold on any machine; any other source is a
recipe whose runs are read (`nano` for runs/nano/sft)."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from codechat.core.atomic_files import json_lines, read_json, read_rows, write_atomic, write_json
from codechat.core.errors import MissingFile, RunError
from codechat.evaluation import intervals, results
from codechat.runs import paths
from codechat.runs.run import Run

Frames = dict[str, pd.DataFrame]

CURVE_ROWS = 2_000  # of a run's metrics: more points than a figure is wide
FROZEN = "frozen"  # the source of committed rows
NUMBERS = "headline.json"  # beside the frozen rows
SAMPLES_PER_RUN = 40
# frozen as csv, as is per_problem without its column tiers; others as jsonl
TABLES = (
    "runs",
    "metrics",
    "evals",
)
COUNTS = ("n", "c")  # of a problem: completions, and how many of them are correct
# of the task funcall: what a request asks for
STRATA = json.loads(Path(__file__).with_name("strata.json").read_text())

# Settings that decide what an evaluation of each kind of run measures; seeds may differ.
SAMPLED = ("task", "temperature", "top_k", "max_new_tokens")
COMPARED = {
    "pretrain": ("data_dir", "seq_len", "eval_tokens"),
    "sft": ("eval_examples", "probe_examples"),
    "reinforce": (*SAMPLED, "eval_examples", "ks"),
    "grpo": ("task", "temperature", "max_new_tokens", "eval_examples", "ks"),
    "evaluate": (*SAMPLED, "data_dir", "split", "limit", "n", "ks", "probe_examples"),
    "swaps": ("data_dir", "split", "limit", "max_new_tokens"),
    "anatomy": (*SAMPLED, "data_dir", "problems", "group_size"),
}
EVALUATIONS = ("evaluate", "swaps", "anatomy")  # kinds of runs that read checkpoints
# splits whose scores are quoted: no checkpoint may be chosen on them
QUOTED = {
    "test",
    "test_hard",
}


def check(runs: Sequence[Run]) -> None:
    """RunError unless the runs are finished, those of one kind were evaluated alike, and no
    checkpoint was chosen on a test split or trained again since."""
    first: dict[tuple[str, bool], Run] = {}
    for run in runs:
        run.require_finished()
        status = run.status
        kind = status["kind"]
        if kind in EVALUATIONS:
            # the scores of a run that was deleted still hold
            for name in filter(paths.exists, _trained(run)):
                started = Run.open(name).status["started"]
                if started > status["started"]:
                    raise RunError(
                        f"run {run.name} evaluated {name}, trained "
                        f"again on {started}; evaluate it again"
                    )
        if kind == "evaluate" and QUOTED & set(run.config.get("split", ())):
            _check_choice(run)
        other = first.setdefault((kind, bool(run.config.get("all_checkpoints"))), run)
        for setting in COMPARED.get(kind, ()):
            a = other.config.get(setting)
            b = run.config.get(setting)
            if a != b:
                raise RunError(
                    f"runs {other.name} and {run.name} differ in {setting}: "
                    f"{a} and {b}; evaluate one again"
                )


def _trained(run: Run, ending: str = "") -> set[str]:
    """The runs whose checkpoints an evaluation read, by references with this ending."""
    refs = run.config.get("ckpt", [])
    refs = [refs] if isinstance(refs, str) else refs
    return {ref.partition("@")[0] for ref in refs if ref.endswith(ending)}


def _check_choice(run: Run) -> None:
    """A score on a test split belongs to one checkpoint of a run, chosen on another split."""
    names = [checkpoint.partition("@")[0] for checkpoint in set(run.evals().get("checkpoint", ()))]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise RunError(
            f"run {run.name} evaluated several checkpoints of {min(twice)} "
            "on test; use --split select"
        )
    best = _trained(run, "@best")
    if not best:
        return
    for chooser in map(Run.open, paths.run_paths()):
        splits = sorted(QUOTED & set(chooser.config.get("split", ())))
        if chooser.config.get("all_checkpoints") and splits and _trained(chooser) & best:
            raise RunError(
                f"run {run.name}: {chooser.name} chose its "
                f"checkpoint on {splits}; choose it on select"
            )


def collect(runs: Sequence[str | Path], samples: int | None = SAMPLES_PER_RUN) -> Frames:
    """The frames runs, metrics (at most CURVE_ROWS per run), evals, per_problem and samples (at
    most `samples` per run), each with a column `run`.

    MissingFile for a run that does not exist, RunError for one that `check` rejects."""
    opened = [Run.open(ref) for ref in runs]
    check(opened)
    return {
        "runs": pd.DataFrame([_describe(run) for run in opened]),
        "metrics": _stack(opened, lambda run: _thinned(run.metrics())),
        "evals": _stack(opened, Run.evals),
        "per_problem": _stack(
            opened, lambda run: pd.DataFrame(read_rows(run.path / "per_problem.jsonl"))
        ),
        "samples": _stack(opened, lambda run: pd.DataFrame(_spread(run.samples(), samples))),
    }


def _describe(run: Run) -> dict[str, Any]:
    status = run.status
    env = run.env
    return {
        "run": run.name,
        "kind": status["kind"],
        "parent": (env.get("parent") or {}).get("run"),
        "seconds": (
            pd.Timestamp(status["ended"]) - pd.Timestamp(status["started"])
        ).total_seconds(),
        "commit": str(env.get("commit", "unknown"))[:9],
        "dirty": bool(env.get("dirty")),
        "config": json.dumps(run.config),
        "summary": json.dumps(status.get("summary") or {}),
    }


def _stack(runs: Sequence[Run], read: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    """One frame of all runs, the run's name in front, without the column `time`, which would
    differ in every copy."""
    frames = [read(run).drop(columns="time", errors="ignore").assign(run=run.name) for run in runs]
    frames = [rows for rows in frames if len(rows)]
    if not frames:
        return pd.DataFrame(columns=["run"])
    whole = pd.concat(frames, ignore_index=True)
    return whole[["run", *whole.columns.drop("run")]]


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """At most CURVE_ROWS rows, each the last values of as many neighbours: no column is lost that is
    logged now and then."""
    if len(rows) <= CURVE_ROWS:
        return rows
    return rows.groupby(np.arange(len(rows)) * CURVE_ROWS // len(rows)).last()


def _spread(rows: Sequence[Any], count: int | None) -> Sequence[Any]:
    """At most `count` rows at equal distances: the first ones would all be of one checkpoint."""
    if not count or len(rows) <= count:
        return rows
    return [rows[i * len(rows) // count] for i in range(count)]


def gather(
    runs: Sequence[str],
    data: Path | str,
    frozen: bool,
    prepare: Callable[[Frames], Frames] | None = None,
) -> Frames:
    """The frames that a report draws from: those of its runs, changed by `prepare` and frozen
    into `data`. With `frozen`, or if this machine has none of the runs, those already frozen
    there."""
    if frozen or (not any(map(paths.exists, runs)) and (Path(data) / "runs.csv").is_file()):
        print(
            f"drawn from the frozen rows{'' if frozen else ': none of the runs is on this machine'}"
        )
        return load_frozen(data)
    frames = collect(runs)
    (Path(data) / NUMBERS).unlink(missing_ok=True)
    return freeze(prepare(frames) if prepare else frames, data)


def rows_of(frame: pd.DataFrame, run: str) -> pd.DataFrame:
    """The rows of one run, without columns that it does not have. MissingFile if there are none."""
    rows = frame[frame["run"] == run]
    if rows.empty:
        raise MissingFile(
            f"no rows of run {run}; there are rows of {', '.join(frame['run'].unique()) or 'no run'}"
        )
    return rows.dropna(axis="columns", how="all").reset_index(drop=True)


def seeds_of(run: str) -> list[str]:
    """The run and its finished siblings RUN-s1, RUN-s2, ... in the order of the seeds; the run
    alone if it is not on this machine."""
    if not paths.exists(run):
        return [run]
    path = paths.find_run(run)
    siblings: dict[int, Path] = {}
    for sibling in path.parent.glob(f"{path.name}-s*"):
        seed = sibling.name.rpartition("-s")[2]
        if (
            seed.isdecimal()
            and paths.is_run(sibling)
            and Run.open(sibling).status["status"] == "finished"
        ):
            siblings[int(seed)] = sibling
    return [run, *(str(siblings[seed]) for seed in sorted(siblings))]


def freeze(frames: Frames, directory: Path | str) -> Frames:
    """Write the frames below `directory` as csv and jsonl with 8 significant digits; returns
    them as `load_frozen` reads them."""
    directory = Path(directory)
    counts = frames.get("per_problem", ())
    flat = {*TABLES, "per_problem"} if len(counts) and "tiers" not in counts else {*TABLES}
    texts = {f"{name}.csv": _csv(frame) for name, frame in frames.items() if name in flat}
    texts |= {f"{name}.jsonl": _jsonl(frame) for name, frame in frames.items() if name not in flat}
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        path = directory / file
        path.with_suffix(".jsonl" if path.suffix == ".csv" else ".csv").unlink(missing_ok=True)
        write_atomic(path, text)
    return load_frozen(directory)


def _csv(frame: pd.DataFrame) -> str:
    """Of counts per problem, the rows of each sampling (greedy, T=1) become one row with
    columns "n SAMPLING" and "c SAMPLING"."""
    wide = frame
    if {"sampling", *COUNTS} <= set(frame):
        keys = [c for c in frame if c not in ("sampling", *COUNTS)]
        wide = frame[keys].drop_duplicates()
        for sampling, rows in frame.groupby("sampling", sort=False):
            named = rows[[*keys, *COUNTS]].rename(columns={c: f"{c} {sampling}" for c in COUNTS})
            wide = wide.merge(named, on=keys, how="left")
    return wide.to_csv(index=False, float_format="%.8g", lineterminator="\n")


def _jsonl(frame: pd.DataFrame) -> str:
    rows = [row.dropna().to_dict() for _, row in frame.iterrows()]
    text = json.dumps(rows, default=lambda number: number.item())  # numbers of numpy
    return json_lines(json.loads(text, parse_float=lambda digits: float(f"{float(digits):.8g}")))


def _lengthened(wide: pd.DataFrame) -> pd.DataFrame:
    """The inverse of `_csv`; frames without columns of samplings as they are."""
    samplings = [c[2:] for c in wide if c.startswith("n ")]
    if not samplings:
        return wide
    keys = [c for c in wide if c[:2] not in ("n ", "c ")]
    parts = []
    for sampling in samplings:
        counts = {f"{c} {sampling}": c for c in COUNTS}
        part = wide[[*keys, *counts]].rename(columns=counts).dropna(subset="n")
        part.insert(len(keys), "sampling", sampling)
        parts.append(part)
    rows = pd.concat(parts, ignore_index=True).astype(dict.fromkeys(COUNTS, int))
    place = rows.groupby(["run", "checkpoint", "split"], sort=False).ngroup()
    return rows.loc[place.sort_values(kind="stable").index].reset_index(drop=True)


def load_frozen(directory: Path | str) -> Frames:
    """The frames that `freeze` wrote. MissingFile if there are none."""
    directory = Path(directory)
    if not (directory / "runs.csv").is_file():
        raise MissingFile(
            f"{directory} holds no frozen rows (runs.csv); `codechat report` writes them"
        )
    tables = {path.stem: _lengthened(pd.read_csv(path)) for path in sorted(directory.glob("*.csv"))}
    texts = {path.stem: pd.DataFrame(read_rows(path)) for path in sorted(directory.glob("*.jsonl"))}
    return tables | {
        name: frame if len(frame) else pd.DataFrame(columns=["run"])
        for name, frame in texts.items()
    }


def headline(numbers: Mapping[str, float], data: Path | str) -> None:
    """Store the numbers that a report prints beside its frozen rows. If numbers are stored
    already, RunError names those that differ in four digits."""
    path = Path(data) / NUMBERS
    found = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    kept = read_json(path) if path.is_file() else found
    changed = [
        f"{n} is {found.get(n)} and was {kept.get(n)}"
        for n in kept | found
        if kept.get(n) != found.get(n)
    ]
    if changed:
        raise RunError(
            f"the headline does not follow from the rows in {data}: "
            f"{'; '.join(changed)}; build it again"
        )
    if not path.is_file():
        write_json(path, found)


def published(table: str) -> pd.DataFrame:
    """A table of reports/published; every column is named "... (published)"."""
    return pd.read_csv(paths.SHIPPED / "reports" / "published" / f"{table}.csv").add_suffix(
        " (published)"
    )


def frozen_dir() -> Path:
    """Rows frozen in this root, or those that came with the package."""
    own = paths.ROOT / "reports" / FROZEN
    return own if own.is_dir() else paths.SHIPPED / "reports" / FROZEN


def stage_rows(source: str, stage: str, table: str) -> pd.DataFrame:
    """The rows of one stage's run in table runs, metrics, evals, per_problem or samples; of
    several samplings (greedy, T=1) the first.

    MissingFile if there are none, RunError if the run is not finished."""
    found = _rows_ending(_frames(source, [f"{source}/{stage}"])[table], stage)
    return found[found["sampling"] == found["sampling"].iloc[0]] if "sampling" in found else found


def settings(source: str, stage: str) -> dict[str, Any]:
    """The resolved configuration of a stage's run."""
    return json.loads(stage_rows(source, stage, "runs")["config"].iloc[0])


def manifest(source: str, data: str) -> dict[str, Any]:
    """What the preparation of `data` (corpus or sft) kept, dropped and counted."""
    if source == FROZEN:
        return _rows_ending(load_frozen(frozen_dir())["manifests"], data)["manifest"].iloc[0]
    return read_json(paths.ROOT / "data" / source / data / "manifest.json")


def seeds(source: str) -> pd.DataFrame:
    """A row per evaluated seed and comparison of two checkpoints: value, lo, hi and N of the
    paired difference in pass@1."""
    runs = _frames(source, seeds_of(f"{source}/evaluate"))["runs"].query("kind == 'evaluate'")
    gaps = []
    for run, summary in zip(runs["run"], runs["summary"]):
        for name, gap in json.loads(summary).items():
            if isinstance(gap, dict):
                gaps.append({"run": run, "comparison": name} | gap)
    return pd.DataFrame(gaps)


def _frames(source: str, runs: Sequence[str]) -> Frames:
    return load_frozen(frozen_dir()) if source == FROZEN else collect(runs, samples=None)


def _rows_ending(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of RECIPE/NAME, for any recipe."""
    run = next((run for run in frame["run"] if run.endswith(f"/{name}")), name)
    return rows_of(frame, run)


class Gains(NamedTuple):
    """Paired gains of several seeds: each seed's, and all together."""

    seeds: list[intervals.Interval]
    all: intervals.Interval


def paired_gains(
    frames: Frames,
    runs: Sequence[str],
    split: str,
    k: int = 1,
    against: Sequence[str] | None = None,
) -> Gains:
    """pass@k of the last checkpoint of each evaluation run minus pass@k of its first, paired by
    problem, on one split. A run is a seed; the interval of all is hierarchical, over seeds and
    problems. against: the runs whose first checkpoint is subtracted, one for each seed."""
    pairs = []
    for run, other in zip(runs, against or runs, strict=True):
        before = _answers(frames["per_problem"], other, split, end=0)
        after = _answers(frames["per_problem"], run, split, end=-1)
        pairs.append((before, after))
    alone = [results.paired_difference(before, after, k=k) for before, after in pairs]
    return Gains(alone, results.difference_over_seeds(pairs, k=k))


def _answers(counts: pd.DataFrame, run: str, split: str, end: int) -> list[dict[str, Any]]:
    """The rows of a run's first (end 0) or last (-1) checkpoint on one split."""
    rows = rows_of(counts, run)
    rows = rows[rows["split"] == split]
    return rows[rows["checkpoint"] == rows["checkpoint"].iloc[end]].to_dict("records")


def strata_over_seeds(frames: Frames, runs: Sequence[str], kinds: Sequence[str]) -> pd.DataFrame:
    """The evaluations of several seeds as one: a row per checkpoint and sampling, named as in
    the first run, with STRATUM/pass@1, its hierarchical interval over seeds and problems in /lo
    and /hi, STRATUM/n and the mean over seeds of STRATUM/named_*.

    The checkpoints of a run are matched by their order. A problem's stratum stands in its id,
    before the number."""
    evals = [rows_of(frames["evals"], run) for run in runs]
    order: dict[str, int] = {}
    for rows in evals:
        order |= {name: place for place, name in enumerate(rows["checkpoint"].unique())}
    rates = pd.concat(evals)
    solved = pd.concat([rows_of(frames["per_problem"], run) for run in runs])
    table = []
    for (place, sampling), rows in rates.groupby(
        [rates["checkpoint"].map(order), "sampling"], sort=False
    ):
        answered = solved[
            (solved["checkpoint"].map(order) == place) & (solved["sampling"] == sampling)
        ]
        row = {"checkpoint": rows["checkpoint"].iloc[0], "sampling": sampling}
        for kind in kinds:
            row |= _stratum(kind, answered) | rows.filter(regex=f"^{kind}/named_").mean().to_dict()
        table.append(row)
    return pd.DataFrame(table)


def _stratum(kind: str, solved: pd.DataFrame) -> dict[str, float]:
    """pass@1 of a stratum over the seeds, from the share of correct completions of each
    problem. Problems of one cluster are drawn together."""
    rows = solved[solved["id"].str.rsplit("-", n=2).str[-2] == kind]
    rows = rows.assign(share=rows["c"] / rows["n"])
    shares = rows.pivot(index="id", columns="run", values="share")
    # the order of seeds and problems
    shares = shares.reindex(index=rows["id"].unique(), columns=rows["run"].unique())
    named: dict[str, str] = {}
    if "cluster" in rows:
        named = rows.dropna(subset="cluster").set_index("id")["cluster"].to_dict()
    clusters = [named.get(problem, problem) for problem in shares.index]
    value = intervals.hierarchical_interval(
        shares.to_numpy(dtype=float).T, clusters=clusters, bounds=(0.0, 1.0)
    )
    return value.row(f"{kind}/pass@1") | {f"{kind}/n": len(shares)}


def gain_table(gains: Mapping[str, Gains]) -> pd.DataFrame:
    """name, value, lo, hi: each seed's gain and that of all, in order."""
    named: dict[str, intervals.Interval] = {}
    for name, found in gains.items():
        named |= {f"{name}, seed {seed}": gain for seed, gain in enumerate(found.seeds)}
        named[f"{name}, {len(found.seeds)} seeds"] = found.all
    rows = [(name, gain.value, gain.lo, gain.hi) for name, gain in named.items()]
    return pd.DataFrame(rows, columns=["name", "value", "lo", "hi"])


def in_points(gain: intervals.Interval) -> str:
    """A difference of shares in words: "+6.5 points [+4.8, +8.2]"."""
    return f"{100 * gain.value:+.1f} points [{100 * gain.lo:+.1f}, {100 * gain.hi:+.1f}]"


def with_settings(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The runs of a report with minutes, the state of the code, and a column for each setting;
    None if a run lacks it."""
    state = runs["dirty"].map({True: "changed since the commit", False: "as committed"})
    table = runs.assign(minutes=runs["seconds"] / 60, state=state)
    configs = [json.loads(config) for config in runs["config"]]
    for name in names:
        table[name] = [config.get(name) for config in configs]
    return table
