"""What every loop of the registry keeps: resumed it ends bit by bit as if nobody had stopped
it, accumulation and ranks change nothing, settings that cannot be are refused, and nothing that
is not finite is learned from or saved."""

import itertools
import math
import random
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
from codechat.models.fast import fused
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
    )
    | EPOCHS,
    "ppo": dict(kl_coef=0.05) | EPOCHS,
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
    "grpo under top-k": ("grpo", dict(top_k=20, kl_coef=0.05, kl_in="loss") | EPOCHS),
    "chars by PPO": ("chars", dict(objective="ppo", minibatches=2)),
    "chars fed by itself": ("chars", dict(feed="own", max_tokens=8 * 4 * 4 * 4)),
    "chars denoised": ("chars", dict(objective="denoise")),
}
EVERY = {loop: (loop, MORE.get(loop, {})) for loop in LOOPS} | OTHERS
every_loop_and_variant = pytest.mark.parametrize("loop, more", EVERY.values(), ids=EVERY)
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


@every_loop_and_variant
def test_a_resumed_run_ends_bitwise_as_one_that_was_never_stopped(
    loop: str, more: dict[str, Any], home: Path
) -> None:
    contracts.resume_contract(small(loop, home, more), 2)


def answers(found: run.Run) -> list[tuple[int, str | None]]:
    """(step, completion) of each logged sample."""
    return [(row["step"], row.get("completion")) for row in found.samples()]


@every_loop_and_variant
def test_a_last_evaluation_that_fails_loses_no_step_and_is_made_up_for_once(
    loop: str, more: dict[str, Any], home: Path
) -> None:
    """Nothing else is saved on the way: the checkpoint is the one of the last step. A second
    --resume finds nothing to do."""
    cfg = small(loop, home, more, save_every=0)
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
        assert answers(resumed) == answers(whole)


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
    cfg = small(loop, home, MORE.get(loop), eval_every=2)
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
    cfg = small(loop, home, MORE.get(loop))
    whole = train(replace(cfg, run_name="whole"))
    with contracts.failing_in("apply_gradients", step=1):
        train(replace(cfg, run_name="cut"))
    assert not run.Run.open("cut").checkpoints()
    contracts.assert_same_runs(train(replace(cfg, run_name="cut", resume=True)), whole)


BATCHED = {case: EVERY[case] for case in LOOPS if case != "chars"} | {
    "preference by DPO": ("preference", dict(loss="dpo"))
}


@pytest.mark.parametrize("loop, more", BATCHED.values(), ids=BATCHED)
def test_accumulation_equals_one_large_batch(
    loop: str, more: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the first step's accuracy counts ties with the reference, which has the policy's bits by torch
    monkeypatch.setattr(fused, "kernel", lambda dtype: None)
    steps = dict(max_steps=3, save_every=0) | more
    one = train(small(loop, home, steps, run_name="one", device_batch_size=4))
    four = train(small(loop, home, steps, run_name="four", device_batch_size=1, grad_accum=4))
    assert_close_curves(one, four, *COLUMNS[loop])


def test_two_ranks_learn_what_one_does(home: Path) -> None:
    """torchrun with two gloo ranks against one process with the same global batch, every loop
    in one process group."""
    cfgs = [small(loop, home, MORE.get(loop), save_every=0) for loop in LOOPS]
    for loop, (one, two) in zip(LOOPS, contracts.train_one_and_two(home, *cfgs), strict=True):
        assert two.status["status"] == "finished"
        assert_close_curves(one, two, *COLUMNS[loop])


UNDER_TOP_K = {
    "reinforce": ("reinforce", dict(importance_cap=2.0)),
    "grpo": ("grpo", dict(kl_coef=0.05, kl_in="loss")),
    "grpo with the trainer's": (
        "grpo",
        dict(old_logprobs="trainer", importance_cap=2.0, kl_coef=0.05, kl_in="reward"),
    ),
    "ppo": ("ppo", dict(kl_coef=0.05, minibatches=1, inner_epochs=1)),
    "expert_iteration": ("expert_iteration", {}),
    "distill": ("distill", dict(teacher="start")),
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


@pytest.mark.parametrize("loop, more", UNDER_TOP_K.values(), ids=UNDER_TOP_K)
def test_under_top_k_equal_weights_differ_by_rounding(
    loop: str, more: dict[str, Any], home: Path
) -> None:
    """At the first step policy, sampler, reference and teacher are one model; every measure of
    their difference is 0."""
    train(small("reinforce", home, run_name="start", max_steps=1, lr=0.01))
    cfg = small(
        loop,
        home,
        more,
        init_from="start",
        top_k=5,
        max_steps=1,
        max_new_tokens=6,
        allow_dead=True,
    )
    row = train(cfg).metrics().iloc[0]
    measured = [column for column in ZERO if column in row]
    assert "logprob_mismatch" in measured
    assert row[measured].abs().max() < 1e-5, row[measured]
    assert row["entropy"] < math.log(5), "the distribution was cut"


def have_equal_weights(a: run.Run, b: run.Run) -> bool:
    return all(map(torch.equal, weights(a).values(), weights(b).values()))


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
    teacher = dict(samples="teacher", teacher=str(contracts.write_teacher()))
    more = teacher if loop == "distill" else None
    cut = train(small(loop, home, more, run_name="cut", max_steps=2, top_k=5))
    own = GPT.token_logprobs

    def of_the_whole_distribution(*args: Any, kept: Any = None, **others: Any) -> Any:
        return own(*args, **others)

    monkeypatch.setattr(GPT, "token_logprobs", of_the_whole_distribution)
    forced = train(small(loop, home, more, run_name="forced", max_steps=2, top_k=5))
    assert have_equal_weights(cut, forced) == whole


# what moves a policy beside rewards
BONUS = {
    "reinforce": dict(entropy_coef=0.1),
    "grpo": dict(kl_coef=0.5, kl_kind="k1"),
    "ppo": dict(entropy_coef=0.1),
    "expert_iteration": {},
}


@pytest.mark.parametrize("loop", RL)
def test_a_task_without_signal_is_rejected_and_moves_nothing(loop: str, home: Path) -> None:
    """The original's 16.7 hours: with reward 0 everywhere a KL term moved the policy by 1.5
    nats per token. Nor may an entropy bonus move it."""
    start = train(small(loop, home, run_name="start", max_steps=1, lr=0.0))
    dead = dead_task_contract(
        small(loop, home, BONUS[loop], run_name="dead", max_steps=50, init_from="start")
    )
    assert have_equal_weights(start, dead)
    assert dead.metrics()["grad_norm"].max() == 0.0


def test_settings_that_cannot_be_are_refused(home: Path) -> None:
    for loop, changes, named in rows_of(Path(__file__).with_name("refused.jsonl")):
        with raising(UserError, *named):
            train(small(loop, home, changes))
        assert not paths.exists(loop)


def depth_of(loop: str, depth: int) -> dict[str, Any]:
    """As a setting of this loop."""
    if loop in ("pretrain", "sft"):
        return {"model": replace(TINY, depth=depth)}
    return {"model.depth": depth}


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "chars"])
def test_settings_that_the_parent_decides_are_never_ignored(loop: str, home: Path) -> None:
    """An architecture beside --init-from is an error that names both, unless it is the same;
    all loops take the parent's."""
    parent = train(small(loop, home, run_name="parent", save_every=0, max_steps=1))
    depth = parent.config["model"]["depth"]
    same = train(small(loop, home, run_name="same", init_from="parent"))
    assert same.config["model"] == parent.config["model"]
    with raising(ConfigError, "--model.depth", depth + 1, depth, "parent"):
        train(small(loop, home, depth_of(loop, depth + 1), run_name="other", init_from="parent"))
    assert not paths.exists("other")


