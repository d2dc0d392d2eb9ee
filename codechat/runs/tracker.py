"""A run in Weights & Biases: its rows as they are logged (--wandb of a loop), or replayed later (`codechat runs export`).

Both send the same rows under the same names, and the run's name is their id.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from codechat.core.errors import RunError
from codechat.runs.metrics import is_declared

PROJECT = "codechat"


def require_wandb() -> ModuleType:
    """The package; RunError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError:
        raise RunError("wandb is not installed; pip install wandb (or pip install -e '.[wandb]')") from None


def tracked_row(row: Mapping[str, Any], evaluation: bool) -> dict[str, Any]:
    """{"step", metric: value}: a row of metrics under its names, one of evaluations under eval/SPLIT/."""
    where = "eval/" if evaluation else ""
    where += f"{row['split']}/" if evaluation and "split" in row else ""
    return {"step": row["step"]} | {where + k: v for k, v in row.items() if is_declared(k) and v is not None}


class Tracker:
    """One run of the tracker, open until `finish`. project: none = WANDB_PROJECT or PROJECT; mode: online, offline, none = WANDB_MODE;
    continued: more rows of a run that is there. RunError where wandb is missing or cannot log in."""

    def __init__(
        self, name: str, config: Any, kind: str, folder: Path, *, project: str = "", mode: str | None = None,
        continued: bool = False,
    ) -> None:  # fmt: skip
        wandb, project = require_wandb(), project or os.environ.get("WANDB_PROJECT", PROJECT)
        about = dict(
            project=project, name=name, id=name.replace("/", "--"), config=config, job_type=kind, dir=str(folder)
        )
        try:
            self.run = wandb.init(**about, mode=mode, resume="allow" if continued else None)
        except wandb.Error as error:
            raise RunError(
                f"wandb failed ({error}); run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
            ) from error
        self.run.define_metric("*", step_metric="step")

    def add(self, row: Mapping[str, Any], evaluation: bool = False) -> None:
        self.run.log(tracked_row(row, evaluation))

    def finish(self, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))
