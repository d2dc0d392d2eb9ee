"""What every loop of the registry keeps: resumed it ends bit by bit as if nobody had stopped
it, accumulation and ranks change nothing, settings that cannot be are refused, and nothing that
is not finite is learned from or saved."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import contracts
import pytest
import torch
from contracts import TINY, assert_close_curves, dead_task_contract, small, train, weights
from jsonl import rows_of
from raising import raising

from codechat.core import registry
from codechat.core.errors import ConfigError, RunError, UserError
from codechat.models.gpt import GPT
from codechat.rl.engines import Engine
from codechat.runs import checkpoint, paths, run
from codechat.tasks import toy
from codechat.training.session import Session

LOOPS = tuple(registry.LOOPS)
RL = ("reinforce", "grpo", "ppo", "expert_iteration")
EPOCHS = dict(minibatches=2, inner_epochs=2)
# what a loop does beside its defaults
MORE: dict[str, dict[str, Any]] = {
    "reinforce": dict(entropy_coef=0.01, importance_cap=2.0, top_k=20),
    "grpo": dict(
        variant="dapo",
        resample_rounds=2,
        kl_coef=0.05,
        kl_in="reward",
        kl_kind="k1",
        old_logprobs="trainer",
        **EPOCHS,
    ),
    "ppo": dict(kl_coef=0.05, **EPOCHS),
    "expert_iteration": EPOCHS,
    "preference": dict(loss="kto"),
}
OTHERS = {
    "sft with LoRA": ("sft", dict(lora_rank=4)),
    "grpo by its paper": ("grpo", dict(kl_coef=0.05)),
    "preference on rollouts": (
        "preference",
        dict(data_dir=None, task="toy", sample_groups=8, loss="dpo"),
    ),
    "distill from the teacher's samples": ("distill", dict(samples="teacher")),
    "grpo under top-k": ("grpo", dict(top_k=20, kl_coef=0.05, kl_in="loss", **EPOCHS)),
    "chars by PPO": ("chars", dict(objective="ppo", minibatches=2)),
    "chars fed by itself": ("chars", dict(feed="own", max_tokens=8 * 4 * 4 * 4)),
    "chars denoised": ("chars", dict(objective="denoise")),
}
SUPERVISED = ("train_loss", "grad_norm")
COLUMNS = {
    "pretrain": SUPERVISED,
    "sft": SUPERVISED,
    "reinforce": ("reward_mean", "policy_loss", "grad_norm", "entropy"),
    "grpo": (
        "reward_mean",
        "policy_loss",
        "grad_norm",
        "approx_kl",
        "kl_ref",
        "clip_frac",
        "effective_groups",
        "resampled_groups",
    ),
    "ppo": (
        "reward_mean",
        "policy_loss",
        "value_loss",
        "explained_variance",
        "approx_kl",
        "kl_ref",
        "grad_norm",
    ),
    "expert_iteration": ("reward_mean", "train_loss", "kept_frac", "grad_norm"),
    "distill": ("reward_mean", "policy_loss", "teacher_kl", "grad_norm"),
    "preference": (
        "preference_loss",
        "preference_margin",
        "preference_accuracy",
        "chosen_logprob",
        "grad_norm",
    ),
    "chars": ("reward_mean", "grad_norm"),
}


@pytest.mark.parametrize("loop", [*LOOPS, *OTHERS])
def test_a_resumed_run_ends_bitwise_as_one_that_was_never_stopped(loop: str, home: Path) -> None:
    loop, more = OTHERS.get(loop, (loop, MORE.get(loop, {})))
    contracts.resume_contract(small(loop, home, **more), 2)


@pytest.mark.parametrize("loop", [*LOOPS, *OTHERS])
def test_a_last_evaluation_that_fails_loses_no_step_and_is_made_up_for_once(
    loop: str, home: Path
) -> None:
    """Nothing else is saved on the way: the checkpoint is the one of the last step. A second
    --resume finds nothing to do."""
    loop, more = OTHERS.get(loop, (loop, MORE.get(loop, {})))
    cfg = small(loop, home, **more | dict(save_every=0))
    whole = train(replace(cfg, run_name="whole"))
    cut = replace(cfg, run_name="cut")
    with contracts.failing_in("_evaluate", step=4):
        train(cut)
    failed = run.Run.open("cut")
    assert failed.status["status"] == "failed"
    assert failed.checkpoints() == [4]
    assert 4 not in set(failed.evals()["step"])
    assert len(failed.metrics()) == len(whole.metrics())
    for _ in range(2):
        resumed = train(replace(cut, resume=True))
        contracts.assert_same_runs(resumed, whole)
        assert resumed.status["status"] == "finished"
        kept = [(row["step"], row.get("completion")) for row in resumed.samples()]
        assert kept == [(row["step"], row.get("completion")) for row in whole.samples()]


def noisy_score(self: toy.ToyTask, problem: toy.Problem, text: str) -> toy.Score:
    """A reward of one's own that draws from Python's generator, in training and in evaluations."""
    return toy.Score(random.random(), "none", {}, False)


@pytest.mark.parametrize("killed", ["_evaluate", "apply_gradients"])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_an_evaluation_draws_changes_nothing_that_is_learned(
    loop: str,
    killed: str,
    home: Path,
    monkeypatch: Any,
) -> None:
    """Whether the run is killed in the evaluation of a checkpoint's weights, which is made up
    for, or behind it, where it is not repeated."""
    monkeypatch.setattr(toy.ToyTask, "score", noisy_score)
    cfg = small(loop, home, eval_every=2, **MORE.get(loop, {}))
    random.seed(5)
    whole = train(replace(cfg, run_name="whole"))
    random.seed(5)
    with contracts.failing_in(killed, step=2):
        train(replace(cfg, run_name="cut"))
    contracts.assert_same_runs(train(replace(cfg, run_name="cut", resume=True)), whole)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_died_before_its_first_checkpoint_does_not_repeat_its_first_evaluation(
    loop: str, home: Path
) -> None:
    cfg = small(loop, home, **MORE.get(loop, {}))
    whole = train(replace(cfg, run_name="whole"))
    with contracts.failing_in("apply_gradients", step=1):
        train(replace(cfg, run_name="cut"))
    assert not run.Run.open("cut").checkpoints()
    contracts.assert_same_runs(train(replace(cfg, run_name="cut", resume=True)), whole)


@pytest.mark.parametrize(
    "loop", [*(loop for loop in LOOPS if loop != "chars"), "preference by DPO"]
)
def test_accumulation_equals_one_large_batch(loop: str, home: Path) -> None:
    loop, more = (
        ("preference", dict(loss="dpo"))
        if loop == "preference by DPO"
        else (loop, MORE.get(loop, {}))
    )
    how = dict(max_steps=3, save_every=0) | more
    one = train(small(loop, home, run_name="one", device_batch_size=4, **how))
    four = train(small(loop, home, run_name="four", device_batch_size=1, grad_accum=4, **how))
    assert_close_curves(one, four, *COLUMNS[loop])


def test_two_ranks_learn_what_one_does(home: Path) -> None:
    """torchrun with two gloo ranks against one process with the same global batch, every loop
    in one process group."""
    cfgs = [small(loop, home, save_every=0, **MORE.get(loop, {})) for loop in LOOPS]
    for loop, (one, two) in zip(LOOPS, contracts.train_one_and_two(home, *cfgs), strict=True):
        assert two.status["status"] == "finished"
        assert_close_curves(one, two, *COLUMNS[loop])


UNDER_TOP_K = {
    "reinforce": dict(importance_cap=2.0),
    "grpo": dict(kl_coef=0.05, kl_in="loss"),
    "grpo with the trainer's": dict(
        old_logprobs="trainer", importance_cap=2.0, kl_coef=0.05, kl_in="reward"
    ),
    "ppo": dict(kl_coef=0.05, minibatches=1, inner_epochs=1),
    "expert_iteration": {},
    "distill": {},
}
ZERO = (
    "logprob_mismatch",
    "mismatch_kl",
    "importance_capped",
    "approx_kl",
    "clip_frac",
    "kl_ref",
    "teacher_kl",
)


@pytest.mark.parametrize("name", UNDER_TOP_K)
def test_under_top_k_equal_weights_differ_by_rounding(name: str, home: Path) -> None:
    """At the first step policy, sampler, reference and teacher are one model; every measure of
    their difference is 0."""
    loop = name.split()[0]
    train(small("reinforce", home, run_name="start", max_steps=1, lr=0.01))
    more = dict(teacher="start") if loop == "distill" else {}
    how = dict(init_from="start", top_k=5, max_steps=1, max_new_tokens=6, allow_dead=True)
    row = train(small(loop, home, **how, **more, **UNDER_TOP_K[name])).metrics().iloc[0]
    measured = [column for column in ZERO if column in row]
    assert "logprob_mismatch" in measured
    assert row[measured].abs().max() < 1e-5, row[measured]
    assert row["entropy"] < math.log(5), "the distribution was cut"


@pytest.mark.parametrize(
    ("loop", "whole"), [("expert_iteration", True), ("distill", True), ("reinforce", False)]
)
def test_a_likelihood_is_of_the_whole_distribution_and_a_policy_gradient_of_the_one_sampled(
    loop: str,
    whole: bool,
    home: Path,
    monkeypatch: Any,
) -> None:
    """Under --top-k, where the two differ."""
    more = (
        dict(samples="teacher", teacher=str(contracts.write_teacher())) if loop == "distill" else {}
    )
    how = dict(max_steps=2, top_k=5, **more)
    cut = train(small(loop, home, run_name="cut", **how))
    own = GPT.token_logprobs
    monkeypatch.setattr(GPT, "token_logprobs", lambda *a, **k: own(*a, **k | dict(kept=None)))
    forced = train(small(loop, home, run_name="forced", **how))
    same = [
        torch.equal(a, b)
        for a, b in zip(weights(cut).values(), weights(forced).values(), strict=True)
    ]
    assert all(same) == whole


@pytest.mark.parametrize("loop", RL)
def test_a_task_without_signal_is_rejected_and_moves_nothing(loop: str, home: Path) -> None:
    """The original's 16.7 hours: with reward 0 everywhere a KL term moved the policy by 1.5
    nats per token. Nor may an entropy bonus move it."""
    bonus = {"grpo": dict(kl_coef=0.5, kl_kind="k1"), "expert_iteration": {}}.get(
        loop, dict(entropy_coef=0.1)
    )
    start = train(small(loop, home, run_name="start", max_steps=1, lr=0.0))
    dead = dead_task_contract(
        small(loop, home, run_name="dead", max_steps=50, init_from="start", **bonus)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(start).values(), weights(dead).values(), strict=True)
    )
    assert dead.metrics()["grad_norm"].max() == 0.0


def test_settings_that_cannot_be_are_refused(home: Path) -> None:
    for loop, changes, named in rows_of(Path(__file__).with_name("refused.jsonl")):
        with raising(UserError, *named):
            train(small(loop, home, **changes))
        assert not paths.exists(loop)


def depth_of(loop: str, depth: int) -> dict[str, Any]:
    return (
        {"model": replace(TINY, depth=depth)}
        if loop in ("pretrain", "sft")
        else {"model.depth": depth}
    )


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "chars"])
def test_settings_that_the_parent_decides_are_never_ignored(loop: str, home: Path) -> None:
    """An architecture beside --init-from is an error that names both, unless it is the same;
    all loops take the parent's."""
    parent = train(small(loop, home, run_name="parent", save_every=0, max_steps=1))
    depth = parent.config["model"]["depth"]
    same = train(small(loop, home, run_name="same", init_from="parent"))
    assert same.config["model"] == parent.config["model"]
    with raising(ConfigError, "--model.depth", depth + 1, depth, "parent"):
        train(small(loop, home, run_name="other", init_from="parent", **depth_of(loop, depth + 1)))
    assert not paths.exists("other")


