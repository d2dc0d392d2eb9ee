"""Exact policy gradients in a world small enough to enumerate, to measure the bias and variance
of every estimator.

A text has up to `length` letters and ends with the stop symbol, or at full length. The policy
is a table with a row of logits per prefix, so expectations are sums over all texts. An
estimator takes groups of texts, as a training step does, and returns the gradient of the
library's own loss for each group. Its mean over *all* groups, weighted by their probabilities,
minus the true gradient is its bias.

    world = World()
    theta = world.policy(seed=0)
    g = world.gradient(theta)                                         # d expected reward / d theta
    m = expectation(world, theta, ESTIMATORS["grpo"], group_size=2)   # the mean over all groups of two
    cosine(m, g)

Shapes: S texts, T tokens, K prefixes, V symbols (0 = stop), D = K x V parameters; N groups of G
texts. All is float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from codechat.rl import losses
from codechat.rl.advantages import estimate_gae, group_advantages
from codechat.rl.kinds import Aggregation, Baseline, KLKind

LETTERS = "ab"


def staircase(text: str, target: str = "abba") -> float:
    """0.2 for each correct letter from the start, 1 for the target: partial credit, as of a
    task's tiers."""
    correct = next(
        (i for i, (a, b) in enumerate(zip(text, target)) if a != b), min(len(text), len(target))
    )
    return 1.0 if text == target else 0.2 * correct


class World:
    """All texts of up to `length` letters and their rewards, as tensors."""

    def __init__(self, length: int = 4, reward: Callable[[str], float] = staircase) -> None:
        texts: list[str] = []
        for n in range(length + 1):
            texts += map("".join, product(LETTERS, repeat=n))
        self.texts = tuple(texts)
        prefixes = [text for text in self.texts if len(text) < length]
        numbers = {prefix: k for k, prefix in enumerate(prefixes)}
        self.n_states = len(prefixes)
        shape = (len(self.texts), length)
        # (S, T) number of the prefix before each token
        self.states = torch.zeros(shape, dtype=torch.long)
        self.symbols = torch.zeros(shape, dtype=torch.long)  # (S, T) 0 = stop
        self.mask = torch.zeros(shape, dtype=torch.bool)
        for s, text in enumerate(self.texts):
            for t in range(min(len(text) + 1, length)):  # a full text has no stop symbol
                self.states[s, t] = numbers[text[:t]]
                self.mask[s, t] = True
                self.symbols[s, t] = 1 + LETTERS.index(text[t]) if t < len(text) else 0
        rewards = [float(reward(text)) for text in self.texts]
        self.rewards = torch.tensor(rewards, dtype=torch.float64)  # (S,)

    def policy(self, seed: int = 0, scale: float = 0.7) -> Tensor:
        """(K, V) logits of a random policy; scale 0 = uniform."""
        rng = torch.Generator().manual_seed(seed)
        return scale * torch.randn(
            self.n_states, len(LETTERS) + 1, generator=rng, dtype=torch.float64
        )

    def logprobs(self, theta: Tensor) -> Tensor:
        """(S, T) log-probability of each token, 0 after the end of a text."""
        return torch.where(self.mask, theta.log_softmax(-1)[self.states, self.symbols], 0.0)

    def probabilities(self, theta: Tensor) -> Tensor:
        """(S,) probability of each text; they add up to 1."""
        return self.logprobs(theta).sum(1).exp()

    def expected_reward(self, theta: Tensor) -> Tensor:
        return (self.probabilities(theta) * self.rewards).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """(D,) of the expected reward."""
        return torch.func.grad(self.expected_reward)(theta).flatten()

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """KL(theta || other) of whole texts, nats."""
        return (
            self.probabilities(theta) * (self.logprobs(theta) - self.logprobs(other)).sum(1)
        ).sum()

    def kl_gradient(self, theta: Tensor, other: Tensor) -> Tensor:
        """(D,) of KL(theta || other) with respect to theta."""
        return torch.func.grad(self.kl)(theta, other).flatten()

    def values(self, theta: Tensor) -> Tensor:
        """(S, T) expected reward at the prefix before each token: the exact critic."""
        p = self.probabilities(theta)
        return torch.where(
            self.mask, (self._per_state(p * self.rewards) / self._per_state(p))[self.states], 0.0
        )

    def _per_state(self, weights: Tensor) -> Tensor:
        """(K,) sums of the weights (S,) of the texts that pass each prefix."""
        return torch.bincount(
            self.states[self.mask], weights[:, None].expand_as(self.mask)[self.mask]
        )

    def scores(self, theta: Tensor) -> Tensor:
        """(S, T, D): the gradient of each token's log-probability."""
        return torch.func.jacrev(self.logprobs)(theta).flatten(2)

    def sample(self, theta: Tensor, groups: int, group_size: int, seed: int = 0) -> Tensor:
        """(N, G) indices of texts sampled from the policy: fixed rollouts for comparing
        estimators."""
        rng = torch.Generator().manual_seed(seed)
        p = self.probabilities(theta)
        return torch.multinomial(p, groups * group_size, replacement=True, generator=rng).view(
            groups, group_size
        )


@dataclass(frozen=True)
class Groups:
    """The input of a loss: N groups of G texts, flattened to B = N x G rows."""

    world: World
    theta: Tensor
    old: Tensor  # the policy that sampled
    at: Tensor  # (N, G) indices of texts

    def rows(self, table: Tensor) -> Tensor:
        return table[self.at.flatten()]

    @property
    def rewards(self) -> Tensor:
        return self.world.rewards[self.at]

    @property
    def mask(self) -> Tensor:
        return self.rows(self.world.mask)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)


