"""The repair task: edits as they are read, repositories that tell right from wrong, rewards,
attacks; and examples/swebench.py, in a copy of a checkout."""

import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonl import write

from codechat import tasks
from codechat.tasks.base import Problem, Score
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
DOUBLED = block(CART, "        n += x", "        n += 2 * x")
SPACED = block("", "        n += x  ", "        n += 2 * x").lstrip()


@pytest.mark.parametrize(
    "text",
    [
        DOUBLED,
        f"First,\n\n```python\n{DOUBLED}\n```\n",
        f"`shop/cart.py`\n```\n{SPACED}\n```",
        f"./{DOUBLED}".replace("\n", "\r\n"),
        DIFF,
        # wrong numbers, right lines
        DIFF.replace("@@ -2,4 +2,4 @@", "@@ -40,9 +40,9 @@"),
        # more digits than Python reads
        DIFF.replace("@@ -2,4 +2,4 @@", f"@@ -{'9' * 5000},4 +2,4 @@"),
        DIFF.partition("```diff\n")[2].partition("```")[0],
    ],
    ids=[
        "block",
        "fenced",
        "path above a fence",
        "lines of Windows",
        "diff",
        "diff with wrong line numbers",
        "diff with a number that is too long",
        "bare diff",
    ],
)
def test_both_formats_make_the_same_change(text: str) -> None:
    changed = FILES[CART].replace("+= x", "+= 2 * x")
    assert applied(FILES, parse(text)) == FILES | {CART: changed}


def test_a_later_block_sees_the_change_of_an_earlier_one() -> None:
    first = block(CART, "    n = 0", "    n = 1")
    second = block(CART, "    n = 1", "    n = 2")
    assert applied(FILES, parse(f"{first}\n\nand\n\n{second}"))[CART].count("n = 2")


def test_a_diff_makes_and_deletes_files() -> None:
    made = "--- /dev/null\n+++ b/shop/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
    gone = "--- a/README.md\n+++ /dev/null\n@@ -1 +0,0 @@\n-# Shop\n"
    expected = {"shop/cart.py": FILES["shop/cart.py"], "shop/new.py": "x = 1\ny = 2\n"}
    assert applied(FILES, parse(made + gone)) == expected


def test_a_block_makes_a_file() -> None:
    assert applied(FILES, parse(new_file("shop/b.py", "z = 3")))["shop/b.py"] == "z = 3\n"


@pytest.mark.parametrize(
    "change",
    [
        Change(CART, ("n = 0",), ("n = 1",)),  # without its indentation
        Change("shop/none.py", ("x",), ("y",)),
        Change("../cart.py", ("x",), ("y",)),
        Change("/etc/passwd", None, ("y",)),
        Change("", None, ("y",)),
        Change(CART, None, ("y",)),  # it exists
    ],
    ids=lambda change: change.path,
)
def test_an_edit_that_does_not_fit_is_refused(change: Change) -> None:
    with pytest.raises(EditError):
        applied(FILES, [change])


def test_repeated_lines_need_a_line_number() -> None:
    files = {"a.py": "x\ny\nx\n"}
    with pytest.raises(EditError):
        applied(files, [Change("a.py", ("x",), ("z",))])
    assert applied(files, [Change("a.py", ("x",), ("z",), line=3)]) == {"a.py": "x\ny\nz\n"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n += 2",
        "<<<<<<< SEARCH\n=======\n",
        "--- a\n+++ b\n",
        "@@ -1 +1 @@\n-x\n+y\n",
        "```diff\n```",
    ],
)
def test_text_without_an_edit_has_no_changes(text: str) -> None:
    assert parse(text) == []


OPENED = "a\n<<<<< SEARCH\n"


