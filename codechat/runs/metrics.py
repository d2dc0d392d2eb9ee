"""The names under which a run may log, with their units; and values as plain json.

A name with a `*` declares a family: `tier/*` allows `tier/full_match`. A number that is not finite is written
as null, since json has no word for it, and listed in the row's `nonfinite` ("train_loss=nan"), so that it is not
taken for a value that was never logged.
"""

import csv
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.errors import nearest


class Metric(NamedTuple):
    unit: str
    help: str


with Path(__file__).with_name("metrics.csv").open(encoding="utf-8", newline="") as _file:
    METRICS = {name: Metric(unit, help) for name, unit, help in list(csv.reader(_file))[1:]}
_FAMILIES = tuple(name[:-1] for name in METRICS if name.endswith("*"))


@cache
def is_declared(name: str) -> bool:
    return name in METRICS or any(name.startswith(f) and len(name) > len(f) for f in _FAMILIES)


@cache
def metric(name: str) -> Metric:
    """The declaration of `name`; ValueError with the nearest name where there is none."""
    if not is_declared(name):
        raise ValueError(f"metric {name!r} is not declared in metrics.csv{nearest(name, METRICS)}")
    return METRICS.get(name) or METRICS[next(f for f in _FAMILIES if name.startswith(f)) + "*"]


def plain(value: Any, name: str, bad: list[str]) -> Any:
    """`value` as json: numpy and torch scalars as numbers, tuples as lists; a number that is not finite as None, noted in `bad`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(f"{name}={value}")
        return None
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{name}.{k}", bad) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{name}.{i}", bad) for i, v in enumerate(value)]
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def plain_row(step: int, time: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """{step, time, ...values}, and `nonfinite` where a value is not finite."""
    bad: list[str] = []
    row = {"step": int(step), "time": round(time, 3), **{k: plain(v, k, bad) for k, v in values.items()}}
    if bad:
        row["nonfinite"] = " ".join(bad)
    return row
