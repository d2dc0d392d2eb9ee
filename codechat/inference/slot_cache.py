"""Keys and values of rows that come and go: each row stores its next token at its own length.

In `kv_cache.KVCache` a batch advances together. Here a row may join while others are in the middle of an answer, and leave before them. The rows in
use lie in slots 0 to B - 1, so that a step reads them without a copy; the last row replaces a row that leaves.

Left out: paging (every slot has room for a whole block), prefixes shared between rows.

Shapes: B rows in use, S cached tokens, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codechat.models.config import GPTConfig
from codechat.models.kv_cache import KVCache, attend_cached, attend_grouped, new_cache
from codechat.models.sampling_memory import COLUMNS, bucket


class SlotCache:
    """The cache interface of `GPT.hidden`, for one new token per row in use."""

    empty = False  # rows join with their prompts

    def __init__(
        self,
        cfg: GPTConfig,
        slots: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        static: bool = False,
    ) -> None:
        """static: with room for what `slot_graph` reads: whole buckets of slots, and more columns than a block."""
        made = new_cache(
            cfg, bucket(slots) if static else slots, cfg.block_size + (COLUMNS if static else 0), device, dtype
        )
        # (depth, slots, K, S, E) each; a latent is key and value in one (`kv_cache.LatentCache`)
        self.kept = [made.k] if cfg.attention == "mla" else [made.k, made.v]
        self.lengths: list[
            int
        ] = []  # tokens of each row in use; on the host, where the caller decides which rows leave
        self.columns = torch.zeros(0, dtype=torch.long, device=device)  # (B,) the same, while a step runs

    def join(self, prefilled: KVCache, row: int, length: int) -> None:
        """Take over the first `length` tokens of a prefilled row into the next free slot."""
        slot = len(self.lengths)
        for mine, theirs in zip(self.kept, (prefilled.k, prefilled.v)):
            mine[:, slot, :, :length] = theirs[:, row, :, :length]
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
        assert new == 1
        self.columns = torch.tensor(self.lengths, device=self.kept[0].device)
        return self.columns[:, None]

    def mask(self, new: int) -> Tensor | None:
        """bool (B, 1, 1, S): what the next token of each row may attend to; none = everything."""
        if min(self.lengths) == max(self.lengths):
            return None
        return (torch.arange(max(self.lengths) + 1, device=self.kept[0].device) <= self.columns[:, None])[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, 1, E) of one token per row; return the attention (B, H, 1, E) of q over its row. Of a latent only k is stored,
        v being its first columns."""
        end = max(self.lengths) + 1
        keys, values = store([kept[layer, : len(q), :, :end] for kept in self.kept], self.columns, k, v)
        attend = attend_cached if len(self.kept) == 2 else attend_grouped  # torch's kernels want values as wide as keys
        return attend(q, keys.to(q.dtype), values.to(q.dtype), mask)

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        """Count the stored token of every row."""
        self.lengths = [n + new for n in self.lengths]


def store(kept: Sequence[Tensor], columns: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Write k and v (B, K, 1, E) of one token per row into its column (B,) of each of `kept` (B, K, S, E); returns keys and values. A latent, kept
    alone, is both: its first columns are the value."""
    rows = torch.arange(len(k), device=k.device)
    for mine, new in zip(kept, (k, v)):
        mine[rows, :, columns] = new[:, :, 0].to(mine.dtype)
    return kept[0], kept[1] if len(kept) == 2 else kept[0][..., : v.shape[-1]]
