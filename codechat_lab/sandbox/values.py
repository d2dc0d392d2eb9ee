"""Values of an isolated program's function, where no test decides: an environment whose world is
foreign code.

Each call has a process of its own, forked from a zygote, so nothing is left of the one before.
What goes in and what comes back is text."""

import atexit
import contextlib
import functools
import os
import socket

from codechat.core.errors import RunError
from codechat_lab.sandbox import scratch
from codechat_lab.sandbox.handles import Lost, Session
from codechat_lab.sandbox.judge import NotStarted, Zygote
from codechat_lab.sandbox.pool import END_S, MEMORY_MB, TIMEOUT_S, choose

LONGEST = 16 << 20  # bytes of an answer


class ProgramFailed(RunError):
    """The program raised, ended, was out of time or answered something else than a text."""


class Worker:
    """A zygote that gives a process for each call. It ends with `close`, or with the thread that
    started it."""

    def __init__(self, level: str) -> None:
        self.owner = os.getpid()
        self.scratch = scratch.Scratch()
        self.zygote = Zygote(level, self.scratch)

    def call(self, code: str, function: str, text: str, timeout_s: float, memory_mb: int) -> str:
        """What the function of the program returns for a text."""
        channel = self.zygote.take()
        with channel:
            channel.settimeout(timeout_s)
            try:
                return _answer(channel, code, function, text, timeout_s, memory_mb)
            except Lost as error:
                raise ProgramFailed(f"the program was lost: {error}") from None
            finally:
                self.zygote.end()

    def close(self) -> None:
        self.zygote.close()
        os.close(self.scratch.lock)
        scratch.remove(self.scratch.path, wait_s=END_S)


def _answer(
    channel: socket.socket, code: str, function: str, text: str, timeout_s: float, memory_mb: int
) -> str:
    session = Session(channel, LONGEST)
    try:
        defined = session.request("load", code, [function], "", memory_mb, timeout_s)
        answer = dict(defined)[function](text)
    # the program may raise anything, and answer in any shape
    except Exception as error:
        raise ProgramFailed(f"the program failed: {type(error).__name__}: {error}") from None
    if type(answer) is not str:
        raise ProgramFailed(f"the program answered {type(answer).__name__}; expected a text")
    return answer


@functools.cache
def _worker(level: str) -> list[Worker]:
    """The worker of this process, replaced where it was lost."""
    kept: list[Worker] = []
    atexit.register(_close, kept)
    return kept


def _close(kept: list[Worker]) -> None:
    for worker in kept:
        if worker.owner == os.getpid():  # in a fork it is not ours
            with contextlib.suppress(OSError):
                worker.close()
    kept.clear()


def value_of(
    code: str,
    function: str,
    text: str,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
) -> str:
    """What a function of the program, which is defined by `code`, returns for a text.

    ProgramFailed; SandboxUnavailable where the machine does not isolate programs."""
    level = choose("auto")
    kept = _worker(level)
    if kept and kept[0].owner != os.getpid():
        kept.clear()
    for _ in range(2):
        if not kept:
            kept.append(Worker(level))
        try:
            return kept[0].call(code, function, text, timeout_s, memory_mb)
        except NotStarted:  # its thread has ended, or the machine has ended it
            _close(kept)
    raise ProgramFailed("the sandbox was lost twice; see `codechat sandbox check`")
