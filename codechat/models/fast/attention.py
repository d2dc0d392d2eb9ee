"""Attention of packed rows without a dense mask, of which every block would read (B, T, T):
document by document on a CPU, under a block mask of flex attention on a GPU. And attention to
kept tokens under a mask.

Shapes: B rows, T tokens, N = B T, H heads, K key-value heads, E head width; P pieces of Q
queries and S keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.models.config import GPTConfig
from codechat.models.fast import fused
from codechat.models.fast.device import on_cpu
from codechat.models.masks import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from codechat.models.masks import Mask

BLOCK = 128  # tokens: flex attention skips blocks of this size whole
QUERIES = 128  # of a piece: fewer make narrow products, more compute scores that no query needs
ABREAST = 8  # pieces of one product
# queries and keys are padded to multiples: in bfloat16 oneDNN takes a millisecond for a new shape
STEP = 16


def packed_mask(docs: Tensor, branches: Tensor | None = None) -> Documents | BlockMask:
    """The mask of packed rows for `attention.attend`, in the form that their device wants;
    `Documents` says what a token attends to."""
    return Pieces(docs, branches) if on_cpu(docs.device) else flex_mask(docs, branches)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    *,
    causal: bool,
    products: bool,
) -> Tensor | None:
    """`attention.attend` where a faster way than torch's attention is known; else none."""
    if isinstance(mask, Pieces):
        # (N, H, E), (N, K, E) twice; copies: views would keep all heads of which they are parts
        flat = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (_scaled(q), k, v)]
        return _InPieces.apply(*flat, mask.plan).unflatten(0, (len(q), -1)).transpose(1, 2)
    if mask is None and products and causal and on_cpu(q.device) and q.dtype == torch.bfloat16:
        return _causal_products(_scaled(q), k, v)
    if mask is None or isinstance(mask, Tensor | Documents):
        return None
    flex: Callable[..., Any] = torch.nn.attention.flex_attention.flex_attention
    if not torch.compiler.is_compiling():  # else the calling block compiles it
        flex = _flex()
    return flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def attend_fused(
    qkv: Tensor,
    cfg: GPTConfig,
    *,
    gains: tuple[Tensor, Tensor] | None,
    rope: tuple[Tensor, Tensor] | None,
    mask: Mask | None,
) -> Tensor | None:
    """Attention (B, T, H E) of queries, keys and values qkv (B, T, (H + 2 K) E) that are neither
    normed nor turned yet, by `fused`; none where it does not take them."""
    packed = isinstance(mask, Pieces) and mask.seen is not None
    if not packed and not (mask is None and cfg.causal):
        return None
    shape = fused.Shape(cfg.n_head, cfg.kv_heads, cfg.head_dim, cfg.norm_eps)
    seen = mask.seen if isinstance(mask, Pieces) else None
    return fused.attend(qkv, shape, gains=gains, rope=rope, seen=seen)


def _scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


# ---- on a CPU in bfloat16


def _causal_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of scaled queries: scores, softmax and weighted sum of QUERIES queries
    at a time over all earlier keys. The fused kernel's tiles are slow in bfloat16; pieces, row
    by row, take an eighth more of a step."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    parts = []
    for at in range(0, q.shape[2], QUERIES):
        end = min(at + QUERIES, q.shape[2])
        scores = q[:, :, at:end] @ k[:, :, :end].mT
        later = torch.arange(end) > torch.arange(at, end)[:, None]
        parts.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, :, :end])
    return torch.cat(parts, dim=2)


# ---- packed rows on a GPU


