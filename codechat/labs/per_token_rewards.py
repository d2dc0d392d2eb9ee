"""Per-token rewards: G draws at each of T places of a window of text, and their advantages.

A draw reads the policy's own symbols, as in sampling (G rows for each window), or the text's, as in supervised training:
then the G draws of a place share one row, and a draw's own reward is its whole return. The expected reward of such a
place is p, the probability of its correct symbol, and its gradient p times that of log p.

Shapes: W windows of P + T symbols, G draws; R rows of S draws at T places: (W G, 1, T) for `own`, (W, G, T) for `text`;
V vocabulary, D width. Log-probabilities and entropies in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models import generate
from codechat.models.gpt import GPT
from codechat.rl.advantages import Baseline, group_advantages


@dataclass(frozen=True)
class TokenRewardBatch:
    """The draws of some windows."""

    inputs: Tensor  # (R, P + T - 1) of the model, whose last T states predict
    drawn: Tensor  # (R, S, T)
    logprobs: Tensor  # (R, S, T)
    truth: Tensor  # (R, 1, T) the text's symbols
    truth_logprobs: Tensor  # (R, 1, T) theirs in the contexts of the rows
    group_size: int

    @property
    def before(self) -> Tensor:
        """(R, 1, T) the symbol before each place."""
        return self.inputs[:, None, -self.drawn.shape[2] :]

    def rows(self, windows: Sequence[int]) -> Tensor:
        """Numbers of the rows of these windows, in this order."""
        per_window = self.group_size // self.drawn.shape[1]
        return torch.arange(len(self.inputs)).view(-1, per_window)[list(windows)].flatten()

    def take(self, rows: Tensor) -> TokenRewardBatch:
        tensors = (self.inputs, self.drawn, self.logprobs, self.truth, self.truth_logprobs)
        return TokenRewardBatch(*(x[rows] for x in tensors), self.group_size)


def states(model: GPT, inputs: Tensor, places: int) -> Tensor:
    """(R, T, D): the states that predict the last T places."""
    return model.hidden(inputs)[:, -places:]


def symbol_logprobs(model: GPT, inputs: Tensor, hidden: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (R, S, T) of drawn (R, S, T) given states (R, T, D), and the entropy of each place (R, T)."""
    R, S, T = drawn.shape
    wide = hidden[:, None].expand(R, S, T, hidden.shape[-1]).flatten(0, 1)
    logprobs, entropy = model.token_logprobs(inputs, drawn.flatten(0, 1), hidden=wide)
    return logprobs.view(R, S, T), entropy.view(R, S, T)[:, 0]


@torch.no_grad()
def draw_fed_by_text(model: GPT, windows: Tensor, places: int, group_size: int, uniforms: Tensor) -> TokenRewardBatch:
    """G draws at each of the last `places` symbols of windows (W, P + T), in the text's context. uniforms: (W, G, T)."""
    inputs, truth = windows[:, :-1], windows[:, None, -places:]
    hidden = states(model, inputs, places)
    logits = F.linear(hidden.flatten(0, 1), model.head_weight()).float()  # (W T, V)
    logits[:, model.cfg.n_ids :] = -torch.inf
    drawn = [generate.draw(logits.clone(), generate.Truncation(), uniforms[:, g].flatten()) for g in range(group_size)]
    ids, logprobs = (torch.stack(x).view(group_size, len(windows), places).transpose(0, 1) for x in zip(*drawn))
    return TokenRewardBatch(inputs, ids, logprobs, truth, symbol_logprobs(model, inputs, hidden, truth)[0], group_size)


@torch.no_grad()
def draw_fed_by_itself(
    model: GPT, windows: Tensor, places: int, group_size: int, *, seed: int, first: int = 0
) -> TokenRewardBatch:
    """G continuations of each window's first P symbols by `places` symbols, compared with its last T.

    Sampling depends on seed and first + the window's index."""
    keys, prompts = range(first, first + len(windows)), windows[:, :-places].tolist()
    done = generate.sample(model, prompts, max_new_tokens=places, samples_per_prompt=group_size, seed=seed, keys=keys)
    drawn = torch.tensor([c.ids for c in done], device=windows.device)  # (W G, T)
    logprobs = torch.tensor([c.logprobs for c in done], device=windows.device)
    rows = windows.repeat_interleave(group_size, 0)
    inputs, truth = torch.cat((rows[:, :-places], drawn[:, :-1]), dim=1), rows[:, None, -places:]
    truth_logprobs, _ = symbol_logprobs(model, inputs, states(model, inputs, places), truth)
    return TokenRewardBatch(inputs, drawn[:, None], logprobs[:, None], truth, truth_logprobs, group_size)


def group_by_place(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards (R, S, T) as (W T, G): the G draws of one place of one window in a row."""
    return rewards.view(-1, group_size, rewards.shape[-1]).transpose(1, 2).flatten(0, 1)


def place_advantages(rewards: Tensor, group_size: int, baseline: Baseline) -> Tensor:
    """Advantages (R, S, T) of rewards (R, S, T): each draw against the other draws of its place."""
    advantages = group_advantages(group_by_place(rewards, group_size), baseline)  # (W T, G)
    return advantages.view(-1, rewards.shape[-1], group_size).transpose(1, 2).reshape(rewards.shape)
