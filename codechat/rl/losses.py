"""The losses of reinforcement learning: pure functions of tensors.

Every mean over tokens divides by a count that the caller passes: the tokens (or sequences) of
the *whole* optimizer step, so that gradient accumulation, padding and the number of ranks
change nothing.

Shapes: B sequences, T tokens. Log-probabilities in nats. Masks are 1 where a token counts.
"""

from typing import Literal

import torch
from torch import Tensor

from codechat.rl.kinds import Aggregation, KLKind

# Bounds of log ratios that are exponentiated. exp overflows float32 at 88, and the squares of
# its gradient, which a gradient norm adds up, at 44; below -87 the reciprocal overflows, which
# the gradient of a ratio's logarithm needs.
SMALLEST_LOG_RATIO = -60.0
LARGEST_LOG_RATIO = 30.0


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x where mask is set. `where`, not a product, so that a NaN outside the mask does
    not reach the sum."""
    return torch.where(mask.bool(), x, torch.zeros_like(x)).sum()


def masked_mean(x: Tensor, mask: Tensor, count: float | Tensor | None = None) -> Tensor:
    """Masked sum divided by `count` tokens. count: default the tokens of the mask; an empty mask
    then gives 0."""
    return masked_sum(x, mask) / (mask.sum().clamp(min=1) if count is None else count)


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios cut to SMALLEST_LOG_RATIO .. LARGEST_LOG_RATIO, so that exp and its gradient
    stay finite. Only the value is cut: beyond a bound the gradient is that at the bound, not 0."""
    cut = log_ratio.detach().clamp(SMALLEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.where(cut == log_ratio, log_ratio, cut + (log_ratio - log_ratio.detach()))


def token_weights(
    lengths: Tensor,
    how: Aggregation,
    n_sequences: float,
    n_tokens: float,
    max_tokens: int,
) -> Tensor:
    """Loss aggregation: (B, 1) weights of the tokens of sequences of `lengths` (B,); counts are
    of the whole step.

    sequence: mean over a sequence's tokens, then over sequences (GRPO, arXiv:2402.03300, eq.
    3). token: mean over all tokens (DAPO, arXiv:2503.14476, eq. 8). constant: sum over tokens /
    `max_tokens`, mean over sequences (Dr. GRPO, arXiv:2503.20783, section 3.2); only this one
    leaves the policy gradient unbiased up to a factor."""
    # counts of a mask are integers, whose reciprocal `new_full` would round to 0
    lengths = lengths if lengths.is_floating_point() else lengths.float()
    if how == "sequence":
        return 1 / (lengths.clamp(min=1)[:, None] * n_sequences)
    share = 1 / max(1.0, n_tokens) if how == "token" else 1 / (n_sequences * max_tokens)
    return lengths.new_full((len(lengths), 1), share)


def policy_gradient_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    count: float | Tensor | None = None,
) -> Tensor:
    """REINFORCE: -mean over tokens of advantage x log pi, scalar (Williams 1992; Sutton &
    Barto, 2nd ed., sec. 13.4).

    logprobs (B, T) carry gradient; advantages (B, T) or (B, 1) do not. Divides by the tokens of
    the whole step, so every token has the same weight (Dr. GRPO, arXiv:2503.20783, section
    3)."""
    return -masked_mean(logprobs * advantages.detach(), mask, count)


def policy_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """(B, T) new / old policy of each token, or the geometric mean of its sequence (GSPO,
    arXiv:2507.18071, eq. 7); see `bounded` for ratios above 1e13."""
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs, torch.zeros_like(logprobs))
    if level == "sequence":
        log_ratio = (
            log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ).expand_as(log_ratio)
    return bounded(log_ratio).exp()


def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(B, T) min(pi / mu, cap) of each token, pi the trainer's and mu the sampler's
    probability, no gradient; 1 if `cap` is 0. For a sampler that computes other probabilities
    than the trainer, or is some steps behind.

    Truncated importance sampling (Ionides 2008), per token as in Yao et al. 2025 ("Your
    efficient RL framework secretly brings you off-policy RL training"). The cap bounds the
    variance and biases towards the sampler. Statistics are sums over tokens: `mismatch_kl`, k3 of
    KL(mu || pi), and `importance_capped`, the number of capped weights."""
    log_ratio = torch.where(
        mask.bool(), logprobs.detach() - sampler_logprobs, torch.zeros_like(sampler_logprobs)
    )
    ratio = bounded(log_ratio).exp()
    stats = dict(
        mismatch_kl=(bounded(log_ratio).expm1() - log_ratio).sum(),
        importance_capped=(ratio > cap).sum() if cap else ratio.new_zeros(()),
    )
    return ratio.clamp(max=cap) if cap else torch.ones_like(ratio), stats


def clipped_policy_loss(
    ratio: Tensor,
    advantages: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Tensor:
    """Per token -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), (B, T), of ratios (B, T) and
    advantages (B, T|1).

    PPO (arXiv:1707.06347, eq. 7) and GRPO (arXiv:2402.03300, eq. 3); separate bounds are DAPO's
    clip-higher (arXiv:2503.14476, eq. 10), ratios of whole sequences GSPO (arXiv:2507.18071,
    eq. 5). A token has no gradient only if its ratio has passed the bound in the direction in
    which A pushes it."""
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)


def weighted_policy_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """Per token -clip(r, 1 - eps_low, 1 + eps_high) A log r, (B, T), with no gradient through
    the clipped r: CISPO (arXiv:2506.13585, eq. 4), whose log pi is log r plus a constant. Every
    token keeps a gradient."""
    return -ratio.detach().clamp(1 - eps_low, 1 + eps_high) * advantages.detach() * ratio.log()


@torch.no_grad()
def clip_statistics(
    ratio: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float,
    eps_high: float,
) -> dict[str, Tensor]:
    """Sums over tokens: `clipped_low` (A < 0, r < 1 - eps_low), `clipped_high` (A > 0, r > 1 +
    eps_high), `kl_old` (k3 of KL(old || new)); and `ratio_max`, the maximum."""
    on = mask.bool()
    return dict(
        clipped_low=((ratio < 1 - eps_low) & (advantages < 0) & on).sum(),
        clipped_high=((ratio > 1 + eps_high) & (advantages > 0) & on).sum(),
        kl_old=masked_sum(kl_estimate(old_logprobs, logprobs, "k3"), mask),
        # a microbatch of padding alone has no completion, and amax of nothing raises
        ratio_max=torch.where(on, ratio, torch.zeros_like(ratio)).amax()
        if on.numel()
        else ratio.new_zeros(()),
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_eps: float = 0.2
) -> Tensor:
    """(B, T): half the squared error of values against returns, or that of values clipped to
    old_values +- clip_eps if larger (PPO's implementation, Huang et al. 2022, "The 37
    implementation details", 9)."""
    clipped = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """(B, T) estimates in nats of KL(policy || reference) from tokens that the policy sampled
    (Schulman, "Approximating KL divergence").

    With r = ref / policy: k1 = -log r, unbiased, can be negative; k2 = (log r)^2 / 2, biased,
    low variance; k3 = r - 1 - log r, unbiased and never negative. As a *loss*, k1's gradient is
    noise of mean zero, k2's is that of the next token's KL, k3's that of KL(reference ||
    policy). As a *reward*, without gradient through it, k1 has the gradient of the whole KL, k2
    and k3 do not. `codechat_lab.instruments.exact_gradients` computes them."""
    log_r = ref_logprobs - logprobs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r.square() / 2
    return bounded(log_r).expm1() - log_r
