"""The original system's checkpoints: one `.pt` file {"model": state, "cfg": {...}, "step": n} of a GPT with learned positions and GELU.

Read without executing what it holds. `cfg` has vocab_size, depth, n_embd, n_head and block_size; other keys do not change the weights. Names:

    tok_emb, pos_emb                               the embeddings
    blocks.N.ln1, ln2                              RMSNorm; its epsilon is float32's, as torch's default has it
    blocks.N.attn.qkv, attn.proj                   attention, no biases
    blocks.N.mlp.fc, mlp.proj                      4x GELU, no biases
    ln_f, head                                     last norm; the head is the token embedding

GPT-2's names for the same (wte, wpe, h.N.ln_1, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj, lm_head) and the prefixes transformer.,
module. and _orig_mod. are read too. Its chat tags are plain text in GPT-2's vocabulary; the embedding gets zero rows up to a multiple of 64.

Left out: GPT-2 itself (LayerNorm and biases: refused by their names), optimizer states (the original saved none).
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

KEYS = ("vocab_size", "depth", "n_embd", "n_head", "block_size")
EPS = torch.finfo(torch.float32).eps  # of nn.RMSNorm(width), in whatever dtype it runs
PREFIX = re.compile(r"^(_orig_mod\.|module\.|transformer\.)+")
OURS = {
    "tok_emb": "wte",
    "wte": "wte",
    "pos_emb": "wpe",
    "wpe": "wpe",
    "ln_f": "norm",
    "head": "head",
    "lm_head": "head",
    "ln1": "attn_norm",
    "ln_1": "attn_norm",
    "ln2": "mlp_norm",
    "ln_2": "mlp_norm",
    "attn.qkv": "attn.qkv",
    "attn.c_attn": "attn.qkv",
    "attn.proj": "attn.out",
    "attn.c_proj": "attn.out",
    "mlp.fc": "mlp.up",
    "mlp.c_fc": "mlp.up",
    "mlp.proj": "mlp.down",
    "mlp.c_proj": "mlp.down",
}
_NAME = re.compile(r"(?:(?:blocks|h)\.(\d+)\.)?(.+)\.weight")


def read(path: Path, n_vocab: int) -> tuple[GPT, int]:
    """(the model in float32, its step). n_vocab: of its tokenizer. CheckpointError says what is not the original's."""
    if not path.is_file():
        raise MissingFile(
            f"no file {path}; give the .pt file of the original system, or the directory of a Hugging Face model"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read without executing it, or is damaged ({str(error)[:200]}); "
            "required is what torch.save makes of tensors and plain values; save it again as {'model', 'cfg', 'step'}"
        ) from None
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("model"), Mapping)
        or not isinstance(found.get("cfg"), Mapping)
    ):
        keys = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(
            f"{path} holds {keys[:120]}; required is {{'model': state, 'cfg': dict, 'step': int}}; save it in that form"
        )
    shape = _shape(found["cfg"], n_vocab, path)
    return _model(shape, _renamed(found["model"], path), path), int(found.get("step") or 0)


def _shape(cfg: Mapping[str, Any], n_vocab: int, path: Path) -> GPTConfig:
    if missing := [key for key in KEYS if not isinstance(cfg.get(key), int)]:
        raise CheckpointError(
            f"{path}: cfg lacks {', '.join(missing)} (it has {', '.join(map(str, cfg))}); required are {', '.join(KEYS)}"
        )
    rows = cfg["vocab_size"]
    if rows < n_vocab:
        raise ConfigError(
            f"{path} has {rows} embedding rows, its tokenizer {n_vocab} ids; name the tokenizer it was trained with by --tokenizer"
        )
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
            f"{path} holds {', '.join(foreign[:3])}, which the original's model has not; `codechat import --help` lists its names"
        )
    head = out.pop("head.weight", None)
    if head is not None and not (head is out.get("wte.weight") or torch.equal(head, out["wte.weight"])):
        raise CheckpointError(
            f"{path}: its head is not its token embedding; the original's are one tensor; import it as an untied Hugging Face model"
        )
    return out


@torch.no_grad()
def _model(shape: GPTConfig, state: Mapping[str, Tensor], path: Path) -> GPT:
    with torch.device("meta"):
        model = GPT(shape)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    rows = shape.rows or shape.vocab_size
    wanted["wte.weight"] = (rows, shape.n_embd)
    problems = [
        f"{n} is {tuple(state[n].shape) if n in state else 'missing'}, cfg makes it {wanted[n]}"
        for n in wanted
        if n not in state or tuple(state[n].shape) != wanted[n]
    ]
    problems += [f"{n} is not part of a model of this cfg" for n in state if n not in wanted]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{path}: {'; '.join(problems[:3])}{more}; the weights and their cfg must be of one run")
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        p.zero_()[: len(state[name])].copy_(state[name])
    return model.eval()
