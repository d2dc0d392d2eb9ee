"""A run directory that holds nothing but a model to use: `codechat export --format run`. Those in codechat/released/ come with the package.

    config.json, status.json, env.json               of the run that trained it, without what names its machine
    checkpoints/step_N/meta.json, model.safetensors  the weights in bfloat16, without optimizer states

Every command takes it as it takes another run, and training can begin from it (`--init-from`), in float32. It cannot be continued
with `--resume`. Rounding to bfloat16 changes some answers: a figure that is published with such a model is measured on it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import file_record, read_json, write_json
from codechat.core.errors import RunError
from codechat.models import safetensors_files
from codechat.runs import checkpoint
from codechat.runs.paths import is_run

OF_THE_MACHINE = (
    "argv",
    "cwd",
    "host",
    "launch",
    "parent",
    "resumed",
)  # entries of env.json that tell a reader nothing


def write(ckpt: str | Path, folder: Path, dtype: str) -> str:
    """Fill `folder` with the checkpoint as a run that has this one step; a line that says what it holds. RunError where it is not part of a run."""
    loaded = checkpoint.load(ckpt, optimizer=False, mmap=True)
    run = loaded.path.parent.parent
    if not is_run(run):
        raise RunError(
            f"{loaded.path} is part of no run; --format run needs config.json and status.json two folders above it"
        )
    place = folder / "checkpoints" / loaded.path.name
    place.mkdir(parents=True)
    weights = place / checkpoint.RELEASED_WEIGHTS
    entries = [safetensors_files.Entry(k, tuple(v.shape), v.detach) for k, v in loaded.model_state.items()]
    size = safetensors_files.write(weights, entries, dtype)
    changed = {"optimizers": [], "sharded": False, "files": {weights.name: file_record(weights)}}
    checkpoint.write_meta(place / "meta.json", loaded.meta | changed)
    write_json(folder / "config.json", read_json(run / "config.json"))
    write_json(folder / "env.json", _environment(read_json(run / "env.json")))
    state: dict[str, Any] = {"status": "finished", "reason": None, "summary": {}, "pid": None}
    status = read_json(run / "status.json")
    write_json(folder / "status.json", {"kind": status.get("kind"), "ended": status.get("ended"), **state})
    return f"{size / 2**20:.1f} MiB of {dtype}, {sum(v.numel() for v in loaded.model_state.values()):,} parameters, from {os.path.relpath(loaded.path)}"


def _environment(env: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in env.items() if key not in OF_THE_MACHINE}
    return kept | {"hardware": {key: value for key, value in env.get("hardware", {}).items() if key != "system"}}
