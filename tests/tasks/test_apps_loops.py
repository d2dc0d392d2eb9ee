"""Pocket apps in the commands: data, SFT, evaluation, diagnosis, and the loops, which train on whole episodes unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from codechat import grpo, ppo, reinforce, tasks
from codechat.core import config
from codechat.data import command, conversations
from codechat.evaluation import evaluate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.tasks import apps
from codechat.text import chat, tokenizer

SMALL = tokenizer.load("gpt2:4096")
SHAPE = GPTConfig(depth=1, n_embd=32, n_head=2, block_size=512, vocab_size=SMALL.n_vocab)


def test_episodes_and_problems_on_disk(tmp_path: Path) -> None:
    words = [
        "apps",
        "--out",
        str(tmp_path),
        "--tokenizer",
        "bytes",
        "--max-examples",
        "8",
        "--problems",
        "6",
        "--eval-examples",
        "4",
        "--levels",
        "1",
        "2",
    ]
    command.main(words)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {
        "manifest.json",
        *(f"{kind}.{split}.jsonl" for kind in ("apps", "episodes") for split in ("train", "select", "test")),
    }
    loaded = conversations.load_domains(tmp_path, "train", SMALL, "reserved", 512)
    assert list(loaded) == ["episodes"] and len(loaded["episodes"]) == 8, "problems are not read as conversations"
    task = tasks.load("apps", source=str(tmp_path))
    assert [len(task.problems(s)) for s in ("train", "select", "test")] == [
        6,
        4,
        4,
    ] and tasks.check_reference_solutions(task, task.problems("test")).ok
    assert sorted(p.id for p in task.problems("train")) == sorted(
        p.id for p in tasks.load("apps:levels=[1,2]").problems("train", 6)
    )
    command.main(words)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_sft_supervises_the_experts_messages_and_not_the_environments(tmp_path: Path) -> None:
    """SFT supervises an expert's calls and last message; in the rollout of the same episode the mask covers the same ids."""
    task = tasks.load("apps:levels=[2]")
    problem = task.problems("train", 1)[0]
    world = task.environment()
    messages = apps.trajectory(problem, world)
    rendered = chat.render(messages, SMALL)
    taught = [i for i, on in zip(rendered.ids, rendered.loss_mask) if on]
    played = episodes.replay(task, problem, apps.gold_steps(problem), SMALL, block_size=512)
    assert [i for i, on in zip(played.completion.ids, played.completion.written) if on] == taught
    assert played.prompt + played.completion.ids == rendered.ids[: len(played.prompt) + len(played.completion.ids)]
    assert played.score.correct and sum(t.reward for t in played.turns) == 1.0 and played.completion.stop == "stop"


def settings(module: ModuleType, cls: type, **more: Any) -> Any:
    given = (
        dict(
            task="apps:levels=[1,2]",
            tokenizer="gpt2:4096",
            model=SHAPE,
            device_batch_size=2,
            group_size=2,
            max_steps=1,
            max_new_tokens=6,
            eval_examples=2,
            diagnose_groups=0,
            row_tokens=512,
            rows=2,
            log_rollouts_every=1,
            run_name="apps",
        )
        | more
    )
    return config.resolve(cls, None, overrides=given, presets=module.RUN_PRESETS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "cls", "more"),
    [
        (reinforce, reinforce.ReinforceConfig, {}),
        (grpo, grpo.GRPOConfig, dict(kl_coef=0.1, inner_epochs=2)),
        (ppo, ppo.PPOConfig, {}),
    ],
    ids=["reinforce", "grpo", "ppo"],
)
def test_the_loops_train_on_episodes_unchanged(module: Any, cls: type, more: dict[str, Any], home: Path) -> None:
    found = module.train(settings(module, cls, **more))
    assert found.status["status"] == "finished"
    row = found.metrics().sort_values("step").iloc[-1]
    assert row["tier/idle"] == 1.0 and row["logprob_mismatch"] < 1e-4
    samples = [json.loads(line) for line in (found.path / "samples.jsonl").read_text().splitlines()]
    assert any(s["turns"][0]["tokens"] for s in samples if "turns" in s)


def test_evaluation_plays_episodes_and_keeps_their_turns() -> None:
    task = tasks.load("apps:levels=[1]")
    model = GPT(SHAPE)
    found = evaluate.evaluate_task(model, SMALL, "reserved", task, task.problems("test", 3), n=2, max_new_tokens=6)
    assert found.pass_at[1].value == 0 and len(found.examples) == 6 and all(row["turns"] for row in found.examples)
    assert all(row["tokens"] == sum(t["tokens"] for t in row["turns"]) for row in found.examples)
    assert found.truncated_frac == sum(row["stop"] in ("length", "context") for row in found.examples) / 6
