"""Rates and verdicts before RL, and the problems that are kept because of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, MissingFile, RunError
from codechat.evaluation import diagnose, pass_rates, results
from codechat.runs.run import Run
from codechat.sandbox import SandboxUnavailable, close_all
from codechat.tasks.base import Problem


def test_both_verdicts_stand_beside_each_other() -> None:
    """Nothing is solved, but completions differ in how far they come."""
    task, rungs = tasks.load("micro"), {"raises": 0.05, "none_passed": 0.15, "empty": 0.0}
    tiers = ("raises", "none_passed", "raises", "empty")
    rows = [
        dict(problem=str(i), reward=rungs[t], tier=t, correct=False, tokens=1, stop="stop", terms={})
        for i in range(70)
        for t in tiers
    ]
    problems = [Problem(str(i), [], {}, "train", {"level": 2}) for i in range(70)]
    result = results.TaskResult(task, problems, rows, 4, 1.0, (1, 4))
    row = pass_rates.verdicts(result, pass_rates.PasskConfig(ckpt=("x",)))
    assert (row["verdict"], row["reward_verdict"]) == ("DEAD", "LIVE")
    assert row["parseable_frac"] == 0.75 and row["runnable_frac"] == 0.25
    bounds = {0.0: "DEAD", 0.0099: "DEAD", 0.01: "WEAK", 0.0499: "WEAK", 0.05: "LIVE", 0.85: "LIVE", 0.851: "SATURATED"}
    for rate, verdict in bounds.items():
        assert diagnose.verdict_of(rate, rate, pass_rates.DEAD_BELOW, pass_rates.WEAK_BELOW) == verdict


def test_the_window_keeps_problems_with_variance_and_without_any_partial_rewards_decide() -> None:
    cfg = pass_rates.FilterConfig(rates="x", out="y")
    for pairs, kept, why in (
        (((0, 0.1), (0.05, 0.2), (0.5, 0.6), (0.95, 0.97), (1, 1)), ["1", "2", "3"], "kept 3"),
        (((0, 0.05), (0, 0.1), (1, 1), (0, 0.3)), ["1", "3"], "the window is empty"),  # what is always solved is out
        (((0, 0.05), (1, 1)), [], "nothing is left"),
    ):
        rows = [dict(id=str(i), pass_rate=a, tiered_mean=b) for i, (a, b) in enumerate(pairs)]
        chosen, words = pass_rates.choose(rows, cfg)
        assert [r["id"] for r in chosen] == kept and why in words


@pytest.fixture
def passk(make_run: Callable[..., Run]) -> Iterator[Callable[..., None]]:
    """The command on an untrained checkpoint; the judges of code end with the test."""
    make_run("base", block_size=512)

    def run(*words: str) -> None:
        common = "--ckpt base --task micro --k 2 --limit 6 --max-new-tokens 12".split()
        try:
            pass_rates.main([*common, *words])
        except SandboxUnavailable as why:
            pytest.skip(str(why))

    yield run
    close_all()


def test_the_commands_end_to_end(
    passk: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passk("--run-name", "rates")
    out = capsys.readouterr().out
    for words in ("pass@1 = 0.000", "pass@2 = 0.000", "n=2, N=6, temperature=1", "pass@1: DEAD", "level "):
        assert words in out
    path, target = Run.open("rates").path / "pass_rates.jsonl", tmp_path / "kept"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 6 and all(r["n"] == 2 and r["pass_rate"] == 0 and sum(r["tiers"].values()) == 2 for r in rows)
    words = ["--rates", "rates", "--out", str(target)]
    with pytest.raises(RunError, match="run rates .*--window"):
        pass_rates.main_filter([*words, "--min-tiered", "0.9"])
    assert not target.exists()

    rows[1]["pass_rate"], rows[4]["pass_rate"] = 0.5, 1.0  # as a better checkpoint would have it
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    capsys.readouterr()
    pass_rates.main_filter(words)
    assert [word for word in capsys.readouterr().out.split() if word.isdigit()][:4] == ["6", "4", "1", "1"]
    kept = tasks.load("micro", source=str(target))
    assert [p.id for p in kept.problems("train")] == [rows[1]["id"]] and len(kept.problems("select")) == 500
    assert tasks.check_reference_solutions(kept, kept.problems("train")).ok

    rows[1]["id"] = "micro-gone"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(DataError, match="micro-gone"):
        pass_rates.main_filter(words)


def test_a_gate_states_and_does_not_stop_and_only_train_is_filtered(
    passk: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passk("--run-name", "gated", "--gate-parseable", "0.5", "--gate-pass-at-k", "0.1")
    assert "GATE fail" in capsys.readouterr().out
    run = Run.open("gated")
    assert run.status["summary"]["gate"] == run.evals()["gate"].iloc[-1] == "fail"
    (tmp_path / "micro.train.jsonl").write_text("{}")  # of a former call
    pass_rates.main_filter(["--rates", "gated", "--out", str(tmp_path), "--min-tiered", "0.9", "--allow-empty"])
    assert not (tmp_path / "micro.train.jsonl").exists() and (tmp_path / "micro.test.jsonl").exists()
    passk("--run-name", "tests", "--split", "test")
    for run_name, error in (("tests", ConfigError), ("base", MissingFile)):
        with pytest.raises(error):
            pass_rates.main_filter(["--rates", run_name, "--out", str(tmp_path / "x")])
    for words in (["--k", "1"], ["--temperature", "0"], ["--task", "funcall"], ["--n", "4"]):
        with pytest.raises(ConfigError):
            pass_rates.main(["--ckpt", "base", *words])
