"""The trusted process that holds the tests and decides. It requests values from the program's process, never verdicts.

A test is an assert (or any source) that runs here, in a namespace whose entry points are handles for the program's
functions and classes. The program's process stays between tests. One that ends or is out of time is replaced and loaded
again for the next test.

A program can only be slow, answer with data, or end. The pool watches this process: it ends a test that hangs on an
honest value (`sum(range(10**12))`).
"""

from __future__ import annotations

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
from collections.abc import Callable
from types import CodeType
from typing import Any

from codechat.sandbox import kernel, scripts, wire
from codechat.sandbox.clock import OUT_OF_TIME, TOTAL, OutOfTime, at_most, listen
from codechat.sandbox.handles import Lost, ProgramError, Session
from codechat.sandbox.nursery import Nursery, NurseryError

MEMORY = 4 << 30  # bytes of address space: a program's answers must not exhaust the machine's memory
REASON = 300  # characters


def main(control: socket.socket, level: str, parent: str) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    if not __debug__:
        wire.send(control, json.dumps({"error": "python -O removes the asserts of every test"}).encode())
        return
    # The kernel reaps ended children, also while this process hangs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listen()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        nursery = Nursery(level)
    except NurseryError as error:
        wire.send(control, json.dumps({"error": str(error)}).encode())
        return
    wire.send(control, json.dumps({"zygote": nursery.process.pid}).encode())
    gc.collect()
    gc.freeze()
    with contextlib.suppress(wire.WireError):
        serve(control, nursery)
    nursery.close()


def serve(control: socket.socket, nursery: Nursery) -> None:
    while (job := json.loads(wire.receive(control, wire.TRUSTED))) is not None:
        former = nursery.process.pid
        try:
            verdict = judge(job, nursery)
        except NurseryError as error:
            wire.send(control, json.dumps({"error": str(error)}).encode())
            return
        if nursery.process.pid != former:
            verdict["zygote"] = nursery.process.pid
        wire.send(control, json.dumps(verdict).encode())


def judge(job: dict[str, Any], nursery: Nursery) -> dict[str, Any]:
    """{"results": [[passed, reason], ...], "stage", "reason"} of one job, one result per test, in order."""
    if job["style"] == "stdio":
        return scripts.judge(job, nursery)
    trial = Trial(job, nursery)
    try:
        return trial.verdict()
    finally:
        trial.end()


@functools.lru_cache(maxsize=512)  # the completions of one problem share their tests
def compiled(source: str) -> CodeType:
    return compile(source, "<test>", "exec", dont_inherit=True)


# ---- one program


class Trial:
    """One program, its process and the namespace of its tests."""

    def __init__(self, job: dict[str, Any], nursery: Nursery) -> None:
        self.job, self.nursery = job, nursery
        self.deadline = time.monotonic() + TOTAL * job["timeout_s"]
        self.session: Session | None = None
        self.pid = 0
        self.names: dict[str, Any] = {}  # the namespace of a test
        self.stubs: dict[str, Any] = {}  # those of them that stand for the program's objects

    def verdict(self) -> dict[str, Any]:
        results: list[tuple[bool, str]] = []
        stage, reason = "tests", ""
        for test in self.job["tests"]:
            if self.session is None and (problem := self.prepare()):
                stage, reason = problem
            if self.session is None:
                results.append((False, reason))
            else:
                results.append(self.attempt("test", lambda source=test: self.run(source)))
        reason = reason or next((why for passed, why in results if not passed), "")
        return {"results": results, "stage": stage, "reason": reason}

    def prepare(self) -> tuple[str, str] | None:
        """Load the program and run the set-up. (stage, reason) of a failure; then there is no session."""
        self.pid, channel = self.nursery.take()
        self.session = Session(channel, self.job["message_mb"] << 20)
        for stage, step in (("load", self.load), ("setup", self.set_up)):
            passed, reason = self.attempt(stage, step)
            if not passed:
                self.end()
                return stage, reason
        return None

    def attempt(self, what: str, step: Callable[[], None]) -> tuple[bool, str]:
        """(passed, reason). Any exception of a test is a result."""
        left = min(self.job["timeout_s"], self.deadline - time.monotonic())
        if left <= 0:
            return False, "not tried: the whole program is out of time"
        try:
            with at_most(left):
                step()
            reason = ""
        # A test may raise anything, SystemExit too: it has failed, and the next test runs.
        except BaseException as error:
            reason = explain(error)
        lost = self.session.lost
        if reason == OUT_OF_TIME or lost:
            self.end()
        return not (reason or lost), (reason or lost)[:REASON]

    def load(self) -> None:
        most = [self.job["memory_mb"], TOTAL * self.job["timeout_s"]]
        found = self.session.request("load", self.job["code"], self.job["names"], self.job["imports"], most)
        if type(found) is not list or not all(type(p) is list and len(p) == 2 and type(p[0]) is str for p in found):
            self.session.lose("an answer of the wrong shape")
        defined = {name: value for name, value in found if name in self.job["names"]}
        if missing := [name for name in self.job["required"] if name not in defined]:
            raise ProgramError(f"it does not define {', '.join(missing)}")
        self.names = {"__name__": "tests", "__builtins__": __builtins__}
        for name in self.job["modules"]:
            self.names[name] = importlib.import_module(name)
        self.stubs = defined

    def set_up(self) -> None:
        self.names |= self.stubs
        self.run(self.job["setup"])
        # The set-up may be a prompt that defines the entry point too.
        self.names |= self.stubs

    def run(self, source: str) -> None:
        exec(compiled(source), self.names)

    def end(self) -> None:
        if self.session is not None:
            session, self.session = self.session, None
            with session.channel:  # closed afterwards: the process would exit by itself once it is closed
                self.nursery.end(self.pid)


def explain(error: BaseException) -> str:
    """Why a step failed, in one line. Never empty."""
    if isinstance(error, OutOfTime):
        return OUT_OF_TIME
    if isinstance(error, Lost):
        return f"the program's process was lost: {error}"
    if isinstance(error, AssertionError):
        return f"assertion failed: {text}" if (text := safe_text(error)) else "assertion failed"
    return f"{type(error).__name__}: {safe_text(error)}"


def safe_text(error: BaseException) -> str:
    """The text of an exception. Its arguments may be handles, whose text would need another request."""
    return ", ".join(str(a) if type(a) in (str, int, float, bool) else type(a).__name__ for a in error.args)
