"""The process group as a context manager, sums and agreements over ranks, gradients, this
machine's compute dtype.

    with dist.session(cfg) as world:       # torchrun's variables decide; one process needs no group
        dist.sum_(loss); stopping = any(dist.gather(stop.requested))

Where there are several ranks every function is a collective: all ranks call it, equally often,
in the same order.

A session compares code and settings of all ranks first. A collective that fails is reported
with ranks and lines (`desync`)."""

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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as td
from torch import Tensor, nn

from codechat.core.config import differences, plain
from codechat.core.errors import ConfigError, RunError, UserError
from codechat.distributed import desync

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
TIMEOUT_S = 600.0  # longest that a rank waits for another
BUCKET = 1 << 24  # numbers, about, that `sum_gradients` adds at once

_sessions = 0


@dataclass(frozen=True)
class World:
    """Who this process is among its peers."""

    rank: int
    size: int
    device: torch.device


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
    """A tensor of the host on a device; to a GPU through pinned memory, so that the host does
    not wait."""
    if x.device.type != "cpu":
        return x.to(where)
    return (x.pin_memory() if where.type == "cuda" else x).to(where, non_blocking=True)


@cache
def keep_freed_memory(device: torch.device) -> None:
    """Let a process on a CPU keep freed memory: glibc returns large blocks, which costs up to
    15 % of pretraining."""
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


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
    where = device()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if where.type == "cuda":
        gpus = torch.cuda.device_count()
        if local_size > gpus:  # NCCL would hang
            raise RunError(f"{local_size} ranks on a host with {gpus} GPUs; lower --nproc-per-node")
        torch.cuda.set_device(where)
    keep_freed_memory(where)
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
    group. Over several hosts the
    number of restarts differs: there torchrun's own rendezvous must be new
    (docs/distributed.md)."""
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


def sum_gradients(model: nn.Module) -> None:
    """Add the gradients of replicas over ranks, after the backward pass; a missing one counts
    as zero."""
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
    """Scale all gradients so that their common norm is at most `max_norm` (0 = no limit);
    returns the norm before.

    A collective where some are sharded."""
    learned = [p for p in weights if p.grad is not None]
    kinds = [[p for p in learned if is_sharded_tensor(p) == sharded] for sharded in (True, False)]
    kinds = [part for part in kinds if part] or [learned]  # torch takes no norm of both together
    norms = []
    for part in kinds:
        gradients = [p.grad for p in part if p.grad is not None]
        norms.append(gathered(nn.utils.get_total_norm(gradients)))
    total = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
    for part in kinds:
        nn.utils.clip_grads_with_norm_(part, max_norm or math.inf, total)
    return float(total)


def is_sharded_tensor(value: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor, whose class is imported where there is one."""
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
    return about.exists() and bool(
        {"avx512_bf16", "amx_bf16", "bf16"} & set(about.read_text(errors="replace").split())
    )


@cache
def _dtype(kind: str, requested: str) -> torch.dtype:
    if requested not in ("", "float32", "bfloat16"):
        raise ConfigError(
            f"CODECHAT_DTYPE={requested!r}; it takes float32 or "
            "bfloat16 (float16 would need loss scaling)"
        )
    native = (
        _cpu_has_bf16()
        if kind == "cpu"
        else torch.cuda.is_bf16_supported(including_emulation=False)
    )
    name = requested or ("bfloat16" if native else "float32")
    why = (
        "CODECHAT_DTYPE"
        if requested
        else "native"
        if native
        else f"this {kind} has no native bfloat16"
    )
    if is_main():
        print(f"compute: {name} on {kind} ({why}); weights float32", file=sys.stderr)
    return getattr(torch, name)


class Numerics(NamedTuple):
    """What a machine decides of how a step is computed."""

    cpu: bool  # any mask and any shape; reading a value costs nothing
    dtype: torch.dtype  # of matrix products
    memory: float  # bytes of the GPU, of which chunks of logits take shares; 0 on a CPU


planned: Numerics | None = (
    None  # of the machine that a plan is for; no ContextVar, which torch.compile cannot read
)


@contextmanager
def planning(numerics: Numerics) -> Iterator[None]:
    """Steps on fake tensors within take the shapes and dtypes of another machine
    (`instruments.step_memory`)."""
    global planned
    planned = numerics
    try:
        yield
    finally:
        planned = None


def compute_dtype(where: torch.device | None = None) -> torch.dtype:
    """bfloat16 where the processor supports it natively, else float32, unless CODECHAT_DTYPE is
    set; printed once."""
    if planned:
        return planned.dtype
    return _dtype((where or device()).type, os.environ.get("CODECHAT_DTYPE", ""))


def autocast(where: torch.device | None = None) -> AbstractContextManager[Any]:
    """Matrix products in the compute dtype; weights stay float32."""
    dtype = compute_dtype(where)
    return (
        nullcontext()
        if dtype == torch.float32
        else torch.autocast((where or device()).type, dtype=dtype)
    )
