"""Losses and advantages: numbers by hand, signs of gradients, invariances, KL estimators against exact KL."""

from __future__ import annotations

import math

import pytest
import torch

from codechat.core.errors import ConfigError
from codechat.rl.advantages import group_advantages, zero_variance
from codechat.rl.losses import (
    clip_statistics,
    clipped_policy_loss,
    kl_estimate,
    masked_mean,
    masked_sum,
    policy_gradient_loss,
    policy_ratio,
)

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


# ---------------------------------------------------------------- masked reductions


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
    assert loss.isfinite()
    assert x.grad is not None
    assert x.grad[0, 2] == 0
    assert x.grad.isfinite().all()


# ---------------------------------------------------------------- policy gradient


def test_policy_gradient_by_hand() -> None:
    """-(2 x (-1 - 2) - 1 x (-0.5 - 4 - 8)) / 5 = -6.5 / 5."""
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = policy_gradient_loss(logprobs, ADVANTAGES, MASK)
    assert loss.item() == pytest.approx(-1.3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.4, -0.4, 0.0], [0.2, 0.2, 0.2]]))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_step_raises_what_was_good_and_lowers_what_was_bad(advantage: float) -> None:
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    policy_gradient_loss(logits.log_softmax(-1)[..., 1], torch.tensor([[advantage]]), torch.ones(1, 1)).backward()
    after = (logits - 0.1 * logits.grad).softmax(-1)[0, 0]
    assert (after[1] > 1 / 3) == (advantage > 0)
    assert after.argmax().item() == 1 or advantage < 0


def test_advantages_carry_no_gradient() -> None:
    advantages = ADVANTAGES.clone().requires_grad_()
    logprobs = LOGPROBS.clone().requires_grad_()
    policy_gradient_loss(logprobs, advantages, MASK).backward()
    assert advantages.grad is None


def test_zero_advantage_gives_zero_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    policy_gradient_loss(logprobs, torch.zeros(2, 1), MASK).backward()
    assert (logprobs.grad == 0).all()


def test_padding_changes_nothing() -> None:
    pad = torch.nn.functional.pad
    wide = policy_gradient_loss(pad(LOGPROBS, (0, 4), value=-7.0), ADVANTAGES, pad(MASK, (0, 4)))
    tall = policy_gradient_loss(
        pad(LOGPROBS, (0, 0, 0, 2)), pad(ADVANTAGES, (0, 0, 0, 2), value=9.0), pad(MASK, (0, 0, 0, 2))
    )
    assert wide == tall == policy_gradient_loss(LOGPROBS, ADVANTAGES, MASK)


def test_accumulated_microbatches_equal_the_whole_batch() -> None:
    """The two rows have 2 and 3 tokens: the mean of their own means would be another number."""
    whole = policy_gradient_loss(LOGPROBS, ADVANTAGES, MASK)
    count = MASK.sum()
    parts = [policy_gradient_loss(LOGPROBS[i : i + 1], ADVANTAGES[i : i + 1], MASK[i : i + 1], count) for i in (0, 1)]
    torch.testing.assert_close(sum(parts), whole)
    alone = [policy_gradient_loss(LOGPROBS[i : i + 1], ADVANTAGES[i : i + 1], MASK[i : i + 1]) for i in (0, 1)]
    assert abs(sum(alone) / 2 - whole) > 0.1


# ---------------------------------------------------------------- KL


POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)
EXACT = float((POLICY * (POLICY / REFERENCE).log()).sum())


def estimates(kind: str, policy: torch.Tensor = POLICY) -> torch.Tensor:
    """The estimate for each token of the vocabulary, as if it had been drawn."""
    return kl_estimate(policy.log(), REFERENCE.log(), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_have_the_exact_kl_as_their_mean(kind: str) -> None:
    assert float((POLICY * estimates(kind)).sum()) == pytest.approx(EXACT, rel=1e-12)


def test_k2_is_biased_to_the_next_order() -> None:
    """E[k2] is half the mean squared log-ratio; it meets the KL as the two distributions meet."""
    assert float((POLICY * estimates("k2")).sum()) == pytest.approx(
        float((POLICY * (POLICY / REFERENCE).log() ** 2).sum() / 2)
    )
    assert float((POLICY * estimates("k2")).sum()) != pytest.approx(EXACT, rel=1e-3)
    near = REFERENCE + 0.01 * (POLICY - REFERENCE)
    exact = float((near * (near / REFERENCE).log()).sum())
    assert float((near * estimates("k2", near)).sum()) == pytest.approx(exact, rel=0.01)


def test_signs_and_spread_of_the_estimators() -> None:
    k1, k2, k3 = (estimates(kind) for kind in ("k1", "k2", "k3"))
    assert k1.min() < 0
    assert k2.min() >= 0
    assert k3.min() >= 0
    variance = [float((POLICY * k.square()).sum() - (POLICY * k).sum() ** 2) for k in (k1, k2, k3)]
    assert variance[0] > 2 * max(variance[1:])
    assert (kl_estimate(LOGPROBS, LOGPROBS, "k3") == 0).all()


def test_estimators_by_hand() -> None:
    new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0 + math.log(2), -1.0 - math.log(2)]])
    torch.testing.assert_close(kl_estimate(new, old, "k1"), torch.tensor([[-math.log(2), math.log(2)]]))
    torch.testing.assert_close(kl_estimate(new, old, "k2"), torch.full((1, 2), math.log(2) ** 2 / 2))
    torch.testing.assert_close(kl_estimate(new, old, "k3"), torch.tensor([[1 - math.log(2), -0.5 + math.log(2)]]))


