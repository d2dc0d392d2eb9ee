"""The process group as a context manager, sums and agreements over ranks, this machine's compute dtype.

    with dist.session(cfg) as world:       # torchrun's variables decide; one process needs no group
        dist.sum_(loss); stopping = any(dist.gather(stop.requested))

Where there are several ranks every function is a collective: all ranks call it, equally often, in the same order.
"""

import atexit
import ctypes
import gc
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn

from codechat.core.config import plain
from codechat.core.errors import ConfigError, RunError, UserError
from codechat.distributed import desync

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
TIMEOUT_S = 600.0  # longest that a rank waits for another
BUCKET = 1 << 24  # numbers, about, that `sum_gradients` adds at once


@dataclass(frozen=True)
class World:
    """Who this process is among its peers."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def _grouped() -> bool:
    return td.is_available() and td.is_initialized()


def rank() -> int:
    return td.get_rank() if _grouped() else 0


def world_size() -> int:
    return td.get_world_size() if _grouped() else 1


def is_main() -> bool:
    return rank() == 0


def device() -> torch.device:
    """This rank's device: its GPU where there is CUDA, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def send(x: Tensor, where: torch.device) -> Tensor:
    """A tensor of the host on a device; to a GPU through pinned memory, so that the host does not wait."""
    if x.device.type != "cpu":
        return x.to(where)
    return (x.pin_memory() if where.type == "cuda" else x).to(where, non_blocking=True)


@cache
def keep_freed_memory(device: torch.device) -> None:
    """Let a process on a CPU keep freed memory: glibc returns large blocks, which costs up to 15 % of pretraining."""
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


# ---- the session

_watch: desync.Watch | None = None
_droppers: list[Callable[[], None]] = []


def when_destroyed(drop: Callable[[], None]) -> None:
    """At the end of this session, call what drops a reference to the process group: a group that something still refers
    to keeps its threads, and they abort the process at the end of the interpreter."""
    _droppers.append(drop)


