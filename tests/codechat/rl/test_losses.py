"""Losses and advantages: numbers by hand, signs of gradients, invariances, KL estimators
against exact KL."""

import math

import pytest
import torch

from codechat.rl import losses, preference_losses
from codechat.rl.advantages import estimate_gae, group_advantages, zero_variance
from codechat.rl.losses import kl_estimate, masked_sum, policy_gradient_loss, policy_ratio

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
OLD = LOGPROBS - torch.tensor([[2.0, 0.5, 1.0], [0.5, 1.1, 2.0]]).log()


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
    """-(2 x (-1 - 2) - 1 x (-0.5 - 4 - 8)) / 5 = -6.5 / 5; advantages carry no gradient, and 0
    gives none."""
    logprobs = LOGPROBS.clone().requires_grad_()
    advantages = ADVANTAGES.clone().requires_grad_()
    loss = policy_gradient_loss(logprobs, advantages, MASK)
    assert loss.item() == pytest.approx(-1.3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.4, -0.4, 0.0], [0.2, 0.2, 0.2]]))
    assert advantages.grad is None
    logprobs.grad = None
    policy_gradient_loss(logprobs, torch.zeros(2, 1), MASK).backward()
    assert (logprobs.grad == 0).all()


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
    new = torch.tensor([[-1.0, -1.0]])
    old = torch.tensor([[-1.0 + math.log(2), -1.0 - math.log(2)]])
    torch.testing.assert_close(
        kl_estimate(new, old, "k1"), torch.tensor([[-math.log(2), math.log(2)]])
    )
    torch.testing.assert_close(
        kl_estimate(new, old, "k2"), torch.full((1, 2), math.log(2) ** 2 / 2)
    )
    torch.testing.assert_close(
        kl_estimate(new, old, "k3"), torch.tensor([[1 - math.log(2), -0.5 + math.log(2)]])
    )
    k1, k2, k3 = (kl_estimate(POLICY.log(), REFERENCE.log(), kind) for kind in ("k1", "k2", "k3"))
    assert k1.min() < 0
    assert k2.min() >= 0
    assert k3.min() >= 0
    variance = [float((POLICY * k.square()).sum() - (POLICY * k).sum() ** 2) for k in (k1, k2, k3)]
    assert variance[0] > 2 * max(variance[1:])
    far = torch.tensor([[-200.0]], requires_grad=True)  # a log ratio that overflows
    value = kl_estimate(far, torch.tensor([[-1.0]]), "k3")
    value.sum().backward()
    assert value.isfinite().all()
    assert far.grad.isfinite().all()


def test_clipped_loss_by_hand_and_its_gradient() -> None:
    """A token has no gradient only where its ratio has passed the bound to which its advantage
    pushes it."""
    logprobs = LOGPROBS.clone().requires_grad_()
    ratio = policy_ratio(logprobs, OLD, torch.ones(2, 3))
    loss = losses.clipped_policy_loss(ratio, ADVANTAGES)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, -1.0, -2.0], [0.8, 1.1, 2.0]]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.0, -2.0], [0.0, 1.1, 2.0]]))
    found = losses.clip_statistics(ratio, LOGPROBS, OLD, ADVANTAGES, MASK, 0.2, 0.2)
    assert (int(found["clipped_low"]), int(found["clipped_high"])) == (1, 1)
    assert float(found["ratio_max"]) == pytest.approx(2.0)
    r = ratio.detach()
    torch.testing.assert_close(found["kl_old"], masked_sum(r - 1 - r.log(), MASK))


def test_weighted_loss_by_hand_keeps_every_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    ratio = policy_ratio(logprobs, OLD, torch.ones(2, 3))
    losses.weighted_policy_loss(ratio, ADVANTAGES, 0.2, 0.2).sum().backward()
    torch.testing.assert_close(logprobs.grad, -ratio.detach().clamp(0.8, 1.2) * ADVANTAGES)
    assert (logprobs.grad != 0).all()


