"""The process that forks the processes of untrusted programs. It never sees a program or a test.

It starts with an empty environment, imports the standard library once, isolates itself and then serves its judge over
one socket, one request at a time:
    FORK     fork a process for a program -> its pid, and a socket to it (it waits for its program)
    END pid  end that process and wipe /tmp -> CLEAN, or DIRTY where that failed: start another zygote
The first message out is a JSON object: {"error": text} where a layer cannot be built, else the layers that were built.

Parent and child share their memory until one writes to a page, and such a write costs 3 us. So everything that both do
after a fork is prepared before it, and they use sockets without Python's wrapper classes.
"""

from __future__ import annotations

import _socket
import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from codechat.sandbox import child, kernel, landlock, limits, namespaces, seccomp, wire

# The most common imports of programs: loaded before the fork, they cost nothing.
# Not more: each loaded shared library makes every fork slower.
PRELOADED = """abc array bisect cmath collections collections.abc copy dataclasses datetime decimal enum fractions
    functools heapq io itertools json math numbers operator random re statistics string struct textwrap threading time
    traceback types typing unicodedata warnings""".split()
FULL, LANDLOCK, NONE = "full", "landlock", "none"


class Walls(NamedTuple):
    """How the processes of a level are started, and the isolation steps that each runs."""

    level: str
    landlock: bool
    own_bytes: int
    fork: Callable[[], int]
    steps: tuple[kernel.Step, ...]
    kept: frozenset[str] = frozenset()  # names in /tmp that hold the interpreter, read-only


def main(control: socket.socket, level: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the judge ignores it, and children inherit that
    preload()
    try:
        walls = build(level)
    except OSError as error:
        answer = {"error": f"{error.filename or 'a wall'}: {error.strerror or error}"}
        wire.send(control, json.dumps(answer).encode())
        return
    wire.send(control, json.dumps({"level": level, "landlock": walls.landlock}).encode())
    bare = _socket.socket(fileno=control.detach())
    gc.collect()
    gc.freeze()
    kernel.give_back_free_memory()
    with contextlib.suppress(ConnectionError):
        serve(bare, walls)


def preload() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    kernel.limit_arenas(2)
    # Every program starts from this state, so verdicts are reproducible.
    random.seed(0)


def build(level: str) -> Walls:
    """Build the isolation that all programs share. OSError where a layer of the level cannot be built."""
    own_bytes, threads, ruleset, pidfd = limits.own_addresses(), limits.THREADS, -1, -1
    kept: frozenset[str] = frozenset()
    parent = os.getppid()
    if level == FULL:
        namespaces.enter()
        kept = frozenset(os.listdir("/tmp"))
        namespaces.enter_process_namespace()
        pidfd = os.pidfd_open(os.getpid())
        if landlock.abi():
            ruleset = landlock.ruleset(["/"], [], ["/tmp"], [f"/dev/{n}" for n in namespaces.DEVICES])
    else:
        threads += limits.own_threads(os.getuid()) + limits.SPARE_THREADS
        if level == LANDLOCK:
            ruleset = landlock.ruleset(*readable())
            step_down()
        # It ends its programs' processes too, and leaves no orphans.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit("the judge has gone")
    if level != NONE:
        kernel.empty_bounding_set()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    limits.limit_for_good()
    if level != NONE:
        kernel.carry_out([seccomp.install(seccomp.shared_program(own_tree=level == FULL))])
    fork = namespaces.isolated_fork(pidfd) if level == FULL else kernel.fork
    return Walls(level, ruleset >= 0, own_bytes, fork, tuple(own_walls(level, threads, ruleset, pidfd)), kept)


def own_walls(level: str, threads: int, ruleset: int, pidfd: int) -> Iterator[kernel.Step]:
    """The steps of a program's process before it reads its program."""
    yield kernel.prepared("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if level == FULL:
        yield kernel.prepared("close", pidfd)
        yield kernel.prepared("chdir", b"/tmp")
    yield limits.limit_threads(threads)
    if level != NONE:
        yield kernel.drop_capabilities()
    if ruleset >= 0:
        yield landlock.restrict(ruleset)
        yield kernel.prepared("close", ruleset)
    if level == FULL:
        yield seccomp.install(seccomp.own_program(1))


def readable() -> tuple[list[str], list[str], list[str], list[str]]:
    """Landlock's lists without an own file tree: library folders without their installed packages, and no writable
    path."""
    reads: list[str] = []
    listings: list[str] = []

    def allow(path: str, foreign: list[str]) -> None:
        below = [f for f in foreign if f.startswith(path + "/")]
        if not below and path not in foreign:
            reads.append(path)
        elif below:  # a rule for the folder would cover all of it
            listings.append(path)
            for entry in os.scandir(path):
                allow(entry.path, below)

    for folder in namespaces.library_folders():
        allow(folder, namespaces.foreign_below(folder))
    return reads, listings, [], [f"/dev/{n}" for n in namespaces.DEVICES]


def step_down() -> None:
    """Change from root to an ordinary user, if that user can read the library. Otherwise root without capabilities
    remains, and Landlock allows it only the library."""
    if os.getuid() == 0 and namespaces.holds(namespaces.CAP_SETUID, namespaces.CAP_SETGID):
        if all(open_to_all(folder) for folder in namespaces.library_folders()):
            namespaces.become_nobody()


def open_to_all(folder: str) -> bool:
    return all(os.stat(f).st_mode & stat.S_IXOTH for f in (folder, *map(str, Path(folder).parents)))


def serve(control: socket.SocketType, walls: Walls) -> None:
    children: set[int] = set()
    try:
        while len(command := control.recv(wire.COMMAND, socket.MSG_WAITALL)) == wire.COMMAND:
            if command == wire.FORK:
                pid, channel = fork_child(control, walls)
                children.add(pid)
                beside = channel.fileno().to_bytes(4, sys.byteorder)
                control.sendmsg([pid.to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, beside)])
                channel.close()
            else:
                pid = int.from_bytes(command[1:], "big")
                end(pid)
                children.remove(pid)
                control.sendall(wire.CLEAN if wipe(walls) else wire.DIRTY)
    finally:
        for pid in children:
            end(pid)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def wipe(walls: Walls) -> bool:
    """Empty /tmp, except for the interpreter where it is there. False where that fails."""
    if walls.level != FULL:
        return True  # programs cannot write, or are trusted
    try:
        for name in os.listdir("/tmp"):
            if name not in walls.kept:
                remove("/tmp/" + name)
        return True
    except (OSError, RecursionError):
        return False


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        for name in os.listdir(path):
            remove(f"{path}/{name}")
        os.rmdir(path)


def fork_child(control: socket.SocketType, walls: Walls) -> tuple[int, socket.SocketType]:
    ours, theirs = _socket.socketpair()
    pid = walls.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    control.close()
    try:
        run(theirs, walls)
    finally:
        os._exit(0)  # never run the rest of the zygote's code in this process


def run(channel: socket.SocketType, walls: Walls) -> None:
    """In the program's process: isolate it, then wait for the program. If a step fails, no program is read."""
    if walls.level != FULL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the zygote's handler is not for the program
    kernel.carry_out(walls.steps)
    if walls.level == LANDLOCK:  # not the first process of a namespace: its filter names its own pid
        kernel.carry_out([seccomp.install(seccomp.own_program(os.getpid()))])
    child.Program(channel, walls.own_bytes).serve()
