"""Attention: over packed rows, document by document on a CPU and under a block mask of flex attention on a GPU; and
over what sampling keeps of the tokens so far, one cache per batch, or rows that continue the cache of shared
prefixes.

A dense mask keeps flash kernels from being taken, and every block reads (B, T, T) of it.

Shapes: B rows, T new tokens, S tokens so far, H heads, K key-value heads, E head width.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.models.config import GPTConfig

DENSE = ("cpu",)  # kinds of devices that take dense masks; elsewhere none reaches SDPA
BLOCK = 128  # tokens: flex attention skips blocks of this size whole
QUERIES = 128  # of a piece: fewer make narrow products, more compute scores that no query needs
# pieces of one product; queries and keys are padded to steps: in bfloat16 oneDNN takes a millisecond for a new shape
ABREAST, STEP = 8, 16


def dense(device: torch.device) -> bool:
    """Whether masks are tensors on such a device."""
    return device.type in DENSE


# ---- what packed tokens see


class Piece(NamedTuple):
    """Neighbouring queries (Q,) of a row and every key (S,) that one of them sees, as tokens of (B T,); sees: (Q,
    S)."""

    queries: Tensor
    keys: Tensor
    sees: Tensor


class Alike(NamedTuple):
    """Pieces of like size: tokens of their queries (P, Q) and keys (P, S), padded with N; hides: (P, 1, 1, Q, S)."""

    queries: Tensor
    keys: Tensor
    hides: Tensor


class Plan(NamedTuple):
    """All pieces. place (N,): of each token among the queries of all; uses: the places of token 0 among all keys,
    of token 1, ..., those of each beginning at starts (N,)."""

    alike: list[Alike]
    place: Tensor
    uses: Tensor
    starts: Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """A token attends to earlier tokens of its document and, with branches, of these to branch 0 and its branch. docs,
    branches: (B, T); a document below 0 is padding."""

    docs: Tensor
    branches: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The same as bool (B, 1, T, T), true = attend. Padding attends to itself: a softmax without keys is NaN."""
        return self._sees(0, self.docs.shape[1])[:, None]

    def _sees(self, at: int, end: int) -> Tensor:
        """Whether tokens [at, end) see those before `end`: (B, end - at, end)."""
        q = self.docs[:, at:end, None]
        k = self.docs[:, None, :end]
        same = (q == k) & (q >= 0)
        if self.branches is not None:
            own = self.branches[:, at:end, None]
            other = self.branches[:, None, :end]
            same &= (other == 0) | (other == own)
        back = torch.arange(at, end, device=q.device)[:, None] - torch.arange(end, device=q.device)
        return (same & (back >= 0)) | (back == 0)

    @cached_property
    def plan(self) -> Plan:
        """QUERIES of a row at a time, by number of keys, ABREAST at a time."""
        T = self.docs.shape[1]
        n_tokens = self.docs.numel()
        pieces = []
        for at in range(0, T, QUERIES):
            for row, sees in enumerate(self._sees(at, min(at + QUERIES, T))):
                keys = sees.any(0).nonzero()[:, 0]
                queries = torch.arange(at, at + len(sees))
                pieces.append(Piece(row * T + queries, row * T + keys, sees[:, keys]))
        pieces.sort(key=lambda piece: len(piece.keys))
        alike = [_alike(pieces[i : i + ABREAST], n_tokens) for i in range(0, len(pieces), ABREAST)]
        queries, keys = (torch.cat(x) for x in zip(*((some.queries.flatten(), some.keys.flatten()) for some in alike)))
        uses = torch.bincount(keys, minlength=n_tokens + 1)[:-1]
        place = queries.argsort(stable=True)[:n_tokens]
        return Plan(alike, place, keys.argsort(stable=True)[: uses.sum()], uses.cumsum(0) - uses)


