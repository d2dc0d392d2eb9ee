"""The repair task: edits as they are read, repositories that tell right from wrong, rewards,
attacks; and examples/swebench.py, in a copy of a checkout."""

import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonl import write

from codechat import tasks
from codechat.tasks.base import Problem
from codechat_lab.sandbox.pool import shared_pool
from codechat_lab.tasks.repair import edits, generator
from codechat_lab.tasks.repair import task as scoring
from codechat_lab.tasks.repair.edits import Change, EditError, applied, parse

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


DIFF = Path(__file__).with_name("cart_answer.md").read_text()


def test_both_formats_make_the_same_change() -> None:
    once = block("shop/cart.py", "        n += x", "        n += 2 * x")
    for text in (
        once,
        f"First,\n\n```python\n{once}\n```\n",
        f"`shop/cart.py`\n```\n{block('', '        n += x  ', '        n += 2 * x').lstrip()}\n```",
        f"./{once}".replace("\n", "\r\n"),
        DIFF,
        DIFF.replace("@@ -2,4 +2,4 @@", "@@ -40,9 +40,9 @@"),  # wrong numbers, right lines
        DIFF.replace(
            "@@ -2,4 +2,4 @@", f"@@ -{'9' * 5000},4 +2,4 @@"
        ),  # more digits than Python reads
        DIFF.partition("```diff\n")[2].partition("```")[0],
    ):
        assert applied(FILES, parse(text)) == FILES | {
            CART: FILES[CART].replace("+= x", "+= 2 * x")
        }


def test_a_later_block_sees_the_change_of_an_earlier_one() -> None:
    two = (
        block(CART, "    n = 0", "    n = 1")
        + "\n\nand\n\n"
        + block(CART, "    n = 1", "    n = 2")
    )
    assert applied(FILES, parse(two))[CART].count("n = 2")


def test_files_are_made_and_deleted() -> None:
    made = "--- /dev/null\n+++ b/shop/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
    gone = "--- a/README.md\n+++ /dev/null\n@@ -1 +0,0 @@\n-# Shop\n"
    expected = {"shop/cart.py": FILES["shop/cart.py"], "shop/new.py": "x = 1\ny = 2\n"}
    assert applied(FILES, parse(made + gone)) == expected
    assert applied(FILES, parse(new_file("shop/b.py", "z = 3")))["shop/b.py"] == "z = 3\n"


def test_an_edit_that_does_not_fit_is_refused() -> None:
    unindented = Change(CART, ("n = 0",), ("n = 1",))
    absent = [Change(path, ("x",), ("y",)) for path in ("shop/none.py", "../cart.py")]
    new = [Change(path, None, ("y",)) for path in ("/etc/passwd", "", CART)]  # the last exists
    for change in (unindented, *absent, *new):
        with pytest.raises(EditError):
            applied(FILES, [change])


def test_repeated_lines_need_a_line_number() -> None:
    files = {"a.py": "x\ny\nx\n"}
    with pytest.raises(EditError):
        applied(files, [Change("a.py", ("x",), ("z",))])
    assert applied(files, [Change("a.py", ("x",), ("z",), line=3)]) == {"a.py": "x\ny\nz\n"}


def test_text_without_an_edit_has_no_changes_and_a_long_one_is_read_at_once(
    quick: Callable[..., Any],
) -> None:
    """Each long text takes seconds to hours where a line is read again for each line before it."""
    short = [
        "",
        "n += 2",
        "<<<<<<< SEARCH\n=======\n",
        "--- a\n+++ b\n",
        "@@ -1 +1 @@\n-x\n+y\n",
        "```diff\n```",
    ]
    opened = "a\n<<<<< SEARCH\n"
    fences = ("a\n```\n<<<<< SEARCH\n") * 6000
    long = [
        " " * 150_000,
        "\t x" * 50_000,
        opened * 6000 + "=====\n" * 6000,
        (opened + "=====\n") * 6000,
        fences,
    ]
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


