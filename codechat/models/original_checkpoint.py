"""The original system's checkpoints: one `.pt` file {"model": state, "cfg": {...}, "step": n} of a GPT with learned positions and GELU.

The file is read without executing code in it. `cfg` has vocab_size, depth, n_embd, n_head and block_size; other keys do not change the weights.

    tok_emb, pos_emb                               the embeddings
    blocks.N.ln1, ln2                              RMSNorm; its epsilon is float32's, as torch's default has it
    blocks.N.attn.qkv, attn.proj                   attention, no biases
    blocks.N.mlp.fc, mlp.proj                      4x GELU, no biases
    ln_f, head                                     last norm; the head is the token embedding

GPT-2's names for the same (wte, wpe, h.N.ln_1, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj, lm_head) and the prefixes transformer.,
module. and _orig_mod. are read too. Its chat tags are plain text in GPT-2's vocabulary; the embedding gets zero rows up to a multiple of 64.

Left out: GPT-2 itself (an error names its LayerNorms and biases), optimizer states (the original saved none).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.hf_format import Piece, read_model

KEYS = ("vocab_size", "depth", "n_embd", "n_head", "block_size")
EPS = torch.finfo(torch.float32).eps  # of nn.RMSNorm(width), in whatever dtype it runs
PREFIX = re.compile(r"^(_orig_mod\.|module\.|transformer\.)+")
# theirs -> ours; every second line has GPT-2's spelling
OURS = dict(tok_emb="wte", pos_emb="wpe", ln_f="norm", head="head", ln1="attn_norm", ln2="mlp_norm")
OURS |= dict(wte="wte", wpe="wpe", lm_head="head", ln_1="attn_norm", ln_2="mlp_norm")
OURS |= {"attn.qkv": "attn.qkv", "attn.proj": "attn.out", "mlp.fc": "mlp.up", "mlp.proj": "mlp.down"}
OURS |= {"attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
_NAME = re.compile(r"(?:(?:blocks|h)\.(\d+)\.)?(.+)\.weight")


def read(path: Path, n_vocab: int) -> tuple[GPT, int]:
    """(the model in float32, its step). n_vocab: of its tokenizer. CheckpointError says what is not the original's."""
    if not path.is_file():
        raise MissingFile(f"no file {path}; give the original's .pt file, or the directory of a Hugging Face model")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or holds more than tensors and plain values ({str(error)[:200]}); save it again"
        ) from None
    parts = [found.get(key) for key in ("model", "cfg")] if isinstance(found, dict) else []
    if not parts or not all(isinstance(part, Mapping) for part in parts):
        kind = ", ".join(map(str, found))[:120] if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(f"{path} holds {kind}; required is {{'model': state, 'cfg': dict, 'step': int}}")
    shape, state = _shape(found["cfg"], n_vocab, path), _renamed(found["model"], path)
    with torch.device("meta"):
        ours = [name for name, _ in GPT(shape).named_parameters()]
    # its embedding has no padding rows
    places = [Piece(name, name, 0, found["cfg"]["vocab_size"] if name == "wte.weight" else None) for name in ours]
    return read_model(shape, state, places, f"the cfg of {path}"), int(found.get("step") or 0)


def _shape(cfg: Mapping[str, Any], n_vocab: int, path: Path) -> GPTConfig:
    if missing := [key for key in KEYS if not isinstance(cfg.get(key), int)]:
        raise CheckpointError(f"{path}: cfg lacks {', '.join(missing)}; required are {', '.join(KEYS)}")
    rows = cfg["vocab_size"]
    if rows < n_vocab:
        raise ConfigError(f"{path} has {rows} embedding rows, the tokenizer {n_vocab} ids; set its own by --tokenizer")
    return GPTConfig(
        **{key: cfg[key] for key in KEYS if key != "vocab_size"},
        vocab_size=n_vocab,
        n_tags=0,
        rows=rows if rows > n_vocab else None,
        mlp="gelu",
        pos="learned",
        norm_eps=EPS,
    )


def _renamed(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    foreign = []
    for name, tensor in state.items():
        match = _NAME.fullmatch(PREFIX.sub("", name))
        if not match or match[2] not in OURS:
            foreign.append(name)
            continue
        out[(f"blocks.{match[1]}." if match[1] else "") + OURS[match[2]] + ".weight"] = tensor
    if foreign:
        raise CheckpointError(
            f"{path} holds {', '.join(foreign[:3])}; required are the names that `codechat.models.original_checkpoint` lists"
        )
    head = out.pop("head.weight", None)
    if head is not None and not (head is out.get("wte.weight") or torch.equal(head, out["wte.weight"])):
        raise CheckpointError(
            f"{path}: head and embedding differ; the original's are one tensor; import it as an untied model"
        )
    return out
