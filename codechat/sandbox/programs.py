"""A caller's program and tests. The trainer turns them once into the job that a judge runs.

Three styles: asserts (a list of sources), a `check(candidate)` (one source), and Stdio (input and output).
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from codechat.core.errors import DataError

TIMEOUT_S, MEMORY_MB = 5.0, 512


class Stdio(NamedTuple):
    """A test that runs the whole program: its input and the expected output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """The arguments of `run_tests` as a value, for `Pool.map`."""

    code: str
    tests: str | Sequence[str] | Sequence[Stdio]
    setup: str = ""
    entry_points: tuple[str, ...] | None = None
    timeout_s: float = TIMEOUT_S
    memory_mb: int = MEMORY_MB


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
    if program.timeout_s <= 0 or program.memory_mb <= 0:
        raise DataError(
            f"timeout_s {program.timeout_s} and memory_mb {program.memory_mb} must be above 0; leave them out "
            f"for {TIMEOUT_S} s and {MEMORY_MB} MB"
        )
    return {"code": program.code, "timeout_s": program.timeout_s, "memory_mb": program.memory_mb}


@functools.lru_cache(maxsize=4096)  # the completions of one problem share their tests
def _read(tests: tuple[str, ...], setup: str, entry_points: tuple[str, ...] | None) -> dict[str, Any]:
    trees = [_parse(source, "a test") for source in tests]
    prepared = _parse(setup, "the set-up")
    used = set().union(*(_loaded(t) for t in (*trees, prepared)))
    bound = set().union(*(_bound(t) for t in (*trees, prepared)))
    free = used - bound - set(vars(builtins))
    modules = free & sys.stdlib_module_names - set(entry_points or ())
    names = sorted(free - modules) if entry_points is None else list(entry_points)
    calls_check = len(tests) == 1 and any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in trees[0].body)
    if calls_check and entry_points is None:
        raise DataError("tests that define check(candidate) need entry_points; name the function to check first")
    return {
        "tests": [tests[0] + f"\ncheck({names[0]})\n"] if calls_check else list(tests),
        "names": names,
        "required": entry_points is not None,
        "modules": sorted(modules),
        "imports": "\n".join(ast.unparse(n) for n in prepared.body if isinstance(n, ast.Import | ast.ImportFrom)),
    }


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise DataError(f"{what} is not Python (line {error.lineno}: {error.msg}); mend it: {source[:80]!r}") from None


def _loaded(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    """Names that a source binds anywhere."""
    found: set[str] = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            found.add(n.id)
        elif isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(n.name)
        elif isinstance(n, ast.arg):
            found.add(n.arg)
        elif isinstance(n, ast.alias):
            found.add(n.asname or n.name.partition(".")[0])
        elif isinstance(n, ast.ExceptHandler) and n.name:
            found.add(n.name)
    return found


def entry_points_of(reference: str, tests: Sequence[str], setup: str = "") -> tuple[str, ...]:
    """The names of a reference solution that tests use: functions, classes and constants, also builtin names.

    The reference decides which names a program may define, never the program itself."""
    used = set().union(*(_loaded(_parse(t, "a test")) for t in (*tests, setup)))
    defined: set[str] = set()
    for node in _parse(reference, "the reference solution").body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return tuple(sorted(used & defined - _bound(_parse(setup, "the set-up"))))
