"""The repair task: edits as they are read, repositories that tell right from wrong, rewards, attacks."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codechat import tasks
from codechat.sandbox.pool import shared_pool
from codechat.tasks.base import Problem
from codechat.tasks.repair import edits, generator
from codechat.tasks.repair import task as scoring
from codechat.tasks.repair.edits import Change, EditError, applied, parse

CART = "shop/cart.py"
FILES = {
    "shop/cart.py": "def total(xs):\n    n = 0\n    for x in xs:\n        n += x\n    return n\n",
    "README.md": "# Shop\n",
}
TASK = tasks.load("repair")
PROBLEMS = TASK.problems("train", 9, seed=3)
block = edits.as_block


def new_file(path: str, text: str = "x = 1") -> str:
    return f"{path}\n<<<<<<< SEARCH\n=======\n{text}\n>>>>>>> REPLACE"


DIFF = """\
I think this is it.
```diff
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -2,4 +2,4 @@ def total(xs):
     n = 0
     for x in xs:
-        n += x
+        n += 2 * x
     return n
```
"""


# ---------------------------------------------------------------- edits


def test_both_formats_make_the_same_change() -> None:
    once = block("shop/cart.py", "        n += x", "        n += 2 * x")
    for text in (
        once,
        f"First,\n\n```python\n{once}\n```\n",
        f"`shop/cart.py`\n```\n{block('', '        n += x  ', '        n += 2 * x').lstrip()}\n```",
        f"./{once}".replace("\n", "\r\n"),
        DIFF,
        DIFF.replace("@@ -2,4 +2,4 @@", "@@ -40,9 +40,9 @@"),  # wrong numbers, right lines
        DIFF.replace("@@ -2,4 +2,4 @@", f"@@ -{'9' * 5000},4 +2,4 @@"),  # more digits than Python reads
        DIFF.partition("```diff\n")[2].partition("```")[0],
    ):
        assert applied(FILES, parse(text)) == FILES | {CART: FILES[CART].replace("+= x", "+= 2 * x")}
    two = block(CART, "    n = 0", "    n = 1") + "\n\nand\n\n" + block(CART, "    n = 1", "    n = 2")
    assert applied(FILES, parse(two))[CART].count("n = 2")


def test_files_are_made_and_deleted() -> None:
    made = "--- /dev/null\n+++ b/shop/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
    gone = "--- a/README.md\n+++ /dev/null\n@@ -1 +0,0 @@\n-# Shop\n"
    expected = {"shop/cart.py": FILES["shop/cart.py"], "shop/new.py": "x = 1\ny = 2\n"}
    assert applied(FILES, parse(made + gone)) == expected
    assert applied(FILES, parse(new_file("shop/b.py", "z = 3")))["shop/b.py"] == "z = 3\n"


def test_an_edit_that_does_not_fit_is_refused_and_repeated_lines_need_a_line_number() -> None:
    unindented = Change(CART, ("n = 0",), ("n = 1",))
    absent = [Change(path, ("x",), ("y",)) for path in ("shop/none.py", "../cart.py")]
    new = [Change(path, None, ("y",)) for path in ("/etc/passwd", "", CART)]  # the last exists
    for change in (unindented, *absent, *new):
        with pytest.raises(EditError):
            applied(FILES, [change])
    files = {"a.py": "x\ny\nx\n"}
    with pytest.raises(EditError):
        applied(files, [Change("a.py", ("x",), ("z",))])
    assert applied(files, [Change("a.py", ("x",), ("z",), line=3)]) == {"a.py": "x\ny\nz\n"}


def test_text_without_an_edit_has_no_changes_and_a_long_one_is_read_at_once(quick: Callable[..., Any]) -> None:
    """Each long text takes seconds to hours where a line is read again for each line before it."""
    short = ["", "n += 2", "<<<<<<< SEARCH\n=======\n", "--- a\n+++ b\n", "@@ -1 +1 @@\n-x\n+y\n", "```diff\n```"]
    opened = "a\n<<<<< SEARCH\n"
    fences = ("a\n```\n<<<<< SEARCH\n") * 6000
    long = [" " * 150_000, "\t x" * 50_000, opened * 6000 + "=====\n" * 6000, (opened + "=====\n") * 6000, fences]
    for text in short + long:
        assert quick(5, parse, text) == []


def test_a_block_takes_the_nearest_lines_that_fit() -> None:
    text = (
        "<<<<<<< SEARCH\n"  # the first line: no path above it, so it is read as one
        "<<<<<<< SEARCH\na\n=======\nb\n=======\n<<<<<<< SEARCH\n>>>>> REPLACE x.py\n"
        "<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE\n"  # the end of a block is no path
        "y.py\n```\n<<<<< SEARCH \n========= \n>>>>>>>>>> REPLACE\n>>>>>>>>> REPLACE\n"
        "```py\n<<<<< SEARCH\nc\n=====\n>>>>> REPLACE"
    )
    assert parse(text) == [
        Change("<<<<<<< SEARCH", ("a",), ("b", "=======", "<<<<<<< SEARCH")),
        Change("y.py", None, (">>>>>>>>>> REPLACE",)),
        Change("py", ("c",), ()),
    ]


# ---------------------------------------------------------------- generated repositories


def test_failing_tests_fail_and_passing_tests_pass_before_the_repair_and_all_after_it() -> None:
    for split in tasks.SPLITS:
        problems = TASK.problems(split, 9)
        tasks.check_reference_solutions(TASK, problems).require()
        for problem in problems[:: 1 if split in ("train", "test_hard") else 9]:
            gold = problem.gold
            failing, passing = gold["FAIL_TO_PASS"], gold["PASS_TO_PASS"]
            before = shared_pool("auto").run(scoring.program(problem, gold["files"], 3.0))
            assert [r.passed for r in before.results] == [False] * len(failing) + [True] * len(passing)
            assert len(gold["files"]) == {1: 3, 2: 6, 3: 9}[problem.meta["level"]]
            hidden = [name for name in (*failing, *passing) if name.startswith(generator.HIDDEN)]
            shown = "".join(gold["files"].values())
            assert len(hidden) >= 4 and not any(gold["tests"][name] in shown for name in hidden)


def test_every_bug_of_every_part_changes_one_line_and_most_can_be_drawn() -> None:
    names = {"f": "f", "g": "g"}
    for part in generator.PARTS:
        for setting in part.settings("test_hard"):
            for right, wrong in part.bugs:
                buggy, old, new = part.lines((right, wrong), names, setting)
                assert old != new and buggy != part.source(names, setting) and part.code.count(right) == 1
    drawn = {p.meta["part"] for p in [*TASK.problems("train", 150), *TASK.problems("test_hard", 60)]}
    assert drawn == {part.name for part in generator.PARTS}
    held_out = {part.name for part in generator.PARTS if part.held_out}
    assert {p.meta["part"] for p in TASK.problems("test_hard", 30)} <= held_out
    assert not {p.meta["part"] for p in TASK.problems("test", 60)} & held_out


# ---------------------------------------------------------------- rewards


def fixed(problem: Problem, **more: str) -> str:
    fix = problem.gold["fix"] | more
    return block(fix["path"], fix["search"], fix["replace"])


def test_the_rungs_in_their_order() -> None:
    problem = next(p for p in PROBLEMS if p.meta["level"] == 2)
    path = problem.gold["fix"]["path"]
    package = path.partition("/")[0]
    skipped = (path, f"{package}/__init__.py")
    other = next(f for f in problem.gold["files"] if f.startswith(package) and f not in skipped)
    text = problem.gold["files"][other]
    broken = next(line for line in text.splitlines() if line.startswith("def "))
    rungs = {
        "none": "I do not know.",
        "unapplied": fixed(problem, search="no such line"),
        "applied": block("README.md", problem.gold["files"]["README.md"].splitlines()[0], "# Mended"),
        "regressed": fixed(problem) + "\n\n" + block(other, broken, broken.replace("def ", "def not_")),
        "resolved": fixed(problem),
    }
    scores = {tier: TASK.score(problem, text) for tier, text in rungs.items()}
    assert {tier: score.tier for tier, score in scores.items()} == {tier: tier for tier in rungs}
    rewards = [score.reward for score in scores.values()]
    assert rewards == sorted(rewards) and rewards[0] == 0 and rewards[-1] == 1
    assert [score.correct for score in scores.values()] == [False] * 4 + [True]
    assert 0.15 < scores["regressed"].reward < 0.5 and scores["applied"].reward == 0.15
    same = fixed(problem, replace=problem.gold["fix"]["search"])
    assert TASK.score(problem, same).tier == "unapplied", "nothing changes"


def test_a_repair_with_an_unusual_character_is_a_repair() -> None:
    """Except for half a character, which no Python file can hold."""
    problem = PROBLEMS[0]
    for sign in ("é", "\U0001f600", "\\U0001f600", "'\"\\", "\ud800"):
        score = TASK.score(problem, fixed(problem, replace=f"{problem.gold['fix']['replace']}  # {sign}"))
        assert score.tier == ("applied" if sign == "\ud800" else "resolved"), score.parts


def test_counts_become_rewards() -> None:
    for counts, tier, reward in (
        ((0, 3, 4, 4), "applied", 0.15),
        ((1, 2, 4, 4), "some_fixed", 0.325),
        ((2, 2, 2, 4), "regressed", 0.25),
        ((2, 2, 0, 0), "resolved", 1.0),
    ):
        score = scoring.of_counts(*counts)
        assert score.tier == tier and score.reward == pytest.approx(reward) and score.correct == (tier == "resolved")


# ---------------------------------------------------------------- red team


ATTACKS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())["attacks"]


def test_what_a_module_does_to_its_own_process_fixes_nothing() -> None:
    for name, attack in map(dict.values, ATTACKS):
        for problem in PROBLEMS[:3]:
            path = problem.gold["fix"]["path"]
            first = problem.gold["files"][path].splitlines()[0]
            score = TASK.score(problem, block(path, first, f"{attack}\n{first}"))
            assert not score.correct and score.reward < 0.2, name
            # a builtin that always gives True is a wrong program: True == 1 where a test expects 1
            assert score.parts["fixed"] == 0 or name == "patched builtins"


def test_an_always_equal_result_is_not_the_expected_value() -> None:
    equal = "class Any:\n    def __eq__(self, other):\n        return True\n\n\n"
    for problem in PROBLEMS[:3]:
        path, text = problem.gold["fix"]["path"], problem.gold["files"][problem.gold["fix"]["path"]]
        lines = [f"{line}\n    return Any()" if line.startswith("def ") else line for line in text.splitlines()]
        score = TASK.score(problem, block(path, text.rstrip("\n"), equal + "\n".join(lines)))
        assert score.parts["fixed"] == 0 and not score.correct and score.tier == "applied"


def test_tests_and_their_settings_are_not_to_be_edited() -> None:
    problem = PROBLEMS[0]
    settings = "conftest.py shop/conftest.py pytest.ini setup.cfg pyproject.toml sitecustomize.py Tests/a.py".split()
    for path in ["tests/test_x.py", *settings]:
        made = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+def pytest_runtest_makereport(): ...\n"
        for answer in (made, fixed(problem) + "\n\n" + new_file(path)):  # a repair does not excuse it
            assert (TASK.score(problem, answer).tier, TASK.score(problem, answer).reward) == ("tampers", 0.0)
    path = next(name for name in problem.gold["files"] if name.startswith("tests/"))
    text = problem.gold["files"][path]
    line = next(row for row in text.splitlines() if "assert" in row)
    gone = f"--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{text.splitlines()[0]}\n"
    assert {TASK.score(problem, answer).tier for answer in (block(path, line, "    assert True"), gone)} == {"tampers"}


def test_listing_the_results_of_the_visible_tests_is_not_enough() -> None:
    for problem in PROBLEMS:
        gold, fix = problem.gold, problem.gold["fix"]
        if problem.meta["level"] == 3:
            continue
        name = next(n for n in gold["FAIL_TO_PASS"] if not n.startswith(generator.HIDDEN))
        call, _, right = gold["tests"][name].removeprefix("assert ").partition(" == ")
        function = call.partition("(")[0]
        head = next(row for row in gold["files"][fix["path"]].splitlines() if row.startswith(f"def {function}("))
        arguments = head.partition("(")[2].rpartition(")")[0]
        asked = call.partition("(")[2].rpartition(")")[0]
        known = f"{head}\n    if [{arguments}] == [{asked}]:\n        return {right}"
        score = TASK.score(problem, block(fix["path"], head, known))
        assert score.parts["fixed"] >= 1 and not score.correct and score.tier == "some_fixed"
