"""GRPO: the loss by hand, its identities with REINFORCE, what the KL term does where, and the loop from the command to a resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from contracts import (
    all_or_nothing,
    assert_close_curves,
    assert_same_weights,
    curve,
    dead_task_contract,
    resume_contract,
    train_one_and_two,
    weights,
)
from learning import Claim, above, below, hold, lesson
from raising import raising

from codechat import grpo, reinforce
from codechat.core import config
from codechat.core.errors import ConfigError, UserError
from codechat.rl import losses, rollout
from codechat.rl.advantages import estimate_gae
from codechat.runs import run
from codechat.tasks import toy

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -8.0]])
ADVANTAGES = torch.tensor([[2.0], [-1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
# ratios 2, 0.5, (hidden); 0.5, 1.1, 2
NEW = OLD + torch.tensor([[2.0, 0.5, 9.0], [0.5, 1.1, 2.0]]).log()


# ---------------------------------------------------------------- the clipped loss


def clipped(
    new: torch.Tensor, level: str = "token", low: float = 0.2, high: float = 0.2, A: torch.Tensor = ADVANTAGES
) -> torch.Tensor:
    return losses.clipped_policy_loss(losses.policy_ratio(new, OLD, MASK, level), A, low, high)


def test_the_clipped_loss_by_hand_on_all_four_sides() -> None:
    """A > 0: the ratio counts up to 1.28, and below 1 without bound. A < 0: down to 0.8, and above 1 without bound."""
    new = NEW.clone().requires_grad_()
    loss = clipped(new, high=0.28)
    torch.testing.assert_close(loss[:, :2], torch.tensor([[-2 * 1.28, -2 * 0.5], [0.8, 1.1]]))
    assert loss[1, 2].item() == pytest.approx(2.0)
    losses.masked_sum(loss, MASK).backward()
    # clipped tokens have no gradient; the others -A x ratio
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.1, 2.0]]))
    stats = losses.clip_statistics(losses.policy_ratio(NEW, OLD, MASK), NEW, OLD, ADVANTAGES, MASK, 0.2, 0.28)
    assert (int(stats["clipped_low"]), int(stats["clipped_high"]), float(stats["ratio_max"])) == (
        1,
        1,
        pytest.approx(2.0),
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_step_raises_what_was_good_and_lowers_what_was_bad(advantage: float) -> None:
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    new = logits.log_softmax(-1)[..., 1]
    ratio = losses.policy_ratio(new, new.detach(), torch.ones(1, 1))
    losses.clipped_policy_loss(ratio, torch.tensor([[advantage]])).sum().backward()
    assert ((logits - 0.1 * logits.grad).softmax(-1)[0, 0, 1] > 1 / 3) == (advantage > 0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_ratio_one_its_gradient_is_that_of_reinforce(level: str) -> None:
    """What makes GRPO's first update a REINFORCE step; per sequence GSPO spreads the same gradient evenly, so only the mean per sequence agrees."""
    new, plain = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    weights = losses.token_weights(MASK.sum(1), "token", n_sequences=2, n_tokens=5, max_tokens=3)
    losses.masked_sum(clipped(new, level) * weights, MASK).backward()
    losses.policy_gradient_loss(plain, ADVANTAGES, MASK).backward()
    torch.testing.assert_close(new.grad, plain.grad)


