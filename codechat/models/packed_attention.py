"""Attention over packed rows: document by document on a CPU, under a block mask of flex attention on a GPU.

A dense mask keeps flash kernels from being taken, and every block reads (B, T, T) of it.

Shapes: B rows, T tokens, H heads, K key-value heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

DENSE = ("cpu",)  # kinds of devices that take dense masks; elsewhere none reaches SDPA
BLOCK = 128  # tokens: flex attention skips blocks of this size whole
QUERIES = 128  # of a piece: fewer make narrow products, more compute scores that causal attention does not need


def dense(device: torch.device) -> bool:
    """Whether masks are tensors on such a device."""
    return device.type in DENSE


Span = tuple[int, int]


class Piece(NamedTuple):
    """Queries [at, end) of (B T) attend to `before` and causally from `start`, minus `hides` (queries, queries)."""

    before: tuple[Span, ...]
    start: int
    at: int
    end: int
    hides: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Documents:
    """A token attends to earlier tokens of its document and, with branches, of these to branch 0 and its branch. docs,
    branches: (B, T); a document below 0 is padding."""

    docs: Tensor
    branches: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The same as bool (B, 1, T, T), true = attend. Padding attends to itself: a softmax without keys is NaN."""
        T = self.docs.shape[1]
        same = (self.docs[:, :, None] == self.docs[:, None, :]) & (self.docs >= 0)[:, :, None]  # (B, T, T)
        if self.branches is not None:
            q, k = self.branches[:, :, None], self.branches[:, None, :]
            same = same & ((k == 0) | (q == k))
        causal = same.new_ones(T, T).tril()
        itself = causal & causal.T
        return ((same & causal) | itself)[:, None]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Of at most QUERIES queries; neighbouring branches share one while they fit. Padding counts as a document."""
        docs, T = self.docs, self.docs.shape[1]
        branches = torch.zeros_like(docs) if self.branches is None else self.branches
        first = torch.ones_like(docs, dtype=torch.bool)
        first[:, 1:] = (docs[:, 1:] != docs[:, :-1]) | (branches[:, 1:] != branches[:, :-1])
        starts = first.flatten().nonzero()[:, 0]
        kinds = zip((starts // T).tolist(), docs.flatten()[starts].tolist(), branches.flatten()[starts].tolist())
        pieces: list[Piece] = []
        runs: list[tuple[int, int, int]] = []  # branch, start, end of the document so far
        document, shares = None, False  # shares: the last piece holds whole branches of this document
        for (row, doc, branch), (start, end) in zip(kinds, pairwise([*starts.tolist(), docs.numel()])):
            if (row, doc) != document:
                document, runs, shares = (row, doc), [], False
            whole = branch > 0 and all(b != branch for b, _, _ in runs)
            runs.append((branch, start, end))
            if shares and whole and end - pieces[-1].at <= QUERIES:
                some = branches.flatten()[pieces[-1].at : end]
                hides = (some[:, None] != some).logical_or_(_later(len(some)))
                pieces[-1] = pieces[-1]._replace(end=end, hides=hides)
                continue
            seen: list[Span] = []
            for _, a, b in (run for run in runs if run[0] in (0, branch)):
                seen.append((seen.pop()[0], b) if seen and seen[-1][1] == a else (a, b))  # spans that touch, as one
            *before, (begins, _) = seen
            pieces += [Piece(tuple(before), begins, at, min(at + QUERIES, end)) for at in range(start, end, QUERIES)]
            shares = whole and end - start <= QUERIES
        return pieces


def _later(n: int) -> Tensor:
    """Bool (n, n): true where a key is behind the query."""
    return torch.ones(n, n, dtype=torch.bool).triu_(1)


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
    group, compiling = q.shape[1] // k.shape[1], torch.compiler.is_compiling()
    products = products and mask is None and causal and q.device.type == "cpu" and q.dtype == torch.bfloat16
    if products or isinstance(mask, Documents):
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        q = q * q.shape[-1] ** -0.5
        if products or compiling:  # a graph for all batches cannot have the places of one
            return _causal_products(q, k, v, None if products else mask.mask)
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, H, E) each
        return _Pieces.apply(*flat, mask.pieces).unflatten(0, (len(q), -1)).transpose(1, 2)
    if mask is None or isinstance(mask, Tensor):
        is_causal = mask is None and causal
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=group > 1)
    flex = torch.nn.attention.flex_attention.flex_attention if compiling else _flex()  # compiled: a part of the block
    return flex(q, k, v, block_mask=mask, enable_gqa=group > 1)


def _causal_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scores, softmax in float32 and weighted sum of QUERIES queries at a time over the keys that they may see: all
    earlier ones, or those of a mask (B, 1, T, T). The fused kernel's tiles are slow in bfloat16, and compiled for one
    length its backward pass fails at the next (torch 2.13); `_Pieces`, row by row, takes an eighth more of a step."""
    parts = []
    for at in range(0, q.shape[2], QUERIES):
        end = min(at + QUERIES, q.shape[2])
        scores = (q[:, :, at:end] @ k[:, :, :end].mT).float()
        later = torch.arange(end) > torch.arange(at, end)[:, None] if mask is None else ~mask[:, :, at:end, :end]
        parts.append(scores.masked_fill(later, -torch.inf).softmax(-1).to(q.dtype) @ v[:, :, :end])
    return torch.cat(parts, dim=2)


