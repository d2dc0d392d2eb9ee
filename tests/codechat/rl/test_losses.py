"""Losses and advantages: numbers by hand, signs of gradients, invariances, KL estimators
against exact KL."""

import math
from collections.abc import Callable

import pytest
import torch

from codechat.rl import losses, preference_losses
from codechat.rl.advantages import estimate_gae, group_advantages, zero_variance
from codechat.rl.kinds import Aggregation, KLKind
from codechat.rl.losses import (
    kl_estimate,
    masked_sum,
    policy_gradient_loss,
    policy_ratio,
)
from codechat.rl.preference_losses import PairLoss

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
OLD = LOGPROBS - torch.tensor([[2.0, 0.5, 1.0], [0.5, 1.1, 2.0]]).log()


def leaf(x: torch.Tensor) -> torch.Tensor:
    """A copy that collects gradients."""
    return x.clone().requires_grad_()


def test_masked_reductions_by_hand() -> None:
    assert masked_sum(LOGPROBS, MASK) == -15.5
    assert losses.masked_mean(LOGPROBS, MASK) == pytest.approx(-3.1)
    assert losses.masked_mean(LOGPROBS, MASK, count=31) == pytest.approx(-0.5)
    assert losses.masked_mean(LOGPROBS, torch.zeros(2, 3)) == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(poison: float) -> None:
    x = LOGPROBS.clone()
    x[0, 2] = poison
    x.requires_grad_()
    loss = policy_gradient_loss(x, ADVANTAGES, MASK)
    loss.backward()
    assert loss.isfinite()
    assert x.grad[0, 2] == 0
    assert x.grad.isfinite().all()


def test_policy_gradient_by_hand() -> None:
    """-(2 x (-1 - 2) - 1 x (-0.5 - 4 - 8)) / 5 = -6.5 / 5; advantages carry no gradient."""
    logprobs = leaf(LOGPROBS)
    advantages = leaf(ADVANTAGES)
    loss = policy_gradient_loss(logprobs, advantages, MASK)
    assert loss.item() == pytest.approx(-1.3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.4, -0.4, 0.0], [0.2, 0.2, 0.2]]))
    assert advantages.grad is None


def test_advantages_of_zero_give_no_gradient() -> None:
    logprobs = leaf(LOGPROBS)
    policy_gradient_loss(logprobs, torch.zeros(2, 1), MASK).backward()
    assert (logprobs.grad == 0).all()


POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)


def mean_and_exact(kind: str, policy: torch.Tensor = POLICY) -> tuple[float, float]:
    """The mean of the estimate over tokens drawn from the policy, and the KL itself."""
    estimate = kl_estimate(policy.log(), REFERENCE.log(), kind)  # type: ignore[arg-type]
    exact = policy * (policy / REFERENCE).log()
    return float((policy * estimate).sum()), float(exact.sum())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    mean, exact = mean_and_exact(kind)
    assert mean == pytest.approx(exact, rel=1e-12)


def test_k2_is_half_the_mean_squared_log_ratio_which_is_biased() -> None:
    mean, exact = mean_and_exact("k2")
    squared = (POLICY / REFERENCE).log() ** 2
    assert mean == pytest.approx(float((POLICY * squared).sum() / 2))
    assert mean != pytest.approx(exact, rel=1e-3)


def test_k2_is_unbiased_to_the_next_order() -> None:
    mean, exact = mean_and_exact("k2", REFERENCE + 0.01 * (POLICY - REFERENCE))
    assert mean == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("k1", [-math.log(2), math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [1 - math.log(2), -0.5 + math.log(2)]),
    ],
)
def test_estimators_by_hand(kind: KLKind, expected: list[float]) -> None:
    new = torch.tensor([[-1.0, -1.0]])
    old = torch.tensor([[-1.0 + math.log(2), -1.0 - math.log(2)]])
    torch.testing.assert_close(kl_estimate(new, old, kind), torch.tensor([expected]))


def estimates(kind: KLKind) -> torch.Tensor:
    return kl_estimate(POLICY.log(), REFERENCE.log(), kind)


def test_only_k1_takes_both_signs() -> None:
    assert estimates("k1").min() < 0
    assert estimates("k2").min() >= 0
    assert estimates("k3").min() >= 0