@contextmanager
def session(settings: Any = None) -> Iterator[World]:
    """The process group for the time of the block. Inside another session it joins that one.

    settings: a configuration that must be the same on all ranks; it and the library's code are compared first. RunError
    where they differ, and where a collective fails or does not complete within TIMEOUT_S, with this rank's call and
    where the others are."""
    where, local_size = device(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if where.type == "cuda":
        if local_size > (gpus := torch.cuda.device_count()):  # NCCL would hang
            raise RunError(f"{local_size} ranks on a host with {gpus} GPUs; lower --nproc-per-node")
        torch.cuda.set_device(where)
    keep_freed_memory(where)
    joins = _grouped() or int(os.environ.get("WORLD_SIZE", "1")) == 1
    with nullcontext() if joins else _group(where, settings):
        yield World(rank(), world_size(), where)


@contextmanager
def _group(where: torch.device, settings: Any) -> Iterator[None]:
    global _watch
    # Its functions keep the group of the moment of their import as a default argument: import it before there is one.
    import torch.distributed.nn.functional  # noqa: F401, PLC0415

    atexit.register(gc.collect)  # a sharded model lives in reference cycles and keeps the group too
    store, me, size = desync.join_store(TIMEOUT_S)
    gpu = where.type == "cuda"
    kinds = "cpu:gloo,cuda:nccl" if gpu else "gloo"  # objects and agreements travel without the GPU
    how = dict(device_id=where if gpu else None, timeout=timedelta(seconds=TIMEOUT_S))
    td.init_process_group(kinds, store=store, rank=me, world_size=size, **how)
    _watch = desync.Watch(store, me, size)
    _watch.start()
    try:
        mine = {"sources and torch": desync.code_digest(), **plain(settings or {})}
        desync.agree(gather((platform.node(), mine)))
        yield
        td.barrier()  # without it a rank may tear down while another still reads from it
    except RuntimeError as e:
        if (better := explained(e)) is not e:
            raise better from e
        raise
    finally:
        _watch.stop()
        _watch = None
        td.destroy_process_group()
        while _droppers:
            _droppers.pop()()


def explained(error: BaseException | None) -> BaseException | None:
    """A failed collective as a RunError that names ranks and calls; any other error as it is."""
    return desync.explained(error, _watch)


# ---- collectives


def sum_(tensor: Tensor) -> Tensor:
    """All-reduce in place; returns its argument."""
    if _grouped():
        td.all_reduce(tensor)
    return tensor


def mean(values: dict[str, float]) -> dict[str, float]:
    """The mean over ranks of each value; every rank passes the same names."""
    rows = gather(values)
    return {name: sum(float(row[name]) for row in rows) / len(rows) for name in values}


def gather(value: Any) -> list[Any]:
    """The picklable values of all ranks, by rank, on every rank."""
    values: list[Any] = [value] * world_size()
    if _grouped():
        td.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """A UserError of one rank is raised on all of them at the end of the block. A collective, there."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = error
    if first := next((p for p in gather(problem) if p is not None), None):
        raise first


def sum_gradients(model: nn.Module) -> None:
    """Add the gradients of replicas over ranks, after the backward pass; a parameter without one counts as zero on that
    rank. `fully_shard` adds those of sharded weights itself."""
    if world_size() == 1:
        return
    params = [p for p in model.parameters() if p.requires_grad and not is_sharded_tensor(p)]
    ends = accumulate(p.numel() for p in params)
    for _, some in groupby(zip(ends, params), lambda one: one[0] // BUCKET):
        bucket = [p for _, p in some]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        total = sum_(torch.cat([grad.flatten() for grad in grads]))
        for p, grad, part in zip(bucket, grads, total.split([p.numel() for p in bucket])):
            p.grad = grad.copy_(part.view_as(p))


def clip_gradients(weights: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm` (0 = no limit); returns the norm before.

    A collective where some are sharded."""
    learned = [p for p in weights if p.grad is not None]
    kinds = [[p for p in learned if is_sharded_tensor(p) == sharded] for sharded in (True, False)]
    kinds = [part for part in kinds if part] or [learned]  # torch takes no norm of both together
    norms = [gathered(nn.utils.get_total_norm([p.grad for p in part])) for part in kinds]
    total = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
    for part in kinds:
        nn.utils.clip_grads_with_norm_(part, max_norm or math.inf, total)
    return float(total)


def is_sharded_tensor(value: object) -> bool:
    """Whether it is a DTensor; imports nothing, since where nothing has imported that class there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank. A collective where it is sharded."""
    return tensor.full_tensor() if is_sharded_tensor(tensor) else tensor


# ---- compute dtype


def _cpu_has_bf16() -> bool:
    """avx512_bf16 or amx_bf16 on x86, bf16 on ARM; emulated bf16 is slower than float32."""
    about = Path("/proc/cpuinfo")  # of Linux
    return about.exists() and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(
        about.read_text(errors="replace").split()
    )


@cache
def _dtype(kind: str, requested: str) -> torch.dtype:
    if requested not in ("", "float32", "bfloat16"):
        raise ConfigError(f"CODECHAT_DTYPE={requested!r}; it takes float32 or bfloat16")
    native = _cpu_has_bf16() if kind == "cpu" else torch.cuda.is_bf16_supported(including_emulation=False)
    name = requested or ("bfloat16" if native else "float32")
    why = "CODECHAT_DTYPE" if requested else "native" if native else f"this {kind} has no native bfloat16"
    if is_main():
        print(f"compute: {name} on {kind} ({why}); weights float32", file=sys.stderr)
    return getattr(torch, name)


def compute_dtype(where: torch.device | None = None) -> torch.dtype:
    """bfloat16 where the processor supports it natively, else float32, unless CODECHAT_DTYPE is set; printed once."""
    return _dtype((where or device()).type, os.environ.get("CODECHAT_DTYPE", ""))


def autocast(where: torch.device | None = None) -> AbstractContextManager[Any]:
    """Matrix products in the compute dtype; weights stay float32."""
    dtype = compute_dtype(where)
    return nullcontext() if dtype == torch.float32 else torch.autocast((where or device()).type, dtype=dtype)
