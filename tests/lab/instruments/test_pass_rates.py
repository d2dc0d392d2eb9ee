"""Rates and verdicts before RL, and the problems that are kept because of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codechat import tasks
from codechat.core.atomic_files import json_lines, read_rows
from codechat.core.errors import ConfigError, DataError, MissingFile, RunError
from codechat.core.registry import COMMANDS
from codechat.evaluation import diagnose, results
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat_lab.instruments import pass_rates
from codechat_lab.sandbox.pool import SandboxUnavailable, shared_pool


def test_both_verdicts_stand_beside_each_other() -> None:
    """Nothing is solved, but completions differ in how far they come."""
    task = tasks.load("micro")
    rungs = {"raises": 0.05, "none_passed": 0.15, "empty": 0.0}
    problems = [Problem(str(i), [], {}, "train") for i in range(70)]
    rows = [
        dict(reward=rungs[t], tier=t, correct=False)
        for t in ("raises", "none_passed", "raises", "empty")
    ]
    result = results.TaskResult(task, problems, rows * 70, 4, 1.0, (1, 4))
    row = pass_rates.verdicts(result, pass_rates.PasskConfig(task="micro", ckpt=("x",)))
    assert (row["verdict"], row["reward_verdict"]) == ("DEAD", "PARTIAL")
    assert row["parseable_frac"] == 0.75
    assert row["runnable_frac"] == 0.25
    bounds = {
        0.0: "DEAD",
        0.0099: "DEAD",
        0.01: "WEAK",
        0.0499: "WEAK",
        0.05: "LIVE",
        0.85: "LIVE",
        0.851: "SATURATED",
    }
    for rate, verdict in bounds.items():
        assert (
            diagnose.verdict_of(rate, rate, pass_rates.DEAD_BELOW, pass_rates.WEAK_BELOW) == verdict
        )


def test_the_window_keeps_problems_with_variance_and_without_any_partial_rewards_decide() -> None:
    for pairs, kept, why in (
        (((0, 0.1), (1, 0.2), (10, 0.6), (19, 0.97), (20, 1)), ["1", "2", "3"], "kept 3"),
        (
            ((0, 0.05), (0, 0.1), (20, 1), (0, 0.3)),
            ["1", "3"],
            "the window is empty",
        ),  # what is always solved is out
        (((0, 0.05), (20, 1)), [], "nothing is left"),
    ):
        rows = [dict(id=str(i), n=20, c=c, reward_mean=mean) for i, (c, mean) in enumerate(pairs)]
        chosen, words = pass_rates.choose(rows, (0.05, 0.95))
        assert chosen == kept
        assert why in words


@pytest.fixture
def passk(make_run: Callable[..., Run]) -> Iterator[Callable[..., None]]:
    """The command on an untrained checkpoint; the judges of code end with the test."""
    make_run("base", block_size=512)

    def run(*words: str) -> None:
        common = "--ckpt base --task micro --n 2 --ks 1 2 --limit 6 --max-new-tokens 12".split()
        try:
            COMMANDS["passk"].run([*common, *words])
        except SandboxUnavailable as why:
            pytest.skip(str(why))

    yield run
    shared_pool("auto").close()


def test_the_commands_end_to_end(passk: Callable[..., None], tmp_path: Path, capsys) -> None:
    passk("--run-name", "rates", "--gate-parseable", "0.5", "--gate-pass-at-k", "0.1")
    out = capsys.readouterr().out
    run = Run.open("rates")
    for words in (
        "pass@1 = 0.000",
        "pass@2 = 0.000",
        "n=2, N=6, temperature=1",
        "pass@1: DEAD",
        "level ",
        "GATE fail",
    ):
        assert words in out
    # it states and does not stop
    assert run.status["summary"]["gate"] == run.evals()["gate"].iloc[-1] == "fail"
    path = run.path / "per_problem.jsonl"
    target = tmp_path / "kept"
    target.mkdir()
    (target / "micro.train.jsonl").write_text("{}")  # of a former call
    words = ["--rates", "rates", "--out", str(target)]
    COMMANDS["filter"].run(words)
    assert not (target / "micro.train.jsonl").exists()
    assert (target / "micro.test.jsonl").exists()

    rows = list(read_rows(path))
    rows[1]["c"], rows[4]["c"] = 1, 2  # as a better checkpoint would have it
    path.write_text(json_lines(rows))
    capsys.readouterr()
    COMMANDS["filter"].run(words)
    assert [word for word in capsys.readouterr().out.split() if word.isdigit()][:4] == [
        "6",
        "4",
        "1",
        "1",
    ]
    kept = tasks.load("micro", source=str(target))
    assert [p.id for p in kept.problems("train")] == [rows[1]["id"]]
    assert len(kept.problems("select")) == 500
    tasks.check_reference_solutions(kept, kept.problems("train")).require()

    for change, error in (({"id": "micro-gone"}, DataError), ({"split": "test"}, ConfigError)):
        path.write_text(json_lines([row | change if row is rows[1] else row for row in rows]))
        with pytest.raises(error, match=change.get("id")):
            COMMANDS["filter"].run(words)
    with pytest.raises(MissingFile):
        COMMANDS["filter"].run(["--rates", "base", "--out", str(target)])
    run.stop("interrupted")
    with pytest.raises(RunError, match="rates is stopped"):
        COMMANDS["filter"].run(words)
    for wrong, says in (
        (["--n", "1", "--task", "micro"], "--n is 1"),
        (["--temperature", "0", "--task", "micro"], "all samples are the same"),
        (["--task", "funcall"], "passk takes tasks of programs"),
        (["--task", "gsm8k"], "'gsm8k' has no tiered reward; passk takes tasks of programs"),
    ):
        with pytest.raises(ConfigError, match=says):
            COMMANDS["passk"].run(["--ckpt", "base", *wrong])