def test_k1_spreads_most() -> None:
    def variance(k: torch.Tensor) -> float:
        return float((POLICY * k.square()).sum() - (POLICY * k).sum() ** 2)

    others = max(variance(estimates("k2")), variance(estimates("k3")))
    assert variance(estimates("k1")) > 2 * others


def test_k3_of_a_log_ratio_that_overflows_is_finite() -> None:
    far = torch.tensor([[-200.0]], requires_grad=True)
    value = kl_estimate(far, torch.tensor([[-1.0]]), "k3")
    value.sum().backward()
    assert value.isfinite().all()
    assert far.grad.isfinite().all()


def test_clipped_loss_by_hand_and_its_gradient() -> None:
    """A token has no gradient only where its ratio has passed the bound to which its advantage
    pushes it."""
    logprobs = leaf(LOGPROBS)
    ratio = policy_ratio(logprobs, OLD, torch.ones(2, 3))
    loss = losses.clipped_policy_loss(ratio, ADVANTAGES)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, -1.0, -2.0], [0.8, 1.1, 2.0]]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.0, -2.0], [0.0, 1.1, 2.0]]))


def test_clip_statistics_by_hand() -> None:
    ratio = policy_ratio(LOGPROBS, OLD, torch.ones(2, 3))
    found = losses.clip_statistics(ratio, LOGPROBS, OLD, ADVANTAGES, MASK, 0.2, 0.2)
    assert (int(found["clipped_low"]), int(found["clipped_high"])) == (1, 1)
    assert float(found["ratio_max"]) == pytest.approx(2.0)
    torch.testing.assert_close(found["kl_old"], masked_sum(ratio - 1 - ratio.log(), MASK))


def test_weighted_loss_by_hand_keeps_every_gradient() -> None:
    logprobs = leaf(LOGPROBS)
    ratio = policy_ratio(logprobs, OLD, torch.ones(2, 3))
    losses.weighted_policy_loss(ratio, ADVANTAGES, 0.2, 0.2).sum().backward()
    torch.testing.assert_close(logprobs.grad, -ratio.detach().clamp(0.8, 1.2) * ADVANTAGES)
    assert (logprobs.grad != 0).all()


# float32's exp ends at -104 and 88
FAR = [-1e4, -300.0, -100.0, -90.0, -61.0, 31.0, 61.0, 89.0, 100.0, 300.0, 1e4]


def every_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, level: str
) -> dict[str, torch.Tensor]:
    """Per token, as functions of log ratios (1, T) to the old policy; the last are to a
    reference."""
    old = torch.zeros_like(log_ratio)
    mask = torch.ones_like(log_ratio)
    ratio = policy_ratio(log_ratio, old, mask, level)
    return {
        "clipped": losses.clipped_policy_loss(ratio, advantages, 0.2, 0.28),
        "clipped as in gspo": losses.clipped_policy_loss(ratio, advantages, 3e-4, 4e-4),
        "weighted": losses.weighted_policy_loss(ratio, advantages, 0.99, 4.0),
        "k1": kl_estimate(log_ratio, old, "k1"),
        "k2": kl_estimate(log_ratio, old, "k2"),
        "k3": kl_estimate(log_ratio, old, "k3"),
    }


EVERY_LOSS = ("clipped", "clipped as in gspo", "weighted", "k1", "k2", "k3")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [-2.0, 1.0])
@pytest.mark.parametrize("far", FAR)
def test_log_ratios_that_overflow_leave_gradients_finite(
    far: float, advantage: float, level: str
) -> None:
    """Beside a token in the normal range, and the norm of the gradient too, which adds up
    squares."""
    for name in EVERY_LOSS:
        log_ratio = torch.tensor([[far, far if level == "sequence" else 0.1]], requires_grad=True)
        loss = every_loss(log_ratio, torch.full((1, 1), advantage), level)[name]
        loss.sum().backward()
        assert loss.isfinite().all(), name
        assert log_ratio.grad.isfinite().all(), name
        assert log_ratio.grad.norm().isfinite(), name
        assert loss.sum().abs() < 1e30, name


def test_every_loss_is_among_those_that_may_overflow() -> None:
    assert tuple(every_loss(torch.zeros(1, 2), torch.zeros(1, 1), "token")) == EVERY_LOSS


