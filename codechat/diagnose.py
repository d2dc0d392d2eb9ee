"""Is there a gradient? A verdict over groups of rewards, a sentinel for a running loop, and the share of weights an update changed.

A group whose rewards are all equal has advantage exactly 0 under any group baseline. `judge` counts those groups and says what the
count means before reinforcement learning is paid for; `Sentinel` watches the same number step by step; `weights_changed_bf16` shows
whether updates survive rounding to the precision that inference will use.

    codechat diagnose --ckpt nano/sft --task funcall --data-dir data/nano/calls --groups 64 --group-size 8

Left out: why a reward is wrong (the gold gate and `xray` look at that).

Shapes: P groups (problems), G completions each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from codechat.advantages import zero_variance
from codechat.config import ConfigError
from codechat.estimates import estimate_pass_at_k

Verdict = Literal["SATURATED", "DEAD", "WEAK", "LIVE"]

MIN_GROUPS = 64
SATURATED_ABOVE = 0.85  # share of correct completions
DEAD_BELOW = 0.05  # share of groups with variance
WEAK_BELOW = 0.25

REMEDIES: dict[Verdict, str] = {
    "SATURATED": "the task is solved at this temperature: take harder problems, or filter out those that are always correct",
    "DEAD": "almost no group carries a gradient: train SFT longer on this task, make the reward denser, or take easier problems",
    "WEAK": "few groups carry a gradient: raise --group-size or --temperature, make the reward denser, or filter problems by pass rate",
    "LIVE": "go ahead with RL",
}


@dataclass(frozen=True)
class Diagnosis:
    """What P x G rewards say. Shares are in [0, 1]; reward_std is over all P x G rewards; pass_at maps k to the unbiased estimate."""

    verdict: Verdict
    remedy: str
    n_groups: int
    group_size: int
    frac_zero_std: float
    effective_groups: int
    correct_share: float
    reward_mean: float
    reward_std: float
    pass_at: dict[int, float]

    @property
    def frac_with_variance(self) -> float:
        """Share of groups that carry a gradient: what `Sentinel.update` takes."""
        return self.effective_groups / self.n_groups


def judge(rewards: Tensor, correct: Tensor, *, min_groups: int = MIN_GROUPS) -> Diagnosis:
    """Verdict over rewards (P, G) and exact matches (P, G) bool; the first rule that holds:

    SATURATED: more than 85 % of completions correct. DEAD: under 5 % of groups have variance. WEAK: under 25 %. Else LIVE.
    Raises ConfigError for fewer than `min_groups` groups or groups of one."""
    if rewards.ndim != 2 or rewards.shape != correct.shape:
        raise ConfigError(f"rewards {tuple(rewards.shape)} and correct {tuple(correct.shape)}; required the same (problems, group_size)")
    n_groups, group_size = rewards.shape
    if n_groups < max(1, min_groups):
        raise ConfigError(f"{n_groups} groups; a verdict needs at least {max(1, min_groups)}; sample more (--groups {max(1, min_groups)})")
    if group_size < 2:
        raise ConfigError("group_size 1: a group of one never has variance; set --group-size 2 or more")
    zero_std = int(zero_variance(rewards).sum())
    share = float(correct.double().mean())
    verdict = _verdict(share, (n_groups - zero_std) / n_groups)
    return Diagnosis(
        verdict=verdict, remedy=REMEDIES[verdict], n_groups=n_groups, group_size=group_size, frac_zero_std=zero_std / n_groups,
        effective_groups=n_groups - zero_std, correct_share=share, reward_mean=float(rewards.double().mean()),
        reward_std=float(rewards.double().std(correction=0)), pass_at={k: _pass_at(correct, k) for k in (1, group_size)})


def _verdict(correct_share: float, frac_with_variance: float) -> Verdict:
    if correct_share > SATURATED_ABOVE:
        return "SATURATED"
    if frac_with_variance < DEAD_BELOW:
        return "DEAD"
    return "WEAK" if frac_with_variance < WEAK_BELOW else "LIVE"


def _pass_at(correct: Tensor, k: int) -> float:
    """Mean over problems of the unbiased pass@k, from correct (P, G)."""
    counts = correct.sum(dim=1).tolist()
    return sum(estimate_pass_at_k(correct.shape[1], int(c), k) for c in counts) / len(counts)


class Sentinel:
    """Stops a loop after `patience` DEAD steps in a row. Its state goes into checkpoints, so that a resume does not start the count anew."""

    def __init__(self, patience: int = 20) -> None:
        if patience < 1:
            raise ConfigError(f"patience {patience}; required at least 1 step")
        self.patience = patience
        self.dead_steps = 0

    def update(self, frac_groups_with_variance: float) -> bool:
        """Count one step; True when the loop should stop."""
        self.dead_steps = self.dead_steps + 1 if frac_groups_with_variance < DEAD_BELOW else 0
        return self.dead_steps >= self.patience

    def state(self) -> dict[str, Any]:
        return {"dead_steps": self.dead_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.dead_steps = int(state["dead_steps"])


def bf16_snapshot(model: nn.Module) -> list[Tensor]:
    """Every parameter rounded to bfloat16, copied, in the order of `model.parameters()`."""
    return [p.detach().to(torch.bfloat16, copy=True) for p in model.parameters()]


@torch.no_grad()
def weights_changed_bf16(before: Sequence[Tensor], model: nn.Module) -> float:
    """Share of weights in [0, 1] whose bfloat16 value differs from the snapshot `before`.

    Near 0 after a step: a model kept in bfloat16 would not have moved; float32 masters still collect the update."""
    params = list(model.parameters())
    if [p.shape for p in params] != [b.shape for b in before]:
        raise ConfigError("the snapshot has other shapes than the model; take bf16_snapshot of the same model")
    changed = sum((p.to(torch.bfloat16) != b).sum() for p, b in zip(params, before))
    return float(changed) / max(1, sum(p.numel() for p in params))
