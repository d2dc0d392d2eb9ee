"""Running untrusted Python so that it cannot forge its verdict.

    from codechat.sandbox import run_tests
    verdict = run_tests(code, ["assert add(1, 2) == 3"])       # .results[0].passed, .fraction, .reason

Tests and program never share an interpreter: whatever one interpreter holds, the program in it can read and
change. A judge holds the tests and asks a walled-in process, which holds the program, for values.

    Pool (in the trainer)  ->  judge (runs the tests)  ->  zygote (sees neither)  ->  one process a program

Walls: user, mount, network, process, IPC and host name namespaces with a file tree of their own; Landlock;
seccomp; resource limits. Without namespaces the rest remains (programs then have no place to write to); without
these too nothing runs, but for programs that are trusted explicitly (isolation="none").

Not covered: a bug in the kernel, side channels, tests that a wrong program satisfies, machines other than
x86-64 Linux. The walls of a place are shown by `codechat sandbox check`.

The names below are loaded when they are asked for: judge and zygote need few of them, and every module that a
zygote holds makes its forks dearer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codechat.sandbox.layers import SandboxUnavailable
    from codechat.sandbox.pool import Pool, close_all, run_tests
    from codechat.sandbox.programs import Program, Result, Stdio, Verdict, entry_points_of

HOME = {
    "Pool": "pool", "run_tests": "pool", "close_all": "pool", "SandboxUnavailable": "layers", "Program": "programs",
    "Result": "programs", "Stdio": "programs", "Verdict": "programs", "entry_points_of": "programs",
}  # fmt: skip
__all__ = [
    "Pool", "Program", "Result", "SandboxUnavailable", "Stdio", "Verdict", "close_all", "entry_points_of", "run_tests",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOME[name]}"), name)
