"""Ranks that fall out of step: who failed, in which call, and where the others are.

`Watch` records every few seconds where each rank is; when a collective fails, `explained` names
ranks and lines. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch fails every collective whose
operation or shapes differ over ranks."""

import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as td

import codechat
from codechat.core.errors import RunError

PACKAGE = Path(codechat.__file__).resolve().parent
PLUMBING = f"{Path(__file__).resolve().parent}{os.sep}"  # no line of this room helps
SIGN_OF_LIFE_S = 5.0  # seconds between two notes of `Watch`


def code_digest() -> str:
    """12 hex digits of the library's sources and torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def call_site(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first (frame, line) of this project, or of a script that uses it: "pretrain.py:150 in
    train"."""
    for frame, line in frames:
        name = frame.f_code.co_filename
        installed = re.search(r"/(site-packages|lib/python[0-9.]+)/", name)
        if not (name.startswith((PLUMBING, "<")) or installed):
            return f"{Path(name).name}:{line} in {frame.f_code.co_name}"
    return "a line outside the project"


class Watch(threading.Thread):
    """A daemon that writes to the store every few seconds where the main thread of this rank is."""

    def __init__(self, store: td.Store, rank: int, size: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.store = store.clone()  # type: ignore[attr-defined]  # which torch's stubs forget; a thread needs its own
        self.rank = rank
        self.size = size
        self.main = threading.main_thread().ident or 0
        self.ended = threading.Event()

    def run(self) -> None:
        # the store is gone, and with it the ranks that read it
        with suppress(td.DistError, RuntimeError):
            while not self.ended.wait(SIGN_OF_LIFE_S):
                where = call_site(traceback.walk_stack(sys._current_frames().get(self.main)))
                text = f"rank {self.rank} (process {os.getpid()} on {platform.node()}) at {where}"
                self.store.set(f"watch/{self.rank}", json.dumps([time.time(), text]))

    def others(self) -> str:
        """Where each other rank was last seen; at most eight, those first that have been silent
        for longest."""
        seen = []
        for r in range(self.size):
            if r == self.rank:
                continue
            told = 0.0
            text = f"rank {r} never gave a sign of life"
            if self.store.check([f"watch/{r}"]):
                told, text = json.loads(self.store.get(f"watch/{r}"))
                text += f", seen {time.time() - told:.0f} s ago"
            seen.append((told, text))
        return "; ".join(text for _, text in sorted(seen)[:8])

    def stop(self) -> None:
        self.ended.set()
        self.join(timeout=2 * SIGN_OF_LIFE_S)


_watch: Watch | None = None
GROUP_FAILURE = re.compile(
    r"gloo|nccl|Connection (closed|reset|refused)|Timed "
    r"out|Broken pipe|mismatch between collectives",
    re.I,
)


def explained(error: BaseException) -> BaseException:
    """A failed collective as a RunError with this rank's call and where the others are; any
    other error as it is."""
    if _watch is None or not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return error
    if not isinstance(error, td.DistError) and not GROUP_FAILURE.search(str(error)):
        return error
    frames = list(traceback.walk_tb(error.__traceback__))
    try:
        others = _watch.others()
    except (td.DistError, RuntimeError):
        others = "the store is gone, and with it the process that held it"
    line = str(error).partition("\n")[0]
    # gloo's file and line of C++ stand in brackets before the words
    first = re.sub(r"^\[[^]]*\] *", "", line)[:200] or type(error).__name__
    call = frames[-1][0].f_code.co_name
    return RunError(
        f"rank {_watch.rank} failed in {call} at {call_site(reversed(frames))} ({first}); {others}; "
        "continue from the last checkpoint with --resume"
    )


@contextmanager
def watched(store: td.Store, rank: int, size: int) -> Iterator[None]:
    """Within the block this rank is watched; a failed collective leaves it as a RunError
    (`explained`)."""
    global _watch
    _watch = Watch(store, rank, size)
    _watch.start()
    try:
        yield
    except RuntimeError as error:
        better = explained(error)
        if better is not error:
            raise better from error
        raise
    finally:
        _watch.stop()
        _watch = None
