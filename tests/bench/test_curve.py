"""`python -m benchmarks curve`: codechat alone, and trl's first step beside codechat's on the same completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks as bench
from benchmarks import curve
from benchmarks.settings import CurveBench
from codechat.models import exchange, loading
from codechat.runs import paths

TINY = dict(steps=2, rounds=2, start_steps=1, problems=4, group_size=4)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


def test_curves_of_codechat_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = [w for name, value in TINY.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    found = bench.run_kind("curve", [*words, "--vs"])
    (rows,) = found["curves"].values()
    assert len(rows) == 2 and all(len(row) == 2 and all(0 <= x <= 1 for x in row) for row in rows)
    assert rows[0] != rows[1], "seeds sample different completions"
    for step, interval in enumerate(found["intervals"]["codechat"]):
        assert interval["lo"] <= interval["value"] == pytest.approx((rows[0][step] + rows[1][step]) / 2)
    assert "codechat" in capsys.readouterr().out


def test_overlap_and_difference() -> None:
    rows = {"a": [dict(lo=0.0, hi=0.2), dict(lo=0.0, hi=0.1)], "b": [dict(lo=0.2, hi=0.4), dict(lo=0.2, hi=0.3)]}
    assert curve._overlap(rows) == 0.5
    found = curve._difference({"codechat": [[0.5, 0.7], [0.6, 0.8]], "trl": [[0.4, 0.6], [0.1, 0.3]]})
    assert found == {"value": pytest.approx(0.3), "p": pytest.approx(2 / 6)}  # the two extreme ones of six divisions


def test_the_overlap_of_equal_learners() -> None:
    """Of the six divisions of .1 .2 and .8 .9, the real one and its mirror have intervals apart; an interval of two values ends at them."""
    assert curve._chance({"codechat": [[0.1], [0.2]], "trl": [[0.8], [0.9]]}) == dict(overlap=4 / 6, p=2 / 6)
    assert curve._chance({"codechat": [[0.1], [0.9]], "trl": [[0.2], [0.8]]}) == dict(overlap=4 / 6, p=1.0)


def test_the_stored_curves_have_the_chance_that_the_log_gives() -> None:
    stored = json.loads((Path(__file__).parents[2] / "reports/bench/epyc-2-cores/curve.json").read_text())
    apart = [a["hi"] < b["lo"] or b["hi"] < a["lo"] for a, b in zip(*stored["intervals"].values(), strict=True)]
    assert sum(apart) == 5 and stored["overlap"] == 0.75
    found = curve._chance(stored["curves"])  # one step of twenty; five or more in 8 of 252 divisions
    assert found == pytest.approx(stored["chance"]) and found["p"] == pytest.approx(8 / 252)


@pytest.mark.slow
def test_the_first_step_of_trl_has_codechats_rewards_and_gradient(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the bench extra is not installed")
    cfg = CurveBench(**TINY)
    curve.train_codechat(cfg, curve.START, cfg.start_steps, 0, None)
    start = loading.load_model(curve.START)
    exchange.export(exchange.ExportConfig(ckpt=curve.START, out=tmp_path / "hf", dtype="float32"))
    rewards, first = curve.train_trl(cfg, 0, tmp_path, start)
    assert len(rewards) == cfg.steps and rewards[0] == pytest.approx(sum(first["rewards"]) / len(first["rewards"]))
    assert len(first["prompts"]) == 16 and first["prompts"][:4] == first["prompts"][:1] * 4
    assert {len(completion) for completion in first["completions"]} == {8}
    # trl adds 1e-4 to a group's standard deviation, codechat 1e-6
    assert curve.gradient_norm(cfg, start, first) == pytest.approx(first["grad_norm"], rel=5e-3)
