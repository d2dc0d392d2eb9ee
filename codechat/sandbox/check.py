"""`codechat sandbox check`: whether this machine isolates untrusted programs, and what a program tries in vain.

    codechat sandbox check

Exit code 0 where untrusted programs can run and every forbidden action was stopped.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from codechat.core import config
from codechat.core.config import opt
from codechat.sandbox import landlock, layers
from codechat.sandbox.pool import Pool
from codechat.sandbox.programs import Program


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Settings of the check."""

    action: Literal["check"] = opt("check", "what to do", positional=True)


def check() -> bool:
    """Print each attempt. True where every one was stopped. SandboxUnavailable where no isolation is possible."""
    with Pool(1) as pool:
        print(f"untrusted programs run behind Landlock (version {landlock.abi()}), seccomp and resource limits\n")
        tried = layers.attempts(lambda code, tests: pool.run(Program(code=code, tests=tests, timeout_s=5.0)))
    for attempt in tried:
        print(f"  {'stopped' if attempt.stopped else 'ALLOWED':<8}{attempt.name:<30}{attempt.reason}")
    return all(attempt.stopped for attempt in tried)


def main(argv: list[str] | None = None) -> int:
    """`codechat sandbox check`; 0 where all attempts were stopped, else 1."""
    config.parse(SandboxConfig, sys.argv[1:] if argv is None else argv, prog="codechat sandbox", epilog=__doc__)
    return 0 if check() else 1


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