def test_gspo_has_one_ratio_per_sequence_and_clips_it_whole() -> None:
    new = NEW.clone().requires_grad_()
    loss = clipped(new, "sequence", 0.05, 0.05)
    first, second = math.sqrt(2.0 * 0.5), (0.5 * 1.1 * 2.0) ** (1 / 3)  # 1 and 1.032: neither is clipped
    torch.testing.assert_close(loss[0, :2], torch.full((2,), -2 * first))
    torch.testing.assert_close(loss[1], torch.full((3,), second))
    losses.masked_sum(loss[1:], MASK[1:]).backward()
    torch.testing.assert_close(new.grad[1], torch.full((3,), second))  # 3 tokens x ratio / 3
    assert clipped(NEW, "sequence", high=0.03, A=ADVANTAGES.abs())[1].tolist() == pytest.approx([-1.03] * 3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(poison: float, level: str) -> None:
    new = NEW.clone()
    new[0, 2] = poison
    new.requires_grad_()
    losses.masked_sum(clipped(new, level), MASK).backward()
    assert new.grad.isfinite().all() and new.grad[0, 2] == 0
    ratio = losses.policy_ratio(new, OLD, MASK, level)
    stats = losses.clip_statistics(ratio, new, OLD, ADVANTAGES, MASK, 0.2, 0.2)
    assert all(v.isfinite() for v in stats.values())


def test_weights_of_the_three_papers_by_hand() -> None:
    lengths = torch.tensor([2, 3])
    found = {
        how: losses.token_weights(lengths, how, n_sequences=2, n_tokens=5, max_tokens=10)[:, 0].tolist()
        for how in ("sequence", "token", "constant")
    }
    assert found["sequence"] == pytest.approx([1 / 4, 1 / 6])
    assert found["token"] == pytest.approx([1 / 5, 1 / 5])
    assert found["constant"] == pytest.approx([1 / 20, 1 / 20])


def test_microbatches_add_up_whatever_the_weighing() -> None:
    for how in ("sequence", "token", "constant"):

        def total(rows: slice) -> torch.Tensor:
            weights = losses.token_weights(MASK[rows].sum(1), how, n_sequences=2, n_tokens=5, max_tokens=7)
            return losses.masked_sum(clipped(NEW)[rows] * weights, MASK[rows])

        torch.testing.assert_close(total(slice(0, 1)) + total(slice(1, 2)), total(slice(0, 2)))


def test_value_loss_takes_the_larger_error() -> None:
    values = torch.tensor([[1.0, 0.5, 0.1]], requires_grad=True)
    loss = losses.value_loss(values, torch.zeros(1, 3), torch.tensor([[0.9, -1.0, 1.0]]), clip_eps=0.2)
    torch.testing.assert_close(loss, torch.tensor([[0.7**2, 1.5**2, 0.9**2]]) / 2)
    loss.sum().backward()
    assert (
        values.grad[0, 0] == 0 and values.grad[0, 1] > 0 and values.grad[0, 2] < 0
    )  # the first has moved past the bound already
    torch.testing.assert_close(
        losses.value_loss(values, values * 0, values + 1, clip_eps=None), torch.full((1, 3), 0.5)
    )


# ---------------------------------------------------------------- generalised advantages


REWARDS = torch.tensor([[0.0, 0.0, 1.0, 99.0], [0.5, 0.0, -1.0, 2.0]])
VALUES = torch.tensor([[0.2, 0.4, 0.6, 99.0], [0.1, 0.1, 0.1, 0.1]])
ON = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def test_gae_with_lambda_one_and_no_value_is_the_monte_carlo_return() -> None:
    advantages, returns = estimate_gae(REWARDS, torch.zeros_like(VALUES), ON, lam=1.0)
    monte_carlo = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.5, 1.0, 1.0, 2.0]])
    torch.testing.assert_close(advantages, monte_carlo)
    torch.testing.assert_close(returns, monte_carlo)


def test_gae_by_hand() -> None:
    advantages, returns = estimate_gae(REWARDS, VALUES, ON, gamma=0.9, lam=0.5)
    third = 1 - 0.6
    second = 0.9 * 0.6 - 0.4 + 0.45 * third
    first = 0.9 * 0.4 - 0.2 + 0.45 * second
    torch.testing.assert_close(advantages[0], torch.tensor([first, second, third, 0.0]))
    torch.testing.assert_close(returns[0, :3], advantages[0, :3] + VALUES[0, :3])
    td, _ = estimate_gae(REWARDS, VALUES, ON, gamma=0.9, lam=0.0)
    torch.testing.assert_close(td[0, :3], torch.tensor([0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 0.4]))


# ---------------------------------------------------------------- the loop


def settings(cls: type = grpo.GRPOConfig, **changes: object) -> object:
    return config.resolve(
        cls, "toy", overrides=dict(max_steps=6, save_every=0, diagnose_groups=0) | changes, presets=grpo.RUN_PRESETS
    )


