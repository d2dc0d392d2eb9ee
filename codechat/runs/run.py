"""One directory per run, runs/<name>/: the only thing that a report reads.

    config.json    resolved configuration, written once
    env.json       commit, versions, hardware, argv, parent checkpoint
    status.json    running, finished, stopped or failed, with the reason
    metrics.jsonl  one flat object per logged step, declared names only
    eval.jsonl     evaluations, with what they were measured on
    samples.jsonl  rollouts and samples for people
    tb/            TensorBoard, the same names; those of evaluations are eval/SPLIT/NAME
    checkpoints/   see checkpoint.py

A step's number counts the optimizer updates done: the row of the first update is step 1, and
checkpoint 120 holds what the rows up to 120 led to. A resumed run drops later rows when it
writes its first. Rows are flushed one by one; a line cut by a kill is not read. With several
ranks only the first writes.

A metric with a `*` declares a family: `tier/*` allows `tier/full_match`. A number that is not
finite is written as null.

A configuration with `track` also sends rows and samples to a service (see trackers.py)."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from codechat.core import provenance
from codechat.core.atomic_files import (
    append_rows,
    drop_rows_after,
    read_json,
    read_rows,
    write_json,
)
from codechat.core.errors import RunError, UserError, nearest
from codechat.core.processes import unlock
from codechat.runs import paths, trackers
from codechat.runs.paths import find_run, runs_dir

if TYPE_CHECKING:
    import pandas as pd

ROWS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")


# ---- names that may be logged (metrics.csv), and values as json


with Path(__file__).with_name("metrics.csv").open(encoding="utf-8", newline="") as _file:
    METRICS = {name: unit for name, unit, _ in list(csv.reader(_file))[1:]}


@cache
def declared(name: str) -> str | None:
    """The name in metrics.csv that declares a metric: its own, or its family's with a *. None if
    no name does."""
    families = (
        f for f in METRICS if f.endswith("*") and name.startswith(f[:-1]) and len(name) >= len(f)
    )
    return name if name in METRICS else next(families, None)


def unit_of(name: str) -> str:
    """The unit of a metric; ValueError with the nearest name where none is declared."""
    known = declared(name)
    if known is None:
        raise ValueError(f"metric {name!r} is not declared in metrics.csv{nearest(name, METRICS)}")
    return METRICS[known]


def plain(value: Any) -> Any:
    """`value` as json: numpy and torch scalars as numbers, tuples as lists; a number that is
    not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def plain_row(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """{step, time, ...values}."""
    return {"step": int(step), "time": round(time.time(), 3), **plain(values)}


# ---- the directory


def _ranks() -> Any:
    """`distributed.dist`, imported when it is first used: reading and listing runs needs no
    torch."""
    from codechat.distributed import dist

    return dist


def _restarted(name: str) -> bool:
    """Whether torchrun restarted the ranks of this run (--max-restarts). A collective."""
    # over several hosts torchrun counts restarts only where a rank died
    restarted = any(_ranks().gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    return restarted and _ranks().gather(paths.same_launch(name))[0]


def list_runs() -> pd.DataFrame:
    """One row per run: run, kind, status, step (last checkpoint), started, parent, commit,
    reason; only the name of a damaged one."""
    import pandas as pd

    rows = []
    for path in paths.run_paths():
        row = {
            "run": paths.name_of(path.resolve()),
            "kind": None,
            "status": "damaged",
            "step": None,
        }
        # a damaged file holds anything
        with contextlib.suppress(RunError, AttributeError, KeyError, TypeError):
            status = paths.read_status(path)
            env = read_json(path / "env.json")
            row |= {name: status[name] for name in ("kind", "status", "started", "reason")} | {
                "step": max(paths.checkpoint_paths(path), default=None),
                "parent": (env["parent"] or {}).get("run"),
                "commit": env["commit"][:9],
            }
        rows.append(row)
    return pd.DataFrame(rows)


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        [*read_rows(path)] or {"step": pd.Series(dtype=int), "time": pd.Series(dtype=float)}
    )


def _quiet_about_disks(failed: threading.ExceptHookArgs) -> None:
    """Print no traceback of TensorBoard's thread if a disk fails: the run reports it for its own
    files."""
    if not issubclass(failed.exc_type, OSError):
        threading.__excepthook__(failed)


class Run:
    """A run directory. `Run.create` to write one, `Run.open` to read one (or to add evaluations
    to it). `with run:` marks it finished at the end of the block, stopped on Ctrl-C, failed on
    any other exception."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = paths.name_of(path.resolve())
        self.resumed = False  # whether a checkpoint is there to continue from
        self._writing = False  # created here and not ended yet
        self._alone = False  # whether the run that this one replaces is deleted
        self._ended: dict[str, Any] | None = None  # the status of a run that gave its place back
        self._begins: int | None = None  # step from which a resumed run continues
        self._rewind = False  # whether the next row drops those behind that step
        # split -> checkpoint's run and sampling of its first evaluation
        self._curves: dict[str, tuple[str, str]] = {}
        self._board: Any = None
        self._tracked: trackers.Tracker | None = None

    @classmethod
    def create(
        cls,
        name: str,
        config: Any,
        *,
        kind: str,
        parent: Any = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> Run:
        """A new run, or with `resume` the run of that name. `parent` is a reference to the
        checkpoint it starts from.

        A run whose ranks torchrun restarted (--max-restarts) is resumed. RunError where the
        name is in use, another process writes the run, or (resume) its configuration differs. A
        collective: every rank raises."""
        if _restarted(name):
            resume = True
            overwrite = False
        run = cls(runs_dir() / name)
        with _ranks().together():
            if _ranks().is_main():
                try:
                    # a missing package is told before the former run is moved away
                    service = trackers.module_of(getattr(config, "track", "none"))
                    paths.prepare(name, config, kind, parent, resume, overwrite)
                    if service:
                        run._track(service, kind, resume)
                except UserError:  # of which MissingFile is an OSError too
                    raise
                except OSError as e:
                    raise RunError(f"run {name}: {runs_dir()} cannot be written ({e})") from e
        run._writing = True
        if resume:
            latest = paths.latest_step(run.path)
            run.resumed = latest is not None
            run._begins = latest or 0
            run._rewind = True
        return run

    @classmethod
    def open(cls, ref: str | Path) -> Run:
        """A run by its name, directory, or any path inside."""
        return cls(find_run(ref))

    # reading

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    @property
    def env(self) -> dict[str, Any]:
        return read_json(self.path / "env.json")

    @property
    def status(self) -> dict[str, Any]:
        """{status, reason, kind, started, ended, summary, ...}; status: planned, running,
        finished, stopped, failed or killed."""
        return self._ended or paths.read_status(self.path)

    def require_finished(self) -> None:
        """RunError for a run whose rows may be a part of what it is to have."""
        status = self.status
        if status["status"] != "finished":
            reason = status.get("reason", "no end yet")
            raise RunError(
                f"run {self.name} is {status['status']} ({reason}); wait, or use --resume"
            )

    def checkpoints(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return list(paths.checkpoint_paths(self.path))

    def metrics(self) -> pd.DataFrame:
        """One row per logged step, a column per metric."""
        return _frame(self.path / "metrics.jsonl")

    def evals(self) -> pd.DataFrame:
        """One row per evaluation, in the order of time."""
        return _frame(self.path / "eval.jsonl")

    def samples(self) -> list[dict[str, Any]]:
        return list(read_rows(self.path / "samples.jsonl"))

    # writing

    def log(self, step: int, values: Mapping[str, Any] | None = None, /, **metrics: Any) -> None:
        """Append one row of declared metrics (scalars); ValueError for a name that METRICS does
        not hold."""
        row = plain_row(step, {**(values or {}), **metrics})
        for name in row.keys() - {"step", "time"}:
            unit_of(name)
        if _ranks().is_main():
            self.append("metrics.jsonl", [row])
            self.keep()
            self._show(row)

    def log_eval(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one evaluation of the weights after `step` updates: metrics, and what they
        were measured on (n, split, ...)."""
        row = plain_row(step, values)
        if _ranks().is_main():
            self.append("eval.jsonl", [row])
            shown = {k: v for k, v in row.items() if k in ("step", "time", "split") or declared(k)}
            self._show(shown, self._curve(row))

    def _curve(self, row: Mapping[str, Any]) -> str:
        """Prefix of the curve of an evaluation: eval/ or eval/SPLIT/. Rows of another run's
        checkpoint, or with another sampling, than the first ones of the split get these as a
        further part: no curve has two values at one step."""
        split = str(row.get("split", ""))
        run = str(row.get("checkpoint", "")).partition("@")[0]
        source = (run, str(row.get("sampling", "")))
        first = self._curves.setdefault(split, source)
        differing = [part for part, usual in zip(source, first) if part != usual]
        return "".join(f"{part}/" for part in ("eval", split, *differing) if part)

    def keep(self) -> None:
        """Delete the run that this one replaces (--overwrite). `log` and the end of a run call
        it: until then a failure brings the former run back."""
        if self._writing and not self._alone and _ranks().is_main():
            paths.drop_former(self.path)
            self._alone = True

    def log_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rollouts or samples for people to read."""
        if _ranks().is_main():
            shown = [plain_row(step, row) for row in rows]
            self.append("samples.jsonl", shown)
            if self._tracked:
                self._tracked.log_table(int(step), shown)

    def _track(self, service: ModuleType, kind: str, resumed: bool) -> None:
        tracked = trackers.Tracked(
            name=self.name,
            kind=kind,
            settings=self.config,
            directory=self.path,
            resumed=resumed,
        )
        try:
            self._tracked = trackers.start(service, tracked)
        except RunError as failed:
            self.fail(str(failed))
            raise

    def _show(self, row: Mapping[str, Any], where: str = "") -> None:
        """Send a row to TensorBoard and to the tracker, under `where` and the metric's name."""
        if self._tracked:
            values = {where + k: v for k, v in row.items() if declared(k) and v is not None}
            self._tracked.log(row["step"], values)
        if not self._writing:
            return
        if self._board is None:  # at the first row, since the import takes longer than a step
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _quiet_about_disks
            # TensorBoard keeps rows behind the checkpoint that a killed run had written: they are
            # hidden
            purge = None if self._begins is None else self._begins + 1
            self._board = SummaryWriter(self.path / "tb", purge_step=purge)
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                self._board.add_scalar(where + name, float(value), row["step"], row["time"])

    def _unwritable(self, file: str, problem: OSError) -> RunError:
        return RunError(
            f"{self.path / file} cannot be written ({problem}); "
            "free space, then continue with --resume"
        )

    def append(self, file: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a file of the run; for the first rank. RunError where the disk is full."""
        try:
            # at the first row, not on opening: a resumed run that fails at once has lost nothing
            if self._rewind and self._begins is not None:
                for name in ROWS:
                    drop_rows_after(self.path / name, self._begins)
                self._rewind = False
            append_rows(self.path / file, rows)
        except OSError as e:
            raise self._unwritable(file, e) from e

    # the end

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """The run did all it was started for."""
        self._end("finished", None, {"summary": plain(summary or {})})

    def stop(self, reason: str) -> None:
        """The run ended early on purpose: an interruption, a rule."""
        self._end("stopped", reason, {})

    def fail(self, reason: str) -> None:
        self._end("failed", reason, {})

    def _end(self, state: str, reason: str | None, more: Mapping[str, Any]) -> None:
        if self._board:
            with contextlib.suppress(OSError):
                self._board.close()
        if self._tracked:
            self._tracked.finish(failed=state == "failed")
        self._board = None
        self._tracked = None
        self._writing = False
        if _ranks().is_main():
            status = read_json(self.path / "status.json")
            status |= {"status": state, "reason": reason, "ended": provenance.now(), **more}
            try:
                write_json(self.path / "status.json", status)
                if paths.settle_former(self.path):
                    self._ended = status
                    print(
                        f"run {self.name}: {state} before its first step; the former run is kept",
                        file=sys.stderr,
                    )
            except OSError as e:
                raise self._unwritable("status.json", e) from e
            finally:
                unlock(paths.lock_of(self.path))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        e: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._writing:
            return
        if e is None:
            self.finish()
            return
        # the disk fails: the block's own error is the one to show
        with contextlib.suppress(RunError):
            if isinstance(e, KeyboardInterrupt):
                self.stop("interrupted")
            else:
                from codechat.distributed import desync

                error = desync.explained(e)
                self.fail(f"{type(error).__name__}: {error}")
