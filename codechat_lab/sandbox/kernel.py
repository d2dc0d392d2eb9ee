"""System calls that the standard library does not offer, through ctypes, and resource limits.
Linux on x86-64.

Each call raises OSError with its name in `filename`, so a message can name the step that failed.
"""

import contextlib
import ctypes
import functools
import glob
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
M_ARENA_MAX = -8
SYS = {  # numbers of x86-64
    "seccomp": 317,
    "capset": 126,
    "prctl": 157,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "prlimit64": 302,
    "close": 3,
}
NAMES = {number: name for name, number in SYS.items()}
# limits of a program
FILE_MB = 16
DESCRIPTORS = 128
THREADS = 64
NOBODY = 65534  # the user that root turns into
# room for threads that the user's other processes start later, where they count too
SPARE_THREADS = 256

Argument = int | bytes | ctypes.Array | ctypes.Structure | None
Step = Callable[[], int]


def _checked(result: Any, function: Any, arguments: Any) -> Any:
    """The result of a system call; OSError for a negative one. The types are those of ctypes'
    hook."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), NAMES[arguments[0].value])
    return result


# keeps the interpreter's lock: a forked process has no other thread
libc = ctypes.PyDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.syscall.errcheck = _checked


def _argument(value: Argument) -> object:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, int):
        return ctypes.c_ulong(value & 0xFFFFFFFFFFFFFFFF)
    return value if isinstance(value, bytes) else ctypes.byref(value)


def prepared(name: str, *args: Argument) -> Step:
    """A system call by name. Ints pass as unsigned longs, structures and buffers by address.
    They are built now: a forked process pays for each page that it writes first."""
    return functools.partial(libc.syscall, ctypes.c_long(SYS[name]), *map(_argument, args))


def fork() -> int:
    """fork() without Python's hooks, at half the cost: for a process that never had a second
    thread and holds no lock. Without the hooks `random` continues from the parent's state."""
    pid = libc.fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "no process can be made", "fork")
    return pid


def prctl(option: int, value: int) -> None:
    prepared("prctl", option, value, 0, 0, 0)()


class CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def empty_bounding_set() -> None:
    """No program executed from here on can gain a capability. Without CAP_SETPCAP, no_new_privs
    prevents the same."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL past the last one, EPERM without the capability
            return


def tidy_memory() -> None:
    """Limit glibc's arenas (each thread of a program would reserve 64 MB of address space), and
    return free pages, so a fork neither shares nor copies them."""
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 2)
        libc.malloc_trim(ctypes.c_size_t(0))


# ---- resource limits


def own_addresses() -> int:
    """Bytes of address space that this process already uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def own_threads(user: int) -> int:
    """Threads of a user on this machine, which RLIMIT_NPROC counts outside a user namespace."""
    count = 0
    for folder in glob.glob("/proc/[0-9]*/task"):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(folder).st_uid == user:
                count += len(os.listdir(folder))
    return count


def limit_for_good() -> None:
    """Permanent limits of a zygote and all its programs: no core file, which would hold memory
    of the zygote, no large files, few descriptors, and no memory that outlives a process or
    that cannot be swapped."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, FILE_MB << 20)
    _lower(resource.RLIMIT_NOFILE, DESCRIPTORS)
    _lower(resource.RLIMIT_MEMLOCK, 0)
    _lower(resource.RLIMIT_MSGQUEUE, 0)


def limit_threads() -> Step:
    """For a program's process only, since a zygote must fork. It does not bind the machine's
    root; the address space of their stacks bounds root's threads."""
    most = _lowest(resource.RLIMIT_NPROC, THREADS + own_threads(os.getuid()) + SPARE_THREADS)
    return prepared("prlimit64", 0, resource.RLIMIT_NPROC, (ctypes.c_uint64 * 2)(most, most), None)


def limit_program(own_bytes: int, memory_mb: int, cpu_s: float) -> None:
    """Allow `memory_mb` MiB of address space beyond the interpreter's own, and `cpu_s` seconds
    of processor time."""
    _lower(resource.RLIMIT_AS, own_bytes + (memory_mb << 20))
    _lower(resource.RLIMIT_CPU, math.ceil(cpu_s))


def _lower(what: int, most: int) -> None:
    most = _lowest(what, most)
    resource.setrlimit(what, (most, most))


def _lowest(what: int, most: int) -> int:
    hard = resource.getrlimit(what)[1]
    return most if hard == resource.RLIM_INFINITY else min(most, hard)