@pytest.mark.parametrize(
    "text",
    [
        " " * 150_000,
        "\t x" * 50_000,
        OPENED * 6000 + "=====\n" * 6000,
        (OPENED + "=====\n") * 6000,
        "a\n```\n<<<<< SEARCH\n" * 6000,
    ],
    ids=["spaces", "tabs", "opened then parted", "opened and parted", "fences"],
)
def test_a_long_text_without_an_edit_is_read_at_once(text: str, quick: Callable[..., Any]) -> None:
    """Each takes seconds to hours where a line is read again for each line before it."""
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


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Problem]]:
    """Nine problems of each split."""
    return {split: TASK.problems(split, 9) for split in tasks.SPLITS}


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_all_tests_pass_after_the_repair(split: str, drawn: dict[str, list[Problem]]) -> None:
    tasks.check_reference_solutions(TASK, drawn[split]).require()


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_failing_tests_fail_and_passing_tests_pass_before_the_repair(
    split: str, drawn: dict[str, list[Problem]]
) -> None:
    every = 1 if split in ("train", "test_hard") else 9
    for problem in drawn[split][::every]:
        gold = problem.gold
        before = shared_pool("auto").run(scoring.program(problem, gold["files"], 3.0))
        failed = [False] * len(gold["FAIL_TO_PASS"])
        passed = [True] * len(gold["PASS_TO_PASS"])
        assert [result.passed for result in before.results] == failed + passed


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_a_repository_of_a_higher_level_has_more_files(
    split: str, drawn: dict[str, list[Problem]]
) -> None:
    sizes = {1: 3, 2: 6, 3: 9}
    for problem in drawn[split]:
        assert len(problem.gold["files"]) == sizes[problem.meta["level"]]


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_some_tests_are_hidden(split: str, drawn: dict[str, list[Problem]]) -> None:
    for problem in drawn[split]:
        gold = problem.gold
        shown = "".join(gold["files"].values())
        names = [*gold["FAIL_TO_PASS"], *gold["PASS_TO_PASS"]]
        hidden = [name for name in names if name.startswith(generator.HIDDEN)]
        assert len(hidden) >= 4
        assert not any(gold["tests"][name] in shown for name in hidden)


@pytest.mark.parametrize("part", generator.PARTS, ids=lambda part: part.name)
def test_every_bug_of_a_part_changes_one_line(part: generator.Part) -> None:
    names = {"f": "f", "g": "g"}
    for setting in part.settings("test_hard"):
        for right, wrong in part.bugs:
            broken = part.broken((right, wrong), names, setting)
            assert broken.wrong != broken.right
            assert broken.source != part.source(names, setting)
            assert part.code.count(right) == 1


def parts(split: str, n: int) -> set[str]:
    return {problem.meta["part"] for problem in TASK.problems(split, n)}


def test_every_part_is_drawn() -> None:
    drawn = parts("train", 150) | parts("test_hard", 60)
    assert drawn == {part.name for part in generator.PARTS}


def test_held_out_parts_are_in_the_hard_test_only() -> None:
    held_out = {part.name for part in generator.PARTS if part.held_out}
    assert parts("test_hard", 30) <= held_out
    assert not parts("test", 60) & held_out


def fixed(problem: Problem, search: str | None = None, replace: str | None = None) -> str:
    """The repair as an answer, with another text to search or to put in its place."""
    fix = problem.gold["fix"]
    return block(fix["path"], search or fix["search"], replace or fix["replace"])


def renamed_elsewhere(problem: Problem) -> str:
    """An answer that renames a function in another file than the broken one."""
    path = problem.gold["fix"]["path"]
    package = path.partition("/")[0]
    skipped = (path, f"{package}/__init__.py")
    files = problem.gold["files"]
    other = next(name for name in files if name.startswith(package) and name not in skipped)
    line = next(line for line in files[other].splitlines() if line.startswith("def "))
    return block(other, line, line.replace("def ", "def not_"))


@pytest.fixture(scope="module")
def rungs() -> dict[str, Score]:
    """The score of an answer of each tier, the worst first."""
    problem = next(p for p in PROBLEMS if p.meta["level"] == 2)
    title = problem.gold["files"]["README.md"].splitlines()[0]
    answers = {
        "none": "I do not know.",
        "unapplied": fixed(problem, search="no such line"),
        "applied": block("README.md", title, "# Mended"),
        "regressed": f"{fixed(problem)}\n\n{renamed_elsewhere(problem)}",
        "resolved": fixed(problem),
    }
    return {tier: TASK.score(problem, text) for tier, text in answers.items()}


def test_an_answer_has_the_tier_of_what_it_does(rungs: dict[str, Score]) -> None:
    assert {tier: score.tier for tier, score in rungs.items()} == {tier: tier for tier in rungs}


def test_only_a_repair_that_breaks_nothing_is_correct(rungs: dict[str, Score]) -> None:
    assert [tier for tier, score in rungs.items() if score.correct] == ["resolved"]


def test_rewards_rise_with_the_tiers(rungs: dict[str, Score]) -> None:
    rewards = [score.reward for score in rungs.values()]
    assert rewards == sorted(rewards)
    assert rewards[0] == 0
    assert rewards[-1] == 1
    assert rungs["applied"].reward == 0.15
    assert 0.15 < rungs["regressed"].reward < 0.5


def test_an_edit_that_changes_nothing_is_not_applied() -> None:
    problem = PROBLEMS[0]
    same = fixed(problem, replace=problem.gold["fix"]["search"])
    assert TASK.score(problem, same).tier == "unapplied"


