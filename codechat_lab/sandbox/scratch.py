"""The private folder in which programs may write, of one judge. It is empty before each program
and after it.

Landlock lets a program write there and nowhere else. No right to mount is needed, so the kernel
limits only the size of one file; the zygote looks at the whole every few milliseconds and ends
a program that holds more than SIZE_MB or ENTRIES there. Deleted files that are still open or
mapped count too."""

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from codechat_lab.sandbox import kernel
from codechat_lab.sandbox.kernel import NOBODY

# of a program
SIZE_MB = 64
ENTRIES = 1000
FREE_MB = 512  # a file system with less is not used
PREFIX = "codechat-program-"
PLACES = ("/dev/shm", "")  # memory first; "" is the usual folder for temporary files
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """A folder, and a lock on it that its judge and its zygote, which ends after its programs,
    hold while they live."""

    def __init__(self) -> None:
        """OSError where there is no place for it. Removes what ended judges have left."""
        parent = _place()
        _remove_left_over(parent)
        new = tempfile.mkdtemp(prefix="codechat-new-", dir=parent)
        self.lock = os.open(new, DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        # Only now has it the name of those that are removed when they are not locked.
        self.path = f"{parent}/{PREFIX}{new.rpartition('-')[2]}"
        os.rename(new, self.path)

    def empty(self) -> None:
        empty(self.lock)


def _place() -> str:
    for place in PLACES:
        with contextlib.suppress(OSError):
            parent = place or tempfile.gettempdir()
            space = os.statvfs(parent)
            if (
                os.access(parent, os.W_OK | os.X_OK)
                and space.f_bavail * space.f_frsize >= FREE_MB << 20
            ):
                return parent
    required = f"a writable folder with {FREE_MB} MiB free"
    raise OSError(
        errno.ENOSPC,
        f"neither /dev/shm nor the one for temporary files is {required}; set TMPDIR to one",
    )


def _remove_left_over(parent: str) -> None:
    """Remove the folders of judges whose trainer was killed."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        remove(path, wait_s=0)


def remove(path: str | Path, wait_s: float) -> None:
    """Remove a judge's folder, as soon as the judge and its zygote have ended: they hold its
    lock."""
    end = time.monotonic() + wait_s
    with contextlib.suppress(OSError):  # it is gone, or of another user
        fd = os.open(path, DIRECTORY)
        try:
            while not _locked(fd):
                if time.monotonic() >= end:
                    return
                time.sleep(0.002)
            if os.fstat(fd).st_uid in (os.getuid(), NOBODY):
                empty(fd)
                os.rmdir(path)
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def empty(top: int) -> None:
    """Remove all that is in the folder of this descriptor. No program may run in it meanwhile.

    What a folder holds is moved up first, so that no depth and no length of a path stops it. No
    link is followed."""
    unique = (f"{time.monotonic_ns()}-{number}" for number in itertools.count())
    while names := os.listdir(top):
        for name in names:
            try:
                os.unlink(name, dir_fd=top)
            except IsADirectoryError:
                _move_up(name, top, unique)
                os.rmdir(name, dir_fd=top)


def _move_up(name: str, top: int, unique: Iterator[str]) -> None:
    """Move what a folder holds into the folder above it, under new names."""
    inner = _opened(name, top)
    try:
        for child in os.listdir(inner):
            os.rename(child, next(unique), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)


def _opened(name: str, top: int) -> int:
    """A descriptor of the folder `name`. The program may have taken its rights away: it gets
    them back."""
    try:
        inner = os.open(name, DIRECTORY, dir_fd=top)
        if os.access(name, os.W_OK | os.X_OK, dir_fd=top):
            return inner
        os.close(inner)
    except PermissionError:
        pass
    os.chmod(name, 0o700, dir_fd=top)
    return os.open(name, DIRECTORY, dir_fd=top)


# ---- the zygote's watch


def holds_too_much(path: str, pid: int) -> bool:
    """Whether a running program holds more than it may in the folder.

    Where something vanishes while it is counted, the program is stopped for a second count."""
    try:
        return _over(path, pid)
    except FileNotFoundError:
        pass
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        return _over(path, pid)
    except FileNotFoundError:  # it has ended
        return False
    finally:
        os.kill(pid, signal.SIGCONT)


def _over(path: str, pid: int) -> bool:
    """Raises FileNotFoundError for what vanishes."""
    size = 0
    entries = 0
    folders = [path]
    try:
        for folder in folders:  # grows in the loop
            with os.scandir(folder) as found:
                for entry in found:
                    entries += 1
                    if entries > ENTRIES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
        return size + _deleted_bytes(path, pid) > SIZE_MB << 20
    except FileNotFoundError:
        raise
    except OSError:  # such as a path that is too long to be looked at
        return True


def _deleted_bytes(path: str, pid: int) -> int:
    """Bytes of deleted files of the folder that the program still holds: those that it has
    open, and the most that those which it has mapped may have."""
    device = os.stat(path).st_dev
    size = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        found = os.stat(f"/proc/{pid}/fd/{number}")
        if found.st_dev == device and found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
            size += found.st_blocks * 512
    mapped = set()
    with open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            if path in line and line.endswith("(deleted)\n"):
                mapped.add(line.split()[4])  # its inode
    return size + len(mapped) * (kernel.FILE_MB << 20)
