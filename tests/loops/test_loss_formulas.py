"""Losses by hand with the signs of their gradients: aggregation, values, generalised advantages, preferences. Clipped losses are in tests/rl."""

from __future__ import annotations

import math

import pytest
import torch

from codechat.rl import losses, preference_losses
from codechat.rl.advantages import estimate_gae

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
REWARDS = torch.tensor([[0.0, 0.0, 1.0, 99.0], [0.5, 0.0, -1.0, 2.0]])
VALUES = torch.tensor([[0.2, 0.4, 0.6, 99.0], [0.1, 0.1, 0.1, 0.1]])
ON = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_ratio_one_the_clipped_gradient_is_that_of_reinforce(level: str) -> None:
    """What makes GRPO's first update a REINFORCE step."""
    new, plain = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    weights = losses.token_weights(MASK.sum(1), "token", n_sequences=2, n_tokens=5, max_tokens=3)
    loss = losses.clipped_policy_loss(losses.policy_ratio(new, OLD, MASK, level), ADVANTAGES, 0.2, 0.2)
    losses.masked_sum(loss * weights, MASK).backward()
    losses.policy_gradient_loss(plain, ADVANTAGES, MASK).backward()
    torch.testing.assert_close(new.grad, plain.grad)


def test_weights_of_the_three_papers_by_hand() -> None:
    lengths = torch.tensor([2, 3])
    for how, expected in (("sequence", [1 / 4, 1 / 6]), ("token", [1 / 5] * 2), ("constant", [1 / 20] * 2)):
        weights = losses.token_weights(lengths, how, n_sequences=2, n_tokens=5, max_tokens=10)
        assert weights[:, 0].tolist() == pytest.approx(expected)


def test_value_loss_takes_the_larger_error() -> None:
    values = torch.tensor([[1.0, 0.5, 0.1]], requires_grad=True)
    loss = losses.value_loss(values, torch.zeros(1, 3), torch.tensor([[0.9, -1.0, 1.0]]), clip_eps=0.2)
    torch.testing.assert_close(loss, torch.tensor([[0.7**2, 1.5**2, 0.9**2]]) / 2)
    loss.sum().backward()
    assert values.grad[0, 0] == 0 and values.grad[0, 1] > 0 > values.grad[0, 2]  # the first is beyond its bound
    unclipped = losses.value_loss(values, values * 0, values + 1, clip_eps=None)
    torch.testing.assert_close(unclipped, torch.full((1, 3), 0.5))


def test_gae_by_hand_and_as_the_monte_carlo_return() -> None:
    advantages, returns = estimate_gae(REWARDS, torch.zeros_like(VALUES), ON, lam=1.0)
    monte_carlo = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.5, 1.0, 1.0, 2.0]])
    torch.testing.assert_close(advantages, monte_carlo)
    torch.testing.assert_close(returns, monte_carlo)
    advantages, returns = estimate_gae(REWARDS, VALUES, ON, gamma=0.9, lam=0.5)
    third = 1 - 0.6
    second = 0.9 * 0.6 - 0.4 + 0.45 * third
    first = 0.9 * 0.4 - 0.2 + 0.45 * second
    torch.testing.assert_close(advantages[0], torch.tensor([first, second, third, 0.0]))
    torch.testing.assert_close(returns[0, :3], advantages[0, :3] + VALUES[0, :3])
    td, _ = estimate_gae(REWARDS, VALUES, ON, gamma=0.9, lam=0.0)
    torch.testing.assert_close(td[0, :3], torch.tensor([0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 0.4]))


# ---------------------------------------------------------------- preferences


# two pairs of three tokens: log-probabilities per token, so that sums and means are easy
CHOSEN = torch.tensor([[-0.5, -1.0, -0.5], [-0.1, -0.2, -0.3]]).sum(1)  # -2.0, -0.6
REJECTED = torch.tensor([[-1.0, -1.0, -1.0], [-0.2, -0.1, -0.0]]).sum(1)  # -3.0, -0.3
REFERENCE = dict(ref_chosen=torch.tensor([-2.5, -0.6]), ref_rejected=torch.tensor([-2.5, -0.6]))
THREE = torch.tensor([3, 3])
LENGTHS = dict(chosen_lengths=THREE, rejected_lengths=THREE)


def nats(x: float) -> float:
    """-log sigmoid(x)."""
    return math.log(1 + math.exp(-x))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


