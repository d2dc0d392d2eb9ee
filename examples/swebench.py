"""Rows of SWE-bench (Jimenez et al., 2023, arXiv:2310.06770), scored in checkouts that you have prepared. Evaluation only.

    codechat evaluate --ckpt my/sft --task "examples/swebench.py:SweBench:checkouts=FOLDER,trusted=true" --data-dir rows.jsonl --n 1 --ks 1

A row has instance_id, repo, base_commit, patch, test_patch, FAIL_TO_PASS and PASS_TO_PASS (lists, or JSON text of lists),
and problem_statement where there is one. FOLDER/INSTANCE_ID is a git repository that holds base_commit, in which the tests
run: dependencies installed (its .venv is used where it has one), extensions built. Rows without one are left out with a
message. The prompt shows the files that the reference patch edits, as they are at base_commit. A checkout is copied, reset
to the base commit, given the test patch, edited and tested with pytest; itself it stays as it is.

Not a sandbox. The tests run in the repository's own interpreter, which also runs what the policy wrote: with the rights of
this user, and able to forge a report. The result is read from pytest's junit file, and files that decide how tests run are
not the policy's to change; that stops accidents, not intent. Use a container or a machine that holds nothing of value.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import rows_of
from codechat.tasks.base import Message, Problem, Score, check_split, shuffled
from codechat_lab.tasks.repair import edits
from codechat_lab.tasks.repair import task as scoring
from codechat_lab.tasks.repair.generator import FORMAT

COLUMNS = (
    "instance_id",
    "repo",
    "base_commit",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
FAILING, PASSING = COLUMNS[-2:]
OUTPUT = 2000  # characters of pytest's output that a score quotes


class SweBench:
    """source: a file of rows, a directory of them, or a hub set by its name. checkouts: the folder of prepared
    repositories. trusted: tests may run outside of the sandbox. python: the interpreter of checkouts without a .venv.
    timeout_s: wall seconds of a run of all tests."""

    name, tiers, max_reward = "swebench", scoring.TIERS, 1.0
    splits = ("test",)

    def __init__(
        self,
        source: str | Path = "",
        checkouts: str | Path = "",
        trusted: bool = False,
        python: str = sys.executable,
        timeout_s: float = 1800.0,
    ) -> None:
        if not source or not checkouts:
            raise ConfigError(
                "swebench needs rows and repositories: set --data-dir ROWS.jsonl and checkouts=FOLDER"
            )
        if trusted is not True:
            raise ConfigError(
                "swebench runs what the policy writes outside of the sandbox, with your rights; in a container that holds "
                "nothing of value, set trusted=true"
            )
        self.source, self.checkouts = str(source), Path(checkouts)
        self.python, self.timeout_s = python, float(timeout_s)

    @cached_property
    def _rows(self) -> list[Problem]:
        rows = [
            read_row(row, f"{self.source}, row {number}")
            for number, row in enumerate(rows_of(self.source), 1)
        ]
        # A folder of its own with .git/: a copy of a worktree would move its branch.
        absent = [
            row["instance_id"]
            for row in rows
            if not (self.checkouts / row["instance_id"] / ".git").is_dir()
        ]
        if absent:
            print(
                f"swebench: left out, without a checkout in {self.checkouts}: {', '.join(absent)}",
                file=sys.stderr,
            )
        if len(absent) == len(rows):
            raise MissingFile(
                f"no row of {self.source} has a git repository {self.checkouts}/INSTANCE_ID; clone one there"
            )
        return [self._problem(row) for row in rows if row["instance_id"] not in absent]

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        check_split(split, self.splits, "task swebench")
        return shuffled(self._rows, limit, seed)

    def _problem(self, row: dict[str, Any]) -> Problem:
        checkout = self.checkouts / row["instance_id"]
        paths = sorted(
            {change.path for change in edits.parse(row["patch"]) if change.old is not None}
        )
        shown = {path: git(checkout, "show", f"{row['base_commit']}:{path}") for path in paths}
        text = "\n".join(f"{path}\n```\n{content}```" for path, content in shown.items())
        issue = (
            row.get("problem_statement")
            or f"Tests of {row['repo']} fail: {', '.join(row[FAILING])}"
        )
        prompt = f"Fix this repository.\n\n{issue}\n\n{text}\n\n{FORMAT}\n\nA unified diff in its place is read too."
        gold = {name: row[name] for name in COLUMNS}
        return Problem(
            row["instance_id"],
            [{"role": "user", "content": prompt}],
            gold,
            "test",
            {"repo": row["repo"]},
        )

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        return problem.gold["patch"]

    def score(self, problem: Problem, completion: str) -> Score:
        """The score of an answer. A checkout that cannot be copied or tested raises DataError: no answer could pass."""
        row, changes = problem.gold, edits.parse(completion)
        if not changes:
            return scoring.unscored("none", "no edit can be read")
        if touched := sorted(protected(row, changes)):
            return scoring.unscored(
                "tampers", f"tests are not to be edited: {', '.join(touched)[:200]}"
            )
        checkout = self.checkouts / row["instance_id"]
        with copied(checkout, row["base_commit"]) as tree:
            # Before the answer's edits, so that only a checkout that is wrong can make it fail.
            git(tree, "apply", "--whitespace=nowarn", "-", stdin=row["test_patch"])
            try:
                before = read_files(tree, changes)
                after = edits.applied(before, changes)
                if after == before:
                    return scoring.unscored("unapplied", "nothing changes")
                write_files(tree, before, after)
            except (ValueError, OSError) as error:  # ValueError: also text that is no UTF-8
                return scoring.unscored("unapplied", str(error)[:300])
            inside = checkout / ".venv" / "bin" / "python"
            python = str(inside) if inside.exists() else self.python
            passed, output = run_pytest(
                tree, python, [*row[FAILING], *row[PASSING]], self.timeout_s
            )
        fixed, kept = (
            sum(passed.get(name, False) for name in row[kind]) for kind in (FAILING, PASSING)
        )
        return scoring.of_counts(
            fixed, len(row[FAILING]), kept, len(row[PASSING]), "" if passed else output
        )


def read_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row with its lists read. DataError for one that is not SWE-bench's."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise DataError(f"{where} has {', '.join(row)}; required: also {', '.join(missing)}")
    row = dict(row)
    for kind in (FAILING, PASSING):
        try:
            row[kind] = json.loads(row[kind]) if isinstance(row[kind], str) else list(row[kind])
        except (ValueError, TypeError):
            row[kind] = None
        if not isinstance(row[kind], list) or not all(isinstance(name, str) for name in row[kind]):
            raise DataError(
                f"{where}: {kind} is no list of test ids, or its JSON text; correct the row"
            )
    if not row[FAILING]:
        raise DataError(
            f"{where}: FAIL_TO_PASS is empty; at least one test must fail before the repair"
        )
    if "/" in (name := str(row["instance_id"])) or name in ("", ".", ".."):
        raise DataError(f"{where}: instance_id {name!r}; required: the name of a folder")
    return row


# ---------------------------------------------------------------- files of a copy


def paths_of(changes: Sequence[edits.Change]) -> set[str]:
    """The files that the changes name, each in one spelling: ./a//b is a/b."""
    return {str(PurePosixPath(change.path)) for change in changes}


