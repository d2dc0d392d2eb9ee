"""Landlock: the kernel allows a program to open only the paths of a list.

Everything that the running kernel can restrict is restricted: reads, writes, new entries, TCP,
abstract sockets, and signals to processes outside. A program may read the folders of the
running interpreter, without installed packages, and write in one folder."""

import contextlib
import ctypes
import os
import re
import stat
import sys
from pathlib import Path
from typing import NamedTuple

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
ALL_BY_ABI = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
FILE_ONLY = EXECUTE | WRITE | READ | 1 << 14 | 1 << 15
DEVICES = ("null", "zero", "random", "urandom")
TCP = 3
SCOPES = 3
ASK_VERSION = 1
PATH_BENEATH = 1
FOREIGN = ("site-packages", "dist-packages")  # installed packages may hold a benchmark's answers


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def ruleset(scratch: str, files_only: bool = False) -> int:
    """A descriptor of rules: read the interpreter's library, read and write four harmless
    devices and the folder `scratch`, nothing else. files_only: no rules of TCP, signals and
    abstract sockets.

    OSError without Landlock."""
    version = kernel.prepared("landlock_create_ruleset", None, 0, ASK_VERSION)()
    files = ALL_BY_ABI[min(version, 5)]
    size = 8  # bytes of the structure that this kernel knows
    network = 0
    scoped = 0
    if version >= 4:
        size = 16
        network = TCP
    if version >= 6:
        size = 24
        scoped = SCOPES
    rules = _Ruleset(files, 0, 0) if files_only else _Ruleset(files, network, scoped)
    fd = kernel.prepared("landlock_create_ruleset", rules, size, 0)()
    library = readable()
    rights = dict.fromkeys(library.listed, READ_DIR)
    rights |= dict.fromkeys(library.read, READ | READ_DIR)
    rights |= dict.fromkeys([f"/dev/{name}" for name in DEVICES], READ | WRITE)
    rights[scratch] = OWN
    for path, access in rights.items():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            _allow(fd, path, access & files)
    return fd


def restrict_tests(scratch: str) -> None:
    """From here on this process, which runs tests, opens only what a program may open, whatever
    file a program names to them. OSError without Landlock."""
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
    libraries = re.findall(r"\s(/\S+\.so[\w.]*)$", maps, re.M)
    named = {os.path.dirname(path) for path in (*libraries, os.__file__)}
    named.update(filter(os.path.isdir, sys.path))
    paths = named | set(map(os.path.realpath, named)) | {"/usr/share/zoneinfo"}

    def is_inner(path: str) -> bool:
        return any(path.startswith(other + "/") for other in paths)

    return sorted(path for path in paths if not is_inner(path))


class Library(NamedTuple):
    """Paths that a program may read, and folders that it may only list."""

    read: list[str]
    listed: list[str]

    def add(self, path: str, foreign: list[str]) -> None:
        """Add a path without the folders `foreign`."""
        below = [folder for folder in foreign if folder.startswith(path + "/")]
        if below:  # a rule for the folder would cover all of it
            self.listed.append(path)
            for entry in os.scandir(path):
                self.add(entry.path, below)
        elif path not in foreign:
            self.read.append(path)


def readable() -> Library:
    """The interpreter's library without installed packages."""
    library = Library([], [])
    for folder in folders():
        found = [
            path
            for name in FOREIGN
            for path in (*Path(folder).glob(name), *Path(folder).glob(f"python*/{name}"))
        ]
        library.add(folder, [str(path) for path in found])
    return library


def step_down(scratch: str) -> None:
    """Change from root to an ordinary user, who gets the folder `scratch`, if that user can
    read the library. Otherwise root without capabilities remains, and Landlock allows it only
    the library."""
    if os.getuid() or not all(map(_open_to_all, [*folders(), os.path.dirname(scratch)])):
        return
    with contextlib.suppress(PermissionError):  # in a container root may lack the right
        os.setgroups([])
        os.chown(scratch, NOBODY, NOBODY)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # a change of user makes a process undumpable, and its /proc root's
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _open_to_all(folder: str) -> bool:
    parts = [Path(folder), *Path(folder).parents]
    return not os.path.exists(folder) or all(part.stat().st_mode & stat.S_IXOTH for part in parts)
