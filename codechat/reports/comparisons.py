"""What reports compute from their frames: paired gains, means over seeds, behaviour in counts, data mixes, points of a
scaling law.

Pure functions over the frames of `run_frames`; the figures are in `plots`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from codechat.evaluation.behaviour_probes import CELLS, EXPECTED
from codechat.evaluation.intervals import Interval, hierarchical_interval
from codechat.evaluation.results import difference_over_seeds, paired_difference
from codechat.models.config import GPTConfig
from codechat.reports.run_frames import Frames, rows_of
from codechat.runs import checkpoint

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


def expected_behaviour(row: Row, cell: str) -> tuple[int, int]:
    """(completions with the expected behaviour, all completions) of a cell of the behaviour matrix; (0, 0) if it was
    not probed."""
    n = row.get(f"probe/{cell}/n", 0)
    return (round(row[f"probe/{cell}/{EXPECTED[cell]}"] * n), int(n)) if n > 0 else (0, 0)


def wrong_calls(row: Row) -> tuple[int, int]:
    """(calls, completions) over the cells in which no call is correct."""
    cells = [c for c in CELLS if EXPECTED[c] != "call" and row.get(f"probe/{c}/n", 0) > 0]
    calls = sum(round(row[f"probe/{c}/call"] * row[f"probe/{c}/n"]) for c in cells)
    return calls, int(sum(row[f"probe/{c}/n"] for c in cells))


def with_settings(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The runs of a report with minutes, the state of the code, and a column for each setting; None where a run has no
    such setting."""
    configs = [json.loads(config) for config in runs["config"]]
    state = runs["dirty"].map({True: "changed since the commit", False: "as committed"})
    columns: dict[str, Any] = {name: [config.get(name) for config in configs] for name in names}
    return runs.assign(minutes=runs["seconds"] / 60, state=state, **columns)


def varied_examples(samples: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """One sample of each group of the columns `by`, in order, with the request that was shown least often so far."""
    shown: Counter[str] = Counter()
    chosen = []
    for _, group in samples.groupby(list(by), sort=False):
        index = min(group.index, key=lambda i: shown[group.loc[i, "request"]])
        shown[group.loc[index, "request"]] += 1
        chosen.append(index)
    return samples.loc[chosen]


def sft_mix(runs: Sequence[str]) -> pd.DataFrame:
    """run, domain, conversations, supervised_tokens and share of what each SFT run drew from its data, from the loader
    state of its last checkpoint; the few conversations that still waited for a row are counted."""
    rows = []
    for run in runs:
        loader = checkpoint.load(run, optimizer=False, mmap=True).extra["loader"]
        total = sum(loader["supervised"])
        rows += [
            dict(run=run, domain=domain, conversations=n, supervised_tokens=tokens, share=tokens / total)
            for domain, n, tokens in zip(loader["sizes"], loader["drawn"], loader["supervised"], strict=True)
        ]
    return pd.DataFrame(rows)


def scaling_points(frames: Frames, runs: Sequence[str]) -> pd.DataFrame:
    """run, n (parameters), d (tokens), flops, budget (flops to one digit), loss and bpb of pretraining runs at their
    last validation."""
    points, configs = [], frames["runs"].set_index("run")["config"]
    for run in runs:
        config = json.loads(configs[run])
        shape, last = GPTConfig(**config["model"]), rows_of(frames["evals"], run).iloc[-1]
        tokens = config["max_steps"] * config["device_batch_size"] * config["grad_accum"] * config["seq_len"]
        flops = tokens * shape.flops_per_token(config["seq_len"])
        size = dict(run=run, n=shape.n_params, d=tokens, flops=flops, budget=float(f"{flops:.0e}"))
        points.append(size | dict(loss=last["val_loss"], bpb=last["val_bpb"]))
    return pd.DataFrame(points)


def lowest_of_budgets(points: pd.DataFrame) -> pd.DataFrame:
    """The point of lowest loss of each budget; `border` = it is the smallest or the largest size of its budget, so that
    the optimum may lie outside the grid."""
    groups = points.groupby("budget")["n"]
    rows = points.assign(border=(points["n"] == groups.transform("min")) | (points["n"] == groups.transform("max")))
    return rows.loc[points.groupby("budget")["loss"].idxmin()]
