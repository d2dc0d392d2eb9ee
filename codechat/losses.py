"""What is minimised: masked reductions, the policy-gradient loss, and estimators of the KL divergence. Pure
functions of tensors.

Every mean over tokens divides by a count that the caller passes in: the number of tokens in the *whole*
optimizer step, over all microbatches and ranks. Then accumulating microbatches, adding padding or splitting
over ranks changes nothing.

Left out: clipped ratios, value losses and preference losses; reference-model KL inside the loss.

Shapes: B sequences, T tokens. Log-probabilities in nats. Masks are 1 where a token counts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from codechat.config import ConfigError


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x where mask is set. `where`, not a product: a NaN under a zero mask must not survive."""
    return torch.where(mask.bool(), x, torch.zeros_like(x)).sum()


def masked_mean(x: Tensor, mask: Tensor, count: float | Tensor | None = None) -> Tensor:
    """Masked sum over `count` tokens (default: those of the mask; 0 of an empty mask)."""
    return masked_sum(x, mask) / (mask.sum().clamp(min=1) if count is None else count)


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor, count: float | Tensor | None = None) -> Tensor:
    """REINFORCE: -mean over tokens of advantage x log pi (Williams 1992; Sutton & Barto, 2nd ed., section
    13.4).

    logprobs (B, T) carry gradient; advantages (B, T) or (B, 1) must not. Divides by the tokens of the whole
    step, not by each sequence's length, so a long completion weighs by its tokens (Dr. GRPO,
    arXiv:2503.20783, section 3)."""
    return -masked_mean(logprobs * advantages.detach(), mask, count)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Per-token estimate (B, T) of KL(policy || reference) from tokens that the policy sampled (Schulman,
    "Approximating KL divergence").

    With r = ref / policy: k1 = -log r, unbiased, can be negative; k2 = (log r)^2 / 2, biased, low variance;
    k3 = r - 1 - log r, unbiased and never negative. These are estimates to *log*: differentiating k1 as a
    loss has zero mean gradient."""
    log_r = ref_logprobs - logprobs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r.square() / 2
    if kind == "k3":
        return log_r.expm1() - log_r
    raise ConfigError(f"KL estimator {kind!r}; required: k1, k2 or k3")
