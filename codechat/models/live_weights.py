"""Weights on their way from a trainer to a sampler on the same machine, as safetensors in a directory that both see:
/dev/shm, which is memory.

    live_000012/model.safetensors    matrices of blocks in the compute dtype, as products take them; the rest float32
                meta.json            architecture, tokenizer, tags, and a version that no other write has

A directory is complete or absent, and the one before it goes. Samplers on other machines read checkpoints.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from codechat.core import config
from codechat.core.atomic_files import atomic_directory, read_json
from codechat.core.errors import CheckpointError, RunError
from codechat.distributed import dist, sharding
from codechat.models import hf_format
from codechat.models.gpt import GPT
from codechat.models.hf_format import ONE_FILE

META = "meta.json"


def publish(folder: Path, step: int, model: GPT, meta: Mapping[str, Any]) -> tuple[Path, str]:
    """Write folder/live_<step> and remove what was there before it; (its path, its version). A collective.

    RunError, on every rank, where memory or disk is full: nothing partial stays."""
    version = dist.gather(f"{folder.name}@{step}-{secrets.token_hex(6)}")[0]
    final, problem = folder / f"live_{step:06d}", None
    if sharding.is_sharded(model):
        cast(FSDPModule, model).reshard()  # after a forward pass the root's weights are still gathered
    tensors: dict[str, Tensor] = {}
    for name, p in model.state_dict().items():
        whole = dist.gathered(sharding.for_products(name, p.detach(), dist.compute_dtype()))
        tensors[name] = whole if dist.is_main() else whole.new_empty(0)
    if dist.is_main():
        about = dict(meta, step=step, version=version, model_config=config.to_dict(model.cfg))
        try:
            with atomic_directory(final) as fresh:
                hf_format.save(fresh / ONE_FILE, tensors)
                (fresh / META).write_text(json.dumps(config.plain(about)))
                withdraw(folder)
        except OSError as error:
            problem = RunError(f"the weights of step {step} cannot be written to {folder} ({error}); free memory there")
    dist.raise_together(problem)
    return final, version


def withdraw(folder: Path) -> None:
    """Remove what was published in a directory."""
    for old in folder.glob("live_*"):
        shutil.rmtree(old, ignore_errors=True)


def is_live(place: Path) -> bool:
    return (place / ONE_FILE).is_file()


def read(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, what meta.json says). CheckpointError for what `publish` did not write."""
    try:
        meta = read_json(place / META)
        absent = {"version", "model_config", "tokenizer", "tags"} - set(meta)
    except (OSError, ValueError, TypeError, RunError) as error:
        meta, absent = {}, {str(error)}
    if absent:
        raise CheckpointError(f"{place / META} is not that of published weights: {min(absent)}; push them again")
    return hf_format.read_weights(place), meta