def with_sign(sign: str) -> Score:
    """Of a repair that has the sign in a comment."""
    problem = PROBLEMS[0]
    replace = problem.gold["fix"]["replace"]
    return TASK.score(problem, fixed(problem, replace=f"{replace}  # {sign}"))


@pytest.mark.parametrize("sign", ["é", "\U0001f600", "\\U0001f600", "'\"\\"])
def test_a_repair_with_an_unusual_character_is_a_repair(sign: str) -> None:
    score = with_sign(sign)
    assert score.tier == "resolved", score.parts


def test_half_a_character_which_no_python_file_can_hold_repairs_nothing() -> None:
    assert with_sign("\ud800").tier == "applied"


@pytest.mark.parametrize(
    "fixed_of, kept_of, tier, reward",
    [
        ((0, 3), (4, 4), "applied", 0.15),
        ((1, 2), (4, 4), "some_fixed", 0.325),
        ((2, 2), (2, 4), "regressed", 0.25),
        ((2, 2), (0, 0), "resolved", 1.0),
    ],
)
def test_counts_become_rewards(
    fixed_of: tuple[int, int], kept_of: tuple[int, int], tier: str, reward: float
) -> None:
    score = scoring.of_counts(*fixed_of, *kept_of)
    assert score.tier == tier
    assert score.reward == pytest.approx(reward)
    assert score.correct == (tier == "resolved")


ATTACKS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())["attacks"]


@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: row["name"])
def test_what_a_module_does_to_its_own_process_fixes_nothing(row: dict[str, str]) -> None:
    for problem in PROBLEMS[:3]:
        path = problem.gold["fix"]["path"]
        first = problem.gold["files"][path].splitlines()[0]
        score = TASK.score(problem, block(path, first, f"{row['code']}\n{first}"))
        assert not score.correct
        assert score.reward < 0.2
        # a builtin that always gives True is a wrong program: True == 1 where a test expects 1
        assert score.parts["fixed"] == 0 or row["name"] == "patched builtins"


def always_equal(source: str) -> str:
    """The module with functions whose result equals everything."""
    lines = ["class Any:", "    def __eq__(self, other):", "        return True", "", ""]
    for line in source.splitlines():
        lines.append(line)
        if line.startswith("def "):
            lines.append("    return Any()")
    return "\n".join(lines)


def test_an_always_equal_result_is_not_the_expected_value() -> None:
    for problem in PROBLEMS[:3]:
        path = problem.gold["fix"]["path"]
        source = problem.gold["files"][path]
        score = TASK.score(problem, block(path, source.rstrip("\n"), always_equal(source)))
        assert score.parts["fixed"] == 0
        assert not score.correct
        assert score.tier == "applied"


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_x.py",
        "conftest.py",
        "shop/conftest.py",
        "pytest.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "Tests/a.py",
    ],
)
def test_new_tests_and_settings_of_tests_are_tampering_even_beside_a_repair(path: str) -> None:
    problem = PROBLEMS[0]
    made = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+def pytest_runtest_makereport(): ...\n"
    for answer in (made, f"{fixed(problem)}\n\n{new_file(path)}"):
        score = TASK.score(problem, answer)
        assert score.tier == "tampers"
        assert score.reward == 0.0


@pytest.fixture(scope="module")
def file_of_tests() -> str:
    """The path of a file of tests of the first problem."""
    return next(name for name in PROBLEMS[0].gold["files"] if name.startswith("tests/"))


def test_a_test_that_is_changed_is_tampering(file_of_tests: str) -> None:
    text = PROBLEMS[0].gold["files"][file_of_tests]
    line = next(row for row in text.splitlines() if "assert" in row)
    answer = block(file_of_tests, line, "    assert True")
    assert TASK.score(PROBLEMS[0], answer).tier == "tampers"


def test_a_test_that_is_deleted_is_tampering(file_of_tests: str) -> None:
    first = PROBLEMS[0].gold["files"][file_of_tests].splitlines()[0]
    answer = f"--- a/{file_of_tests}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{first}\n"
    assert TASK.score(PROBLEMS[0], answer).tier == "tampers"


def answer_that_knows_a_visible_test(problem: Problem) -> str:
    """An answer that returns the result of the first visible test for its arguments."""
    gold = problem.gold
    path = gold["fix"]["path"]
    name = next(n for n in gold["FAIL_TO_PASS"] if not n.startswith(generator.HIDDEN))
    call, _, result = gold["tests"][name].removeprefix("assert ").partition(" == ")
    function, _, given = call.partition("(")
    lines = gold["files"][path].splitlines()
    head = next(line for line in lines if line.startswith(f"def {function}("))
    parameters = head.partition("(")[2].rpartition(")")[0]
    known = f"[{parameters}] == [{given.rpartition(')')[0]}]"
    return block(path, head, f"{head}\n    if {known}:\n        return {result}")


