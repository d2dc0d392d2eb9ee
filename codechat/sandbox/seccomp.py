"""A seccomp filter that allows a Python program only computation: memory, reading files, threads, time, pipes.

The allow-list has two parts. The zygote filters itself and so all its programs; a program's process then gives up what
only the zygote needs (a short filter costs each program less). A call that is not on the list fails with EPERM, so a
program gets an exception instead of being killed: sockets (except an unconnected pair, which asyncio needs), exec,
fork, ptrace, mounts, signals to others, keys, bpf, io_uring, memfd. `clone` makes threads only. A filter cannot read
the flags of `clone3`; it answers ENOSYS, and the C library uses `clone`. The numbers are those of x86-64; other
machines are not supported.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from codechat.sandbox import kernel

ARCH_X86_64 = 0xC000003E
SET_MODE_FILTER = 1
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARGS = 0, 4, 16  # offsets in struct seccomp_data

THREAD_FLAGS = (0x3D0F00, 0x7D0F00)  # what glibc and musl pass to clone for a thread
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # duplicate, flags, locks; not F_SETOWN
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # ask about a terminal, FIONREAD, FIONBIO, close-on-exec
AF_UNIX = 1

ALWAYS = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23,
    "sched_yield": 24, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33,
    "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40,
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51,
    "getpeername": 52, "setsockopt": 54, "getsockopt": 55, "exit": 60, "uname": 63, "flock": 73, "fsync": 74,
    "fdatasync": 75, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "readlink": 89, "umask": 95,
    "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "statfs": 137, "fstatfs": 138,
    "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145, "sched_get_priority_max": 146,
    "sched_get_priority_min": 147, "arch_prctl": 158, "setrlimit": 160, "gettid": 186, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "waitid": 247, "wait4": 61, "openat": 257, "open": 2,
    "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "get_robust_list": 274, "epoll_pwait": 281, "timerfd_create": 283, "eventfd": 284, "timerfd_settime": 286,
    "timerfd_gettime": 287, "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295,
    "pwritev": 296, "getcpu": 309, "getrandom": 318, "membarrier": 324, "copy_file_range": 326, "preadv2": 327,
    "pwritev2": 328, "statx": 332, "rseq": 334, "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441,
}  # fmt: skip

FCNTL_NR, IOCTL_NR, SOCKETPAIR, CLONE, CLONE3, PRLIMIT = 72, 16, 53, 56, 435, 302
KILL_NR, TGKILL = 62, 234

# The zygote needs these too; each program's process gives them up.
ZYGOTE_ONLY = {
    "fork": 57, "vfork": 58, "kill": KILL_NR, "tgkill": TGKILL, "clone": CLONE, "setsid": 112, "capset": 126,
    "prctl": kernel.SYS["prctl"], "seccomp": kernel.SYS["seccomp"], "landlock_restrict_self": kernel.SYS["landlock_restrict_self"],
    "prlimit64": PRLIMIT,
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value & 0xFFFFFFFF)


def _verdict(action: int, number: int = 0) -> bytes:
    return _step(RETURN, action | number)


START = _step(LOAD, ARCH) + _step(EQUAL, ARCH_X86_64, 1, 0) + _verdict(KILL) + _step(LOAD, NR)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, after) of each run of numbers."""
    out: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if out and out[-1][1] == n:
            out[-1] = (out[-1][0], n + 1)
        else:
            out.append((n, n + 1))
    return out


def _allow_ranges(numbers: list[int]) -> bytes:
    """With the call's number loaded: ALLOW inside a run of numbers, else continue."""
    out = b""
    for first, after in _ranges(numbers):
        out += _step(AT_LEAST, first, 0, 2) + _step(AT_LEAST, after, 1, 0) + _verdict(ALLOW)
    return out


def _if_argument(number: int, argument: int, values: tuple[int, ...], high_half: bool = True) -> bytes:
    """Allow the call `number` if an argument is one of `values` (all 64 bits), else EPERM."""
    high, low = ARGS + 8 * argument + 4, ARGS + 8 * argument
    body = _step(LOAD, high) + _step(EQUAL, 0, 1, 0) + _verdict(ERRNO, errno.EPERM) if high_half else b""
    body += _step(LOAD, low)
    for value in values:
        body += _step(EQUAL, value, 0, 1) + _verdict(ALLOW)
    body += _verdict(ERRNO, errno.EPERM)
    return _step(EQUAL, number, 0, len(body) // 8) + body


def shared_program() -> bytes:
    """The zygote's filter, which its programs inherit."""
    allowed = [*ALWAYS.values(), *ZYGOTE_ONLY.values()]
    steps = START + _step(EQUAL, CLONE3, 0, 1) + _verdict(ERRNO, errno.ENOSYS)
    # The kernel reads only the low half of these; the C library may leave anything in the high half.
    steps += _if_argument(FCNTL_NR, 1, FCNTL, high_half=False) + _if_argument(IOCTL_NR, 1, IOCTL, high_half=False)
    steps += _if_argument(SOCKETPAIR, 0, (AF_UNIX,), high_half=False)
    return steps + _allow_ranges(allowed) + _verdict(ERRNO, errno.EPERM)


def own_program(own_pid: int) -> bytes:
    """The filter that a program's process adds: no calls that only the zygote needs, except threads, signals to itself
    (its own pid is `own_pid`) and its own limits."""
    steps = START + _if_argument(CLONE, 0, THREAD_FLAGS) + _if_argument(PRLIMIT, 0, (0,), high_half=False)
    for number in (KILL_NR, TGKILL):
        steps += _if_argument(number, 0, (own_pid,), high_half=False)
    for number in sorted({*ZYGOTE_ONLY.values()} - {CLONE, PRLIMIT, KILL_NR, TGKILL}):
        steps += _step(EQUAL, number, 0, 1) + _verdict(ERRNO, errno.EPERM)
    return steps + _verdict(ALLOW)


def supported() -> str:
    """Why this machine has no filter, or ""."""
    machine = platform.machine()
    return "" if machine == "x86_64" else f"no system call table for {machine}"


def install(steps: bytes) -> kernel.Step:
    """Filters the running thread and all that it starts, permanently. Needs no_new_privs."""
    return kernel.prepared("seccomp", SET_MODE_FILTER, 0, _Program(len(steps) // 8, steps))
