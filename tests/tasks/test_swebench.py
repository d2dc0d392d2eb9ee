"""examples/swebench.py: rows of SWE-bench, scored in a copy of a prepared checkout."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from codechat import tasks
from codechat.tasks.repair.edits import as_block as block

NAME = f"{Path(__file__).parents[2] / 'examples' / 'swebench.py'}:SweBench"


def new_file(path: str) -> str:
    return f"{path}\n<<<<<<< SEARCH\n=======\nx = 1\n>>>>>>> REPLACE"


def run_git(folder: Path, *words: str) -> str:
    own = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false", *words]
    return subprocess.run(own, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> dict[str, Any]:
    """A git repository with a bug, and its row as SWE-bench has it."""
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
    more = "\n\nclass TestTotal:\n    def test_some(self):\n        assert total([1, 2]) == 3\n\n    def test_none(self):\n        assert total([]) == 0\n"
    (repo / "tests/test_cart.py").write_text(tests.replace("import count", "import count, total") + more)
    test_patch = run_git(repo, "diff")
    run_git(repo, "checkout", "-q", ".")
    (repo / "local.txt").write_text("mine")
    row = dict(instance_id=repo.name, repo="owner/shop", base_commit=base, patch=patch, test_patch=test_patch)
    failing = json.dumps([f"tests/test_cart.py::TestTotal::test_{name}" for name in ("some", "none")])
    row |= dict(FAIL_TO_PASS=failing, PASS_TO_PASS=["tests/test_cart.py::test_count"])
    return row | dict(problem_statement="total is one too much.")


def real(tmp_path: Path, *rows: dict[str, Any], **more: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks.load(NAME, source=str(path), checkouts=str(tmp_path / "checkouts"), trusted=True, **more)


@pytest.mark.slow
def test_real_rows_are_scored_in_a_copy_of_the_checkout(
    checkout: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = tmp_path / "checkouts" / checkout["instance_id"]
    task = real(tmp_path, checkout, checkout | {"instance_id": "absent-2"})
    (problem,) = task.problems("test")
    assert "absent-2" in capsys.readouterr().err
    text = problem.messages[0]["content"]
    assert "total is one too much." in text and "return sum(xs) + 1" in text and "TestTotal" not in text
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
    assert scores["some_fixed"].parts["fixed"] == 1 and scores["regressed"].parts["kept"] == 0
    made = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os\n"
    assert task.score(problem, made).tier == "tampers"
    for body in ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "print('PASSED tests/test_cart.py::test_count')"):
        score = task.score(problem, block("shop/cart.py", "def total(xs):", f"{body}\n\n\ndef total(xs):"))
        assert score.tier == "applied" and not score.correct
    assert run_git(repo, "status", "--porcelain").split() == ["??", "local.txt"], "the checkout stays as it was"
    assert run_git(repo, "rev-parse", "HEAD").strip() == checkout["base_commit"]


def test_another_spelling_of_a_test_file_is_the_same_file(checkout: dict[str, Any], tmp_path: Path) -> None:
    task = real(tmp_path, checkout)
    (problem,) = task.problems("test")
    cheat = "import shop.cart\nshop.cart.total = lambda xs: 3 if xs else 0\n\n\ndef test_count():"
    for path in ("./tests/test_cart.py", "tests//test_cart.py", "tests/./test_cart.py"):
        score = task.score(problem, block(path, "def test_count():", cheat))
        assert (score.tier, score.reward) == ("tampers", 0.0)
    assert task.score(problem, block("./shop/cart.py", "    return sum(xs) + 1", "    return sum(xs)")).correct


def test_an_edit_that_cannot_be_written_is_unapplied(checkout: dict[str, Any], tmp_path: Path) -> None:
    head = "diff --git a/tests/more/a.txt b/tests/more/a.txt\nnew file mode 100644\n"
    more = f"{head}--- /dev/null\n+++ b/tests/more/a.txt\n@@ -0,0 +1 @@\n+a\n"
    task = real(tmp_path, checkout | {"test_patch": checkout["test_patch"] + more})
    (problem,) = task.problems("test")
    for text in (
        new_file("shop/"),  # a folder
        new_file("shop/cart.py/x.py"),  # below a file
        block("shop/cart.py", "    return len(xs)", "    return len(xs)  # \ud800"),  # half a character
        new_file("shop/\ud800.py"),
        block(".git/config", "[core]", "[core"),  # no git command would run after it
        new_file("tests/more"),  # the test patch has a folder of this name
    ):
        score = task.score(problem, text)
        assert (score.tier, score.reward) == ("unapplied", 0.05) and score.parts["reason"]


def test_a_run_that_hangs_ends(checkout: dict[str, Any], tmp_path: Path) -> None:
    task = real(tmp_path, checkout, timeout_s=3.0)
    (problem,) = task.problems("test")
    hang = "import time\ntime.sleep(600)\n\n\ndef total(xs):"
    score = task.score(problem, block("shop/cart.py", "def total(xs):", hang))
    assert score.tier == "applied" and "out of time" in score.parts["reason"]