def test_listing_the_results_of_the_visible_tests_is_not_enough() -> None:
    for problem in PROBLEMS:
        if problem.meta["level"] == 3:
            continue
        score = TASK.score(problem, answer_that_knows_a_visible_test(problem))
        assert score.parts["fixed"] >= 1
        assert not score.correct
        assert score.tier == "some_fixed"


# ---------------------------------------------------------------- examples/swebench

NAME = f"{Path(__file__).parents[3] / 'examples' / 'swebench.py'}:SweBench"


def run_git(folder: Path, *words: str) -> str:
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *name, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


class Checkout(NamedTuple):
    """A row of SWE-bench, and the folder that has its checkout."""

    folder: Path
    row: dict[str, Any]

    @property
    def repository(self) -> Path:
        return self.folder / self.row["instance_id"]


CODE = "def total(xs):\n    return sum(xs) + 1\n\n\ndef count(xs):\n    return len(xs)\n"
TESTS = "from shop.cart import count\n\n\ndef test_count():\n    assert count([1]) == 1\n"
MORE_TESTS = """

class TestTotal:
    def test_some(self):
        assert total([1, 2]) == 3

    def test_none(self):
        assert total([]) == 0
"""


def patch_of(repository: Path, path: str, text: str) -> str:
    """The diff to a file with this text; the checkout stays as it is."""
    (repository / path).write_text(text)
    patch = run_git(repository, "diff")
    run_git(repository, "checkout", "-q", ".")
    return patch


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("checkouts")
    repository = folder / "owner__shop-1"
    (repository / "shop").mkdir(parents=True)
    (repository / "tests").mkdir()
    run_git(folder, "init", "-q", str(repository))
    (repository / "shop/__init__.py").write_text("")
    (repository / "shop/cart.py").write_text(CODE)
    (repository / "tests/test_cart.py").write_text(TESTS)
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-qm", "base")
    more_tests = TESTS.replace("import count", "import count, total") + MORE_TESTS
    failing = [
        "tests/test_cart.py::TestTotal::test_some",
        "tests/test_cart.py::TestTotal::test_none",
    ]
    row = {
        "instance_id": repository.name,
        "repo": "owner/shop",
        "base_commit": run_git(repository, "rev-parse", "HEAD").strip(),
        "patch": patch_of(repository, "shop/cart.py", CODE.replace(" + 1", "")),
        "test_patch": patch_of(repository, "tests/test_cart.py", more_tests),
        "FAIL_TO_PASS": json.dumps(failing),
        "PASS_TO_PASS": ["tests/test_cart.py::test_count"],
        "problem_statement": "total is one too much.",
    }
    (repository / "local.txt").write_text("mine")
    return Checkout(folder, row)


def real(checkout: Checkout, *rows: dict[str, Any], timeout_s: float = 60.0) -> Any:
    """The task of these rows over the folder of checkouts."""
    return tasks.load(
        NAME,
        source=str(write(checkout.folder / "rows.jsonl", list(rows))),
        checkouts=str(checkout.folder),
        trusted=True,
        timeout_s=timeout_s,
    )


class Loaded(NamedTuple):
    """The task of one row, and its problem."""

    task: Any
    problem: Problem

    def score(self, answer: str) -> Score:
        return self.task.score(self.problem, answer)


@pytest.fixture
def loaded(checkout: Checkout) -> Loaded:
    task = real(checkout, checkout.row)
    return Loaded(task, *task.problems("test"))


def test_a_row_without_a_checkout_is_left_out_by_name(checkout: Checkout, capsys: Any) -> None:
    task = real(checkout, checkout.row, checkout.row | {"instance_id": "absent-2"})
    assert len(task.problems("test")) == 1
    assert "absent-2" in capsys.readouterr().err


def test_a_request_shows_the_problem_and_the_broken_file_and_no_test(loaded: Loaded) -> None:
    text = loaded.problem.messages[0]["content"]
    assert "total is one too much." in text
    assert "return sum(xs) + 1" in text
    assert "TestTotal" not in text


@pytest.mark.slow
def test_the_patch_of_a_row_is_right(loaded: Loaded) -> None:
    tasks.check_reference_solutions(loaded.task, [loaded.problem]).require()