@pytest.mark.parametrize("far", FAR)
def test_importance_weights_of_log_ratios_that_overflow_are_finite(far: float) -> None:
    sampler = torch.tensor([[-far, 0.0]])
    weights, stats = losses.importance_weights(torch.zeros(1, 2), sampler, torch.ones(1, 2), 3.0)
    assert weights.isfinite().all()
    assert weights.max() <= 3
    assert stats["mismatch_kl"].isfinite()


# Beyond the bound a token is pushed back: not left alone, and not pushed further.
@pytest.mark.parametrize("far", [40.0, 100.0])
def test_beyond_the_bound_a_bad_token_is_pushed_back(far: float) -> None:
    log_ratio = torch.tensor([[far]], requires_grad=True)
    ratio = policy_ratio(log_ratio, torch.zeros(1, 1), torch.ones(1, 1))
    losses.clipped_policy_loss(ratio, torch.tensor([[-1.0]])).backward()
    assert log_ratio.grad > 1e12


@pytest.mark.parametrize("far", [40.0, 100.0])
def test_beyond_the_bound_a_token_that_left_the_reference_is_pushed_back(far: float) -> None:
    log_ratio = torch.tensor([[-far]], requires_grad=True)
    kl_estimate(log_ratio, torch.zeros(1, 1), "k3").backward()
    assert log_ratio.grad < -1e12


@pytest.mark.parametrize("far", [70.0, 130.0])
def test_beyond_the_bound_the_weighted_loss_keeps_its_least_weight(far: float) -> None:
    log_ratio = torch.tensor([[-far]], requires_grad=True)
    ratio = policy_ratio(log_ratio, torch.zeros(1, 1), torch.ones(1, 1))
    losses.weighted_policy_loss(ratio, torch.tensor([[2.0]]), 0.75, 4.0).backward()
    assert log_ratio.grad.item() == pytest.approx(-0.25 * 2)


def ratio_to_zero(x: torch.Tensor) -> torch.Tensor:
    return policy_ratio(x, torch.zeros_like(x), torch.ones_like(x))


def k3_from_zero(x: torch.Tensor) -> torch.Tensor:
    return kl_estimate(torch.zeros_like(x), x, "k3")


def k3_without_bound(x: torch.Tensor) -> torch.Tensor:
    return x.expm1() - x


@pytest.mark.parametrize(
    "bounded, closed", [(ratio_to_zero, torch.exp), (k3_from_zero, k3_without_bound)]
)
def test_in_the_normal_range_ratios_and_their_gradients_are_exp_bit_for_bit(
    bounded: Callable[[torch.Tensor], torch.Tensor],
    closed: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    mine = leaf(torch.linspace(-59.9, 29.9, 3001)[None])
    plain = leaf(mine.detach())
    found = bounded(mine)
    expected = closed(plain)
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(mine.grad, plain.grad)


EXTREMES = [-1e4, -100.0, 0.0]


@pytest.mark.parametrize("kind", ["dpo", "ipo", "cpo", "simpo", "orpo"])
@pytest.mark.parametrize("far", EXTREMES)
def test_preference_losses_of_extreme_log_ratios_have_finite_gradients(
    kind: str, far: float
) -> None:
    chosen = leaf(torch.tensor([far, -50.0]))
    rejected = leaf(torch.tensor([-50.0, far]))
    at = torch.tensor([-50.0, -50.0])
    judged = preference_losses.pair_loss(
        kind,
        chosen,
        rejected,
        ref_chosen=at,
        ref_rejected=at,
        beta=2.0,
        chosen_lengths=ONE,
        rejected_lengths=ONE,
    )
    judged.losses.sum().backward()
    assert judged.losses.isfinite().all()
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()


@pytest.mark.parametrize("far", EXTREMES)
def test_kto_of_extreme_log_ratios_has_finite_gradients(far: float) -> None:
    logprobs = leaf(torch.tensor([far, -50.0]))
    at = torch.tensor([-50.0, -50.0])
    kto, _ = preference_losses.kto_loss(logprobs, at, torch.tensor([True, False]), 0.5, 2.0)
    kto.sum().backward()
    assert kto.isfinite().all()
    assert logprobs.grad.isfinite().all()


NEW = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]]).log()
SAMPLED = torch.tensor([[0.25, 0.4, 1e-9], [0.3, 0.2, 0.1]]).log()


