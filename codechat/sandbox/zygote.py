"""The process that forks the processes of untrusted programs. It never sees a program or a test.

It imports the standard library once, isolates itself and serves its judge over one socket: FORK -> pid and socket of a new
process; END pid -> ENDED. The first message is JSON: {"error": text} where the isolation cannot be built, else empty. Parent
and child share memory until one writes to a page (3 us), so what both do after a fork is prepared before it, and they use
sockets without Python's wrapper classes.
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
import sys
from collections.abc import Iterator
from typing import NamedTuple

from codechat.sandbox import child, codec, kernel, landlock, seccomp

# The most common imports of programs: loaded before the fork, they cost nothing.
# Not more: each loaded shared library makes every fork slower.
PRELOADED = """abc array bisect cmath collections collections.abc copy dataclasses datetime decimal enum fractions
    functools heapq io itertools json math numbers operator random re statistics string struct textwrap threading time
    traceback types typing unicodedata warnings""".split()


class Walls(NamedTuple):
    """The isolation steps that each program's process runs."""

    isolated: bool
    own_bytes: int
    steps: tuple[kernel.Step, ...]


def main(control: socket.socket, level: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the judge ignores it, and children inherit that
    preload()
    try:
        walls = build(level)
    except OSError as error:
        answer = {"error": f"{error.filename or 'a wall'}: {error.strerror or error}"}
        codec.send(control, json.dumps(answer).encode())
        return
    codec.send(control, b"{}")
    bare = _socket.socket(fileno=control.detach())
    gc.collect()
    gc.freeze()
    kernel.tidy_memory()
    with contextlib.suppress(ConnectionError):
        serve(bare, walls)


def preload() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    random.seed(0)  # every program starts from this state, so verdicts are reproducible


def build(level: str) -> Walls:
    """Build the isolation that all programs share. OSError where it cannot be built."""
    isolated, parent = level != "none", os.getppid()
    own_bytes, threads, ruleset = kernel.own_addresses(), kernel.limit_threads(), -1
    if isolated:
        ruleset = landlock.ruleset()
        landlock.step_down()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # it ends its programs' processes too, and leaves no orphans
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the judge has gone")
    if isolated:
        kernel.empty_bounding_set()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.limit_for_good()
    if isolated:
        kernel.carry_out([seccomp.install(seccomp.shared_program())])
    return Walls(isolated, own_bytes, tuple(own_walls(threads, ruleset)))


def own_walls(threads: kernel.Step, ruleset: int) -> Iterator[kernel.Step]:
    """The steps of a program's process before it reads its program. ruleset: -1 for trusted programs."""
    yield kernel.prepared("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    yield threads
    if ruleset >= 0:
        yield kernel.drop_capabilities()
        yield landlock.restrict(ruleset)
        yield kernel.prepared("close", ruleset)


def serve(control: socket.SocketType, walls: Walls) -> None:
    children: set[int] = set()
    try:
        while len(command := control.recv(codec.COMMAND, socket.MSG_WAITALL)) == codec.COMMAND:
            if command == codec.FORK:
                pid, channel = fork_child(control, walls)
                children.add(pid)
                beside = channel.fileno().to_bytes(4, sys.byteorder)
                control.sendmsg([pid.to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, beside)])
                channel.close()
            else:
                pid = int.from_bytes(command[1:], "big")
                end(pid)
                children.remove(pid)
                control.sendall(codec.ENDED)
    finally:
        for pid in children:
            end(pid)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def fork_child(control: socket.SocketType, walls: Walls) -> tuple[int, socket.SocketType]:
    ours, theirs = _socket.socketpair()
    pid = kernel.fork()
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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the zygote's handler is not for the program
    kernel.carry_out(walls.steps)
    if walls.isolated:  # the filter names the process's own pid
        kernel.carry_out([seccomp.install(seccomp.own_program(os.getpid()))])
    child.Program(channel, walls.own_bytes).serve()
