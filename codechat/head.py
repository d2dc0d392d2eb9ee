"""The output head and what is computed from its logits, a chunk of rows at a time: no (N, V) tensor is ever held.

With a vocabulary of 50,257 the logits of a batch are larger than everything else in a training step. Each chunk's
logits live only until their part of the result is known; what the backward pass needs is either computed at once
(`cross_entropy`: the gradient of a sum is known in the forward pass up to one factor) or computed again (`logprobs`).

Left out: gradients of gradients.

Shapes: N rows, D width, V rows of the head's weight. Logits are float32 whatever the matrix products run in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 1 << 26  # float32 logits of one chunk


@torch.compiler.disable  # a loop over chunks that ends in one number: nothing for a compiler to gain, much to unroll
def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] in nats, a float32 scalar; a row whose target is -100 adds nothing.

    hidden (N, D), weight (V, D), targets (N,)."""
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(hidden, weight, targets, _compute_dtype(hidden), learns)


@torch.compiler.disable
def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, owned: int, temperature: float = 1.0,
             entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of each row's distribution, in nats, both (N,) float32.

    The distribution is softmax(logits / temperature) over the first `owned` rows of the weight. The entropy carries
    gradient only with entropy_grad."""
    found, entropy = _Logprobs.apply(hidden, weight[:owned], targets, temperature, _compute_dtype(hidden))
    return found, entropy if entropy_grad else entropy.detach()


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What the products run in. Autocast itself would cast the weight anew in every chunk."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _chunks(n: int, vocab: int) -> Iterator[slice]:
    """Slices of equal length as far as they go: rows whose float32 logits take about CHUNK_BYTES."""
    count = max(1, -(-n * vocab * 4 // CHUNK_BYTES))
    rows = max(1, -(-n // count))
    return (slice(at, min(at + rows, n)) for at in range(0, n, rows))


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """softmax (N, V) and log-sum-exp (N, 1). The largest weight is exp(largest logit - lse) >= 1 / V, so its logarithm is safe."""
    largest, weights = logits.amax(-1, keepdim=True), logits.softmax(-1)
    return weights, largest - weights.amax(-1, keepdim=True).log()


def _add_product(total: Tensor, g: Tensor, h: Tensor) -> None:
    """total (V, D) float32 += g.T @ h of g (N, V) and h (N, D)."""
    if h.dtype == torch.float32:
        total.addmm_(g.mT, h)
    else:
        total.add_(g.mT @ h)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learns: bool) -> Tensor:
        h_all, w = hidden.to(dtype), weight.to(dtype)
        total = torch.zeros((), device=hidden.device)
        if learns:
            ctx.d_hidden, ctx.d_weight = torch.empty_like(h_all), torch.zeros_like(weight, dtype=torch.float32)
            ctx.dtypes = hidden.dtype, weight.dtype
        for rows in _chunks(len(hidden), len(weight)):
            h, counts = h_all[rows], targets[rows, None] >= 0
            at = targets[rows, None].clamp(min=0)
            logits = (h @ w.mT).float()
            chosen = logits.gather(1, at)
            weights, lse = _softmax(logits)
            total += torch.where(counts, lse - chosen, 0.0).sum()
            if learns:  # d loss / d logits = softmax - one-hot
                g = weights.scatter_add_(1, at, -torch.ones_like(chosen))
                g = (g if counts.all() else g * counts).to(dtype)
                torch.matmul(g, w, out=ctx.d_hidden[rows])
                _add_product(ctx.d_weight, g, h)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.d_hidden.mul_(grad), ctx.d_weight.mul_(grad)
        return d_hidden.to(ctx.dtypes[0]), d_weight.to(ctx.dtypes[1]), None, None, None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float,
                dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        h_all, w = hidden.to(dtype), weight.to(dtype)
        found, entropy, lses = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for rows in _chunks(len(hidden), len(weight)):
            logits = (h_all[rows] @ w.mT).float().div_(temperature)
            weights, lse = _softmax(logits)
            found[rows] = (logits.gather(1, targets[rows, None]) - lse)[:, 0]
            lses[rows], entropy[rows] = lse[:, 0], lse[:, 0] - torch.linalg.vecdot(weights, logits)
        ctx.save_for_backward(hidden, weight, targets, lses, entropy)
        ctx.temperature, ctx.dtype = temperature, dtype
        return found, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_found: Tensor, d_entropy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, lses, entropy = ctx.saved_tensors
        h_all, w = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        d_hidden, d_weight = torch.empty_like(h_all), torch.zeros_like(weight, dtype=torch.float32)
        bonus = bool(d_entropy.any())
        for rows in _chunks(len(hidden), len(weight)):
            h, up = h_all[rows], d_found[rows, None] / ctx.temperature
            found = (h @ w.mT).float().div_(ctx.temperature).sub_(lses[rows, None])  # every token's log-probability
            # d log p(t) / d logits = one-hot - p;  d entropy / d logits = -p (log p + entropy)
            factor = -up if not bonus else -up - (found + entropy[rows, None]) * (d_entropy[rows, None] / ctx.temperature)
            g = found.exp_().mul_(factor).scatter_add_(1, targets[rows, None], up).to(ctx.dtype)
            torch.matmul(g, w, out=d_hidden[rows])
            _add_product(d_weight, g, h)
        return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), None, None, None