WRONG = "    return sum(xs) + 1"
RIGHT = block(CART, WRONG, "    return sum(xs)")
LOST = block(CART, "    return len(xs)", "    return 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer, tier, fixed, kept",
    [
        (RIGHT, "resolved", 2, 1),
        (block(CART, WRONG, "    return sum(xs) if xs else 1"), "some_fixed", 1, 1),
        (block(CART, WRONG, "    return sum(xs) + 2"), "applied", 0, 1),
        (f"{RIGHT}\n\n{LOST}", "regressed", 2, 0),
    ],
    ids=["resolved", "some_fixed", "applied", "regressed"],
)
def test_an_answer_is_scored_by_the_tests_that_it_mends_and_keeps(
    answer: str, tier: str, fixed: int, kept: int, loaded: Loaded
) -> None:
    score = loaded.score(answer)
    assert score.tier == tier
    assert score.parts["fixed"] == fixed
    assert score.parts["kept"] == kept


ASSERT = "    assert count([1]) == 1"


@pytest.mark.parametrize(
    "answer, tier",
    [
        (block(CART, "    return 0", "    return 1"), "unapplied"),
        ("no idea", "none"),
        (block("tests/test_cart.py", ASSERT, "    assert True"), "tampers"),
        ("--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os\n", "tampers"),
    ],
    ids=["unapplied", "none", "a test", "settings of tests"],
)
def test_an_answer_that_changes_no_code_is_scored_without_a_run(
    answer: str, tier: str, loaded: Loaded
) -> None:
    assert loaded.score(answer).tier == tier


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('PASSED tests/test_cart.py::test_count')",
    ],
)
def test_a_module_that_ends_the_run_or_claims_success_fixes_nothing(
    code: str, loaded: Loaded
) -> None:
    score = loaded.score(block(CART, "def total(xs):", f"{code}\n\n\ndef total(xs):"))
    assert score.tier == "applied"
    assert not score.correct


@pytest.mark.slow
def test_the_checkout_stays_as_it_was(checkout: Checkout, loaded: Loaded) -> None:
    loaded.score(RIGHT)
    assert run_git(checkout.repository, "status", "--porcelain").split() == ["??", "local.txt"]
    assert run_git(checkout.repository, "rev-parse", "HEAD").strip() == checkout.row["base_commit"]


CHEAT = "import shop.cart\nshop.cart.total = lambda xs: 3 if xs else 0\n\n\ndef test_count():"


@pytest.mark.parametrize(
    "path", ["./tests/test_cart.py", "tests//test_cart.py", "tests/./test_cart.py"]
)
def test_another_spelling_of_a_test_file_is_the_same_file(path: str, loaded: Loaded) -> None:
    score = loaded.score(block(path, "def test_count():", CHEAT))
    assert score.tier == "tampers"
    assert score.reward == 0.0


def test_another_spelling_of_a_module_is_the_same_module(loaded: Loaded) -> None:
    assert loaded.score(block("./shop/cart.py", WRONG, "    return sum(xs)")).correct


@pytest.mark.parametrize(
    "answer",
    [
        new_file("shop/"),  # a folder
        new_file("shop/cart.py/x.py"),  # below a file
        # half a character
        block(CART, "    return len(xs)", "    return len(xs)  # \ud800"),
        new_file("shop/\ud800.py"),
        block(".git/config", "[core]", "[core"),  # no git command would run after it
        new_file("tests/more"),  # the test patch has a folder of this name
    ],
    ids=["folder", "below a file", "half a character", "half a name", "git", "folder of a patch"],
)
def test_an_edit_that_cannot_be_written_is_unapplied(answer: str, checkout: Checkout) -> None:
    head = "diff --git a/tests/more/a.txt b/tests/more/a.txt\nnew file mode 100644\n"
    more = f"{head}--- /dev/null\n+++ b/tests/more/a.txt\n@@ -0,0 +1 @@\n+a\n"
    task = real(checkout, checkout.row | {"test_patch": checkout.row["test_patch"] + more})
    (problem,) = task.problems("test")
    score = task.score(problem, answer)
    assert score.tier == "unapplied"
    assert score.reward == 0.05
    assert score.parts["reason"]


def test_a_run_that_hangs_ends(checkout: Checkout) -> None:
    task = real(checkout, checkout.row, timeout_s=3.0)
    (problem,) = task.problems("test")
    hang = "import time\ntime.sleep(600)\n\n\ndef total(xs):"
    score = task.score(problem, block(CART, "def total(xs):", hang))
    assert score.tier == "applied"
    assert "out of time" in score.parts["reason"]