def test_failing_tests_fail_and_passing_tests_pass_before_the_repair_and_all_after_it() -> None:
    for split in tasks.SPLITS:
        problems = TASK.problems(split, 9)
        tasks.check_reference_solutions(TASK, problems).require()
        for problem in problems[:: 1 if split in ("train", "test_hard") else 9]:
            gold = problem.gold
            failing = gold["FAIL_TO_PASS"]
            passing = gold["PASS_TO_PASS"]
            before = shared_pool("auto").run(scoring.program(problem, gold["files"], 3.0))
            assert [r.passed for r in before.results] == [False] * len(failing) + [True] * len(
                passing
            )
            assert len(gold["files"]) == {1: 3, 2: 6, 3: 9}[problem.meta["level"]]
            hidden = [name for name in (*failing, *passing) if name.startswith(generator.HIDDEN)]
            shown = "".join(gold["files"].values())
            assert len(hidden) >= 4
            assert not any(gold["tests"][name] in shown for name in hidden)


def test_every_bug_of_every_part_changes_one_line() -> None:
    names = {"f": "f", "g": "g"}
    for part in generator.PARTS:
        for setting in part.settings("test_hard"):
            for right, wrong in part.bugs:
                broken = part.broken((right, wrong), names, setting)
                assert broken.wrong != broken.right
                assert broken.source != part.source(names, setting)
                assert part.code.count(right) == 1


def test_every_part_is_drawn() -> None:
    drawn = {
        p.meta["part"] for p in [*TASK.problems("train", 150), *TASK.problems("test_hard", 60)]
    }
    assert drawn == {part.name for part in generator.PARTS}


def test_held_out_parts_are_in_the_hard_test_only() -> None:
    held_out = {part.name for part in generator.PARTS if part.held_out}
    assert {p.meta["part"] for p in TASK.problems("test_hard", 30)} <= held_out
    assert not {p.meta["part"] for p in TASK.problems("test", 60)} & held_out


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
        "applied": block(
            "README.md", problem.gold["files"]["README.md"].splitlines()[0], "# Mended"
        ),
        "regressed": fixed(problem)
        + "\n\n"
        + block(other, broken, broken.replace("def ", "def not_")),
        "resolved": fixed(problem),
    }
    scores = {tier: TASK.score(problem, text) for tier, text in rungs.items()}
    assert {tier: score.tier for tier, score in scores.items()} == {tier: tier for tier in rungs}
    rewards = [score.reward for score in scores.values()]
    assert rewards == sorted(rewards)
    assert rewards[0] == 0
    assert rewards[-1] == 1
    assert [score.correct for score in scores.values()] == [False] * 4 + [True]
    assert 0.15 < scores["regressed"].reward < 0.5
    assert scores["applied"].reward == 0.15
    same = fixed(problem, replace=problem.gold["fix"]["search"])
    assert TASK.score(problem, same).tier == "unapplied", "nothing changes"


def test_a_repair_with_an_unusual_character_is_a_repair() -> None:
    """Except for half a character, which no Python file can hold."""
    problem = PROBLEMS[0]
    for sign in ("é", "\U0001f600", "\\U0001f600", "'\"\\", "\ud800"):
        score = TASK.score(
            problem, fixed(problem, replace=f"{problem.gold['fix']['replace']}  # {sign}")
        )
        assert score.tier == ("applied" if sign == "\ud800" else "resolved"), score.parts


def test_counts_become_rewards() -> None:
    for counts, tier, reward in (
        ((0, 3, 4, 4), "applied", 0.15),
        ((1, 2, 4, 4), "some_fixed", 0.325),
        ((2, 2, 2, 4), "regressed", 0.25),
        ((2, 2, 0, 0), "resolved", 1.0),
    ):
        score = scoring.of_counts(*counts)
        assert score.tier == tier
        assert score.reward == pytest.approx(reward)
        assert score.correct == (tier == "resolved")


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
        path = problem.gold["fix"]["path"]
        text = problem.gold["files"][problem.gold["fix"]["path"]]
        lines = [
            f"{line}\n    return Any()" if line.startswith("def ") else line
            for line in text.splitlines()
        ]
        score = TASK.score(problem, block(path, text.rstrip("\n"), equal + "\n".join(lines)))
        assert score.parts["fixed"] == 0
        assert not score.correct
        assert score.tier == "applied"


