"""Masked denoising: a model that sees both sides fills in masked symbols, and so writes a text in any order, several symbols at a time.

Training masks m of a window's T symbols, m uniform in 1..T, and weighs their mean cross-entropy by T: order-agnostic autoregression
(Hoogeboom et al., arXiv:2110.02037, eq. 4), which is masked diffusion with its noise level integrated out (LLaDA, arXiv:2502.09992, eq. 14).
Averaged over m and places it is an upper bound on the negative log-likelihood, so it may stand beside a causal model's cross-entropy. The first
`prompt_len` symbols of a window are given and never masked.

Sampling starts from masks only and fills places in random order; with as many passes as symbols it draws from the model's own distribution,
with fewer the symbols of one pass do not see each other.

Left out: remasking, sampling by confidence (it narrows what is drawn), time conditioning (the model can count its masks).

Shapes: W windows of P + T symbols, V owned vocabulary. The mask is the last owned id: `GPTConfig(causal=False, n_tags=1)`.
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
    """The id that stands for a masked symbol. ConfigError for a model that cannot denoise."""
    if cfg.causal or cfg.n_tags < 1:
        raise ConfigError(
            f"causal={cfg.causal} with n_tags {cfg.n_tags}; a denoising model must see both sides and own a mask: causal=False, n_tags=1"
        )
    return cfg.owned - 1


def mask_counts(numbers: Tensor, total: int, places: int, offset: float) -> Tensor:
    """(W,) how many symbols of windows `numbers`, of `total`, are masked: 1..places, evenly spread from `offset` in [0, 1) on. Over a uniform offset
    each count is as likely as another; even spread takes most of the noise out of a batch (arXiv:2107.00630, appendix I.1)."""
    level = (offset + numbers.double() / total) % 1
    return 1 + (level * places).long()


def random_ranks(count: int, places: int, rng: torch.Generator) -> Tensor:
    """(W, T): for each window a random order of its places, as the number of each place in it."""
    return torch.rand(count, places, generator=rng, dtype=torch.float64).argsort(1)


def mask_symbols(windows: Tensor, counts: Tensor, ranks: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (W, P + T): of the last T symbols those of rank below counts (W,) are masked, and they alone are targets (else -100)."""
    asked = ranks < counts[:, None]  # (W, T)
    asked = torch.cat((asked.new_zeros(len(windows), windows.shape[1] - ranks.shape[1]), asked), dim=1)
    return windows.masked_fill(asked, mask), windows.masked_fill(~asked, IGNORE)


def bound(model: GPT, windows: Tensor, counts: Tensor, ranks: Tensor) -> Tensor:
    """(W,) nats of each window's T symbols: T x the mean cross-entropy of its masked ones. Its mean over counts and ranks bounds -log p from above."""
    inputs, targets = mask_symbols(windows, counts, ranks, mask_id(model.cfg))
    return model.loss(inputs, targets, reduction="none").sum(1) * (ranks.shape[1] / counts)


@torch.no_grad()
def fill_in(
    model: GPT, prompts: Tensor, places: int, *, passes: int, rng: torch.Generator, temperature: float = 1.0
) -> Tensor:
    """(W, P + T) ids: T = `places` symbols after each prompt (W, P), drawn in random order in `passes` passes of nearly equal size.

    ConfigError for passes outside 1..T, and for a window beyond the model's block."""
    mask, W, P = mask_id(model.cfg), *prompts.shape
    if not 1 <= passes <= places:
        raise ConfigError(
            f"{passes} passes for {places} symbols; required 1 to {places}: a pass draws at least one symbol"
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
