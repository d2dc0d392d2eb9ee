"""What reports compute from their frames: paired gains, means over seeds, settings of runs.

Pure functions over the frames of `run_frames`; the figures are in `plots`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from codechat.evaluation.intervals import Interval, hierarchical_interval
from codechat.evaluation.results import difference_over_seeds, paired_difference
from codechat.reports.run_frames import Frames, rows_of

Row = Mapping[str, Any]


class Gains(NamedTuple):
    """Paired gains of several seeds: each seed's, and all together."""

    seeds: list[Interval]
    all: Interval


def paired_gains(
    frames: Frames, runs: Sequence[str], split: str, k: int = 1, against: Sequence[str] | None = None
) -> Gains:
    """pass@k of each evaluation run's last checkpoint minus that of its first, paired by problem, on one split. A run is a seed; all together
    have the hierarchical interval over seeds and problems. against: minus that of the first checkpoint of these runs, one for each seed."""
    pairs = []
    for run, other in zip(runs, against or runs, strict=True):
        before, after = (rows_of(frames["per_problem"], name) for name in (other, run))
        before, after = before[before["split"] == split], after[after["split"] == split]
        ends = before["checkpoint"].iloc[0], after["checkpoint"].iloc[-1]
        pairs.append(tuple(x[x["checkpoint"] == end].to_dict("records") for x, end in zip((before, after), ends)))
    return Gains([paired_difference(*pair, k=k) for pair in pairs], difference_over_seeds(pairs, k=k))


def strata_over_seeds(frames: Frames, runs: Sequence[str], kinds: Sequence[str]) -> pd.DataFrame:
    """The evaluations of several seeds as one: a row per checkpoint and sampling, named as in the first run, with STRATUM/pass@1, its
    hierarchical interval over seeds and problems in /lo and /hi, STRATUM/n and the mean over seeds of STRATUM/named_*.

    The checkpoints of a run are matched by their order. A problem's stratum stands in its id, before the number."""
    evals = [rows_of(frames["evals"], run) for run in runs]
    problems = [rows_of(frames["per_problem"], run) for run in runs]
    names = [list(dict.fromkeys(rows["checkpoint"])) for rows in evals]
    found = []
    for place, name in enumerate(names[0]):
        for sampling in dict.fromkeys(evals[0]["sampling"]):
            at = "checkpoint == @here and sampling == @sampling"
            row: dict[str, Any] = dict(checkpoint=name, sampling=sampling)
            solved, rates = [], []
            for own, judged, here in zip(problems, evals, (x[place] for x in names)):
                solved.append(own.query(at))
                rates.append(judged.query(at))
            for kind in kinds:
                row |= _stratum(kind, solved) | _means(kind, pd.concat(rates))
            found.append(row)
    return pd.DataFrame(found)


def _stratum(kind: str, solved: Sequence[pd.DataFrame]) -> dict[str, float]:
    """Its pass@1 over the seeds: share of correct completions of each problem, then the interval, over clusters where problems have one."""
    own = [rows[rows["id"].str.rsplit("-", n=2).str[-2] == kind].set_index("id") for rows in solved]
    table = pd.concat([rows["c"] / rows["n"] for rows in own], axis=1)
    named = pd.concat([rows.get("cluster", pd.Series(dtype=object)) for rows in own]).dropna()
    clusters = [str(named[~named.index.duplicated()].get(id, id)) for id in table.index]
    value = hierarchical_interval(table.to_numpy(dtype=float).T, clusters=clusters, bounds=(0.0, 1.0))
    at = f"{kind}/pass@1"
    return {at: value.value, f"{at}/lo": value.lo, f"{at}/hi": value.hi, f"{kind}/n": len(table)}


def _means(kind: str, rates: pd.DataFrame) -> dict[str, float]:
    return {name: float(rates[name].mean()) for name in rates if name.startswith(f"{kind}/named_")}


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
