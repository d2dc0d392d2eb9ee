"""From rewards to advantages: pure functions. Shapes: P problems with G completions each; B sequences of T tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from codechat.core.errors import ConfigError

Baseline = Literal["none", "mean", "leave_one_out", "zscore"]


def group_advantages(rewards: Tensor, baseline: Baseline = "mean", eps: float = 1e-6) -> Tensor:
    """Advantages (P, G) of rewards (P, G).

    none: the reward itself. mean: minus the group's mean (Dr. GRPO, arXiv:2503.20783). leave_one_out: minus the mean of
    the others (RLOO, arXiv:2402.14740), equal to mean x G / (G - 1). zscore: mean over the group's standard deviation
    (n - 1) + eps (GRPO, arXiv:2402.03300, section 4.1.2). In the last three a group of equal rewards gives exactly 0."""
    _, group = rewards.shape
    if baseline == "none":
        return rewards.clone()
    if group < 2:
        raise ConfigError(f"group_size {group} with baseline {baseline!r} always gives 0; set --group-size 2 or more")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # rounding of the mean must not give a group without signal a tiny one, which zscore would blow up
    centred = torch.where(zero_variance(rewards)[:, None], torch.zeros_like(centred), centred)
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return centred * (group / (group - 1))
    if baseline == "zscore":
        return centred / (rewards.std(dim=1, keepdim=True) + eps)
    raise ConfigError(f"baseline {baseline!r}; required: none, mean, leave_one_out or zscore")


def zero_variance(rewards: Tensor) -> Tensor:
    """(P,) bool: groups of rewards (P, G) that are all equal, which carry no gradient under any group baseline."""
    return (rewards == rewards[:, :1]).all(dim=1)


def estimate_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) by generalised advantage estimation (arXiv:1506.02438, eq. 16).

    rewards, values (B, T) belong to the state before each token. mask (B, T): tokens that the policy wrote; those of an
    environment are skipped, and the end of a sequence has value 0. lam 1: Monte Carlo return minus value; 0: one step ahead."""
    on = mask.bool()
    rewards, values = (torch.where(on, x, torch.zeros_like(x)) for x in (rewards, values))
    advantages = torch.zeros_like(rewards)
    running = following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        now = on[:, t]
        running = torch.where(now, rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running, running)
        following = torch.where(now, values[:, t], following)
        advantages[:, t] = torch.where(now, running, 0.0)
    return advantages, torch.where(on, advantages + values, torch.zeros_like(values))
