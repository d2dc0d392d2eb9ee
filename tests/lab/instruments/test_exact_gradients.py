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


def mean_of(loss: Loss, group_size: int = 2, old: torch.Tensor | None = None) -> torch.Tensor:
    return expectation(WORLD, THETA, loss, group_size, old=old)


def test_the_world_has_every_text() -> None:
    assert WORLD.texts[:4] == ("", "a", "b", "aa")
    assert len(WORLD.texts) == 15


def test_the_probabilities_of_all_texts_add_up_to_one() -> None:
    assert float(WORLD.probabilities(THETA).sum()) == pytest.approx(1, abs=1e-12)


def test_the_divergence_of_a_policy_from_itself_is_zero() -> None:
    assert float(WORLD.kl(THETA, THETA)) == 0
    assert float(WORLD.kl(THETA, REFERENCE)) > 0.01


def test_a_uniform_policy_chooses_each_letter_and_the_end_equally_often() -> None:
    probabilities = WORLD.probabilities(WORLD.policy(scale=0.0))
    stops_at_once = float(probabilities[0])
    three_letters = float(probabilities[-1])  # full: there is no end to choose
    assert stops_at_once == pytest.approx(1 / 3)
    assert three_letters == pytest.approx(1 / 27)


def test_the_value_of_the_start_is_the_expected_reward() -> None:
    start = float(WORLD.values(THETA)[0, 0])
    assert start == pytest.approx(float(WORLD.expected_reward(THETA)))


def test_the_gradient_is_the_expected_score_times_reward() -> None:
    scores = WORLD.scores(THETA).sum(1)
    p = WORLD.probabilities(THETA)
    assert same((p * WORLD.rewards) @ scores, TRUTH)


def test_the_expected_score_is_zero() -> None:
    scores = WORLD.scores(THETA).sum(1)
    assert same(WORLD.probabilities(THETA) @ scores, torch.zeros_like(TRUTH))


@pytest.mark.parametrize("i", range(4))
def test_the_gradient_is_the_difference_quotient(i: int) -> None:
    step = torch.zeros_like(THETA)
    step.view(-1)[i] = 1e-5
    change = WORLD.expected_reward(THETA + step) - WORLD.expected_reward(THETA - step)
    assert float(change / 2e-5) == pytest.approx(float(TRUTH[i]), abs=1e-8)


FACTORS = {  # by which an estimator's mean is the gradient; the group mean's is (G - 1) / G
    "no baseline": 1.0,
    "leave one out": 1.0,
    "group mean": 1 / 2,
    "dr_grpo": 1 / 2,
    "ppo, exact value": 1.0,
}


@pytest.mark.parametrize("name", FACTORS)
def test_estimators_are_unbiased_up_to_a_known_factor(name: str) -> None:
    assert same(mean_of(ESTIMATORS[name]), FACTORS[name] * TRUTH)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in FACTORS])
def test_the_other_estimators_are_biased_and_still_uphill(name: str) -> None:
    mean = mean_of(ESTIMATORS[name])
    along = (mean @ TRUTH) / (TRUTH @ TRUTH) * TRUTH
    assert float((mean - along).norm() / mean.norm()) > 0.02
    assert cosine(mean, TRUTH) > 0.5


def test_a_group_mean_with_the_completion_itself_shrinks_the_gradient() -> None:
    assert same(mean_of(ESTIMATORS["group mean"], 3), 2 / 3 * TRUTH)


@pytest.mark.parametrize(
    ("baseline", "aggregation"),
    [("zscore", "constant"), ("leave_one_out", "sequence"), ("leave_one_out", "token")],
)
def test_the_std_alone_and_the_length_alone_each_turn_the_gradient(
    baseline: str, aggregation: str
) -> None:
    found = mean_of(lab.group_loss(baseline=baseline, aggregation=aggregation), 3)
    assert cosine(found, TRUTH) < 0.9999


def test_without_both_the_gradient_keeps_its_direction() -> None:
    found = mean_of(lab.group_loss(baseline="leave_one_out", aggregation="constant"), 3)
    assert cosine(found, TRUTH) > 1 - 1e-12


def test_lambda_one_is_unbiased_for_any_value_and_less_needs_the_exact_one() -> None:
    assert same(mean_of(lab.gae_loss(lam=1.0, value_error=0.5)), TRUTH)
    assert same(mean_of(lab.gae_loss(lam=0.0)), TRUTH)
    assert not same(mean_of(lab.gae_loss(lam=0.0, value_error=0.5)), TRUTH)


def variance(name: str) -> float:
    """Of an estimator's gradient over all groups of two."""
    at, p = lab.every_group(WORLD, 2, THETA)
    found = lab.group_gradients(WORLD, THETA, ESTIMATORS[name], at)
    return float(p @ (found - p @ found).square().sum(1))


def test_baselines_lower_the_variance() -> None:
    assert variance("ppo, exact value") < variance("no baseline")
    assert variance("leave one out") != variance("no baseline")


def without_ratio(groups: Groups, logprobs: torch.Tensor) -> torch.Tensor:
    return -groups.rewards.view(-1, 1) * logprobs / groups.at.shape[1]


def ratio_of_texts(groups: Groups, logprobs: torch.Tensor) -> torch.Tensor:
    old = groups.rows(WORLD.logprobs(groups.old))
    ratio = (logprobs - old).sum(1, keepdim=True).detach().exp()
    return ratio * without_ratio(groups, logprobs)


def test_ratios_of_tokens_and_of_texts_off_policy() -> None:
    """Importance sampling needs the product of all ratios; one token's ignores the others, and
    no ratio is worse."""
    old = THETA + 0.3 * (REFERENCE - THETA)

    def error(loss: Loss) -> float:
        return float((mean_of(loss, old=old) - TRUTH).norm())

    assert error(ratio_of_texts) < 1e-12
    assert 1e-12 < error(ESTIMATORS["no baseline"]) < error(without_ratio)


def test_k1_as_a_loss_is_noise_of_mean_zero() -> None:
    """Without any reward it still moves a policy, in random directions."""
    loss = kl_in_loss("k1", REFERENCE)
    assert same(mean_of(loss), torch.zeros_like(TRUTH))
    at = WORLD.sample(THETA, 50, 4)
    assert float(lab.group_gradients(WORLD, THETA, loss, at).norm(dim=1).min()) > 0.1


def test_k2_as_a_loss_has_the_gradient_of_the_divergence_and_k3_has_not() -> None:
    one = World(length=1)  # of single choices
    a = one.policy(1)
    b = one.policy(2)
    exact = one.kl_gradient(a, b)
    assert same(expectation(one, a, kl_in_loss("k2", b)), exact)
    assert not same(expectation(one, a, kl_in_loss("k3", b)), exact)


def test_k1_and_k3_as_values_are_unbiased_and_k2_is_not() -> None:
    p = WORLD.probabilities(THETA)
    exact = float(WORLD.kl(THETA, REFERENCE))

    def mean(kind: str) -> float:
        at = losses.kl_estimate(WORLD.logprobs(THETA), WORLD.logprobs(REFERENCE), kind)
        return float(p @ (at * WORLD.mask).sum(1))

    assert mean("k1") == pytest.approx(exact, rel=1e-10)
    assert mean("k3") == pytest.approx(exact, rel=1e-10)
    assert mean("k2") != pytest.approx(exact, rel=1e-2)
