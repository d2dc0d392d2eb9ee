"""What reports compute from the frames of `run_frames`: paired gains, means over seeds, settings of runs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from codechat.evaluation.intervals import Interval, hierarchical_interval
from codechat.evaluation.results import difference_over_seeds, paired_difference
from codechat.reports.run_frames import Frames, rows_of


class Gains(NamedTuple):
    """Paired gains of several seeds: each seed's, and all together."""

    seeds: list[Interval]
    all: Interval


def paired_gains(
    frames: Frames, runs: Sequence[str], split: str, k: int = 1, against: Sequence[str] | None = None
) -> Gains:
    """pass@k of each evaluation run's last checkpoint minus that of its first, paired by problem, on one split. A run is a seed; all together
    have the hierarchical interval over seeds and problems. against: minus that of the first checkpoint of these runs, one for each seed."""

    def problems(run: str, end: int) -> list[dict[str, Any]]:
        rows = rows_of(frames["per_problem"], run)
        rows = rows[rows["split"] == split]
        return rows[rows["checkpoint"] == rows["checkpoint"].iloc[end]].to_dict("records")

    pairs = [(problems(other, 0), problems(run, -1)) for run, other in zip(runs, against or runs, strict=True)]
    return Gains([paired_difference(*pair, k=k) for pair in pairs], difference_over_seeds(pairs, k=k))


def strata_over_seeds(frames: Frames, runs: Sequence[str], kinds: Sequence[str]) -> pd.DataFrame:
    """The evaluations of several seeds as one: a row per checkpoint and sampling, named as in the first run, with STRATUM/pass@1, its
    hierarchical interval over seeds and problems in /lo and /hi, STRATUM/n and the mean over seeds of STRATUM/named_*.

    The checkpoints of a run are matched by their order. A problem's stratum stands in its id, before the number."""
    evals, problems = ([rows_of(frames[table], run) for run in runs] for table in ("evals", "per_problem"))
    order = {name: i for rows in evals for i, name in enumerate(dict.fromkeys(rows["checkpoint"]))}
    rates, solved = pd.concat(evals), pd.concat(problems)
    table = []
    for (place, sampling), rows in rates.groupby([rates["checkpoint"].map(order), "sampling"], sort=False):
        answered = solved[(solved["checkpoint"].map(order) == place) & (solved["sampling"] == sampling)]
        row = dict(checkpoint=rows["checkpoint"].iloc[0], sampling=sampling)
        for kind in kinds:
            row |= _stratum(kind, answered) | rows.filter(regex=f"^{kind}/named_").mean().to_dict()
        table.append(row)
    return pd.DataFrame(table)


def _stratum(kind: str, solved: pd.DataFrame) -> dict[str, float]:
    """Its pass@1 over the seeds: share of correct completions of each problem, then the interval, over clusters where problems have one."""
    rows = solved[solved["id"].str.rsplit("-", n=2).str[-2] == kind].assign(share=lambda f: f["c"] / f["n"])
    shares = rows.pivot(index="id", columns="run", values="share")
    shares = shares.reindex(index=rows["id"].unique(), columns=rows["run"].unique())  # the order of seeds and problems
    named = rows.dropna(subset="cluster").set_index("id")["cluster"].to_dict() if "cluster" in rows else {}
    clusters = [named.get(id, id) for id in shares.index]
    value = hierarchical_interval(shares.to_numpy(dtype=float).T, clusters=clusters, bounds=(0.0, 1.0))
    return value.row(f"{kind}/pass@1") | {f"{kind}/n": len(shares)}


def gain_table(gains: Mapping[str, Gains]) -> pd.DataFrame:
    """name, value, lo, hi: each seed's gain and that of all, in order."""
    rows = []
    for name, found in gains.items():
        rows += [(f"{name}, seed {i}", gain) for i, gain in enumerate(found.seeds)]
        rows.append((f"{name}, {len(found.seeds)} seeds", found.all))
    return pd.DataFrame([dict(name=name, value=g.value, lo=g.lo, hi=g.hi) for name, g in rows])


def in_points(gain: Interval) -> str:
    """A difference of shares in words: "+6.5 points [+4.8, +8.2]"."""
    return f"{100 * gain.value:+.1f} points [{100 * gain.lo:+.1f}, {100 * gain.hi:+.1f}]"


def with_settings(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The runs of a report with minutes, the state of the code, and a column for each setting; None where a run has no
    such setting."""
    configs = [json.loads(config) for config in runs["config"]]
    state = runs["dirty"].map({True: "changed since the commit", False: "as committed"})
    columns: dict[str, Any] = {name: [config.get(name) for config in configs] for name in names}
    return runs.assign(minutes=runs["seconds"] / 60, state=state, **columns)
