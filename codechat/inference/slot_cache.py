"""Keys and values of rows that come and go: each row stores its next token at its own length.

Rows in use fill slots 0 to B - 1, so that a step reads them without a copy; the last row replaces one that leaves.
Shapes: B rows in use, S cached tokens, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codechat.models.config import GPTConfig
from codechat.models.kv_cache import KVCache, attend_cached, new_cache


class SlotCache:
    """The cache interface of `GPT.hidden`, for one new token per row in use."""

    empty = False  # rows join with their prompts

    def __init__(self, cfg: GPTConfig, slots: int, device: torch.device | str, dtype: torch.dtype) -> None:
        cache = new_cache(cfg, slots, cfg.block_size, device, dtype)
        # (depth, slots, K, S, E) each; a latent is key and value in one (`kv_cache.LatentCache`)
        self.kept = [cache.k] if cfg.attention == "mla" else [cache.k, cache.v]
        self.lengths: list[int] = []  # tokens of each row in use
        self.columns = torch.zeros(0, dtype=torch.long, device=device)  # (B,) the same, while a step runs

    def join(self, prefilled: KVCache, row: int, length: int) -> None:
        """Take over the first `length` tokens of a prefilled row into the next free slot."""
        slot = len(self.lengths)
        for kept, source in zip(self.kept, (prefilled.k, prefilled.v)):
            kept[:, slot, :, :length] = source[:, row, :, :length]
        self.lengths.append(length)

    def leave(self, slot: int) -> None:
        """Free a slot; the last row in use moves there."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if slot != last:
            for kept in self.kept:
                kept[:, slot, :, :length] = kept[:, last, :, :length]
            self.lengths[slot] = length

    # ---- called by GPT.hidden, in this order

    def positions(self, new: int) -> Tensor:
        """(B, 1) position that the next token of each row takes."""
        self.columns = torch.tensor(self.lengths, device=self.kept[0].device)
        return self.columns[:, None]

    def mask(self, new: int) -> Tensor | None:
        """bool (B, 1, 1, S): what the next token of each row may attend to; none = everything."""
        if min(self.lengths) == max(self.lengths):
            return None
        return (torch.arange(max(self.lengths) + 1, device=self.kept[0].device) <= self.columns[:, None])[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, 1, E) of one token per row; return the attention (B, H, 1, E) of q over its row."""
        rows, end = torch.arange(len(q), device=q.device), max(self.lengths) + 1
        kept = [kept[layer, : len(q), :, :end] for kept in self.kept]
        for cached, new in zip(kept, (k, v)):
            cached[rows, :, self.columns] = new[:, :, 0].to(cached.dtype)
        keys, values = kept[0].to(q.dtype), kept[-1].to(q.dtype)
        return attend_cached(q, keys, values[..., : v.shape[-1]], mask)  # a latent's value is its first columns

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        """Count the stored token of every row."""
        self.lengths = [n + new for n in self.lengths]
