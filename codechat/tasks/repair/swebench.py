"""Rows of SWE-bench (Jimenez et al., 2023, arXiv:2310.06770), scored in checkouts that the user has prepared. Evaluation only.

    codechat evaluate --ckpt my/sft --task "swebench:checkouts=checkouts,trusted=true" --data-dir rows.jsonl --n 1 --ks 1

A row has instance_id, repo, base_commit, patch, test_patch, FAIL_TO_PASS and PASS_TO_PASS (lists, or JSON text of lists), and
problem_statement where there is one. CHECKOUTS/INSTANCE_ID is a git repository that holds base_commit (`checkouts`); rows
without one are left out with a message. The prompt shows the files that the reference patch edits, as they are at base_commit
(SWE-bench's "oracle" retrieval). The tiers are those of `scoring`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import rows_of
from codechat.tasks.base import Message, Problem, Score, check_split, shuffled
from codechat.tasks.repair import checkouts, edits, scoring
from codechat.tasks.repair.generator import FORMAT

COLUMNS = ("instance_id", "repo", "base_commit", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
LISTS = COLUMNS[-2:]


class SweBenchTask:
    """source: a jsonl, json or parquet file of rows, a directory of them, or a hub set by its name. checkouts: the folder of prepared repositories.
    trusted: tests may run outside of the sandbox. python: the interpreter of checkouts without a .venv. timeout_s: wall seconds of a run of all
    tests.

    ConfigError without checkouts or trusted, MissingFile and DataError for unreadable rows."""

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
                "swebench needs rows and repositories: --data-dir ROWS.jsonl --task swebench:checkouts=FOLDER,trusted=true"
            )
        if trusted is not True:
            raise ConfigError(
                "swebench runs what the policy writes outside of the sandbox, with your rights; in a container that holds nothing "
                "of value, set trusted=true"
            )
        self.source, self.folder = str(source), Path(checkouts)
        self.python, self.timeout_s = python, float(timeout_s)

    @cached_property
    def _rows(self) -> list[Problem]:
        found, absent = [], []
        for number, row in enumerate(rows_of(self.source), 1):
            read = read_row(row, f"{self.source}, row {number}")
            if checkouts.is_checkout(self.folder / read["instance_id"]):
                found.append(self._problem(read))
            else:
                absent.append(read["instance_id"])
        if absent:
            print(f"swebench: left out, without a checkout in {self.folder}: {', '.join(absent)}", file=sys.stderr)
        if not found:
            raise MissingFile(
                f"no row of {self.source} has a git repository {self.folder}/INSTANCE_ID; clone one there"
            )
        return found

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        check_split(split, self.splits, "task swebench")
        return shuffled(self._rows, limit, seed)

    def _problem(self, row: dict[str, Any]) -> Problem:
        checkout = checkouts.require(self.folder, row["instance_id"])
        paths = sorted({change.path for change in edits.parse(row["patch"]) if change.old is not None})
        shown = {path: checkouts.git(checkout, "show", f"{row['base_commit']}:{path}") for path in paths}
        text = "\n".join(f"{path}\n```\n{content}```" for path, content in shown.items())
        issue = row.get("problem_statement") or f"Tests of {row['repo']} fail: {', '.join(row['FAIL_TO_PASS'])}"
        prompt = f"Fix this repository.\n\n{issue}\n\n{text}\n\n{FORMAT}\n\nA unified diff in its place is read too."
        gold = {name: row[name] for name in COLUMNS}
        return Problem(row["instance_id"], [{"role": "user", "content": prompt}], gold, "test", {"repo": row["repo"]})

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        return problem.gold["patch"]

    def score(self, problem: Problem, completion: str) -> Score:
        """The score of an answer. A checkout that cannot be copied or tested raises DataError: no answer could pass."""
        row, changes = problem.gold, edits.parse(completion)
        if not changes:
            return scoring.unscored("none", "no edit can be read")
        if touched := sorted(_paths(changes) & protected(row) or _settings(row, changes)):
            return scoring.unscored("tampers", f"tests are not to be edited: {', '.join(touched)[:200]}")
        checkout = checkouts.require(self.folder, row["instance_id"])
        with checkouts.copied(checkout, row["base_commit"]) as tree:
            # Before the answer's edits, so that only a checkout that is wrong can make it fail.
            checkouts.git(tree, "apply", "--whitespace=nowarn", "-", stdin=row["test_patch"])
            try:
                before = _read_files(tree, changes)
                after = edits.applied(before, changes)
                if after == before:
                    return scoring.unscored("unapplied", "nothing changes")
                _write_files(tree, before, after)
            except (ValueError, OSError) as error:  # ValueError: also text that is no UTF-8
                return scoring.unscored("unapplied", str(error)[:300])
            ids = [*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"]]
            passed, output = checkouts.run_pytest(
                tree, checkouts.interpreter(checkout, self.python), ids, self.timeout_s
            )
        fixed, kept = (sum(passed.get(name, False) for name in row[kind]) for kind in LISTS)
        return scoring.of_counts(fixed, len(row[LISTS[0]]), kept, len(row[LISTS[1]]), "" if passed else output)


def read_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row with its lists read. DataError for one that is not SWE-bench's."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise DataError(
            f"{where} has no column {missing[0]!r}; it has {', '.join(row)}; required: {', '.join(COLUMNS)}"
        )
    found = dict(row)
    for name in LISTS:
        found[name] = _list_of(row[name])
        if found[name] is None:
            raise DataError(
                f"{where}: {name} is {str(row[name])[:60]!r}; required: a list of test ids, or its JSON text"
            )
    if not found["FAIL_TO_PASS"]:
        raise DataError(f"{where}: FAIL_TO_PASS is empty; at least one test must fail before the repair")
    if "/" in (name := str(found["instance_id"])) or name in ("", ".", ".."):
        raise DataError(f"{where}: instance_id {name!r}; required: the name of a folder")
    return found


def _list_of(value: Any) -> list[str] | None:
    try:
        found = json.loads(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else None


def protected(row: Mapping[str, Any]) -> set[str]:
    """Files of the test patch."""
    return _paths(edits.parse(row["test_patch"]))


def _paths(changes: Sequence[edits.Change]) -> set[str]:
    """The files that the changes name, each in one spelling: ./a//b is a/b."""
    return {str(PurePosixPath(change.path)) for change in changes}


def _settings(row: Mapping[str, Any], changes: Sequence[edits.Change]) -> set[str]:
    """Files that decide how tests run, but for those that the reference patch edits too. A folder called test may hold source."""
    return {path for path in _paths(changes) if edits.is_setting(path)} - _paths(edits.parse(row["patch"]))


def _read_files(tree: Path, changes: Sequence[edits.Change]) -> dict[str, str]:
    """The files that the changes name, as they are."""
    found = {}
    for path in {edits.plain_path(change.path) for change in changes}:
        place = tree / path
        if not place.resolve().is_relative_to(tree.resolve()):
            raise edits.EditError(f"{path} leaves the repository")
        if ".git" in place.parts[len(tree.parts) :]:
            raise edits.EditError(f"{path} is git's own")
        if place.is_file():
            found[path] = place.read_text(encoding="utf-8")
    return found


def _write_files(tree: Path, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    for path in before.keys() - after.keys():
        (tree / path).unlink()
    for path, text in after.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text, encoding="utf-8")
