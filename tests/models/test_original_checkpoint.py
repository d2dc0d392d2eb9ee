"""Checkpoints of the original system: they compute here what they computed there; what is not theirs is refused by
name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.models import exchange, loading
from codechat.runs import paths

pytestmark = pytest.mark.usefixtures("runs_root")

CFG = dict(vocab_size=257, depth=2, n_embd=16, n_head=2, block_size=24, dropout=0.0, grad_checkpoint=True)
BLOCK = {"ln1": (16,), "attn.qkv": (48, 16), "attn.proj": (16, 16), "ln2": (16,)}
BLOCK |= {"mlp.fc": (64, 16), "mlp.proj": (16, 64)}


def original(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A random state under the original's names."""
    rng, shapes = torch.Generator().manual_seed(0), {"tok_emb": (257, 16), "pos_emb": (24, 16), "ln_f": (16,)}
    shapes |= {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()}
    state = {f"{k}.weight": (torch.randn(v, generator=rng) * 0.3 + (len(v) == 1)).to(dtype) for k, v in shapes.items()}
    return state | {"head.weight": state["tok_emb.weight"]}


def logits(state: dict[str, Tensor], ids: Tensor, heads: int = 2, depth: int = 2) -> Tensor:
    """The original's forward pass, written out: pre-norm RMSNorm with torch's default epsilon, fused qkv, GELU, tied
    head."""
    (B, T), D = ids.shape, state["ln_f.weight"].shape[0]
    x = state["tok_emb.weight"][ids] + state["pos_emb.weight"][:T]
    for i in range(depth):
        w = {k.removeprefix(f"blocks.{i}.").removesuffix(".weight"): v for k, v in state.items()}
        q, k, v = (F.rms_norm(x, (D,), w["ln1"]) @ w["attn.qkv"].T).split(D, dim=2)
        q, k, v = (y.view(B, T, heads, D // heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x = x + y @ w["attn.proj"].T
        x = x + F.gelu(F.rms_norm(x, (D,), w["ln2"]) @ w["mlp.fc"].T) @ w["mlp.proj"].T
    return F.rms_norm(x, (D,), state["ln_f.weight"]) @ state["tok_emb.weight"].T


def imported(path: Path, **more: Any) -> loading.LoadedModel:
    how = dict(source=path, run_name="old", tokenizer="bytes") | more
    exchange.import_model(exchange.ImportConfig(**how))
    return loading.load_model("old")


def write(path: Path, state: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    saved = {"model": original() if state is None else state, "cfg": CFG, "step": 70, "optimizer": None}
    torch.save(saved | changes, path)
    return path


@pytest.mark.parametrize("prefix, dtype", [("", torch.float32), ("_orig_mod.", torch.float32), ("", torch.bfloat16)])
@torch.no_grad()
def test_it_computes_what_it_computed(tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    state, ids = original(dtype), torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    loaded = imported(write(tmp_path / "latest.pt", {f"{prefix}{name}": tensor for name, tensor in state.items()}))
    logits_there = loaded.model(ids)
    expected = logits({k: v.float() for k, v in state.items()}, ids)
    torch.testing.assert_close(logits_there[..., :257], expected, atol=1e-4, rtol=1e-4)
    assert logits_there.shape[-1] == 320 and not logits_there[..., 257:].any(), "padding rows are zero"
    assert (loaded.meta["step"], loaded.tags, loaded.model.cfg.n_tags) == (70, "text", 0)
    if (prefix, dtype) == ("", torch.float32):  # on activations near zero an epsilon of 1e-5 would give other logits
        for name in ("tok_emb.weight", "pos_emb.weight"):
            state[name].mul_(1e-3)
        small = imported(write(tmp_path / "a.pt", state), overwrite=True).model(ids)[..., :257]
        torch.testing.assert_close(small, logits(state, ids), atol=1e-7, rtol=1e-4)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_files_of_another_system_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for change in (
        *(dict(cfg=cfg) for cfg in (None, {"n_layer": 2}, *(CFG | {k: v} for k, v in (("depth", 3), ("depth", 1))))),
        *(dict(cfg=CFG | {"n_embd": 32}), dict(cfg=CFG | {"vocab_size": 200}), dict(model=Bomb())),
        dict(model=original() | {"blocks.0.ln1.bias": torch.zeros(16)}),
        dict(model=original() | {"head.weight": torch.zeros(257, 16)}),
    ):
        with pytest.raises((CheckpointError, ConfigError)):
            imported(write(tmp_path / "a.pt", **change))
    assert not paths.exists("old") and not (tmp_path / "exploded").exists()
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04 half a file")
    torch.save([1], tmp_path / "d.pt")
    for name, more, error in (("a", {}, CheckpointError), ("d", {}, CheckpointError), ("c", {}, MissingFile)):
        with pytest.raises(error):
            imported(tmp_path / f"{name}.pt", **more)
    with pytest.raises(ConfigError):
        imported(write(tmp_path / "b.pt"), tags="reserved")
