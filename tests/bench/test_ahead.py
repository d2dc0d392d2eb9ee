"""Sampling one batch ahead beside sampling in turns: what is compared, and the command end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks as bench
from benchmarks import ahead
from codechat.core.errors import RunError


def rows(rewards: list[float], seconds: float, stale: int) -> ahead.Rows:
    return [dict(reward_mean=r, step_s=seconds, off_policy_steps=stale if i else 0) for i, r in enumerate(rewards)]


def test_times_and_rewards_are_compared_by_seed() -> None:
    """The first steps are not timed; differences are ahead less in turns, over the steps that they name."""
    turns = [rows([0.0] * 6 + [0.4, 0.4], 2.0, 0), rows([0.2] * 6 + [0.6, 0.6], 3.0, 0)]
    early = [rows([0.0] * 6 + [0.2, 0.2], 1.0, 1), rows([0.2] * 6 + [0.4, 0.4], 1.0, 1)]
    turns[0][0]["step_s"] = early[1][4]["step_s"] = 100.0  # warm-up
    found = ahead.compared({"in turns": turns, "ahead": early})
    assert found["faster"] == [2.0, 3.0] and found["faster_median"] == 2.5
    assert found["last_quarter"]["value"] == pytest.approx(-0.2)
    assert found["last_quarter"]["in turns"] == pytest.approx(0.5)
    assert found["all_steps"]["value"] == pytest.approx(-0.05)
    assert found["off_policy_steps"] == [[0] + [1] * 7] * 2


@pytest.mark.slow
def test_both_ways_run_and_only_one_is_off_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kept = {}
    own = ahead.compared
    monkeypatch.setattr(ahead, "compared", lambda found: kept.update(found) or own(found))
    words = "--rounds 1 --steps 7 --problems 2 --group-size 4".split()
    figures = bench.run_kind("ahead", words)
    stale = {mode: [int(row["off_policy_steps"]) for row in runs[0]] for mode, runs in kept.items()}
    assert stale == {"in turns": [0] * 7, "ahead": [0] + [1] * 6}
    first = {mode: runs[0][0]["reward_mean"] for mode, runs in kept.items()}
    assert first["in turns"] == first["ahead"], "the same start, problems and draws"
    assert len(figures["faster"]) == 1 and figures["faster"][0] > 0
    assert "ahead less in turns" in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ahead.MODES, "in turns", "--max-off-policy -1")
    with pytest.raises(RunError, match="max.off.policy"):
        ahead.train(bench.settings.AheadBench(), tmp_path, "in turns", 0)
