"""Keys and values that sampling keeps: one cache per batch, or rows that continue the cache of shared prefixes.

Shapes: B sequences, T new tokens, S cached tokens, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models import packed_attention
from codechat.models.config import GPTConfig


class KVCache:
    """Keys and values of the tokens that a batch has seen, one row per sequence.

    All rows store their next token in the same column. A row whose prompt was padded keeps a hole, which `mask` hides;
    its positions continue from its own length. A class, not a list: FSDP's mixed precision would copy a list."""

    def __init__(
        self, cfg: GPTConfig, batch: int, length: int, device: Any = "cpu", dtype: Any = torch.float32
    ) -> None:
        self.cfg = cfg
        # (depth, 2, B, K, S, E) keys, then values
        self.kv = torch.zeros(cfg.depth, 2, batch, cfg.kv_heads, length, cfg.head_dim, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, device=device, dtype=torch.long)  # (B,) real tokens
        self.real = torch.ones(batch, length, device=device, dtype=torch.bool)  # (B, S) false = padding
        self.padded = False
        self.extent = 0  # columns in use; on the host, so no step waits for the device

    def positions(self, new: int) -> Tensor:
        """(B, new) positions that the next `new` tokens of each row take."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> Tensor | None:
        """bool (B|1, 1, new, S): what the next `new` tokens may see; none = all, or in an empty cache causally."""
        if self.empty and not packed_attention.dense(self.real.device):
            return None  # padding is on the right, where no real token looks
        end = self.extent + new
        holes = self.real[:, None, None, :end] if self.padded else None
        if new == 1:
            return holes
        causal = torch.ones(new, end, dtype=torch.bool, device=self.real.device).tril(self.extent)[None, None]
        return causal if holes is None else causal & holes

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, K, T, E) of T new tokens; return those of all tokens so far."""
        end = self.extent + k.shape[2]
        assert end <= self.kv.shape[4], "the cache is too short, and a slice would drop the token silently"
        for kept, new in zip(self.kv[layer], (k, v)):
            kept[:, :, self.extent : end] = new
        return tuple(self.kv[layer, :, :, :, :end])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, T, E) of T new tokens; return the attention (B, H, T, E) of q over all tokens of its
        row."""
        k, v = (x.to(q.dtype) for x in self.store(layer, k, v))
        return attend_cached(q, k, v, mask, causal=mask is None and self.empty and q.shape[2] > 1)

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        """Count `new` stored tokens, of which only the first n_new (B,) of each row are real."""
        if n_new is not None:
            self.real[:, self.extent : self.extent + new] = torch.arange(new, device=n_new.device) < n_new[:, None]
            self.padded = self.padded or bool((n_new < new).any())
        self.lengths = self.lengths + (new if n_new is None else n_new)
        self.extent += new

    @property
    def empty(self) -> bool:
        return self.extent == 0

    def select(self, rows: Tensor | slice) -> Self:
        """A new cache of `rows` (repeats allowed); of a slice a view, to be filled before this one is advanced."""
        out = copy(self)
        out.kv, out.lengths, out.real = self.kv[:, :, rows], self.lengths[rows], self.real[rows]
        return out


class SharedCache(KVCache):
    """Rows that continue shared prefixes: row i continues row owner[i] of `prefix`, which is not copied, by `room` tokens.

    With one new token per row, attention waits for memory: a prefix is read once for all rows of its group."""

    empty = False  # there is a prefix

    def __init__(self, prefix: KVCache, owner: Tensor, room: int) -> None:
        super().__init__(prefix.cfg, len(owner), room, prefix.kv.device, prefix.kv.dtype)
        self.prefix, self.owner, self.lengths = prefix, owner, prefix.lengths[owner]  # positions go on from there
        self._group()

    def _group(self) -> None:
        prefix = self.prefix
        self.members, self.place = group_members(self.owner, len(prefix.lengths))
        self.prefix_mask = prefix.real[:, None, None, : prefix.extent] if prefix.padded else None  # (P, 1, 1, S)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = self.store(layer, k, v)
        prefix = self.prefix.kv[layer, :, :, :, : self.prefix.extent]
        return attend_shared(q, k, v, mask, (*prefix, self.prefix_mask), self.members, self.place)

    def select(self, rows: Tensor | slice) -> SharedCache:
        """The cache of `rows`, and of the prefixes that they still need."""
        out = super().select(rows)
        used, out.owner = self.owner[rows].unique(return_inverse=True)
        if len(used) < len(self.prefix.lengths):
            out.prefix = self.prefix.select(used)
        out._group()
        return out


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """Attention (B, H, T, E) of q over k and v (B, K, S, E), under a mask (B|1, 1, T, S), causal or over everything.
    torch's kernels want no mask off the CPU."""
    if mask is None or packed_attention.dense(q.device):
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    y, _ = _partial(*_by_key_head(q, k, mask), k, v)
    return y.reshape(*q.shape[:3], -1)


def attend_shared(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix: tuple[Tensor, ...], members: Tensor, place: Tensor
) -> Tensor:
    """Attention (B, H, T, E) of q over its row's k and v (B, K, S, E) and its prefix's keys and values (P, K, S', E)
    under a mask (P, 1, 1, S'); members, place: of `group_members`.

    Each part has its own softmax; their log-sum-exps a and b weight them by sigmoid(a - b)."""
    rows, mask = _by_key_head(q, k, mask)
    rows, (prefix_k, prefix_v, prefix_mask) = rows.to(k.dtype), prefix
    behind, behind_lse = _partial(rows, mask, k, v)
    grid = rows[members].transpose(1, 2)  # (P, K, W, H/K x T, E): a group's queries as one matrix
    past, past_lse = _partial(grid.flatten(2, 3), prefix_mask, prefix_k, prefix_v)
    past, past_lse = (x.unflatten(2, grid.shape[2:4]).transpose(1, 2).flatten(0, 1)[place] for x in (past, past_lse))
    share = (behind_lse - past_lse).sigmoid().to(behind.dtype)
    return torch.lerp(past, behind, share).to(q.dtype).reshape(*q.shape[:3], -1)


def group_members(owner: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Rows of each group (P, W), 0 where it has fewer, and each row's place (B,) in it, flattened. owner: (B,)."""
    counts = F.one_hot(owner, groups).cumsum(0)
    nth = counts.gather(1, owner[:, None])[:, 0] - 1
    width = max(1, int(counts[-1].max())) if len(owner) else 1
    rows = torch.arange(len(owner), device=owner.device)
    return owner.new_zeros(groups, width).index_put((owner, nth), rows), owner * width + nth


def _by_key_head(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scaled queries (B, K, H/K x T, E), those of one key head side by side, and their mask."""
    rows = (q * q.shape[3] ** -0.5).reshape(len(q), k.shape[1], -1, q.shape[3])
    repeats = q.shape[1] // k.shape[1]
    return rows, mask.repeat(1, 1, repeats, 1) if mask is not None and q.shape[2] > 1 else mask


def _partial(q: Tensor, mask: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries (.., Q, E) over some keys (.., S, E), and its log-sum-exp (.., Q, 1)."""
    scores = (q @ k.mT).float()
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1)
    # the largest weight is exp(largest score - lse); logsumexp would pass -inf to a slow branch of exp
    lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights.to(v.dtype) @ v, lse