def test_tests_and_their_settings_are_not_to_be_edited() -> None:
    problem = PROBLEMS[0]
    settings = (
        "conftest.py shop/conftest.py pytest.ini setup.cfg "
        "pyproject.toml sitecustomize.py Tests/a.py"
    ).split()
    for path in ["tests/test_x.py", *settings]:
        made = (
            f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+def pytest_runtest_makereport(): ...\n"
        )
        # a repair does not excuse it
        for answer in (
            made,
            fixed(problem) + "\n\n" + new_file(path),
        ):
            assert (TASK.score(problem, answer).tier, TASK.score(problem, answer).reward) == (
                "tampers",
                0.0,
            )
    path = next(name for name in problem.gold["files"] if name.startswith("tests/"))
    text = problem.gold["files"][path]
    line = next(row for row in text.splitlines() if "assert" in row)
    gone = f"--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{text.splitlines()[0]}\n"
    assert {
        TASK.score(problem, answer).tier for answer in (block(path, line, "    assert True"), gone)
    } == {"tampers"}


def test_listing_the_results_of_the_visible_tests_is_not_enough() -> None:
    for problem in PROBLEMS:
        gold = problem.gold
        fix = gold["fix"]
        if problem.meta["level"] == 3:
            continue
        name = next(n for n in gold["FAIL_TO_PASS"] if not n.startswith(generator.HIDDEN))
        call, _, right = gold["tests"][name].removeprefix("assert ").partition(" == ")
        function = call.partition("(")[0]
        head = next(
            row
            for row in gold["files"][fix["path"]].splitlines()
            if row.startswith(f"def {function}(")
        )
        arguments = head.partition("(")[2].rpartition(")")[0]
        asked = call.partition("(")[2].rpartition(")")[0]
        known = f"{head}\n    if [{arguments}] == [{asked}]:\n        return {right}"
        score = TASK.score(problem, block(fix["path"], head, known))
        assert score.parts["fixed"] >= 1
        assert not score.correct
        assert score.tier == "some_fixed"


# ---------------------------------------------------------------- examples/swebench

NAME = f"{Path(__file__).parents[3] / 'examples' / 'swebench.py'}:SweBench"


