"""Run untrusted Python whose tool calls are answered in this process, while the program runs.

    output, problem = run("print(apis.notes.list())", {"notes_list": []}, lambda name, arguments: (True, ["a", "b"]))

The program runs in the sandbox. A call leaves it as a tool's name and plain arguments. One judge per thread stays for
the next program; a judge that hangs, loses the protocol or gets no answer is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codechat.sandbox import layers, pool, wire

TIMEOUT_S = 3.0
MEMORY_MB = 128

Answer = Callable[[str, dict[str, Any]], tuple[bool, Any]]

_mine = threading.local()


def run(
    source: str,
    tools: Mapping[str, Sequence[str]],
    answer: Answer,
    *,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
    isolation: str = "auto",
) -> tuple[str, str]:
    """(printed output, reason of a failure or "").

    tools: name -> names of its parameters, in order. answer: (name, arguments) -> (True, result as JSON data) or
    (False, reason). SandboxUnavailable where the isolation is not possible."""
    job = {
        "style": "errand",
        "code": source,
        "tools": {name: list(parameters) for name, parameters in tools.items()},
        "timeout_s": timeout_s,
        "memory_mb": memory_mb,
    }
    judge = _judge(isolation)
    try:
        found = judge.ask(job | {"tests": []}, answer)
    except (TimeoutError, wire.WireError) as error:
        close()
        return "", f"the sandbox was lost ({error or 'time is up'})"
    except BaseException:  # of `answer`: the judge waits for one and would take the next program for it
        judge.interrupt()  # it reads no request to end, so `close` need not wait for it
        close()
        raise
    if "error" in found:
        close()
        raise layers.SandboxUnavailable(f"isolation was lost: {found['error']}; see `codechat sandbox check`")
    if found["waiting"]:
        close()
    return found["output"], found["problem"]


def _judge(isolation: str) -> pool.Judge:
    if getattr(_mine, "isolation", None) != isolation:
        close()
        _mine.judge, _mine.isolation = pool.Judge(layers.choose(isolation)), isolation
        atexit.register(close)
    return _mine.judge


def _forget() -> None:
    """In a fork of the trainer: the judge belongs to the parent."""
    _mine.__dict__.clear()


def close() -> None:
    """End this thread's judge. The next program gets a new one."""
    with contextlib.suppress(AttributeError):
        judge = _mine.judge
        del _mine.judge, _mine.isolation
        judge.close()


os.register_at_fork(after_in_child=_forget)