def _alike(pieces: list[Piece], n_tokens: int) -> Alike:
    """One of pieces. A padded query sees what is there, since a softmax without keys is NaN; a padded key is hidden."""
    longest = max(len(piece.queries) for piece in pieces), max(len(piece.keys) for piece in pieces)
    queries, keys = (torch.full((len(pieces), -(-n // STEP) * STEP), n_tokens) for n in longest)
    hides = torch.zeros(len(pieces), 1, 1, queries.shape[1], keys.shape[1], dtype=torch.bool)
    for i, piece in enumerate(pieces):
        q, k = piece.sees.shape
        queries[i, :q] = piece.queries
        keys[i, :k] = piece.keys
        hides[i, ..., :q, k:] = True
        hides[i, ..., :q, :k] = ~piece.sees
    return Alike(queries, keys, hides)


def flex_mask(docs: Tensor, branches: Tensor | None = None) -> Any:
    """The same as a `BlockMask`; padding sees itself, since a softmax without keys is NaN."""
    from torch.nn.attention.flex_attention import create_block_mask

    branches = torch.zeros_like(docs) if branches is None else branches

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (docs[b, q] == docs[b, k]) & (docs[b, q] >= 0) & (k <= q)
        return (same & ((branches[b, k] == 0) | (branches[b, q] == branches[b, k]))) | (q == k)

    B, T = docs.shape
    return create_block_mask(sees, B, None, T, T, device=docs.device, BLOCK_SIZE=BLOCK)


@cache
def _flex() -> Callable[..., Tensor]:
    """Flex attention, compiled: as it is it would hold all scores."""
    return torch.compile(torch.nn.attention.flex_attention.flex_attention)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, causal: bool, products: bool = False) -> Tensor:
    """Attention (B, H, T, E) of q over k and v (B, K, T, E): under a mask, bool (B, 1, T, T), `Documents` or of
    `flex_mask`, else causal or of everything. products: on a CPU in bfloat16, causal attention as matrix products."""
    group = q.shape[1] // k.shape[1]
    products = products and mask is None and causal and q.device.type == "cpu" and q.dtype == torch.bfloat16
    if products or isinstance(mask, Documents):
        q = q * q.shape[-1] ** -0.5
        if products:
            return _causal_products(q, *(x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v)))
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, H, E) each
        return _Pieces.apply(*flat, mask.plan).unflatten(0, (len(q), -1)).transpose(1, 2)
    if mask is None or isinstance(mask, Tensor):
        return _sdpa(q, k, v, mask, mask is None and causal)
    # in a compiled block it is a part of it
    flex = torch.nn.attention.flex_attention.flex_attention if torch.compiler.is_compiling() else _flex()
    return flex(q, k, v, block_mask=mask, enable_gqa=group > 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """torch's own attention."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=grouped,
    )


def _causal_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, softmax in float32 and weighted sum of QUERIES queries at a time over all earlier keys. The fused
    kernel's tiles are slow in bfloat16; `_Pieces`, row by row, takes an eighth more of a step."""
    parts = []
    for at in range(0, q.shape[2], QUERIES):
        end = min(at + QUERIES, q.shape[2])
        scores = q[:, :, at:end] @ k[:, :, :end].mT
        later = torch.arange(end) > torch.arange(at, end)[:, None]
        parts.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, :, :end])
    return torch.cat(parts, dim=2)


