"""`codechat sandbox check`: does this machine isolate untrusted programs? Tries each forbidden action.

    codechat sandbox check

Exit code 0 if untrusted programs can run and every forbidden action was blocked.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codechat.core.config import opt
from codechat.sandbox import landlock
from codechat.sandbox.pool import Pool, Program, Verdict

# Actions that must be stopped: each expression gives "done" where nothing stops it, and has no effect even then.
_DATA = json.loads(Path(__file__).with_name("attempts.json").read_text(encoding="utf-8"))
FORBIDDEN, ATTEMPT = _DATA["forbidden"], "\n".join(_DATA["program"])


def attempts(pool: Pool) -> dict[str, Verdict]:
    """Try each forbidden action, in isolated programs only. A verdict has passed where the action was stopped."""
    codes = [ATTEMPT.format(expression=expression) for expression in FORBIDDEN.values()]
    tests = ["assert attempt() == 'stopped'"]
    return dict(zip(FORBIDDEN, pool.map(Program(code=code, tests=tests) for code in codes)))


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Settings of the check."""

    action: Literal["check"] = opt("check", "what to do", positional=True)


def main(cfg: SandboxConfig) -> int:
    """`codechat sandbox check`; 0 where all attempts were stopped, else 1."""
    with Pool(1) as pool:
        print(f"untrusted programs run behind Landlock (version {landlock.abi()}), seccomp and resource limits\n")
        tried = attempts(pool)
    for name, verdict in tried.items():
        print(f"  {'stopped' if verdict.passed else 'ALLOWED':<8}{name:<30}{verdict.reason}")
    return 0 if all(verdict.passed for verdict in tried.values()) else 1
