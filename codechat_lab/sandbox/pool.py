"""Programs with their tests, and judges in their own processes, for one program or thousands.

    codechat sandbox check    whether this machine isolates untrusted programs; exit code 0 if it does

    with Pool(workers=2) as pool:
        verdicts = list(pool.map(Program(code=c, tests=t) for c, t in rows))

The trainer is never forked: a judge is executed with a clean environment. One thread per judge
feeds it and ends it if it hangs. A judge dies with its thread."""

import ast
import builtins
import contextlib
import functools
import json
import os
import platform
import socket
import symtable
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from codechat.core.config import opt
from codechat.core.errors import DataError, RunError, check_choice
from codechat_lab.sandbox import attempts as forbidden
from codechat_lab.sandbox import codec, scratch
from codechat_lab.sandbox.judge import Interpreter, NotStarted

END_S = 2.0  # for the processes of a judge that was ended
GRACE_S = 3.0  # beyond a program's time limit, before its judge counts as stuck
REMEDY = (
    "use a kernel with Landlock (5.13 or newer, switched on); "
    "programs that you trust may run with isolation=none"
)


# ---- programs and their tests, in two styles: asserts, and a `check(candidate)`

TIMEOUT_S = 5.0
MEMORY_MB = 512
MESSAGE_MB = 8
TOTAL = 3  # time limit of a whole program, in limits of one test


@dataclass(frozen=True, kw_only=True)
class Program:
    """One untrusted program and its trusted tests.

    tests: sources of asserts, or of a `check(candidate)`, functions `test*`, classes `Test*`
    and TestCases, which the judge runs; one result for each source. Where no test uses the
    program, none passes. setup: trusted source that runs in the judge before the tests.
    entry_points: names that the program must define (see `entry_points_of`); for
    `check(candidate)` the first is the candidate. Other names that the tests use and nothing
    else defines come from the program too, if it has them. timeout_s: wall seconds for loading
    and for each test; the whole program gets three times that. memory_mb: MiB of address space
    beyond the interpreter's own. message_mb: MiB of the largest value, as
    text: values cross whole."""

    code: str
    tests: str | Sequence[str]
    setup: str = ""
    entry_points: Sequence[str] | None = None
    timeout_s: float = TIMEOUT_S
    memory_mb: int = MEMORY_MB
    message_mb: int = MESSAGE_MB


class Result(NamedTuple):
    passed: bool
    reason: str  # empty if it passed


@dataclass(frozen=True)
class Verdict:
    """results: one per test, in order. stage: how far the program came: "load" (it did not
    load), "setup", "tests", or "judge" (the tests' own process had to be ended). seconds: wall
    time in the judge. reason: of the first failure, empty if all passed; it may quote the
    program's exception."""

    results: tuple[Result, ...]
    stage: str
    seconds: float
    reason: str

    @property
    def passed(self) -> bool:
        return all(r.passed for r in self.results)


def job_of(program: Program) -> dict[str, Any]:
    """JSON data for a judge. DataError for no tests, for tests that are not Python and for
    limits that allow nothing."""
    limits = {
        "timeout_s": program.timeout_s,
        "memory_mb": program.memory_mb,
        "message_mb": program.message_mb,
    }
    if not program.tests:
        raise DataError("a program without tests cannot be judged; give at least one")
    if min(limits.values()) <= 0:
        listed = ", ".join(f"{name} {most}" for name, most in limits.items())
        raise DataError(f"got {listed}; expected each above 0; raise the one that is not")
    tests = (program.tests,) if isinstance(program.tests, str) else tuple(program.tests)
    read = _read(tests, program.setup, tuple(program.entry_points or ()))
    return (
        limits
        | read
        | {"code": program.code, "setup": program.setup, "total_s": TOTAL * program.timeout_s}
    )


