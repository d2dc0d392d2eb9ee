"""A world of characters small enough to enumerate: the exact expected reward, its gradient and KL divergences, beside every estimator of them.

A text is up to `length` letters and ends where the policy writes the stop symbol, or is full. The policy is a table, one row of logits for
each prefix, so every text's probability is known and sums run over all texts: nothing here is sampled unless it is asked for. An estimator
takes groups of texts, as a training step would, and returns the gradient that the library's own loss gives for each group. Its mean over
*all* groups, each weighted by its probability, minus the true gradient is its bias, to rounding.

    world = World()
    theta = world.policy(seed=0)
    g = world.gradient(theta)                                         # d expected reward / d theta
    m = expectation(world, theta, ESTIMATORS["grpo"], group_size=2)   # the mean of GRPO's gradient over all groups of two
    cosine(m, g)

Left out: function approximation (a table has no interference), problems (one prompt), truncation by a sampler.

Shapes: S texts, T tokens, K prefixes, V symbols (0 = stop), D = K x V parameters; N groups of G texts. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from codechat.core.errors import ConfigError
from codechat.rl import losses
from codechat.rl.advantages import Baseline, estimate_gae, group_advantages

LARGEST = 5_000_000  # groups x texts that an expectation may enumerate


def staircase(text: str, target: str = "abba") -> float:
    """0.2 for each right letter from the start, 1 for exactly the target: partial credit, as a task's tiers give it."""
    right = next((i for i, (a, b) in enumerate(zip(text, target)) if a != b), min(len(text), len(target)))
    return 1.0 if text == target else 0.2 * right


@dataclass(frozen=True)
class World:
    """Letters, the longest text, and a reward of texts."""

    letters: str = "ab"
    length: int = 4
    reward: Callable[[str], float] = staircase
    texts: tuple[str, ...] = field(init=False)
    states: Tensor = field(init=False)  # (S, T) number of the prefix before each token
    symbols: Tensor = field(init=False)  # (S, T) 0 = stop
    mask: Tensor = field(init=False)  # (S, T) bool
    rewards: Tensor = field(init=False)  # (S,)

    def __post_init__(self) -> None:
        if self.length < 1 or not self.letters or sum(len(self.letters) ** n for n in range(self.length + 1)) > 5000:
            raise ConfigError(
                f"{len(self.letters)} letters and length {self.length}; required at least 1 of each, and at most 5000 texts to enumerate"
            )
        texts = tuple("".join(t) for n in range(self.length + 1) for t in product(self.letters, repeat=n))
        prefixes = {text: k for k, text in enumerate(t for t in texts if len(t) < self.length)}
        states, symbols = (torch.zeros(len(texts), self.length, dtype=torch.long) for _ in range(2))
        mask = torch.zeros(len(texts), self.length, dtype=torch.bool)
        for s, text in enumerate(texts):
            for t in range(min(len(text) + 1, self.length)):  # a full text has no stop symbol
                states[s, t], mask[s, t] = prefixes[text[:t]], True
                symbols[s, t] = 1 + self.letters.index(text[t]) if t < len(text) else 0
        rewards = torch.tensor([float(self.reward(text)) for text in texts], dtype=torch.float64)
        for name, value in dict(texts=texts, states=states, symbols=symbols, mask=mask, rewards=rewards).items():
            object.__setattr__(self, name, value)

    @property
    def n_states(self) -> int:
        return sum(len(self.letters) ** n for n in range(self.length))

    def policy(self, seed: int = 0, scale: float = 0.7) -> Tensor:
        """(K, V) logits of a random policy; scale 0 = uniform."""
        return scale * torch.randn(
            self.n_states, len(self.letters) + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )

    def logprobs(self, theta: Tensor) -> Tensor:
        """(S, T) log-probability of each token, 0 behind a text's end."""
        found = theta.log_softmax(-1)[self.states, self.symbols]
        return torch.where(self.mask, found, torch.zeros_like(found))

    def probabilities(self, theta: Tensor) -> Tensor:
        """(S,), sums to 1."""
        return self.logprobs(theta).sum(1).exp()

    def expected_reward(self, theta: Tensor) -> Tensor:
        return (self.probabilities(theta) * self.rewards).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """(D,) of the expected reward."""
        return _gradient(self.expected_reward, theta)

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """KL(theta || other) of whole texts, nats."""
        return (self.probabilities(theta) * (self.logprobs(theta) - self.logprobs(other)).sum(1)).sum()

    def kl_gradient(self, theta: Tensor, other: Tensor) -> Tensor:
        """(D,) of KL(theta || other) with respect to theta."""
        return _gradient(lambda x: self.kl(x, other), theta)

    def next_token_kl_gradient(self, theta: Tensor, other: Tensor, *, reverse: bool = False) -> Tensor:
        """(D,) of the next token's KL(theta || other) (reverse: KL(other || theta)) summed over the prefixes that theta visits, with how often it
        visits them held fixed: what a loss over tokens can see."""
        visits = torch.zeros(self.n_states, dtype=torch.float64)
        visits.index_add_(0, self.states[self.mask], self.probabilities(theta)[:, None].expand_as(self.mask)[self.mask])

        def kl(x: Tensor) -> Tensor:
            p, q = (other, x) if reverse else (x, other)
            return (visits * (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)).sum()

        return _gradient(kl, theta)

    def values(self, theta: Tensor) -> Tensor:
        """(S, T) expected reward at the prefix before each token: the exact critic."""
        p = self.probabilities(theta)
        mass, worth = (torch.zeros(self.n_states, dtype=torch.float64) for _ in range(2))
        weight = p[:, None].expand_as(self.mask)[self.mask]
        mass.index_add_(0, self.states[self.mask], weight)
        worth.index_add_(0, self.states[self.mask], weight * self.rewards[:, None].expand_as(self.mask)[self.mask])
        return torch.where(self.mask, (worth / mass)[self.states], 0.0)

    def scores(self, theta: Tensor) -> Tensor:
        """(S, T, D): the gradient of each token's log-probability."""
        p = theta.softmax(-1)
        found = torch.zeros(*self.mask.shape, self.n_states, p.shape[1], dtype=torch.float64)
        s, t = self.mask.nonzero(as_tuple=True)
        found[s, t, self.states[s, t]] = (
            torch.eye(p.shape[1], dtype=torch.float64)[self.symbols[s, t]] - p[self.states[s, t]]
        )
        return found.flatten(2)

    def sample(self, theta: Tensor, groups: int, group_size: int, seed: int = 0) -> Tensor:
        """(N, G) numbers of texts drawn from the policy: frozen rollouts that every estimator can be shown."""
        rng = torch.Generator().manual_seed(seed)
        return torch.multinomial(self.probabilities(theta), groups * group_size, replacement=True, generator=rng).view(
            groups, group_size
        )


