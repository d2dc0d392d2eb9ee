"""Running untrusted Python so that it cannot forge its verdict."""

from codechat.sandbox.layers import SandboxUnavailable
from codechat.sandbox.pool import Pool, close_all, run_tests
from codechat.sandbox.programs import Program, Result, Stdio, Verdict, entry_points_of

__all__ = [
    "Pool", "Program", "Result", "SandboxUnavailable", "Stdio", "Verdict", "close_all", "entry_points_of", "run_tests",
]  # fmt: skip