class _Pieces(torch.autograd.Function):
    """Attention of all pieces over what each sees, those of like size as one product; q scaled (N, H, E), k, v (N,
    K, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        out, weights, (qs, ks, vs) = [], [], (_with_padding(x) for x in (q, k, v))
        for some in plan.alike:
            scores = _rows(qs, some.queries, k.shape[1]) @ _rows(ks, some.keys).mT  # (P, K, G x Q, S)
            scores.unflatten(2, (-1, some.queries.shape[1])).masked_fill_(some.hides, -torch.inf)
            weights.append(scores.softmax(-1))
            out.append(_tokens(weights[-1] @ _rows(vs, some.keys), some.queries))
        ctx.save_for_backward(q, k, v, *weights)
        ctx.plan = plan
        return torch.cat(out)[plan.place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """With weights w = softmax(s): dv = w' up, ds = w (up v' - sum(w up v')), dq = ds k, dk = ds' q."""
        (q, k, v, *weights), plan = ctx.saved_tensors, ctx.plan
        dq, dk, dv, (qs, ks, vs, ups) = [], [], [], (_with_padding(x) for x in (q, k, v, up))
        for some, w in zip(plan.alike, weights, strict=True):
            query, above = (_rows(x, some.queries, k.shape[1]) for x in (qs, ups))
            slope = torch._softmax_backward_data(above @ _rows(vs, some.keys).mT, w, -1, w.dtype)
            dq.append(_tokens(slope @ _rows(ks, some.keys), some.queries))
            dk.append(_tokens(slope.mT @ query, some.keys))
            dv.append(_tokens(w.mT @ above, some.keys))
        dk, dv = (F.embedding_bag(plan.uses, torch.cat(x).flatten(1), plan.starts, mode="sum") for x in (dk, dv))
        return torch.cat(dq)[plan.place], dk.view_as(k), dv.view_as(v), None


def _with_padding(x: Tensor) -> Tensor:
    """(N + 1, H, E): x (N, H, E) and a token of zeros."""
    return F.pad(x, (0, 0, 0, 0, 0, 1))


def _rows(x: Tensor, tokens: Tensor, groups: int = 0) -> Tensor:
    """Tokens (P, L) of x (N + 1, H, E) as (P, H, L, E); of `groups` of heads, which share a key, as (P, groups,
    H/groups x L, E)."""
    rows = x[tokens].transpose(1, 2)
    return rows.unflatten(1, (groups, -1)).flatten(2, 3) if groups else rows


def _tokens(rows: Tensor, tokens: Tensor) -> Tensor:
    """The reverse: (P L, H, E)."""
    return rows.unflatten(2, (-1, tokens.shape[1])).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)


# ---- what sampling keeps


class KVCache:
    """Keys and values of the tokens that a batch has seen, one row per sequence.

    All rows store their next token in the same column. A row whose prompt was padded keeps a hole, which `mask` hides;
    its positions continue from its own length. A class, not a list: FSDP's mixed precision would copy a list."""

    def __init__(
        self,
        cfg: GPTConfig,
        batch: int,
        length: int,
        device: Any = "cpu",
        dtype: Any = torch.float32,
    ) -> None:
        self.cfg = cfg
        parts, heads, width = cfg.cached
        # (depth, 2, B, K, S, E) keys, then values; with mla (depth, 1, B, 1, S, L + R) latents, of which values are
        # a part
        self.kv = torch.zeros(cfg.depth, parts, batch, heads, length, width, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, device=device, dtype=torch.long)  # (B,) real tokens
        self.real = torch.ones(batch, length, device=device, dtype=torch.bool)  # (B, S) false = padding
        self.padded = False
        self.extent = 0  # columns in use; on the host, so no step waits for the device

    def positions(self, new: int) -> Tensor:
        """(B, new) positions that the next `new` tokens of each row take."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> Tensor | None:
        """bool (B|1, 1, new, S): what the next `new` tokens may see; none = all, or in an empty cache causally."""
        if self.empty and not dense(self.real.device):
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
        return keys_and_values(self.kv[layer, :, :, :, :end], self.cfg)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store k and v (B, K, T, E) of T new tokens; return the attention (B, H, T, E) of q over all tokens of its
        row. torch's kernels want no mask off the CPU."""
        k, v = self.store(layer, k, v)
        if mask is None or dense(q.device):
            return _sdpa(q.to(k.dtype), k, v, mask, mask is None and self.empty and q.shape[2] > 1).to(q.dtype)
        y, _ = _partial(*_by_key_head(q, k, mask), k, v)
        return y.reshape(*q.shape[:3], -1)

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
        out.kv = self.kv[:, :, rows]
        out.lengths = self.lengths[rows]
        out.real = self.real[rows]
        return out


def keys_and_values(kept: Tensor, cfg: GPTConfig) -> tuple[Tensor, Tensor]:
    """Those of a block, from what a cache keeps of it: (2|1, B, K, S, E)."""
    return kept[0], kept[-1][..., : cfg.value_width]


class SharedCache(KVCache):
    """Rows that continue shared prefixes: row i continues row owner[i] of `prefix`, which is not copied, by `room`
    tokens.

    With one new token per row, attention waits for memory: a prefix is read once for all rows of its group."""

    empty = False  # there is a prefix

    def __init__(self, prefix: KVCache, owner: Tensor, room: int) -> None:
        super().__init__(prefix.cfg, len(owner), room, prefix.kv.device, prefix.kv.dtype)
        self.lengths = prefix.lengths[owner]  # positions go on from there
        self._share(prefix, owner)

    def _share(self, prefix: KVCache, owner: Tensor) -> None:
        self.prefix, self.owner = prefix, owner
        self.members, self.place = group_members(owner, len(prefix.lengths))
        self.prefix_mask = prefix.real[:, None, None, : prefix.extent] if prefix.padded else None  # (P, 1, 1, S)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        kept = keys_and_values(self.prefix.kv[layer, :, :, :, : self.prefix.extent], self.cfg)
        return attend_shared(
            q,
            *self.store(layer, k, v),
            mask,
            (*kept, self.prefix_mask),
            self.members,
            self.place,
        )

    def select(self, rows: Tensor | slice) -> Self:
        """The cache of `rows`, and of the prefixes that they still need."""
        out = super().select(rows)
        used, owner = self.owner[rows].unique(return_inverse=True)
        out._share(self.prefix.select(used) if len(used) < len(self.prefix.lengths) else self.prefix, owner)
        return out


def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    prefix: tuple[Tensor, ...],
    members: Tensor,
    place: Tensor,
) -> Tensor:
    """Attention (B, H, T, E) of q over its row's k and v (B, K, S, E) and its prefix's keys and values (P, K, S', E)
    under a mask (P, 1, 1, S'); members, place: of `group_members`.

    Each part has its own softmax; their log-sum-exps a and b weight them by sigmoid(a - b)."""
    rows, mask = _by_key_head(q, k, mask)
    rows, (prefix_k, prefix_v, prefix_mask) = rows.to(k.dtype), prefix
    behind, behind_lse = _partial(rows, mask, k, v)
    grid = rows[members].transpose(1, 2)  # (P, K, W, H/K x T, E): a group's queries as one matrix
    past, past_lse = _partial(grid.flatten(2, 3), prefix_mask, prefix_k, prefix_v)
    past, past_lse = (x.unflatten(2, grid.shape[2:4]).transpose(1, 2)[tuple(place)] for x in (past, past_lse))
    share = (behind_lse - past_lse).sigmoid().to(behind.dtype)
    return torch.lerp(past, behind, share).to(q.dtype).reshape(*q.shape[:3], -1)


def group_members(owner: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Rows of each group (P, W), 0 where it has fewer, and the place (2, B) of each row among them. owner: (B,)."""
    counts = F.one_hot(owner, groups).cumsum(0)
    nth = counts.gather(1, owner[:, None])[:, 0] - 1
    width = max(1, int(counts[-1].max())) if len(owner) else 1
    rows = torch.arange(len(owner), device=owner.device)
    return owner.new_zeros(groups, width).index_put((owner, nth), rows), torch.stack((owner, nth))


def _by_key_head(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scaled queries (B, K, H/K x T, E), those of one key head side by side, and their mask."""
    rows = (q * q.shape[3] ** -0.5).reshape(len(q), k.shape[1], -1, q.shape[3])
    repeats = q.shape[1] // k.shape[1]
    return rows, mask.repeat(1, 1, repeats, 1) if mask is not None and q.shape[2] > 1 else mask


def _partial(q: Tensor, mask: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries (.., Q, E) over some keys (.., S, E), and its log-sum-exp (.., Q, 1)."""
    scores = q @ k.mT
    if mask is not None:
        scores = scores.where(mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32)
    # the largest weight is exp(largest score - lse); logsumexp would pass -inf to a slow branch of exp
    lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights.to(v.dtype) @ v, lse
