"""Collective desync detection: ranks that differ or diverge are named, with the rank and the line of code.

- `agree` compares code and settings before the first collective, through the store.
- `Watch` records every few seconds where each rank is, so that a collective that fails names ranks and lines.
- `Trace`, switched on by TORCH_DISTRIBUTED_DEBUG=INFO, compares operation, shapes and line of every collective of the
  main thread over its ranks before it runs; torch's own DETAIL names no line. Not point-to-point operations.
"""

from __future__ import annotations

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
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import codechat
from codechat.core.config import differences
from codechat.core.errors import RunError

PACKAGE = Path(codechat.__file__).resolve().parent
PLUMBING = {str(Path(__file__).resolve().with_name(name)) for name in ("desync.py", "dist.py")}
SIGN_OF_LIFE_S = 5.0

_sessions = 0

# ---- before the first collective


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


def agree(store: td.Store, rank: int, size: int, what: str, mine: dict[str, Any], remedy: str) -> None:
    """RunError on every rank where `mine` differs; names the first rank that differs, and the values. No collective."""
    store.set(f"{what}/{rank}", json.dumps([platform.node(), mine], sort_keys=True))
    try:
        (first_host, first), *others = [json.loads(store.get(f"{what}/{r}")) for r in range(size)]
    except td.DistError as e:
        raise RunError(f"rank {rank} did not receive the {what} of all ranks ({e}); see the first error above") from e
    for r, (host, other) in enumerate(others, 1):
        if other != first:
            listed = ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in list(differences(first, other).items())[:3])
            raise RunError(f"rank 0 on {first_host} and rank {r} on {host} have different {what}: {listed}; {remedy}")


# ---- where a rank is


def call_site(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first (frame, line) of this project, or of a script that uses it: "pretrain.py:150 in train"."""
    for frame, line in frames:
        name = frame.f_code.co_filename
        installed = re.search(r"/(site-packages|lib/python[0-9.]+)/", name)
        if not (name in PLUMBING or name.startswith("<") or installed):
            return f"{Path(name).name}:{line} in {frame.f_code.co_name}"
    return "a line outside the project"


def is_dtensor_class(kind: type) -> bool:
    """Whether it is DTensor; imports nothing, which takes a second: where nothing has imported it, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


class Watch(threading.Thread):
    """A daemon that writes to the store every few seconds where the main thread of this rank is."""

    def __init__(self, store: td.Store, rank: int, size: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.store, self.rank, self.size = store.clone(), rank, size
        self.main, self.ended = threading.main_thread().ident, threading.Event()
        self.where, self.since = "", time.time()

    def run(self) -> None:
        with contextlib.suppress(td.DistError, RuntimeError):  # the store is gone, and with it the ranks that read it
            while not self.ended.wait(SIGN_OF_LIFE_S):
                self.tell()

    def tell(self) -> None:
        frame = sys._current_frames().get(self.main)
        where = f"{call_site(traceback.walk_stack(frame))} ({frame.f_code.co_name})" if frame else "its end"
        if where != self.where:
            self.where, self.since = where, time.time()
        value = json.dumps([self.where, self.since, time.time(), os.getpid(), platform.node()])
        self.store.set(f"watch/{self.rank}", value)

    def others(self) -> str:
        """Where each other rank was last seen; at most eight, silent ones first."""
        silent, seen = [], []
        for r in (r for r in range(self.size) if r != self.rank):
            if not self.store.check([f"watch/{r}"]):
                silent.append(f"rank {r} never gave a sign of life")
                continue
            where, since, told, pid, host = json.loads(self.store.get(f"watch/{r}"))
            text = f"rank {r} (process {pid} on {host}) at {where}, since {time.time() - since:.0f} s"
            if (age := time.time() - told) > 4 * SIGN_OF_LIFE_S:
                silent.append(f"{text}, no sign of life for {age:.0f} s")
            else:
                seen.append(text)
        return "; ".join([*silent, *seen][:8])

    def stop(self) -> None:
        self.ended.set()
        self.join(timeout=2 * SIGN_OF_LIFE_S)


GROUP_FAILURE = re.compile(r"gloo|nccl|Connection (closed|reset|refused)|Timed out|Broken pipe", re.I)


def explained(error: BaseException | None, watch: Watch | None) -> BaseException | None:
    """A failed collective as a RunError with this rank's call and where the others are; any other error as it is."""
    if watch is None or not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return error
    if not isinstance(error, td.DistError) and not GROUP_FAILURE.search(str(error)):
        return error
    frames = list(traceback.walk_tb(error.__traceback__))
    call = frames[-1][0].f_code.co_name if frames else "a collective"
    try:
        others = watch.others()
    except (td.DistError, RuntimeError):
        others = "the store is gone, and with it the process that held it"
    first = re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0])[:200] or type(error).__name__
    return RunError(
        f"rank {watch.rank} failed in {call} at {call_site(reversed(frames))} ({first}); {others}; "
        "continue from the last checkpoint with --resume"
    )


# ---- the first collective that differs

ONE_SIDED = ("gather_", "scatter_")  # only the root passes the large argument
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")


def tracing_requested() -> bool:
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() != "OFF"


def _group_of(args: tuple[Any, ...]) -> td.ProcessGroup | None:
    """The process group among a collective's arguments; None for operators that only wait for one."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return td.ProcessGroup.unbox(arg)
    name = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
    return None if name is None else td.distributed_c10d._resolve_process_group(name)


class Trace(TorchDispatchMode):
    """Compares each collective over the ranks of its group before it runs; RunError at the first that differs."""

    def __init__(self, store: td.Store, rank: int) -> None:
        super().__init__()
        self.store, self.rank, self.counts = store, rank, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_dtensor_class, types)):
            return NotImplemented  # DTensor first: its own collectives are dispatched again
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in POINT_TO_POINT:
            if group := _group_of(args):
                self.compare(func._opname, group, args)
        return func(*args, **(kwargs or {}))

    def compare(self, op: str, group: td.ProcessGroup, args: tuple[Any, ...]) -> None:
        name = group.group_name
        tensors = [] if op in ONE_SIDED else [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        shapes = " ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        mine = f"{op.strip('_')} {shapes} at {call_site(traceback.walk_stack(sys._getframe(1)))}"
        number = self.counts[name]
        self.counts[name] += 1
        self.store.set(f"trace/{name}/{number}/{self.rank}", mine)
        for r in td.get_process_group_ranks(group):
            other = self.store.get(f"trace/{name}/{number}/{r}").decode()
            if other != mine:
                raise RunError(
                    f"ranks diverge at collective {number} of group {name}: rank {self.rank} calls {mine}; "
                    f"rank {r} calls {other}; all ranks must call the same, in the same order"
                )
        if number > 1:  # all ranks have passed the collective before the last
            self.store.delete_key(f"trace/{name}/{number - 2}/{self.rank}")