@functools.lru_cache(maxsize=4096)  # the completions of one problem share their tests
def _read(tests: tuple[str, ...], setup: str, required: tuple[str, ...]) -> dict[str, Any]:
    """What a job says of the tests. names: that the program is asked for. modules: of the
    library, which tests use without an import. imports: of the set-up, which the program gets
    too."""
    of_setup = names_of(setup, "the set-up")
    of_tests = [names_of(source, "a test") for source in tests]
    every = [of_setup, *of_tests]
    free = set[str]().union(*(names.used for names in every))
    free -= set[str]().union(*(names.bound for names in every))
    free -= {*vars(builtins), *required}
    modules = free & sys.stdlib_module_names
    imports = [
        ast.unparse(n) for n in ast.parse(setup).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    return {
        "tests": [_test(source, of_tests, place, required) for place, source in enumerate(tests)],
        "names": [*required, *sorted(free - modules)],
        "required": required,
        "modules": sorted(modules),
        "imports": "\n".join(imports),
    }


class Names(NamedTuple):
    """Names of a source's own scope: those that it uses, also within its functions; those that
    it uses outside of them; those that it binds; among these the imported ones. code: whether
    it defines functions or classes."""

    used: set[str]
    called: set[str]
    bound: set[str]
    imported: set[str]
    code: bool


def names_of(source: str, what: str) -> Names:
    """By the interpreter's symbol table: the extended suites hold half a megabyte of inputs,
    and a syntax tree would take three times as long. DataError for text that is not Python."""
    try:
        top = symtable.symtable(source, "<test>", "exec")
    except SyntaxError as error:
        raise DataError(
            f"{what} is not Python (line {error.lineno}: {error.msg}); mend it: {source[:80]!r}"
        ) from None
    tables = [top]
    for table in tables:  # grows in the loop, down to the innermost function
        tables += table.get_children()
    symbols = [s for table in tables for s in table.get_symbols() if table is top or s.is_global()]
    imported = {s.get_name() for s in symbols if s.is_imported()}
    return Names(
        used={s.get_name() for s in symbols if s.is_referenced()},
        called={s.get_name() for s in top.get_symbols() if s.is_referenced()},
        bound=imported | {s.get_name() for s in symbols if s.is_assigned()},
        imported=imported,
        code=bool(top.get_children()),
    )


def _test(
    source: str, every: Sequence[Names], place: int, required: Sequence[str]
) -> dict[str, Any]:
    """A test for the judge; every: the names of all tests. defines: names among which it looks
    for tests. used: by any test. unrun: whether it names the program or defines code, and no
    other test calls what it defines: then it tests something only if it uses the program.
    candidate: what its `check` is called with, or None where it has none, or where a test calls
    it itself.

    DataError for a `check(candidate)` without a candidate."""
    names = every[place]
    defines = names.bound - names.imported - set(required)
    checks = "check" in defines and not any("check" in other.called for other in every)
    if checks and not required:
        raise DataError(
            "tests that define check(candidate) need entry_points; name the function to check first"
        )
    others = set[str]().union(*(other.used for i, other in enumerate(every) if i != place))
    return {
        "source": source,
        "defines": sorted(defines),
        "used": sorted(names.used),
        "unrun": (names.code or not names.used.isdisjoint(required)) and defines.isdisjoint(others),
        "candidate": required[0] if checks else None,
    }


def entry_points_of(reference: str, tests: Sequence[str], setup: str = "") -> tuple[str, ...]:
    """The names of a reference solution that tests use: functions, classes and constants, also
    builtin names. Where tests define `check(candidate)` and use none, its only function.

    The reference decides which names a program may define, never the program itself. DataError
    where the tests use no name of it."""
    prepared = names_of(setup, "the set-up")
    sources = [names_of(test, "a test") for test in tests]
    names = names_of(reference, "the reference solution")
    defined = names.bound - names.imported - prepared.bound
    used = defined & prepared.used.union(*(source.used for source in sources))
    if not used and len(defined) == 1 and any("check" in source.bound for source in sources):
        used = defined
    if not used:
        raise DataError(
            f"no test uses {', '.join(sorted(defined)) or 'the reference solution, which defines nothing'}, "
            "so any program would pass; let a test call it"
        )
    return tuple(sorted(used))


# ---- judges


class SandboxUnavailable(RunError):
    """The machine does not allow the requested isolation. Nothing untrusted has run."""


@functools.cache
def choose(isolation: str) -> str:
    """The level to use: "landlock" for "auto", which never becomes "none". It is built once as
    a test.

    ConfigError for an unknown word; SandboxUnavailable where the machine does not allow it."""
    check_choice("isolation", isolation, ("auto", "none"))
    level = "none" if isolation == "none" else "landlock"
    machine = platform.machine()
    if level != "none" and machine != "x86_64":
        raise SandboxUnavailable(f"the processor is {machine}; untrusted programs run on x86-64")
    Judge(level).close()
    return level


class Judge(Interpreter):
    """A running judge. It and its processes end with `close`, or with the thread that started
    it."""

    def __init__(self, level: str) -> None:
        try:
            super().__init__("judge", level, str(os.getpid()))
        except OSError as error:
            raise SandboxUnavailable(f"no isolation here ({error}); {REMEDY}") from None

    def kill(self) -> None:
        super().kill()
        if "folder" in self.told:  # not where it did not start
            scratch.remove(self.told["folder"], wait_s=END_S)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The verdict on a job. TimeoutError where the judge hangs, another OSError where it
        has ended."""
        self.control.settimeout(job["total_s"] + GRACE_S + 0.01 * len(job["tests"]))
        codec.send(self.control, json.dumps(job).encode())
        return self.receive()


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Judges, one for each thread. isolation: "auto", or "none" for trusted programs.
    SandboxUnavailable where the machine does not allow it."""

    def __init__(self, workers: int | None = None, *, isolation: str = "auto") -> None:
        self.level = choose(isolation)
        self.owner = os.getpid()
        self.closed = False
        self.judges: dict[int, Judge] = {}  # by the thread that started it
        self.threads = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)))

    def submit(self, program: Program) -> Future[Verdict]:
        """Judge a program in the background. DataError at once for a program without valid
        tests."""
        return self.threads.submit(self._judged, job_of(program))

    def run(self, program: Program) -> Verdict:
        return self.submit(program).result()

    def map(self, many: Iterable[Program]) -> Iterator[Verdict]:
        """Verdicts in the order of the programs, all of which are read at once."""
        return self.threads.map(self._judged, map(job_of, many))

    def close(self) -> None:
        """End every judge. Waiting programs are cancelled, running ones fail with stage "judge"."""
        if self.closed or self.owner != os.getpid():  # in a fork, the judges are not ours
            return
        self.closed = True
        # before a thread is free for the next program
        self.threads.shutdown(wait=False, cancel_futures=True)
        for judge in list(self.judges.values()):
            with contextlib.suppress(OSError):
                judge.control.shutdown(socket.SHUT_RDWR)
        self.threads.shutdown()
        for judge in self.judges.values():
            judge.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _judged(self, job: dict[str, Any]) -> Verdict:
        """By this thread's judge. It may end or lose its zygote through a fault of the machine,
        such as low memory: the program gets a second one."""
        start = time.monotonic()
        problem = "the pool was closed"
        tries = 2
        me = threading.get_ident()
        while tries and not self.closed:
            tries -= 1
            if me not in self.judges:
                self.judges[me] = Judge(self.level)
            try:
                answer = self.judges[me].ask(job)
                results = tuple(Result(passed is True, why) for passed, why in answer["results"])
                return Verdict(results, answer["stage"], time.monotonic() - start, answer["reason"])
            except TimeoutError:
                problem = "the judge hung on a test"
                tries = 0  # a second judge would hang as long
            except NotStarted as error:
                if not tries:
                    raise SandboxUnavailable(
                        f"isolation was lost: {error}; see `codechat sandbox check`"
                    ) from None
            except OSError:
                problem = "the judge ended in a test"
            self.judges.pop(me).kill()  # after a failure nothing of it is used again
        failures = (Result(False, problem),) * len(job["tests"])
        return Verdict(failures, "judge", time.monotonic() - start, problem)


