"""`codechat scores`: evaluations side by side."""

from pathlib import Path
from typing import Any

import pytest
from raising import raising

from codechat import cli
from codechat.core.atomic_files import append_rows
from codechat.core.errors import ConfigError
from codechat.runs.run import Run
from codechat_lab.reports import scores

pytestmark = pytest.mark.usefixtures("home")


def metrics(name: str, value: float) -> dict[str, float]:
    return {name: value, f"{name}/lo": value - 0.1, f"{name}/hi": value + 0.1}


def evaluated(run_name: str, task: str, answers: dict[str, list[int]], **more: Any) -> Run:
    """A run of an evaluation. answers: checkpoint -> whether each problem is right."""
    with Run.create(run_name, {"task": task}, kind="evaluate") as run:
        for checkpoint, right in answers.items():
            which = {"checkpoint": checkpoint, "split": "test", "sampling": "greedy"}
            row = metrics("pass@1", sum(right) / len(right)) | which | {"task": task, "step": 0}
            row |= dict(n_problems=len(right), completion_tokens_mean=53.2, truncated_frac=0.25)
            append_rows(run.path / "eval.jsonl", [row | more])
            problems = [{"id": str(i), "n": 1, "c": c} | which for i, c in enumerate(right)]
            append_rows(run.path / "per_problem.jsonl", problems)
    return run


def lines(*runs: Run) -> list[str]:
    return scores.tables(runs)


def test_checkpoints_of_several_runs_are_columns() -> None:
    before = evaluated("before", "humaneval", {"base@0": [1, 0, 1, 0]})
    after = evaluated("after", "humaneval", {"sft@9": [1, 1, 1, 0], "rl@3": [1, 1, 1, 1]})
    text = lines(before, after)
    assert "|  | base@0 | sft@9 | rl@3 |" in text
    expected = "| humaneval (N=4) | 0.50 [0.40, 0.60] | 0.75 [0.65, 0.85] | 1.00 [0.90, 1.10] |"
    assert expected in text


def test_gains_are_paired_with_the_first_checkpoint_of_any_run() -> None:
    before = evaluated("before", "humaneval", {"base@0": [1, 0] * 20})
    after = evaluated("after", "humaneval", {"sft@9": [1, 1] * 20})
    (line,) = [line for line in lines(before, after) if line.startswith("| humaneval | ")][:1]
    _, _, base, gain, _ = line.split("|")
    assert base.strip() == ""
    assert gain.strip().startswith("+50.0 [+")


def test_other_problems_are_not_paired() -> None:
    before = evaluated("before", "mbpp", {"base@0": [1, 0, 1]})
    after = evaluated("after", "mbpp", {"sft@9": [1, 1]})
    assert "| mbpp |  | other problems |" in lines(before, after)


def test_strata_stand_apart_and_are_not_added_up() -> None:
    strata = {"mean_of_groups": 0.5, "call/n": 3, **metrics("call/pass@1", 0.5)}
    text = lines(evaluated("calls", "funcall", {"base@0": [1, 0, 1]}, **strata))
    assert "| funcall: call (N=3) | 0.50 [0.40, 0.60] |" in text
    assert not [line for line in text if line.startswith("| funcall (N=")]


def test_natural_requests_stand_apart_by_kind() -> None:
    parts = {"natural/toolbox/n": 60, **metrics("natural/toolbox/right_tool", 0.7)}
    text = lines(evaluated("natural", "natural", {"base@0": [1, 0]}, **parts))
    assert "| natural: toolbox, right tool (N=60) | 0.70 [0.60, 0.80] |" in text
    assert not [line for line in text if line.startswith("| natural (N=")]


def test_how_calls_are_written_and_how_long_answers_are_is_shown() -> None:
    forms = {"surface/fenced": 0.75, "surface/bare_list": 0.25}
    text = lines(evaluated("calls", "funcall", {"base@0": [1]}, **forms))
    assert "| funcall | fenced 0.75, bare list 0.25 |" in text
    assert "| funcall | 53, 0.25 |" in text


def test_a_run_that_evaluated_nothing_is_refused() -> None:
    with Run.create("trained", {"lr": 1.0}, kind="sft") as run:
        pass
    with raising(ConfigError, "run trained is of kind sft", "expected one of evaluate"):
        lines(run)


def test_the_command_writes_a_page_with_its_notes(home: Path) -> None:
    evaluated("before", "humaneval", {"base@0": [1, 0]})
    words = ["scores", "before", "--out", str(home / "page"), "--title", "Mine", "--notes", "So."]
    assert cli.main(words) in (0, None)
    page = (home / "page" / "scores.md").read_text()
    assert page.startswith("# Mine\n\n## Right, with 95 % intervals")
    assert "\nSo.\n" in page
