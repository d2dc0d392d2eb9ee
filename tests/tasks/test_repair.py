"""The repair task: edits as they are read, repositories that tell right from wrong, rewards, episodes, commands, real rows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from codechat import cli, grpo, tasks
from codechat.core import config
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import command, conversations
from codechat.evaluation import diagnose
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.tasks import redteam
from codechat.tasks.base import Problem
from codechat.tasks.repair import edits, generator, parts, scoring, swebench
from codechat.tasks.repair.edits import Change, EditError, applied, parse
from codechat.text import chat, tokenizer

FILES = {
    "shop/cart.py": "def total(xs):\n    n = 0\n    for x in xs:\n        n += x\n    return n\n",
    "README.md": "# Shop\n",
}
EDITS, TOOLS = tasks.load("repair"), tasks.load("repair:actions=tools")
PROBLEMS = EDITS.problems("train", 9, seed=3)


def block(path: str, old: str, new: str) -> str:
    return edits.as_block(path, old, new)


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


@pytest.mark.parametrize(
    "text",
    [
        block("shop/cart.py", "        n += x", "        n += 2 * x"),
        f"First,\n\n```python\n{block('shop/cart.py', '        n += x', '        n += 2 * x')}\n```\n",
        f"`shop/cart.py`\n```\n{block('', '        n += x  ', '        n += 2 * x').lstrip()}\n```",
        block("./shop/cart.py", "        n += x", "        n += 2 * x").replace("\n", "\r\n"),
        DIFF,
        DIFF.replace("@@ -2,4 +2,4 @@", "@@ -40,9 +40,9 @@"),  # wrong numbers, right lines
        DIFF.replace("@@ -2,4 +2,4 @@", f"@@ -{'9' * 5000},4 +2,4 @@"),  # more digits than Python reads
        DIFF.partition("```diff\n")[2].partition("```")[0],
    ],
)
def test_both_formats_make_the_same_change(text: str) -> None:
    found = applied(FILES, parse(text))
    assert found == FILES | {"shop/cart.py": FILES["shop/cart.py"].replace("n += x", "n += 2 * x")}


def test_files_are_made_and_deleted() -> None:
    made = "--- /dev/null\n+++ b/shop/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
    gone = "--- a/README.md\n+++ /dev/null\n@@ -1 +0,0 @@\n-# Shop\n"
    assert applied(FILES, parse(made + gone)) == {
        "shop/cart.py": FILES["shop/cart.py"],
        "shop/new.py": "x = 1\ny = 2\n",
    }
    assert (
        applied(FILES, parse(block("shop/b.py", "", "z = 3").replace("SEARCH\n\n", "SEARCH\n")))["shop/b.py"]
        == "z = 3\n"
    )


def test_several_changes_apply_in_order() -> None:
    first = block("shop/cart.py", "    n = 0", "    n = 1")
    assert applied(FILES, parse(f"{first}\n\nand\n\n{block('shop/cart.py', '    n = 1', '    n = 2')}"))[
        "shop/cart.py"
    ].count("n = 2")


@pytest.mark.parametrize(
    "change, why",
    [
        (Change("shop/none.py", ("x",), ("y",)), "no shop/none.py"),
        (Change("shop/cart.py", ("n = 0",), ("n = 1",)), "does not hold"),  # without its indentation
        (Change("../cart.py", ("x",), ("y",)), "no path"),
        (Change("/etc/passwd", None, ("y",)), "no path"),
        (Change("shop/cart.py", None, ("y",)), "exists"),
        (Change("", None, ("y",)), "no path"),
    ],
)
def test_an_edit_that_does_not_fit_says_why(change: Change, why: str) -> None:
    with pytest.raises(EditError, match=why):
        applied(FILES, [change])


def test_repeated_lines_need_a_line_number() -> None:
    files = {"a.py": "x\ny\nx\n"}
    with pytest.raises(EditError, match="2 times"):
        applied(files, [Change("a.py", ("x",), ("z",))])
    assert applied(files, [Change("a.py", ("x",), ("z",), line=3)]) == {"a.py": "x\ny\nz\n"}


@pytest.mark.parametrize(
    "text", ["", "n += 2", "<<<<<<< SEARCH\n=======\n", "--- a\n+++ b\n", "@@ -1 +1 @@\n-x\n+y\n", "```diff\n```"]
)
def test_text_without_an_edit_has_no_changes(text: str) -> None:
    assert parse(text) == []


@pytest.mark.parametrize(
    "text",
    [
        " " * 150_000,
        "\t x" * 50_000,
        "a\n<<<<< SEARCH\n" * 6000 + "=====\n" * 6000,
        "a\n<<<<< SEARCH\n=====\n" * 6000,
        "a\n```\n<<<<< SEARCH\n" * 6000,
    ],
    ids=["blanks", "blanks and text", "nothing replaced", "dividers", "fences"],
)
def test_a_long_text_without_an_edit_is_read_at_once(text: str) -> None:
    """Each takes seconds to hours where a line is read again for each line before it."""
    before = time.process_time()
    assert parse(text) == []
    assert time.process_time() - before < 5


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


def buggy(problem: Problem) -> list[bool]:
    """Which tests pass before the repair, failing ones first."""
    from codechat.tasks.coding.task import pool_of

    found = pool_of("auto").run(scoring.program(problem, problem.gold["files"], 3.0))
    return [r.passed for r in found.results]


@pytest.mark.parametrize("split", ["train", "test_hard"])
def test_failing_tests_fail_and_passing_tests_pass_before_the_repair(split: str) -> None:
    for problem in EDITS.problems(split, 9):
        failing, passing = problem.gold["FAIL_TO_PASS"], problem.gold["PASS_TO_PASS"]
        assert buggy(problem) == [False] * len(failing) + [True] * len(passing)
        assert len(problem.gold["files"]) == {1: 3, 2: 6, 3: 9}[problem.meta["level"]]
        hidden = [name for name in (*failing, *passing) if name.startswith(generator.HIDDEN)]
        shown = "".join(problem.gold["files"].values())
        assert len(hidden) >= 4 and not any(problem.gold["tests"][name] in shown for name in hidden)


@pytest.mark.parametrize("task", [EDITS, TOOLS], ids=["edits", "tools"])
@pytest.mark.parametrize("split", tasks.SPLITS)
def test_every_experts_repair_earns_the_maximum(task: Any, split: str) -> None:
    tasks.check_reference_solutions(task, task.problems(split, 12)).require()


def test_every_bug_of_every_part_changes_one_line_and_most_can_be_drawn() -> None:
    names = {"f": "f", "g": "g"}
    for part in parts.PARTS:
        for setting in part.settings():
            for bug in part.bugs:
                wrong, old, new = part.lines(bug, names, setting)
                assert old != new and wrong != part.source(names, setting)
    drawn = {p.meta["part"] for p in EDITS.problems("train", 150)} | {
        p.meta["part"] for p in EDITS.problems("test_hard", 60)
    }
    assert drawn == {part.name for part in parts.PARTS}


def test_splits_share_no_problem_and_the_seed_decides() -> None:
    found = {split: {p.id for p in EDITS.problems(split, 40)} for split in tasks.SPLITS}
    assert all(len(ids) == 40 for ids in found.values())
    assert sum(map(len, found.values())) == len(set().union(*found.values()))
    assert (
        EDITS.problems("train", 5, seed=1) == EDITS.problems("train", 5, seed=1) != EDITS.problems("train", 5, seed=2)
    )
    held_out = {part.name for part in parts.PARTS if part.held_out}
    assert {p.meta["part"] for p in EDITS.problems("test_hard", 30)} <= held_out
    assert not {p.meta["part"] for p in EDITS.problems("test", 60)} & held_out


# ---------------------------------------------------------------- rewards


def fixed(problem: Problem, **more: str) -> str:
    fix = problem.gold["fix"] | more
    return block(fix["path"], fix["search"], fix["replace"])


def test_the_rungs_in_their_order() -> None:
    problem = next(p for p in PROBLEMS if p.meta["level"] == 2)
    path = problem.gold["fix"]["path"]
    other = next(
        f
        for f in problem.gold["files"]
        if f.startswith(path.split("/")[0]) and f not in (path, f"{path.split('/')[0]}/__init__.py")
    )
    text = problem.gold["files"][other]
    broken = next(line for line in text.splitlines() if line.startswith("def "))
    rungs = {
        "none": "I do not know.",
        "unapplied": fixed(problem, search="no such line"),
        "applied": block("README.md", problem.gold["files"]["README.md"].splitlines()[0], "# Mended"),
        "regressed": fixed(problem) + "\n\n" + block(other, broken, broken.replace("def ", "def not_")),
        "resolved": fixed(problem),
    }
    scores = {tier: EDITS.score(problem, text) for tier, text in rungs.items()}
    assert {tier: score.tier for tier, score in scores.items()} == {tier: tier for tier in rungs}
    rewards = [score.reward for score in scores.values()]
    assert rewards == sorted(rewards) and rewards[0] == 0 and rewards[-1] == 1
    assert [score.correct for score in scores.values()] == [False] * 4 + [True]
    assert 0.15 < scores["regressed"].reward < 0.5 and scores["applied"].reward == 0.15
    assert EDITS.score(problem, fixed(problem, replace=problem.gold["fix"]["search"])).tier == "unapplied", (
        "nothing changes"
    )


@pytest.mark.parametrize("sign", ["é", "\U0001f600", "\\U0001f600", "'\"\\", "\ud800"], ids=ascii)
def test_a_repair_with_an_unusual_character_is_a_repair(sign: str) -> None:
    """Except for half a character, which no Python file can hold."""
    problem = PROBLEMS[0]
    score = EDITS.score(problem, fixed(problem, replace=f"{problem.gold['fix']['replace']}  # {sign}"))
    assert score.tier == ("applied" if sign == "\ud800" else "resolved"), score.parts


def test_counts_become_rewards() -> None:
    assert scoring.of_counts(0, 3, 4, 4).reward == pytest.approx(0.15)
    assert scoring.of_counts(1, 2, 4, 4) == scoring.Score(
        pytest.approx(0.325), "some_fixed", scoring.of_counts(1, 2, 4, 4).parts, False
    )  # type: ignore[arg-type]
    assert (
        scoring.of_counts(2, 2, 2, 4).reward == pytest.approx(0.25)
        and scoring.of_counts(2, 2, 2, 4).tier == "regressed"
    )
    assert scoring.of_counts(2, 2, 0, 0).correct


# ---------------------------------------------------------------- red team


def attack(problem: Problem, body: str) -> str:
    """An edit that puts `body` at the top of the module with the bug and repairs nothing."""
    path = problem.gold["fix"]["path"]
    first = problem.gold["files"][path].splitlines()[0]
    return block(path, first, f"{body}\n{first}")


ATTACKS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "system exit later": "import atexit, os\natexit.register(os._exit, 0)",
    "a claim": "print('0 failed, 12 passed')\nREWARD = 1.0",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.sum = builtins.max = lambda *a, **k: True",
    "always equal": "class Any:\n    __eq__ = lambda *a: True\n    __class__ = int\n",
    "patched importer": "import sys\nsys.modules['pytest'] = sys.modules[__name__]\nsys.meta_path.clear()",
    "frames": "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals.update(passed=True, results=[True] * 99)\n    f = f.f_back",
    "raises": "raise SystemExit(0)",
    "tests deleted from within": "import shutil\nshutil.rmtree('tests', ignore_errors=True)",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_module_does_to_its_own_process_fixes_nothing(name: str) -> None:
    for problem in PROBLEMS[:3]:
        score = EDITS.score(problem, attack(problem, ATTACKS[name]))
        assert not score.correct and score.reward < 0.2, name
        # a builtin that always gives True is a wrong program: True == 1 where a test expects 1
        assert score.parts["fixed"] == 0 or name == "patched builtins"


def test_an_always_equal_result_is_not_the_expected_value() -> None:
    for problem in PROBLEMS[:3]:
        path, text = problem.gold["fix"]["path"], problem.gold["files"][problem.gold["fix"]["path"]]
        cheat = "class Any:\n    def __eq__(self, other):\n        return True\n\n\n" + "\n".join(
            f"{line}\n    return Any()" if line.startswith("def ") else line for line in text.splitlines()
        )
        changes = [Change(path, tuple(text.splitlines()), tuple(cheat.splitlines()))]
        files, _ = scoring.after(problem.gold["files"], changes)
        assert files is not None
        score = EDITS.score(problem, block(path, text.rstrip("\n"), cheat))
        assert score.parts["fixed"] == 0 and not score.correct


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
def test_tests_and_their_settings_are_not_to_be_edited(path: str) -> None:
    problem = PROBLEMS[0]
    made = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+def pytest_runtest_makereport(): ...\n"
    score = EDITS.score(problem, f"{made}")
    assert (score.tier, score.reward) == ("tampers", 0.0)
    both = EDITS.score(problem, fixed(problem) + "\n\n" + block(path, "", "x = 1").replace("SEARCH\n\n", "SEARCH\n"))
    assert (both.tier, both.reward) == ("tampers", 0.0), "a repair does not excuse it"


def test_editing_or_deleting_the_failing_test_earns_nothing() -> None:
    problem = PROBLEMS[0]
    path = next(name for name in problem.gold["files"] if name.startswith("tests/"))
    text = problem.gold["files"][path]
    line = next(row for row in text.splitlines() if "assert" in row)
    for answer in (
        block(path, line, "    assert True"),
        f"--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{text.splitlines()[0]}\n",
    ):
        assert EDITS.score(problem, answer).tier == "tampers"


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
        known = (
            f"{head}\n    if [{arguments}] == [{call.partition('(')[2].rpartition(')')[0]}]:\n        return {right}"
        )
        score = EDITS.score(problem, block(fix["path"], head, known))
        assert score.parts["fixed"] >= 1 and not score.correct and score.tier == "some_fixed"


def test_no_fixed_text_is_a_shortcut() -> None:
    for task in (EDITS, TOOLS):
        found = redteam.check_reward(task, task.problems("train", 8)).require()
        assert not {k: v for k, v in found.shortcuts.items() if not (task is TOOLS and k == "all answers")}
    nothing = TOOLS.score(TOOLS.problems("train", 1)[0], "Fixed.")
    assert (nothing.tier, nothing.reward) == ("none", 0.0)


# ---------------------------------------------------------------- episodes


def call(name: str, **arguments: str) -> str:
    return chat.format_call(name, arguments)


def played(problem: Problem, *answers: str) -> tuple[Any, list[str]]:
    world = TOOLS.environment()
    world.reset(problem, 0)
    told, rewards = [], []
    for text in answers:
        messages, reward, _ = world.step({"role": "assistant", "content": text})
        told += [m["content"] for m in messages]
        rewards.append(reward)
    assert sum(rewards) == pytest.approx(world.score().reward)
    return world.score(), told


def test_an_expert_views_edits_and_runs_the_tests() -> None:
    problem = TOOLS.problems("train", 1)[0]
    score, told = played(problem, *generator.gold_steps(problem))
    assert score.correct and len(told) == 3
    assert json.loads(told[0])["result"] == problem.gold["files"][problem.gold["fix"]["path"]]
    assert json.loads(told[1]) == {"result": "edited"} and json.loads(told[2])["result"].startswith("0 failed, ")
    tok = tokenizer.load("gpt2:4096")
    episode = episodes.replay(TOOLS, problem, generator.gold_steps(problem), tok)
    assert episode.score.correct and sum(t.reward for t in episode.turns) == 1.0


def test_tools_show_only_visible_tests_and_refuse_the_rest() -> None:
    problem = TOOLS.problems("train", 1)[0]
    path = next(name for name in problem.gold["files"] if name.startswith("tests/"))
    score, told = played(
        problem,
        call("run_tests"),
        call("edit", path=path, search="x", replace="y"),
        call("edit", path="conftest.py", search="", replace="y"),
        call("view", path="../secret"),
        call("edit", path="nothing.py", search="a", replace="b"),
        call("view"),
        call("shell", command="ls"),
        "<functioncall> {nonsense",
        "That is all.",
        call("edit", **problem.gold["fix"]),
    )
    assert (score.tier, score.reward) == ("none", 0.0), "after the last word nothing counts"
    report = json.loads(told[0])["result"]
    assert report.startswith("1 failed") and generator.HIDDEN not in report
    assert all("error" in json.loads(text) for text in told[1:]) and len(told) == 8


def test_a_later_edit_can_lose_what_an_earlier_one_gained() -> None:
    problem = TOOLS.problems("train", 1)[0]
    fix = problem.gold["fix"]
    score, _ = played(
        problem, call("edit", **fix), call("edit", path=fix["path"], search=fix["replace"], replace=fix["search"])
    )
    assert (score.tier, score.correct) == ("unapplied", False)


# ---------------------------------------------------------------- commands


def test_conversations_and_problems_on_disk(tmp_path: Path) -> None:
    for actions in ("edits", "tools"):
        out = tmp_path / actions
        words = f"repair --out {out} --tokenizer bytes --max-examples 6 --problems 6 --eval-examples 3 --levels 1 2 --actions {actions}"
        command.main(words.split())
        assert {p.name for p in out.glob("*.jsonl")} == {f"repairs.{s}.jsonl" for s in ("train", "select", "test")} | {
            f"repair.{s}.jsonl" for s in tasks.SPLITS
        }
        task = tasks.load(f"repair:actions={actions}", source=str(out))
        found = task.problems("train")
        tasks.check_reference_solutions(task, found).require()
        loaded = conversations.load_domains(out, "train", tokenizer.load("bytes"), "reserved", 4096)
        assert list(loaded) == ["repairs"] and len(loaded["repairs"]) == 6 and len(found) == 6
        text = (out / "repairs.train.jsonl").read_text()
        assert not any(p.id.removeprefix("repair-") in text for p in found)
        assert [
            p.id for p in tasks.load(f"repair:actions={actions},levels=[1]", source=str(out)).problems("train")
        ] != []


def test_a_bad_setting_is_one_line(tmp_path: Path) -> None:
    for words in ("repair:levels=[4]", "repair:levels=[]", "repair:actions=shell", "repair:max_turns=0"):
        with pytest.raises(ConfigError):
            tasks.load(words)
    with pytest.raises(MissingFile, match="repair.train.jsonl"):
        tasks.load("repair", source=str(tmp_path)).problems("train")
    (tmp_path / "repair.train.jsonl").write_text(
        json.dumps({"id": "a", "messages": [], "gold": {}, "split": "train"}) + "\n"
    )
    with pytest.raises(DataError, match="codechat data repair"):
        tasks.load("repair", source=str(tmp_path)).problems("train")
    with pytest.raises(ConfigError):
        EDITS.problems("dev", 1)


@pytest.fixture
def model(home: Path) -> None:
    """A run "new" with a small random model."""
    tok = tokenizer.load("gpt2:4096")
    shape = GPTConfig(depth=1, n_embd=16, n_head=2, block_size=768, vocab_size=tok.n_vocab)
    with Run.create("new", {}, kind="sft") as made:
        checkpoint.save(made.path, 0, model=GPT(shape), meta={"tokenizer": tok.to_dict(), "tags": "reserved"})


@pytest.mark.slow
@pytest.mark.parametrize("actions", ["edits", "tools"])
def test_the_commands_find_the_task(actions: str, model: None, home: Path) -> None:
    task = f"repair:levels=[1],actions={actions}"
    words = [
        "evaluate",
        "--ckpt",
        "new",
        "--task",
        task,
        "--n",
        "1",
        "--ks",
        "1",
        "--limit",
        "3",
        "--max-new-tokens",
        "4",
    ]
    assert cli.main(words) == 0
    row = Run.open("evaluate").evals().iloc[0]
    assert row["pass@1"] == 0 and row["tier/none"] == 1
    found = diagnose.diagnose(
        diagnose.DiagnoseConfig(ckpt="new", task=task, max_new_tokens=4, group_size=2, gold_examples=8)
    )
    assert found.verdict == "DEAD"
    cfg = config.resolve(
        grpo.GRPOConfig,
        None,
        overrides=dict(
            init_from="new",
            task=task,
            max_steps=1,
            device_batch_size=1,
            group_size=2,
            max_new_tokens=4,
            eval_examples=1,
            diagnose_groups=0,
            row_tokens=768,
            run_name="repaired",
        ),
        presets=grpo.RUN_PRESETS,
    )
    assert grpo.train(cfg).status["status"] == "finished"


# ---------------------------------------------------------------- rows of SWE-bench


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
    (repo / "shop/cart.py").write_text(
        "def total(xs):\n    return sum(xs) + 1\n\n\ndef count(xs):\n    return len(xs)\n"
    )
    (repo / "tests/test_cart.py").write_text(
        "from shop.cart import count\n\n\ndef test_count():\n    assert count([1]) == 1\n"
    )
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-qm", "base")
    base = run_git(repo, "rev-parse", "HEAD").strip()
    (repo / "shop/cart.py").write_text("def total(xs):\n    return sum(xs)\n\n\ndef count(xs):\n    return len(xs)\n")
    patch = run_git(repo, "diff")
    run_git(repo, "checkout", "-q", ".")
    tests = (repo / "tests/test_cart.py").read_text()
    more = "\n\nclass TestTotal:\n    def test_some(self):\n        assert total([1, 2]) == 3\n\n    def test_none(self):\n        assert total([]) == 0\n"
    (repo / "tests/test_cart.py").write_text(tests.replace("import count", "import count, total") + more)
    test_patch = run_git(repo, "diff")
    run_git(repo, "checkout", "-q", ".")
    (repo / "local.txt").write_text("mine")
    return {
        "instance_id": repo.name,
        "repo": "owner/shop",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps([f"tests/test_cart.py::TestTotal::test_{name}" for name in ("some", "none")]),
        "PASS_TO_PASS": ["tests/test_cart.py::test_count"],
        "problem_statement": "total is one too much.",
    }


def real(tmp_path: Path, *rows: dict[str, Any], **more: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks.load("swebench", source=str(path), checkouts=str(tmp_path / "checkouts"), trusted=True, **more)


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
    tiers = {
        "resolved": block("shop/cart.py", wrong, "    return sum(xs)"),
        "some_fixed": block("shop/cart.py", wrong, "    return sum(xs) if xs else 1"),
        "applied": block("shop/cart.py", wrong, "    return sum(xs) + 2"),
        "regressed": block("shop/cart.py", wrong, "    return sum(xs)")
        + "\n\n"
        + block("shop/cart.py", "    return len(xs)", "    return 0"),
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


@pytest.mark.parametrize("path", ["./tests/test_cart.py", "tests//test_cart.py", "tests/./test_cart.py"])
def test_another_spelling_of_a_test_file_is_the_same_file(checkout: dict[str, Any], tmp_path: Path, path: str) -> None:
    task = real(tmp_path, checkout)
    (problem,) = task.problems("test")
    cheat = "import shop.cart\nshop.cart.total = lambda xs: 3 if xs else 0\n\n\ndef test_count():"
    score = task.score(problem, block(path, "def test_count():", cheat))
    assert (score.tier, score.reward) == ("tampers", 0.0)
    assert task.score(problem, block("./shop/cart.py", "    return sum(xs) + 1", "    return sum(xs)")).correct


@pytest.mark.parametrize(
    "text",
    [
        block("shop/", "", "x = 1").replace("SEARCH\n\n", "SEARCH\n"),  # a folder
        block("shop/cart.py/x.py", "", "x = 1").replace("SEARCH\n\n", "SEARCH\n"),  # below a file
        block("shop/cart.py", "    return len(xs)", "    return len(xs)  # \ud800"),  # half a character
        block("shop/\ud800.py", "", "x = 1").replace("SEARCH\n\n", "SEARCH\n"),
        block(".git/config", "[core]", "[core"),  # no git command would run after it
        block("tests/more", "", "x = 1").replace("SEARCH\n\n", "SEARCH\n"),  # the test patch has a folder of this name
    ],
)
def test_an_edit_that_cannot_be_written_is_unapplied(checkout: dict[str, Any], tmp_path: Path, text: str) -> None:
    more = "diff --git a/tests/more/a.txt b/tests/more/a.txt\nnew file mode 100644\n--- /dev/null\n+++ b/tests/more/a.txt\n@@ -0,0 +1 @@\n+a\n"
    task = real(tmp_path, checkout | {"test_patch": checkout["test_patch"] + more})
    (problem,) = task.problems("test")
    score = task.score(problem, text)
    assert (score.tier, score.reward) == ("unapplied", 0.05) and score.parts["reason"]


def test_a_run_that_hangs_ends(checkout: dict[str, Any], tmp_path: Path) -> None:
    task = real(tmp_path, checkout, timeout_s=3.0)
    (problem,) = task.problems("test")
    hang = "import time\ntime.sleep(600)\n\n\ndef total(xs):"
    score = task.score(problem, block("shop/cart.py", "def total(xs):", hang))
    assert score.tier == "applied" and "out of time" in score.parts["reason"]


def test_real_rows_need_trust_and_their_columns(checkout: dict[str, Any], tmp_path: Path) -> None:
    rows = real(tmp_path, checkout).source
    with pytest.raises(ConfigError, match="trusted"):
        tasks.load("swebench", source=rows, checkouts="x")
    with pytest.raises(ConfigError, match="checkouts"):
        tasks.load("swebench", source=rows, trusted=True)
    for change in (dict(FAIL_TO_PASS="[]"), dict(FAIL_TO_PASS="oops"), dict(PASS_TO_PASS=3), dict(instance_id="../x")):
        with pytest.raises(DataError):
            real(tmp_path, checkout | change).problems("test")
    without = {k: v for k, v in checkout.items() if k != "test_patch"}
    with pytest.raises(DataError, match="test_patch"):
        real(tmp_path, without).problems("test")
    with pytest.raises(MissingFile):
        real(tmp_path, checkout | {"instance_id": "absent-2"}).problems("test")
    assert swebench.SweBenchTask.splits == ("test",) and sys.executable
