"""The files of a checkpoint: written, synced and hashed; made visible as a whole; verified before they are read.

Left out: what is in them (`checkpoint`), and the files of a sharded model (`checkpoint_shards`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from codechat.core.atomic_files import write_atomic
from codechat.core.errors import CheckpointError
from codechat.distributed import dist
from codechat.runs.paths import checkpoint_paths, pointed_step

ADVICE = "use another step of the run (NAME@STEP)"


class _HashingFile:
    """Hashes what torch.save writes, and keeps the OSError that torch turns into "unexpected pos"."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")
        self.hash = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self.file.write(data)
        except OSError as e:
            self.error = self.error or e
            raise
        self.hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, value: Any) -> dict[str, Any]:
    """torch.save, synced; returns {bytes, sha256}. OSError where the disk refuses."""
    out = _HashingFile(path)
    try:
        with out.file:
            torch.save(value, out)
            out.flush()
            os.fsync(out.file.fileno())
    except RuntimeError:
        if out.error:
            raise out.error from None
        raise
    return {"bytes": out.bytes, "sha256": out.hash.hexdigest()}


def file_record(path: Path) -> dict[str, Any]:
    """{bytes, sha256} of a file that is there."""
    with open(path, "rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def fingerprint(meta: Mapping[str, Any]) -> str:
    """Which weights these are, from a checkpoint's meta.json: RUN@STEP and a hash of its files' hashes; "" where they come from no file."""
    files = meta.get("files")
    if not files:
        return ""
    digest = hashlib.sha256("".join(f"{name}{files[name]['sha256']}" for name in sorted(files)).encode()).hexdigest()
    return f"{meta['run']}@{meta['step']}-{digest[:12]}"


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(final: Path) -> Path:
    return final.with_name(final.name + ".tmp")


def write_step(
    final: Path, contents: Mapping[str, Any], meta: dict[str, Any], written: Mapping[str, Any] | None = None
) -> None:
    """Make the directory `final` of a step, whole or not at all, and point `latest` at it.

    contents: {file: value}. written: {file: record} of files that lie in its temporary directory already. OSError where the disk
    refuses: nothing half made stays, and a former directory of this step is untouched."""
    temp, old = temporary(final), final.with_name(final.name + ".old")
    if written is None:
        shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True, exist_ok=written is not None)
        meta["files"] = {name: write_file(temp / name, value) for name, value in contents.items()} | dict(written or {})
        write_atomic(temp / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
        _sync_directory(temp)
        if final.exists():  # the step was reached again: readable as .old until the new one is in place
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(temp, final)
        _sync_directory(final.parent)
        write_atomic(final.parent / "latest", final.name + "\n")
    except BaseException:  # an interrupt too must leave nothing half made; raised again
        shutil.rmtree(temp, ignore_errors=True)
        raise


def prune(run_path: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Remove what no rule keeps, and what a kill left; renamed first, so that no checkpoint is half there."""
    paths = checkpoint_paths(run_path)
    for left in (run_path / "checkpoints").glob("step_*.*"):
        if left not in paths.values():
            shutil.rmtree(left)
    kept = {*list(paths)[-keep_last:], step, pointed_step(run_path, "latest"), pointed_step(run_path, "best")}
    for old, path in paths.items():
        if keep_last > 0 and old not in kept and not (keep_every and old % keep_every == 0):
            doomed = temporary(path)
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _damage(path: Path, listed: Mapping[str, Any] | None, in_full: bool) -> CheckpointError | None:
    if listed is None or not path.is_file():
        return CheckpointError(f"{path} is missing from the checkpoint; {ADVICE}")
    if (size := path.stat().st_size) != listed["bytes"]:
        return CheckpointError(f"{path} is damaged: {size} bytes, written with {listed['bytes']}; {ADVICE}")
    if in_full and file_record(path)["sha256"] != listed["sha256"]:
        return CheckpointError(f"{path} is damaged: its bytes are not those that were written; {ADVICE}")
    return None


def verify(folder: Path, files: Mapping[str, Any], names: list[str]) -> None:
    """CheckpointError, on every rank, where one of the files is missing or damaged. Each rank hashes its share of them. A collective."""
    found = [
        _damage(folder / name, files.get(name), i % dist.world_size() == dist.rank()) for i, name in enumerate(names)
    ]
    dist.raise_together(next((problem for problem in found if problem), None))


def read_file(path: Path, map_location: Any, mmap: bool = False) -> Any:
    """torch.load of a verified file, executing nothing of it."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (RuntimeError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{path} cannot be read by torch {torch.__version__} ({e})") from e
