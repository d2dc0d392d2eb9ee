"""Verdicts over groups of rewards, the sentinel of a running loop, and the share of weights
that an update changed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from codechat.core.errors import DataError
from codechat.core.registry import COMMANDS
from codechat.evaluation import diagnose
from codechat.runs import paths
from codechat.runs.run import Run
from codechat.tasks.toy import ToyTask


@pytest.mark.parametrize(
    "varying, verdict",
    [(0, "DEAD"), (4, "DEAD"), (5, "WEAK"), (24, "WEAK"), (25, "LIVE"), (100, "LIVE")],
)
def test_the_verdict_follows_the_share_of_groups_with_variance(varying: int, verdict: str) -> None:
    rewards = torch.full((100, 4), 0.3)
    rewards[:varying, 0] = 0.55
    correct = torch.zeros(100, 4, dtype=torch.bool)
    correct[0] = True
    judged = diagnose.judge(rewards, correct)
    assert (judged.verdict, judged.effective_groups) == (verdict, varying)
    assert judged.remedy
    assert judged.frac_zero_std_groups == 1 - varying / 100


@pytest.mark.parametrize(
    ("right", "verdict"),
    [
        (0, "PARTIAL"),
        (3, "PARTIAL"),
        (4, "LIVE"),
    ],
)
def test_variance_with_fewer_than_one_percent_right_is_partial_credit_only(
    right: int, verdict: str
) -> None:
    rewards = torch.full((100, 4), 0.3)
    rewards[:25, 0] = 0.55
    correct = torch.zeros(100, 4, dtype=torch.bool)
    correct[:right, 0] = True
    judged = diagnose.judge(rewards, correct)
    assert judged.verdict == verdict
    assert ("hardly a sample is right" in judged.remedy) == (verdict == "PARTIAL")


def test_more_than_85_percent_of_correct_completions_are_saturated() -> None:
    correct = torch.zeros(100, 4, dtype=torch.bool)
    correct.view(-1)[:340] = (
        True  # exactly 85 %: 85 groups all right, 15 all wrong, no variance at all
    )
    assert diagnose.judge(correct.float(), correct).verdict == "DEAD"
    correct.view(-1)[340] = True
    assert diagnose.judge(correct.float(), correct).verdict == "SATURATED"


def test_a_diagnosis_has_the_statistics_of_its_groups() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    judged = diagnose.judge(rewards, rewards == 1, min_groups=1)
    assert judged.exact_match == judged.reward_mean == 0.25
    assert judged.frac_with_variance == 0.5
    assert judged.pass_at == {1: 0.25, 2: 0.5}
    assert judged.reward_std == pytest.approx(0.1875**0.5)


def test_the_sentinel_stops_after_twenty_dead_steps_in_a_row_also_across_a_resume() -> None:
    watch = diagnose.Sentinel()
    assert not any(watch.update(0.0) for _ in range(19))
    assert not watch.update(0.05)  # one live step starts the count again
    assert not any(watch.update(0.049) for _ in range(10))
    resumed = diagnose.Sentinel()
    resumed.load_state(watch.state())
    assert [resumed.update(0.049) for _ in range(10)] == [False] * 9 + [True]


def test_the_share_of_changed_weights_counts_bf16_values_only() -> None:
    model = torch.nn.Linear(4, 5, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        before = diagnose.bf16_snapshot(model)
        model.weight[0] += 1e-4  # lost: bf16 steps at 1 are 2^-7
        assert diagnose.weights_changed_bf16(before, model) == 0.0
        model.weight[1] += 1e-2
    assert diagnose.weights_changed_bf16(before, model) == pytest.approx(0.2)


def test_the_command_prints_the_verdict_and_keeps_a_row(
    toy_run: Run, monkeypatch: Any, capsys: Any
) -> None:
    words = ["--ckpt", "toy@1", "--task", "toy", "--max-new-tokens", "8", "--run-name", "look"]
    COMMANDS["diagnose"].run(words)
    out = capsys.readouterr().out
    run = Run.open("look")
    assert all(
        part in out
        for part in ("256 of 256", "pass@1 = ", "pass@8 = ", "n=8, N=64", "of 64 groups", "PARTIAL")
    )
    row = run.evals().iloc[0]
    assert (row["verdict"], row["n_problems"], row["n_samples"], row["gold_passed"]) == (
        "PARTIAL",
        64,
        8,
        256,
    )
    assert sum(row[f"tier/{t}"] for t in ToyTask.tiers) == pytest.approx(1)
    assert run.status["summary"]["verdict"] == "PARTIAL"
    assert run.samples()
    monkeypatch.setattr(ToyTask, "gold", lambda self, problem: "?")  # ends before a run is made
    with pytest.raises(DataError, match="toy"):
        COMMANDS["diagnose"].run([*words[:-1], "other"])
    assert not paths.exists("other")


def test_a_small_task_of_ones_own_is_sampled_until_there_are_groups_enough(
    toy_run: Run, tmp_path: Path
) -> None:
    COMMANDS["new"].run(["task", "words", "--out", str(tmp_path / "own")])
    task = [
        "--task",
        f"{tmp_path / 'own/words.py'}:Words",
        "--max-new-tokens",
        "4",
        "--group-size",
        "2",
    ]
    COMMANDS["diagnose"].run(["--ckpt", "toy@1", *task, "--run-name", "look"])
    row = Run.open("look").evals().iloc[0]
    assert row["n_problems"] == 64
    assert 0 < row["gold_n"] < 64
