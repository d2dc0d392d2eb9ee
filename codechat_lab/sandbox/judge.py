"""The trusted process that holds the tests and decides. It requests values from the program's
process, never verdicts.

A test is an assert (or any source) whose entry points are handles for the program's objects. A
process that ends or is out of time is replaced for the next test. The pool ends a judge that
hangs on an honest value (`sum(range(10**12))`).

Levels: landlock (Landlock, seccomp and limits: reads only of the interpreter's library, writes
only in a private folder, see scratch.py), and none (limits only, for trusted programs)."""

import asyncio
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from codechat_lab.sandbox import codec, defined_tests, kernel, landlock
from codechat_lab.sandbox.handles import (
    TEST,
    Handle,
    Lost,
    ProgramError,
    Session,
    holds_data,
    text_of,
)
from codechat_lab.sandbox.scratch import ENTRIES, SIZE_MB, Scratch

ROOT = str(Path(__file__).resolve().parents[2])
# no installed packages, nothing from the current folder
FLAGS = (
    "-s",
    "-S",
    "-P",
    "-B",
    "-W",
    "ignore",
)
# The environment: nothing of the trainer's, which may hold keys. A fixed hash seed makes
# verdicts reproducible.
CLEAN = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
PASSED_ON = ("LD_LIBRARY_PATH", "TMPDIR")
START_S = 60.0
# bytes of address space: a program's answers must not exhaust the machine's memory
MEMORY = 4 << 30
REASON = 300  # characters
OUT_OF_TIME = "out of time"
UNUSED = "no test uses {names}, so any program would pass"
NOT_RUN = "it names {names}, but nothing runs what it defines"
AGAIN_S = 0.1  # the interruption repeats, for a test that swallows it
Result = tuple[bool, str]  # (passed, reason)


# ---- processes


class NotStarted(OSError):
    """A process of the sandbox did not start, or has gone."""


class Interpreter:
    """A fresh interpreter that runs `codechat_lab.sandbox.MODULE`.main(socket, *words), with
    nothing of the trainer's environment except the path of the interpreter's libraries and the
    folder for temporary files. It ends with `close`."""

    def __init__(self, module: str, *words: str, keep: tuple[int, ...] = ()) -> None:
        """keep: further descriptors that it inherits."""
        self.told: dict[str, Any] = {}  # its first message
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_S)
        code = (
            f"import sys, socket; sys.path.insert(0, {ROOT!r}); from codechat_lab.sandbox import {module}; "
            f"sys.path.pop(0); {module}.main(socket.socket(fileno={theirs.fileno()}), *{words!r})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *FLAGS, "-c", code],
                pass_fds=[theirs.fileno(), *keep],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=CLEAN | {name: os.environ[name] for name in PASSED_ON if name in os.environ},
                cwd="/",
                start_new_session=True,  # an interruption at the trainer's terminal does not end it
            )
        try:
            self.told = self.receive()
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
        with contextlib.suppress(OSError):  # it is shut already
            self.control.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.kill()

    def kill(self) -> None:
        """By force; the kernel tells the processes that it started."""
        self.process.kill()
        self.process.wait()
        self.control.close()


class Zygote(Interpreter):
    """Gives a process for each program; the next one starts while the current one is in use.
    They write in `scratch`."""

    def __init__(self, level: str, scratch: Scratch) -> None:
        super().__init__("zygote", level, scratch.path, str(scratch.lock), keep=(scratch.lock,))
        self.scratch = scratch
        self.ending = (
            False  # whether the process that was given is to end, and its answer was not read yet
        )

    def take(self) -> socket.socket:
        """The socket of a process that waits for a program. Nothing is left of the one before."""
        self.clean()
        self.control.sendall(codec.NEXT)
        fds = socket.recv_fds(self.control, 1, 1)[1]
        if not fds:
            raise NotStarted("the zygote has gone")
        return socket.socket(fileno=fds[0])

    def end(self) -> None:
        """Let the process end; `clean` waits for it."""
        self.control.sendall(codec.END)
        self.ending = True

    def clean(self) -> bool:
        """Remove what an ended process has written, once it has ended. Whether it ended for
        holding too much."""
        if not self.ending:
            return False
        answer = self.control.recv(1)
        if not answer:
            raise NotStarted("the zygote has gone")
        self.scratch.empty()
        self.ending = False
        return answer == codec.FULL