CASES = {
    # (chosen - ref) - (rejected - ref) = 0.5 + 0.5 = 1 and 0 - 0.3 = -0.3
    "dpo": (dict(**REFERENCE, beta=0.5), [nats(0.5), nats(-0.15)]),
    "ipo": (dict(**REFERENCE, beta=0.25), [(1 - 2) ** 2, (-0.3 - 2) ** 2]),
    "cpo": (dict(beta=0.5), [nats(0.5), nats(-0.15)]),
    "simpo": (dict(beta=3.0, margin=0.5), [nats(1.0 - 0.5), nats(-0.3 - 0.5)]),
    "orpo": (
        dict(beta=0.2),
        [0.2 * nats(log_odds(-2 / 3) - log_odds(-1.0)), 0.2 * nats(log_odds(-0.2) - log_odds(-0.1))],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_pair_losses_by_hand_and_the_signs_of_their_gradients(kind: str) -> None:
    settings, expected = CASES[kind]
    chosen, rejected = leaf(CHOSEN), leaf(REJECTED)
    judged = preference_losses.pair_loss(kind, chosen, rejected, **LENGTHS, **settings)
    assert judged.losses.tolist() == pytest.approx(expected, rel=1e-5)
    judged.losses.sum().backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()  # a step raises what was preferred
    assert not judged.chosen_rewards.requires_grad and not judged.rejected_rewards.requires_grad
    assert (judged.chosen_rewards > judged.rejected_rewards).tolist() == [True, False]
    with_sft = preference_losses.pair_loss(kind, CHOSEN, REJECTED, **LENGTHS, sft_coef=0.5, **settings)
    assert with_sft.losses.tolist() == pytest.approx([expected[0] + 0.5 * 2 / 3, expected[1] + 0.5 * 0.2], rel=1e-5)


def test_ipo_stops_pulling_at_its_target_and_dpo_does_not() -> None:
    at_reference = (CHOSEN, REJECTED, CHOSEN, REJECTED)
    assert preference_losses.dpo_loss(*at_reference, 0.3).losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert preference_losses.ipo_loss(*at_reference, 0.25).losses.tolist() == pytest.approx([4.0] * 2)
    for loss, ahead, sign in ((preference_losses.ipo_loss, 50, 1), (preference_losses.dpo_loss, 5, -1)):
        far = leaf(CHOSEN + ahead)
        loss(far, REJECTED, CHOSEN, REJECTED, 0.1).losses.sum().backward()
        assert (far.grad.sign() == sign).all()


def test_simpo_and_orpo_divide_length_out_and_hold_at_probability_one() -> None:
    for loss in (preference_losses.simpo_loss, preference_losses.orpo_loss):
        once = loss(CHOSEN, REJECTED, THREE, THREE).losses
        torch.testing.assert_close(loss(CHOSEN * 2, REJECTED * 2, THREE * 2, THREE * 2).losses, once)
    cpo = preference_losses.cpo_loss
    assert not torch.allclose(cpo(CHOSEN * 2, REJECTED * 2).losses, cpo(CHOSEN, REJECTED).losses)
    sure = leaf(torch.zeros(1))
    judged = preference_losses.orpo_loss(sure, torch.tensor([-30.0]), torch.tensor([3]), torch.tensor([3]))
    judged.losses.sum().backward()
    assert judged.losses.isfinite().all() and sure.grad.isfinite().all()


def test_kto_by_hand_and_the_signs_of_its_gradient() -> None:
    """r = 0.5 (liked) and -0.5 (not), z = 0.2, beta = 2: 1 - sigmoid(0.6) and 1 - sigmoid(1.4)."""
    logprobs, liked = leaf(torch.tensor([-2.0, -3.0])), torch.tensor([True, False])
    reference = torch.tensor([-2.5, -2.5])
    kto, reward = preference_losses.kto_loss(logprobs, reference, liked, 0.2, 2.0)
    assert kto.tolist() == pytest.approx([1 / (1 + math.exp(0.6)), 1 / (1 + math.exp(1.4))], rel=1e-6)
    assert reward.tolist() == pytest.approx([1.0, -1.0])
    kto.sum().backward()
    assert logprobs.grad[0] < 0 < logprobs.grad[1]
    assert preference_losses.kto_loss(torch.zeros(2), torch.zeros(2), liked, 0.0)[0].tolist() == pytest.approx(
        [0.5] * 2
    )