def test_importance_weights_by_hand() -> None:
    weights, stats = losses.importance_weights(leaf(NEW), SAMPLED, MASK, 2.5)
    # 0.6 / 0.2 = 3 is cut
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5, 1.0], [1.0, 2.5, 1.0]]))
    assert not weights.requires_grad
    assert int(stats["importance_capped"]) == 1
    right = sum(r - 1 - math.log(r) for r in (2, 0.5, 3))
    assert float(stats["mismatch_kl"]) == pytest.approx(right, abs=1e-5)


def test_a_cap_of_zero_weighs_nothing_and_measures_still() -> None:
    ones, stats = losses.importance_weights(leaf(NEW), SAMPLED, MASK, 0.0)
    assert torch.equal(ones, torch.ones(2, 3))
    assert float(stats["mismatch_kl"]) > 0


@pytest.mark.parametrize("cap, exact", [(0.0, False), (1.0, False), (100.0, True)])
def test_weights_turn_the_samplers_gradient_into_the_policys(cap: float, exact: bool) -> None:
    """Summed over all tokens with the sampler's probabilities; where no ratio is cut that is
    the policy's own gradient."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 6, generator=rng).requires_grad_()
    sampler = torch.randn(1, 6, generator=rng).log_softmax(-1)
    reward = torch.randn(1, 6, generator=rng)
    logprobs = logits.log_softmax(-1)
    weights, _ = losses.importance_weights(logprobs, sampler, torch.ones(1, 6), cap)
    weighted = (sampler.exp() * weights * reward * logprobs).sum()
    of_policy = (logprobs.exp() * reward).sum()
    (found,) = torch.autograd.grad(weighted, logits, retain_graph=True)
    (right,) = torch.autograd.grad(of_policy, logits)
    assert torch.allclose(found, right, atol=1e-6) == exact


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_ratio_one_the_clipped_gradient_is_that_of_reinforce(level: str) -> None:
    new = leaf(LOGPROBS)
    plain = leaf(LOGPROBS)
    weights = losses.token_weights(MASK.sum(1), "token", n_sequences=2, n_tokens=5, max_tokens=3)
    loss = losses.clipped_policy_loss(
        policy_ratio(new, LOGPROBS, MASK, level), ADVANTAGES, 0.2, 0.2
    )
    masked_sum(loss * weights, MASK).backward()
    policy_gradient_loss(plain, ADVANTAGES, MASK).backward()
    torch.testing.assert_close(new.grad, plain.grad)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("sequence", [1 / 4, 1 / 6]),
        ("token", [1 / 5, 1 / 5]),
        ("constant", [1 / 20, 1 / 20]),
    ],
)
def test_weights_of_the_three_papers_by_hand(kind: Aggregation, expected: list[float]) -> None:
    lengths = torch.tensor([2, 3])
    weights = losses.token_weights(lengths, kind, n_sequences=2, n_tokens=5, max_tokens=10)
    assert weights[:, 0].tolist() == pytest.approx(expected)


def test_value_loss_takes_the_larger_error() -> None:
    values = torch.tensor([[1.0, 0.5, 0.1]], requires_grad=True)
    loss = losses.value_loss(
        values, torch.zeros(1, 3), torch.tensor([[0.9, -1.0, 1.0]]), clip_eps=0.2
    )
    torch.testing.assert_close(loss, torch.tensor([[0.7**2, 1.5**2, 0.9**2]]) / 2)
    loss.sum().backward()
    # the first is beyond its bound
    assert values.grad[0, 0] == 0
    assert values.grad[0, 1] > 0 > values.grad[0, 2]


REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 1.0]])
BASELINES = ("mean", "leave_one_out", "zscore")


OTHERS = (REWARDS.sum(1, keepdim=True) - REWARDS) / 3  # mean reward of the rest of a group
CENTRED = torch.tensor([[0.5, -0.5, 0.0, 0.0], [0.0] * 4, [-0.25, -0.25, -0.25, 0.75]])
STD = torch.tensor([[1 / 6], [1.0], [1 / 4]]).sqrt()  # with n - 1


@pytest.mark.parametrize(
    "baseline, expected",
    [
        ("mean", CENTRED),
        ("none", REWARDS),
        ("zscore", CENTRED / STD),
        ("leave_one_out", REWARDS - OTHERS),
    ],
)
def test_advantages_by_hand(baseline: str, expected: torch.Tensor) -> None:
    torch.testing.assert_close(group_advantages(REWARDS, baseline, eps=1e-9), expected)


def test_without_a_baseline_a_group_of_one_keeps_its_reward() -> None:
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


# the mean of equal floats is not always that float
@pytest.mark.parametrize("size", [2, 3, 7, 16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.55, 0.7750000357627869])
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_group_without_variance_gives_exactly_zero(
    baseline: str, reward: float, size: int
) -> None:
    rewards = torch.full((2, size), reward)
    assert (group_advantages(rewards, baseline) == 0).all()
    assert zero_variance(rewards).all()


def test_a_group_with_the_least_variance_counts() -> None:
    reward = 0.7750000357627869
    rewards = torch.full((2, 16), reward)
    rewards[1, 1] = math.nextafter(reward, 1) + 1e-7
    assert zero_variance(rewards).tolist() == [True, False]


EARNED = torch.tensor([[0.0, 0.0, 1.0, 99.0], [0.5, 0.0, -1.0, 2.0]])
VALUES = torch.tensor([[0.2, 0.4, 0.6, 99.0], [0.1, 0.1, 0.1, 0.1]])
ON = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def test_gae_of_lambda_one_is_the_monte_carlo_return() -> None:
    advantages, returns = estimate_gae(EARNED, torch.zeros_like(VALUES), ON, lam=1.0)
    monte_carlo = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.5, 1.0, 1.0, 2.0]])
    torch.testing.assert_close(advantages, monte_carlo)
    torch.testing.assert_close(returns, monte_carlo)


def test_gae_by_hand() -> None:
    advantages, returns = estimate_gae(EARNED, VALUES, ON, gamma=0.9, lam=0.5)
    third = 1 - 0.6
    second = 0.9 * 0.6 - 0.4 + 0.45 * third
    first = 0.9 * 0.4 - 0.2 + 0.45 * second
    torch.testing.assert_close(advantages[0], torch.tensor([first, second, third, 0.0]))
    torch.testing.assert_close(returns[0, :3], advantages[0, :3] + VALUES[0, :3])


def test_gae_of_lambda_zero_is_the_error_of_one_step() -> None:
    td, _ = estimate_gae(EARNED, VALUES, ON, gamma=0.9, lam=0.0)
    torch.testing.assert_close(td[0, :3], torch.tensor([0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 0.4]))


# two pairs of three tokens: log-probabilities per token, so that sums and means are easy
CHOSEN = torch.tensor([[-0.5, -1.0, -0.5], [-0.1, -0.2, -0.3]]).sum(1)  # -2.0, -0.6
REJECTED = torch.tensor([[-1.0, -1.0, -1.0], [-0.2, -0.1, -0.0]]).sum(1)  # -3.0, -0.3
REF_CHOSEN = torch.tensor([-2.5, -0.6])
REF_REJECTED = torch.tensor([-2.5, -0.6])
ONE = torch.tensor([1, 1])
THREE = torch.tensor([3, 3])


def nats(x: float) -> float:
    return math.log(1 + math.exp(-x))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


CASES = [  # (kind, beta, losses)
    # (chosen - ref) - (rejected - ref) = 0.5 + 0.5 = 1 and 0 - 0.3 = -0.3
    ("dpo", 0.5, [nats(0.5), nats(-0.15)]),
    ("ipo", 0.25, [(1 - 2) ** 2, (-0.3 - 2) ** 2]),
    ("cpo", 0.5, [nats(0.5) + 2 / 3, nats(-0.15) + 0.2]),
    ("simpo", 3.0, [nats(1.0 - 1.0), nats(-0.3 - 1.0)]),
    (
        "orpo",
        0.2,
        [
            0.2 * nats(log_odds(-2 / 3) - log_odds(-1.0)) + 2 / 3,
            0.2 * nats(log_odds(-0.2) - log_odds(-0.1)) + 0.2,
        ],
    ),
]


@pytest.mark.parametrize("kind, beta, expected", CASES, ids=[case[0] for case in CASES])
def test_pair_losses_by_hand_and_the_signs_of_their_gradients(
    kind: PairLoss, beta: float, expected: list[float]
) -> None:
    referred = kind in preference_losses.NEEDS_REFERENCE
    chosen = leaf(CHOSEN)
    rejected = leaf(REJECTED)
    judged = preference_losses.pair_loss(
        kind,
        chosen,
        rejected,
        chosen_lengths=THREE,
        rejected_lengths=THREE,
        beta=beta,
        ref_chosen=REF_CHOSEN if referred else None,
        ref_rejected=REF_REJECTED if referred else None,
    )
    assert judged.losses.tolist() == pytest.approx(expected, rel=1e-5)
    judged.losses.sum().backward()
    # a step raises what was preferred
    assert (chosen.grad < 0).all()
    assert (rejected.grad > 0).all()
    assert not judged.chosen_rewards.requires_grad
    assert not judged.rejected_rewards.requires_grad
    assert (judged.chosen_rewards > judged.rejected_rewards).tolist() == [True, False]


def test_at_the_reference_dpo_and_ipo_are_known_numbers() -> None:
    at_reference = (CHOSEN, REJECTED, CHOSEN, REJECTED)
    dpo = preference_losses.dpo_loss(*at_reference, 0.3).losses
    ipo = preference_losses.ipo_loss(*at_reference, 0.25).losses
    assert dpo.tolist() == pytest.approx([math.log(2)] * 2)
    assert ipo.tolist() == pytest.approx([4.0] * 2)


def slope_ahead(loss: Callable[..., preference_losses.Losses], ahead: float) -> torch.Tensor:
    """Of the chosen log-probabilities, so far above the reference's."""
    far = leaf(CHOSEN + ahead)
    loss(far, REJECTED, CHOSEN, REJECTED, 0.1).losses.sum().backward()
    return far.grad


