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
from codechat.text import tool_calls
from codechat_lab.instruments import contamination, natural
from codechat_lab.instruments.contamination import request
from codechat_lab.launch.recipes import RECIPES
from codechat_lab.tasks.natural import NaturalTask
from codechat_lab.tasks.toolbox import catalogue

TASK = NaturalTask()
BY_ID = {p.id: p for p in TASK.problems()}
# function -> a solution, and what makes it wrong: a piece and its replacement
SOLUTIONS = json.loads(Path(__file__).with_name("natural_solutions.json").read_text())
QUICKSORT = SOLUTIONS["quicksort"]["solution"]
TALLY = SOLUTIONS["tally_words"]["solution"]


def of_kind(kind: str) -> list[Problem]:
    return [p for p in TASK.problems() if p.meta["kind"] == kind]


def normalised(problem: Problem) -> str:
    return " ".join(re.findall(r"\w+", request(problem).lower()))


def test_the_file_has_its_shares_and_no_request_twice() -> None:
    kinds = Counter(problem.meta["kind"] for problem in BY_ID.values())
    assert kinds == {"toolbox": 60, "unfitting": 20, "code": 20, "chat": 20}
    assert len(BY_ID) == 120
    assert len(set(map(normalised, BY_ID.values()))) == 120
    assert len({problem.gold["name"] for problem in of_kind("toolbox")}) == 60


def test_a_request_offers_its_tool_and_others_that_cannot_serve() -> None:
    held_out = {tool.name for tool in catalogue.HELD_OUT}
    for problem in of_kind("toolbox"):
        name = problem.gold["name"]
        offered = problem.meta["tools"]
        assert name in offered
        assert 3 <= len(offered) <= 6
        assert len(set(offered)) == len(offered)
        assert not set(offered) & held_out
        assert not (catalogue.family(name) - {name}) & set(offered), problem.id


def test_the_expected_call_runs_and_its_tool_is_listed() -> None:
    for problem in of_kind("toolbox"):
        name = problem.gold["name"]
        catalogue.TOOLS[name].call(problem.gold["arguments"])
        system = TASK.prompt(problem)[0]["content"]
        assert system.startswith("Functions:\n")
        assert f"\n{name}(" in system


def said(problem: Problem, answer: str) -> tuple[str, bool]:
    score = TASK.score(problem, answer)
    return natural.verdict(problem, score.tier, answer), score.correct


def answers_to(problem: Problem) -> dict[str, str]:
    """{answer: how its verdict begins} for a request that a tool serves."""
    name = problem.gold["name"]
    arguments = problem.gold["arguments"]
    other = next(tool for tool in problem.meta["tools"] if tool != name)
    key, value = next(reversed(arguments.items()))
    changed = value + 1 if isinstance(value, (int, float)) else value + value
    return {
        TASK.gold(problem): "right",
        tool_calls.format_call(name, arguments | {key: changed}): "right tool",
        tool_calls.format_call(other, arguments): "calls another offered tool",
        tool_calls.format_call("no_such_tool", arguments): "calls a name that was not offered",
        tool_calls.CALL_TAG + " {": "unreadable call",
        "I have no function for that.": "no call",
    }


def test_only_the_expected_call_is_right() -> None:
    for problem in of_kind("toolbox"):
        for answer, expected in answers_to(problem).items():
            verdict, correct = said(problem, answer)
            assert verdict.startswith(expected), (problem.id, answer)
            assert correct == (expected == "right"), (problem.id, answer)


def test_only_silence_is_right_where_no_tool_fits() -> None:
    for problem in of_kind("unfitting"):
        call = tool_calls.format_call(problem.meta["tools"][0], {})
        assert said(problem, "I cannot do that.") == ("declined", True)
        assert said(problem, call) == ("calls another offered tool", False)
        assert said(problem, tool_calls.CALL_TAG + " x") == ("unreadable call", False)


def tiers_of(change: Callable[[str, str, str], str]) -> list[str]:
    """Tiers of the solutions after a change(solution, piece, what makes it wrong)."""
    pairs = []
    for problem in of_kind("code"):
        code, (piece, wrong) = SOLUTIONS[problem.gold["function"]].values()
        assert piece in code
        pairs.append((problem, change(code, piece, wrong)))
    return [score.tier for score in TASK.scores(pairs)]


def test_solutions_pass_the_hidden_tests() -> None:
    assert tiers_of(lambda code, piece, wrong: code) == ["all_passed"] * 20


