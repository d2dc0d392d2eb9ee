"""Training on one's own files and tasks: what may be missing, and what is taken from an object."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codechat import grpo, sft, tasks
from codechat.core.errors import DataError
from codechat.models.config import GPTConfig
from codechat.tasks import RowsTask
from codechat.tasks.presets import TOY_RUN

TINY = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=257)


def test_fine_tuning_needs_no_probes_and_no_validation_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (home / "mine").mkdir()
    (home / "mine/calls.train.jsonl").write_text(
        json.dumps({"id": "1", "domain": "calls", "messages": messages}) + "\n"
    )
    cfg = sft.SFTConfig(
        data_dir=str(home / "mine"), model=TINY, tokenizer="bytes", max_steps=2, device_batch_size=1, log_every=1, compile=False
    )  # fmt: skip
    found = sft.train(cfg)
    assert found.status["status"] == "finished"
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("no ")]
    assert [note.partition(":")[0] for note in notes] == ["no held-out loss", "no behaviour probes"]
    assert not [name for name in found.evals() if name.startswith(("heldout_loss/", "probe/"))]


def share_of_a(completion, problem):
    return completion.count("a") / max(8, len(completion))


def length(completion, problem):
    return min(len(completion), 8) / 8


class Letters(RowsTask):
    rows = [{"prompt": f"p{i}", "gold": "aaaaaaaa"} for i in range(20)]
    rewards = {share_of_a: 1.0, length: 0.0}
    no_stop = True


def config(**changes) -> grpo.GRPOConfig:
    settings = TOY_RUN | {
        "model": GPTConfig(**TOY_RUN["model"]),
        "max_steps": 2,
        "device_batch_size": 2,
        "group_size": 16,
    }
    return grpo.GRPOConfig(**(settings | changes))


def test_an_object_is_trained_on_and_its_unweighted_reward_is_logged(home: Path) -> None:
    found = grpo.train(config(task=Letters(), run_name="letters", allow_dead=True))
    assert (
        found.status["status"] == "finished"
        and json.loads((found.path / "config.json").read_text())["task"] == "letters"
    )
    rows = found.metrics()
    assert list(rows["reward/share_of_a"]) == pytest.approx(list(rows["reward_mean"]))
    assert max(rows["reward/length"]) > max(rows["reward_mean"])
    tasks.TASKS.pop("letters")


def test_a_reward_that_fails_stops_before_the_first_step(home: Path) -> None:
    def fails_on_nothing(completion, problem):
        return 1 / len(completion)

    task = type(
        "Broken",
        (RowsTask,),
        {"rows": [{"prompt": f"p{i}", "gold": "a"} for i in range(20)], "rewards": {fails_on_nothing: 1.0}},
    )
    with pytest.raises(DataError, match="reward of task broken fails on nothing"):
        grpo.train(replace(config(task=task, run_name="broken")))
    tasks.TASKS.pop("broken")
