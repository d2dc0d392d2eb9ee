"""Namespaces: a process sees an almost empty file tree, no network and no other process.

The tree is a read-only tmpfs with the interpreter's library (without site-packages, which may hold a benchmark's
answers), the shared libraries that it loads, four harmless devices and a small writable /tmp. There is no /proc. Where
the interpreter itself is below /tmp, its folder there is read-only.
Nothing changes outside the namespaces.

Root builds the tree with its own rights, becomes an ordinary user and then makes a user namespace. An ordinary user
makes the user namespace first and is root inside it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from codechat.sandbox import kernel

NOBODY = 65534  # the user that root turns into
INSIDE = 1000  # a program's own user id inside; not 0, which would mean rights
TMP_MB, TMP_ENTRIES = 64, 4096
CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21
DEVICES = ("null", "zero", "random", "urandom")
FOREIGN = ("site-packages", "dist-packages")
STAGE = "/proc"  # exists everywhere, and the new tree needs nothing below it
OTHERS = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def holds(*capabilities: int) -> bool:
    """Whether this process has these effective capabilities."""
    status = Path("/proc/self/status").read_text()
    effective = int(re.search(r"^CapEff:\s*(\w+)", status, re.M)[1], 16)
    return all(effective >> c & 1 for c in capabilities)


def library_folders() -> list[str]:
    """Folders of the running interpreter's standard library and of the shared libraries that it has loaded."""
    maps = Path("/proc/self/maps").read_text()
    loaded = {os.path.dirname(path) for path in re.findall(r"\s(/\S+\.so[\w.]*)$", maps, re.M)}
    standard = {path for path in sys.path if os.path.isdir(path)} | {os.path.dirname(os.__file__)}
    found = {p for path in loaded | standard for p in (path, os.path.realpath(path))}
    return sorted(p for p in found if not any(p.startswith(q + "/") for q in found))


def foreign_below(folder: str) -> list[str]:
    """Folders of installed packages in a library folder."""
    return sorted(
        str(path) for name in FOREIGN for pattern in (name, f"python*/{name}") for path in Path(folder).glob(pattern)
    )


def enter() -> None:
    """Move this process into its own namespaces, all but the process namespace. OSError names the step."""
    own_proc = os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)
    user, group = os.getuid(), os.getgid()
    try:
        if user == 0 and holds(CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID):
            kernel.call("unshare", OTHERS)
            build_tree()
            become_nobody()
            kernel.call("unshare", kernel.CLONE_NEWUSER)
            _map_user(own_proc, NOBODY, NOBODY)
        else:
            kernel.call("unshare", kernel.CLONE_NEWUSER | OTHERS)
            _map_user(own_proc, user, group)
            build_tree()
    finally:
        os.close(own_proc)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # A change of user makes a process undumpable, and root then owns its uid_map.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _map_user(own_proc: int, user: int, group: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE} {user} 1"),
        ("gid_map", f"{INSIDE} {group} 1"),
    ):
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=own_proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def build_tree() -> None:
    """Build the new file tree and enter it."""
    folders = library_folders()
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", STAGE, "tmpfs", quiet, "size=1m,nr_inodes=2048,mode=755")
    temporary = [folder for folder in folders if folder.startswith("/tmp/")]
    for folder in [*(f for f in folders if f not in temporary), *_present("/usr/share/zoneinfo")]:
        _bind(folder, quiet)
    for path in ("/lib", "/lib64"):  # an absolute path of a library may use these links
        if os.path.islink(path) and not os.path.lexists(STAGE + path):
            os.symlink(os.readlink(path), STAGE + path)
    _add_devices()
    os.makedirs(STAGE + "/tmp")
    kernel.add_mount_flags(STAGE, kernel.ATTR_RDONLY)
    kernel.mount("tmpfs", STAGE + "/tmp", "tmpfs", quiet, f"size={TMP_MB}m,nr_inodes={TMP_ENTRIES},mode=1777")
    for folder in temporary:  # what is mounted on /tmp hides what was there
        _bind(folder, quiet)
    for name in os.listdir(STAGE + "/tmp"):
        _make_read_only(f"{STAGE}/tmp/{name}")
    os.chdir(STAGE)
    kernel.call("pivot_root", b".", b".")
    kernel.call("umount2", b".", kernel.MNT_DETACH)
    os.chdir("/")
    name = ctypes.create_string_buffer(b"sandbox")
    kernel.libc.sethostname(name, 7)


def _present(*paths: str) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


def _bind(folder: str, quiet: int) -> None:
    target = STAGE + folder
    os.makedirs(target, exist_ok=True)
    kernel.mount(folder, target, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.add_mount_flags(target, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
    for path in foreign_below(folder):
        kernel.mount("tmpfs", STAGE + path, "tmpfs", quiet | kernel.MS_RDONLY, "size=4k,nr_inodes=2")


def _make_read_only(folder: str) -> None:
    """A folder of the new tree that holds mounts: nothing can be added beside them."""
    kernel.mount(folder, folder, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.add_mount_flags(folder, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _add_devices() -> None:
    os.mkdir(STAGE + "/dev")
    for name in DEVICES:
        target = f"{STAGE}/dev/{name}"
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o666))
        kernel.mount(f"/dev/{name}", target, flags=kernel.MS_BIND)


def enter_process_namespace() -> None:
    """Continue as the first process of a new process namespace. The old process waits for it and ends.

    The new process dies with the old one, and the old one ends the new one on SIGTERM."""
    kernel.call("unshare", kernel.CLONE_NEWPID)
    inner = os.fork()
    if inner == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(inner, signal.SIGKILL))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    # Only the inner process may hold the sockets: others see its end by theirs.
    os.closerange(0, 1024)
    os.waitpid(inner, 0)
    os._exit(0)


def isolated_fork(own_pidfd: int) -> Callable[[], int]:
    """A fork() whose child is the first process of its own process namespace. own_pidfd: a descriptor of the calling
    process, which returns to its namespace for the next fork."""
    apart = [kernel.prepared("unshare", kernel.CLONE_NEWPID)]
    back = [kernel.prepared("setns", own_pidfd, kernel.CLONE_NEWPID)]

    def fork() -> int:
        kernel.carry_out(apart)
        child = -1
        try:
            child = kernel.fork()
        finally:
            if child:
                kernel.carry_out(back)
        return child

    return fork
