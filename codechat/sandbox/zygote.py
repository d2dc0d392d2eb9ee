"""The process that forks the processes of untrusted programs. It never sees a program or a test.

It imports the standard library once, isolates itself and serves its judge over one socket: NEXT -> the socket of the
next process, which was forked ahead; END -> that process ends, then END, or FULL where the
watch had ended it. It also ends before another is given. The first message
is JSON: {"error": text} where the isolation cannot be built, else empty. Parent and child share memory until one writes to a page (3 us), so what both do after a fork is prepared before it, and they use
sockets without Python's wrapper classes.

A program's process holds one untrusted program (`Program`) and answers the judge's requests about it. It can only change what
is sent, and the judge accepts only plain data. Requests and replies are lists, encoded by codec.py:
    [number, "load", code, names, imports, memory_mb, cpu_s]    -> [[name, value], ...] of the names that it defines
    [number, "call", object, args, kwargs]              -> [result, changed arguments or None]
    [number, "get" | "set" | "iter" | "next" | "len" | "item" | "bool" | "str" | "repr", object, ...]
A reply is [number, "ok", value] or [number, "raise", type, message].
"""

import _socket
import builtins
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import operator
import os
import random
import select
import signal
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from codechat.sandbox import codec, kernel, landlock, scratch, seccomp

# The most common imports of programs: loaded before the fork, they cost nothing.
# Not more: each loaded shared library makes every fork slower.
PRELOADED = """abc array bisect cmath collections collections.abc copy dataclasses datetime decimal enum fractions
    functools heapq io itertools json math numbers operator random re statistics string struct textwrap threading time
    traceback types typing unicodedata warnings""".split()


WATCH_MS = 10  # between two looks at what a program has written
MESSAGE = 300  # characters of an exception's text that are sent
MUTABLE = (list, dict, set, bytearray, codec.deque)


class Walls(NamedTuple):
    """The isolation steps that each program's process runs."""

    isolated: bool
    own_bytes: int
    steps: list[kernel.Step]
    folder: str  # where it may write