class _Pieces(torch.autograd.Function):
    """Attention of each piece of queries over what it sees, whose scores are all that is computed; all tensors
    (N, H, E), queries already scaled."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece]) -> Tensor:
        out, weights, later = v.new_empty(*q.shape[:2], v.shape[2]), [], _later(QUERIES)
        for piece in pieces:
            n = piece.end - piece.at
            scores = _heads(q[piece.at : piece.end]) @ _seen(k, piece).mT  # (H, queries, keys); the queries are last
            scores[..., -n:].masked_fill_(later[:n, :n] if piece.hides is None else piece.hides, -torch.inf)
            weights.append(scores.softmax(-1, dtype=torch.float32).to(v.dtype))
            out[piece.at : piece.end] = _heads(weights[-1] @ _seen(v, piece))
        ctx.save_for_backward(q, k, v, out, *weights)
        ctx.pieces = pieces
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """With weights w = softmax(s): dv = w' up, ds = w (up v' - up . out), dq = ds k, dk = ds' q."""
        q, k, v, out, *weights = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mean = (up * out).sum(-1, dtype=torch.float32)
        for piece, w in zip(ctx.pieces, weights, strict=True):
            at = slice(piece.at, piece.end)
            ups = _heads(up[at])
            _add(dv, piece, w.mT @ ups)
            slope = ((ups @ _seen(v, piece).mT) - mean[at].T[..., None]).mul_(w).to(w.dtype)
            dq[at] = _heads(slope @ _seen(k, piece))
            _add(dk, piece, slope.mT @ _heads(q[at]))
        return dq, dk, dv, None


def _heads(x: Tensor) -> Tensor:
    """(H, tokens, E) of x (tokens, H, E), or the reverse, as a view."""
    return x.transpose(0, 1)


def _seen(x: Tensor, piece: Piece) -> Tensor:
    """(H, keys, E): the rows of x (N, H, E) that a piece sees."""
    own = x[piece.start : piece.end]
    return _heads(torch.cat([*(x[start:end] for start, end in piece.before), own]) if piece.before else own)


def _add(total: Tensor, piece: Piece, part: Tensor) -> None:
    """Add (H, keys, E) to the rows of total (N, H, E) that the piece sees."""
    at = 0
    for start, end in (*piece.before, (piece.start, piece.end)):
        total[start:end] += _heads(part[:, at : at + end - start])
        at += end - start
