"""Natural requests: right answers are told from wrong ones, and nothing of the file is in the
training data."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from contracts import write_rows

from codechat.core import config, registry
from codechat.core.registry import COMMANDS
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat.text import chat
from codechat_lab.instruments import contamination, natural
from codechat_lab.instruments.contamination import request
from codechat_lab.launch.recipes import RECIPES
from codechat_lab.tasks.natural import NaturalTask
from codechat_lab.tasks.toolbox import catalogue

TASK = NaturalTask()
BY_ID = {p.id: p for p in TASK.problems()}
# function -> a solution, and what makes it wrong: a piece and its replacement
SOLUTIONS = json.loads(Path(__file__).with_name("natural_solutions.json").read_text())
QUICKSORT, TALLY = (SOLUTIONS[name]["solution"] for name in ("quicksort", "tally_words"))


def of_kind(kind: str) -> list[Problem]:
    return [p for p in TASK.problems() if p.meta["kind"] == kind]


def test_the_file_has_its_shares_and_offers_the_tool_and_others_that_cannot_serve() -> None:
    kinds = Counter(p.meta["kind"] for p in BY_ID.values())
    assert kinds == dict(toolbox=60, unfitting=20, code=20, chat=20)
    assert (
        len(BY_ID)
        == 120
        == len({" ".join(re.findall(r"\w+", request(p).lower())) for p in BY_ID.values()})
    )
    for problem in of_kind("toolbox"):
        name = problem.gold["name"]
        offered = problem.meta["tools"]
        assert name in offered
        assert 3 <= len(offered) <= 6
        assert len(set(offered)) == len(offered)
        assert not set(offered) & {t.name for t in catalogue.HELD_OUT}
        assert not (catalogue.family(name) - {name}) & set(offered), problem.id
        catalogue.TOOLS[name].call(problem.gold["arguments"])
        system = TASK.prompt(problem)[0]["content"]
        assert system.startswith("Functions:\n")
        assert f"\n{name}(" in system
    assert len({p.gold["name"] for p in of_kind("toolbox")}) == 60


def said(problem: Problem, answer: str) -> tuple[str, bool]:
    score = TASK.score(problem, answer)
    return natural.verdict(problem, score.tier, answer), score.correct


def test_only_the_expected_call_is_right_and_only_silence_where_no_tool_fits() -> None:
    for problem in of_kind("toolbox"):
        name = problem.gold["name"]
        arguments = problem.gold["arguments"]
        other = next(tool for tool in problem.meta["tools"] if tool != name)
        key, value = next(reversed(arguments.items()))
        changed = value + 1 if isinstance(value, (int, float)) else value + value
        for answer, expected in {
            TASK.gold(problem): "right",
            chat.format_call(name, arguments | {key: changed}): "right tool",
            chat.format_call(other, arguments): "calls another offered tool",
            chat.format_call("no_such_tool", arguments): "calls a name that was not offered",
            chat.CALL_TAG + " {": "unreadable call",
            "I have no function for that.": "no call",
        }.items():
            verdict, correct = said(problem, answer)
            assert verdict.startswith(expected) and correct == (expected == "right"), (
                problem.id,
                answer,
            )
    for problem in of_kind("unfitting"):
        answers = (
            "I cannot do that.",
            chat.format_call(problem.meta["tools"][0], {}),
            chat.CALL_TAG + " x",
        )
        verdicts = [said(problem, answer) for answer in answers]
        assert verdicts == [
            ("declined", True),
            ("calls another offered tool", False),
            ("unreadable call", False),
        ]


def test_solutions_pass_the_hidden_tests_and_wrong_programs_fail() -> None:
    pairs = []
    for problem in of_kind("code"):
        code, (piece, replacement) = SOLUTIONS[problem.gold["function"]].values()
        assert piece in code
        pairs += [
            (problem, code),
            (problem, code.replace(piece, replacement)),
            (problem, "I cannot."),
        ]
    tiers = [score.tier for score in TASK.scores(pairs)]
    right = tiers[::3]
    wrong = tiers[1::3]
    silent = tiers[2::3]
    assert right == ["all_passed"] * 20
    assert set(silent) == {"empty"}
    assert not {"all_passed", "unparseable", "empty"} & set(wrong), dict(zip(SOLUTIONS, wrong))


def test_a_request_without_a_name_may_be_answered_under_any() -> None:
    quicksort, named = (
        p for p in of_kind("code") if p.gold["function"] in ("quicksort", "tally_words")
    )
    fenced = (
        f"```python\n{QUICKSORT.replace('quicksort', 'quick_sort')}\nprint(quick_sort([2, 1]))\n```"
    )
    in_place = "def quickSort(a, low, high):\n    a[low : high + 1] = quick(a[low : high + 1])\n"
    pairs = [
        (quicksort, QUICKSORT.replace("quicksort", "sort")),
        (quicksort, f"Here it is:\n{fenced}\nBye."),
        (quicksort, QUICKSORT.replace("quicksort", "quick") + "\n\n" + in_place),
        (quicksort, "def quicksort(xs):\n    return sorted(xs)\n"),
        (quicksort, "def quicksort(xs:\n"),
        (named, TALLY.replace("tally", "count")),
    ]
    scores = list(TASK.scores(pairs))
    assert [s.tier for s in scores] == ["all_passed"] * 3 + ["shortcut", "unparseable", "raises"]
    assert [s.correct for s in scores] == [True] * 3 + [False] * 3


SMALL = {  # sizes of the recipe's data stages
    "data.corpus": dict(max_tokens=300_000),
    "data.sft": dict(max_examples=600),
    "data.calls": dict(
        max_examples=1500, copies=200, problems=300, eval_examples=10, probes=0, lookups=0
    ),
}


@pytest.mark.slow
def test_the_data_of_nano_hold_no_request_and_no_function(tmp_path: Path) -> None:
    for stage in RECIPES["nano"].stages:
        if stage.kind.startswith("data."):
            entry = registry.find(stage.kind)
            out = stage.out.format(data=tmp_path)
            cfg = config.from_dict(
                entry.config_class, {**stage.settings, **SMALL[stage.kind], "out": out}
            )
            entry.load(entry.function)(cfg)
    places = (("pretrain", "corpus"), ("sft", "base"), ("sft", "sft"), ("reinforce", "sft"))
    lineage = [dict(run=kind, kind=kind, data_dir=str(tmp_path / place)) for kind, place in places]
    report = contamination.check(
        list(BY_ID.values()), [*lineage[:3], lineage[3] | {"task": "funcall"}]
    )
    assert len(report.read) == 4
    assert not report.missing
    assert report.how.keys() <= {p.id for p in BY_ID.values() if p.meta["trained"]}


def test_the_command_writes_a_row_for_each_answer_and_tables(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The model was trained on one of the requests."""
    messages = [
        {"role": "user", "content": "Write quicksort!"},
        {"role": "assistant", "content": QUICKSORT},
    ]
    write_rows(tmp_path / "code.train.jsonl", [{"messages": messages}])
    make_run(
        "tiny",
        "gpt2:512",
        lineage=[{"run": "tiny", "kind": "sft", "data_dir": str(tmp_path)}],
        block_size=512,
    )
    COMMANDS["natural"].run(["--ckpt", "tiny", "--max-new-tokens", "4", "--run-name", "n"])
    run = Run.open("n")
    row = run.evals().iloc[0]
    assert run.status["status"] == "finished"
    assert row["natural/toolbox/n"] == 60
    assert [row[f"natural/code{stratum}/n"] for stratum in ("", "_new", "_trained")] == [20, 19, 1]
    rows = [json.loads(line) for line in (run.path / "natural.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rows] == list(BY_ID)
    assert {r["id"] for r in rows if r["trained"]} == {"code-01"}
    table = (run.path / "natural.md").read_text()
    assert "| code, trained on: passes all hidden tests | 0 of 1" in table
    assert all(f"| {id} |" in table for id in BY_ID)


def test_the_released_models_answers_are_committed_as_a_table_that_their_rows_give() -> None:
    """reports/natural: every released model answered every request, and the tables are those of
    the rows beside them."""
    folder = Path(__file__).resolve().parents[3] / "reports" / "natural"
    answers: dict[str, list[dict[str, object]]] = {}
    for row in map(json.loads, (folder / "natural.jsonl").read_text("utf-8").splitlines()):
        answers.setdefault(row["checkpoint"], []).append(row)
    assert {name.partition("@")[0] for name in answers} == {"released/mini", "released/nano"}
    requests = {id: request(problem) for id, problem in BY_ID.items()}
    assert all({row["id"]: row["request"] for row in rows} == requests for rows in answers.values())
    for rows in answers.values():
        found = natural.metrics(rows)
        right = [row["correct"] for row in rows if row["kind"] == "toolbox"]
        assert found["natural/toolbox/right"] == sum(right) / 60
        assert found["natural/toolbox/n"] == 60
    table = (folder / "natural.md").read_text("utf-8")
    assert natural.markdown(answers, table.split("\n")[2]) == table
