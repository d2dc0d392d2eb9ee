"""Values of an isolated program's function, where no test decides: an environment whose world is
foreign code.

Each call has a process of its own, forked from a zygote, so nothing is left of the one before.
What goes in and what comes back is text."""

import functools
import os
import socket
import weakref

from codechat.core.errors import RunError
from codechat_lab.sandbox import scratch
from codechat_lab.sandbox.handles import Lost, Session
from codechat_lab.sandbox.judge import Zygote
from codechat_lab.sandbox.pool import END_S, MEMORY_MB, TIMEOUT_S, SandboxUnavailable, choose

LONGEST = 16 << 20  # bytes of an answer


class ProgramFailed(RunError):
    """The program raised, ended, was out of time or answered something else than a text."""


class Processes:
    """Gives one isolated process at a time. Its zygote ends with this object, with the thread that
    needed it first, or with the trainer."""

    def __init__(self) -> None:
        """SandboxUnavailable where the machine does not isolate programs."""
        self.level = choose("auto")
        self.zygote: Zygote | None = None
        self.owner = 0  # process id: a fork must not use the zygote of its parent
        self.channel: socket.socket | None = None  # of the process that runs now

    def begin(self) -> socket.socket:
        """The socket of a new process. The former one has ended; a zygote that has gone is
        replaced."""
        try:
            if self.zygote and self.owner == os.getpid():
                self.end()
                self.channel = self.zygote.take()
                return self.channel
        except OSError:  # it has gone
            pass
        try:
            place = scratch.Scratch()
            self.zygote = Zygote(self.level, place)
        except OSError as error:
            raise SandboxUnavailable(
                f"isolation was lost: {error}; see `codechat sandbox check`"
            ) from None
        self.owner = os.getpid()
        weakref.finalize(self, _close, self.zygote, self.owner)
        self.channel = self.zygote.take()
        return self.channel

    def end(self) -> None:
        """End the process that runs now, if there is one."""
        if self.channel and self.zygote:
            channel = self.channel
            self.channel = None
            with channel:  # closed afterwards: the process would exit by itself once it is closed
                self.zygote.end()


def _close(zygote: Zygote, owner: int) -> None:
    if os.getpid() == owner:
        zygote.close()
        os.close(zygote.scratch.lock)
        scratch.remove(zygote.scratch.path, wait_s=END_S)


@functools.cache
def _shared() -> Processes:
    return Processes()


def value_of(code: str, function: str, text: str, timeout_s: float = TIMEOUT_S) -> str:
    """What a function of the program, which is defined by `code`, returns for a text.

    ProgramFailed; SandboxUnavailable where the machine does not isolate programs."""
    processes = _shared()
    channel = processes.begin()
    channel.settimeout(timeout_s)
    session = Session(channel, LONGEST)
    try:
        defined = session.request("load", code, [function], "", MEMORY_MB, timeout_s)
        answer = dict(defined)[function](text)
    except Lost as error:
        raise ProgramFailed(f"the program was lost: {error}") from None
    # the program may raise anything, and answer in any shape
    except Exception as error:
        raise ProgramFailed(f"the program failed: {type(error).__name__}: {error}") from None
    finally:
        processes.end()
    if type(answer) is not str:
        raise ProgramFailed(f"the program answered {type(answer).__name__}; expected a text")
    return answer
