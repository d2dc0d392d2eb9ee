"""Follow the metrics of a run while another process writes them: new rows, shown as lines or as a curve.

Left out: a server that pushes. metrics.jsonl is flushed row by row, and reading its new bytes every second or two costs nothing.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_json, read_rows
from codechat.runs.metrics import is_declared, metric

SHOWN = ("train_loss", "reward_mean", "exact_match", "val_bpb", "lr", "grad_norm", "tok_per_s", "mfu")
CURVES = ("train_loss", "reward_mean")  # the first that is logged is drawn


class Follower:
    """Reads what is new in metrics.jsonl. A file that became shorter (a resumed run drops later rows) is read again from its start."""

    def __init__(self, path: Path, max_steps: int | None = None) -> None:
        self.path, self.max_steps = path, max_steps
        self.rows: list[dict[str, Any]] = []
        self._at = 0
        self._handle: Any = None  # the notebook's output cell

    def new_rows(self) -> list[dict[str, Any]]:
        """Rows since the last call, without a line that is still being written."""
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            return []
        if file.stat().st_size < self._at:
            self._at, self.rows = 0, []
        with open(file, "rb") as f:
            f.seek(self._at)
            data = f.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.rows += found
        return found


def last_row(path: Path) -> dict[str, Any]:
    """The last value of each metric in SHOWN, and the last step."""
    found: dict[str, Any] = {}
    for row in read_rows(path / "metrics.jsonl"):
        found |= {k: v for k, v in row.items() if k in ("step", *SHOWN)}
    return found


def line_of(row: dict[str, Any], max_steps: int | None) -> str:
    """One logged step in words."""
    words = [f"step {row['step']}" + (f"/{max_steps}" if max_steps else "")]
    words += [
        f"{k} {row[k]:.4g} {metric(k).unit}".strip()
        for k in SHOWN
        if isinstance(row.get(k), (int, float)) and is_declared(k)
    ]
    return "  ".join(words)


def show(follower: Follower, rows: list[dict[str, Any]]) -> None:
    """The new rows: in a notebook the curve so far, in place of the last one; else a line each."""
    if "ipykernel" in sys.modules:
        _draw(follower)
    else:
        for row in rows:
            print(line_of(row, follower.max_steps), flush=True)


def _draw(follower: Follower) -> None:
    """The curve so far and the last row, in one output that is replaced."""
    import pandas as pd
    from IPython.display import HTML, display

    from codechat.reports import plots

    state = read_json(follower.path / "status.json")["status"]
    text = line_of(follower.rows[-1], follower.max_steps) if follower.rows else "no metrics yet"
    frame = pd.DataFrame(follower.rows)
    drawn = next((k for k in CURVES if k in frame and len(frame) > 1), None)
    name = follower.path.name
    picture = ""
    if drawn:
        png = plots.curves({name: frame.dropna(subset=[drawn])}, drawn, title=f"{name}, {state}")._repr_png_()[0]
        picture = f'<img alt="{drawn} so far" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    shown = HTML(f"<pre>{name}: {state}\n{text}</pre>{picture}")
    if follower._handle is None:
        follower._handle = display(shown, display_id=True)
    else:
        follower._handle.update(shown)
