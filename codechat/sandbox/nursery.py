"""The judge's side of its zygote: processes for programs. The next one starts while the current one is in use."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from codechat.sandbox import wire

ROOT = str(Path(__file__).resolve().parents[2])
FLAGS = ("-s", "-S", "-P", "-W", "ignore")  # no installed packages, nothing from the current folder
ANSWER_S = 30.0  # a slower zygote counts as stuck


class NurseryError(RuntimeError):
    """The zygote did not start, or is stuck."""


def clean_environment() -> dict[str, str]:
    """An environment with nothing of the trainer's except the path of the interpreter's libraries."""
    kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
    return kept | {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"}


def start_python(module: str, ours: socket.socket, theirs: socket.socket, *words: str) -> subprocess.Popen[bytes]:
    """Run `codechat.sandbox.MODULE`.main(socket, *words) in a fresh interpreter that holds `theirs`."""
    code = (
        f"import sys, socket; sys.path.insert(0, {ROOT!r}); from codechat.sandbox import {module}; sys.path.pop(0); "
        f"{module}.main(socket.socket(fileno={theirs.fileno()}), *{words!r})"
    )
    flags = (*FLAGS, "-B") if sys.dont_write_bytecode else FLAGS  # PYTHONDONTWRITEBYTECODE is not in its environment
    with theirs:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean_environment(),
            cwd="/",
            start_new_session=True,
        )


class Nursery:
    """Starts a zygote. NurseryError names the layer that failed."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.asked = False
        self.start()

    def start(self) -> None:
        self.control, theirs = socket.socketpair()
        self.process = start_python("zygote", self.control, theirs, self.level)
        self.control.settimeout(ANSWER_S)
        self.asked, self.spare = False, None
        try:
            built = json.loads(wire.receive(self.control, 4096))
        except OSError as error:
            self.close()
            raise NurseryError(f"the zygote did not start ({error})") from None
        if "error" in built:
            self.close()
            raise NurseryError(built["error"])

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
            if self.asked:
                self._collect()
            self.control.sendall(wire.END + pid.to_bytes(4, "big"))
            ended = self.control.recv(1) == wire.ENDED
        except (OSError, NurseryError):
            ended = False
        if not ended:
            self.close()
            self.start()

    def _ask_ahead(self) -> None:
        if not self.asked and self.spare is None:
            self.control.sendall(wire.FORK)
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
