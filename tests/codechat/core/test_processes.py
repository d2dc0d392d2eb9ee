"""Processes and locks: a writer is recognised while it lives, and a lock ends with its process."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import codechat
from codechat.core import processes

HOLD = """
import pathlib, subprocess, sys, time
from codechat.core import processes
print(processes.lock(pathlib.Path(sys.argv[1])), subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


def held_elsewhere(path: Path) -> tuple[subprocess.Popen[str], bool, int]:
    """A process that tries to lock `path`; whether it did, and a child of it."""
    command = [sys.executable, "-c", HOLD, str(path)]
    root = Path(codechat.__file__).parent.parent
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    locked, child = process.stdout.readline().split()
    return process, locked == "True", int(child)


def test_a_lock_ends_with_its_process_and_its_children_do_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process, locked, child = held_elsewhere(path)
    assert locked
    assert not processes.lock(path)
    assert child in processes.descendants(process.pid)
    process.kill()
    process.wait()
    assert processes.process_start(child)
    assert processes.lock(path)
    assert processes.lock(path)
    os.kill(child, 9)
    second, locked, child = held_elsewhere(path)
    assert not locked
    processes.unlock(path)
    os.kill(child, 9)
    second.kill()
    second.wait()


def test_a_process_is_told_from_another_of_its_number() -> None:
    mine = processes.process_start(os.getpid())
    assert mine is not None
    assert mine == processes.process_start(os.getpid())
    status = {"host": "a former name", "pid": os.getpid(), "pid_start": mine}
    assert processes.alive(status)
    assert not processes.alive({"host": platform.node()})
    assert not processes.alive(status | {"pid_start": "1"})
    assert not processes.alive(status | {"pid_start": None})
    child = subprocess.Popen(["true"])
    # it ends, and is then a zombie until somebody waits for it
    while processes.process_start(child.pid):
        time.sleep(0.01)
    child.wait()
    assert processes.process_start(child.pid) is None
    assert processes.descendants(child.pid) == []
