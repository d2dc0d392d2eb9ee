"""--track: send the rows of a run to Weights & Biases or to trackio while it is being written.

Both get the run's name, its settings, every metric under its step, and samples as a table. The run
directory holds all of it in any case; `wandb sync runs/NAME/tb` sends the metrics of a run that was
not tracked.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from codechat.core.errors import RunError

if TYPE_CHECKING:
    import pandas as pd

Service = Literal["none", "wandb", "trackio"]


@dataclass(frozen=True)
class Tracked:
    """The run as a service is told of it. directory: where a service keeps files of its own."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    directory: Path
    resumed: bool


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Scalars of one step."""

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples of one step, a row each."""

    def finish(self, failed: bool) -> None: ...


def module_of(service: Service) -> ModuleType | None:
    """The package of a service; RunError where it is not installed. None for "none"."""
    if service == "none":
        return None
    try:
        return importlib.import_module(service)
    except ModuleNotFoundError:
        raise RunError(
            f"{service} is not installed; pip install {service} (or pip install -e '.[{service}]')"
        ) from None


def start(package: ModuleType, run: Tracked) -> Tracker:
    """Begin to send a run; RunError where the service refuses."""
    if package.__name__ == "trackio":
        return TrackioTracker(package, run)
    return WandbTracker(package, run)


class WandbTracker:
    """https://docs.wandb.ai: the project is WANDB_PROJECT, or codechat."""

    def __init__(self, package: ModuleType, run: Tracked) -> None:
        self.package = package
        try:
            self.run = package.init(
                name=run.name,
                id=run.name.replace("/", "--"),
                config=run.settings,
                job_type=run.kind,
                project=os.environ.get("WANDB_PROJECT", "codechat"),
                dir=str(run.directory),
                resume="allow" if run.resumed else None,
            )
        except package.Error as error:
            remedy = "run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
            raise RunError(f"wandb failed ({error}); {remedy}") from error
        # a run's steps may begin anew (an evaluation of an old checkpoint); wandb's own may not
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({"step": step} | dict(values))

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self.package.Table(dataframe=texts(rows))
        self.run.log({"step": step, "samples": table})

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class TrackioTracker:
    """https://github.com/gradio-app/trackio: a database in the folder TRACKIO_DIR; `trackio show
    --project codechat` opens it. The project is TRACKIO_PROJECT, or codechat."""

    def __init__(self, package: ModuleType, run: Tracked) -> None:
        self.package = package
        self.run = package.init(
            project=os.environ.get("TRACKIO_PROJECT", "codechat"),
            name=run.name,
            group=run.kind,
            config=dict(run.settings),
            resume="allow" if run.resumed else "never",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(dict(values), step=step)

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.run.log({"samples": self.package.Table(dataframe=texts(rows))}, step=step)

    def finish(self, failed: bool) -> None:
        self.package.finish()


def texts(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Samples as texts and numbers: a column of a table has one type."""
    import pandas as pd  # most runs are not tracked

    plain = (bool, int, float, str)
    return pd.DataFrame(
        [
            {name: value if isinstance(value, plain) else str(value) for name, value in row.items()}
            for row in rows
        ]
    )
