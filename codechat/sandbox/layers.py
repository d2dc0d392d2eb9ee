"""Whether this machine isolates untrusted programs, and what a program tries in vain. Tried in a process, not guessed.

    landlock  Landlock, seccomp and limits: no writes, and reads only of the interpreter's library
    none      limits only, for trusted programs

"auto" is landlock, and never becomes "none".
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, RunError, nearest
from codechat.sandbox import nursery, seccomp, wire

CHOICES = ("auto", "none")
REMEDY = "use a kernel with Landlock (5.13 or newer, switched on); programs that you trust may run with --sandbox none"


class SandboxUnavailable(RunError):
    """The machine does not allow the requested isolation. Nothing untrusted has run."""


class Attempt(NamedTuple):
    name: str
    stopped: bool
    reason: str


@functools.cache
def choose(isolation: str) -> str:
    """The level to use: "landlock" or "none". It is built once as a test.

    ConfigError for an unknown word; SandboxUnavailable where the machine does not allow it."""
    if isolation not in CHOICES:
        raise ConfigError(f"unknown isolation {isolation!r}{nearest(isolation, CHOICES)}")
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"untrusted programs run on Linux only, and this is {sys.platform}; use a Linux machine"
        )
    level = "none" if isolation == "none" else "landlock"
    if problem := problem_of(level):
        raise SandboxUnavailable(f"no isolation here ({problem}); {REMEDY}")
    return level


def problem_of(level: str) -> str:
    """Why a level cannot be built here, or "". A process of the level is started and must answer."""
    if level != "none" and (missing := seccomp.supported()):
        return missing
    try:
        made = nursery.Nursery(level)
    except nursery.NurseryError as error:
        return str(error)
    try:
        pid, channel = made.take()
        with channel:
            channel.settimeout(10)
            wire.send(channel, b'[1, "len", ["", ""]]')
            answer = wire.receive(channel, 1000)
        made.end(pid)
        return "" if json.loads(answer) == [1, "ok", 2] else "a program's process answers wrongly"
    except (OSError, nursery.NurseryError) as error:
        return f"a program's process cannot wall itself in ({error})"
    finally:
        made.close()


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
