"""Where runs and checkpoints lie, what they are called, and what state they are in. `run.Run` writes them.

A reference is a run name (nano/sft: its latest checkpoint), NAME@best, NAME@1200, a run directory, a checkpoint, or a file inside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codechat.config import CheckpointError, MissingFile, RunError, nearest
from codechat.files import read_json
from codechat.processes import alive

if TYPE_CHECKING:
    import pandas as pd

_SOURCE = Path(__file__).resolve().parent.parent
ROOT = _SOURCE if (_SOURCE / "pyproject.toml").is_file() else Path.cwd()
STEP = re.compile(r"step_(\d+)(\.old)?")


def runs_dir() -> Path:
    return ROOT / "runs"


def is_run(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "status.json").is_file()


def run_paths() -> list[Path]:
    found = [p.parent for pattern in ("*/status.json", "*/*/status.json") for p in runs_dir().glob(pattern)]
    return sorted(p for p in found if is_run(p) and not any(q.startswith(".") for q in p.relative_to(runs_dir()).parts))


def name_of(path: Path) -> str:
    root = runs_dir().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _place(ref: str | Path) -> Path | None:
    """A run name, or a path that exists."""
    named = runs_dir() / ref
    return next((p.resolve() for p in (named, Path(ref)) if p.exists()), None)


def no_such_run(ref: str | Path) -> MissingFile:
    names = [name_of(p.resolve()) for p in run_paths()]
    return MissingFile(f"no run {str(ref)!r}" + (nearest(str(ref), names) if names else f"; there are no runs in {runs_dir()}"))


def find_run(ref: str | Path) -> Path:
    """The directory of a run from its name, its directory, or anything inside; MissingFile names what exists."""
    place = _place(ref)
    if place is None:
        raise no_such_run(ref)
    for path in (place, *place.parents):
        if is_run(path):
            return path
    raise MissingFile(f"{ref} is not a run: no config.json and status.json there")


def exists(name: str) -> bool:
    """Whether a run of this name is there, in whatever state."""
    return is_run(runs_dir() / name)


def checkpoint_paths(run_path: Path) -> dict[int, Path]:
    """step -> directory, ascending. A step that was being replaced when its process died is its former self, step_N.old."""
    found: dict[int, Path] = {}
    for path in sorted((run_path / "checkpoints").glob("step_*")):  # step_N sorts before step_N.old
        if (m := STEP.fullmatch(path.name)) and (path / "meta.json").is_file():
            found.setdefault(int(m[1]), path)
    return dict(sorted(found.items()))


def pointed_step(run_path: Path, which: str) -> int | None:
    """The step that checkpoints/latest or checkpoints/best names."""
    pointer = run_path / "checkpoints" / which
    m = STEP.fullmatch(pointer.read_text(errors="replace").strip()) if pointer.is_file() else None
    return int(m[1]) if m else None


def _checkpoint_of(run_path: Path, which: str) -> Path:
    name, steps = name_of(run_path), checkpoint_paths(run_path)
    if not steps:
        state = read_status(run_path)["state"]
        raise MissingFile(f"run {name} ({state}) has no checkpoint yet; train it first, or continue it with --resume")
    listed = ", ".join(map(str, steps))
    step = int(which) if which.isdecimal() else pointed_step(run_path, which) if which in ("latest", "best") else None
    if which == "best" and step is None:
        raise MissingFile(f"run {name} has no best checkpoint; `codechat evaluate --ckpt {name} --all-checkpoints` chooses one")
    if step not in steps:
        raise MissingFile(f"run {name} has no checkpoint {which!r}; it has latest{', best' if pointed_step(run_path, 'best') else ''}, {listed}")
    return steps[step]


def find_checkpoint(ref: str | Path) -> Path:
    """The directory of a checkpoint: NAME (its latest), NAME@best, NAME@1200, a run directory, a checkpoint or a file inside it."""
    text, which = str(ref), "latest"
    place = _place(text)
    if place is None and "@" in text:
        text, _, which = text.rpartition("@")
        place = _place(text)
    if place is None:
        raise no_such_run(text)
    folder = place.parent if place.is_file() else place
    if (folder / "meta.json").is_file():
        return folder
    run_path = folder.parent if folder.name == "checkpoints" else folder
    if place.is_dir() and is_run(run_path):
        return _checkpoint_of(run_path, which)
    raise CheckpointError(f"{ref} is not a CodeChat checkpoint: no meta.json in {folder}; --ckpt takes a run name, run directory or checkpoint")


# ---- status


def read_status(run_path: Path) -> dict[str, Any]:
    """status.json; a run whose process died without a word is "killed"."""
    status = read_json(run_path / "status.json")
    if status["state"] == "running" and not alive(status):
        status |= {"state": "killed", "reason": f"process {status.get('pid')} is gone"}
    return status


def _describe(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"run": name_of(path.resolve())}
    try:
        status, env = read_status(path), read_json(path / "env.json")
    except RunError:
        return row | {"state": "damaged"}
    steps, origin = list(checkpoint_paths(path)), env.get("parent") or {}
    return row | {"kind": status["kind"], "state": status["state"], "step": steps[-1] if steps else None, "started": status["started"],
                  "parent": origin.get("run"), "commit": env["commit"][:9], "reason": status["reason"]}  # fmt: skip


def list_runs() -> pd.DataFrame:
    """One row per run: run, kind, state, step (last checkpoint), started, parent, commit, reason."""
    import pandas as pd

    columns = ["run", "kind", "state", "step", "started", "parent", "commit", "reason"]
    return pd.DataFrame([_describe(p) for p in run_paths()], columns=columns)
