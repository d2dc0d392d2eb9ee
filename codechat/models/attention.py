"""Attention, and what sampling keeps of the tokens so far.

Shapes: B rows, T new tokens, S tokens so far, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.config import GPTConfig
from codechat.models.fast import attention as fast
from codechat.models.masks import Documents

if TYPE_CHECKING:
    from codechat.models.masks import Mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    *,
    causal: bool,
    products: bool = False,
) -> Tensor:
    """Attention (B, H, T, E) of q over k and v (B, K, T, E), as in arXiv:1706.03762, equation
    1; each key head serves H / K query heads (arXiv:2305.13245).

    mask: from `fast.attention.packed_mask`, or `Documents`, or bool (B, 1, T, T); none =
    causal, or everything.
    products: on a CPU in bfloat16, causal attention as matrix products."""
    faster = fast.attend(q, k, v, mask, causal=causal, products=products)
    if faster is not None:
        return faster
    # no block mask: those are flex attention's
    dense: Any = mask.mask if isinstance(mask, Documents) else mask
    return _sdpa(q, k, v, dense, mask is None and causal)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """torch's own attention."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


class Before(NamedTuple):
    """P prefixes that rows continue."""

    kept: Sequence[Tensor]  # of each block (2, P, K, S, E)
    owner: Tensor  # (B,) which of them
    mask: Tensor | None  # bool (P, 1, 1, S), false = padding


class Place(NamedTuple):
    """Where the next token of each row goes."""

    positions: Tensor  # (B,)
    kept: Sequence[Tensor]  # of each block (2, B, K, S, E) what it attends to, itself included
    columns: Tensor | None  # (B,) its own among those S; none = the last
    mask: Tensor | None  # of `KVCache.mask`
    before: Before | None = None  # which it attends to too
    slots: Tensor | None = None  # (B,) which of the kept rows each is; none = in their order

    def store(self, block: int, made: Tensor) -> None:
        """made (B, 2, K, E): its key and value."""
        kept = self.kept[block]
        if self.columns is None:
            kept[..., -1, :] = made.transpose(0, 1)
        else:
            kept[:, torch.arange(len(made)), :, self.columns] = made.to(kept.dtype)


class KVCache:
    """Keys and values of the tokens that a batch has seen, one row per sequence.

    All rows store their next token in the same column. A row whose prompt was padded keeps a
    hole, which `mask` hides; its positions continue from its own length. A class, not a list:
    FSDP's mixed precision would copy a list."""

    def __init__(
        self,
        cfg: GPTConfig,
        batch: int,
        length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.cfg = cfg
        parts, heads, width = cfg.cached
        # (depth, 2, B, K, S, E) keys, then values; with mla (depth, 1, B, 1, S, L + R) latents,
        # of which values are a part
        self.kv = torch.zeros(
            cfg.depth, parts, batch, heads, length, width, device=device, dtype=dtype
        )
        self.lengths = torch.zeros(batch, device=device, dtype=torch.long)  # (B,) real tokens
        # (B, S) false = padding
        self.real = torch.ones(batch, length, device=device, dtype=torch.bool)
        self.padded = False
        self.extent = 0  # columns in use; on the host, so no step waits for the device

    @property
    def empty(self) -> bool:
        return self.extent == 0

    def positions(self, new: int) -> Tensor:
        """(B, new) positions that the next `new` tokens of each row take."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> Tensor | None:
        """bool (B|1, 1, new, S): what the next `new` tokens may attend to; none = all, in an
        empty cache causally."""
        if self.empty:
            return None  # padding is on the right, where no real token looks
        end = self.extent + new
        holes = self.real[:, None, None, :end] if self.padded else None
        if new == 1:
            return holes
        causal = torch.ones(new, end, dtype=torch.bool, device=self.real.device).tril(self.extent)[
            None, None
        ]
        return causal if holes is None else causal & holes

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, K, T, E) of T new tokens of one block; return keys and values of all
        tokens so far."""
        end = self.extent + k.shape[2]
        assert end <= self.kv.shape[4], (
            "the cache is too short, and a slice would drop the token silently"
        )
        for kept, new in zip(self.kv[layer], (k, v)):
            kept[:, :, self.extent : end] = new
        return keys_and_values(self.kv[layer, :, :, :, :end], self.cfg)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, T, E) of T new tokens; return the attention (B, H, T, E) of q
        over all tokens of its row. With H = 0 they are stored alone."""
        k, v = self.store(layer, k, v)
        if not q.shape[1]:
            return q
        faster = fast.attend_masked(q, k, v, mask)
        if faster is not None:
            return faster
        # in an empty cache only: is_causal aligns the first query with the first key
        causal = mask is None and self.empty and q.shape[2] > 1
        return _sdpa(q.to(k.dtype), k, v, mask, causal).to(q.dtype)

    def place(self) -> Place:
        """Where the next token of each row goes."""
        end = self.extent + 1
        assert end <= self.kv.shape[4], "the cache is too short"
        return Place(
            self.lengths,
            self.kv[..., :end, :].unbind(),
            None,
            self.mask(1),
        )

    def place_of(self, slots: Tensor, ahead: Tensor) -> Place:
        """Where further tokens go: of row slots (N,) the one that is ahead (N,) of the next."""
        end = self.extent + int(ahead.max()) + 1
        assert end <= self.kv.shape[4], "the cache is too short"
        return Place(
            positions=self.lengths[slots] + ahead,
            kept=self.kv[..., :end, :].unbind(),
            columns=self.extent + ahead,
            mask=self.real[:, None, None, :end] if self.padded else None,
            slots=slots,
        )

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        """Count `new` stored tokens. n_new (B,): how many of them are real in each row; the rest
        is padding."""
        if n_new is not None:
            self.real[:, self.extent : self.extent + new] = (
                torch.arange(new, device=n_new.device) < n_new[:, None]
            )
            # asked once per advance, not per layer: this reads from the device
            self.padded = self.padded or bool((n_new < new).any())
        self.lengths = self.lengths + (new if n_new is None else n_new)
        self.extent += new

    def select(self, rows: Tensor | slice) -> Self:
        """A new cache of `rows`; repeats are allowed. A slice gives a view, which must be filled
        before this cache advances."""
        out = copy(self)
        out.kv = self.kv[:, :, rows]
        out.lengths = self.lengths[rows]
        out.real = self.real[rows]
        return out


def keys_and_values(kept: Tensor, cfg: GPTConfig) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, S, E) of one block from its part (2|1, B, K, S, E) of `KVCache.kv`.
    mla keeps one tensor: its values are the first `value_width` numbers of its keys."""
    return kept[0], kept[-1][..., : cfg.value_width]
