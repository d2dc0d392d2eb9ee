"""Whether the process that wrote something still lives, who may write, and how to ask this process to stop."""

from __future__ import annotations

import fcntl
import platform
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any


def process_start(pid: int) -> str | None:
    """The kernel's start time of a live process; None where it is gone, a zombie, or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def alive(status: Mapping[str, Any]) -> bool:
    if status.get("host") != platform.node() or not Path("/proc/self/stat").exists():
        return True  # cannot be known from here
    return status.get("pid_start") is not None and status["pid_start"] == process_start(status["pid"])


def descendants(pid: int) -> list[int]:
    """Processes below a process, nearest first; empty where there is no /proc. torchrun gives each rank a session of its own, so that no
    group holds them all."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        below.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:  # grows while it is walked
        found += below.get(one, [])
    return found[1:]


_held: dict[Path, IO[str]] = {}


def lock(path: Path) -> bool:
    """Hold the file `path` for this process until `unlock` or its end, however it ends; False where another process holds it.

    A record lock: children do not inherit it. Taken again by its holder it stays."""
    if path in _held:
        return True
    file = open(path, "a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _held[path] = file
    return True


def unlock(path: Path) -> None:
    if file := _held.pop(path, None):
        file.close()


def lock_moved(old: Path, new: Path) -> None:
    """The locked file has another name now; what was held under that name is let go."""
    unlock(new)
    if file := _held.pop(old, None):
        _held[new] = file


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into `requested`, so that a loop can save and leave.

    A second Ctrl-C interrupts at once. Outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[int, Any] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        print(
            "\nstopping after this step, with a checkpoint; Ctrl-C again stops at once",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._former[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: signals go elsewhere
                break
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