def _gradient(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    x = theta.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0].flatten()


# ---------------------------------------------------------------- estimators


@dataclass(frozen=True)
class Groups:
    """What a loss is given: N groups of G texts, flattened to B = N x G rows. All (B, T) but rewards (N, G) and lengths (B,)."""

    world: World
    theta: Tensor
    old: Tensor  # the policy that sampled
    at: Tensor  # (N, G) numbers of texts

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


Loss = Callable[
    [Groups, Tensor], Tensor
]  # (groups, logprobs (B, T) with gradient) -> loss of each token, weighted, (B, T)


def group_loss(
    *, baseline: Baseline, weighing: losses.Weighing, level: str = "token", clip_eps: tuple[float, float] = (1e9, 1e9)
) -> Loss:
    """REINFORCE's and GRPO's family: a group baseline, a weighing of tokens, a clipped ratio. Each group is a step of its own."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        N, G = groups.at.shape
        advantage = group_advantages(groups.rewards, baseline).view(-1, 1)
        low, high = clip_eps
        found, _ = losses.clipped_policy_loss(
            logprobs,
            groups.rows(groups.world.logprobs(groups.old)),
            advantage,
            groups.mask,
            clip_eps_low=low,
            clip_eps_high=high,
            level=level,
        )  # type: ignore[arg-type]
        per_group = groups.lengths.view(N, G).sum(1).repeat_interleave(G)[:, None].double()  # tokens of each group
        if weighing == "token":
            return found / per_group
        return found * losses.token_weights(
            groups.lengths.double(), weighing, n_sequences=G, n_tokens=0.0, max_tokens=1
        )

    return loss


def gae_loss(lam: float, value_error: float = 0.0) -> Loss:
    """PPO at ratio 1: generalised advantages from the exact values, each moved by value_error x a fixed pattern."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        exact = groups.world.values(groups.theta)
        values = groups.rows(exact + value_error * torch.cos(groups.world.states.double()))
        rewards = torch.zeros_like(values)
        rewards[torch.arange(len(values)), groups.lengths - 1] = groups.rewards.flatten()
        advantage, _ = estimate_gae(rewards, values, groups.mask, lam=lam)
        return losses.clipped_policy_loss(logprobs, logprobs.detach(), advantage, groups.mask)[0] / groups.at.shape[1]

    return loss


def expert_loss(groups: Groups, logprobs: Tensor) -> Tensor:
    """Expert iteration: the mean negative log-probability of the best texts of each group that disagrees."""
    best = (groups.rewards == groups.rewards.amax(1, keepdim=True)) & (groups.rewards != groups.rewards[:, :1]).any(
        1, keepdim=True
    )
    tokens = (groups.lengths.view_as(best) * best).sum(1, keepdim=True).clamp(min=1)
    return -logprobs * (best / tokens).view(-1, 1)


