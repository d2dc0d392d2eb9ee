"""Collective desync detection: ranks that differ or diverge are named, with the rank and the line of code.

- `agree` compares code and settings of all ranks before anything else.
- `Watch` records every few seconds where each rank is; `explained` names ranks and lines when a collective fails. With
  TORCH_DISTRIBUTED_DEBUG=DETAIL torch fails every collective whose operation or shapes differ over ranks.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as td

import codechat
from codechat.core.config import differences
from codechat.core.errors import RunError

PACKAGE = Path(codechat.__file__).resolve().parent
PLUMBING = {str(Path(__file__).resolve().with_name(name)) for name in ("desync.py", "dist.py")}
SIGN_OF_LIFE_S = 5.0

_sessions = 0


def join_store(timeout_s: float) -> tuple[td.Store, int, int]:
    """(store, rank, size) from torchrun's variables.

    Each session and restart has its own prefix: the keys of an earlier one would hang the group. Over several hosts the
    number of restarts differs: there torchrun's own rendezvous must be new (docs/distributed.md)."""
    global _sessions
    store, rank, size = next(iter(td.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    _sessions += 1
    return td.PrefixStore(f"codechat/{attempt}/{_sessions}", store), rank, size


def code_digest() -> str:
    """12 hex digits of the library's sources and torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def agree(rows: list[tuple[str, dict[str, Any]]]) -> None:
    """RunError where the ranks' code and settings (of `dist.gather`) differ: the first rank that differs, its host, and
    the values."""
    (first_host, first), *others = rows
    for r, (host, other) in enumerate(others, 1):
        if other != first:
            listed = ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in list(differences(first, other).items())[:3])
            raise RunError(f"rank 0 on {first_host} and rank {r} on {host} have different code or settings: {listed}; start all "
                           "ranks from the same checkout and environment, with the same command and config file")  # fmt: skip


def call_site(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first (frame, line) of this project, or of a script that uses it: "pretrain.py:150 in train"."""
    for frame, line in frames:
        name = frame.f_code.co_filename
        installed = re.search(r"/(site-packages|lib/python[0-9.]+)/", name)
        if not (name in PLUMBING or name.startswith("<") or installed):
            return f"{Path(name).name}:{line} in {frame.f_code.co_name}"
    return "a line outside the project"


class Watch(threading.Thread):
    """A daemon that writes to the store every few seconds where the main thread of this rank is."""

    def __init__(self, store: td.Store, rank: int, size: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.store, self.rank, self.size = store.clone(), rank, size
        self.main, self.ended = threading.main_thread().ident, threading.Event()

    def run(self) -> None:
        with contextlib.suppress(td.DistError, RuntimeError):  # the store is gone, and with it the ranks that read it
            while not self.ended.wait(SIGN_OF_LIFE_S):
                where = call_site(traceback.walk_stack(sys._current_frames().get(self.main)))
                text = f"rank {self.rank} (process {os.getpid()} on {platform.node()}) at {where}"
                self.store.set(f"watch/{self.rank}", json.dumps([time.time(), text]))

    def others(self) -> str:
        """Where each other rank was last seen; at most eight, those first that have been silent for longest."""
        seen = []
        for r in (r for r in range(self.size) if r != self.rank):
            told, text = 0.0, f"rank {r} never gave a sign of life"
            if self.store.check([f"watch/{r}"]):
                told, text = json.loads(self.store.get(f"watch/{r}"))
                text += f", seen {time.time() - told:.0f} s ago"
            seen.append((told, text))
        return "; ".join(text for _, text in sorted(seen)[:8])

    def stop(self) -> None:
        self.ended.set()
        self.join(timeout=2 * SIGN_OF_LIFE_S)


GROUP_FAILURE = re.compile(
    r"gloo|nccl|Connection (closed|reset|refused)|Timed out|Broken pipe|mismatch between collectives", re.I
)


def explained(error: BaseException | None, watch: Watch | None) -> BaseException | None:
    """A failed collective as a RunError with this rank's call and where the others are; any other error as it is."""
    if watch is None or not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return error
    if not isinstance(error, td.DistError) and not GROUP_FAILURE.search(str(error)):
        return error
    frames = list(traceback.walk_tb(error.__traceback__))
    try:
        others = watch.others()
    except (td.DistError, RuntimeError):
        others = "the store is gone, and with it the process that held it"
    first = re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0])[:200] or type(error).__name__
    return RunError(
        f"rank {watch.rank} failed in {frames[-1][0].f_code.co_name} at {call_site(reversed(frames))} ({first}); {others}; "
        "continue from the last checkpoint with --resume"
    )
