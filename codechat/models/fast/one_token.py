"""One new token of each row on a CPU: what `gpt.Block` computes, with the same rounding, without
what only prompts need. There a token is a thousand small operations beside its products.
Where `make lab` or `make cpp` has built `cpp/row.c`, it computes them: one call for all blocks.

Shapes: B rows, D width, H heads, K key-value heads, E head width, S tokens so far."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.config import GPTConfig
from codechat.models.fast import product
from codechat.models.fast.product import Product

if TYPE_CHECKING:
    from codechat.models.attention import Place
    from codechat.models.gpt import GPT

POSITIONS = 256  # of which angles are computed at once
Linear = Callable[[Tensor], Tensor]  # (B, n) -> (B, m)


def short_way(model: GPT, dtype: torch.dtype) -> ShortWay | None:
    """Of a model whose layers are reading copies (`reader.reading_copy`), with products in dtype;
    none for shapes that have no short way."""
    if not _short(model.cfg):
        return None
    found = [Products.of(block) for block in model.blocks]
    products = [block for block in found if block is not None]
    library = product.library(dtype)
    in_c = decodes_in_c(model.cfg, dtype) and len(products) == model.cfg.depth
    if library is None or not in_c:
        return ShortWay(model, dtype)
    return RowsInC(model, dtype, library.rows, products)


def _short(cfg: GPTConfig) -> bool:
    return cfg.attention == "mha" and cfg.pos == "rope"


def decodes_in_c(cfg: GPTConfig, dtype: torch.dtype) -> bool:
    """Whether row.c decodes models of this shape, with products in dtype: it knows two kinds of
    MLP, takes 16 numbers in a step, and products have multiples of `product.WHOLE` numbers."""
    known = _short(cfg) and cfg.mlp in ("swiglu", "relu2")
    made = (cfg.n_embd, cfg.hidden_width, (cfg.n_head + 2 * cfg.kv_heads) * cfg.head_dim)
    whole = not cfg.head_dim % 16 and not any(n % product.WHOLE for n in made)
    return known and whole and product.library(dtype) is not None


@dataclass(frozen=True)
class Products:
    """Of one block, in C."""

    qkv: Product
    out: Product
    up: Product  # with a gate: both in one
    down: Product

    @classmethod
    def of(cls, block: Any) -> Products | None:
        """None where a layer has another product."""
        mlp = block.mlp
        up = mlp.up_and_gate if hasattr(mlp, "up_and_gate") else mlp.up
        found = [layer.in_c for layer in (block.attn.qkv, block.attn.out, up, mlp.down)]
        return None if None in found else cls(*found)


@dataclass(frozen=True)
class Layer:
    """Weights of one block."""

    attn_norm: Tensor  # (D,)
    qkv: Linear
    gain: Tensor | None  # (H + K, E) of normed queries and keys
    out: Linear
    mlp_norm: Tensor  # (D,)
    mlp: Linear

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


class ShortWay:
    """Decodes rows of the model that a reader holds."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        """dtype: of products."""
        self.cfg = model.cfg
        self.dtype = dtype
        self.embedding = model.wte.weight.detach()
        self.layers = [Layer.of(block) for block in model.blocks]
        self.norm = model.norm.weight.detach().float()
        self.cos = self.sin = torch.empty(0, self.cfg.rotary_width)  # of each position

    def takes(self, place: Place) -> bool:
        """Whether `step` decodes what is kept in this way."""
        return place.before is None

    def step(self, ids: Tensor, place: Place) -> Tensor:
        """The states (B, D) after the last norm of a new token of each row (B,), whose keys and
        values are stored."""
        cfg = self.cfg
        B = len(ids)
        H = cfg.n_head
        K = cfg.kv_heads
        E = cfg.head_dim
        wide = [cfg.n_embd]
        cos, sin = self._angles(place.positions)
        x = F.embedding(ids, self.embedding)
        # products get the dtype that autocast would give them; it is asked at every operation
        with torch.autocast("cpu", enabled=False):
            for number, (layer, kept) in enumerate(zip(self.layers, place.kept)):
                normed = torch.rms_norm(x, wide, layer.attn_norm, cfg.norm_eps)
                heads = layer.qkv(normed.to(self.dtype)).view(B, H + 2 * K, E)
                qk = heads[:, : H + K].float()
                if layer.gain is not None:
                    qk = torch.rms_norm(qk, [E], None, cfg.norm_eps) * layer.gain
                # as `gpt.rotate`, rounded to the dtype of products
                heads[:, : H + K] = torch.addcmul(qk * cos, qk.roll(E // 2, -1), sin)
                place.store(number, heads[:, H:].view(B, 2, K, E))
                k, v = kept.unbind()
                q = heads[:, :H].to(k.dtype)[:, :, None]
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=place.mask, enable_gqa=H != K)
                x += layer.out(y.to(self.dtype).view(B, H * E))
                normed = torch.rms_norm(x, wide, layer.mlp_norm, cfg.norm_eps)
                x += layer.mlp(normed.to(self.dtype))
            return torch.rms_norm(x, wide, self.norm, cfg.norm_eps)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, E) of positions (B,)."""
        from codechat.models.gpt import rope_table  # it imports the modules beside this one

        last = int(positions.max())
        if last >= len(self.cos):
            known = torch.arange((last // POSITIONS + 1) * POSITIONS)
            cos, sin = rope_table(self.cfg, known[None])
            self.cos = cos[0, 0]
            self.sin = sin[0, 0]
        return self.cos[positions, None], self.sin[positions, None]


class Shape(ctypes.Structure):
    """`Shape` of row.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in "depth width heads kv_heads head_width hidden".split()),
        ("gated", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


class LayerInC(ctypes.Structure):
    """`Layer` of row.c: addresses."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in "attn_norm mlp_norm gain bias qkv out up down".split()
    ]


class KeptInC(ctypes.Structure):
    """`Kept` of row.c."""

    _fields_ = [
        ("blocks", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_long) for name in "to_values to_row to_head".split()),
        ("real", ctypes.c_void_p),
        ("to_real", ctypes.c_long),
    ]

    @classmethod
    def of(cls, blocks: Sequence[Tensor], mask: Tensor | None) -> KeptInC:
        """Of each block (2, B, K, S, E), and bool (B, 1, 1, S)."""
        values, row, head, *_ = blocks[0].stride()
        made = cls(
            blocks=(ctypes.c_void_p * len(blocks))(*(block.data_ptr() for block in blocks)),
            to_values=values,
            to_row=row,
            to_head=head,
        )
        if mask is not None:
            made.real = mask.data_ptr()
            made.to_real = mask.stride(0)
        return made