def run_git(folder: Path, *words: str) -> str:
    own = [
        "git",
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "commit.gpgsign=false",
        *words,
    ]
    return subprocess.run(own, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> dict[str, Any]:
    repo = tmp_path / "checkouts" / "owner__shop-1"
    (repo / "shop").mkdir(parents=True)
    (repo / "tests").mkdir()
    run_git(tmp_path, "init", "-q", str(repo))
    (repo / "shop/__init__.py").write_text("")
    code = "def total(xs):\n    return sum(xs) + 1\n\n\ndef count(xs):\n    return len(xs)\n"
    tests = "from shop.cart import count\n\n\ndef test_count():\n    assert count([1]) == 1\n"
    (repo / "shop/cart.py").write_text(code)
    (repo / "tests/test_cart.py").write_text(tests)
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-qm", "base")
    base = run_git(repo, "rev-parse", "HEAD").strip()
    (repo / "shop/cart.py").write_text(code.replace(" + 1", ""))
    patch = run_git(repo, "diff")
    run_git(repo, "checkout", "-q", ".")
    more = (
        "\n\nclass TestTotal:\n    def test_some(self):\n        assert total([1, 2]) == 3\n\n"
        "    def test_none(self):\n        assert total([]) == 0\n"
    )
    (repo / "tests/test_cart.py").write_text(
        tests.replace("import count", "import count, total") + more
    )
    test_patch = run_git(repo, "diff")
    run_git(repo, "checkout", "-q", ".")
    (repo / "local.txt").write_text("mine")
    return {
        "instance_id": repo.name,
        "repo": "owner/shop",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(
            [f"tests/test_cart.py::TestTotal::test_{name}" for name in ("some", "none")]
        ),
        "PASS_TO_PASS": ["tests/test_cart.py::test_count"],
        "problem_statement": "total is one too much.",
    }


def real(tmp_path: Path, *rows: dict[str, Any], **more: Any) -> Any:
    path = write(tmp_path / "rows.jsonl", list(rows))
    return tasks.load(
        NAME,
        source=str(path),
        checkouts=str(tmp_path / "checkouts"),
        trusted=True,
        **more,
    )


@pytest.mark.slow
def test_rows_are_scored_in_a_copy_of_the_checkout(
    checkout: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    repo = tmp_path / "checkouts" / checkout["instance_id"]
    task = real(tmp_path, checkout, checkout | {"instance_id": "absent-2"})
    (problem,) = task.problems("test")
    assert "absent-2" in capsys.readouterr().err
    text = problem.messages[0]["content"]
    assert "total is one too much." in text
    assert "return sum(xs) + 1" in text
    assert "TestTotal" not in text
    tasks.check_reference_solutions(task, [problem]).require()
    wrong = "    return sum(xs) + 1"
    right = block("shop/cart.py", wrong, "    return sum(xs)")
    lost = block("shop/cart.py", "    return len(xs)", "    return 0")
    tiers = {
        "resolved": right,
        "some_fixed": block("shop/cart.py", wrong, "    return sum(xs) if xs else 1"),
        "applied": block("shop/cart.py", wrong, "    return sum(xs) + 2"),
        "regressed": f"{right}\n\n{lost}",
        "unapplied": block("shop/cart.py", "    return 0", "    return 1"),
        "none": "no idea",
        "tampers": block("tests/test_cart.py", "    assert count([1]) == 1", "    assert True"),
    }
    scores = {tier: task.score(problem, text) for tier, text in tiers.items()}
    assert {tier: score.tier for tier, score in scores.items()} == {tier: tier for tier in tiers}
    assert scores["some_fixed"].parts["fixed"] == 1
    assert scores["regressed"].parts["kept"] == 0
    made = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os\n"
    assert task.score(problem, made).tier == "tampers"
    for body in (
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('PASSED tests/test_cart.py::test_count')",
    ):
        score = task.score(
            problem, block("shop/cart.py", "def total(xs):", f"{body}\n\n\ndef total(xs):")
        )
        assert score.tier == "applied"
        assert not score.correct
    assert run_git(repo, "status", "--porcelain").split() == ["??", "local.txt"], (
        "the checkout stays as it was"
    )
    assert run_git(repo, "rev-parse", "HEAD").strip() == checkout["base_commit"]


def test_another_spelling_of_a_test_file_is_the_same_file(
    checkout: dict[str, Any], tmp_path: Path
) -> None:
    task = real(tmp_path, checkout)
    (problem,) = task.problems("test")
    cheat = "import shop.cart\nshop.cart.total = lambda xs: 3 if xs else 0\n\n\ndef test_count():"
    for path in ("./tests/test_cart.py", "tests//test_cart.py", "tests/./test_cart.py"):
        score = task.score(problem, block(path, "def test_count():", cheat))
        assert (score.tier, score.reward) == ("tampers", 0.0)
    assert task.score(
        problem, block("./shop/cart.py", "    return sum(xs) + 1", "    return sum(xs)")
    ).correct


def test_an_edit_that_cannot_be_written_is_unapplied(
    checkout: dict[str, Any], tmp_path: Path
) -> None:
    head = "diff --git a/tests/more/a.txt b/tests/more/a.txt\nnew file mode 100644\n"
    more = f"{head}--- /dev/null\n+++ b/tests/more/a.txt\n@@ -0,0 +1 @@\n+a\n"
    task = real(tmp_path, checkout | {"test_patch": checkout["test_patch"] + more})
    (problem,) = task.problems("test")
    for text in (
        new_file("shop/"),  # a folder
        new_file("shop/cart.py/x.py"),  # below a file
        block(
            "shop/cart.py", "    return len(xs)", "    return len(xs)  # \ud800"
        ),  # half a character
        new_file("shop/\ud800.py"),
        block(".git/config", "[core]", "[core"),  # no git command would run after it
        new_file("tests/more"),  # the test patch has a folder of this name
    ):
        score = task.score(problem, text)
        assert (score.tier, score.reward) == ("unapplied", 0.05)
        assert score.parts["reason"]


def test_a_run_that_hangs_ends(checkout: dict[str, Any], tmp_path: Path) -> None:
    task = real(tmp_path, checkout, timeout_s=3.0)
    (problem,) = task.problems("test")
    hang = "import time\ntime.sleep(600)\n\n\ndef total(xs):"
    score = task.score(problem, block("shop/cart.py", "def total(xs):", hang))
    assert score.tier == "applied"
    assert "out of time" in score.parts["reason"]
