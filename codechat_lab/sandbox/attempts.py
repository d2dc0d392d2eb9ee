"""Actions that must be stopped, as a program for the sandbox: `codechat sandbox check` sends
this file as text.

Each function gives "done" where nothing stops it, and has no effect even then."""

import _socket
import ctypes
import errno
import os

libc = ctypes.CDLL(None, use_errno=True)


def read_a_file_of_the_host() -> str:
    with open("/etc/passwd") as file:
        return file.read(1) and "done"


def read_another_process() -> str:
    with open(f"/proc/{os.getppid() or 1}/environ") as file:
        return file.read(1) and "done"


def write_a_file() -> str:
    os.open("/tmp", os.O_TMPFILE | os.O_WRONLY)
    return "done"


def open_a_connection() -> str:
    _socket.socket()
    return "done"


def start_a_process() -> str:
    if os.fork() == 0:
        os._exit(0)
    return "done"


def execute_a_program() -> str:
    try:
        os.execv("/nonexistent", ["x"])
    except FileNotFoundError:  # the kernel has looked for it: only the file stops it
        return "done"
    return "done"


def signal_its_parent() -> str:
    os.kill(os.getppid(), 0)
    return "done"


def trace_its_parent() -> str:
    seize = 0x4206
    return _unless_denied(libc.ptrace(seize, os.getppid(), 0, 0))


def mount() -> str:
    return _unless_denied(libc.mount(b"x", b"/nonexistent", b"x", 0, 0))


def become_another_user() -> str:
    os.setuid(0)
    return "done"


def make_a_namespace() -> str:
    new_user = 0x10000000
    return _unless_denied(libc.unshare(new_user))


def take_more_memory_than_it_has() -> str:
    return "done" if bytes(8 << 30) else "stopped"


def _unless_denied(result: int) -> str:
    """Another error than EPERM is the call's own: it was let through."""
    return "stopped" if ctypes.get_errno() == errno.EPERM else "done"


ACTIONS = {
    action.__name__.replace("_", " "): action
    for action in (
        read_a_file_of_the_host,
        read_another_process,
        write_a_file,
        open_a_connection,
        start_a_process,
        execute_a_program,
        signal_its_parent,
        trace_its_parent,
        mount,
        become_another_user,
        make_a_namespace,
        take_more_memory_than_it_has,
    )
}


def attempt(action: str) -> str:
    """ "stopped" or "done"."""
    try:
        return ACTIONS[action]()
    except (OSError, MemoryError):
        return "stopped"
