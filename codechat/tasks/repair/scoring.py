"""The reward of a repository after its edits, from tests that a judge runs outside of it.

    none         0      no edit can be read
    tampers      0      an edit touches tests or what decides how they run
    unapplied    0.05   an edit does not fit the files, or changes nothing
    applied      0.15   no failing test passes
    some_fixed   0.15 + 0.35 x the share of failing tests that pass
    regressed    0.5    all of them pass, but another test fails
    resolved     1      all of them pass, and all others still do

Below `resolved` it is multiplied by the share of passing tests that still pass. The modules are loaded from memory into the
sandboxed process, so what they patch, exit from or override stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from codechat.sandbox import Program, Verdict
from codechat.tasks.base import Problem, Score
from codechat.tasks.repair import edits

TIERS = ("none", "tampers", "unapplied", "applied", "some_fixed", "regressed", "resolved")
UNAPPLIED, APPLIED, REGRESSED = 0.05, 0.15, 0.5

# Runs in the program's process: modules come from memory, a name that cannot be imported is absent.
_LOADER = Path(__file__).with_name("loader.txt").read_text(encoding="utf-8")


def program(problem: Problem, files: Mapping[str, str], timeout_s: float) -> Program:
    """The repository with the problem's tests, those that fail first."""
    gold = problem.gold
    sources = {path: text for path, text in files.items() if path.endswith(".py") and not edits.is_protected(path)}
    # ascii, not JSON, whose two escapes of one emoji are two half characters in Python
    code = f"{_LOADER}\n\nload({ascii(sources)}, {ascii(dict(gold['imports']))})\n"
    tests = tuple(gold["tests"][name] for name in (*gold["FAIL_TO_PASS"], *gold["PASS_TO_PASS"]))
    return Program(code=code, tests=tests, entry_points=(), timeout_s=timeout_s)


def edited(files: Mapping[str, str], text: str) -> tuple[dict[str, str] | None, Score]:
    """(the files after the edits of an answer if tests decide, else None; the score without tests)."""
    changes = edits.parse(text)
    if not changes:
        return None, unscored("none", "no edit can be read")
    if touched := sorted({change.path for change in changes if edits.is_protected(change.path)}):
        return None, unscored("tampers", f"tests are not to be edited: {', '.join(touched)[:200]}")
    try:
        after = edits.applied(files, changes)
    except edits.EditError as error:
        return None, unscored("unapplied", str(error))
    if after == dict(files):
        return None, unscored("unapplied", "nothing changes")
    return after, unscored("applied", "")


def unscored(tier: str, reason: str) -> Score:
    """The score of an answer that no test has judged."""
    reward = {"unapplied": UNAPPLIED, "applied": APPLIED}.get(tier, 0.0)
    return Score(reward, tier, {"fixed": 0, "kept": 0, "reason": reason}, False)


def of_verdict(problem: Problem, verdict: Verdict) -> Score:
    failing = len(problem.gold["FAIL_TO_PASS"])
    passed = [result.passed for result in verdict.results]
    return of_counts(sum(passed[:failing]), failing, sum(passed[failing:]), len(passed) - failing, verdict.reason)


def of_counts(fixed: int, failing: int, kept: int, passing: int, reason: str = "") -> Score:
    """The score of `fixed` of `failing` tests and `kept` of `passing`."""
    parts = {"fixed": fixed, "failing": failing, "kept": kept, "passing": passing, "reason": reason}
    if fixed == failing and kept == passing:
        return Score(1.0, "resolved", parts, True)
    tier = "regressed" if fixed == failing else "some_fixed" if fixed else "applied"
    reward = APPLIED + (REGRESSED - APPLIED) * fixed / failing
    return Score(reward * (kept / passing if passing else 1.0), tier, parts, False)
