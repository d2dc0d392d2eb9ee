"""A run in Weights & Biases, where a loop has --wandb: its rows as they are logged, under the run's name as id.

A run without it is sent later by `wandb sync runs/NAME/tb`, which reads TensorBoard's files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import RunError
from codechat.runs.metrics import is_declared


def check_installed() -> None:
    try:
        importlib.import_module("wandb")
    except ModuleNotFoundError:
        raise RunError("wandb is not installed; pip install wandb (or pip install -e '.[wandb]')") from None


class Tracker:
    """One run of the tracker, open until `finish`. continued: more rows of a run that is there. RunError where wandb cannot log in."""

    def __init__(self, name: str, config: Any, kind: str, folder: Path, continued: bool) -> None:
        wandb = importlib.import_module("wandb")
        about = dict(name=name, id=name.replace("/", "--"), config=config, job_type=kind, dir=str(folder))
        about |= dict(project=os.environ.get("WANDB_PROJECT", "codechat"), resume="allow" if continued else None)
        try:
            self.run = wandb.init(**about)
        except wandb.Error as error:
            remedy = "run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
            raise RunError(f"wandb failed ({error}); {remedy}") from error
        self.run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, Any], evaluation: bool) -> None:
        """Metrics under their names, those of an evaluation under eval/SPLIT/."""
        where = "eval/" if evaluation else ""
        where += f"{row['split']}/" if evaluation and "split" in row else ""
        values = {where + k: v for k, v in row.items() if is_declared(k) and v is not None}
        self.run.log({"step": row["step"]} | values)

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
