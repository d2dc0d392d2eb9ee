"""`codechat sandbox check`: which isolation layers work on this machine, and whether they stop forbidden actions.

    codechat sandbox check                        the isolation of untrusted programs on this machine
    codechat sandbox check --sandbox landlock     the same without namespaces

Exit code 0 where untrusted programs can run and every forbidden action was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from codechat.core import config
from codechat.core.config import opt
from codechat.sandbox import layers
from codechat.sandbox.layers import Layer
from codechat.sandbox.pool import Pool
from codechat.sandbox.programs import Program


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Settings of the check."""

    action: Literal["check"] = opt("check", "what to do", positional=True)
    sandbox: Literal["auto", "full", "landlock", "none"] = opt(
        "auto", "isolation of untrusted programs; none is for programs that you trust"
    )


def show(title: str, rows: Iterable[Layer], words: tuple[str, str]) -> bool:
    """Print a table. True where all rows hold."""
    rows = list(rows)
    print(title)
    for row in rows:
        print(f"  {words[0] if row.holds else words[1]:<8}{row.name:<30}{row.detail}")
    return all(row.holds for row in rows)


def check(isolation: str) -> bool:
    """Print layers and attempts. True where every attempt was stopped. SandboxUnavailable where no isolation is
    possible."""
    show("layers, each tried alone:", layers.probe(), ("holds", "absent"))
    level = layers.choose(isolation)
    print(f"\nuntrusted programs run behind: {level}\n")
    if level == "none":
        print("nothing keeps a program from this machine; run only what you trust")
        return False
    with Pool(1, isolation=isolation) as pool:
        tried = layers.attempts(lambda code, tests: pool.run(Program(code=code, tests=tests, timeout_s=5.0)))
    return show("what a program tries:", tried, ("stopped", "ALLOWED"))


def main(argv: list[str] | None = None) -> int:
    """`codechat sandbox check`; 0 where all attempts were stopped, else 1."""
    words = sys.argv[1:] if argv is None else argv
    cfg = config.parse(SandboxConfig, words, prog="codechat sandbox", epilog=__doc__)
    return 0 if check(cfg.sandbox) else 1


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
