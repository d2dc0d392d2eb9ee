"""The trusted process that holds the tests and decides. It requests values from the program's process, never verdicts.

A test is an assert (or any source) whose entry points are handles for the program's objects. A process that ends or is out
of time is replaced for the next test. The pool ends a judge that hangs on an honest value (`sum(range(10**12))`).

Levels: landlock (Landlock, seccomp and limits: no writes, and reads only of the interpreter's library), and none (limits
only, for trusted programs).
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from codechat.sandbox import codec, kernel
from codechat.sandbox.handles import Lost, ProgramError, Session

ROOT = str(Path(__file__).resolve().parents[2])
FLAGS = ("-s", "-S", "-P", "-W", "ignore")  # no installed packages, nothing from the current folder
START_S = 60.0
MEMORY = 4 << 30  # bytes of address space: a program's answers must not exhaust the machine's memory
REASON = 300  # characters
OUT_OF_TIME = "out of time"
AGAIN_S = 0.1  # the interruption repeats, for a test that swallows it
Result = tuple[bool, str]  # (passed, reason)


# ---- processes


class NotStarted(OSError):
    """A process of the sandbox did not start, or has gone."""


class Interpreter:
    """A fresh interpreter that runs `codechat.sandbox.MODULE`.main(socket, *words), with nothing of the trainer's
    environment except the path of the interpreter's libraries. It ends with `close`."""

    def __init__(self, module: str, *words: str) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_S)
        code = (
            f"import sys, socket; sys.path.insert(0, {ROOT!r}); from codechat.sandbox import {module}; sys.path.pop(0); "
            f"{module}.main(socket.socket(fileno={theirs.fileno()}), *{words!r})"
        )
        flags = (
            (*FLAGS, "-B") if sys.dont_write_bytecode else FLAGS
        )  # PYTHONDONTWRITEBYTECODE is not in its environment
        kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                pass_fds=[theirs.fileno()],
                **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
                env=kept | {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
            )
        try:
            self.receive()
        except OSError as error:
            self.kill()
            raise NotStarted(f"{module}: {error}") from None

    def receive(self) -> dict[str, Any]:
        """Its next message. NotStarted for {"error": why}."""
        message = json.loads(codec.receive(self.control, codec.TRUSTED))
        if "error" in message:
            raise NotStarted(message["error"])
        return message

    def close(self) -> None:
        """It ends when its socket does, else by force."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.control.shutdown(socket.SHUT_RDWR)
            self.process.wait(5)
        self.kill()

    def kill(self) -> None:
        """By force; the kernel tells the processes that it started."""
        self.process.kill()
        self.process.wait()
        self.control.close()


class Zygote(Interpreter):
    """Gives a process for each program; the next one starts while the current one is in use."""

    def take(self) -> socket.socket:
        """The socket of a process that waits for a program. Nothing is left of the one before."""
        self.control.sendall(codec.NEXT)
        fds = socket.recv_fds(self.control, 1, 1)[1]
        if not fds:
            raise NotStarted("the zygote has gone")
        return socket.socket(fileno=fds[0])

    def end(self) -> None:
        """End the process that was taken."""
        self.control.sendall(codec.END)


def main(control: socket.socket, level: str, parent: str) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    # The kernel reaps ended children, also while this process hangs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _ring)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    say = lambda message: codec.send(control, json.dumps(message).encode())  # noqa: E731
    try:
        if not __debug__:
            raise NotStarted("python -O removes the asserts of every test")
        with contextlib.closing(Zygote("zygote", level)) as zygote:
            say({})
            gc.collect()
            gc.freeze()
            while True:
                job = json.loads(codec.receive(control, codec.TRUSTED))
                with contextlib.closing(Trial(job, zygote)) as trial:
                    verdict = trial.verdict()
                say(verdict)
    except OSError as error:  # no zygote, or the trainer has gone
        with contextlib.suppress(OSError):
            say({"error": str(error)})


# ---- one program


class OutOfTime(BaseException):
    """The time limit was reached. `except Exception` in a test does not catch it."""


def _ring(*signal_and_frame: Any) -> None:
    raise OutOfTime


@functools.lru_cache(maxsize=512)  # the completions of one problem share their tests
def compiled(source: str) -> CodeType:
    return compile(source, "<test>", "exec", dont_inherit=True)


class Trial:
    """One program, its process and the namespace of its tests."""

    def __init__(self, job: dict[str, Any], zygote: Zygote) -> None:
        self.job, self.zygote, self.stage = job, zygote, "tests"
        self.deadline = time.monotonic() + job["total_s"]
        self.session: Session | None = None
        self.names: dict[str, Any] = {}  # the namespace of a test

    def verdict(self) -> dict[str, Any]:
        """One result per test, in order. reason: of the first failure."""
        results = [self.prepare() or self.attempt(self.run, test) for test in self.job["tests"]]
        reason = next((why for passed, why in results if not passed), "")
        return {"results": results, "stage": self.stage, "reason": reason}

    def prepare(self) -> Result | None:
        """Where there is no process, load the program into one and run the set-up. The result of a failure."""
        if self.session:
            return None
        self.session = Session(self.zygote.take(), self.job["message_mb"] << 20)
        for stage, step in (("load", self.load), ("setup", self.set_up)):
            passed, reason = self.attempt(step)
            if not passed:
                self.close()
                self.stage = stage
                return passed, reason
        return None

    def attempt(self, step: Callable[..., None], *args: str) -> Result:
        """Whether the step ends in time without an exception."""
        left = min(self.job["timeout_s"], self.deadline - time.monotonic())
        if left <= 0:
            return False, "not tried: the whole program is out of time"
        end = time.monotonic() + left
        try:
            signal.setitimer(signal.ITIMER_REAL, left, AGAIN_S)
            try:
                step(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            reason = OUT_OF_TIME if time.monotonic() >= end else ""  # the test may have swallowed the interruption
        # A test may raise anything, SystemExit too: it has failed, and the next test runs.
        except BaseException as error:
            reason = explain(error)
        lost = self.session.lost
        if reason == OUT_OF_TIME or lost:
            self.close()
        reason = reason or lost
        return not reason, reason[:REASON]

    def load(self) -> None:
        job = self.job
        given = (job[key] for key in ("code", "names", "imports", "memory_mb", "total_s"))
        answer = self.session.request("load", *given)
        if type(answer) is not list or not all(type(p) is list and len(p) == 2 and type(p[0]) is str for p in answer):
            self.session.lose("an answer of the wrong shape")
        self.defined = {name: value for name, value in answer if name in job["names"]}
        if missing := [name for name in job["required"] if name not in self.defined]:
            raise ProgramError(f"it does not define {', '.join(missing)}")

    def set_up(self) -> None:
        modules = {name: importlib.import_module(name) for name in self.job["modules"]}
        self.names = {"__name__": "tests", "__builtins__": __builtins__} | modules | self.defined
        self.run(self.job["setup"])
        self.names |= self.defined  # the set-up may be a prompt that defines the entry point too

    def run(self, source: str) -> None:
        exec(compiled(source), self.names)

    def close(self) -> None:
        if self.session:
            with self.session.channel:  # closed afterwards: the process would exit by itself once it is closed
                self.zygote.end()
            self.session = None


def explain(error: BaseException) -> str:
    """Why a step failed, in one line. Never empty. The exception's arguments may be handles, whose text would need
    another request."""
    if isinstance(error, OutOfTime):
        return OUT_OF_TIME
    if isinstance(error, Lost):
        return f"the program's process was lost: {error}"
    text = ", ".join(str(a) if type(a) in (str, int, float, bool) else type(a).__name__ for a in error.args)
    if isinstance(error, AssertionError):
        return f"assertion failed: {text}" if text else "assertion failed"
    return f"{type(error).__name__}: {text}"
