"""Loss and log-probabilities of the output head, a chunk of rows at a time, without a whole (N, V) tensor of logits.

With a vocabulary of 50,257 the logits of a batch are larger than everything else in a training step. Each chunk's logits live until their part of
the result is known. `cross_entropy` computes the gradient in the forward pass, where it is known up to one factor. `logprobs` keeps the
distributions for its backward pass up to KEEP_BYTES and recomputes them beyond.

Left out: gradients of gradients.

Shapes: N rows, D width, V rows of the head's weight. Logits are float32 whatever the matrix products run in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.models import packed_attention

CHUNK_BYTES = 1 << 27  # float32 logits of one chunk: shorter chunks make narrower products, which are slower
KEEP_BYTES = 1 << 30  # of distributions that `logprobs` keeps: a third less work than recomputing them
CHUNK_SHARE, KEEP_SHARE = 1 / 64, 1 / 16  # the same on a GPU, of its memory


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] in nats, a float32 scalar; a row whose target is -100 adds nothing.

    hidden (N, D), weight (V, D), targets (N,)."""
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(hidden, weight, targets, _compute_dtype(hidden), learns)


def logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, n_ids: int, temperature: float = 1.0, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of each row's distribution, in nats, both (N,) float32.

    The distribution is softmax(logits / temperature) over the first `n_ids` rows of the weight. The entropy carries
    gradient only with entropy_grad."""
    found, entropy = _Logprobs.apply(hidden, weight[:n_ids], targets, temperature, _compute_dtype(hidden))
    return found, entropy if entropy_grad else entropy.detach()


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the products. Autocast itself would cast the weight again in every chunk."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@cache
def _budget(device: torch.device, fixed: int, share: float) -> int:
    """Bytes: `fixed`, or on a GPU the share of its memory if that is more."""
    return fixed if device.type != "cuda" else max(fixed, int(share * torch.cuda.mem_get_info(device)[1]))


def _chunks(n: int, weight: Tensor) -> list[slice]:
    """Slices of about equal length, whose float32 logits take about CHUNK_BYTES."""
    count = max(1, -(-n * len(weight) * 4 // _budget(weight.device, CHUNK_BYTES, CHUNK_SHARE)))
    rows = max(1, -(-n // count))
    return [slice(at, min(at + rows, n)) for at in range(0, n, rows)]


class _Logits:
    """Float32 logits of a chunk, in a buffer that all chunks share: the page faults of a new one cost as much as a pass over it."""

    def __init__(self, rows: int, weight: Tensor) -> None:
        self.weight = weight  # (V, D) in the compute dtype
        self.buffer = torch.empty(rows, len(weight), device=weight.device) if weight.dtype == torch.float32 else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(N, V); overwrites those of the chunk before."""
        if self.buffer is None:
            return (hidden @ self.weight.mT).float()
        return torch.mm(hidden, self.weight.mT, out=self.buffer[: len(hidden)])


