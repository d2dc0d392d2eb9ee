"""The process group as a context manager, sums and agreements over ranks, desync detection, this machine's compute
dtype.

    with dist.session(cfg) as world:       # torchrun's variables decide; one process needs no group
        dist.sum_(loss); stopping = any(dist.gather(stop.requested))

Where there are several ranks every function is a collective: all ranks call it, equally often, in the same order.

A session compares code and settings of all ranks first; `Watch` records every few seconds where each rank is; when
a collective fails `explained` names ranks and lines. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch fails every
collective whose operation or shapes differ over ranks."""

import atexit
import ctypes
import gc
import hashlib
import json
import math
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn

import codechat
from codechat.core.config import differences, plain
from codechat.core.errors import ConfigError, RunError, UserError

# of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
TIMEOUT_S = 600.0  # longest that a rank waits for another
BUCKET = 1 << 24  # numbers, about, that `sum_gradients` adds at once
PACKAGE = Path(codechat.__file__).resolve().parent
PLUMBING = str(Path(__file__).resolve())
SIGN_OF_LIFE_S = 5.0  # seconds between two notes of `Watch`

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

_watch: "Watch | None" = None
_droppers: list[Callable[[], None]] = []


def when_destroyed(drop: Callable[[], None]) -> None:
    """At the end of this session, drop a reference to the process group: its threads would abort the interpreter's
    end."""
    _droppers.append(drop)


@contextmanager
def session(settings: Any = None) -> Iterator[World]:
    """The process group for the time of the block. Inside another session it joins that one.

    settings: a configuration that must be the same on all ranks, as the library's code. RunError where they differ, and
    where a collective fails or takes longer than TIMEOUT_S, with this rank's call and where the others are."""
    where = device()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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
    global _watch, _sessions
    # Its functions keep the group of the moment of their import as a default argument: import it before there is one.
    import torch.distributed.nn.functional  # noqa: F401, PLC0415

    atexit.register(gc.collect)  # a sharded model lives in reference cycles and keeps the group too
    # Each session and restart has its own prefix: the keys of an earlier one would hang the group. Over several
    # hosts the number of restarts
    # differs: there torchrun's own rendezvous must be new (docs/distributed.md).
    store, me, size = next(iter(td.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S))))
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    _sessions += 1
    store = td.PrefixStore(f"codechat/{attempt}/{_sessions}", store)
    gpu = where.type == "cuda"
    kinds = "cpu:gloo,cuda:nccl" if gpu else "gloo"  # objects and agreements travel without the GPU
    how = dict(device_id=where if gpu else None, timeout=timedelta(seconds=TIMEOUT_S))
    td.init_process_group(kinds, store=store, rank=me, world_size=size, **how)
    _watch = Watch(store, me, size)
    _watch.start()
    try:
        mine = {"sources and torch": code_digest(), **plain(settings or {})}
        (first_host, first), *others = gather((platform.node(), mine))
        for r, (host, other) in enumerate(others, 1):
            if other != first:
                listed = ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in list(differences(first, other).items())[:3])
                who = f"rank 0 on {first_host} and rank {r} on {host} have different code or settings"
                remedy = "start all ranks from the same checkout and environment, with the same command and config file"
                raise RunError(f"{who}: {listed}; {remedy}")
        yield
        td.barrier()  # without it a rank may tear down while another still reads from it
    except RuntimeError as e:
        better = explained(e)
        if better is not e:
            raise better from e
        raise
    finally:
        _watch.stop()
        _watch = None
        td.destroy_process_group()
        while _droppers:
            _droppers.pop()()


# ---- desync detection


def code_digest() -> str:
    """12 hex digits of the library's sources and torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def call_site(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first (frame, line) of this project, or of a script that uses it: "pretrain.py:150 in train"."""
    for frame, line in frames:
        name = frame.f_code.co_filename
        installed = re.search(r"/(site-packages|lib/python[0-9.]+)/", name)
        if not (name == PLUMBING or name.startswith("<") or installed):
            return f"{Path(name).name}:{line} in {frame.f_code.co_name}"
    return "a line outside the project"


class Watch(threading.Thread):
    """A daemon that writes to the store every few seconds where the main thread of this rank is."""

    def __init__(self, store: td.Store, rank: int, size: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.store = store.clone()
        self.rank = rank
        self.size = size
        self.main = threading.main_thread().ident
        self.ended = threading.Event()

    def run(self) -> None:
        with suppress(td.DistError, RuntimeError):  # the store is gone, and with it the ranks that read it
            while not self.ended.wait(SIGN_OF_LIFE_S):
                where = call_site(traceback.walk_stack(sys._current_frames().get(self.main)))
                text = f"rank {self.rank} (process {os.getpid()} on {platform.node()}) at {where}"
                self.store.set(f"watch/{self.rank}", json.dumps([time.time(), text]))

    def others(self) -> str:
        """Where each other rank was last seen; at most eight, those first that have been silent for longest."""
        seen = []
        for r in (r for r in range(self.size) if r != self.rank):
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


GROUP_FAILURE = re.compile(
    r"gloo|nccl|Connection (closed|reset|refused)|Timed out|Broken pipe|mismatch between collectives", re.I
)


def explained(error: BaseException | None) -> BaseException | None:
    """A failed collective as a RunError with this rank's call and where the others are; any other error as it is."""
    if _watch is None or not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return error
    if not isinstance(error, td.DistError) and not GROUP_FAILURE.search(str(error)):
        return error
    frames = list(traceback.walk_tb(error.__traceback__))
    try:
        others = _watch.others()
    except (td.DistError, RuntimeError):
        others = "the store is gone, and with it the process that held it"
    first = re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0])[:200] or type(error).__name__
    return RunError(
        f"rank {_watch.rank} failed in {frames[-1][0].f_code.co_name} at {call_site(reversed(frames))} ({first}); {others}; "
        "continue from the last checkpoint with --resume"
    )


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
    first = next((p for p in gather(problem) if p is not None), None)
    if first:
        raise first


def sum_gradients(model: nn.Module) -> None:
    """Add the gradients of replicas over ranks, after the backward pass; a missing one counts as zero."""
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
    return about.exists() and bool({"avx512_bf16", "amx_bf16", "bf16"} & set(about.read_text(errors="replace").split()))


@cache
def _dtype(kind: str, requested: str) -> torch.dtype:
    if requested not in ("", "float32", "bfloat16"):
        raise ConfigError(
            f"CODECHAT_DTYPE={requested!r}; it takes float32 or bfloat16 (float16 would need loss scaling)"
        )
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
