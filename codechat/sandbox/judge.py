"""The trusted process that holds the tests and decides. It requests values from the program's process, never verdicts.

A test is an assert (or any source) whose entry points are handles for the program's objects. A process that ends or is out
of time is replaced for the next test. The pool ends a judge that hangs on an honest value (`sum(range(10**12))`).
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
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from codechat.sandbox import codec, kernel
from codechat.sandbox.handles import Lost, ProgramError, Session
from codechat.sandbox.nursery import Nursery, NurseryError

MEMORY = 4 << 30  # bytes of address space: a program's answers must not exhaust the machine's memory
REASON = 300  # characters
OUT_OF_TIME = "out of time"
AGAIN_S = 0.1  # the interruption repeats, for a test that swallows it
Result = tuple[bool, str]  # (passed, reason)


def main(control: socket.socket, level: str, parent: str) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    # The kernel reaps ended children, also while this process hangs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _ring)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        if not __debug__:
            raise NurseryError("python -O removes the asserts of every test")
        nursery = Nursery(level)
        _say(control, {})
        gc.collect()
        gc.freeze()
        with contextlib.suppress(codec.WireError), contextlib.closing(nursery):
            serve(control, nursery)
    except NurseryError as error:
        _say(control, {"error": str(error)})


def serve(control: socket.socket, nursery: Nursery) -> None:
    while (job := json.loads(codec.receive(control, codec.TRUSTED))) is not None:
        with contextlib.closing(Trial(job, nursery)) as trial:
            verdict = trial.verdict()
        _say(control, verdict)


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    codec.send(control, json.dumps(message).encode())


# ---- a time limit on trusted code that waits for an untrusted program


class OutOfTime(BaseException):
    """The time limit was reached. `except Exception` in a test does not catch it."""


_rung = False


def _ring(number: int, frame: FrameType | None) -> None:
    global _rung
    _rung = True
    raise OutOfTime


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body after `seconds`, and at its end if the body swallowed it. Main thread only."""
    global _rung
    _rung = False
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _rung:
        raise OutOfTime


# ---- one program


@functools.lru_cache(maxsize=512)  # the completions of one problem share their tests
def compiled(source: str) -> CodeType:
    return compile(source, "<test>", "exec", dont_inherit=True)


class Trial:
    """One program, its process and the namespace of its tests."""

    def __init__(self, job: dict[str, Any], nursery: Nursery) -> None:
        self.job, self.nursery = job, nursery
        self.deadline = time.monotonic() + job["total_s"]
        self.session: Session | None = None
        self.pid = 0
        self.names: dict[str, Any] = {}  # the namespace of a test

    def verdict(self) -> dict[str, Any]:
        """One result per test, in order. reason: of the first failure."""
        results: list[Result] = []
        stage, reason = "tests", ""
        for test in self.job["tests"]:
            if self.session is None and (problem := self.prepare()):
                stage, reason = problem
            if self.session is None:
                results.append((False, reason))
            else:
                results.append(self.attempt(lambda source=test: exec(compiled(source), self.names)))
        reason = reason or next((why for passed, why in results if not passed), "")
        return {"results": results, "stage": stage, "reason": reason}

    def prepare(self) -> tuple[str, str] | None:
        """Load the program and run the set-up. (stage, reason) of a failure; then there is no session."""
        self.pid, channel = self.nursery.take()
        self.session = Session(channel, self.job["message_mb"] << 20)
        for stage, step in (("load", self.load), ("setup", self.set_up)):
            passed, reason = self.attempt(step)
            if not passed:
                self.close()
                return stage, reason
        return None

    def attempt(self, step: Callable[[], None]) -> Result:
        """Any exception of a test is a result."""
        left = min(self.job["timeout_s"], self.deadline - time.monotonic())
        if left <= 0:
            return False, "not tried: the whole program is out of time"
        reason = ""
        try:
            with at_most(left):
                step()
        # A test may raise anything, SystemExit too: it has failed, and the next test runs.
        except BaseException as error:
            reason = explain(error)
        lost = self.session.lost
        if reason == OUT_OF_TIME or lost:
            self.close()
        return not (reason or lost), (reason or lost)[:REASON]

    def load(self) -> None:
        job = self.job
        limits = [job["memory_mb"], job["total_s"]]
        answer = self.session.request("load", job["code"], job["names"], job["imports"], limits)
        if type(answer) is not list or not all(type(p) is list and len(p) == 2 and type(p[0]) is str for p in answer):
            self.session.lose("an answer of the wrong shape")
        self.defined = {name: value for name, value in answer if name in job["names"]}
        if missing := [name for name in job["required"] if name not in self.defined]:
            raise ProgramError(f"it does not define {', '.join(missing)}")

    def set_up(self) -> None:
        modules = {name: importlib.import_module(name) for name in self.job["modules"]}
        self.names = {"__name__": "tests", "__builtins__": __builtins__} | modules | self.defined
        exec(compiled(self.job["setup"]), self.names)
        self.names |= self.defined  # the set-up may be a prompt that defines the entry point too

    def close(self) -> None:
        if self.session is not None:
            session, self.session = self.session, None
            with session.channel:  # closed afterwards: the process would exit by itself once it is closed
                self.nursery.end(self.pid)


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
