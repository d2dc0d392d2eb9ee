"""Masked denoising: a bidirectional model fills in masked symbols, and so writes a text in any order, several symbols
at a time.

Training masks m of a window's T symbols, m uniform in 1..T, and multiplies their mean cross-entropy by T:
order-agnostic autoregression (Hoogeboom et al., arXiv:2110.02037, eq. 4), which is masked diffusion with its noise
level integrated out (LLaDA, arXiv:2502.09992, eq. 14). Its mean over m and positions is an upper bound on the negative
log-likelihood, comparable with a causal model's cross-entropy. The first P symbols of a window are the prompt and are
never masked.

Sampling starts from masks only and fills positions in random order. With as many passes as symbols it samples from the
model's own distribution; with fewer, the symbols of one pass do not see each other.

Left out: remasking, sampling by confidence (it narrows the distribution), time conditioning (the model can count its
masks).

Shapes: W windows of P + T symbols, V used rows of the vocabulary. The mask is the last used id:
`GPTConfig(causal=False, n_tags=1)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codechat.core.errors import ConfigError
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

IGNORE = -100


def mask_id(cfg: GPTConfig) -> int:
    """The id of the mask. ConfigError for a model that cannot denoise."""
    if cfg.causal or cfg.n_tags < 1:
        raise ConfigError(
            f"causal={cfg.causal} with n_tags {cfg.n_tags}; a denoising model is bidirectional and has a mask: set causal=False, n_tags=1"
        )
    return cfg.n_ids - 1


def mask_counts(numbers: Tensor, total: int, places: int, offset: float) -> Tensor:
    """(W,) number of masked symbols, 1..places, of the windows with index `numbers` out of `total`, evenly spread from
    `offset` in [0, 1).

    For a uniform offset every count is equally likely; the even spread lowers the variance of a batch
    (arXiv:2107.00630, appendix I.1)."""
    level = (offset + numbers.double() / total) % 1
    return 1 + (level * places).long()


def random_ranks(count: int, places: int, rng: torch.Generator) -> Tensor:
    """(W, T) for each window the rank of each position in a random order."""
    return torch.rand(count, places, generator=rng, dtype=torch.float64).argsort(1)


def mask_symbols(windows: Tensor, counts: Tensor, ranks: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (W, P + T): of the last T symbols those with a rank below counts (W,) are masked; only they
    are targets (others -100)."""
    masked = ranks < counts[:, None]  # (W, T)
    masked = torch.cat((masked.new_zeros(len(windows), windows.shape[1] - ranks.shape[1]), masked), dim=1)
    return windows.masked_fill(masked, mask), windows.masked_fill(~masked, IGNORE)


def bound(model: GPT, windows: Tensor, counts: Tensor, ranks: Tensor) -> Tensor:
    """(W,) nats of each window's T symbols: T x the mean cross-entropy of the masked ones. Its mean over counts and
    ranks is an upper bound on -log p."""
    inputs, targets = mask_symbols(windows, counts, ranks, mask_id(model.cfg))
    return model.loss(inputs, targets, reduction="none").sum(1) * (ranks.shape[1] / counts)


@torch.no_grad()
def fill_in(
    model: GPT, prompts: Tensor, places: int, *, passes: int, rng: torch.Generator, temperature: float = 1.0
) -> Tensor:
    """(W, P + T) ids: T = `places` symbols after each prompt (W, P), sampled in random order in `passes` passes of
    nearly equal size.

    ConfigError for passes outside 1..T, and for a window longer than the model's block."""
    mask, W, P = mask_id(model.cfg), *prompts.shape
    if not 1 <= passes <= places:
        raise ConfigError(
            f"{passes} passes for {places} symbols; required 1 to {places}: a pass fills in at least one symbol"
        )
    how, device = generate.Truncation(temperature=temperature), prompts.device
    ids = torch.cat((prompts, prompts.new_full((W, places), mask)), dim=1)
    ranks = random_ranks(W, places, rng).to(device)
    edges = [places * i // passes for i in range(passes + 1)]
    for low, high in zip(edges, edges[1:]):
        chosen = (ranks >= low) & (ranks < high)  # (W, T)
        at = torch.cat((chosen.new_zeros(W, P), chosen), dim=1).nonzero(as_tuple=True)
        logits = torch.nn.functional.linear(model.hidden(ids)[at], model.head_weight()).float()
        logits[:, mask:] = -torch.inf
        u = torch.rand(len(logits), generator=rng, dtype=torch.float64).to(device)
        ids[at] = generate.draw(logits, how, u)[0]
    return ids
