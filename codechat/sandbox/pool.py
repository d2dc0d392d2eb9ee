"""The trainer's side: judges in their own processes, for one program or thousands.

    verdict = run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
    with Pool(workers=2) as pool:
        verdicts = list(pool.map(Program(code=c, tests=t) for c, t in rows))

The trainer is never forked: a judge is executed with a clean environment. One thread per judge feeds it and ends it if
it hangs. Threads own the judges, not the trainer's processes: a judge dies with its thread.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from codechat.core.errors import RunError
from codechat.sandbox import layers, nursery, programs, wire
from codechat.sandbox.clock import TOTAL
from codechat.sandbox.programs import Program, Result, Verdict

START_S = 60.0
GRACE_S = 3.0  # beyond a program's time limit, before its judge counts as stuck


class Judge:
    """A running judge. It and its processes end with `close`, or with the thread that started it."""

    def __init__(self, level: str) -> None:
        self.control, theirs = socket.socketpair()
        self.process = nursery.start_python("judge", self.control, theirs, level, str(os.getpid()))
        self.control.settimeout(START_S)
        self.zygote = -1
        try:
            built = json.loads(wire.receive(self.control, 4096))
        except OSError as error:
            self.kill()
            raise layers.SandboxUnavailable(
                f"a judge did not start ({error}); `codechat sandbox check` says more"
            ) from None
        if "error" in built:
            self.kill()
            raise layers.SandboxUnavailable(
                f"programs cannot be isolated here: {built['error']}; see `codechat sandbox check`"
            )
        self._watch(built["zygote"])

    def _watch(self, pid: int) -> None:
        if self.zygote >= 0:
            os.close(self.zygote)
        self.zygote = os.pidfd_open(pid)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The verdict on a job. TimeoutError where the judge hangs, WireError where it has ended."""
        tests = len(job["tests"])
        self.control.settimeout(TOTAL * job["timeout_s"] + GRACE_S + 0.01 * tests)
        wire.send(self.control, json.dumps(job).encode())
        verdict = json.loads(wire.receive(self.control, wire.TRUSTED))
        if "zygote" in verdict:
            self._watch(verdict["zygote"])
        return verdict

    def close(self) -> None:
        """End it by request, else by force."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            wire.send(self.control, b"null")
            self.process.wait(5)
        self.kill()

    def interrupt(self) -> None:
        """From another thread: the current request ends in WireError."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it by force. Its zygote ends first: while the parent lives, every process is reaped."""
        if self.zygote >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.zygote, signal.SIGTERM)
                select.select([self.zygote], [], [], 2.0)
            os.close(self.zygote)
            self.zygote = -1
        self.process.kill()
        self.process.wait()
        self.control.close()


