"""From rewards to advantages, and the learned value that PPO compares them with.

Shapes: P problems with G completions each, N = P x G of up to C tokens; B sequences of T tokens."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from codechat.distributed import dist, hardware, numerics, sharding
from codechat.models.gpt import GPT
from codechat.rl import rollout
from codechat.rl.kinds import Baseline, KLKind
from codechat.rl.losses import kl_estimate
from codechat.rl.rollout import RolloutBatch

VALUE_LR = 1e-2  # learning rate of a value head


class KLSettings(Protocol):
    """Settings that a KL penalty on rewards needs."""

    @property
    def kl_coef(self) -> float: ...
    @property
    def kl_kind(self) -> KLKind: ...


class CreditSettings(KLSettings, Protocol):
    """Settings that `credit` needs."""

    @property
    def kl_in(self) -> Literal["loss", "reward"]: ...


class PackingSettings(Protocol):
    """Settings that packing needs."""

    @property
    def row_tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...


def group_advantages(rewards: Tensor, baseline: Baseline = "mean", eps: float = 1e-6) -> Tensor:
    """Advantages (P, G) of rewards (P, G).

    none: the reward itself. mean: minus the group's mean (Dr. GRPO, arXiv:2503.20783).
    leave_one_out: minus the mean of the others (RLOO, arXiv:2402.14740), equal to mean x G / (G
    - 1). zscore: mean over the group's standard deviation (n - 1) + eps (GRPO,
    arXiv:2402.03300, section 4.1.2). All but none give a group of equal rewards exactly 0."""
    if baseline == "none":
        return rewards.clone()
    group = rewards.shape[1]
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # rounding of the mean must not give a group without signal a tiny one, which zscore would
    # blow up
    centred = torch.where(zero_variance(rewards)[:, None], torch.zeros_like(centred), centred)
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return centred * (group / (group - 1))
    # eps bounds groups of nearly equal rewards, whose deviation is almost 0
    return centred / (rewards.std(dim=1, keepdim=True) + eps)


def zero_variance(rewards: Tensor) -> Tensor:
    """(P,) bool: groups of rewards (P, G) that are all equal, which carry no gradient under any
    group baseline."""
    return (rewards == rewards[:, :1]).all(dim=1)


def equal_groups(ranks: Sequence[Tensor]) -> Tensor:
    """(P,) bool: whether the rewards of a group are all equal, of each group of all ranks.
    Groups of one completion are one group together."""
    rewards = torch.cat(list(ranks))
    return zero_variance(rewards if rewards.shape[1] > 1 else rewards.T)


def live_completions(rewards: Tensor) -> Tensor:
    """(P, G) bool, all True or all False: whether rewards differ within any group of any rank. A
    collective."""
    # PPO's advantages are never exactly 0: without this, a step without signal would fit the
    # errors of the value head
    return torch.full(rewards.shape, not bool(equal_groups(dist.gather(rewards)).all()))


def estimate_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) by generalised advantage estimation (arXiv:1506.02438, eq. 16).

    rewards, values (B, T) belong to the state before each token. mask (B, T): tokens that the
    policy wrote; those of an environment are skipped, and the end of a sequence has value 0.
    lam 1: Monte Carlo return minus value; 0: one step ahead."""
    on = mask.bool()
    rewards = torch.where(on, rewards, torch.zeros_like(rewards))
    values = torch.where(on, values, torch.zeros_like(values))
    advantages = torch.zeros_like(rewards)
    running = following = rewards.new_zeros(len(rewards))
    # running: advantage of the next written token; following: its value. Tokens of an environment
    # pass both on unchanged.
    for t in reversed(range(rewards.shape[1])):
        now = on[:, t]
        error = rewards[:, t] + gamma * following - values[:, t]  # (B,) TD residual
        running = torch.where(now, error + gamma * lam * running, running)
        following = torch.where(now, values[:, t], following)
        advantages[:, t] = torch.where(now, running, 0.0)
    return advantages, torch.where(on, advantages + values, torch.zeros_like(values))


