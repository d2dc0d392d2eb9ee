"""A checkpoint as something that can be used: the model, its tokenizer, its kind of tags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codechat.core import config
from codechat.core.errors import CheckpointError
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.text import tokenizer
from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, with the tokenizer and the kind of tags it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    tags: str
    meta: dict[str, Any]
    path: Path


# ---- state


def load_model(ref: str | Path, device: str | torch.device = "cpu") -> LoadedModel:
    """The model of a checkpoint in evaluation mode, its tokenizer and its kind of tags."""

    ckpt = checkpoint.load(ref, map_location=device, optimizer=False)
    if not ckpt.meta.get("model_config") or not ckpt.meta.get("tokenizer"):
        raise CheckpointError(
            f"{ckpt.path} holds a {ckpt.meta.get('model')} without model_config or tokenizer; "
            "it can be resumed, not used"
        )
    model = GPT(config.from_dict(GPTConfig, ckpt.meta["model_config"], where=str(ckpt.path / "meta.json"))).to(device)
    checkpoint.restore(ckpt, model)
    return LoadedModel(
        model.eval(),
        tokenizer.from_dict(ckpt.meta["tokenizer"]),
        ckpt.meta.get("tags", "reserved"),
        ckpt.meta,
        ckpt.path,
    )
