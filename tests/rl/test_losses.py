"""Losses and advantages: numbers by hand, signs of gradients, invariances, KL estimators against exact KL."""

from __future__ import annotations

import math

import pytest
import torch

from codechat.rl.advantages import group_advantages, zero_variance
from codechat.rl.losses import (
    clip_statistics,
    clipped_policy_loss,
    importance_weights,
    kl_estimate,
    masked_mean,
    masked_sum,
    policy_gradient_loss,
    policy_ratio,
)

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
OLD = LOGPROBS - torch.tensor([[2.0, 0.5, 1.0], [0.5, 1.1, 2.0]]).log()


# ---------------------------------------------------------------- masks and the policy gradient


def test_masked_reductions_by_hand() -> None:
    assert masked_sum(LOGPROBS, MASK) == -15.5
    assert masked_mean(LOGPROBS, MASK) == pytest.approx(-3.1)
    assert masked_mean(LOGPROBS, MASK, count=31) == pytest.approx(-0.5)
    assert masked_mean(LOGPROBS, torch.zeros(2, 3)) == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(poison: float) -> None:
    x = LOGPROBS.clone()
    x[0, 2] = poison
    x.requires_grad_()
    loss = policy_gradient_loss(x, ADVANTAGES, MASK)
    loss.backward()
    assert loss.isfinite() and x.grad[0, 2] == 0 and x.grad.isfinite().all()


def test_policy_gradient_by_hand() -> None:
    """-(2 x (-1 - 2) - 1 x (-0.5 - 4 - 8)) / 5 = -6.5 / 5; advantages carry no gradient, and 0 gives none."""
    logprobs, advantages = LOGPROBS.clone().requires_grad_(), ADVANTAGES.clone().requires_grad_()
    loss = policy_gradient_loss(logprobs, advantages, MASK)
    assert loss.item() == pytest.approx(-1.3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.4, -0.4, 0.0], [0.2, 0.2, 0.2]]))
    assert advantages.grad is None
    logprobs.grad = None
    policy_gradient_loss(logprobs, torch.zeros(2, 1), MASK).backward()
    assert (logprobs.grad == 0).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_step_raises_what_was_good_and_lowers_what_was_bad(advantage: float) -> None:
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    policy_gradient_loss(logits.log_softmax(-1)[..., 1], torch.tensor([[advantage]]), torch.ones(1, 1)).backward()
    after = (logits - 0.1 * logits.grad).softmax(-1)[0, 0]
    assert (after[1] > 1 / 3) == (advantage > 0)


# ---------------------------------------------------------------- KL

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)


def mean_and_exact(kind: str, policy: torch.Tensor = POLICY) -> tuple[float, float]:
    """The mean of the estimate over tokens drawn from the policy, and the KL itself."""
    estimate = kl_estimate(policy.log(), REFERENCE.log(), kind)  # type: ignore[arg-type]
    return float((policy * estimate).sum()), float((policy * (policy / REFERENCE).log()).sum())


def test_k1_and_k3_are_unbiased_and_k2_is_to_the_next_order() -> None:
    for kind in ("k1", "k3"):
        mean, exact = mean_and_exact(kind)
        assert mean == pytest.approx(exact, rel=1e-12)
    mean, exact = mean_and_exact("k2")
    assert mean == pytest.approx(float((POLICY * (POLICY / REFERENCE).log() ** 2).sum() / 2))
    assert mean != pytest.approx(exact, rel=1e-3)
    mean, exact = mean_and_exact("k2", REFERENCE + 0.01 * (POLICY - REFERENCE))
    assert mean == pytest.approx(exact, rel=0.01)


def test_estimators_by_hand_their_signs_and_spread() -> None:
    new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0 + math.log(2), -1.0 - math.log(2)]])
    torch.testing.assert_close(kl_estimate(new, old, "k1"), torch.tensor([[-math.log(2), math.log(2)]]))
    torch.testing.assert_close(kl_estimate(new, old, "k2"), torch.full((1, 2), math.log(2) ** 2 / 2))
    torch.testing.assert_close(kl_estimate(new, old, "k3"), torch.tensor([[1 - math.log(2), -0.5 + math.log(2)]]))
    k1, k2, k3 = (kl_estimate(POLICY.log(), REFERENCE.log(), kind) for kind in ("k1", "k2", "k3"))
    assert k1.min() < 0 and k2.min() >= 0 and k3.min() >= 0
    variance = [float((POLICY * k.square()).sum() - (POLICY * k).sum() ** 2) for k in (k1, k2, k3)]
    assert variance[0] > 2 * max(variance[1:])
    far = torch.tensor([[-200.0]], requires_grad=True)  # a log ratio that overflows
    value = kl_estimate(far, torch.tensor([[-1.0]]), "k3")
    value.sum().backward()
    assert value.isfinite().all() and far.grad.isfinite().all()