class Pool:
    """Judges on threads. isolation: "auto", or "none" for trusted programs. SandboxUnavailable where the machine does
    not allow it."""

    def __init__(self, workers: int | None = None, *, isolation: str = "auto") -> None:
        self.level = layers.choose(isolation)
        self.workers = workers or len(os.sched_getaffinity(0))
        self.jobs: queue.SimpleQueue[tuple[Future[Verdict], dict[str, Any]] | None] = queue.SimpleQueue()
        self.closed = False
        self.owner = os.getpid()
        self.judges: set[Judge] = set()
        self.threads = [
            threading.Thread(target=self._work, name=f"judge {i}", daemon=True) for i in range(self.workers)
        ]
        for thread in self.threads:
            thread.start()
        _open.add(self)

    def submit(self, program: Program) -> Future[Verdict]:
        """Judge a program in the background. DataError at once for a program without valid tests."""
        if self.closed or self.owner != os.getpid():
            why = "was closed" if self.closed else "belongs to the process that this one was forked from"
            raise RunError(f"this pool {why}; make another")
        future: Future[Verdict] = Future()
        self.jobs.put((future, programs.job_of(program)))
        return future

    def run(self, program: Program) -> Verdict:
        return self.submit(program).result()

    def map(self, many: Iterable[Program]) -> Iterator[Verdict]:
        """Verdicts in the order of the programs. Programs are read ahead."""
        waiting: list[Future[Verdict]] = []
        for program in many:
            waiting.append(self.submit(program))
            if len(waiting) > 64 * self.workers:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()

    def close(self) -> None:
        """End every judge. Waiting programs are cancelled, running ones fail with stage "judge"."""
        if self.closed:
            return
        self.closed = True
        _open.discard(self)
        with contextlib.suppress(queue.Empty):
            while left := self.jobs.get_nowait():
                left[0].cancel()
        for judge in list(self.judges):
            judge.interrupt()
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- a thread and its judge

    def _work(self) -> None:
        judge: Judge | None = None
        while item := self.jobs.get():
            future, job = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                judge, verdict = self._judged(judge, job)
            except layers.SandboxUnavailable as error:
                judge = None
                future.set_exception(error)
            else:
                future.set_result(verdict)
        if judge:
            judge.close()

    def _judged(self, judge: Judge | None, job: dict[str, Any]) -> tuple[Judge | None, Verdict]:
        """(the judge if it can continue, the verdict). A judge may end or lose its zygote through a fault of the
        machine, such as low memory: the program gets a second judge."""
        start = time.monotonic()
        for last in (False, True):
            judge = judge or self._started()
            problem, lost_walls = "", False
            try:
                found = judge.ask(job)
                lost_walls = "error" in found
                problem = f"isolation was lost: {found['error']}" if lost_walls else ""
            except TimeoutError:
                problem, last = "the judge hung on a test", True
            except wire.WireError:
                problem = "the judge ended in a test"
            if not problem:
                results = tuple(Result(passed is True, why) for passed, why in found["results"])
                return judge, Verdict(results, found["stage"], time.monotonic() - start, found["reason"])
            self._ended(judge)
            judge = None
            if last or self.closed:
                break
        if lost_walls:
            raise layers.SandboxUnavailable(f"{problem}; see `codechat sandbox check`")
        failed = (Result(False, problem),) * len(job["tests"])
        return None, Verdict(failed, "judge", time.monotonic() - start, problem)

    def _started(self) -> Judge:
        judge = Judge(self.level)
        self.judges.add(judge)
        return judge

    def _ended(self, judge: Judge) -> None:
        self.judges.discard(judge)
        judge.kill()


_open: set[Pool] = set()
_default: dict[str, Pool] = {}


def run_tests(
    code: str,
    tests: Any,
    *,
    setup: str = "",
    entry_points: Iterable[str] | None = None,
    timeout_s: float = programs.TIMEOUT_S,
    memory_mb: int = programs.MEMORY_MB,
    message_mb: int = programs.MESSAGE_MB,
    isolation: str = "auto",
) -> Verdict:
    """Judge one untrusted program.

    tests: assert sources; one source that defines `check(candidate)`; or Stdio pairs. setup: trusted source that runs
    in the judge before the tests. entry_points: names that the program must define (see `entry_points_of`); for
    `check(candidate)` the first is the candidate. Other names that the tests use and nothing else defines come from the
    program too, if it has them. timeout_s: wall seconds for loading and for each test; the whole program gets three times that.
    memory_mb: MiB of address space beyond the interpreter's own. message_mb: MiB of the largest value, as text.

    SandboxUnavailable where the isolation is not possible; DataError for tests that are not Python."""
    names = None if entry_points is None else tuple(entry_points)
    limits = dict(timeout_s=timeout_s, memory_mb=memory_mb, message_mb=message_mb)
    program = Program(code=code, tests=tests, setup=setup, entry_points=names, **limits)
    if isolation not in _default:
        _default[isolation] = Pool(1, isolation=isolation)
    return _default[isolation].run(program)


def close_all() -> None:
    """End every judge of this process. Pools that are used again are rebuilt."""
    _default.clear()
    for pool in list(_open):
        pool.close()


def _forget() -> None:
    """In a fork of the trainer: the pools belong to the parent."""
    _default.clear()
    _open.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_forget)
