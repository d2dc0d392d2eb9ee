"""Landlock: the kernel allows a program to open only the paths of a list.

Everything that the running kernel can restrict is restricted: reads, writes, new entries, TCP, abstract sockets, and
signals to processes outside. A program may read the folders of the running interpreter, without installed packages, and
write in one folder.
"""

import contextlib
import ctypes
import os
import re
import stat
import sys
from pathlib import Path

from codechat_lab.sandbox import kernel
from codechat_lab.sandbox.kernel import NOBODY

EXECUTE, WRITE, READ, READ_DIR = 1, 2, 4, 8
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
REFER = 1 << 13
TRUNCATE = 1 << 14
# Files and folders in the program's own folder; no links, pipes, sockets or devices.
OWN = WRITE | READ | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE
ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
FILE_ONLY = EXECUTE | WRITE | READ | 1 << 14 | 1 << 15
DEVICES = ("null", "zero", "random", "urandom")
TCP, SCOPES = 3, 3
ASK_VERSION, PATH_BENEATH = 1, 1
FOREIGN = ("site-packages", "dist-packages")  # installed packages may hold a benchmark's answers


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def ruleset(scratch: str, files_only: bool = False) -> int:
    """A descriptor of rules: read the interpreter's library, read and write four harmless devices and the folder
    `scratch`, nothing else. files_only: no rules of TCP, signals and abstract sockets.

    OSError without Landlock."""
    version = kernel.prepared("landlock_create_ruleset", None, 0, ASK_VERSION)()
    files = ALL_BY_ABI[min(version, 5)]
    rules = _Ruleset(files, TCP if version >= 4 else 0, SCOPES if version >= 6 else 0)
    if files_only:
        rules = _Ruleset(files, 0, 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    fd = kernel.prepared("landlock_create_ruleset", rules, size, 0)()
    reads, listings = readable()
    devices = [f"/dev/{name}" for name in DEVICES]
    rights = ((reads, READ | READ_DIR), (listings, READ_DIR), (devices, READ | WRITE), ([scratch], OWN))
    for paths, access in rights:
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(fd, path, access & files)
    return fd


def restrict_tests(scratch: str) -> None:
    """From here on this process, which runs tests, opens only what a program may open, whatever file a program names to
    them. OSError without Landlock."""
    fd = ruleset(scratch, files_only=True)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prepared("landlock_restrict_self", fd, 0)()
    os.close(fd)


def _allow(ruleset_fd: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kept = access if os.path.isdir(path) else access & FILE_ONLY
        kernel.prepared("landlock_add_rule", ruleset_fd, PATH_BENEATH, _PathRule(kept, fd), 0)()
    finally:
        os.close(fd)


# ---- the interpreter's library and the user


def folders() -> list[str]:
    """Folders of the standard library and of the shared libraries that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    loaded = {os.path.dirname(path) for path in re.findall(r"\s(/\S+\.so[\w.]*)$", maps, re.M)}
    standard = {path for path in sys.path if os.path.isdir(path)} | {os.path.dirname(os.__file__)}
    paths = {p for path in loaded | standard for p in (path, os.path.realpath(path))} | {"/usr/share/zoneinfo"}
    return sorted(p for p in paths if not any(p.startswith(q + "/") for q in paths))


def readable() -> tuple[list[str], list[str]]:
    """(folders and files that can be read, folders that can only be listed): the library without installed packages."""
    reads: list[str] = []
    listings: list[str] = []

    def allow(path: str, foreign: list[str]) -> None:
        below = [f for f in foreign if f.startswith(path + "/")]
        if not below and path not in foreign:
            reads.append(path)
        elif below:  # a rule for the folder would cover all of it
            listings.append(path)
            for entry in os.scandir(path):
                allow(entry.path, below)

    for folder in folders():
        patterns = [p for name in FOREIGN for p in (name, f"python*/{name}")]
        allow(folder, [str(path) for pattern in patterns for path in Path(folder).glob(pattern)])
    return reads, listings


def step_down(scratch: str) -> None:
    """Change from root to an ordinary user, who gets the folder `scratch`, if that user can read the library. Otherwise
    root without capabilities remains, and Landlock allows it only the library."""
    if os.getuid() or not all(map(_open_to_all, [*folders(), os.path.dirname(scratch)])):
        return
    with contextlib.suppress(PermissionError):  # in a container root may lack the right
        os.setgroups([])
        os.chown(scratch, NOBODY, NOBODY)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # a change of user makes a process undumpable, and its /proc root's


def _open_to_all(folder: str) -> bool:
    parts = (folder, *map(str, Path(folder).parents))
    return not os.path.exists(folder) or all(os.stat(f).st_mode & stat.S_IXOTH for f in parts)