class PlaceInC(ctypes.Structure):
    """`Place` of row.c."""

    _fields_ = [
        ("rows", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in "cos sin".split()),
        ("own", KeptInC),
        ("slots", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("prefix", KeptInC),
        ("owner", ctypes.c_void_p),
        ("n_prefix", ctypes.c_long),
    ]


class RowsInC(ShortWay):
    """The same by row.c, with keys and values of its dtype (`reader.cache_dtype`). Its sums go in
    another order: now and then a number is rounded the other way."""

    def __init__(
        self, model: GPT, dtype: torch.dtype, rows: Callable[..., None], products: list[Products]
    ) -> None:
        super().__init__(model, dtype)
        cfg = self.cfg
        self.rows = rows
        self.products = products  # keeps what the addresses are of
        self.shape = Shape(
            depth=cfg.depth,
            width=cfg.n_embd,
            heads=cfg.n_head,
            kv_heads=cfg.kv_heads,
            head_width=cfg.head_dim,
            hidden=cfg.hidden_width,
            gated=cfg.mlp == "swiglu",
            eps=cfg.norm_eps,
        )
        blocks = [self._in_c(*pair) for pair in zip(self.layers, products)]
        self.blocks = (LayerInC * cfg.depth)(*blocks)

    @staticmethod
    def _in_c(layer: Layer, products: Products) -> LayerInC:
        bias = products.qkv.bias
        return LayerInC(
            attn_norm=layer.attn_norm.data_ptr(),
            mlp_norm=layer.mlp_norm.data_ptr(),
            gain=None if layer.gain is None else layer.gain.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            qkv=products.qkv.start,
            out=products.out.start,
            up=products.up.start,
            down=products.down.start,
        )

    def takes(self, place: Place) -> bool:
        return True

    def step(self, ids: Tensor, place: Place) -> Tensor:
        assert place.kept[0].dtype == self.dtype
        B = len(ids)
        cos, sin = self._angles(place.positions)
        columns = place.columns
        if columns is None:
            columns = torch.full((B,), place.kept[0].shape[3] - 1)
        slots = torch.arange(B) if place.slots is None else place.slots
        here = PlaceInC(
            rows=B,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            own=KeptInC.of(place.kept, place.mask),
            slots=slots.data_ptr(),
            columns=columns.data_ptr(),
        )
        before = place.before
        if before is not None:
            here.prefix = KeptInC.of(before.kept, before.mask)
            here.owner = before.owner.data_ptr()
            here.n_prefix = before.kept[0].shape[3]
        x = F.embedding(ids, self.embedding).float()
        self.rows(
            ctypes.byref(self.shape),
            self.blocks,
            ctypes.byref(here),
            x.data_ptr(),
            torch.get_num_threads(),
        )
        return torch.rms_norm(x, [self.cfg.n_embd], self.norm, self.cfg.norm_eps)
