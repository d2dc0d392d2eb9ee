"""The original system's .pt files: learned positions, GELU, one matrix for embedding and head."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from codechat.core.errors import CheckpointError
from codechat.formats.hf_format import check_finite
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

SIZES = ("vocab_size", "depth", "n_embd", "n_head", "block_size")
# parts of their names -> ours
OURS = {
    "tok_emb": "wte",
    "pos_emb": "wpe",
    "ln_f": "norm",
    "ln1": "attn_norm",
    "ln2": "mlp_norm",
    "attn.proj": "attn.out",
    "mlp.fc": "mlp.up",
    "mlp.proj": "mlp.down",
    "_orig_mod.": "",
    "module.": "",
}
PART = re.compile("|".join(map(re.escape, OURS)))


def read(path: Path, n_vocab: int) -> tuple[GPT, int]:
    """The model of {"model": state, "cfg": {...}, "step": n}, with learned positions and GELU,
    and its step; no code in the file is executed. n_vocab: ids of its tokenizer."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        model, tied = _model_of(saved, n_vocab)
        step = int(saved.get("step") or 0)
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        why = " ".join(str(error)[:200].split())
        got = f"{path} is no checkpoint of the original system with this --tokenizer ({why})"
        needed = (
            f"{{'model': state, 'cfg': {{{', '.join(SIZES)}}}, "
            "'step': int} of tensors and plain values"
        )
        raise CheckpointError(f"{got}; required is {needed}") from None
    if not tied:
        raise CheckpointError(f"{path}: head and embedding differ; the original's are one tensor")
    for name, weight in model.named_parameters():
        check_finite(name, weight)
    return model.eval(), step


def _model_of(saved: dict[str, Any], n_vocab: int) -> tuple[GPT, bool]:
    """The model, and whether its head is its embedding."""
    sizes: dict[str, Any] = {key: int(saved["cfg"][key]) for key in SIZES}
    rows = sizes.pop("vocab_size")
    weights = {
        PART.sub(lambda part: OURS[part[0]], name): weight
        for name, weight in saved["model"].items()
    }
    model = GPT(
        GPTConfig(
            **sizes,
            vocab_size=n_vocab,
            n_tags=0,
            rows=rows if rows != n_vocab else None,
            norm_eps=torch.finfo(
                torch.float32
            ).eps,  # of nn.RMSNorm(width), in whatever dtype it runs
            mlp="gelu",
            pos="learned",
        )
    )
    embedding = weights["wte.weight"]
    tied = torch.equal(weights.pop("head.weight", embedding), embedding)
    weights["wte.weight"] = F.pad(embedding, (0, 0, 0, model.cfg.padded_vocab - rows))
    model.load_state_dict(weights)
    return model, tied