# ---------------------------------------------------------------- ratios


def test_clipped_loss_by_hand_and_its_gradient() -> None:
    """A token has no gradient only where its ratio has passed the bound in the direction in which its advantage pushes
    it."""
    logprobs = LOGPROBS.clone().requires_grad_()
    ratio = policy_ratio(logprobs, OLD, torch.ones(2, 3))
    loss = clipped_policy_loss(ratio, ADVANTAGES)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, -1.0, -2.0], [0.8, 1.1, 2.0]]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.0, -2.0], [0.0, 1.1, 2.0]]))
    found = clip_statistics(ratio, LOGPROBS, OLD, ADVANTAGES, MASK, 0.2, 0.2)
    assert (int(found["clipped_low"]), int(found["clipped_high"])) == (1, 1)
    assert float(found["ratio_max"]) == pytest.approx(2.0)
    r = ratio.detach()
    torch.testing.assert_close(found["kl_old"], masked_sum(r - 1 - r.log(), MASK))


def test_importance_weights_by_hand() -> None:
    new = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]]).log().requires_grad_()
    old = torch.tensor([[0.25, 0.4, 1e-9], [0.3, 0.2, 0.1]]).log()
    weights, stats = importance_weights(new, old, MASK, 2.5)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5, 1.0], [1.0, 2.5, 1.0]]))  # 0.6 / 0.2 = 3 is cut
    assert not weights.requires_grad and int(stats["importance_capped"]) == 1
    right = sum(r - 1 - math.log(r) for r in (2, 0.5, 3))
    assert float(stats["mismatch_kl"]) == pytest.approx(right, abs=1e-5)
    ones, stats = importance_weights(new, old, MASK, 0.0)
    assert torch.equal(ones, torch.ones(2, 3)) and float(stats["mismatch_kl"]) > 0


@pytest.mark.parametrize("cap, exact", [(0.0, False), (1.0, False), (100.0, True)])
def test_weights_turn_the_samplers_gradient_into_the_policys(cap: float, exact: bool) -> None:
    """Summed over all tokens with the sampler's probabilities; where no ratio is cut that is the policy's own
    gradient."""
    rng = torch.Generator().manual_seed(0)
    logits, other, reward = (torch.randn(1, 6, generator=rng) for _ in range(3))
    logits.requires_grad_()
    logprobs, sampler = logits.log_softmax(-1), other.log_softmax(-1)
    weights, _ = importance_weights(logprobs, sampler, torch.ones(1, 6), cap)
    found = torch.autograd.grad((sampler.exp() * weights * reward * logprobs).sum(), logits, retain_graph=True)[0]
    right = torch.autograd.grad((logprobs.exp() * reward).sum(), logits)[0]
    assert torch.allclose(found, right, atol=1e-6) == exact


# ---------------------------------------------------------------- advantages

REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 1.0]])
BASELINES = ("mean", "leave_one_out", "zscore")


def test_advantages_by_hand() -> None:
    centred = torch.tensor([[0.5, -0.5, 0.0, 0.0], [0.0] * 4, [-0.25, -0.25, -0.25, 0.75]])
    torch.testing.assert_close(group_advantages(REWARDS, "mean"), centred)
    torch.testing.assert_close(group_advantages(REWARDS, "none"), REWARDS)
    std = torch.tensor([[1 / 6], [1.0], [1 / 4]]).sqrt()  # with n - 1
    torch.testing.assert_close(group_advantages(REWARDS, "zscore", eps=1e-9), centred / std)
    others = (REWARDS.sum(1, keepdim=True) - REWARDS) / 3
    torch.testing.assert_close(group_advantages(REWARDS, "leave_one_out"), REWARDS - others)
    assert group_advantages(torch.ones(3, 1), "none").tolist() == [[1.0]] * 3


@pytest.mark.parametrize("baseline", BASELINES)
def test_groups_are_centred_and_do_not_know_each_other(baseline: str) -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    whole = group_advantages(rewards, baseline)
    torch.testing.assert_close(whole.sum(1), torch.zeros(5), atol=1e-5, rtol=0)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(group_advantages(rewards[order], baseline), whole[order])
    torch.testing.assert_close(group_advantages(rewards.flip(1), baseline), whole.flip(1))
    torch.testing.assert_close(group_advantages(rewards + 3, baseline), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_group_without_variance_gives_exactly_zero(baseline: str) -> None:
    for reward in (0.1, 0.3, 0.55, 0.7750000357627869):
        for size in (2, 3, 7, 16):  # the mean of equal floats is not always that float
            rewards = torch.full((2, size), reward)
            assert (group_advantages(rewards, baseline) == 0).all() and zero_variance(rewards).all()
    rewards[1, 1] = math.nextafter(reward, 1) + 1e-7
    assert zero_variance(rewards).tolist() == [True, False]
