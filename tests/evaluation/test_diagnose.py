"""Verdicts over groups of rewards, the sentinel of a running loop, and the share of weights that an update
changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codechat.core.errors import DataError
from codechat.evaluation import diagnose
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run
from codechat.tasks import new_command
from codechat.tasks.toy import TOY_MODEL, ToyTask
from codechat.text import tokenizer


def groups(n: int, varying: int, reward: float = 0.3) -> torch.Tensor:
    """(n, 4) rewards of which `varying` groups hold two different values."""
    rewards = torch.full((n, 4), reward)
    rewards[:varying, 0] = 0.55
    return rewards


@pytest.mark.parametrize(
    "varying, verdict", [(0, "DEAD"), (4, "DEAD"), (5, "WEAK"), (24, "WEAK"), (25, "LIVE"), (100, "LIVE")]
)
def test_verdict_follows_the_share_of_groups_with_variance(varying: int, verdict: str) -> None:
    found = diagnose.judge(groups(100, varying), torch.zeros(100, 4, dtype=torch.bool))
    assert (found.verdict, found.effective_groups, found.frac_zero_std) == (
        verdict,
        varying,
        1 - varying / 100,
    )
    assert found.remedy


def test_saturated_comes_first_and_needs_more_than_85_percent() -> None:
    correct = torch.zeros(100, 4, dtype=torch.bool)
    correct.view(-1)[:340] = True  # exactly 85 %
    assert (
        diagnose.judge(correct.float(), correct).verdict == "DEAD"
    )  # 85 groups all right, 15 all wrong: no variance at all
    correct.view(-1)[340] = True
    assert diagnose.judge(correct.float(), correct).verdict == "SATURATED"


def test_numbers_of_a_diagnosis() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = diagnose.judge(rewards, rewards == 1, min_groups=1)
    assert found.correct_share == found.reward_mean == 0.25
    assert found.pass_at == {1: 0.25, 2: 0.5}
    assert found.reward_std == pytest.approx(0.1875**0.5)
    assert found.frac_with_variance == 0.5


def test_sentinel_stops_after_twenty_dead_steps_in_a_row() -> None:
    watch = diagnose.Sentinel()
    assert not any(watch.update(0.0) for _ in range(19))
    assert not watch.update(0.05)  # one live step starts the count again
    assert [watch.update(0.049) for _ in range(20)] == [False] * 19 + [True]


def test_sentinel_continues_its_count_after_a_resume() -> None:
    first, second = diagnose.Sentinel(patience=3), diagnose.Sentinel(patience=3)
    first.update(0.0), first.update(0.0)
    second.load_state(first.state())
    assert second.update(0.0)


def test_share_of_changed_weights_counts_bf16_values_only() -> None:
    model = torch.nn.Linear(4, 5, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        before = diagnose.bf16_snapshot(model)
        model.weight[0] += 1e-4  # lost: bf16 steps at 1 are 2^-7
        assert diagnose.weights_changed_bf16(before, model) == 0.0
        model.weight[1] += 1e-2
    assert diagnose.weights_changed_bf16(before, model) == pytest.approx(0.2)


# ---------------------------------------------------------------- the command


@pytest.fixture
def untrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a run whose checkpoint is an untrained toy model."""
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    tok = tokenizer.load("bytes")
    with Run.create("base", {"a": 1}, kind="pretrain") as run:
        model = GPT(GPTConfig(**TOY_MODEL, vocab_size=tok.n_vocab))
        meta = {"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": []}
        checkpoint.save(run.path, 1, model=model, meta=meta)
    return "base"


def test_command_prints_the_verdict_and_keeps_a_row(untrained: str, capsys: pytest.CaptureFixture[str]) -> None:
    diagnose.main(["--ckpt", untrained, "--task", "toy", "--max-new-tokens", "8", "--run-name", "look"])
    out, run = capsys.readouterr().out, Run.open("look")
    assert all(part in out for part in ("256 of 256", "pass@1 = ", "pass@8 = ", "n=8, N=64", "of 64 groups", "LIVE"))
    row = run.evals().iloc[0]
    assert (row["verdict"], row["n_problems"], row["n_samples"], row["gold_passed"]) == ("LIVE", 64, 8, 256)
    assert sum(row[f"tier/{t}"] for t in ToyTask.tiers) == pytest.approx(1)
    assert run.status["summary"]["verdict"] == "LIVE" and run.samples()


def test_a_small_task_of_ones_own_is_sampled_until_there_are_groups_enough(untrained: str, tmp_path: Path) -> None:
    new_command.main(["task", "words", "--out", str(tmp_path / "own")])
    task = f"{tmp_path / 'own/words.py'}:Words"
    diagnose.main(
        ["--ckpt", untrained, "--task", task, "--max-new-tokens", "4", "--group-size", "2", "--run-name", "look"]
    )
    row = Run.open("look").evals().iloc[0]
    assert row["n_problems"] == 64 and 0 < row["gold_n"] < 64


def test_failing_reference_solutions_end_it_before_a_run_is_made(
    untrained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyTask, "gold", lambda self, problem: "?")
    with pytest.raises(DataError, match="toy"):
        diagnose.main(["--ckpt", untrained, "--task", "toy", "--run-name", "look"])
    assert not paths.exists("look")
