"""Processes: whether the writer of a file still lives, locks on files, a signal that asks this process to stop, and work on all cores.

The lock is a POSIX record lock rather than `filelock`, which takes 0.2 s to import and offers nothing more here.
"""

import fcntl
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import IO, Any


def process_start(pid: int) -> str | None:
    """When a live process began, in clock ticks since boot; None where it is gone or a zombie.

    Ticks do not move when the clock of the machine is set, unlike psutil's time."""
    import psutil  # here, since it takes 0.05 s and few commands ask

    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return str(round((process.create_time() - psutil.boot_time()) * os.sysconf("SC_CLK_TCK")))
    except (psutil.Error, ValueError, OverflowError):  # a damaged file holds any number
        return None


def alive(status: Mapping[str, Any]) -> bool:
    """Whether the process of a status (host, pid, pid_start) lives; True where that cannot be known, on another host."""
    if status.get("host") != platform.node():
        return True
    start, pid = status.get("pid_start"), status.get("pid")
    return start is not None and pid is not None and start == process_start(pid)


def descendants(pid: int) -> list[int]:
    """All processes below a process. torchrun gives each rank a session of its own, so no group holds them all."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


_held: dict[Path, IO[str]] = {}


def lock(path: Path) -> bool:
    """Lock the file `path` for this process until `unlock` or its end, kill -9 included; False where another process holds it.

    Children do not inherit the lock. Locking again what this process holds changes nothing."""
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


stop = threading.Event()  # the loop that runs, or ran last, was asked to stop


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block the first Ctrl-C or SIGTERM sets `stop`, so that a loop can save and leave. A second Ctrl-C raises KeyboardInterrupt."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        print("\nstopping after this step, with a checkpoint; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    stop.clear()
    here = threading.current_thread() is threading.main_thread()  # only there can signals be handled
    former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM) if here}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def on_all_cores(one: Callable[[Any], Any], items: Sequence[Any], chunk: int = 1) -> Iterator[Any]:
    """`one` of each item, in order: many in one process per core, `chunk` at a time. Raises what `one` raises; only its results are pickled."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cores < 2 or len(items) < 6 * chunk:
        return map(one, items)
    from concurrent.futures import ProcessPoolExecutor  # not above: it is slow to import
    from multiprocessing import get_context

    with ProcessPoolExecutor(cores, get_context("fork"), _begin, (one, items, chunk)) as pool:  # a fork has the items
        return chain.from_iterable(list(pool.map(_some, range(0, len(items), chunk))))


_work: tuple[Any, ...]  # one, items, chunk of a process that `on_all_cores` began


def _begin(*work: Any) -> None:
    """An interrupt is for the process that began this one."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work = work


def _some(start: int) -> list[Any]:
    one, items, chunk = _work
    return list(map(one, items[start : start + chunk]))