def protected(row: Mapping[str, Any], changes: Sequence[edits.Change]) -> set[str]:
    """Files of the test patch that the changes touch, and files that decide how tests run, but for those of the
    reference patch."""
    settings = {path for path in paths_of(changes) if edits.is_setting(path)} - paths_of(
        edits.parse(row["patch"])
    )
    return settings | (paths_of(changes) & paths_of(edits.parse(row["test_patch"])))


def read_files(tree: Path, changes: Sequence[edits.Change]) -> dict[str, str]:
    """The files that the changes name, as they are."""
    files = {}
    for path in {edits.plain_path(change.path) for change in changes}:
        place = tree / path
        if not place.resolve().is_relative_to(tree.resolve()):
            raise edits.EditError(f"{path} leaves the repository")
        if ".git" in place.parts[len(tree.parts) :]:
            raise edits.EditError(f"{path} is git's own")
        if place.is_file():
            files[path] = place.read_text(encoding="utf-8")
    return files


def write_files(tree: Path, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    for path in before.keys() - after.keys():
        (tree / path).unlink()
    for path, text in after.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text, encoding="utf-8")


# ---------------------------------------------------------------- git and pytest


@contextlib.contextmanager
def copied(checkout: Path, commit: str) -> Iterator[Path]:
    """A copy of the checkout at `commit`, for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="repair-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            checkout,
            tree,
            symlinks=True,
            ignore=shutil.ignore_patterns(".venv", "venv", "node_modules"),
        )
        git(tree, "checkout", "--quiet", "--force", commit)
        yield tree


def git(tree: Path, *words: str, stdin: str = "") -> str:
    """The output of a git command. DataError where it fails."""
    command = ["git", "-c", "advice.detachedHead=false", "-c", "core.hooksPath=/dev/null", *words]
    result = subprocess.run(
        command, cwd=tree, input=stdin, capture_output=True, text=True, errors="replace"
    )
    if result.returncode:
        raise DataError(
            f"git {words[0]} in {tree} failed: {result.stderr.strip()[:300]}; prepare the checkout again"
        )
    return result.stdout


def run_pytest(
    tree: Path, python: str, ids: Sequence[str], timeout_s: float
) -> tuple[dict[str, bool], str]:
    """({id: whether it passed}, the end of the output) of the files of these ids. A test without a report is absent.

    Files, as SWE-bench runs them: pytest runs nothing where one id of its command line is unknown."""
    report = tree.parent / "report.xml"
    settings = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    files = sorted({name.partition("::")[0] for name in ids})
    kept = {
        name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ
    }
    paths = f"{tree}{os.pathsep}{tree / 'src'}"
    process = subprocess.Popen(
        [python, "-m", "pytest", "-q", "--rootdir=.", *settings, *files],
        cwd=tree,
        env=kept | {"HOME": str(tree.parent), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {}, f"out of time after {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the tests have started ends with them
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return outcomes(report), output[-OUTPUT:]


def outcomes(report: Path) -> dict[str, bool]:
    """{test id as pytest spells it: whether it passed} of a junit file; empty where there is none."""
    try:
        cases = ElementTree.parse(report).iter("testcase")
        bad = ("failure", "error", "skipped")
        return {
            _id_of(case): not any(case.find(kind) is not None for kind in bad) for case in cases
        }
    except (OSError, ElementTree.ParseError):
        return {}


def _id_of(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join([file, *filter(None, classes.split(".")), case.get("name", "")])
