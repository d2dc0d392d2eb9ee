"""From rewards to advantages: pure functions over groups of completions of one prompt.

Shapes: rewards (P, G), P problems with G completions each. Nothing here looks at tokens.

Left out: anything that needs a value model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from codechat.config import ConfigError

Baseline = Literal["none", "mean", "leave_one_out", "zscore"]


def group_advantages(rewards: Tensor, baseline: Baseline = "mean", eps: float = 1e-6) -> Tensor:
    """Advantages (P, G) of rewards (P, G).

    none: the reward itself. mean: minus the group's mean (Dr. GRPO, arXiv:2503.20783). leave_one_out: minus
    the mean of the others (RLOO, arXiv:2402.14740), which is mean's times G / (G - 1). zscore: mean's over
    the group's standard deviation + eps (GRPO, arXiv:2402.03300, section 4.1.2). A group whose rewards are
    all equal gives exactly 0 in the last three."""
    if rewards.ndim != 2:
        raise ConfigError(f"rewards of shape {tuple(rewards.shape)}; required (problems, group_size)")
    group = rewards.shape[1]
    if baseline == "none":
        return rewards.clone()
    if group < 2:
        raise ConfigError(f"group_size {group} with baseline {baseline!r} gives advantage 0 always; set --group-size 2 or more")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # float rounding of the mean must not turn a group without signal into a tiny signal that zscore then
    # blows up
    centred = torch.where(zero_variance(rewards)[:, None], torch.zeros_like(centred), centred)
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return centred * (group / (group - 1))
    if baseline == "zscore":
        return centred / (rewards.std(dim=1, keepdim=True) + eps)
    raise ConfigError(f"baseline {baseline!r}; required: none, mean, leave_one_out or zscore")


def zero_variance(rewards: Tensor) -> Tensor:
    """(P,) bool: groups whose rewards are all equal, which carry no gradient under any group baseline."""
    return (rewards == rewards[:, :1]).all(dim=1)