def good_checkpoints(name: str, last: int) -> None:
    """The last checkpoint is that of step `last`, and every one is finite."""
    kept = run.Run.open(name).checkpoints()
    assert kept[-1] == last
    for step in kept:
        saved = checkpoint.load(f"{name}@{step}")
        assert all(x.isfinite().all() for x in saved.model_state.values())
    assert run.Run.open(name).status["status"] == "failed"


@pytest.mark.parametrize(("loop", "part"), [*((loop, "model") for loop in LOOPS), ("ppo", "head")])
def test_weights_that_are_not_finite_are_never_saved(
    loop: str,
    part: str,
    home: Path,
    monkeypatch: Any,
) -> None:
    """Also where no metric showed it, and though only one checkpoint is kept."""
    own = Session.apply_gradients

    def overflowing(session: Session) -> None:
        own(session)
        if session.step == 3:
            where = session.model if part == "model" else next(iter(session.heads))
            next(where.parameters()).data.view(-1)[0] = math.inf

    once = (
        dict(minibatches=1, inner_epochs=1)
        if loop in ("grpo", "ppo", "expert_iteration", "chars")
        else {}
    )
    monkeypatch.setattr(Session, "apply_gradients", overflowing)
    with raising(RunError, "weights", "step 4", "--lr"):
        train(small(loop, home, run_name="inf", save_every=1, keep_last=1, **once))
    good_checkpoints("inf", 3)