def credit(
    cfg: CreditSettings,
    baseline: Baseline,
    batch: RolloutBatch,
    old: Tensor,
    ref: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """GRPO's (P, G) advantages within each group, and a (P, G) mask of those whose reward part is
    not 0. With --kl-in reward, each advantage is reduced by the completion's KL divergence from
    the reference.

    The penalty is centred as the reward is, but not divided by its standard deviation, which is
    tiny if the penalties agree. The mask leaves it out: rounding alone gives completions of equal
    reward slightly different penalties."""
    advantage = group_advantages(batch.rewards, baseline)
    live = advantage != 0
    if ref is None or cfg.kl_in == "loss":
        return advantage, live
    penalty = (kl_estimate(old, ref, cfg.kl_kind).cpu() * batch.mask()).sum(1).view_as(advantage)
    centred = group_advantages(penalty, "mean" if baseline == "zscore" else baseline)
    return advantage - cfg.kl_coef * centred, live


def token_rewards(cfg: KLSettings, batch: RolloutBatch, old: Tensor, ref: Tensor | None) -> Tensor:
    """PPO's (N, C) reward of each token: the task's at the last one, less the KL penalty of
    each (arXiv:2203.02155, eq. 2)."""
    # a prompt that fills the block leaves an empty completion
    rows = batch.lengths().nonzero()[:, 0]
    rewards = torch.zeros(old.shape)
    rewards[rows, batch.lengths()[rows] - 1] = batch.rewards.flatten()[rows]
    rewards = hardware.send(rewards, old.device)
    return rewards if ref is None else rewards - cfg.kl_coef * kl_estimate(old, ref, cfg.kl_kind)


def kept_completions(batch: RolloutBatch, keep: str) -> Tensor:
    """(P, G) bool. correct: exact matches. best: the completions of the largest reward in each
    group whose rewards differ."""
    if keep == "correct":
        return batch.correct
    best = batch.rewards == batch.rewards.amax(1, keepdim=True)
    return best & ~zero_variance(batch.rewards)[:, None]


# ---- a learned value, for PPO


class ValueHead(nn.Linear):
    """(..., D) states -> (...) values. It starts at 0. It computes in float32 also under
    autocast, since the rounding error of a bfloat16 value would count as an advantage."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        # a value of 0 says nothing yet: the first advantages come from the rewards alone
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() * self.weight[0]).sum(-1) + self.bias

    def state(self) -> dict[str, Tensor]:
        """A copy that later steps do not change: checkpoints are written beside training."""
        return {name: value.clone() for name, value in self.state_dict().items()}

    load_state = nn.Linear.load_state_dict


@torch.no_grad()
def values_of(cfg: PackingSettings, model: GPT, head: ValueHead, batch: RolloutBatch) -> Tensor:
    """(N, C): the value before each sampled token, 0 behind a completion's end. A collective
    where the model is sharded."""
    device = hardware.device()
    with sharding.whole(model) as reader:

        def values(packed: rollout.Packed) -> Tensor:
            where = packed.where()
            with numerics.autocast():
                hidden = reader.hidden(packed.ids, positions=where["positions"], mask=where["mask"])
            return head(hidden)

        shapes = rollout.row_shapes(batch, cfg.row_tokens, cfg.rows, device)
        return rollout.table_of(batch, values, device, shapes)


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Share of the variance of the returns that the values predict, over all ranks; 0 if the
    returns do not vary. A collective."""
    sums = [
        x.double().sum()
        for x in (torch.ones_like(returns), returns, returns**2, (returns - values) ** 2)
    ]
    n, r1, r2, unexplained = dist.sum_(torch.stack(sums).cpu()).tolist()
    # this difference cancels in float32, hence the float64 sums
    # n is 0 if all completions are empty
    variance = r2 - r1**2 / max(1.0, n)
    return 1 - unexplained / variance if variance > 0 else 0.0