def good_checkpoints(name: str, last: int) -> None:
    """The last checkpoint is that of step `last`, and every one is finite."""
    kept = run.Run.open(name).checkpoints()
    assert kept[-1] == last
    for step in kept:
        saved = checkpoint.load(f"{name}@{step}")
        assert all(x.isfinite().all() for x in saved.model_state.values())
    assert run.Run.open(name).status["status"] == "failed"


ONE_UPDATE = dict.fromkeys(
    ("grpo", "ppo", "expert_iteration", "chars"), dict(minibatches=1, inner_epochs=1)
)


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

    monkeypatch.setattr(Session, "apply_gradients", overflowing)
    with raising(RunError, "weights", "step 4", "--lr"):
        train(small(loop, home, ONE_UPDATE.get(loop), run_name="inf", save_every=1, keep_last=1))
    good_checkpoints("inf", 3)


MANY_PASSES = {"chars": dict(max_tokens=8 * 4 * 16, minibatches=2)}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loss_that_is_not_finite_ends_the_run_before_its_update(
    loop: str, home: Path, monkeypatch: Any
) -> None:
    own = torch.Tensor.backward
    calls = itertools.count()

    def nan_once(loss: torch.Tensor, *args: Any, **others: Any) -> None:
        factor = math.nan if next(calls) == 12 else 1.0
        own(loss * factor, *args, **others)

    monkeypatch.setattr(torch.Tensor, "backward", nan_once)
    steps = MANY_PASSES.get(loop, dict(max_steps=14, grad_accum=2))
    with raising(RunError, "gradient", "--lr"):
        train(small(loop, home, steps, run_name="nan", save_every=1, keep_last=1))
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
    calls = itertools.count()
    per_step = 4 * 8
    score = toy.ToyTask.score
    sample = Engine.sample

    def bad_score(self: toy.ToyTask, problem: Any, text: str) -> toy.Score:
        if next(calls) == 2 * per_step:
            return toy.Score(value, "none", {}, False)
        return score(self, problem, text)

    def bad_sample(*a: Any, **k: Any) -> Any:
        found = sample(*a, **k)
        if next(calls) == 2:
            found[0].logprobs[0] = value
        return found

    if what == "reward":
        monkeypatch.setattr(toy.ToyTask, "score", bad_score)
    else:
        monkeypatch.setattr(Engine, "sample", bad_sample)
    cfg = small(
        loop, home, run_name="bad", save_every=1, keep_last=1, eval_examples=4, eval_every=0
    )
    with raising(RunError, what, "toy-train", value, "step 3"):
        train(cfg)
    good_checkpoints("bad", 2)


def test_rows_longer_than_the_models_block_are_refused_before_anything_is_read(home: Path) -> None:
    block = small("sft", home).model.block_size
    with raising(ConfigError, f"seq_len {block + 1} exceeds block_size {block}; lower --seq-len"):
        train(small("sft", home, seq_len=block + 1))
    assert not paths.exists("sft")
