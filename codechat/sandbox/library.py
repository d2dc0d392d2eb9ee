"""The folders of the running interpreter that a program may read, and the user that it runs as."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

from codechat.sandbox import kernel

NOBODY = 65534  # the user that root turns into
CAP_SETGID, CAP_SETUID = 6, 7
FOREIGN = ("site-packages", "dist-packages")  # installed packages may hold a benchmark's answers


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


def step_down() -> None:
    """Change from root to an ordinary user, if that user can read the library. Otherwise root without capabilities
    remains, and Landlock allows it only the library."""
    if os.getuid() != 0 or not _holds(CAP_SETUID, CAP_SETGID) or not all(map(_open_to_all, folders())):
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # a change of user makes a process undumpable, and its /proc root's


def _holds(*capabilities: int) -> bool:
    """Whether this process has these effective capabilities."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(effective >> c & 1 for c in capabilities)


def _open_to_all(folder: str) -> bool:
    parts = (folder, *map(str, Path(folder).parents))
    return not os.path.exists(folder) or all(os.stat(f).st_mode & stat.S_IXOTH for f in parts)
