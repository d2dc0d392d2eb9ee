"""Tries each layer in its own child and reports over a socket. Runs in its own process, because a trainer must not be
forked."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from collections.abc import Callable

from codechat.sandbox import kernel, landlock, namespaces, seccomp, wire


def main(out: socket.socket) -> None:
    rows = [[name, *_in_child(step)] for name, step in STEPS.items()]
    wire.send(out, json.dumps(rows).encode())


def _in_child(step: Callable[[], str]) -> tuple[bool, str]:
    """(holds, detail) of a step that may change its process permanently."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = "+" + step()
        except OSError as error:
            text = f"-{error.filename or 'call'}: {error.strerror}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as f:
        text = f.read()
    os.waitpid(pid, 0)
    return text.startswith("+"), text[1:] or "it ended the process"


def _namespace(flag: int) -> Callable[[], str]:
    def step() -> str:
        try:
            kernel.call("unshare", kernel.CLONE_NEWUSER | flag)
            return "within a user namespace"
        except OSError:
            kernel.call("unshare", flag)
            return "with this user's own rights"

    return step


def _tree() -> str:
    namespaces.enter()
    return ", ".join(sorted(os.listdir("/")))


def _landlock() -> str:
    if not (abi := landlock.abi()):
        raise OSError(errno.ENOSYS, "the kernel has none, or it is not switched on", "landlock")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.carry_out([landlock.restrict(landlock.ruleset([], [], [], []))])
    try:
        os.listdir("/")
    except PermissionError:
        return f"version {abi}"
    raise OSError(errno.EINVAL, "it restricts nothing", "landlock")


def _seccomp() -> str:
    if missing := seccomp.supported():
        raise OSError(errno.ENOSYS, missing, "seccomp")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    filters = seccomp.shared_program(own_tree=True), seccomp.own_program(os.getpid())
    kernel.carry_out([seccomp.install(steps) for steps in filters])
    try:
        socket.socket()
    except PermissionError:
        return "system calls are filtered"
    raise OSError(errno.EINVAL, "it filters nothing", "seccomp")


def _limits() -> str:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    try:
        bytearray(2 << 30)
    except MemoryError:
        return "addresses are limited"
    raise OSError(errno.EINVAL, "addresses are not limited", "limits")


STEPS: dict[str, Callable[[], str]] = {
    "user namespace": lambda: _namespace(kernel.CLONE_NEWUSER)(),
    "mount namespace": _namespace(kernel.CLONE_NEWNS),
    "network namespace": _namespace(kernel.CLONE_NEWNET),
    "process namespace": _namespace(kernel.CLONE_NEWPID),
    "ipc and host name": _namespace(kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS),
    "own file tree": _tree,
    "landlock": _landlock,
    "seccomp": _seccomp,
    "limits": _limits,
}