FAR = [
    -1e4,
    -300.0,
    -100.0,
    -90.0,
    -61.0,
    31.0,
    61.0,
    89.0,
    100.0,
    300.0,
    1e4,
]  # float32's exp ends at -104 and 88


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


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [-2.0, 1.0])
@pytest.mark.parametrize("far", FAR)
def test_log_ratios_that_overflow_leave_gradients_finite(
    far: float, advantage: float, level: str
) -> None:
    """Beside a token in the normal range, and the norm of the gradient too, which adds up
    squares."""
    for name in every_loss(torch.zeros(1, 2), torch.zeros(1, 1), level):
        log_ratio = torch.tensor([[far, far if level == "sequence" else 0.1]], requires_grad=True)
        loss = every_loss(log_ratio, torch.full((1, 1), advantage), level)[name]
        loss.sum().backward()
        assert (
            loss.isfinite().all()
            and log_ratio.grad.isfinite().all()
            and log_ratio.grad.norm().isfinite()
        ), name
        assert loss.sum().abs() < 1e30
    sampler = torch.tensor([[-far, 0.0]])
    weights, stats = losses.importance_weights(torch.zeros(1, 2), sampler, torch.ones(1, 2), 3.0)
    assert weights.isfinite().all()
    assert weights.max() <= 3
    assert stats["mismatch_kl"].isfinite()


def test_beyond_the_bound_a_token_is_pushed_back() -> None:
    """Not left alone, and not pushed further: at a ratio of e^100 a bad token, and one that
    left the reference."""
    for far in (40.0, 100.0):
        log_ratio = torch.tensor([[far]], requires_grad=True)
        losses.clipped_policy_loss(
            policy_ratio(log_ratio, torch.zeros(1, 1), torch.ones(1, 1)), torch.tensor([[-1.0]])
        ).backward()
        assert log_ratio.grad > 1e12
        log_ratio = torch.tensor([[-far]], requires_grad=True)
        kl_estimate(log_ratio, torch.zeros(1, 1), "k3").backward()
        assert log_ratio.grad < -1e12
        log_ratio = torch.tensor([[-far - 30]], requires_grad=True)
        ratio = policy_ratio(log_ratio, torch.zeros(1, 1), torch.ones(1, 1))
        losses.weighted_policy_loss(ratio, torch.tensor([[2.0]]), 0.75, 4.0).backward()
        assert log_ratio.grad.item() == pytest.approx(-0.25 * 2)


def test_in_the_normal_range_ratios_and_their_gradients_are_exp_bit_for_bit() -> None:
    far = torch.linspace(-59.9, 29.9, 3001)
    for of, closed in (
        (lambda x: policy_ratio(x, torch.zeros_like(x), torch.ones_like(x)), lambda x: x.exp()),
        (lambda x: kl_estimate(torch.zeros_like(x), x, "k3"), lambda x: x.expm1() - x),
    ):
        mine = far[None].clone().requires_grad_()
        plain = far[None].clone().requires_grad_()
        found = of(mine)
        expected = closed(plain)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(mine.grad, plain.grad)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "cpo", "simpo", "orpo"])
@pytest.mark.parametrize("far", [-1e4, -100.0, 0.0])
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
    kto, _ = preference_losses.kto_loss(chosen, at, torch.tensor([True, False]), 0.5, 2.0)
    kto.sum().backward()
    assert kto.isfinite().all()
    assert chosen.grad.isfinite().all()


def test_importance_weights_by_hand() -> None:
    new = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]]).log().requires_grad_()
    old = torch.tensor([[0.25, 0.4, 1e-9], [0.3, 0.2, 0.1]]).log()
    weights, stats = losses.importance_weights(new, old, MASK, 2.5)
    torch.testing.assert_close(
        weights, torch.tensor([[2.0, 0.5, 1.0], [1.0, 2.5, 1.0]])
    )  # 0.6 / 0.2 = 3 is cut
    assert not weights.requires_grad
    assert int(stats["importance_capped"]) == 1
    right = sum(r - 1 - math.log(r) for r in (2, 0.5, 3))
    assert float(stats["mismatch_kl"]) == pytest.approx(right, abs=1e-5)
    ones, stats = losses.importance_weights(new, old, MASK, 0.0)
    assert torch.equal(ones, torch.ones(2, 3))
    assert float(stats["mismatch_kl"]) > 0


