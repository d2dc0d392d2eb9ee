"""A caller's program and tests. The trainer turns them once into the job that a judge runs.

Three styles: asserts (a list of sources), a `check(candidate)` (one source), and Stdio (input and output).
"""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from codechat.core.errors import DataError

TIMEOUT_S, MEMORY_MB, MESSAGE_MB = 5.0, 512, 8


class Stdio(NamedTuple):
    """A test that runs the whole program: its input and the expected output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """The arguments of `run_tests` as a value, for `Pool.map`. message_mb: MiB that one value of the program may take on its way to the judge.

    Values cross whole. A digest made in the program's process would do for `f(x) == constant` only: other tests compare with a tolerance, a set
    or a length, and 1 == 1.0 == True have different texts."""

    code: str
    tests: str | Sequence[str] | Sequence[Stdio]
    setup: str = ""
    entry_points: tuple[str, ...] | None = None
    timeout_s: float = TIMEOUT_S
    memory_mb: int = MEMORY_MB
    message_mb: int = MESSAGE_MB


class Result(NamedTuple):
    passed: bool
    reason: str  # empty if it passed


@dataclass(frozen=True)
class Verdict:
    """results: one per test, in order. stage: how far the program came: "load" (it did not load), "setup", "tests", or
    "judge" (the tests' own process had to be ended). seconds: wall time in the judge. reason: of the first failure,
    empty if all passed; it may quote the program's exception."""

    results: tuple[Result, ...]
    stage: str
    seconds: float
    reason: str

    @property
    def passed(self) -> bool:
        return all(r.passed for r in self.results)

    @property
    def fraction(self) -> float:
        """Share of tests passed, in [0, 1]."""
        return sum(r.passed for r in self.results) / len(self.results)


def job_of(program: Program) -> dict[str, Any]:
    """JSON data for a judge. DataError for no tests and for tests that are not Python."""
    tests = program.tests
    if not tests:
        raise DataError("a program without tests cannot be judged; give at least one")
    if not isinstance(tests, str) and isinstance(tests[0], Stdio):
        return _limits(program) | {"style": "stdio", "tests": [list(t) for t in tests]}
    sources = (tests,) if isinstance(tests, str) else tuple(tests)
    read = _read(sources, program.setup, program.entry_points)
    return _limits(program) | read | {"style": "asserts", "setup": program.setup}


def _limits(program: Program) -> dict[str, Any]:
    limits = {name: getattr(program, name) for name in ("timeout_s", "memory_mb", "message_mb")}
    if min(limits.values()) <= 0:
        shown = ", ".join(f"{name} {value}" for name, value in limits.items())
        raise DataError(
            f"{shown}: each must be above 0; leave them out for {TIMEOUT_S} s, {MEMORY_MB} MB and {MESSAGE_MB} MB"
        )
    return limits | {"code": program.code}


@functools.lru_cache(maxsize=4096)  # the completions of one problem share their tests
def _read(tests: tuple[str, ...], setup: str, entry_points: tuple[str, ...] | None) -> dict[str, Any]:
    prepared = names_of(setup, "the set-up")
    every = [prepared, *(names_of(source, "a test") for source in tests)]
    free = set().union(*(names.used for names in every)) - set().union(*(names.bound for names in every))
    free -= set(vars(builtins))
    modules = free & sys.stdlib_module_names - set(entry_points or ())
    required = list(entry_points or ())
    names = required + sorted(free - modules - set(required))
    calls_check = len(tests) == 1 and "check" in every[1].functions
    if calls_check and entry_points is None:
        raise DataError("tests that define check(candidate) need entry_points; name the function to check first")
    return {
        "tests": [tests[0] + f"\ncheck({names[0]})\n"] if calls_check else list(tests),
        "names": names,
        "required": required,
        "modules": sorted(modules),
        "imports": "\n".join(
            ast.unparse(n) for n in ast.parse(setup).body if isinstance(n, ast.Import | ast.ImportFrom)
        ),
    }


class Names(NamedTuple):
    """The names of a source's own scope: those that it uses, also within its functions, those that it binds, and the functions and classes, and the
    imported ones, among these."""

    used: frozenset[str]
    bound: frozenset[str]
    functions: frozenset[str]
    imported: frozenset[str]


def names_of(source: str, what: str) -> Names:
    """By the interpreter's own symbol table: a script of the extended suites holds half a megabyte of inputs, and its syntax tree would take three
    times as long. DataError for text that is not Python."""
    try:
        top = symtable.symtable(source, "<test>", "exec")
    except SyntaxError as error:
        raise DataError(f"{what} is not Python (line {error.lineno}: {error.msg}); mend it: {source[:80]!r}") from None
    used, bound, imported = set[str](), set[str](), set[str]()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            own = table is top or symbol.is_global()
            if own and symbol.is_referenced():
                used.add(symbol.get_name())
            if own and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            if own and symbol.is_imported():
                imported.add(symbol.get_name())
    functions = frozenset(table.get_name() for table in top.get_children())
    return Names(frozenset(used), frozenset(bound), functions, frozenset(imported))


def entry_points_of(reference: str, tests: Sequence[str], setup: str = "") -> tuple[str, ...]:
    """The names of a reference solution that tests use: functions, classes and constants, also builtin names.

    The reference decides which names a program may define, never the program itself."""
    prepared = names_of(setup, "the set-up")
    used = prepared.used.union(*(names_of(test, "a test").used for test in tests))
    defined = names_of(reference, "the reference solution")
    return tuple(sorted(used & (defined.bound - defined.imported) - prepared.bound))