def test_wrong_programs_fail_the_hidden_tests() -> None:
    tiers = tiers_of(lambda code, piece, wrong: code.replace(piece, wrong))
    assert not {"all_passed", "unparseable", "empty"} & set(tiers), dict(zip(SOLUTIONS, tiers))


def test_an_answer_without_a_program_is_empty() -> None:
    assert set(tiers_of(lambda code, piece, wrong: "I cannot.")) == {"empty"}


def problem_of(function: str) -> Problem:
    (problem,) = (p for p in of_kind("code") if p.gold["function"] == function)
    return problem


IN_PLACE = "def quickSort(a, low, high):\n    a[low : high + 1] = quick(a[low : high + 1])\n"
FENCED = (
    f"```python\n{QUICKSORT.replace('quicksort', 'quick_sort')}\nprint(quick_sort([2, 1]))\n```"
)


@pytest.mark.parametrize(
    ("function", "answer", "tier"),
    [
        ("quicksort", QUICKSORT.replace("quicksort", "sort"), "all_passed"),
        ("quicksort", f"Here it is:\n{FENCED}\nBye.", "all_passed"),
        ("quicksort", QUICKSORT.replace("quicksort", "quick") + "\n\n" + IN_PLACE, "all_passed"),
        ("quicksort", "def quicksort(xs):\n    return sorted(xs)\n", "shortcut"),
        ("quicksort", "def quicksort(xs:\n", "unparseable"),
        ("tally_words", TALLY.replace("tally", "count"), "raises"),
    ],
)
def test_only_a_request_without_a_name_may_be_answered_under_any(
    function: str, answer: str, tier: str
) -> None:
    (score,) = TASK.scores([(problem_of(function), answer)])
    assert score.tier == tier
    assert score.correct == (tier == "all_passed")


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


@pytest.fixture
def answered(make_run: Callable[..., Run], tmp_path: Path) -> Run:
    """The run of a model that was trained on one of the requests."""
    messages = [
        {"role": "user", "content": "Write quicksort!"},
        {"role": "assistant", "content": QUICKSORT},
    ]
    write_rows(tmp_path / "code.train.jsonl", [{"messages": messages}])
    lineage = [{"run": "tiny", "kind": "sft", "data_dir": str(tmp_path)}]
    make_run("tiny", "gpt2:512", lineage=lineage, block_size=512)
    COMMANDS["natural"].run("--ckpt tiny --max-new-tokens 4 --run-name n".split())
    return Run.open("n")


def test_the_command_writes_a_row_for_each_answer_and_tables(answered: Run) -> None:
    metrics = answered.evals().iloc[0]
    assert answered.status["status"] == "finished"
    assert metrics["natural/toolbox/n"] == 60
    found = [metrics[f"natural/code{stratum}/n"] for stratum in ("", "_new", "_trained")]
    assert found == [20, 19, 1]
    rows = [json.loads(line) for line in (answered.path / "natural.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(BY_ID)
    assert {row["id"] for row in rows if row["trained"]} == {"code-01"}
    table = (answered.path / "natural.md").read_text()
    assert "| code, trained on: passes all hidden tests | 0 of 1" in table
    assert all(f"| {id} |" in table for id in BY_ID)


Answers = dict[str, list[dict[str, object]]]
COMMITTED = Path(__file__).resolve().parents[3] / "reports" / "natural"


@pytest.fixture(scope="module")
def committed() -> Answers:
    """{released model: rows of its answers} in reports/natural."""
    answers: Answers = {}
    for line in (COMMITTED / "natural.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        answers.setdefault(row["checkpoint"], []).append(row)
    return answers


def test_every_released_model_answered_every_request(committed: Answers) -> None:
    assert {name.partition("@")[0] for name in committed} == {"released/mini", "released/nano"}
    requests = {id: request(problem) for id, problem in BY_ID.items()}
    for rows in committed.values():
        assert {row["id"]: row["request"] for row in rows} == requests


def test_the_metrics_of_committed_answers_are_counts_of_their_rows(committed: Answers) -> None:
    for rows in committed.values():
        found = natural.metrics(rows)
        right = [row["correct"] for row in rows if row["kind"] == "toolbox"]
        assert found["natural/toolbox/right"] == sum(right) / 60
        assert found["natural/toolbox/n"] == 60


def test_the_committed_table_is_what_its_rows_give(committed: Answers) -> None:
    table = (COMMITTED / "natural.md").read_text("utf-8")
    assert natural.markdown(committed, table.split("\n")[2]) == table
