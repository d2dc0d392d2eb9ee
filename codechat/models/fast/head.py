"""Loss and log-probabilities of the output head, a chunk of rows at a time, without a whole (N,
V) tensor of logits.

`cross_entropy` computes its gradient, which is known up to a factor, in the forward pass.
`logprobs` keeps the logits for its backward pass up to KEEP_BYTES and recomputes them beyond. A
chunk is as long as matrix products want it; its logits are worked on in blocks of rows that a
CPU's cache holds, in float32.

Shapes: N rows, D width, V rows of the head's weight, K ids that a draw could have been.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.distributed import numerics
from codechat.models.fast.device import compute_dtype, on_cpu

# float32 logits of one chunk: shorter chunks make narrower products, which are slower
CHUNK_BYTES = 1 << 27
KEEP_BYTES = 1 << 30  # of logits that `logprobs` keeps: a third less work than recomputing them
# the same on a GPU, of its memory
CHUNK_SHARE = 1 / 64
KEEP_SHARE = 1 / 16
# in place of the logit of a token that was cut: its weight is 0, and 0 times it is no NaN
CUT = -1e20
# float32 logits of one block: a few such tensors fit into the cache that two cores share
BLOCK_BYTES = 1 << 22


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] in nats, a float32 scalar; a row whose
    target is -100 adds nothing.

    hidden (N, D), weight (V, D), targets (N,)."""
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(hidden, weight, targets, compute_dtype(hidden), learns)


def logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    n_ids: int,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of each row's distribution, in nats, both
    (N,) float32.

    Of softmax(logits / temperature) over the first `n_ids` rows, or in each row over the ids
    `kept` (N, K), -1 = none, which hold the target. The entropy has a gradient with
    entropy_grad."""
    chosen, entropy = _Logprobs.apply(
        hidden, weight[:n_ids], targets, temperature, compute_dtype(hidden), kept
    )
    return chosen, entropy if entropy_grad else entropy.detach()


# ---- chunks and blocks of rows


def _budget(device: torch.device, fixed: int, share: float) -> int:
    """Bytes: `fixed`, or on a GPU the share of its memory if that is more."""
    return max(
        fixed, int(share * (numerics.planned.memory if numerics.planned else _memory(device)))
    )


@cache
def _memory(device: torch.device) -> int:
    """Bytes of a GPU's memory; 0 of a CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