@pytest.mark.parametrize("cap, exact", [(0.0, False), (1.0, False), (100.0, True)])
def test_weights_turn_the_samplers_gradient_into_the_policys(cap: float, exact: bool) -> None:
    """Summed over all tokens with the sampler's probabilities; where no ratio is cut that is
    the policy's own gradient."""
    rng = torch.Generator().manual_seed(0)
    logits, other, reward = (torch.randn(1, 6, generator=rng) for _ in range(3))
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    sampler = other.log_softmax(-1)
    weights, _ = losses.importance_weights(logprobs, sampler, torch.ones(1, 6), cap)
    found = torch.autograd.grad(
        (sampler.exp() * weights * reward * logprobs).sum(), logits, retain_graph=True
    )[0]
    right = torch.autograd.grad((logprobs.exp() * reward).sum(), logits)[0]
    assert torch.allclose(found, right, atol=1e-6) == exact


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_ratio_one_the_clipped_gradient_is_that_of_reinforce(level: str) -> None:
    new = LOGPROBS.clone().requires_grad_()
    plain = LOGPROBS.clone().requires_grad_()
    weights = losses.token_weights(MASK.sum(1), "token", n_sequences=2, n_tokens=5, max_tokens=3)
    loss = losses.clipped_policy_loss(
        policy_ratio(new, LOGPROBS, MASK, level), ADVANTAGES, 0.2, 0.2
    )
    masked_sum(loss * weights, MASK).backward()
    policy_gradient_loss(plain, ADVANTAGES, MASK).backward()
    torch.testing.assert_close(new.grad, plain.grad)


def test_weights_of_the_three_papers_by_hand() -> None:
    lengths = torch.tensor([2, 3])
    for how, expected in (
        ("sequence", [1 / 4, 1 / 6]),
        ("token", [1 / 5] * 2),
        ("constant", [1 / 20] * 2),
    ):
        weights = losses.token_weights(lengths, how, n_sequences=2, n_tokens=5, max_tokens=10)
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
            assert (group_advantages(rewards, baseline) == 0).all()
            assert zero_variance(rewards).all()
    rewards[1, 1] = math.nextafter(reward, 1) + 1e-7
    assert zero_variance(rewards).tolist() == [True, False]


EARNED = torch.tensor([[0.0, 0.0, 1.0, 99.0], [0.5, 0.0, -1.0, 2.0]])
VALUES = torch.tensor([[0.2, 0.4, 0.6, 99.0], [0.1, 0.1, 0.1, 0.1]])
ON = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def test_gae_by_hand_and_as_the_monte_carlo_return() -> None:
    advantages, returns = estimate_gae(EARNED, torch.zeros_like(VALUES), ON, lam=1.0)
    monte_carlo = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.5, 1.0, 1.0, 2.0]])
    torch.testing.assert_close(advantages, monte_carlo)
    torch.testing.assert_close(returns, monte_carlo)
    advantages, returns = estimate_gae(EARNED, VALUES, ON, gamma=0.9, lam=0.5)
    third = 1 - 0.6
    second = 0.9 * 0.6 - 0.4 + 0.45 * third
    first = 0.9 * 0.4 - 0.2 + 0.45 * second
    torch.testing.assert_close(advantages[0], torch.tensor([first, second, third, 0.0]))
    torch.testing.assert_close(returns[0, :3], advantages[0, :3] + VALUES[0, :3])
    td, _ = estimate_gae(EARNED, VALUES, ON, gamma=0.9, lam=0.0)
    torch.testing.assert_close(td[0, :3], torch.tensor([0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 0.4]))


# two pairs of three tokens: log-probabilities per token, so that sums and means are easy
CHOSEN = torch.tensor([[-0.5, -1.0, -0.5], [-0.1, -0.2, -0.3]]).sum(1)  # -2.0, -0.6
REJECTED = torch.tensor([[-1.0, -1.0, -1.0], [-0.2, -0.1, -0.0]]).sum(1)  # -3.0, -0.3
STARTED = dict(ref_chosen=torch.tensor([-2.5, -0.6]), ref_rejected=torch.tensor([-2.5, -0.6]))
ONE = torch.tensor([1, 1])
THREE = torch.tensor([3, 3])
LENGTHS = dict(chosen_lengths=THREE, rejected_lengths=THREE)


def nats(x: float) -> float:
    return math.log(1 + math.exp(-x))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


