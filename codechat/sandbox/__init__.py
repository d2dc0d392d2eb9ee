"""Run untrusted Python so that it cannot forge its verdict: `run_tests(code, ["assert add(1, 2) == 3"]).passed`.

Tests and program never share an interpreter: a program can read and change everything in its own. A judge holds the tests
and requests values from an isolated process that holds the program:

    Pool (in the trainer)  ->  judge (runs the tests)  ->  zygote (sees neither)  ->  one process per program

Isolation: Landlock, seccomp and resource limits, also for an ordinary user and in a container; without Landlock only
programs run that are explicitly trusted (isolation="none"). Not covered: whether a path exists, kernel bugs, side
channels, weak tests, machines other than x86-64 Linux. `codechat sandbox check` shows the isolation of a machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codechat.sandbox.pool import (
        Pool,
        Program,
        Result,
        SandboxUnavailable,
        Stdio,
        Verdict,
        close_all,
        entry_points_of,
        run_tests,
    )  # fmt: skip

__all__ = [
    "Pool", "Program", "Result", "SandboxUnavailable", "Stdio", "Verdict", "close_all", "entry_points_of", "run_tests",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names of `pool`, loaded at their first use: every module in a zygote makes its forks slower."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from codechat.sandbox import pool

    return getattr(pool, name)
