"""`codechat data solved`: right answers of a checkpoint become conversations."""

import re
from pathlib import Path
from typing import Any

import pytest
from raising import raising

from codechat import tasks
from codechat.core.atomic_files import append_rows, read_json, read_rows
from codechat.core.errors import ConfigError, DataError, RunError
from codechat.core.registry import PREPARATIONS
from codechat.data import conversations
from codechat.runs.run import Run
from codechat.text import tool_lists
from codechat_lab.tasks import solved
from codechat_lab.tasks.solved import SolvedConfig, prepare_solved


def tried(home: Path, answers: list[tuple[int, str, bool]], **more: Any) -> None:
    """The run `rates` of 20 problems. answers: (number of a problem, text, whether it is right)."""
    settings = {"task": "micro", "data_dir": None, "limit": 20, "seed": 0, "split": ["train"]}
    task = tasks.load("micro")
    problems = task.problems("train", limit=20, seed=0)
    with Run.create("rates", settings | more, kind="passk") as run:
        rows = [
            {"problem": problems[i].id, "completion": text, "correct": right, "stop": "stop"}
            for i, text, right in answers
        ]
        append_rows(run.path / "examples.jsonl", rows)


def prepared(home: Path, **more: Any) -> list[dict[str, Any]]:
    """Rows of all splits."""
    prepare_solved(SolvedConfig(rates="rates", out=str(home / "mine"), **more))
    files = sorted((home / "mine").glob("solved.*.jsonl"))
    return [row for file in files for row in read_rows(file)]


def test_right_answers_follow_the_prompt_of_their_problem(home: Path) -> None:
    tried(home, [(0, "right", True), (1, "wrong", False)])
    task = tasks.load("micro")
    (row,) = prepared(home)
    problem = task.problems("train", limit=20, seed=0)[0]
    assert row["messages"] == [*task.prompt(problem), {"role": "assistant", "content": "right"}]


@pytest.mark.parametrize("answers", ["own", "reference"])
def test_rows_are_in_the_order_of_the_problems(home: Path, answers: str) -> None:
    tried(home, [(i, f"{i}", True) for i in reversed(range(20))])
    prepared(home, answers=answers)
    ids = [problem.id for problem in tasks.load("micro").problems("train", limit=20, seed=0)]
    for file in (home / "mine").glob("solved.*.jsonl"):
        places = [ids.index(row["meta"]["problem"]) for row in read_rows(file)]
        assert places == sorted(places)


def test_at_most_so_many_different_answers_of_a_problem_are_kept(home: Path) -> None:
    tried(home, [(0, text, True) for text in ("a", "a", "b", "c", "d")] + [(1, "e", True)])
    rows = prepared(home, per_problem=3)
    assert sorted(row["messages"][-1]["content"] for row in rows) == ["a", "b", "c", "e"]
    dropped = read_json(home / "mine" / "manifest.json")["sources"]["right answers of rates"]
    assert dropped["skipped"] == {"duplicate": 1, "enough of this problem": 1}


def test_answers_of_one_problem_are_in_one_split(home: Path) -> None:
    tried(home, [(i, f"{i} {n}", True) for i in range(20) for n in range(2)])
    prepared(home)
    splits: dict[str, set[str]] = {}
    for file in (home / "mine").glob("solved.*.jsonl"):
        for row in read_rows(file):
            splits.setdefault(row["meta"]["problem"], set()).add(file.name)
    assert len(splits) == 20
    assert all(len(files) == 1 for files in splits.values())
    assert len(set().union(*splits.values())) > 1


def test_reference_solutions_follow_the_prompts_of_all_problems_that_were_tried(home: Path) -> None:
    tried(home, [(0, "right", True), (1, "wrong", False), (1, "wrong too", False)])
    task = tasks.load("micro")
    asked = task.problems("train", limit=20, seed=0)[:2]
    rows = prepared(home, answers="reference")
    assert {row["messages"][-1]["content"] for row in rows} == {task.gold(p) for p in asked}
    assert {row["meta"]["problem"] for row in rows} == {p.id for p in asked}


def test_problems_for_judging_are_not_trained_on(home: Path) -> None:
    tried(home, [(0, "right", True)], split=["test"])
    with raising(ConfigError, "tried split ['test']", "--split train"):
        prepared(home)
    assert not (home / "mine").exists()


def test_no_right_answer_is_named(home: Path) -> None:
    tried(home, [(0, "wrong", False)])
    with raising(DataError, "kept no row", "wrong 1"):
        prepared(home)