CASES = {
    # (chosen - ref) - (rejected - ref) = 0.5 + 0.5 = 1 and 0 - 0.3 = -0.3
    "dpo": (dict(**STARTED, beta=0.5), [nats(0.5), nats(-0.15)]),
    "ipo": (dict(**STARTED, beta=0.25), [(1 - 2) ** 2, (-0.3 - 2) ** 2]),
    "cpo": (dict(beta=0.5), [nats(0.5) + 2 / 3, nats(-0.15) + 0.2]),
    "simpo": (dict(beta=3.0), [nats(1.0 - 1.0), nats(-0.3 - 1.0)]),
    "orpo": (
        dict(beta=0.2),
        [
            0.2 * nats(log_odds(-2 / 3) - log_odds(-1.0)) + 2 / 3,
            0.2 * nats(log_odds(-0.2) - log_odds(-0.1)) + 0.2,
        ],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_pair_losses_by_hand_and_the_signs_of_their_gradients(kind: str) -> None:
    settings, expected = CASES[kind]
    chosen = leaf(CHOSEN)
    rejected = leaf(REJECTED)
    judged = preference_losses.pair_loss(kind, chosen, rejected, **LENGTHS, **settings)
    assert judged.losses.tolist() == pytest.approx(expected, rel=1e-5)
    judged.losses.sum().backward()
    # a step raises what was preferred
    assert (chosen.grad < 0).all()
    assert (rejected.grad > 0).all()
    assert not judged.chosen_rewards.requires_grad
    assert not judged.rejected_rewards.requires_grad
    assert (judged.chosen_rewards > judged.rejected_rewards).tolist() == [True, False]


def test_ipo_stops_pulling_at_its_target_and_dpo_does_not() -> None:
    at_reference = (CHOSEN, REJECTED, CHOSEN, REJECTED)
    assert preference_losses.dpo_loss(*at_reference, 0.3).losses.tolist() == pytest.approx(
        [math.log(2)] * 2
    )
    assert preference_losses.ipo_loss(*at_reference, 0.25).losses.tolist() == pytest.approx(
        [4.0] * 2
    )
    for loss, ahead, sign in (
        (preference_losses.ipo_loss, 50, 1),
        (preference_losses.dpo_loss, 5, -1),
    ):
        far = leaf(CHOSEN + ahead)
        loss(far, REJECTED, CHOSEN, REJECTED, 0.1).losses.sum().backward()
        assert (far.grad.sign() == sign).all()


def test_simpo_and_orpo_divide_length_out_and_hold_at_probability_one() -> None:
    for loss in (preference_losses.simpo_loss, preference_losses.orpo_loss):
        once = loss(CHOSEN, REJECTED, THREE, THREE).losses
        torch.testing.assert_close(
            loss(CHOSEN * 2, REJECTED * 2, THREE * 2, THREE * 2).losses, once
        )
    cpo = preference_losses.cpo_loss
    assert not torch.allclose(cpo(CHOSEN * 2, REJECTED * 2).losses, cpo(CHOSEN, REJECTED).losses)
    sure = leaf(torch.zeros(1))
    judged = preference_losses.orpo_loss(
        sure, torch.tensor([-30.0]), torch.tensor([3]), torch.tensor([3])
    )
    judged.losses.sum().backward()
    assert judged.losses.isfinite().all()
    assert sure.grad.isfinite().all()


def test_kto_by_hand_and_the_signs_of_its_gradient() -> None:
    """r = 0.5 (liked) and -0.5 (not), z = 0.2, beta = 2: 1 - sigmoid(0.6) and 1 - sigmoid(1.4)."""
    logprobs = leaf(torch.tensor([-2.0, -3.0]))
    liked = torch.tensor([True, False])
    reference = torch.tensor([-2.5, -2.5])
    kto, reward = preference_losses.kto_loss(logprobs, reference, liked, 0.2, 2.0)
    assert kto.tolist() == pytest.approx(
        [1 / (1 + math.exp(0.6)), 1 / (1 + math.exp(1.4))], rel=1e-6
    )
    assert reward.tolist() == pytest.approx([1.0, -1.0])
    kto.sum().backward()
    assert logprobs.grad[0] < 0 < logprobs.grad[1]
    at_reference, _ = preference_losses.kto_loss(torch.zeros(2), torch.zeros(2), liked, 0.0)
    assert at_reference.tolist() == pytest.approx([0.5] * 2)
