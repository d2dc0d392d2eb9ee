"""Processes: whether the writer of a file still lives, locks on files, a signal that asks this
process to stop, work on all cores, and how long the threads of OpenMP poll.

The lock is a POSIX record lock on a file that is removed with it. Children do not inherit it,
so that kill -9 of a trainer frees it although its workers live on; and it names its holder.
`filelock` has neither, leaves its files behind, and takes 0.1 s to import.

A free lock means that its process is gone. That holds on every file system whose locks work
between the hosts that
share it: local disks, NFS with its lock service, GPFS, Lustre mounted with `flock`. Where locks
hold within each host only (Lustre mounted with `localflock`), a run on
another host looks killed: give each host a root of its own.
"""

import fcntl
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


def alive(process: Mapping[str, Any]) -> bool:
    """Whether the process of a status (pid, pid_start) lives on this machine. Its host name is
    not asked: containers are renamed."""
    start = process.get("pid_start")
    pid = process.get("pid")
    return start is not None and pid is not None and start == process_start(pid)


def descendants(pid: int) -> list[int]:
    """All processes below a process. torchrun gives each rank a session of its own, so no group
    holds them all."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


# ---- locks

_held: dict[Path, IO[str]] = {}
# closing any descriptor of a file drops the process's own lock on it, so threads take turns
_changing = threading.RLock()
# a forked child has the descriptors and not the locks
os.register_at_fork(after_in_child=_held.clear)


def lock(path: Path) -> bool:
    """Lock the file `path` for this process until `unlock` or its end, kill -9 included; False
    where another process holds it.

    Children do not inherit the lock. Locking again what this process holds changes nothing.
    OSError where the file system has no locks."""
    path = path.resolve()
    with _changing:
        while path not in _held:
            file = open(path, "a", encoding="utf-8")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES
                file.close()
                return False
            except OSError:
                file.close()
                raise
            # the former holder may have removed the file between opening and locking: then
            # another process can lock a new one
            if _is_at(file, path):
                _held[path] = file
            else:
                file.close()
        return True


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that is at `path` now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def unlock(path: Path) -> None:
    """Give back what `lock` took, and remove the file."""
    path = path.resolve()
    with _changing:
        file = _held.pop(path, None)
        if file:
            with suppress(OSError):  # a folder that cannot be written any more
                path.unlink()
            file.close()


def holder(path: Path) -> int | None:
    """The process that holds the lock on `path`; 0 where it cannot be seen from here, None
    where the lock is free. Takes no lock."""
    path = path.resolve()
    with _changing:
        if path in _held:
            return os.getpid()
        try:
            with open(path, "rb") as file:
                # struct flock of Linux: type, whence, start, length, pid
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind, _, _, _, pid = struct.unpack(
                    "hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked)
                )
        except FileNotFoundError:
            return None
        except OSError:  # it may be held: nothing is known
            return 0
    return None if kind == fcntl.F_UNLCK else max(0, pid)


_turns: dict[Path, threading.Lock] = {}


@contextmanager
def alone(path: Path, wait: bool = True) -> Iterator[bool]:
    """Within the block no other process and no other thread is in a block of the same `path`, a
    file that is removed afterwards.

    Waits for its turn; with wait=False gives False, without the lock, where somebody else has
    it."""
    turn = _turns.setdefault(path.resolve(), threading.Lock())
    if not turn.acquire(blocking=wait):
        yield False
        return
    try:
        while not (mine := lock(path)) and wait:
            time.sleep(0.01)
        yield mine
    finally:
        unlock(path)
        turn.release()


# ---- stopping

stop = threading.Event()  # the loop that runs, or ran last, was asked to stop


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block the first Ctrl-C or SIGTERM sets `stop`, so that a loop can save and
    leave. A second Ctrl-C raises KeyboardInterrupt."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        print(
            "\nstopping after this step, with a checkpoint; Ctrl-C again stops at once",
            file=sys.stderr,
            flush=True,
        )

    stop.clear()
    # only there can signals be handled
    here = threading.current_thread() is threading.main_thread()
    former = {
        number: signal.signal(number, on_signal)
        for number in (signal.SIGINT, signal.SIGTERM)
        if here
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def on_all_cores(one: Callable[[Any], Any], items: Sequence[Any], chunk: int = 1) -> Iterator[Any]:
    """`one` of each item, in order: many in one process per core, `chunk` at a time. Raises
    what `one` raises; only its results are pickled."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cores < 2 or len(items) < 6 * chunk:
        return map(one, items)
    from concurrent.futures import ProcessPoolExecutor  # not above: it is slow to import
    from multiprocessing import get_context

    # a fork has the items
    with ProcessPoolExecutor(cores, get_context("fork"), _begin, (one, items, chunk)) as pool:
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


# ---- OpenMP: polls of a thread before it sleeps. libgomp reads them once, when torch is imported.

# libgomp's own 300,000 costs a third of a step beside other work, and gains nothing alone
POLLS_ALONE = "10000"
# beside other work a step takes twice as long with 10,000 (docs/experiments/speed-on-a-cpu.md)
POLLS_SHARED = "100"


def others_compute() -> bool:
    """Whether other processes now keep cores busy that this process's threads want."""
    # of "0.52 0.58 0.59 3/612 4242"
    running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    others = int(running) - 1
    return others + len(os.sched_getaffinity(0)) > (os.cpu_count() or 1)


def set_polls(*, shared: bool) -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user did. No effect once
    torch is loaded."""
    os.environ.setdefault("GOMP_SPINCOUNT", POLLS_SHARED if shared else POLLS_ALONE)