def nano_tried(home: Path, texts: list[str]) -> list[dict[str, Any]]:
    """Rows of right answers of released/nano to the toolbox's problems."""
    settings = {
        "task": "funcall",
        "data_dir": None,
        "limit": 20,
        "seed": 0,
        "split": ["train"],
        "ckpt": ["released/nano"],
        "temperature": 1.0,
    }
    problems = tasks.load("funcall").problems("train", limit=20, seed=0)
    problems = [problem for problem in problems if problem.meta["tools_present"]]
    with Run.create("rates", settings, kind="evaluate") as run:
        rows = [
            {"problem": problem.id, "completion": text, "correct": True, "stop": "stop"}
            for problem, text in zip(problems, texts)
        ]
        append_rows(run.path / "examples.jsonl", rows)
    return prepared(home)


def test_the_manifest_names_the_teacher_and_its_licence(home: Path) -> None:
    nano_tried(home, ["a", "b"])
    manifest = read_json(home / "mine" / "manifest.json")
    teacher = {
        "model": "released/nano",
        "licence": "unknown",
        "temperature": 1.0,
    }
    assert manifest["teachers"] == {"solved": teacher}


def test_lists_of_tools_are_those_that_the_teacher_saw(home: Path) -> None:
    rows = nano_tried(home, ["a", "b"])
    assert len(rows) == 2
    for row in rows:
        assert row["messages"][0]["content"].endswith(tool_lists.NOTHING_FITS)
    assert conversations.tools_style(home / "mine") == "described"


def test_reference_solutions_have_no_teacher(home: Path) -> None:
    tried(home, [(0, "right", True)])
    prepare_solved(SolvedConfig(rates="rates", answers="reference", out=str(home / "mine")))
    assert read_json(home / "mine" / "manifest.json")["teachers"] == {}


def test_it_is_a_preparation() -> None:
    assert PREPARATIONS["data.solved"].config_class is SolvedConfig


@pytest.mark.parametrize("stop", ["length", "context"])
def test_an_answer_that_was_cut_off_is_none(home: Path, stop: str) -> None:
    tried(home, [(0, "whole", True)])
    path = Run.open("rates").path / "examples.jsonl"
    (row,) = read_rows(path)
    append_rows(path, [row | {"completion": "cut", "stop": stop}])
    assert [row["messages"][-1]["content"] for row in prepared(home)] == ["whole"]


def test_a_part_of_the_answers_is_not_taken_for_all(home: Path) -> None:
    tried(home, [(0, "right", True)])
    Run.open("rates").stop("interrupted")
    with raising(RunError, "rates", "interrupted", "--resume"):
        prepared(home)


SHARED = "Write a function to find the shared elements from the given two lists."
PROGRAM = "```python\ndef shared(a, b):\n    return set(a) & set(b)\n```"


def conversation(request: str, answer: str) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"{request}\n\nYour code should pass these tests:\n\nassert 1"},
        {"role": "assistant", "content": answer},
    ]
    return {"id": "solved-0123456789abcdef", "messages": messages, "domain": "solved"}


def test_an_answer_is_asked_for_in_everyday_words_without_tests() -> None:
    row = solved._everyday(conversation(SHARED, PROGRAM))
    assert row is not None
    user, answer = row["messages"]
    assert "find the shared elements from the given two lists" in user["content"]
    assert "shared" in user["content"]
    assert "assert" not in user["content"]
    assert answer["content"] == PROGRAM


@pytest.mark.parametrize("form", solved.EVERYDAY)
def test_every_everyday_form_names_the_function(form: str) -> None:
    said = form.format(wanted="W", signature="f(a)", name="f")
    assert "W" in said
    assert re.search(r"\bf\b", said)


@pytest.mark.parametrize(
    "request_, answer",
    [
        ("Add two numbers.", PROGRAM),
        ("Write a function which adds two numbers.", PROGRAM),  # "to adds" is no English
        (SHARED, "There is none."),
        (SHARED, f"{PROGRAM}\nIt passes the tests."),
    ],
    ids=["another form", "a verb with s", "no function", "tests"],
)
def test_other_problems_and_answers_have_no_everyday_request(request_: str, answer: str) -> None:
    assert solved._everyday(conversation(request_, answer)) is None


def test_everyday_requests_are_further_rows_of_their_problem(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solved, "_everyday", lambda row: row | {"id": f"{row['id']}-everyday"})
    tried(home, [(0, "right", True), (1, "wrong", False)])
    first, second = prepared(home, everyday=True)
    assert second["id"] == f"{first['id']}-everyday"
    assert second["meta"] == first["meta"]
