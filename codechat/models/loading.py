"""Weights as a model that can be used, with its tokenizer and its kind of tags: from a checkpoint, or from a directory in
memory (/dev/shm) through which a trainer hands them to a sampler on the same machine.

    live_000012/model.safetensors    matrices of blocks in the compute dtype, as products take them; the rest float32
                meta.json            architecture, tokenizer, tags, and a version that no other write has
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codechat.core import config
from codechat.core.atomic_files import atomic_directory, read_json
from codechat.core.errors import CheckpointError, RunError
from codechat.distributed import dist, sharding
from codechat.models import hf_format
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.hf_format import ONE_FILE
from codechat.runs import checkpoint
from codechat.text import tokenizer
from codechat.text.tokenizer import Tokenizer

META = "meta.json"


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with the tokenizer and the kind of tags it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    tags: str
    meta: dict[str, Any]
    path: Path

    @property
    def tools_style(self) -> str:
        """How system prompts listed tools when it was last fine-tuned (`chat.tools_prompt`)."""
        tuned = [entry for entry in self.meta.get("lineage", ()) if entry.get("kind") == "sft"]
        return tuned[-1].get("tools_style", "compact") if tuned else "compact"

    @property
    def declines(self) -> bool:
        """Whether it declines by calling `chat.NOTHING`."""
        return self.tools_style == "described"


def describe(path: Path, meta: dict[str, Any]) -> tuple[GPTConfig, Tokenizer, str]:
    """Architecture, tokenizer and kind of tags of a checkpoint. CheckpointError where it holds no language model."""
    if not meta.get("model_config") or not meta.get("tokenizer"):
        raise CheckpointError(f"{path} holds a {meta.get('model')} without tokenizer; give a language model")
    shape = config.from_dict(GPTConfig, meta["model_config"], where=str(path / META))
    return shape, tokenizer.from_dict(meta["tokenizer"]), meta.get("tags", "reserved")


def load_model(ref: str | Path, device: str | torch.device = "cpu", tags: str | None = None) -> LoadedModel:
    """The model of a checkpoint: a run, RUN@best, RUN@STEP or a directory. tags: none = those it was trained with."""
    ckpt = checkpoint.load(ref, optimizer=False, mmap=True)  # no second copy in host memory, whatever the device
    shape, tok, trained_with = describe(ckpt.path, ckpt.meta)
    with torch.device("meta"):  # random weights would be overwritten
        model = GPT(shape)
    model.to_empty(device=device)
    checkpoint.restore(ckpt, model)
    return LoadedModel(model.eval(), tok, tags or trained_with, ckpt.meta, ckpt.path)


def publish(folder: Path, step: int, model: GPT, meta: Mapping[str, Any]) -> tuple[Path, str]:
    """Write folder/live_<step>, whole or not at all, and remove the one before; (its path, its version). A collective.

    RunError, on every rank, where memory or disk is full."""
    version = dist.gather(f"{folder.name}@{step}-{secrets.token_hex(6)}")[0]
    final = folder / f"live_{step:06d}"
    if sharding.is_sharded(model):
        model.reshard()  # type: ignore[operator]  # after a forward pass the root's weights are still gathered
    tensors: dict[str, Tensor] = {}
    for name, p in model.state_dict().items():
        whole = dist.gathered(sharding.for_products(name, p.detach(), dist.compute_dtype()))
        tensors[name] = whole if dist.is_main() else whole.new_empty(0)
    about = dict(meta, step=step, version=version, model_config=config.plain(model.cfg))
    with dist.together():
        try:
            if dist.is_main():
                with atomic_directory(final) as fresh:
                    hf_format.save(fresh / ONE_FILE, tensors)
                    (fresh / META).write_text(json.dumps(config.plain(about)))
                    withdraw(folder)
        except OSError as error:
            raise RunError(f"step {step} cannot be written to {folder} ({error}); free memory there") from error
    return final, version


def withdraw(folder: Path) -> None:
    """Remove what was published in a directory."""
    for old in folder.glob("live_*"):
        shutil.rmtree(old, ignore_errors=True)


def read_weights(place: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """(weights, meta.json) of a checkpoint, or of what `publish` wrote."""
    if not (place / ONE_FILE).is_file():
        loaded = load_model(place)
        return loaded.model.state_dict(), loaded.meta
    meta = read_json(place / META)
    if absent := {"version", "model_config", "tokenizer", "tags"} - set(meta):
        raise CheckpointError(f"{place / META} lacks {min(absent)}; push the weights again")
    return hf_format.read_weights(place), meta
