"""A file of rows, one for each finished run of a lab: a second start of the command trains only what the file does not have.

Rows of other settings do not enter the file. A last row that a kill cut is trained again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_rows, trim_cut_line
from codechat.core.errors import ConfigError

Row = dict[str, Any]
Name = tuple[Any, ...]  # what tells the runs of a lab apart


def train_missing(
    out: str | Path,
    settings: str,
    plan: Sequence[Name],
    *,
    name_of: Callable[[Mapping[str, Any]], Name],
    train: Callable[..., Row],
    summary: Callable[[Row], str],
) -> list[Row]:
    """Call train(*name) for each name of the plan that `out` does not have, and append its row; returns the rows of the plan.

    settings: hash that every row of the file must have in its field of that name; ConfigError where one has another."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(read_rows(path))
    if others := {row["settings"] for row in rows} - {settings}:
        raise ConfigError(
            f"{path} has rows of settings {', '.join(sorted(others))}, and these are {settings}; "
            "rows of one file must have the same settings: name another file (--out), or use theirs"
        )
    if path.is_file():
        trim_cut_line(path)
    done = {name_of(row): row for row in rows}
    for name in plan:
        if name not in done:
            done[name] = train(*name)
            with open(path, "a", encoding="utf-8") as f:
                f.write(json.dumps(done[name], separators=(",", ":")) + "\n")
            print(summary(done[name]), flush=True)
    return [done[name] for name in plan]


def thinned(values: Sequence[float], every: int) -> list[float]:
    """Means of `every` values each: a curve short enough for a row."""
    parts = [values[at : at + every] for at in range(0, len(values), every)]
    return [round(sum(part) / len(part), 4) for part in parts]
