"""A time limit on trusted code that waits for an untrusted program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

TOTAL = 3  # time limit of a whole program, in limits of one test
OUT_OF_TIME = "out of time"
AGAIN_S = 0.1  # the interruption repeats, for a test that swallows it

_rung = False


class OutOfTime(BaseException):
    """The time limit was reached. `except Exception` in a test does not catch it."""


def _ring(number: int, frame: FrameType | None) -> None:
    global _rung
    _rung = True
    raise OutOfTime


def listen() -> None:
    """Install the handler: once per process, in its main thread, before `at_most`."""
    signal.signal(signal.SIGALRM, _ring)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body after `seconds`, and at its end if the body swallowed it. Main thread only."""
    global _rung
    _rung = False
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _rung:
        raise OutOfTime