_shared: dict[str, Pool] = {}


def shared_pool(isolation: str) -> Pool:
    """The pool that all tasks of this process share. Rebuilt after a close and in a fork."""
    pool = _shared.get(isolation)
    if pool is None or pool.closed or pool.owner != os.getpid():
        pool = _shared[isolation] = Pool(isolation=isolation)
    return pool


# ---- the command


def attempts(pool: Pool) -> dict[str, Verdict]:
    """Try each of ACTIONS, in isolated programs only. A verdict has passed where the action was
    stopped."""
    code = Path(forbidden.__file__).read_text(encoding="utf-8")
    programs = (
        Program(code=code, tests=f"assert attempt({action!r}) == 'stopped'")
        for action in forbidden.ACTIONS
    )
    return dict(zip(forbidden.ACTIONS, pool.map(programs)))


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Settings of the check."""

    action: Literal["check"] = opt("check", "what to do", positional=True)


def check(cfg: SandboxConfig) -> int:
    """`codechat sandbox check`: does this machine isolate untrusted programs? Tries each
    forbidden action. 0 where all attempts were stopped, else 1."""
    with Pool(1) as pool:
        print("untrusted programs run behind Landlock, seccomp and resource limits\n")
        tried = attempts(pool)
    for name, verdict in tried.items():
        print(f"  {'stopped' if verdict.passed else 'ALLOWED':<8}{name:<30}{verdict.reason}")
    return 0 if all(verdict.passed for verdict in tried.values()) else 1