def test_ipo_stops_pulling_at_its_target_and_dpo_does_not() -> None:
    assert (slope_ahead(preference_losses.ipo_loss, 50).sign() == 1).all()
    assert (slope_ahead(preference_losses.dpo_loss, 5).sign() == -1).all()


@pytest.mark.parametrize("loss", [preference_losses.simpo_loss, preference_losses.orpo_loss])
def test_simpo_and_orpo_divide_length_out(
    loss: Callable[..., preference_losses.Losses],
) -> None:
    once = loss(CHOSEN, REJECTED, THREE, THREE).losses
    twice = loss(CHOSEN * 2, REJECTED * 2, THREE * 2, THREE * 2).losses
    torch.testing.assert_close(twice, once)


def test_cpo_does_not_divide_length_out() -> None:
    once = preference_losses.cpo_loss(CHOSEN, REJECTED).losses
    twice = preference_losses.cpo_loss(CHOSEN * 2, REJECTED * 2).losses
    assert not torch.allclose(twice, once)


def test_orpo_holds_at_probability_one() -> None:
    sure = leaf(torch.zeros(1))
    three = torch.tensor([3])
    judged = preference_losses.orpo_loss(sure, torch.tensor([-30.0]), three, three)
    judged.losses.sum().backward()
    assert judged.losses.isfinite().all()
    assert sure.grad.isfinite().all()


def test_kto_by_hand_and_the_signs_of_its_gradient() -> None:
    """r = 0.5 (liked) and -0.5 (not), z = 0.2, beta = 2: 1 - sigmoid(0.6) and 1 - sigmoid(1.4)."""
    logprobs = leaf(torch.tensor([-2.0, -3.0]))
    liked = torch.tensor([True, False])
    reference = torch.tensor([-2.5, -2.5])
    kto, reward = preference_losses.kto_loss(logprobs, reference, liked, 0.2, 2.0)
    expected = [1 / (1 + math.exp(0.6)), 1 / (1 + math.exp(1.4))]
    assert kto.tolist() == pytest.approx(expected, rel=1e-6)
    assert reward.tolist() == pytest.approx([1.0, -1.0])
    kto.sum().backward()
    assert logprobs.grad[0] < 0 < logprobs.grad[1]


def test_kto_of_equal_log_probabilities_is_one_half() -> None:
    liked = torch.tensor([True, False])
    at_reference, _ = preference_losses.kto_loss(torch.zeros(2), torch.zeros(2), liked, 0.0)
    assert at_reference.tolist() == pytest.approx([0.5] * 2)
