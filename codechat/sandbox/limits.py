"""Resource limits of one program: address space, processor time, threads, descriptors, file sizes."""

from __future__ import annotations

import ctypes
import math
import resource
from pathlib import Path

from codechat.sandbox import kernel

FILE_MB, DESCRIPTORS, THREADS = 64, 128, 64
SPARE_THREADS = 256  # room for threads that the user's other processes start later, where they count too


def own_addresses() -> int:
    """Bytes of address space that this process already uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def own_threads(user: int) -> int:
    """Threads of a user on this machine, which RLIMIT_NPROC counts outside a user namespace."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == user:
                    count += sum(1 for _ in (folder / "task").iterdir())
            except OSError:  # it has ended
                continue
    return count


def limit_for_good() -> None:
    """Permanent limits of a zygote and all its programs."""
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_MB << 20),
        (resource.RLIMIT_NOFILE, DESCRIPTORS),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _lower(what, most)


def limit_threads(most: int) -> kernel.Step:
    """For a program's process only, since a zygote must fork. It does not bind the machine's root; the address space of
    their stacks bounds root's threads."""
    most = _lowest(resource.RLIMIT_NPROC, most)
    return kernel.prepared("prlimit64", 0, resource.RLIMIT_NPROC, (ctypes.c_uint64 * 2)(most, most), None)


def limit_program(own_bytes: int, memory_mb: int, cpu_s: float) -> None:
    """Allow `memory_mb` MiB of address space beyond the interpreter's own, and `cpu_s` seconds of processor time."""
    _lower(resource.RLIMIT_AS, own_bytes + (memory_mb << 20))
    _lower(resource.RLIMIT_CPU, math.ceil(cpu_s))


def _lower(what: int, most: int) -> None:
    most = _lowest(what, most)
    resource.setrlimit(what, (most, most))


def _lowest(what: int, most: int) -> int:
    hard = resource.getrlimit(what)[1]
    return most if hard == resource.RLIM_INFINITY else min(most, hard)
