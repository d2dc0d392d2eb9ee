"""At most one checkpoint is written beside training, by a thread, from a copy in host memory that later steps do not touch.

Left out: a process of its own for writing (what the thread does releases the interpreter: copying, hashing, writing).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, get_native_id
from typing import Any

import torch.distributed as td
from torch import Tensor

from codechat.core.errors import CheckpointError
from codechat.distributed import dist


@dataclass
class _Write:
    """A checkpoint on its way to the disk."""

    final: Path
    thread: Thread | None = None
    problem: CheckpointError | None = None

    def start(self, job: Callable[[], None]) -> None:
        self.thread = Thread(target=self._run_behind, args=(job,), name=f"checkpoint {self.final.name}")
        self.thread.start()

    def _run_behind(self, job: Callable[[], None]) -> None:
        if (
            sys.platform == "linux"
        ):  # where a priority is a thread's own: on a CPU, steps wait for the core that hashing takes
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
        self.run(job)

    def run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except OSError as e:
            self.problem = CheckpointError(
                f"checkpoint {self.final} cannot be written ({e}); free space, then continue with --resume; "
                "earlier checkpoints are intact"
            )


_under_way: _Write | None = None
_side: tuple[Any, td.ProcessGroup] | None = None


def side_group() -> td.ProcessGroup:
    """A gloo group of its own for writing: collectives of a thread must not mix with those of the steps."""
    global _side
    if _side is None or _side[0] is not td.group.WORLD:
        _side = (td.group.WORLD, td.new_group(backend="gloo"))
    return _side[1]


def begin(final: Path, job: Callable[[], None], wait: bool) -> None:
    """Do the job that makes the checkpoint `final`: now, or (wait=False) in a thread. CheckpointError where a disk refuses, on every
    rank: now, or at the next `settle`."""
    global _under_way
    settle()
    _under_way = _Write(final)
    if wait:
        _under_way.run(job)
        settle()
    else:
        _under_way.start(job)


def settle() -> None:
    """Wait until the checkpoint that is being written, if any, is there; raise on every rank what went wrong. A collective."""
    global _under_way
    write, _under_way = _under_way, None
    if write is not None:
        if write.thread:
            write.thread.join()
        dist.raise_together(write.problem)


@contextmanager
def settled() -> Iterator[None]:
    """At the end of the block no checkpoint is under way."""
    try:
        yield
    except BaseException:  # the block's own error is the one to see; raised again
        if _under_way and _under_way.thread:
            _under_way.thread.join()
        raise
    settle()


def on_host(value: Any) -> Any:
    """A copy that later steps do not touch, in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {k: on_host(v) for k, v in value.items()}
    return type(value)(map(on_host, value)) if isinstance(value, (list, tuple)) else value
