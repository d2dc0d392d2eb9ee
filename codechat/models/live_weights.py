"""Weights on their way from a trainer to a sampler on the same machine, as safetensors in a directory that both see: /dev/shm, which is memory.

    live_000012/model.safetensors    matrices of blocks in the compute dtype, as products take them; the rest float32
                meta.json            architecture, tokenizer, tags, and a version that no other write has

A checkpoint is hashed, synced and kept; this is none of it. A directory is complete or absent, and the one before it goes. A sharded model is
gathered one tensor at a time, by the first rank.

Left out: samplers on other machines, which read checkpoints.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from codechat.core import config
from codechat.core.atomic_files import read_json
from codechat.core.errors import CheckpointError, RunError
from codechat.distributed import dist, sharding
from codechat.models.gpt import GPT
from codechat.models.safetensors_files import ONE_FILE, Entry, Weights, write

META = "meta.json"


def publish(folder: Path, step: int, model: GPT, meta: Mapping[str, Any]) -> tuple[Path, str]:
    """Write folder/live_<step> and remove what was there before it; (its path, its version). RunError, on every rank, where memory or disk is
    full: nothing partial stays. A collective."""
    version = dist.broadcast_object(f"{folder.name}@{step}-{secrets.token_hex(6)}")
    final, problem = folder / f"live_{step:06d}", None
    if sharding.is_sharded(model):
        cast(FSDPModule, model).reshard()  # after a forward pass the root's weights are still gathered
    state = model.state_dict()
    tensors = map(_gathered, state, state.values())
    if dist.is_main():
        about = dict(meta, step=step, version=version, model_config=config.to_dict(model.cfg))
        temp = folder / "live.tmp"
        try:
            shutil.rmtree(temp, ignore_errors=True)
            temp.mkdir(parents=True)
            entries = [Entry(n, tuple(p.shape), lambda: next(tensors), _dtype(n, p)) for n, p in state.items()]
            write(temp / ONE_FILE, entries, "float32")
            (temp / META).write_text(json.dumps(config.plain(about)))
            withdraw(folder)
            os.rename(temp, final)
        except OSError as error:
            shutil.rmtree(temp, ignore_errors=True)
            problem = RunError(f"the weights of step {step} cannot be written to {folder} ({error}); free memory there")
    if sharding.is_sharded(model):
        deque(tensors, maxlen=0)  # gathering is a collective: what is left, and all of it on the other ranks
    dist.raise_together(problem)
    return final, version


def withdraw(folder: Path) -> None:
    """Remove what was published in a directory."""
    for old in folder.glob("live_*"):
        shutil.rmtree(old, ignore_errors=True)


def _dtype(name: str, p: Tensor) -> str:
    return str(dist.compute_dtype()).removeprefix("torch.") if _is_matrix(name, p) else "float32"


def _is_matrix(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and name.startswith("blocks.")


def _gathered(name: str, p: Tensor) -> Tensor:
    p = p.detach().to(dist.compute_dtype()) if _is_matrix(name, p) else p.detach()
    return cast(Any, p).full_tensor() if dist.is_sharded_tensor(p) else p


def is_live(place: Path) -> bool:
    return (place / ONE_FILE).is_file()


def read(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, what meta.json says). The tensors are pages of the file, which may go. CheckpointError for what `publish` did not write."""
    try:
        meta = read_json(place / META)
        absent = {"version", "model_config", "tokenizer", "tags"} - set(meta)
    except (OSError, ValueError, TypeError) as error:
        meta, absent = {}, {str(error)}
    if absent:
        raise CheckpointError(f"{place / META} is not that of published weights: {min(absent)}; push them again")
    with Weights(place) as weights:
        return {name: weights[name] for name in weights}, meta
