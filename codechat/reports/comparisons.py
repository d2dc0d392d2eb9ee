"""What reports compute from frozen rows: gains of checkpoints by problem and over seeds, behaviour in counts, what a mix was made of, points of a law.

Pure functions over the frames of `report`; figures are in `report_plots`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from codechat.core.errors import DataError
from codechat.evaluation.behaviour_probes import CELLS, WANTED
from codechat.evaluation.intervals import Interval
from codechat.evaluation.results import paired_difference
from codechat.models.config import GPTConfig
from codechat.reports import build
from codechat.runs import checkpoint

Row = Mapping[str, Any]
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of the mean of so many values


def gains(frames: build.Frames, runs: Sequence[str], split: str, k: int = 1) -> list[Interval]:
    """For each evaluation: pass@k of its last checkpoint minus that of its first, on the same problems of a split, paired."""
    found = []
    for run in runs:
        rows = build.rows_of(frames["per_problem"], run).query("split == @split")
        names = list(dict.fromkeys(rows["checkpoint"]))
        first, last = (rows[rows["checkpoint"] == name].to_dict("records") for name in (names[0], names[-1]))
        found.append(paired_difference(first, last, k=k))
    return found


def pooled(gaps: Sequence[Interval]) -> Interval:
    """The mean over seeds with Student's interval from their scatter: what another seed would give. DataError for less than 2 or more than 5."""
    if len(gaps) not in STUDENT:
        raise DataError(f"{len(gaps)} seeds; required 2 to 5 for an interval of their mean")
    values = np.array([g.value for g in gaps])
    half = STUDENT[len(values)] * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(float(values.mean()), float(values.mean()) - half, float(values.mean()) + half)


def lines(found: Mapping[str, Sequence[Interval]]) -> pd.DataFrame:
    """name, value, lo, hi: each seed's difference and the mean of all, in order."""
    rows = []
    for name, gaps in found.items():
        rows += [(f"{name}, seed {i}", g) for i, g in enumerate(gaps)] + [
            (f"{name}, mean of {len(gaps)}", pooled(gaps))
        ]
    return pd.DataFrame([dict(name=name, value=g.value, lo=g.lo, hi=g.hi) for name, g in rows])


def wanted(row: Row, cell: str) -> tuple[int, int]:
    """(completions that behaved as wanted, all) of a cell of the behaviour matrix; (0, 0) where it was not probed."""
    n = row.get(f"probe/{cell}/n", 0)
    return (round(row[f"probe/{cell}/{WANTED[cell]}"] * n), int(n)) if n > 0 else (0, 0)


def wrong_calls(row: Row) -> tuple[int, int]:
    """(calls, completions) over the cells in which no call is right."""
    cells = [c for c in CELLS if WANTED[c] != "call" and row.get(f"probe/{c}/n", 0) > 0]
    return sum(round(row[f"probe/{c}/call"] * row[f"probe/{c}/n"]) for c in cells), int(
        sum(row[f"probe/{c}/n"] for c in cells)
    )


def drawn(runs: Sequence[str]) -> pd.DataFrame:
    """run, domain, conversations, supervised_tokens, share of what each SFT run drew from its data, from the cursor in its last checkpoint; the few
    conversations that still waited for a row are counted."""
    rows = []
    for run in runs:
        cursor = checkpoint.load(run, optimizer=False, mmap=True).extra["loader"]
        total = sum(cursor["supervised"])
        rows += [
            dict(run=run, domain=domain, conversations=n, supervised_tokens=tokens, share=tokens / total)
            for domain, n, tokens in zip(cursor["sizes"], cursor["drawn"], cursor["supervised"], strict=True)
        ]
    return pd.DataFrame(rows)


def scaling_points(frames: build.Frames, runs: Sequence[str]) -> pd.DataFrame:
    """run, n (parameters), d (tokens), flops, budget (flops to one digit), loss, bpb of pretraining runs, from their last validation."""
    points, configs = [], frames["runs"].set_index("run")["config"]
    for run in runs:
        config = json.loads(configs[run])
        shape, last = GPTConfig(**config["model"]), build.rows_of(frames["evals"], run).iloc[-1]
        tokens = config["max_steps"] * config["device_batch_size"] * config["grad_accum"] * config["seq_len"]
        spent = tokens * shape.flops_per_token(config["seq_len"])
        points.append(
            dict(
                run=run,
                n=shape.n_params,
                d=tokens,
                flops=spent,
                budget=float(f"{spent:.0e}"),
                loss=last["val_loss"],
                bpb=last["val_bpb"],
            )
        )
    return pd.DataFrame(points)
