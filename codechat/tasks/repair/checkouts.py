"""Tests of a real repository, run in a copy of a prepared checkout.

A checkout is a git repository in which the tests of an instance run: dependencies installed, extensions built. It is
copied, reset to the base commit, edited and tested; itself it stays as it is.

Not a sandbox. The tests run in the repository's own interpreter, which also runs what the policy wrote: with the rights of
this user, and able to forge a report. The result is read from pytest's junit file, and files that decide how tests run are
not the policy's to change; that stops accidents, not intent. Use a container or a machine that holds nothing of value.

Left out: test runners other than pytest (Django's ids), and building environments.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from codechat.core.errors import DataError, MissingFile

SKIPPED = (".venv", "venv", "node_modules")
OUTPUT = 2000  # characters of pytest's output that an error quotes


@contextlib.contextmanager
def copied(checkout: Path, commit: str) -> Iterator[Path]:
    """A copy of the checkout at `commit`, for the time of the block. DataError where the repository has no such commit."""
    with tempfile.TemporaryDirectory(prefix="repair-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(checkout, tree, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
        git(tree, "checkout", "--quiet", "--force", commit)
        yield tree


def git(tree: Path, *words: str, stdin: str = "") -> str:
    """The output of a git command. DataError where it fails."""
    asked = ["git", "-c", "advice.detachedHead=false", "-c", "core.hooksPath=/dev/null", *words]
    found = subprocess.run(asked, cwd=tree, input=stdin, capture_output=True, text=True, errors="replace")
    if found.returncode:
        raise DataError(f"git {words[0]} in {tree} failed: {found.stderr.strip()[:300]}; prepare the checkout again")
    return found.stdout


def is_checkout(path: Path) -> bool:
    return (path / ".git").is_dir()


def require(folder: Path, instance: str) -> Path:
    """The checkout of an instance. MissingFile where it is no git repository of its own: a copy of a worktree would move its branch."""
    path = folder / instance
    if not is_checkout(path):
        raise MissingFile(
            f"{path} is no git repository of its own (a folder with .git/); clone the instance's repository there and install what its tests need"
        )
    return path


def interpreter(checkout: Path, python: str) -> str:
    """The checkout's own interpreter, else `python`."""
    own = checkout / ".venv" / "bin" / "python"
    return str(own) if own.exists() else python


def run_pytest(tree: Path, python: str, ids: Sequence[str], timeout_s: float) -> tuple[dict[str, bool], str]:
    """({id: whether it passed}, the end of the output) of the files of these ids. A test without a report is absent.

    Files, as SWE-bench runs them: pytest runs nothing where one id of its command line is unknown."""
    report = tree.parent / "report.xml"
    report.unlink(missing_ok=True)
    files = sorted({name.partition("::")[0] for name in ids})
    words = [
        python,
        "-m",
        "pytest",
        "-q",
        "--rootdir=.",
        "-p",
        "no:cacheprovider",
        "-o",
        "junit_family=xunit1",
        f"--junitxml={report}",
    ]
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    own = {"HOME": str(tree.parent), "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*words, *files],
        cwd=tree,
        env=kept | own,
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
        return {
            _id_of(case): not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
            for case in cases
        }
    except (OSError, ElementTree.ParseError):
        return {}


def _id_of(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join([file, *filter(None, classes.split(".")), case.get("name", "")])