ESTIMATORS: Mapping[str, Loss] = {
    "no baseline": group_loss(baseline="none", weighing="constant"),
    "group mean": group_loss(baseline="mean", weighing="constant"),
    "leave one out": group_loss(baseline="leave_one_out", weighing="constant"),
    "grpo": group_loss(baseline="zscore", weighing="sequence", clip_eps=(0.2, 0.2)),
    "dr_grpo": group_loss(baseline="mean", weighing="constant", clip_eps=(0.2, 0.2)),
    "dapo": group_loss(baseline="zscore", weighing="token", clip_eps=(0.2, 0.28)),
    "gspo": group_loss(baseline="zscore", weighing="sequence", level="sequence", clip_eps=(3e-4, 4e-4)),
    "ppo, exact value": gae_loss(lam=0.95),
    "ppo, wrong value": gae_loss(lam=0.95, value_error=0.3),
    "expert iteration": expert_loss,
}


def kl_in_loss(kind: losses.KLKind, reference: Tensor) -> Loss:
    """The KL term of a loss over tokens; its negated gradient estimates that of the KL divergence from the reference."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        return -losses.kl_estimate(logprobs, groups.rows(groups.world.logprobs(reference)), kind) / groups.at.shape[1]

    return loss


def kl_in_reward(kind: losses.KLKind, reference: Tensor) -> Loss:
    """The KL term as a reward of the whole text, no gradient through it, against the mean of the group's others."""

    def loss(groups: Groups, logprobs: Tensor) -> Tensor:
        world = groups.world
        kl = (losses.kl_estimate(world.logprobs(groups.theta), world.logprobs(reference), kind) * world.mask).sum(1)
        advantage = group_advantages(kl[groups.at], "leave_one_out").view(-1, 1)
        return losses.clipped_policy_loss(logprobs, logprobs.detach(), advantage, groups.mask)[0] / groups.at.shape[1]

    return loss


def group_gradients(world: World, theta: Tensor, loss: Loss, at: Tensor, old: Tensor | None = None) -> Tensor:
    """(N, D): minus the gradient of the loss of each group of texts `at` (N, G): the direction in which a step would go."""
    logprobs = world.logprobs(theta)[at.flatten()].detach().requires_grad_()
    groups = Groups(world, theta, theta if old is None else old, at)
    total = losses.masked_sum(loss(groups, logprobs), groups.mask)
    (slope,) = torch.autograd.grad(total, logprobs)  # (B, T): how much of each token's score is taken
    scores = world.scores(theta)
    whole = torch.zeros(*at.shape[:1], scores.shape[2], dtype=torch.float64)
    for g in range(at.shape[1]):
        whole -= torch.einsum("nt,ntd->nd", slope.view(*at.shape, -1)[:, g], scores[at[:, g]])
    return whole


def every_group(world: World, group_size: int, theta: Tensor) -> tuple[Tensor, Tensor]:
    """All S^G groups (N, G) and the probability of each (N,). ConfigError where that is too many."""
    S = len(world.texts)
    if S**group_size * group_size > LARGEST:
        raise ConfigError(
            f"{S} texts in groups of {group_size} are {S**group_size:,} groups; lower group_size, or the world's length"
        )
    at = torch.cartesian_prod(*[torch.arange(S)] * group_size).view(-1, group_size)
    return at, world.probabilities(theta)[at].prod(1)


def expectation(world: World, theta: Tensor, loss: Loss, group_size: int = 2, old: Tensor | None = None) -> Tensor:
    """(D,) the exact mean of an estimator's gradient over all groups that the sampling policy could draw."""
    at, p = every_group(world, group_size, theta if old is None else old)
    return p @ group_gradients(world, theta, loss, at, old)


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two directions; 0 where one is nothing."""
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 1e-30 else 0.0


def compare(
    world: World,
    theta: Tensor,
    at: Tensor,
    estimators: Mapping[str, Loss] = ESTIMATORS,
    *,
    truth: Tensor | None = None,
    old: Tensor | None = None,
) -> dict[str, dict[str, Any]]:
    """Each estimator on the same frozen groups `at` (N, G), beside the true gradient (default: of the expected reward).

    scale: the projection of its mean on the truth (1 = right size). bias: what of its mean is not along the truth, over its mean's size: 0 = a
    rescaled truth. noise: root mean squared distance of a group's gradient from the mean, over the mean's size. cosine: of the mean; cosine_one: of
    one group's gradient, averaged. The mean is that of the groups given: with N groups its error is noise / sqrt(N)."""
    truth = world.gradient(theta) if truth is None else truth
    rows = {}
    for name, loss in estimators.items():
        found = group_gradients(world, theta, loss, at, old)
        mean = found.mean(0)
        along = float(mean @ truth / (truth @ truth))
        size = max(float(mean.norm()), 1e-30)
        rows[name] = dict(
            scale=along,
            bias=float((mean - along * truth).norm()) / size,
            noise=float((found - mean).square().sum(1).mean().sqrt()) / size,
            cosine=cosine(mean, truth),
            cosine_one=float(
                torch.stack([g @ truth / (g.norm() * truth.norm()).clamp(min=1e-30) for g in found]).mean()
            ),
        )
    return rows
