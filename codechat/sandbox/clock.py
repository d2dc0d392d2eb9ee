"""A time limit on trusted code that waits for an untrusted program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

TOTAL = 3  # a program as a whole gets this many times what one test gets
OUT_OF_TIME = "out of time"
AGAIN_S = 0.1  # a test that swallows the interruption meets it again

_rung = False


class OutOfTime(BaseException):
    """Time is up. No `except Exception` of a test catches it."""


def _ring(number: int, frame: FrameType | None) -> None:
    global _rung
    _rung = True
    raise OutOfTime


def listen() -> None:
    """Once for a process, in its main thread, before `at_most`."""
    signal.signal(signal.SIGALRM, _ring)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """OutOfTime in the body after so many seconds, and at its end where the body swallowed it. Main thread only."""
    global _rung
    _rung = False
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _rung:
        raise OutOfTime