def distance(a: run.Run, b: run.Run) -> float:
    """Mean absolute difference of the weights. Not the largest: Adam makes a whole step of a gradient that is rounding only."""
    one, other = weights(a), weights(b)
    return float(torch.cat([(one[n] - other[n]).abs().flatten() for n in one]).mean())


def test_the_first_update_per_batch_is_reinforce_with_a_group_baseline(home: Path) -> None:
    """One update per batch keeps the ratio at 1: with REINFORCE's baseline and loss aggregation the two loops walk the same path.

    Three steps: AdamW's first updates divide by gradients near 0, and blow up what two orders of summation differ by."""
    plain = reinforce.train(settings(reinforce.ReinforceConfig, run_name="plain", baseline="mean", max_steps=3))
    ours = grpo.train(settings(run_name="ours", baseline="mean", loss_aggregation="token", minibatches=1, max_steps=3))
    other = grpo.train(
        settings(run_name="other", baseline="zscore", loss_aggregation="token", minibatches=1, max_steps=3)
    )
    assert [r for _, r in curve(plain, "reward_mean")] == [r for _, r in curve(ours, "reward_mean")]
    for (_, a), (_, b) in zip(curve(plain, "grad_norm"), curve(ours, "grad_norm"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert distance(plain, ours) < 1e-6 < 1e-4 < distance(plain, other)
    assert ours.metrics()["clip_frac"].max() == 0 and ours.metrics()["ratio_max"].max() == pytest.approx(1, abs=1e-4)


@lesson("grpo", "dr_grpo", "dapo", "gspo")
def lift_toy_grpo(variant: str, home: Path, seed: int) -> list[Claim]:
    rewards = (
        grpo.train(settings(run_name="toy", variant=variant, max_steps=120, seed=seed))
        .metrics()
        .sort_values("step")["reward_mean"]
    )
    return [below("first reward", rewards.iloc[0], 0.2), above("last five rewards", rewards.iloc[-5:].mean(), 0.9)]


@pytest.mark.parametrize(
    "variant", ["grpo", *(pytest.param(v, marks=pytest.mark.slow) for v in ("dr_grpo", "dapo", "gspo"))]
)
def test_it_lifts_the_toy_task_with_its_defaults(variant: str, home: Path) -> None:
    hold(lift_toy_grpo(variant, home, seed=0))


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(variant="dapo", resample_rounds=2, kl_coef=0.05, kl_in="reward", kl_kind="k1", old_logprobs="trainer"),
    ],
    ids=["grpo", "dapo with KL"],
)
def test_resuming_continues_the_same_curve_bitwise(how: dict, home: Path) -> None:
    resume_contract(grpo.train, settings(max_steps=8, save_every=4, **how), 4)


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_without_reward_no_kl_term_moves_the_policy_and_the_run_ends(
    where: str, kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's 16.7 hours: with reward 0 everywhere its k1 term moved the policy by 1.5 nats per token."""
    started = grpo.train(settings(run_name="start", max_steps=1, lr=0.0))
    monkeypatch.setattr(toy.ToyTask, "score", all_or_nothing)
    found = grpo.train(
        settings(
            run_name="dead",
            max_steps=200,
            allow_dead=True,
            dead_patience=7,
            kl_coef=0.5,
            kl_kind=kind,
            kl_in=where,
            init_from="start",
        )
    )
    assert found.status["status"] == "stopped" and "DEAD" in found.status["reason"] and "SFT" in found.status["reason"]
    assert len(found.metrics()) == 7
    assert_same_weights(started, found)


def test_a_dead_task_is_rejected_before_anything_is_written(home: Path) -> None:
    dead_task_contract(grpo.train, settings(run_name="dead", max_steps=50))


def test_groups_without_variance_are_replaced_by_further_problems(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`upper` never has variance here: every group of it is exchanged, and the batch that is learned from has none."""
    score = toy.ToyTask.score
    monkeypatch.setattr(
        toy.ToyTask,
        "score",
        lambda self, problem, text: (
            toy.Score(0.0, "none", {}, False) if problem.gold == "upper" else score(self, problem, text)
        ),
    )
    taken: list[rollout.RolloutBatch] = []
    pack = rollout.pack
    monkeypatch.setattr(rollout, "pack", lambda batch, *a, **k: taken.append(batch) or pack(batch, *a, **k))
    frame = grpo.train(settings(run_name="fresh", max_steps=4, minibatches=1, resample_rounds=8)).metrics()
    # of the batch that is trained on
    assert frame["effective_groups"].tolist() == [8.0] * 4 and frame["frac_zero_std_groups"].tolist() == [0.0] * 4
    assert frame["resampled_groups"].min() >= 1
    assert taken and all(p.gold != "upper" for batch in taken for p in batch.problems)


def test_replacing_groups_keeps_order_and_ids() -> None:
    """Pure bookkeeping: group 1 of three is exchanged, the others stay where they were."""

    def made(names: str) -> rollout.RolloutBatch:
        texts = [n + i for n in names for i in "xy"]
        scores = [toy.Score(float(ord(n)), "some", {}, False) for n in names for _ in "xy"]
        return rollout.RolloutBatch(list(names), [[ord(n)] for n in names], list(texts), texts, scores, 2)  # type: ignore[arg-type]

    batch = made("abc").replace([1], made("z"))
    assert batch.problems == list("azc") and batch.texts == ["ax", "ay", "zx", "zy", "cx", "cy"]
    assert batch.rewards[:, 0].tolist() == [ord(n) for n in "azc"] and batch.prompts == [[97], [122], [99]]


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(minibatches=3), ("minibatches", 3, "device_batch_size", 8)),
        (dict(group_size=1), ("group_size", 1)),
        (dict(temperature=0.0), ("temperature", 0.0)),
        (dict(clip_eps_low=1.5), ("clip_eps_low", 1.5)),
        (dict(kl_coef=-0.1), ("kl_coef", -0.1)),
        (dict(inner_epochs=0), ("inner_epochs", 0)),
        (dict(kl_coef=float("nan")), ("kl_coef", "nan")),
    ],
)
def test_settings_that_cannot_be_are_rejected(changes: dict, named: tuple) -> None:
    with raising(UserError, *named):
        settings(**changes)


def test_variants_fill_only_what_is_not_set(home: Path) -> None:
    found = settings(variant="dapo", clip_eps_high=0.5).resolved()
    assert (found.clip_eps_low, found.clip_eps_high, found.loss_aggregation, found.resample_rounds) == (
        0.2,
        0.5,
        "token",
        4,
    )
    made = grpo.train(settings(variant="dr_grpo", max_steps=1, run_name="kept"))
    assert made.config["baseline"] == "mean" and made.config["loss_aggregation"] == "constant"


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(home: Path) -> None:
    """torchrun with two gloo ranks against one process with the same global batch, groups replaced and KL included."""
    cfg = settings(run_name="grpo", max_steps=3, variant="dapo", resample_rounds=2, kl_coef=0.1, inner_epochs=2)
    ((one, two),) = train_one_and_two(home, cfg)
    columns = (
        "reward_mean",
        "policy_loss",
        "grad_norm",
        "approx_kl",
        "kl_ref",
        "clip_frac",
        "effective_groups",
        "resampled_groups",
        "entropy",
    )
    assert_close_curves(one, two, *columns)
    assert distance(one, two) < 1e-5


def test_the_command_trains_and_says_what_it_refuses(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo.main(["--preset", "toy", "--max-steps", "2", "--run-name", "c", "--num-generations", "4"]) == 0
    made = run.Run.open("c")
    assert made.config["group_size"] == 4
    assert {"clip_frac", "approx_kl", "entropy", "logprob_mismatch", "frac_zero_std_groups", "effective_groups"} <= set(
        made.metrics().columns
    )
    assert made.metrics()["logprob_mismatch"].max() < 1e-3
    with raising(ConfigError, "varient", "variant"):
        grpo.main(["--varient", "dapo"])