def _softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Writes the softmax of logits (N, V) to `out`, which may be the logits; returns the log-sum-exp (N, 1).

    The largest weight is exp(largest logit - lse) >= 1 / V, so its logarithm is safe."""
    largest = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=out)
    return largest - out.amax(-1, keepdim=True).log()


def _add_product(total: Tensor | None, g: Tensor, h: Tensor) -> Tensor:
    """total (V, D) float32 + g.T @ h of g (N, V) and h (N, D), in place; none = 0."""
    if total is None:
        return (g.mT @ h).float()
    return total.addmm_(g.mT, h) if h.dtype == torch.float32 else total.add_(g.mT @ h)


def _loss_and_slope(logits: Tensor, targets: Tensor, dtype: torch.dtype | None, dense: bool) -> tuple[Tensor, Tensor]:
    """Sum of the losses of a chunk, and d loss / d logits = softmax - one-hot in `dtype` (none: not needed); overwrites the logits (N, V)."""
    counts = targets[:, None] >= 0
    at = targets[:, None].clamp(min=0)
    chosen = logits.gather(1, at)
    lse = _softmax(logits, out=logits)
    total = torch.where(counts, lse - chosen, 0.0).sum()
    if dtype is None:
        return total, logits
    g = logits.scatter_add_(1, at, -torch.ones_like(chosen))
    # a GPU would have to be waited for; a CPU saves a pass over the logits
    return total, (g if dense and counts.all() else g.mul_(counts)).to(dtype)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_loss_and_slope)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learns: bool) -> Tensor:
        h_all, w = hidden.to(dtype), weight.to(dtype)
        total = torch.zeros((), device=hidden.device)
        chunks = _chunks(len(hidden), weight)
        logits_of = _Logits(chunks[0].stop if chunks else 0, w)
        d_hidden, d_weight = torch.empty_like(h_all) if learns else None, None
        loss_and_slope = _compiled() if hidden.is_cuda else _loss_and_slope
        dense = packed_attention.dense(hidden.device)
        for rows in chunks:
            h = h_all[rows]
            part, g = loss_and_slope(logits_of(h), targets[rows], dtype if learns else None, dense)
            total += part
            if learns:
                torch.mm(g, w, out=d_hidden[rows])
                d_weight = _add_product(d_weight, g, h)
        if learns:
            ctx.d_hidden = d_hidden
            ctx.d_weight = torch.zeros_like(weight, dtype=torch.float32) if d_weight is None else d_weight
            ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.d_hidden.mul_(grad), ctx.d_weight.mul_(grad)
        ctx.d_hidden = ctx.d_weight = None  # a caller's `loss` keeps this node alive into the next step
        return d_hidden.to(ctx.dtypes[0]), d_weight.to(ctx.dtypes[1]), None, None, None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        h_all, w = hidden.to(dtype), weight.to(dtype)
        found, entropy, lses = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        ctx.set_materialize_grads(False)
        chunks = _chunks(len(hidden), weight)
        longest = chunks[0].stop if chunks else 0
        keep = len(hidden) * len(weight) * 4 <= _budget(weight.device, KEEP_BYTES, KEEP_SHARE) and any(
            ctx.needs_input_grad
        )
        logits_of = _Logits(longest, w)
        buffer = torch.empty(len(hidden) if keep else longest, len(weight), device=weight.device)
        for rows in chunks:
            logits = logits_of(h_all[rows])
            if temperature != 1:
                logits.div_(temperature)
            weights = buffer[rows] if keep else buffer[: len(logits)]
            lse = _softmax(logits, out=weights)
            found[rows] = (logits.gather(1, targets[rows, None]) - lse)[:, 0]
            with torch.autocast(logits.device.type, enabled=False):  # which would sum V terms in bfloat16
                mean = torch.bmm(weights[:, None], logits[:, :, None])  # (N, 1, 1): the expected logit
            lses[rows], entropy[rows] = lse[:, 0], lse[:, 0] - mean[:, 0, 0]
        ctx.save_for_backward(hidden, weight, targets, lses, entropy)
        ctx.temperature, ctx.dtype = temperature, dtype
        ctx.weights = buffer if keep else None
        return found, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_found: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, lses, entropy = ctx.saved_tensors
        h_all, w = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        d_hidden, d_weight = torch.empty_like(h_all), None
        bonus = d_entropy is not None  # else its gradient is 0: no loss used the entropy
        d_found = torch.zeros_like(lses) if d_found is None else d_found
        chunks = _chunks(len(hidden), weight)
        logits_of = _Logits(chunks[0].stop if chunks else 0, w)
        product = torch.empty(chunks[0].stop if chunks else 0, len(weight), device=weight.device)
        for rows in chunks:
            h, up = h_all[rows], d_found[rows, None] / ctx.temperature
            factor = -up  # d log p(t) / d logits = one-hot - p;  d entropy / d logits = -p (log p + entropy)
            if ctx.weights is not None and not bonus:
                g = torch.mul(ctx.weights[rows], factor, out=product[: len(h)])
            else:
                found = logits_of(h)
                if ctx.temperature != 1:
                    found.div_(ctx.temperature)
                if bonus:
                    up_entropy = d_entropy[rows, None] / ctx.temperature
                    factor = factor - (found - lses[rows, None] + entropy[rows, None]) * up_entropy
                g = torch.softmax(found, -1, out=found).mul_(factor)
            g = g.scatter_add_(1, targets[rows, None], up).to(ctx.dtype)
            torch.mm(g, w, out=d_hidden[rows])
            d_weight = _add_product(d_weight, g, h)
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden.to(hidden.dtype), d_weight, None, None, None
