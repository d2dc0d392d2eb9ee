"""`codechat sandbox check`: whether this machine isolates untrusted programs, and what a program tries in vain.

    codechat sandbox check

Exit code 0 where untrusted programs can run and every forbidden action was stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from codechat.core import config
from codechat.core.config import opt
from codechat.sandbox import landlock
from codechat.sandbox.pool import Pool, Program, choose

__all__ = ["FORBIDDEN", "Attempt", "attempts", "check", "choose"]


class Attempt(NamedTuple):
    name: str
    stopped: bool
    reason: str


# Actions that must be stopped: each expression gives "done" where nothing stops it, and has no effect even then.
_DATA = json.loads(Path(__file__).with_name("attempts.json").read_text(encoding="utf-8"))
FORBIDDEN, ATTEMPT = _DATA["forbidden"], "\n".join(_DATA["program"])


def attempts(run: Callable[[str, list[str]], Any]) -> list[Attempt]:
    """Try each forbidden action. `run(code, tests)` gives a Verdict. Only for isolated programs."""
    tried = {
        what: run(ATTEMPT.format(expression=expression), ["assert attempt() == 'stopped'"])
        for what, expression in FORBIDDEN.items()
    }
    return [Attempt(what, verdict.passed, verdict.reason) for what, verdict in tried.items()]


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Settings of the check."""

    action: Literal["check"] = opt("check", "what to do", positional=True)


def check() -> bool:
    """Print each attempt. True where every one was stopped. SandboxUnavailable where no isolation is possible."""
    with Pool(1) as pool:
        print(f"untrusted programs run behind Landlock (version {landlock.abi()}), seccomp and resource limits\n")
        tried = attempts(lambda code, tests: pool.run(Program(code=code, tests=tests, timeout_s=5.0)))
    for attempt in tried:
        print(f"  {'stopped' if attempt.stopped else 'ALLOWED':<8}{attempt.name:<30}{attempt.reason}")
    return all(attempt.stopped for attempt in tried)


def main(argv: list[str] | None = None) -> int:
    """`codechat sandbox check`; 0 where all attempts were stopped, else 1."""
    config.parse(SandboxConfig, sys.argv[1:] if argv is None else argv, prog="codechat sandbox", epilog=__doc__)
    return 0 if check() else 1
