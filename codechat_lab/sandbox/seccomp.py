"""A seccomp filter that allows a Python program only computation: memory, reading files,
threads, time, pipes.

The zygote filters itself and so its programs; a program's process then gives up what only the
zygote needs (a short filter costs each program less). A call off the list fails with EPERM:
sockets (except an unconnected pair, for asyncio), exec, fork, ptrace, mounts, signals to
others, keys, bpf, io_uring, memfd. `clone` makes threads only; `clone3`, whose flags a filter
cannot read, answers ENOSYS, and the C library uses `clone`. Changes of modes and times seem to
succeed and have no effect (shutil.copy needs them): Landlock does not restrict them. A program
cannot send descriptors, which would hide files from the watch."""

import ctypes
import errno
import itertools
import json
import struct
from collections.abc import Iterable
from pathlib import Path

from codechat_lab.sandbox import kernel

ARCH_X86_64 = 0xC000003E
SET_MODE_FILTER = 1
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NR, ARCH, ARGS = 0, 4, 16  # offsets in struct seccomp_data

THREAD_FLAGS = (0x3D0F00, 0x7D0F00)  # what glibc and musl pass to clone for a thread
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # duplicate, flags, locks; not F_SETOWN
# ask about a terminal, FIONREAD, FIONBIO, close-on-exec
IOCTL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)
AF_UNIX = 1
FCNTL_NR, IOCTL_NR, SOCKETPAIR, CLONE, CLONE3, PRLIMIT, UTIMENSAT = 72, 16, 53, 56, 435, 302, 280
KILL_NR, TGKILL = 62, 234

# Calls by name, from a file. always: of every program. zygote_only: each program's process
# gives these up.
_CALLS: dict[str, dict[str, int]] = json.loads(
    Path(__file__).with_name("syscalls.json").read_text(encoding="utf-8")
)
ALWAYS = _CALLS["always"]
ZYGOTE_ONLY = _CALLS["zygote_only"]
PRETENDED = _CALLS["pretended"]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value & 0xFFFFFFFF)


def _halves(argument: int) -> tuple[int, int]:
    """Offsets of the low and the high half of an argument: a step loads 32 bits."""
    return ARGS + 8 * argument, ARGS + 8 * argument + 4


REFUSE = _step(RETURN, ERRNO | errno.EPERM)
START = _step(LOAD, ARCH) + _step(EQUAL, ARCH_X86_64, 1, 0) + _step(RETURN, KILL) + _step(LOAD, NR)


def _allow(numbers: Iterable[int]) -> bytes:
    """With the call's number loaded: ALLOW inside a run of numbers, else continue.

    Runs, not single numbers: every call of a program goes through the steps."""
    known = set(numbers)
    steps = b""
    for first in sorted(n for n in known if n - 1 not in known):
        after = next(n for n in itertools.count(first) if n not in known)
        steps += _step(AT_LEAST, first, 0, 2)
        steps += _step(AT_LEAST, after, 1, 0)
        steps += _step(RETURN, ALLOW)
    return steps


def _if_argument(
    number: int, argument: int, values: tuple[int, ...], high_half: bool = True
) -> bytes:
    """Allow the call `number` if an argument is one of `values` (all 64 bits), else EPERM."""
    low, high = _halves(argument)
    body = b""
    if high_half:
        body += _step(LOAD, high) + _step(EQUAL, 0, 1, 0) + REFUSE
    body += _step(LOAD, low)
    for value in values:
        body += _step(EQUAL, value, 0, 1) + _step(RETURN, ALLOW)
    body += REFUSE
    return _step(EQUAL, number, 0, len(body) // 8) + body


def shared_program() -> bytes:
    """The zygote's filter, which its programs inherit."""
    steps = START
    steps += _step(EQUAL, CLONE3, 0, 1) + _step(RETURN, ERRNO | errno.ENOSYS)
    # The kernel reads only the low half of these; the C library may leave anything in the high
    # half.
    steps += _if_argument(FCNTL_NR, 1, FCNTL, high_half=False)
    steps += _if_argument(IOCTL_NR, 1, IOCTL, high_half=False)
    steps += _if_argument(SOCKETPAIR, 0, (AF_UNIX,), high_half=False)
    steps += _refuse_present_time()
    for number in sorted(PRETENDED.values()):
        # error 0: nothing is done, and the call succeeds
        steps += _step(EQUAL, number, 0, 1) + _step(RETURN, ERRNO)
    return steps + _allow([*ALWAYS.values(), *ZYGOTE_ONLY.values()]) + REFUSE


def _refuse_present_time() -> bytes:
    """EPERM for utimensat without times: Path.touch tries it first, and makes the file only
    where it fails."""
    low, high = _halves(2)
    # Each comparison jumps to the last step where a half of the pointer is not 0.
    body = _step(LOAD, low) + _step(EQUAL, 0, 0, 3)
    body += _step(LOAD, high) + _step(EQUAL, 0, 0, 1)
    body += REFUSE
    body += _step(LOAD, NR)
    return _step(EQUAL, UTIMENSAT, 0, len(body) // 8) + body


def own_program(own_pid: int) -> bytes:
    """The filter that a program's process adds: no calls that only the zygote needs, except
    threads, signals to itself (its own pid is `own_pid`) and its own limits."""
    steps = START
    # All 64 bits: the kernel reads the flags of clone whole, and a namespace may stand in the
    # high half.
    steps += _if_argument(CLONE, 0, THREAD_FLAGS)
    steps += _if_argument(PRLIMIT, 0, (0,), high_half=False)
    for number in (KILL_NR, TGKILL):
        steps += _if_argument(number, 0, (own_pid,), high_half=False)
    for number in sorted({*ZYGOTE_ONLY.values()} - {CLONE, PRLIMIT, KILL_NR, TGKILL}):
        steps += _step(EQUAL, number, 0, 1) + REFUSE
    return steps + _step(RETURN, ALLOW)


def install(steps: bytes) -> kernel.Step:
    """Filters the running thread and all that it starts, permanently. Needs no_new_privs."""
    return kernel.prepared("seccomp", SET_MODE_FILTER, 0, _Program(len(steps) // 8, steps))
