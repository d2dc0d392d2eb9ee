"""Masked denoising: a bidirectional model fills in masked symbols, in any order, several at a time.

Training masks m of a window's T symbols, m uniform in 1..T, and multiplies their mean cross-entropy by T: order-agnostic
autoregression (arXiv:2110.02037, eq. 4), which is masked diffusion with its noise level integrated out (LLaDA,
arXiv:2502.09992, eq. 14). Its mean over m and positions is an upper bound on the negative log-likelihood.

Shapes: W windows of P + T symbols, of which P are never masked. The mask is the last used id of a model with
causal=False and n_tags=1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codechat.models import generate
from codechat.models.gpt import GPT

IGNORE = -100


def mask_counts(numbers: Tensor, total: int, places: int, offset: float) -> Tensor:
    """(W,) masked symbols, 1..places, of the windows `numbers` out of `total`, evenly spread from `offset` in [0, 1),
    which lowers the variance of a batch (arXiv:2107.00630, appendix I.1)."""
    level = (offset + numbers.double() / total) % 1
    return 1 + (level * places).long()


def random_ranks(count: int, places: int, rng: torch.Generator) -> Tensor:
    """(W, T) for each window the rank of each position in a random order."""
    return torch.rand(count, places, generator=rng, dtype=torch.float64).argsort(1)


def mask_symbols(windows: Tensor, counts: Tensor, ranks: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (W, P + T): of the last T symbols those with a rank below counts (W,) are masked."""
    masked = torch.zeros_like(windows, dtype=torch.bool)
    masked[:, -ranks.shape[1] :] = ranks < counts[:, None]
    return windows.masked_fill(masked, mask), windows.masked_fill(~masked, IGNORE)


def bound(model: GPT, windows: Tensor, counts: Tensor, ranks: Tensor) -> Tensor:
    """(W,) nats of each window's T symbols: T x the mean cross-entropy of the masked ones."""
    inputs, targets = mask_symbols(windows, counts, ranks, model.cfg.n_ids - 1)
    return model.loss(inputs, targets, reduction="none").sum(1) * (ranks.shape[1] / counts)


@torch.no_grad()
def fill_in(model: GPT, prompts: Tensor, places: int, *, passes: int, rng: torch.Generator) -> Tensor:
    """(W, P + T) ids: T = `places` symbols after each prompt (W, P), in random order, `passes` at about equal size.

    With as many passes as symbols they are drawn from the model's own distribution; symbols of one pass do not see each
    other."""
    mask, (W, P), device = model.cfg.n_ids - 1, prompts.shape, prompts.device
    ids = torch.cat((prompts, prompts.new_full((W, places), mask)), dim=1)
    ranks = random_ranks(W, places, rng).to(device)
    edges = [places * i // passes for i in range(passes + 1)]
    for low, high in zip(edges, edges[1:]):
        w, t = ((ranks >= low) & (ranks < high)).nonzero(as_tuple=True)
        logits = torch.nn.functional.linear(model.hidden(ids)[w, P + t], model.head_weight()).float()
        logits[:, mask:] = -torch.inf
        u = torch.rand(len(logits), generator=rng, dtype=torch.float64).to(device)
        ids[w, P + t] = generate.draw(logits, generate.Truncation(), u)[0]
    return ids
