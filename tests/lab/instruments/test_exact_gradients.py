"""Every estimator against the exact gradient, by enumeration: unbiased or biased as theory
predicts."""

import pytest
import torch

from codechat.rl import losses
from codechat_lab.instruments import exact_gradients as lab
from codechat_lab.instruments.exact_gradients import (
    ESTIMATORS,
    Groups,
    Loss,
    World,
    cosine,
    expectation,
    kl_in_loss,
)

WORLD = World(length=3, reward=lambda text: lab.staircase(text, "ab"))
THETA = WORLD.policy(seed=1)
REFERENCE = WORLD.policy(seed=2)
TRUTH = WORLD.gradient(THETA)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, atol=1e-12, rtol=1e-9))


def mean_of(loss: Loss, group_size: int = 2, **how: torch.Tensor) -> torch.Tensor:
    return expectation(WORLD, THETA, loss, group_size, **how)


def test_the_world_is_complete() -> None:
    assert WORLD.texts[:4] == ("", "a", "b", "aa")
    assert len(WORLD.texts) == 15
    assert float(WORLD.probabilities(THETA).sum()) == pytest.approx(1, abs=1e-12)
    assert float(WORLD.kl(THETA, THETA)) == 0
    assert float(WORLD.kl(THETA, REFERENCE)) > 0.01
    uniform = WORLD.policy(scale=0.0)
    assert float(WORLD.probabilities(uniform)[0]) == pytest.approx(1 / 3)  # stop at once
    assert float(WORLD.probabilities(uniform)[-1]) == pytest.approx(
        1 / 27
    )  # three letters, then full
    assert float(WORLD.values(THETA)[0, 0]) == pytest.approx(float(WORLD.expected_reward(THETA)))


def test_the_gradient_is_the_expected_score_times_reward() -> None:
    scores = WORLD.scores(THETA).sum(1)
    p = WORLD.probabilities(THETA)
    assert same((p * WORLD.rewards) @ scores, TRUTH)
    assert same(p @ scores, torch.zeros_like(TRUTH))
    for i, e in enumerate(
        1e-5 * torch.eye(THETA.numel(), dtype=torch.float64)[:4].view(4, *THETA.shape)
    ):
        change = WORLD.expected_reward(THETA + e) - WORLD.expected_reward(THETA - e)
        assert float(change / 2e-5) == pytest.approx(float(TRUTH[i]), abs=1e-8)


def test_unbiased_up_to_a_known_factor_or_biased_by_more_and_still_uphill() -> None:
    """The group mean includes the completion itself, which scales the gradient by (G - 1) / G."""
    factors = {
        "no baseline": 1.0,
        "leave one out": 1.0,
        "group mean": 1 / 2,
        "dr_grpo": 1 / 2,
        "ppo, exact value": 1.0,
    }
    for name, loss in ESTIMATORS.items():
        mean = mean_of(loss)
        along = (mean @ TRUTH) / (TRUTH @ TRUTH) * TRUTH
        if name in factors:
            assert same(mean, factors[name] * TRUTH), name
        else:
            assert (
                float((mean - along).norm() / mean.norm()) > 0.02 and cosine(mean, TRUTH) > 0.5
            ), name
    assert same(mean_of(ESTIMATORS["group mean"], 3), 2 / 3 * TRUTH)


def test_where_the_bias_of_grpo_comes_from() -> None:
    """Division by the std alone, and by the length alone, each turn the gradient."""
    for baseline, aggregation in (
        ("zscore", "constant"),
        ("leave_one_out", "sequence"),
        ("leave_one_out", "token"),
    ):
        found = mean_of(lab.group_loss(baseline=baseline, aggregation=aggregation), 3)
        assert cosine(found, TRUTH) < 0.9999
    unbiased = mean_of(lab.group_loss(baseline="leave_one_out", aggregation="constant"), 3)
    assert cosine(unbiased, TRUTH) > 1 - 1e-12


def test_lambda_one_is_unbiased_for_any_value_and_less_needs_the_exact_one() -> None:
    assert same(mean_of(lab.gae_loss(lam=1.0, value_error=0.5)), TRUTH)
    assert same(mean_of(lab.gae_loss(lam=0.0)), TRUTH)
    assert not same(mean_of(lab.gae_loss(lam=0.0, value_error=0.5)), TRUTH)


def test_baselines_lower_the_variance() -> None:
    at, p = lab.every_group(WORLD, 2, THETA)

    def variance(loss: Loss) -> float:
        found = lab.group_gradients(WORLD, THETA, loss, at)
        return float(p @ (found - p @ found).square().sum(1))

    plain, other, critic = (
        variance(ESTIMATORS[n]) for n in ("no baseline", "leave one out", "ppo, exact value")
    )
    assert critic < plain
    assert other != plain


def test_ratios_of_tokens_and_of_texts_off_policy() -> None:
    """Importance sampling needs the product of all ratios; one token's ignores the others, and
    no ratio is worse."""

    def exact(groups: Groups, logprobs: torch.Tensor) -> torch.Tensor:
        ratio = (
            (logprobs - groups.rows(WORLD.logprobs(groups.old))).sum(1, keepdim=True).detach().exp()
        )
        return ratio * without(groups, logprobs)

    def without(groups: Groups, logprobs: torch.Tensor) -> torch.Tensor:
        return -groups.rewards.view(-1, 1) * logprobs / groups.at.shape[1]

    old = THETA + 0.3 * (REFERENCE - THETA)
    errors = [
        float((mean_of(loss, old=old) - TRUTH).norm())
        for loss in (exact, ESTIMATORS["no baseline"], without)
    ]
    assert errors[0] < 1e-12 < errors[1] < errors[2]


def test_the_kl_estimates_as_losses_and_as_values() -> None:
    # k1 in the loss is noise of mean zero: without any reward it still moves a policy, in
    # random directions
    loss = kl_in_loss("k1", REFERENCE)
    assert same(mean_of(loss), torch.zeros_like(TRUTH))
    at = WORLD.sample(THETA, 50, 4)
    assert float(lab.group_gradients(WORLD, THETA, loss, at).norm(dim=1).min()) > 0.1
    one = World(length=1)  # of single choices
    a = one.policy(1)
    b = one.policy(2)
    assert same(expectation(one, a, kl_in_loss("k2", b)), one.kl_gradient(a, b))
    assert not same(expectation(one, a, kl_in_loss("k3", b)), one.kl_gradient(a, b))
    p = WORLD.probabilities(THETA)
    exact = float(WORLD.kl(THETA, REFERENCE))
    at = WORLD.logprobs(THETA), WORLD.logprobs(REFERENCE)
    found = {
        k: float(p @ (losses.kl_estimate(*at, k) * WORLD.mask).sum(1)) for k in ("k1", "k2", "k3")
    }
    assert found["k1"] == pytest.approx(exact, rel=1e-10)
    assert found["k3"] == pytest.approx(exact, rel=1e-10)
    assert found["k2"] != pytest.approx(exact, rel=1e-2)