def test_k3_of_a_log_ratio_that_overflows_is_finite() -> None:
    far = torch.tensor([[-200.0]], requires_grad=True)
    kl_estimate(far, torch.tensor([[-1.0]]), "k3").sum().backward()
    assert kl_estimate(far, torch.tensor([[-1.0]]), "k3").isfinite().all() and far.grad.isfinite().all()


# ---------------------------------------------------------------- clipped ratios

OLD = LOGPROBS - torch.tensor([[2.0, 0.5, 1.0], [0.5, 1.1, 2.0]]).log()


def test_clipped_loss_by_hand_and_its_gradient() -> None:
    """A token has no gradient only where its ratio has passed the bound in the direction in which its advantage pushes it."""
    logprobs = LOGPROBS.clone().requires_grad_()
    ratio = policy_ratio(logprobs, OLD, torch.ones(2, 3))
    loss = clipped_policy_loss(ratio, ADVANTAGES)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, -1.0, -2.0], [0.8, 1.1, 2.0]]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.0, -2.0], [0.0, 1.1, 2.0]]))
    found = clip_statistics(ratio, LOGPROBS, OLD, ADVANTAGES, MASK, 0.2, 0.2)
    assert (int(found["clipped_low"]), int(found["clipped_high"]), float(found["ratio_max"])) == (
        1,
        1,
        pytest.approx(2.0),
    )
    r = ratio.detach()
    torch.testing.assert_close(found["kl_old"], masked_sum(r - 1 - r.log(), MASK))


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    ratio = policy_ratio(LOGPROBS, OLD, MASK, "sequence")
    torch.testing.assert_close(ratio, torch.tensor([[1.0], [1.1 ** (1 / 3)]]).expand(2, 3))


# ---------------------------------------------------------------- advantages


REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 1.0]])


def test_advantages_by_hand() -> None:
    expected = torch.tensor([[0.5, -0.5, 0.0, 0.0], [0.0] * 4, [-0.25, -0.25, -0.25, 0.75]])
    torch.testing.assert_close(group_advantages(REWARDS, "mean"), expected)
    torch.testing.assert_close(group_advantages(REWARDS, "none"), REWARDS)
    std = torch.tensor([[1 / 6], [1.0], [1 / 4]]).sqrt()  # with n - 1
    torch.testing.assert_close(group_advantages(REWARDS, "zscore", eps=1e-9), expected / std)


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others() -> None:
    others = (REWARDS.sum(1, keepdim=True) - REWARDS) / 3
    torch.testing.assert_close(group_advantages(REWARDS, "leave_one_out"), REWARDS - others)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "zscore"])
def test_groups_are_centred_and_do_not_know_each_other(baseline: str) -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    whole = group_advantages(rewards, baseline)
    torch.testing.assert_close(whole.sum(1), torch.zeros(5), atol=1e-5, rtol=0)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(group_advantages(rewards[order], baseline), whole[order])
    torch.testing.assert_close(group_advantages(rewards.flip(1), baseline), whole.flip(1))
    torch.testing.assert_close(group_advantages(rewards + 3, baseline), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "zscore"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.55, 0.7750000357627869])
def test_a_group_without_variance_gives_exactly_zero(baseline: str, reward: float) -> None:
    for size in (2, 3, 7, 16):  # the mean of equal floats is not always that float
        rewards = torch.full((2, size), reward)
        assert (group_advantages(rewards, baseline) == 0).all()
        assert zero_variance(rewards).all()


def test_zero_variance_sees_the_smallest_difference() -> None:
    rewards = torch.full((2, 4), 0.3)
    rewards[1, 3] = math.nextafter(0.3, 1) + 1e-7
    assert zero_variance(rewards).tolist() == [True, False]


@pytest.mark.parametrize(
    "rewards, baseline", [(torch.zeros(4), "mean"), (torch.zeros(4, 1), "mean"), (torch.zeros(4, 2), "x")]
)
def test_invalid_rewards(rewards: torch.Tensor, baseline: str) -> None:
    with pytest.raises(ConfigError):
        group_advantages(rewards, baseline)  # type: ignore[arg-type]


def test_one_sample_without_a_baseline_is_allowed() -> None:
    assert group_advantages(torch.ones(3, 1), "none").tolist() == [[1.0]] * 3
