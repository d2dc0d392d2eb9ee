"""Whole loops on the meta device: how often the host waits for the device in a step, and that
every tensor is where the next operator needs it."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from contracts import small, train
from sync_count import SyncCount, on_meta

from codechat import pretrain
from codechat.evaluation import held_out
from codechat.models.generate import Completion
from codechat.rl.engines import Engine
from codechat.tasks.base import Score
from codechat.tasks.toy import ToyTask
from codechat.training import rl_session
from codechat.training.rl_session import Microbatch
from codechat.training.session import Session


def drawn(
    policy: Any, prompts: Sequence[list[int]], *, samples_per_prompt: int, **how: Any
) -> list[Completion]:
    """What a sampler might return: up to 20 tokens."""
    rng = random.Random(len(prompts))
    lengths = [rng.randrange(1, 20) for _ in range(len(prompts) * samples_per_prompt)]
    return [
        Completion([rng.randrange(97, 123) for _ in range(n)], [-1.0] * n, "stop") for n in lengths
    ]


def scored(self: ToyTask, problem: Any, text: str) -> Score:
    return Score(len(text) / 20, "some", {}, False)


@pytest.fixture
def no_values(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that needs values: sampling, evaluations, checkpoints, and where a restored
    weight would come from."""
    load_task = rl_session.load_task
    monkeypatch.setattr(Engine, "sample", staticmethod(drawn))
    monkeypatch.setattr(ToyTask, "score", scored)
    monkeypatch.setattr(
        rl_session,
        "load_task",
        lambda cfg, *given: load_task(cfg, *given)._replace(evaluate=lambda model, step: {}),
    )
    monkeypatch.setattr(Session, "save", lambda self, wait: None)
    monkeypatch.setattr(held_out, "held_out_losses", lambda *a: {})
    monkeypatch.setattr(pretrain, "bits_per_byte", lambda *a: {})


def per_step(loop: str, home: Path, settings: dict[str, Any]) -> Counter[str]:
    """The waits of a second step."""

    def waits_of(steps: int) -> Counter[str]:
        cfg = small(loop, home, settings, run_name=f"steps-{steps}", max_steps=steps)
        with on_meta(), SyncCount() as syncs:
            train(cfg)
        return syncs.calls

    few = waits_of(1)
    more = waits_of(2)
    assert not few - more
    return more - few


# loop, its settings, updates a step, other waits a step
RL = {
    "reinforce": ("reinforce", dict(entropy_coef=0.1, importance_cap=2.0), 1, 1),
    "muon": ("reinforce", dict(optimizer="muon"), 1, 1),
    "accumulated": ("reinforce", dict(grad_accum=2), 1, 1),
    "grpo": ("grpo", dict(minibatches=2, inner_epochs=1), 2, 1),
    "gspo": ("grpo", dict(variant="gspo", entropy_coef=0.1, kl_coef=0.1), 1, 1),
    "ppo": ("ppo", dict(kl_coef=0.1, inner_epochs=1), 2, 3),
    "expert": ("expert_iteration", dict(minibatches=1, inner_epochs=1, group_size=24), 1, 1),
}


@pytest.mark.parametrize("loop, settings, updates, more", RL.values(), ids=RL)
def test_a_step_of_rl_waits_for_the_norm_of_each_update_and_once_for_what_it_logs(
    loop: str,
    settings: dict[str, Any],
    updates: int,
    more: int,
    no_values: None,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many microbatches an update has."""
    logprobs = Microbatch.logprobs
    passes = []

    def noted(batch: Microbatch, *args: Any, **others: Any) -> Any:
        passes.append(batch)
        return logprobs(batch, *args, **others)

    monkeypatch.setattr(Microbatch, "logprobs", noted)
    usual = dict(save_every=0, eval_every=0, rows=1, row_tokens=128) | settings
    waits = per_step(loop, home, usual)
    assert waits.total() == updates + more, waits
    assert len(passes) >= 3 * 2 * updates, (
        "three steps were run, each update of two or more microbatches"
    )


@pytest.mark.parametrize("loss", ["dpo", "simpo", "kto"])
def test_preferences_wait_for_the_norm_and_once_for_their_log(
    loss: str, no_values: None, home: Path
) -> None:
    """However many microbatches; kto once more in a step, for its reference point."""
    settings = dict(loss=loss, device_batch_size=2, grad_accum=3, eval_every=0, save_every=0)
    waits = per_step("preference", home, settings)
    assert waits.total() == 2 + (loss == "kto"), waits


@pytest.mark.parametrize("loop", ["pretrain", "sft"])
def test_a_supervised_step_waits_twice_however_many_microbatches(
    loop: str, no_values: None, home: Path
) -> None:
    """For the norm of the gradients, and for the loss where it is logged."""
    settings = dict(optimizer="muon", grad_accum=3, eval_every=0, save_every=0)
    waits = per_step(loop, home, settings)
    assert waits.total() == 2, waits