def flex_mask(docs: Tensor, branches: Tensor | None = None) -> BlockMask:
    """`Documents` as a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    branches = torch.zeros_like(docs) if branches is None else branches

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (docs[b, q] == docs[b, k]) & (docs[b, q] >= 0) & (k <= q)
        along = (branches[b, k] == 0) | (branches[b, q] == branches[b, k])
        # padding attends to itself: a softmax without keys is NaN
        return (same & along) | (q == k)

    B, T = docs.shape
    return create_block_mask(sees, B, None, T, T, device=docs.device, BLOCK_SIZE=BLOCK)


@cache
def _flex() -> Callable[..., Any]:
    """Flex attention, compiled: without the compiler it would hold all scores."""
    return torch.compile(torch.nn.attention.flex_attention.flex_attention)


# ---- packed rows on a CPU, in pieces


class Piece(NamedTuple):
    """Neighbouring queries (Q,) of a row and every key (S,) that one of them attends to, as
    tokens of (N,); sees: (Q, S)."""

    queries: Tensor
    keys: Tensor
    sees: Tensor


class Alike(NamedTuple):
    """Pieces of like size: tokens of their queries (P, Q) and keys (P, S), padded with N;
    hides: (P, 1, 1, Q, S)."""

    queries: Tensor
    keys: Tensor
    hides: Tensor


class Plan(NamedTuple):
    """All pieces. place (N,): of each token among the queries of all pieces. uses, starts (N,):
    for each token its positions among the keys of all pieces (CSR)."""

    alike: list[Alike]
    place: Tensor
    uses: Tensor
    starts: Tensor


class Pieces(Documents):
    """`Documents` that are attended to in pieces: QUERIES tokens of a row over the keys that
    they attend to."""

    @cached_property
    def seen(self) -> Tensor | None:
        """Of `fused.seen_tokens`; all blocks share it."""
        return fused.seen_tokens(self.docs, self.branches)

    @cached_property
    def plan(self) -> Plan:
        """The pieces, sorted by their number of keys, ABREAST of them to a product; all blocks
        share it."""
        n_tokens = self.docs.numel()
        pieces = sorted(self._pieces(), key=lambda piece: len(piece.keys))
        alike = [_alike(pieces[i : i + ABREAST], n_tokens) for i in range(0, len(pieces), ABREAST)]
        queries = torch.cat([some.queries.flatten() for some in alike])
        keys = torch.cat([some.keys.flatten() for some in alike])
        uses = torch.bincount(keys, minlength=n_tokens + 1)[:-1]  # without padding
        return Plan(
            alike,
            place=queries.argsort(stable=True)[:n_tokens],
            uses=keys.argsort(stable=True)[: uses.sum()],
            starts=uses.cumsum(0) - uses,
        )

    def _pieces(self) -> list[Piece]:
        T = self.docs.shape[1]
        pieces = []
        for at in range(0, T, QUERIES):
            for row, sees in enumerate(self.sees(at, min(at + QUERIES, T))):
                keys = sees.any(0).nonzero()[:, 0]
                queries = torch.arange(at, at + len(sees))
                pieces.append(Piece(row * T + queries, row * T + keys, sees[:, keys]))
        return pieces


def _alike(pieces: list[Piece], n_tokens: int) -> Alike:
    """The pieces, padded to one size. A padded query attends to what is there, since a softmax
    without keys is NaN; padded keys are hidden."""
    queries = _stacked([piece.queries for piece in pieces], n_tokens)
    keys = _stacked([piece.keys for piece in pieces], n_tokens)
    hides = torch.zeros(len(pieces), 1, 1, queries.shape[1], keys.shape[1], dtype=torch.bool)
    for hidden, piece in zip(hides[:, 0, 0], pieces):
        q, k = piece.sees.shape
        hidden[:q, k:] = True
        hidden[:q, :k] = ~piece.sees
    return Alike(queries, keys, hides)


def _stacked(rows: list[Tensor], padding: int) -> Tensor:
    """(P, L): rows (l,) of tokens, padded to the longest, and up to a multiple of STEP."""
    stacked = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    return F.pad(stacked, (0, -stacked.shape[1] % STEP), value=padding)


class _InPieces(torch.autograd.Function):
    """Attention of all pieces, those of like size as one product. q (N, H, E) scaled, k, v (N,
    K, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        out = []
        weights = []
        qs, ks, vs = map(_with_padding, (q, k, v))
        for some in plan.alike:
            # (P, K, G x Q, S)
            scores = _grouped_rows(qs, some.queries, k.shape[1]) @ _rows(ks, some.keys).mT
            scores.unflatten(2, (-1, some.queries.shape[1])).masked_fill_(some.hides, -torch.inf)
            weights.append(scores.softmax(-1))
            out.append(_tokens(weights[-1] @ _rows(vs, some.keys), some.queries))
        ctx.save_for_backward(q, k, v, *weights)
        ctx.plan = plan
        return torch.cat(out)[plan.place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """With weights w = softmax(s): dv = w' up, ds = w (up v' - sum(w up v')), dq = ds k, dk
        = ds' q."""
        q, k, v, *weights = ctx.saved_tensors
        plan = ctx.plan
        dq = []
        dk = []
        dv = []
        qs, ks, vs, ups = map(_with_padding, (q, k, v, up))
        for some, w in zip(plan.alike, weights, strict=True):
            query = _grouped_rows(qs, some.queries, k.shape[1])
            above = _grouped_rows(ups, some.queries, k.shape[1])
            gradient = torch._softmax_backward_data(above @ _rows(vs, some.keys).mT, w, -1, w.dtype)
            dq.append(_tokens(gradient @ _rows(ks, some.keys), some.queries))
            dk.append(_tokens(gradient.mT @ query, some.keys))
            dv.append(_tokens(w.mT @ above, some.keys))
        return (
            torch.cat(dq)[plan.place],
            _sum_of_uses(dk, plan).view_as(k),
            _sum_of_uses(dv, plan).view_as(v),
            None,
        )


def _with_padding(x: Tensor) -> Tensor:
    """(N + 1, H, E): x (N, H, E) and a token of zeros."""
    return F.pad(x, (0, 0, 0, 0, 0, 1))


def _rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (P, L) of x (N + 1, H, E) as (P, H, L, E)."""
    return x[tokens].transpose(1, 2)


def _grouped_rows(x: Tensor, tokens: Tensor, groups: int) -> Tensor:
    """The same with the heads that share a key side by side: (P, groups, H/groups x L, E)."""
    return _rows(x, tokens).unflatten(1, (groups, -1)).flatten(2, 3)


def _tokens(rows: Tensor, tokens: Tensor) -> Tensor:
    """The reverse of both: (P L, H, E)."""
    return (
        rows.unflatten(2, (-1, tokens.shape[1])).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
    )


def _sum_of_uses(gradients: list[Tensor], plan: Plan) -> Tensor:
    """(N, K E): of each token the sum of its gradients as a key of several pieces."""
    return F.embedding_bag(plan.uses, torch.cat(gradients).flatten(1), plan.starts, mode="sum")


# ---- kept tokens


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
    """Attention (B, H, T, E) of q over kept keys and values (B, K, S, E) under a mask (B|1, 1,
    T, S), where torch's flash kernels take no mask, which is off the CPU; else none."""
    if mask is None or on_cpu(q.device):
        return None
    y, _ = partial_attention(*by_key_head(q, k, mask), k, v)
    return y.reshape(*q.shape[:3], -1)


def by_key_head(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scaled queries (B, K, H/K x T, E), those of one key head side by side, and their mask."""
    rows = _scaled(q).reshape(len(q), k.shape[1], -1, q.shape[3])
    if mask is not None and q.shape[2] > 1:
        mask = mask.repeat(1, 1, q.shape[1] // k.shape[1], 1)
    return rows, mask


def partial_attention(
    q: Tensor, mask: Tensor | None, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries (.., Q, E) over some keys (.., S, E), and its log-sum-exp
    (.., Q, 1)."""
    scores = q @ k.mT
    if mask is not None:
        scores = scores.where(mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32)
    # the largest weight is exp(largest score - lse); logsumexp would pass -inf to a slow branch
    # of exp
    lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights.to(v.dtype) @ v, lse