def _chunks(
    h: Tensor,
    w: Tensor,
    kept: Tensor | None = None,
    known: bool = False,
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of h (N, D) and their logits (n, V), about CHUNK_BYTES in float32 at a time. kept
    (N, V): where to keep them; known: they are there. Else all chunks share a buffer: page
    faults cost more than a pass."""
    count = max(1, -(-len(h) * len(w) * 4 // _budget(w.device, CHUNK_BYTES, CHUNK_SHARE)))
    size = max(1, -(-len(h) // count))
    buffer = w.new_empty(0 if kept is not None else min(size, len(h)), len(w))
    for at in range(0, len(h), size):
        rows = slice(at, min(at + size, len(h)))
        out = buffer[: rows.stop - at] if kept is None else kept[rows]
        yield rows, out if known else torch.mm(h[rows], w.mT, out=out)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the rows of x (N, M), whose float32 values take about BLOCK_BYTES; on a GPU or
    in a plan all rows."""
    whole = x.device.type != "cpu" or numerics.planned
    rows = max(1, len(x) if whole else BLOCK_BYTES // (4 * x.shape[1]))
    return (slice(at, min(at + rows, len(x))) for at in range(0, len(x), rows))


@cache
def _body(body: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """What is done to the logits of a block: on a GPU in one kernel or two instead of a pass
    over memory each."""
    return torch.compile(body) if device.type == "cuda" else body


def _add_product(total: Tensor | None, g: Tensor, h: Tensor) -> Tensor:
    """total (V, D) float32 + g.T @ h of g (N, V) and h (N, D), in place; none = 0."""
    if total is None:
        return (g.mT @ h).float()
    if h.dtype == torch.float32:
        return total.addmm_(g.mT, h)
    product = g.mT @ h
    for rows in _blocks(product):
        total[rows].add_(product[rows])
    return total


# ---- what is done to the logits of a block


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Float32 logits / temperature; the logits themselves where that is what they are."""
    x = logits.float()
    return x if temperature == 1 else x / temperature


def _softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Writes the softmax of logits (N, V) to `out`, which may be the logits; returns the
    log-sum-exp (N, 1).

    The largest weight is exp(largest logit - lse) >= 1 / V, so its logarithm is safe."""
    largest = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=out)
    return largest - out.amax(-1, keepdim=True).log()


def _loss_and_gradient(logits: Tensor, targets: Tensor, learns: bool) -> Tensor:
    """Losses (N, 1) of some rows. learns: overwrites the logits (N, V) with d loss / d logits =
    softmax - one-hot."""
    counts = targets[:, None] >= 0
    at = targets[:, None].clamp(min=0)
    x = logits.float()
    chosen = x.gather(1, at)
    lse = _softmax(x, out=x)
    if learns:
        x.scatter_add_(1, at, -torch.ones_like(chosen))
        # a GPU would have to be waited for; a CPU saves a pass over the logits
        if not (on_cpu(x.device) and counts.all()):
            x.mul_(counts)
        if logits.dtype != torch.float32:
            logits.copy_(x)
    return torch.where(counts, lse - chosen, 0.0)


class _Values(NamedTuple):
    """Of some rows, (N,) each: log-probability of the target, entropy, log-sum-exp of the
    logits."""

    chosen: Tensor
    entropy: Tensor
    lse: Tensor


def _candidates(
    logits: Tensor, targets: Tensor, temperature: float, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) / temperature in float32, and each target's column (N,). kept (N, K): of
    these ids alone."""
    if kept is None:
        return _scaled(logits, temperature), targets
    some = _scaled(logits.gather(1, kept.long().clamp(min=0)), temperature).masked_fill(
        kept < 0, CUT
    )
    return some, (kept == targets[:, None]).int().argmax(1)


def _chosen_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, kept: Tensor | None
) -> _Values:
    """Of the distribution over the candidates."""
    x, columns = _candidates(logits, targets, temperature, kept)
    weights = torch.empty_like(x)
    lse = _softmax(x, out=weights)
    mean = (weights * x).sum(-1, keepdim=True)  # the expected logit
    chosen = x.gather(1, columns[:, None]) - lse
    return _Values(chosen[:, 0], (lse - mean)[:, 0], lse[:, 0])


def _gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    kept: Tensor | None,
    values: _Values,
    d_chosen: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """d loss / d logits (N, V), float32; 0 for ids that were not kept. values: of
    `_chosen_and_entropy`; d_chosen, d_entropy (N,): the gradients in log-probabilities and
    entropies, none = no loss used them.

    With x = logits / temperature: d log p(t) / dx = one-hot - p, d entropy / dx = -p (log p +
    entropy)."""
    x, columns = _candidates(logits, targets, temperature, kept)
    scale = temperature if kept is None else 1.0
    up = d_chosen[:, None] / scale
    factor = -up
    if d_entropy is not None:
        log_p = x - values.lse[:, None]
        factor = factor - (log_p + values.entropy[:, None]) * (d_entropy[:, None] / scale)
    gradient = torch.softmax(x, -1).mul_(factor).scatter_add_(1, columns[:, None], up)
    if kept is None:
        return gradient
    # -1 stands where there are fewer ids than columns; its gradient is 0
    whole = torch.zeros_like(logits, dtype=torch.float32)
    return whole.scatter_add_(1, kept.long().clamp(min=0), gradient / temperature)


# ---- the two functions


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        learns: bool,
    ) -> Tensor:
        h = hidden.to(dtype)
        w = weight.to(dtype)
        total = torch.zeros((), device=hidden.device)
        d_hidden = torch.empty_like(h) if learns else None
        d_weight = None
        teaches = learns and ctx.needs_input_grad[1]  # not beside adapters
        body = _body(_loss_and_gradient, hidden.device)
        for rows, logits in _chunks(h, w):
            losses = torch.empty(len(logits), 1, device=h.device)
            for block in _blocks(logits):
                losses[block] = body(logits[block], targets[rows][block], learns)
            total += losses.sum()
            if d_hidden is not None:
                torch.mm(logits, w, out=d_hidden[rows])
            if teaches:
                d_weight = _add_product(d_weight, logits, h[rows])
        if teaches and d_weight is None:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        if learns:
            ctx.gradients = (d_hidden, d_weight)
            ctx.dtypes = (hidden.dtype, weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            x if x is None else x.mul_(grad).to(dtype)
            for x, dtype in zip(ctx.gradients, ctx.dtypes)
        ]
        ctx.gradients = None  # a caller's `loss` keeps this node alive into the next step
        return *gradients, None, None, None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        h = hidden.to(dtype)
        w = weight.to(dtype)
        found = _Values(*(torch.empty(len(hidden), device=hidden.device) for _ in range(3)))
        ctx.set_materialize_grads(False)
        fits = len(h) * len(w) * w.element_size() <= _budget(weight.device, KEEP_BYTES, KEEP_SHARE)
        ctx.logits = w.new_empty(len(h), len(w)) if fits and any(ctx.needs_input_grad) else None
        body = _body(_chosen_and_entropy, hidden.device)
        for rows, logits in _chunks(h, w, ctx.logits):
            for block in _blocks(logits):
                among = None if kept is None else kept[rows][block]
                values = body(logits[block], targets[rows][block], temperature, among)
                for whole, part in zip(found, values):
                    whole[rows][block] = part
        ctx.save_for_backward(hidden, weight, targets, *found, kept)
        ctx.temperature = temperature
        ctx.dtype = dtype
        return found.chosen, found.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_chosen: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *found, kept = ctx.saved_tensors
        h = hidden.to(ctx.dtype)
        w = weight.to(ctx.dtype)
        d_hidden = torch.empty_like(h)
        d_weight = None
        d_chosen = torch.zeros_like(found[0]) if d_chosen is None else d_chosen
        buffer = w.new_empty(0)
        body = _body(_gradient, hidden.device)
        for rows, logits in _chunks(h, w, ctx.logits, ctx.logits is not None):
            if len(buffer) < len(logits):
                buffer = torch.empty_like(logits)
            gradient = buffer[: len(logits)]
            for block in _blocks(logits):
                gradient[block] = body(
                    logits[block],
                    targets[rows][block],
                    ctx.temperature,
                    None if kept is None else kept[rows][block],
                    _Values(*(x[rows][block] for x in found)),
                    d_chosen[rows][block],
                    None if d_entropy is None else d_entropy[rows][block],
                )
            torch.mm(gradient, w, out=d_hidden[rows])
            if ctx.needs_input_grad[1]:
                d_weight = _add_product(d_weight, gradient, h[rows])
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None