# (groups, logprobs (B, T) with gradient) -> weighted loss of each token (B, T)
Loss = Callable[[Groups, Tensor], Tensor]


def group_loss(
    *,
    baseline: Baseline,
    aggregation: Aggregation,
    level: Literal["token", "sequence"] = "token",
    clip_eps: tuple[float, float] = (1e9, 1e9),
) -> Loss:
    """The family of REINFORCE and GRPO: a group baseline, a loss aggregation, a clipped ratio.
    Each group is a step of its own."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        N, G = groups.at.shape
        advantage = group_advantages(groups.rewards, baseline).view(-1, 1)
        old = groups.rows(groups.world.logprobs(groups.old))
        ratio = losses.policy_ratio(logprobs, old, groups.mask, level)
        found = losses.clipped_policy_loss(ratio, advantage, *clip_eps)
        if aggregation == "token":  # over the tokens of each group
            return found / groups.lengths.view(N, G).sum(1).repeat_interleave(G)[:, None].double()
        lengths = groups.lengths.double()
        return found * losses.token_weights(
            lengths, aggregation, n_sequences=G, n_tokens=0.0, max_tokens=1
        )

    return loss


def gae_loss(lam: float, value_error: float = 0.0) -> Loss:
    """PPO at ratio 1: GAE over the exact values plus value_error times a fixed pattern."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        exact = groups.world.values(groups.theta)
        values = groups.rows(exact + value_error * torch.cos(groups.world.states.double()))
        rewards = torch.zeros_like(values)
        rewards[torch.arange(len(values)), groups.lengths - 1] = groups.rewards.flatten()
        advantage, _ = estimate_gae(rewards, values, groups.mask, lam=lam)
        ratio = losses.policy_ratio(logprobs, logprobs.detach(), groups.mask)
        return losses.clipped_policy_loss(ratio, advantage) / groups.at.shape[1]

    return loss


def expert_loss(groups: Groups, logprobs: Tensor) -> Tensor:
    """Expert iteration: the mean negative log-probability of the best texts of each group whose
    rewards differ."""
    differ = (groups.rewards != groups.rewards[:, :1]).any(1, keepdim=True)
    best = (groups.rewards == groups.rewards.amax(1, keepdim=True)) & differ
    tokens = (groups.lengths.view_as(best) * best).sum(1, keepdim=True).clamp(min=1)
    return -logprobs * (best / tokens).view(-1, 1)


ESTIMATORS: Mapping[str, Loss] = {
    "no baseline": group_loss(baseline="none", aggregation="constant"),
    "group mean": group_loss(baseline="mean", aggregation="constant"),
    "leave one out": group_loss(baseline="leave_one_out", aggregation="constant"),
    "grpo": group_loss(baseline="zscore", aggregation="sequence", clip_eps=(0.2, 0.2)),
    "dr_grpo": group_loss(baseline="mean", aggregation="constant", clip_eps=(0.2, 0.2)),
    "dapo": group_loss(baseline="zscore", aggregation="token", clip_eps=(0.2, 0.28)),
    "gspo": group_loss(
        baseline="zscore",
        aggregation="sequence",
        level="sequence",
        clip_eps=(3e-4, 4e-4),
    ),
    "ppo, exact value": gae_loss(lam=0.95),
    "ppo, wrong value": gae_loss(lam=0.95, value_error=0.3),
    "expert iteration": expert_loss,
}


def kl_in_loss(kind: KLKind, reference: Tensor) -> Loss:
    """The KL estimate as a loss over tokens: its negative gradient estimates that of KL(policy
    || reference)."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        return (
            -losses.kl_estimate(logprobs, groups.rows(groups.world.logprobs(reference)), kind)
            / groups.at.shape[1]
        )

    return loss


def group_gradients(
    world: World,
    theta: Tensor,
    loss: Loss,
    at: Tensor,
    old: Tensor | None = None,
) -> Tensor:
    """(N, D) minus the gradient of the loss of each group of texts `at` (N, G): the direction
    of a step."""
    logprobs = world.logprobs(theta)[at.flatten()].detach().requires_grad_()
    groups = Groups(world, theta, theta if old is None else old, at)
    total = losses.masked_sum(loss(groups, logprobs), groups.mask)
    (gradient,) = torch.autograd.grad(total, logprobs)  # (B, T) weight of each token's score
    scores = world.scores(theta)
    whole = torch.zeros(*at.shape[:1], scores.shape[2], dtype=torch.float64)
    for g in range(at.shape[1]):
        whole -= torch.einsum("nt,ntd->nd", gradient.view(*at.shape, -1)[:, g], scores[at[:, g]])
    return whole


def every_group(world: World, group_size: int, theta: Tensor) -> tuple[Tensor, Tensor]:
    """All S^G groups (N, G) and the probability of each (N,)."""
    at = torch.cartesian_prod(*[torch.arange(len(world.texts))] * group_size).view(-1, group_size)
    return at, world.probabilities(theta)[at].prod(1)


def expectation(
    world: World,
    theta: Tensor,
    loss: Loss,
    group_size: int = 2,
    old: Tensor | None = None,
) -> Tensor:
    """(D,) the exact mean of an estimator's gradient over all groups that the sampling policy
    can draw."""
    at, p = every_group(world, group_size, theta if old is None else old)
    return p @ group_gradients(world, theta, loss, at, old)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two directions; 0 if one is the zero vector."""
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 1e-30 else 0.0