def main(control: socket.socket, level: str, parent: str) -> None:
    end_with(int(parent))
    # The kernel reaps ended children, also while this process hangs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _ring)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the tests
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    defined_tests.stop_unittest_main()
    try:
        if not __debug__:
            raise NotStarted("python -O removes the asserts of every test")
        scratch = Scratch()  # which the trainer removes
        with contextlib.closing(Zygote(level, scratch)) as zygote:
            _say(control, {"folder": scratch.path})
            work_in(scratch.path)
            if level != "none":
                landlock.restrict_tests(scratch.path)
            end_with(int(parent))  # a change of the user of its files has ended that
            gc.collect()
            gc.freeze()
            while True:
                job = json.loads(codec.receive(control, codec.TRUSTED))
                with contextlib.closing(Trial(job, zygote)) as trial:
                    verdict = trial.verdict()
                _say(control, verdict)
                zygote.clean()  # while the trainer has the verdict
    except OSError as error:  # no zygote, or the trainer has gone
        with contextlib.suppress(OSError):
            _say(control, {"error": str(error)})


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    codec.send(control, json.dumps(message).encode())


def end_with(parent: int) -> None:
    """Let this process end with the trainer, also while it hangs."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the trainer has gone")


def work_in(folder: str) -> None:
    """The files of a test lie where its program finds them, and belong to the program's user."""
    tempfile.tempdir = os.environ["HOME"] = folder
    kernel.libc.setfsuid(os.stat(folder).st_uid)


# ---- one program


class OutOfTime(BaseException):
    """The time limit was reached. `except Exception` in a test does not catch it."""


def _ring(*signal_and_frame: Any) -> None:
    raise OutOfTime


@functools.lru_cache(maxsize=512)  # the completions of one problem share their tests
def compiled(source: str) -> CodeType:
    return compile(source, TEST, "exec", dont_inherit=True)


