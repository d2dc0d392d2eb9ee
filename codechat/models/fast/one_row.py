"""One new token of one row on a CPU: what `gpt.Block` computes, with the same rounding, without
what only batches need. There a token is a thousand small operations beside its products.

Shapes: D width, H heads, K key-value heads, E head width, S tokens so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.config import GPTConfig

if TYPE_CHECKING:
    from codechat.models.attention import Place
    from codechat.models.gpt import GPT

POSITIONS = 256  # of which angles are computed at once
Product = Callable[[Tensor], Tensor]  # (1, n) -> (1, m)


def fits(cfg: GPTConfig) -> bool:
    """Whether models of this shape have this path."""
    return cfg.attention == "mha" and cfg.pos == "rope" and not cfg.bf16_residual


@dataclass(frozen=True)
class Layer:
    """Weights of one block."""

    attn_norm: Tensor  # (D,)
    qkv: Product
    gain: Tensor | None  # (H + K, E) of normed queries and keys
    out: Product
    mlp_norm: Tensor  # (D,)
    mlp: Product

    @classmethod
    def of(cls, block: Any) -> Layer:
        """Of a block whose layers are reading copies (`reader.reading_copy`)."""
        attn = block.attn
        gain = None
        if attn.q_norm is not None:
            q_gain = attn.q_norm.weight.expand(attn.cfg.n_head, -1)
            gain = torch.cat((q_gain, attn.k_norm.weight.expand(attn.cfg.kv_heads, -1))).detach()
        return cls(
            block.attn_norm.weight.detach().float(),
            attn.qkv.forward,
            gain,
            attn.out.forward,
            block.mlp_norm.weight.detach().float(),
            block.mlp.forward,
        )


class OneRow:
    """Decodes one row of the model that a reader holds."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        """dtype: of products."""
        self.cfg = model.cfg
        self.dtype = dtype
        self.embedding = model.wte.weight.detach()
        self.layers = [Layer.of(block) for block in model.blocks]
        self.norm = model.norm.weight.detach().float()
        self.cos: list[Tensor] = []  # (E,) of each position
        self.sin: list[Tensor] = []

    def step(self, ids: Tensor, place: Place) -> Tensor:
        """The state (1, D) after the last norm of a new token (1,), whose keys and values are
        stored."""
        cfg = self.cfg
        H, K, E = cfg.n_head, cfg.kv_heads, cfg.head_dim
        wide = [cfg.n_embd]
        cos, sin = self._angles(place.position)
        x = F.embedding(ids, self.embedding)
        # products get the dtype that autocast would give them; it is asked at every operation
        with torch.autocast("cpu", enabled=False):
            for layer, new, kept in zip(self.layers, place.new, place.kept):
                normed = torch.rms_norm(x, wide, layer.attn_norm, cfg.norm_eps)
                heads = layer.qkv(normed.to(self.dtype)).view(H + 2 * K, E)
                qk = heads[: H + K].float()
                if layer.gain is not None:
                    qk = torch.rms_norm(qk, [E], None, cfg.norm_eps) * layer.gain
                # as `gpt.rotate`, rounded to the dtype of products
                heads[: H + K] = torch.addcmul(qk * cos, qk.roll(E // 2, -1), sin)
                new.copy_(heads[H:].view(2, 1, K, E))
                k, v = kept.unbind()
                q = heads[:H].to(k.dtype).view(1, H, 1, E)
                y = F.scaled_dot_product_attention(q, k, v, enable_gqa=H != K)
                x += layer.out(y.to(self.dtype).view(1, H * E))
                normed = torch.rms_norm(x, wide, layer.mlp_norm, cfg.norm_eps)
                x += layer.mlp(normed.to(self.dtype))
            return torch.rms_norm(x, wide, self.norm, cfg.norm_eps)

    def _angles(self, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (E,) of a position."""
        from codechat.models.gpt import rope_table  # it imports the modules beside this one

        while len(self.cos) <= position:
            begun = len(self.cos)
            cos, sin = rope_table(self.cfg, torch.arange(begun, begun + POSITIONS)[None])
            self.cos += cos[0, 0].unbind()
            self.sin += sin[0, 0].unbind()
        return self.cos[position], self.sin[position]
