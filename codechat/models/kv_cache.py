"""Keys and values that sampling keeps: one cache per batch, or one prefix shared by a group. For multi-head latent attention the cache keeps one
vector per token, from which the keys and values of all heads are computed. `new_cache` makes the kind that a model needs.

Left out: paging, quantisation, eviction.

Shapes: B sequences, T new tokens, S cached tokens, H heads, K key-value heads, E head width, W width of a latent and its
rotary key.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.core.errors import ConfigError
from codechat.models import packed_attention
from codechat.models.config import GPTConfig


def new_cache(
    cfg: GPTConfig, batch: int, length: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> KVCache:
    """An empty cache for `batch` rows of at most `length` tokens."""
    return (LatentCache if cfg.attention == "mla" else KVCache)(cfg, batch, length, device, dtype)


class KVCache:
    """Keys and values of the tokens that a batch has seen, one row per sequence.

    All rows store their next token in the same column. A row whose prompt was padded keeps a hole, which `mask` hides; its positions continue
    from its own length. An opaque class, not a list: FSDP's mixed-precision policy rebuilds lists in inputs and would drop what is appended."""

    stored = ("k", "v")  # tensors with a row per sequence in dimension 1

    def __init__(
        self,
        cfg: GPTConfig,
        batch: int,
        length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (cfg.depth, batch, cfg.kv_heads, length, cfg.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)  # (depth, B, K, S, E)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self._start(batch, length, device)

    def _start(self, batch: int, length: int, device: torch.device | str) -> None:
        self.lengths = torch.zeros(batch, device=device, dtype=torch.long)  # (B,) real tokens
        self.real = torch.ones(batch, length, device=device, dtype=torch.bool)  # (B, S) false = padding
        self.padded = False
        self.extent = 0  # columns in use; on the host, so no step waits for the device

    def positions(self, new: int) -> Tensor:
        """(B, new) positions that the next `new` tokens of each row take."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> Tensor | None:
        """bool (B|1, 1, new, S): what the next `new` tokens of each row may attend to; none = everything, or behind nothing causally."""
        if self.empty and not packed_attention.dense(self.real.device):
            return None  # padding is on the right, where no real token looks
        return _visible(new, self.extent, self.real if self.padded else None, self.real.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, T, E) of T new tokens; return the attention (B, H, T, E) of q over all tokens of its row."""
        keys, values, end = self.k[layer], self.v[layer], self.extent + k.shape[2]
        _require_room(end, keys.shape[2])
        keys[:, :, self.extent : end], values[:, :, self.extent : end] = k, v
        k, v = keys[:, :, :end].to(q.dtype), values[:, :, :end].to(q.dtype)
        causal = mask is None and self.empty and q.shape[2] > 1
        return attend_cached(q, k, v, mask, causal=causal)

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

    @property
    def room(self) -> int:
        """Columns for more tokens."""
        return self.k.shape[3] - self.extent

    def select(self, rows: Tensor) -> KVCache:
        """A new cache of `rows` (repeats allowed)."""
        out = copy(self)
        for name in self.stored:
            setattr(out, name, getattr(self, name)[:, rows])
        out.lengths, out.real = self.lengths[rows], self.real[rows]
        return out

    def part(self, start: int, stop: int) -> KVCache:
        """A view of some rows of an empty cache, to be filled on its own; then `advance` this one by all of them."""
        out = copy(self)
        for name in self.stored:
            setattr(out, name, getattr(self, name)[:, start:stop])
        out.lengths, out.real = self.lengths[start:stop], self.real[start:stop]
        return out

    def join(self, other: KVCache) -> KVCache:
        """A new cache of these rows, then those of `other`, without room for more tokens; the shorter ones are padded."""
        out, end = copy(self), max(self.extent, other.extent)
        for name in self.stored:
            parts = [getattr(c, name)[:, :, :, : c.extent] for c in (self, other)]
            setattr(out, name, torch.cat([F.pad(x, (0, 0, 0, end - x.shape[3])) for x in parts], dim=1))
        out.real = torch.cat([F.pad(c.real[:, : c.extent], (0, end - c.extent)) for c in (self, other)])
        out.lengths = torch.cat((self.lengths, other.lengths))
        out.extent, out.padded = end, self.padded or other.padded or self.extent != other.extent
        return out

    def share(self, owner: Tensor, room: int) -> SharedCache:
        """A cache of len(owner) rows; row i continues row owner[i] of this one, with `room` own tokens.

        Nothing is copied."""
        depth, _, K, _, E = self.k.shape
        return SharedCache(self, owner, self.k.new_zeros(depth, 2, len(owner), K, room, E))


class SharedCache:
    """Rows that continue shared prefixes. As in KVCache, all store their next token in the same column, and a row whose own tokens were padded
    keeps a hole.

    With one new token per row, attention waits for memory: a prefix is read once for all rows of its group instead of once for each."""

    def __init__(
        self,
        prefix: KVCache,
        owner: Tensor,
        own: Tensor,
        extent: int = 0,
        lengths: Tensor | None = None,
        real: Tensor | None = None,
    ) -> None:
        used, owner = owner.unique(return_inverse=True)
        self.prefix = prefix if len(used) == len(prefix.lengths) else prefix.select(used)
        self.owner, self.extent = owner, extent
        self.own = own  # keys and values (depth, 2, B, K, room, E)
        self.lengths = owner.new_zeros(len(owner)) if lengths is None else lengths  # (B,) real own tokens
        self.real = real  # (B, room) false = padding; none = no padding
        members = F.one_hot(owner, len(used)).cumsum(0)  # (B, P)
        self.place = members.gather(1, owner[:, None])[:, 0] - 1  # (B,) which member of its group a row is
        self.width = int(members[-1].max())
        # (P, 1, 1, S), none = no padding
        self.prefix_mask = self.prefix.real[:, None, None, : self.prefix.extent] if self.prefix.padded else None

    empty = False  # there is a prefix

    def positions(self, new: int) -> Tensor:
        """(B, new) positions that the next `new` tokens of each row take."""
        return (self.prefix.lengths[self.owner] + self.lengths)[:, None] + torch.arange(new, device=self.owner.device)

    def mask(self, new: int) -> Tensor | None:
        """bool (B|1, 1, new, S): what the next `new` tokens of each row may attend to of the row's own; none = everything."""
        return _visible(new, self.extent, self.real, self.owner.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, T, E) of T new tokens; return q's attention (B, H, T, E) over prefix and own.

        Each part has its own softmax; their log-sum-exps a and b weight them: exp(a) / (exp(a) + exp(b)) = sigmoid(a - b)."""
        own_k, own_v = self._store(layer, k, v)
        # (B, K, H/K x T, E): the queries of one key head side by side
        rows = (q * q.shape[3] ** -0.5).to(own_k.dtype).reshape(len(q), k.shape[1], -1, q.shape[3])
        visible = None if mask is None else mask.repeat(1, 1, q.shape[1] // k.shape[1], 1)
        own, own_lse = partial_attention(rows, own_k, own_v, visible)
        past, past_lse = self._attend_prefix(layer, rows)
        share = (own_lse - past_lse).sigmoid().to(own.dtype)
        return torch.lerp(past, own, share).to(q.dtype).reshape(*q.shape[:3], -1)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new tokens; return the rows' own keys and values (B, K, S, E)."""
        end = self.extent + k.shape[2]
        _require_room(end, self.own.shape[4])
        own_k, own_v = self.own[layer, :, :, :, :end]
        own_k[:, :, self.extent :], own_v[:, :, self.extent :] = k, v
        return own_k, own_v

    def _attend_prefix(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`partial_attention` of rows (B, K, Q, E) over their prefixes: a group's queries as one matrix."""
        _, K, Q, E = rows.shape
        grid = rows.new_zeros(len(self.prefix.lengths), self.width, K, Q, E)
        grid[self.owner, self.place] = rows
        k, v = (x[layer, :, :, : self.prefix.extent] for x in (self.prefix.k, self.prefix.v))
        y, lse = partial_attention(grid.transpose(1, 2).flatten(2, 3), k, v, self.prefix_mask)
        y, lse = (x.unflatten(2, (self.width, Q)).transpose(1, 2)[self.owner, self.place] for x in (y, lse))
        return y, lse

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        """Count `new` stored tokens, of which only the first n_new (B,) of each row are real."""
        if n_new is not None and bool((n_new < new).any()):
            if self.real is None:
                self.real = torch.ones(len(self.owner), self.own.shape[4], device=self.owner.device, dtype=torch.bool)
            self.real[:, self.extent : self.extent + new] = torch.arange(new, device=n_new.device) < n_new[:, None]
        self.lengths = self.lengths + (new if n_new is None else n_new)
        self.extent += new

    def select(self, rows: Tensor) -> SharedCache:
        """The cache of `rows`, and of the prefixes that they still need."""
        real = None if self.real is None else self.real[rows]
        return type(self)(self.prefix, self.owner[rows], self.own[:, :, rows], self.extent, self.lengths[rows], real)


class LatentCache(KVCache):
    """One vector per token and block: the latent c, then the rotary key (arXiv:2405.04434, eq. 9 and 15). It is the key of a single key head, and
    its first columns are the value: queries are mapped to the latent's columns, and the result is a mixture of latents."""

    stored = ("k",)

    def __init__(
        self,
        cfg: GPTConfig,
        batch: int,
        length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (cfg.depth, batch, 1, length, cfg.cache_width)
        self.k = torch.zeros(shape, device=device, dtype=dtype)  # (depth, B, 1, S, W)
        self.latent_width = cfg.latent_width
        self._start(batch, length, device)

    @property
    def v(self) -> Tensor:  # type: ignore[override]
        return self.k[..., : self.latent_width]

    def store(self, layer: int, k: Tensor) -> Tensor:
        """Store k (B, 1, T, W) of T new tokens; return those of all tokens so far."""
        keys, end = self.k[layer], self.extent + k.shape[2]
        _require_room(end, keys.shape[2])
        keys[:, :, self.extent : end] = k
        return keys[:, :, :end]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As KVCache's, of q (B, H, T, W) and k (B, 1, T, W): (B, H, T, latent width). v is k's first columns."""
        keys = self.store(layer, k).to(q.dtype)
        return attend_grouped(q, keys, keys[..., : v.shape[-1]], mask)

    def share(self, owner: Tensor, room: int) -> SharedCache:
        depth, _, _, _, W = self.k.shape
        return SharedLatentCache(self, owner, self.k.new_zeros(depth, 1, len(owner), 1, room, W))


class SharedLatentCache(SharedCache):
    """Rows that continue shared prefixes of latents; own (depth, 1, B, 1, room, W)."""

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.extent + k.shape[2]
        _require_room(end, self.own.shape[4])
        own = self.own[layer, 0, :, :, :end]
        own[:, :, self.extent :] = k
        return own, own[..., : v.shape[-1]]


def _visible(new: int, extent: int, real: Tensor | None, device: torch.device) -> Tensor | None:
    """bool (B|1, 1, new, S): of the columns so far and their own, which the next `new` tokens see; real (B, room): none = no padding."""
    end = extent + new
    holes = None if real is None else real[:, None, None, :end]
    if new == 1:
        return holes
    causal = torch.ones(new, end, dtype=torch.bool, device=device).tril(extent)[None, None]
    return causal if holes is None else causal & holes


def _require_room(end: int, room: int) -> None:
    if end > room:  # a slice would drop the token silently
        raise ConfigError(f"token {end} in a cache for {room}; make the cache longer")


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """Attention (B, H, T, E) of q over k and v (B, K, S, E), under a mask (B|1, 1, T, S), causal or over everything.

    Off the CPU no mask reaches torch's attention, whose flash kernels take none: the scores (B, H, T, S) are computed whole. With the one token of a
    decode step they are small."""
    if mask is None or packed_attention.dense(q.device):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
        )
    return attend_grouped(q, k, v, mask)


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention (B, H, T, W) of q (B, H, T, E) over k (B, K, S, E) and v (B, K, S, W) by products, the queries of one key head side by side; mask
    (B|1, 1, T, S). Latents are one key head, whose values are narrower than its keys."""
    rows = (q * q.shape[3] ** -0.5).reshape(len(q), k.shape[1], -1, q.shape[3])  # (B, K, H/K x T, E)
    if mask is not None and q.shape[2] > 1:
        mask = mask.repeat(1, 1, q.shape[1] // k.shape[1], 1)
    y, _ = partial_attention(rows, k, v, mask)
    return y.reshape(*q.shape[:3], -1)


def partial_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries (.., Q, E) over some keys (.., S, E), and its log-sum-exp (.., Q, 1)."""
    scores = (q @ k.mT).float()
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1)
    # the largest weight is exp(largest score - lse); logsumexp would pass -inf to a slow branch of exp
    lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights.to(v.dtype) @ v, lse