def scaled_loss(own: Callable[..., None], calls: Any) -> Callable[..., None]:
    return lambda loss, *a, **k: own(loss * (math.nan if next(calls) == 12 else 1.0), *a, **k)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loss_that_is_not_finite_ends_the_run_before_its_update(
    loop: str, home: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        torch.Tensor, "backward", scaled_loss(torch.Tensor.backward, iter(range(10**6)))
    )
    steps = (
        dict(max_tokens=8 * 4 * 16, minibatches=2)
        if loop == "chars"
        else dict(max_steps=14, grad_accum=2)
    )
    with raising(RunError, "gradient", "--lr"):
        train(small(loop, home, run_name="nan", save_every=1, keep_last=1, **steps))
    good_checkpoints("nan", run.Run.open("nan").metrics()["step"].max())


@pytest.mark.parametrize("loop", RL)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("what", ["reward", "log-probability"])
def test_a_reward_or_log_probability_that_is_not_finite_ends_the_run_before_the_update(
    loop: str,
    value: float,
    what: str,
    home: Path,
    monkeypatch: Any,
) -> None:
    """The line names step, problem and value."""
    calls = iter(range(10**6))
    per_step = 4 * 8
    score = toy.ToyTask.score
    sample = Engine.sample

    def bad_score(self: toy.ToyTask, problem: Any, text: str) -> toy.Score:
        return (
            toy.Score(value, "none", {}, False)
            if next(calls) == 2 * per_step
            else score(self, problem, text)
        )

    def bad_sample(*a: Any, **k: Any) -> Any:
        found = sample(*a, **k)
        if next(calls) == 2:
            found[0].logprobs[0] = value
        return found

    if what == "reward":
        monkeypatch.setattr(toy.ToyTask, "score", bad_score)
    else:
        monkeypatch.setattr(Engine, "sample", bad_sample)
    with raising(RunError, what, "toy-train", value, "step 3"):
        train(
            small(
                loop, home, run_name="bad", save_every=1, keep_last=1, eval_examples=4, eval_every=0
            )
        )
    good_checkpoints("bad", 2)


def test_rows_longer_than_the_models_block_are_refused_before_anything_is_read(home: Path) -> None:
    block = small("sft", home).model.block_size
    with raising(ConfigError, f"seq_len {block + 1} exceeds block_size {block}; lower --seq-len"):
        train(small("sft", home, seq_len=block + 1))
    assert not paths.exists("sft")
