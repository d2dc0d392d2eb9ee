"""Keys and values of rows that come and go: each row stores its next token at its own length.

Rows in use fill slots 0 to B - 1, so that a step reads them without a copy; the last row replaces one that leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codechat.models.config import GPTConfig
from codechat.models.kv_cache import KVCache


class SlotCache(KVCache):
    """The cache of `GPT.hidden` for one new token per row in use. Shapes as in `kv_cache`."""

    empty = False  # rows join with their prompts

    def __init__(self, cfg: GPTConfig, slots: int, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(cfg, slots, cfg.block_size, device, dtype)
        self.tokens: list[int] = []  # of each row in use
        self.columns = torch.zeros(0, dtype=torch.long, device=device)  # (B,) the same, while a step runs

    def join(self, prefilled: KVCache, row: int, length: int) -> None:
        """Take over the first `length` tokens of a prefilled row into the next free slot."""
        self.kv[:, :, len(self.tokens), :, :length] = prefilled.kv[:, :, row, :, :length]
        self.tokens.append(length)

    def leave(self, slot: int) -> None:
        """Free a slot; the last row in use moves there."""
        length = self.tokens.pop()
        last = len(self.tokens)
        if slot != last:
            self.kv[:, :, slot, :, :length] = self.kv[:, :, last, :, :length]
            self.tokens[slot] = length

    def positions(self, new: int) -> Tensor:
        """(B, 1) position that the next token of each row takes."""
        self.columns = torch.tensor(self.tokens, device=self.kv.device)
        return self.columns[:, None]

    def mask(self, new: int) -> Tensor | None:
        """bool (B, 1, 1, S): what the next token of each row may attend to; none = everything."""
        if min(self.tokens) == max(self.tokens):
            return None
        return (torch.arange(max(self.tokens) + 1, device=self.kv.device) <= self.columns[:, None])[:, None, None]

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, K, 1, E) of one token per row; return those of all tokens so far."""
        kv, rows = self.kv[layer, :, : len(k)], torch.arange(len(k), device=k.device)
        for kept, new in zip(kv, (k, v)):
            kept[rows, :, self.columns] = new[:, :, 0].to(kept.dtype)
        kv = kv[..., : max(self.tokens) + 1, :]
        return kv[0], kv[-1, ..., : v.shape[-1]]

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        """Count the stored token of every row."""
        self.tokens = [n + new for n in self.tokens]
