"""System calls that the standard library does not offer, through ctypes. Linux on x86-64.

Each raises OSError with the call's name in `filename`, so a message can name the step that failed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
M_ARENA_MAX = -8

SYS = {
    "seccomp": 317, "capset": 126, "prctl": 157, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446, "prlimit64": 302, "close": 3,
}  # fmt: skip
NAMES = {number: name for name, number in SYS.items()}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
holding_gil = ctypes.PyDLL(None, use_errno=True)
holding_gil.syscall.restype = ctypes.c_long


def call(name: str, *args: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """A system call by name. Ints pass as unsigned longs, structures and buffers by address."""
    result = libc.syscall(ctypes.c_long(SYS[name]), *(_argument(a) for a in args))
    if result < 0:
        _fail(name)
    return result


def _fail(name: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), name)


def _argument(value: object) -> object:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, int):
        return ctypes.c_ulong(value & 0xFFFFFFFFFFFFFFFF)
    return value if isinstance(value, bytes) else ctypes.byref(value)


Step = Callable[[], int]


def prepared(name: str, *args: int | bytes | ctypes.Array | ctypes.Structure | None) -> Step:
    """A system call for `carry_out`. Its arguments are built now: a forked process pays for each page that it writes
    first."""
    return functools.partial(holding_gil.syscall, ctypes.c_long(SYS[name]), *(_argument(a) for a in args))


def carry_out(steps: Iterable[Step]) -> None:
    """Run system calls in order. The first that fails raises; later ones are not tried."""
    for step in steps:
        if step() < 0:
            _fail(NAMES[step.args[0].value])


def fork() -> int:
    """fork() without Python's hooks, at half the cost: for a process that never had a second thread and holds no lock.
    Without the hooks `random` continues from the parent's state."""
    pid = holding_gil.fork()
    if pid < 0:
        _fail("fork")
    return pid


def prctl(option: int, value: int) -> None:
    call("prctl", option, value, 0, 0, 0)


class CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def drop_capabilities() -> Step:
    """Drops every capability of the running thread: effective, permitted and inheritable."""
    return prepared("capset", CapHeader(version=0x20080522, pid=0), (ctypes.c_uint32 * 6)())


def empty_bounding_set() -> None:
    """No program executed from here on can gain a capability. Needs CAP_SETPCAP. Without it, no_new_privs prevents the
    same."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL past the last one, EPERM without the capability
            return


def limit_arenas(count: int) -> None:
    """Limit glibc's arenas: each thread of a program would reserve 64 MB of address space."""
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, count)


def give_back_free_memory() -> None:
    """Return free pages to the kernel, so a fork neither shares nor copies them."""
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
