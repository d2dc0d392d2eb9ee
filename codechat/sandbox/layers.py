"""`codechat sandbox check`: whether this machine isolates untrusted programs, and what a program tries in vain.

    codechat sandbox check

Exit code 0 where untrusted programs can run and every forbidden action was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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
FORBIDDEN = {
    "read a file of the host": "open('/etc/passwd').read(1) and 'done'",
    "read another process": "open(f'/proc/{os.getppid() or 1}/environ').read(1) and 'done'",
    "write a file": "os.open('/tmp', os.O_TMPFILE | os.O_WRONLY) and 'done'",
    "open a connection": "_socket.socket() and 'done'",
    "start a process": "'done' if os.fork() else os._exit(0)",
    "execute a program": "os.execv('/nonexistent', ['x'])",
    "signal its parent": "os.kill(os.getppid(), 0) or 'done'",
    "trace its parent": "denied(libc.ptrace(0x4206, os.getppid(), 0, 0))",
    "mount": "denied(libc.mount(b'x', b'/nonexistent', b'x', 0, 0))",
    "become another user": "os.setuid(0) or 'done'",
    "make a namespace": "denied(libc.unshare(0x10000000))",
    "take more memory than it has": "bytes(8 << 30) and 'done'",
}
ATTEMPT = """import ctypes, errno, os, _socket
libc = ctypes.CDLL(None, use_errno=True)
def denied(result):
    return 'stopped' if ctypes.get_errno() == errno.EPERM else 'done'
def attempt():
    try:
        return {expression}
    except (OSError, MemoryError) as error:
        return 'done' if {expression!r}.startswith('os.exec') and error.errno == errno.ENOENT else 'stopped'
"""


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