def main(control: socket.socket, level: str, folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the judge ignores it, and children inherit that
    preload()
    try:
        walls = build(level, folder)
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
        importlib.import_module(name)
    random.seed(0)  # every program starts from this state, so verdicts are reproducible


def build(level: str, folder: str) -> Walls:
    """Build the isolation that all programs share. OSError where it cannot be built."""
    os.chdir(folder)
    os.environ["TMPDIR"] = os.environ["HOME"] = folder
    isolated, parent = level != "none", os.getppid()
    own_bytes, threads, ruleset = kernel.own_addresses(), kernel.limit_threads(), -1
    if isolated:
        ruleset = landlock.ruleset(folder)
        landlock.step_down(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # it ends its programs' processes too, and leaves no orphans
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the judge has gone")
    if isolated:
        kernel.empty_bounding_set()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.limit_for_good()
    if isolated:
        seccomp.install(seccomp.shared_program())()
    return Walls(isolated, own_bytes, own_walls(threads, ruleset), folder)


def own_walls(threads: kernel.Step, ruleset: int) -> list[kernel.Step]:
    """The steps of a program's process before it reads its program. ruleset: -1 for trusted programs."""
    steps = [kernel.prepared("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), threads]
    if ruleset >= 0:  # no capability is left: effective, permitted or inheritable; then the rules hold, for good
        steps.append(kernel.prepared("capset", kernel.CapHeader(version=0x20080522, pid=0), (ctypes.c_uint32 * 6)()))
        steps += [kernel.prepared("landlock_restrict_self", ruleset, 0), kernel.prepared("close", ruleset)]
    return steps


def serve(control: socket.SocketType, walls: Walls) -> None:
    """Answer the judge until it is gone, and watch the program that it has."""
    waiting = select.poll()
    waiting.register(control.fileno(), select.POLLIN)
    given = 0  # pid of the process that the judge has
    answer = codec.END
    ahead, channel = fork_child(control, walls)
    try:
        while True:
            if not waiting.poll(WATCH_MS if given else None):
                if scratch.holds_too_much(walls.folder, given):
                    end(given)
                    given, answer = 0, codec.FULL
                continue
            command = control.recv(1)
            if not command:
                return
            if given:
                end(given)
                given = 0
            if command == codec.END:
                control.send(answer)  # nothing of the program runs any more
            if command == codec.NEXT:
                answer = codec.END
                beside = channel.fileno().to_bytes(4, sys.byteorder)
                control.sendmsg([command], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, beside)])
                channel.close()
                given, ahead = ahead, 0
                ahead, channel = fork_child(control, walls)
    finally:
        for pid in filter(None, (given, ahead)):
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
    for step in walls.steps:
        step()
    if walls.isolated:  # the filter names the process's own pid
        seccomp.install(seccomp.own_program(os.getpid()))()
    Program(channel, walls.own_bytes).serve()


# ---- one program


class Program:
    """A program and those of its objects that the judge knows by number."""

    def __init__(self, channel: socket.SocketType, own_bytes: int) -> None:
        self.channel, self.own_bytes = channel, own_bytes
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # id -> number; `objects` prevents reuse of the ids
        self.ops: dict[str, Callable[..., Any]] = {
            "load": self.load, "call": self.call, "get": getattr, "set": setattr, "len": len,
            "item": operator.getitem, "bool": bool, "str": str, "repr": repr,
            # in a box, an iterator crosses as a reference, also one that iterates over itself
            "iter": lambda target: types.SimpleNamespace(of=iter(target)),
            "next": lambda box: list(itertools.islice(box.of, 1)),
        }  # fmt: skip

    def to_ref(self, value: Any) -> dict[str, Any]:
        if name := codec.pack_name(value):
            return name
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return {"h": self.numbers[id(value)]}

    def serve(self) -> None:
        """Answer requests until the judge is gone."""
        while True:
            number, op, *rest = codec.decode(codec.receive(self.channel, codec.TRUSTED), self.objects.__getitem__)
            codec.send(self.channel, self.attempt(number, op, rest))

    def attempt(self, number: int, op: str, rest: list[Any]) -> bytes:
        """The reply to a request, whatever the program raises. A result that cannot be encoded is an error too."""
        try:
            return codec.encode([number, "ok", self.ops[op](*rest)], self.to_ref)
        # Also SystemExit and KeyboardInterrupt: they are the program's answer and must not end its process.
        except BaseException as error:
            nearest = next(t for t in type(error).__mro__ if getattr(builtins, t.__name__, None) is t)
            return codec.encode([number, "raise", nearest.__name__, describe(error)], self.to_ref)

    def load(self, code: str, names: list[str], imports: str, memory_mb: int, cpu_s: float) -> list[Any]:
        module = sys.modules["candidate"] = types.ModuleType("candidate")  # where pickle finds its classes by name
        kernel.limit_program(self.own_bytes, memory_mb, cpu_s)
        space = module.__dict__
        exec(compile(code, "<program>", "exec", dont_inherit=True), space)
        for line in imports.splitlines():
            with contextlib.suppress(ImportError):
                exec(line, space)
        return [[name, space[name]] for name in names if name in space]

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        given = [*args, *kwargs.values()]
        before = [codec.encode(a, self.to_ref) if type(a) in MUTABLE else None for a in given]
        result = function(*args, **kwargs)
        after = [None if b is None or codec.encode(a, self.to_ref) == b else [a] for a, b in zip(given, before)]
        return [result, after if any(after) else None]


def describe(error: BaseException) -> str:
    name = type(error).__name__
    text = str(error)[:MESSAGE] if isinstance(error, Exception) else ""
    return text if getattr(builtins, name, None) is type(error) else f"{name}: {text}"
