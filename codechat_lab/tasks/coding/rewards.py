"""The reward of a program, from the verdict on its tests.

    binary      1 where every test passes, else 0
    fractional  the share of tests that pass
    tiered      0 for no program or invalid Python; 0.05 where it raises; 0.15 where it runs and passes no test;
                0.15 + 0.85 k/n for k of n tests; 1 for all

A weak base model hardly ever passes every test, so its groups have no variance under `binary`;
`tiered` gives it rungs to climb. Where the request shows the tests, a constant that answers one
of them is such a rung (notebook 37). `Score.correct` means that every test passes, in every
mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codechat_lab.data.python_source import parsed

if TYPE_CHECKING:
    from codechat_lab.sandbox.pool import Verdict

MODES = ("binary", "fractional", "tiered")
TIERS = ("empty", "unparseable", "raises", "none_passed", "some_passed", "all_passed")
PARSEABLE = TIERS[2:]
RUNNABLE = TIERS[3:]
RAISES, RUNS = 0.05, 0.15
WRONG = "assertion failed"


def tier_without_running(code: str) -> str | None:
    """The tier of a program that needs no run, or None."""
    if not code.strip():
        return "empty"
    return "unparseable" if parsed(code) is None else None


def tier_of(verdict: Verdict) -> str:
    """The tier of a program that was run. It "runs" where at least one test reached its
    comparison. Running out of time, or not defining the requested name, counts as raising."""
    passed = sum(r.passed for r in verdict.results)
    if passed:
        return "all_passed" if passed == len(verdict.results) else "some_passed"
    return "none_passed" if any(r.reason.startswith(WRONG) for r in verdict.results) else "raises"


def tiered(tier: str, passed: int, tests: int) -> float:
    """The tiered reward, in [0, 1]: the table of the module docstring."""
    steps = {
        "empty": 0.0,
        "unparseable": 0.0,
        "raises": RAISES,
        "none_passed": RUNS,
        "all_passed": 1.0,
    }
    return steps[tier] if tier in steps else RUNS + (1 - RUNS) * passed / tests


def reward(mode: str, tier: str, passed: int, tests: int) -> float:
    if mode == "tiered":
        return tiered(tier, passed, tests)
    return float(tier == "all_passed") if mode == "binary" else passed / max(tests, 1)
