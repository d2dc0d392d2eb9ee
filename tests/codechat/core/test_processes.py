"""Processes and locks: a writer is recognised while it lives, and a lock ends with its process."""

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import codechat
from codechat.core import processes

HOLD = """
import pathlib, subprocess, sys, time
from codechat.core import processes
print(processes.lock(pathlib.Path(sys.argv[1])), subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


class Holder(NamedTuple):
    """A process that tried to lock a file; whether it did, and a child of it."""

    process: subprocess.Popen[str]
    locked: bool
    child: int


@contextlib.contextmanager
def holder(path: Path) -> Iterator[Holder]:
    """Both processes end with the block."""
    command = [sys.executable, "-c", HOLD, str(path)]
    root = Path(codechat.__file__).parent.parent
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    locked, child = process.stdout.readline().split()
    try:
        yield Holder(process, locked == "True", int(child))
    finally:
        process.kill()
        process.wait()
        os.kill(int(child), 9)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file to lock, which this process holds no longer than the test."""
    yield tmp_path / "lock"
    processes.unlock(tmp_path / "lock")


def test_a_lock_that_another_process_has_is_not_had(path: Path) -> None:
    with holder(path) as other:
        assert other.locked
        assert not processes.lock(path)


def test_a_lock_is_not_given_to_another_process(path: Path) -> None:
    assert processes.lock(path)
    with holder(path) as other:
        assert not other.locked


def test_a_lock_ends_with_its_process_and_its_children_do_not_keep_it(path: Path) -> None:
    with holder(path) as other:
        other.process.kill()
        other.process.wait()
        assert processes.process_start(other.child)
        assert processes.lock(path)


def test_a_process_may_lock_again_what_it_has(path: Path) -> None:
    assert processes.lock(path)
    assert processes.lock(path)


def test_the_children_of_a_process_are_its_descendants(path: Path) -> None:
    with holder(path) as other:
        assert other.child in processes.descendants(other.process.pid)


def test_a_process_has_one_start() -> None:
    mine = processes.process_start(os.getpid())
    assert mine is not None
    assert mine == processes.process_start(os.getpid())


@pytest.fixture
def status() -> dict[str, Any]:
    """Of this process, whose host had another name."""
    mine = processes.process_start(os.getpid())
    return {"host": "a former name", "pid": os.getpid(), "pid_start": mine}


def test_a_process_lives_whatever_its_host_is_called(status: dict[str, Any]) -> None:
    assert processes.alive(status)


@pytest.mark.parametrize("start", ["1", None])
def test_a_process_is_told_from_another_of_its_number(
    start: str | None, status: dict[str, Any]
) -> None:
    assert not processes.alive(status | {"pid_start": start})


def test_a_status_without_a_process_is_of_none_that_lives() -> None:
    assert not processes.alive({"host": platform.node()})


def test_a_process_that_ended_has_neither_a_start_nor_descendants() -> None:
    child = subprocess.Popen(["true"])
    # it ends, and is then a zombie until somebody waits for it
    while processes.process_start(child.pid):
        time.sleep(0.01)
    child.wait()
    assert processes.process_start(child.pid) is None
    assert processes.descendants(child.pid) == []
