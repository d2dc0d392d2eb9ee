"""The process group as a context manager, sums and agreements over ranks.

    with dist.session(cfg) as world:       # torchrun's variables decide; one process needs no group
        dist.sum_(loss); stopping = any(dist.gather(stop.requested))

Where there are several ranks every function is a collective: all ranks call it, equally often,
in the same order.

A session compares code and settings of all ranks first. A collective that fails is reported
with ranks and lines (`desync`)."""

import atexit
import gc
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from codechat.core.config import differences, plain
from codechat.core.errors import RunError, UserError
from codechat.distributed import desync, hardware

TIMEOUT_S = 600.0  # longest that a rank waits for another

_sessions = 0


@dataclass(frozen=True)
class World:
    """Who this process is among its peers."""

    rank: int
    size: int
    device: torch.device


def _grouped() -> bool:
    return td.is_initialized()


def rank() -> int:
    return td.get_rank() if _grouped() else 0


def world_size() -> int:
    return td.get_world_size() if _grouped() else 1


def is_main() -> bool:
    return rank() == 0


# ---- the session

_droppers: list[Callable[[], None]] = []


def when_destroyed(drop: Callable[[], None]) -> None:
    """At the end of this session, drop a reference to the process group: its threads would
    abort the interpreter's end."""
    _droppers.append(drop)


@contextmanager
def session(settings: Any = None) -> Iterator[World]:
    """The process group for the time of the block. Inside another session it joins that one.

    settings: a configuration that must be the same on all ranks, as the library's code.
    RunError where they differ, and where a collective fails or takes longer than TIMEOUT_S,
    with this rank's call and where the others are."""
    where = hardware.device()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if where.type == "cuda":
        gpus = torch.cuda.device_count()
        if local_size > gpus:  # NCCL would hang
            raise RunError(f"{local_size} ranks on a host with {gpus} GPUs; lower --nproc-per-node")
        torch.cuda.set_device(where)
    hardware.keep_freed_memory(where)
    joins = _grouped() or int(os.environ.get("WORLD_SIZE", "1")) == 1
    with nullcontext() if joins else _group(where, settings):
        yield World(rank(), world_size(), where)


@contextmanager
def _group(where: torch.device, settings: Any) -> Iterator[None]:
    # Its functions keep the group of the moment of their import as a default argument: import
    # it before there is one.
    import torch.distributed.nn.functional  # noqa: F401, PLC0415

    atexit.register(gc.collect)  # a sharded model lives in reference cycles and keeps the group too
    store, me, size = _store()
    gpu = where.type == "cuda"
    td.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",  # objects and agreements travel without the GPU
        store=store,
        rank=me,
        world_size=size,
        device_id=where if gpu else None,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        with desync.watched(store, me, size):
            _check_same(settings)
            yield
            td.barrier()  # without it a rank may tear down while another still reads from it
    finally:
        td.destroy_process_group()
        while _droppers:
            _droppers.pop()()


def _store() -> tuple[td.Store, int, int]:
    """The store of this session, this rank, the number of ranks.

    Each session and restart has its own prefix: the keys of an earlier one would hang the
    group. Over several hosts the number of restarts differs: there torchrun's own rendezvous must
    be new (docs/distributed.md)."""
    global _sessions
    store, me, size = next(iter(td.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S))))
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    _sessions += 1
    return td.PrefixStore(f"codechat/{attempt}/{_sessions}", store), me, size


def _check_same(settings: Any) -> None:
    """RunError where ranks have different code or settings. A collective."""
    mine = {"sources and torch": desync.code_digest(), **plain(settings or {})}
    (first_host, first), *others = gather((platform.node(), mine))
    for number, (host, other) in enumerate(others, 1):
        if other != first:
            changes = list(differences(first, other).items())[:3]
            listed = ", ".join(f"{name} {a!r} -> {b!r}" for name, (a, b) in changes)
            who = (
                f"rank 0 on {first_host} and rank {number} on {host} "
                "have different code or settings"
            )
            remedy = (
                "start all ranks from the same checkout and "
                "environment, with the same command and config file"
            )
            raise RunError(f"{who}: {listed}; {remedy}")


# ---- collectives


def sum_(tensor: Tensor) -> Tensor:
    """All-reduce in place; returns its argument."""
    if _grouped():
        td.all_reduce(tensor)
    return tensor


def total(number: float) -> float:
    """The sum over ranks of a number of each, in float64."""
    return float(sum_(torch.tensor(number, dtype=torch.float64)))


def mean(values: dict[str, float]) -> dict[str, float]:
    """The mean over ranks of each value; every rank passes the same names."""
    rows = gather(values)
    return {name: sum(float(row[name]) for row in rows) / len(rows) for name in values}


def gather(value: Any) -> list[Any]:
    """The picklable values of all ranks, by rank, on every rank."""
    # pickled, not tensors: what ranks agree on has any type, and travels by gloo
    values: list[Any] = [value] * world_size()
    if _grouped():
        td.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """A UserError of one rank is raised on all of them at the end of the block. A collective,
    there."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = error
    first = next((p for p in gather(problem) if p is not None), None)
    if first:
        raise first
