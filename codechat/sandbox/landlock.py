"""Landlock: the kernel allows a program to open only the paths of a list.

Everything that the running kernel can restrict is restricted: reads, writes, new entries, TCP, abstract sockets, and
signals to processes outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from codechat.sandbox import kernel, library

EXECUTE, WRITE, READ, READ_DIR = 1, 2, 4, 8
ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
FILE_ONLY = EXECUTE | WRITE | READ | 1 << 14 | 1 << 15
DEVICES = ("null", "zero", "random", "urandom")
TCP, SCOPES = 3, 3
ASK_VERSION, PATH_BENEATH = 1, 1


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def abi() -> int:
    """The kernel's Landlock version; 0 without Landlock."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, ASK_VERSION)
    except OSError:
        return 0


def ruleset() -> int:
    """A descriptor of rules: read the interpreter's library, read and write four harmless devices, nothing else.

    OSError without Landlock."""
    version = abi()
    files = ALL_BY_ABI[min(max(version, 1), 5)]
    rules = _Ruleset(files, TCP if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    fd = kernel.call("landlock_create_ruleset", rules, size, 0)
    reads, listings = library.readable()
    devices = [f"/dev/{name}" for name in DEVICES]
    for paths, access in ((reads, READ | READ_DIR), (listings, READ_DIR), (devices, READ | WRITE)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(fd, path, access & files)
    return fd


def _allow(ruleset_fd: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kept = access if os.path.isdir(path) else access & FILE_ONLY
        kernel.call("landlock_add_rule", ruleset_fd, PATH_BENEATH, _PathRule(kept, fd), 0)
    finally:
        os.close(fd)


def restrict(ruleset_fd: int) -> kernel.Step:
    """Applies the rules permanently to the running thread and all that it starts. Needs no_new_privs."""
    return kernel.prepared("landlock_restrict_self", ruleset_fd, 0)