class Trial:
    """One program, its process and the namespace of its tests."""

    def __init__(self, job: dict[str, Any], zygote: Zygote) -> None:
        self.job = job
        self.zygote = zygote
        self.stage = "tests"
        self.deadline = time.monotonic() + job["total_s"]
        self.session: Session | None = None  # with the program's process, while there is one
        # what the program defines under the names that are wanted
        self.defined: dict[str, Any] = {}
        self.names: dict[str, Any] = {}  # the namespace of a test
        # names of data that the program gave, and of the set-up if it used the program
        self.made: set[str] = set()
        self.used = False  # whether the test that ran last has used the program

    def verdict(self) -> dict[str, Any]:
        """One result per test, in order. reason: of the first failure."""
        results: list[Result] = []
        idle: list[int] = []  # places of those that passed without the program
        for place, test in enumerate(self.job["tests"]):
            self.used = False
            results.append(self.prepare() or self.attempt(self.run_test, self.open_session(), test))
            if results[place][0] and not self.used:
                idle.append(place)
        self.settle(results, idle)
        reason = next((why for passed, why in results if not passed), "")
        return {"results": results, "stage": self.stage, "reason": reason}

    def settle(self, results: list[Result], idle: list[int]) -> None:
        """A test that passed without the program, as any would, has failed where no test used
        it, where another failed, or where it holds tests that were not run: else a program
        could earn their share by doing nothing."""
        names = ", ".join(self.job["required"]) or "the program"
        failure = next((result for result in results if not result[0]), None)
        if len(idle) == len(results):
            failure = (False, UNUSED.format(names=names))
        for place in idle:
            if failure:
                results[place] = failure
            elif self.job["tests"][place]["unrun"]:
                results[place] = (False, NOT_RUN.format(names=names))

    def prepare(self) -> Result | None:
        """Where there is no process, load the program into one and run the set-up. The result
        of a failure."""
        if self.session:
            return None
        session = Session(self.zygote.take(), self.job["message_mb"] << 20)
        self.session = session
        os.chdir(self.zygote.scratch.path)  # a test may have left it
        for stage, step in (("load", self.load), ("setup", self.set_up)):
            passed, reason = self.attempt(step, session)
            if not passed:
                self.close()
                self.stage = stage
                return passed, reason
        return None

    def attempt(self, step: Callable[..., None], *args: Any) -> Result:
        """Whether the step ends in time without an exception."""
        left = min(self.job["timeout_s"], self.deadline - time.monotonic())
        if left <= 0:
            return False, "not tried: the whole program is out of time"
        end = time.monotonic() + left
        asyncio._set_running_loop(None)  # an interruption may have come while a test's loop ended
        try:
            signal.setitimer(signal.ITIMER_REAL, left, AGAIN_S)
            try:
                step(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            # the test may have swallowed the interruption
            reason = OUT_OF_TIME if time.monotonic() >= end else ""
        # A test may raise anything, SystemExit too: it has failed, and the next test runs.
        except BaseException as error:
            reason = explain(error)
        lost = self.open_session().lost
        if reason == OUT_OF_TIME or lost:
            self.close()
            if self.zygote.clean():
                reason = (
                    f"it held more than {SIZE_MB} MiB or {ENTRIES} "
                    "entries in its folder, or what cannot be counted"
                )
        reason = reason or lost
        return not reason, reason[:REASON]

    def open_session(self) -> Session:
        assert self.session is not None, "only `prepare` opens a session, and only before a step"
        return self.session

    def load(self, session: Session) -> None:
        job = self.job
        answer = session.request(
            "load", job["code"], job["names"], job["imports"], job["memory_mb"], job["total_s"]
        )
        if type(answer) is not list or not all(map(_is_pair, answer)):
            session.lose("an answer of the wrong shape")
        # Only the names that were asked for: a program must not define others in the namespace
        # of the tests.
        self.defined = {name: value for name, value in answer if name in job["names"]}
        missing = [name for name in job["required"] if name not in self.defined]
        if missing:
            raise ProgramError(f"it does not define {', '.join(missing)}")

    def set_up(self, session: Session) -> None:
        modules = {name: importlib.import_module(name) for name in self.job["modules"]}
        # As a script, so that a body under `if __name__ == "__main__"` runs.
        self.names = {"__name__": "__main__", "__builtins__": __builtins__} | modules | self.defined
        given = set(self.names)
        before = session.number
        self.run(self.job["setup"])
        self.made = {
            name
            for name, value in self.defined.items()
            if not isinstance(value, Handle) or holds_data(value)
        }
        if session.number > before:
            self.made |= set(self.names) - given
        self.names |= self.defined  # the set-up may be a prompt that defines the entry point too

    def run_test(self, session: Session, test: dict[str, Any]) -> None:
        """Execute the source of a test, then run the tests that it defines."""
        before = session.number
        try:
            self.run(test["source"])
            defined_tests.run_defined(self.names, test["defines"], test["used"])
            if test["candidate"]:
                defined_tests.run_check(self.names["check"], self.defined[test["candidate"]])
        finally:
            self.used = session.number > before or not self.made.isdisjoint(test["used"])

    def run(self, source: str) -> None:
        try:
            exec(compiled(source), self.names)
        # of a script, never of the program, whose exceptions get other types
        except SystemExit as leaving:
            if leaving.code:
                raise

    def close(self) -> None:
        if self.session:
            # closed afterwards: the process would exit by itself once it is closed
            with self.session.channel:
                self.zygote.end()
            self.session = None


def _is_pair(answer: Any) -> bool:
    """[name, value] of something that a program defines."""
    return type(answer) is list and len(answer) == 2 and type(answer[0]) is str


def explain(error: BaseException) -> str:
    """Why a step failed, in one line. Never empty. The exception's arguments may be handles,
    whose text would need another request."""
    if isinstance(error, OutOfTime):
        return OUT_OF_TIME
    if isinstance(error, Lost):
        return f"the program's process was lost: {error}"
    text = text_of(error)
    if isinstance(error, AssertionError):
        return f"assertion failed: {text}" if text else "assertion failed"
    return f"{type(error).__name__}: {text}"
