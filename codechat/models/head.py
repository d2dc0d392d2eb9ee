"""Loss and log-probabilities of the output head, a chunk of rows at a time, without a whole (N, V) tensor of logits.

`cross_entropy` computes its gradient, which is known up to a factor, in the forward pass. `logprobs` keeps the
logits for its backward pass up to KEEP_BYTES and recomputes them beyond. A chunk is as long as matrix products want
it; its logits are worked on in blocks of rows that a CPU's cache holds, in float32.

Shapes: N rows, D width, V rows of the head's weight.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.models import attention

CHUNK_BYTES = 1 << 27  # float32 logits of one chunk: shorter chunks make narrower products, which are slower
KEEP_BYTES = 1 << 30  # of logits that `logprobs` keeps: a third less work than recomputing them
# the same on a GPU, of its memory
CHUNK_SHARE = 1 / 64
KEEP_SHARE = 1 / 16
CUT = -1e20  # in place of the logit of a token that was cut: its weight is 0, and 0 times it is no NaN
BLOCK_BYTES = 1 << 22  # float32 logits of one block: a few such tensors fit into the cache that two cores share


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x, under this autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] in nats, a float32 scalar; a row whose target is -100 adds
    nothing.

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
    """Log-probability of each target and the entropy of each row's distribution, in nats, both (N,) float32.

    Of softmax(logits / temperature) over the first `n_ids` rows, or in each row over the ids `kept` (N, K), -1 = none,
    which hold the target. The entropy has a gradient with entropy_grad."""
    chosen, entropy = _Logprobs.apply(hidden, weight[:n_ids], targets, temperature, compute_dtype(hidden), kept)
    return chosen, entropy if entropy_grad else entropy.detach()


@cache
def _budget(device: torch.device, fixed: int, share: float) -> int:
    """Bytes: `fixed`, or on a GPU the share of its memory if that is more."""
    return fixed if device.type != "cuda" else max(fixed, int(share * torch.cuda.mem_get_info(device)[1]))


def _chunks(
    h: Tensor,
    w: Tensor,
    kept: Tensor | None = None,
    known: bool = False,
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of h (N, D) and their logits (n, V), about CHUNK_BYTES in float32 at a time. kept (N, V): where to keep
    them; known: they are there. Else all chunks share a buffer: page faults cost more than a pass."""
    count = max(1, -(-len(h) * len(w) * 4 // _budget(w.device, CHUNK_BYTES, CHUNK_SHARE)))
    size = max(1, -(-len(h) // count))
    buffer = w.new_empty(0 if kept is not None else min(size, len(h)), len(w))
    for at in range(0, len(h), size):
        rows = slice(at, min(at + size, len(h)))
        out = buffer[: rows.stop - at] if kept is None else kept[rows]
        yield rows, out if known else torch.mm(h[rows], w.mT, out=out)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the rows of x (N, M), whose float32 values take about BLOCK_BYTES; on a GPU all rows."""
    rows = max(1, BLOCK_BYTES // (4 * x.shape[1]) if x.device.type == "cpu" else len(x))
    return (slice(at, min(at + rows, len(x))) for at in range(0, len(x), rows))


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


@cache
def _body(body: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """What is done to the logits of a block: on a GPU in one kernel or two instead of a pass over memory each."""
    return torch.compile(body) if device.type == "cuda" else body


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Float32 logits / temperature; the logits themselves where that is what they are."""
    x = logits.float()
    return x if temperature == 1 else x / temperature


def _softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Writes the softmax of logits (N, V) to `out`, which may be the logits; returns the log-sum-exp (N, 1).

    The largest weight is exp(largest logit - lse) >= 1 / V, so its logarithm is safe."""
    largest = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=out)
    return largest - out.amax(-1, keepdim=True).log()


def _loss_and_slope(logits: Tensor, targets: Tensor, learns: bool) -> Tensor:
    """Losses (N, 1) of some rows. learns: overwrites the logits (N, V) with d loss / d logits = softmax - one-hot."""
    counts = targets[:, None] >= 0
    at = targets[:, None].clamp(min=0)
    x = logits.float()
    chosen = x.gather(1, at)
    lse = _softmax(x, out=x)
    if learns:
        x.scatter_add_(1, at, -torch.ones_like(chosen))
        # a GPU would have to be waited for; a CPU saves a pass over the logits
        if not (attention.dense(x.device) and counts.all()):
            x.mul_(counts)
        if logits.dtype != torch.float32:
            logits.copy_(x)
    return torch.where(counts, lse - chosen, 0.0)


def _chosen_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits (N, V) / temperature: log-probability of each target, entropy, log-sum-exp, all (N,)."""
    x = _scaled(logits, temperature)
    weights = torch.empty_like(x)
    lse = _softmax(x, out=weights)
    with torch.autocast(x.device.type, enabled=False):  # which would sum V terms in bfloat16
        if attention.dense(x.device):
            mean = torch.bmm(weights[:, None], x[:, :, None])[:, 0]  # (N, 1): the expected logit
        else:  # compiled, a product would need the weights in memory
            mean = (weights * x).sum(-1, keepdim=True)
    chosen = x.gather(1, targets[:, None]) - lse
    return chosen[:, 0], (lse - mean)[:, 0], lse[:, 0]


def _slope(logits: Tensor, targets: Tensor, temperature: float, *rows: Tensor | None) -> Tensor:
    """d loss / d logits (N, V), float32. rows: log-sum-exp and entropy of `_chosen_and_entropy`, the gradient of the
    log-probabilities and of the entropies (none = no loss used them), (N,) each."""
    lse, entropy, d_chosen, d_entropy = rows
    x = _scaled(logits, temperature)
    up = d_chosen[:, None] / temperature
    factor = -up  # d log p(t) / d logits = one-hot - p;  d entropy / d logits = -p (log p + entropy)
    if d_entropy is not None:
        factor = factor - (x - lse[:, None] + entropy[:, None]) * (d_entropy[:, None] / temperature)
    return torch.softmax(x, -1).mul_(factor).scatter_add_(1, targets[:, None], up)


def _kept_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of logits (N, V) those of the ids kept (N, K), float32 at this temperature, and each target's column (N,)."""
    some = _scaled(logits.gather(1, kept.long().clamp(min=0)), temperature).masked_fill(kept < 0, CUT)
    return some, (kept == targets[:, None]).int().argmax(1)


def _chosen_and_entropy_of_kept(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_chosen_and_entropy` of the distribution over the ids that were kept."""
    some, columns = _kept_logits(logits, targets, temperature, kept)
    return _chosen_and_entropy(some, columns, 1.0)


def _slope_of_kept(logits: Tensor, targets: Tensor, temperature: float, kept: Tensor, *rows: Tensor | None) -> Tensor:
    """`_slope` of the distribution over the ids that were kept: 0 elsewhere."""
    some, columns = _kept_logits(logits, targets, temperature, kept)
    slope = _slope(some, columns, 1.0, *rows) / temperature
    # -1 stands where there are fewer ids than columns; its slope is 0
    return torch.zeros_like(logits, dtype=torch.float32).scatter_add_(1, kept.long().clamp(min=0), slope)


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
        body = _body(_loss_and_slope, hidden.device)
        for rows, logits in _chunks(h, w):
            losses = torch.empty(len(logits), 1, device=h.device)
            for block in _blocks(logits):
                losses[block] = body(logits[block], targets[rows][block], learns)
            total += losses.sum()
            if learns:
                torch.mm(logits, w, out=d_hidden[rows])
            if teaches:
                d_weight = _add_product(d_weight, logits, h[rows])
        if teaches and d_weight is None:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        if learns:
            ctx.slopes = (d_hidden, d_weight)
            ctx.dtypes = (hidden.dtype, weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [x if x is None else x.mul_(grad).to(dtype) for x, dtype in zip(ctx.slopes, ctx.dtypes)]
        ctx.slopes = None  # a caller's `loss` keeps this node alive into the next step
        return *slopes, None, None, None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        among: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        h = hidden.to(dtype)
        w = weight.to(dtype)
        chosen, entropy, lses = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        ctx.set_materialize_grads(False)
        budget = _budget(weight.device, KEEP_BYTES, KEEP_SHARE)
        keep = len(h) * len(w) * w.element_size() <= budget and any(ctx.needs_input_grad)
        kept = w.new_empty(len(h), len(w)) if keep else None
        body = _body(_chosen_and_entropy if among is None else _chosen_and_entropy_of_kept, hidden.device)
        for rows, logits in _chunks(h, w, kept):
            for block in _blocks(logits):
                more = () if among is None else (among[rows][block],)
                values = body(logits[block], targets[rows][block], temperature, *more)
                chosen[rows][block], entropy[rows][block], lses[rows][block] = values
        ctx.save_for_backward(hidden, weight, targets, lses, entropy, among)
        ctx.temperature, ctx.dtype, ctx.kept = temperature, dtype, kept
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_chosen: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lses, entropy, among = ctx.saved_tensors
        h = hidden.to(ctx.dtype)
        w = weight.to(ctx.dtype)
        d_hidden = torch.empty_like(h)
        d_weight = None
        d_chosen = torch.zeros_like(lses) if d_chosen is None else d_chosen
        slopes = w.new_empty(0)
        body = _body(_slope if among is None else _slope_of_kept, hidden.device)
        for rows, logits in _chunks(h, w, ctx.kept, ctx.kept is not None):
            slopes = torch.empty_like(logits) if len(slopes) < len(logits) else slopes
            slope = slopes[: len(logits)]
            for block in _blocks(logits):
                values = [x if x is None else x[rows][block] for x in (lses, entropy, d_chosen, d_entropy)]
                more = () if among is None else (among[rows][block],)
                slope[block] = body(logits[block], targets[rows][block], ctx.temperature, *more, *values)
            torch.mm(slope, w, out=d_hidden[rows])
            if ctx.needs_input_grad[1]:
                d_weight = _add_product(d_weight, slope, h[rows])
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None
