"""The judge's side of its zygote: processes for programs. The next one starts while the current one is in use.

Levels: landlock (Landlock, seccomp and limits: no writes, and reads only of the interpreter's library), and none (limits
only, for trusted programs).
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from codechat.sandbox import codec

ROOT = str(Path(__file__).resolve().parents[2])
FLAGS = ("-s", "-S", "-P", "-W", "ignore")  # no installed packages, nothing from the current folder
ANSWER_S = 30.0  # a slower zygote counts as stuck


class NurseryError(RuntimeError):
    """The zygote did not start, or is stuck."""


def start_python(module: str, *words: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """(process, socket to it) of a fresh interpreter that runs `codechat.sandbox.MODULE`.main(socket, *words), with nothing of
    the trainer's environment except the path of the interpreter's libraries."""
    ours, theirs = socket.socketpair()
    code = (
        f"import sys, socket; sys.path.insert(0, {ROOT!r}); from codechat.sandbox import {module}; sys.path.pop(0); "
        f"{module}.main(socket.socket(fileno={theirs.fileno()}), *{words!r})"
    )
    flags = (*FLAGS, "-B") if sys.dont_write_bytecode else FLAGS  # PYTHONDONTWRITEBYTECODE is not in its environment
    kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            pass_fds=[theirs.fileno()],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
            env=kept | {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
        )
    return process, ours


class Nursery:
    """Starts a zygote. NurseryError names the layer that failed."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.start()

    def start(self) -> None:
        self.process, self.control = start_python("zygote", self.level)
        self.control.settimeout(ANSWER_S)
        self.asked, self.spare = False, None
        try:
            problem = json.loads(codec.receive(self.control, 4096)).get("error")
        except OSError as error:
            problem = f"the zygote did not start ({error})"
        if problem:
            self.close()
            raise NurseryError(problem)

    def take(self) -> tuple[int, socket.socket]:
        """(pid, socket) of a process that waits for a program. The next one starts meanwhile."""
        try:
            self._ask_ahead()
            pid, channel = self._collect()
            self.spare = None
            self._ask_ahead()
        except OSError as error:
            raise NurseryError(f"the zygote makes no process ({error})") from None
        return pid, channel

    def end(self, pid: int) -> None:
        """End a process that was taken. After the return nothing of it is left."""
        try:
            self._collect()
            self.control.sendall(codec.END + pid.to_bytes(4, "big"))
            ended = self.control.recv(1) == codec.ENDED
        except (OSError, NurseryError):
            ended = False
        if not ended:
            self.close()
            self.start()

    def _ask_ahead(self) -> None:
        if not self.asked and self.spare is None:
            self.control.sendall(codec.FORK)
            self.asked = True

    def _collect(self) -> tuple[int, socket.socket]:
        if self.asked:
            name, fds, _, _ = socket.recv_fds(self.control, 4, 1)
            if len(name) != 4 or len(fds) != 1:
                raise NurseryError("the zygote has gone")
            self.asked, self.spare = False, (int.from_bytes(name, "big"), socket.socket(fileno=fds[0]))
        return self.spare

    def close(self) -> None:
        """End the zygote and all its children."""
        self.control.close()
        if self.spare:
            self.spare[1].close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.process.wait(5)
                return
            except subprocess.TimeoutExpired:
                self.process.send_signal(number)
        self.process.wait()
