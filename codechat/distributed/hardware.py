"""This rank's device: which it is, copies to it, its allocator, its peak in matrix products (the
denominator of MFU), and whether torch.compile pays there."""

import ctypes
import mmap
import os
import sys
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from codechat.distributed import gpu_specs

# of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
AGAIN_S = 60.0  # a measured peak is measured again after this: 0.2 % of the time


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


def prefer_large_pages(n_bytes: int) -> None:
    """Let so much memory that is allocated next lie in pages of 2 MB, where Linux has them and
    freed memory is kept: what every token reads whole then waits less for the page table."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(n_bytes))
    if block is None:
        return
    # the heap keeps the wish when it takes the block back
    begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    size = ctypes.c_size_t(block + n_bytes - begin)
    libc.madvise(ctypes.c_void_p(begin), size, mmap.MADV_HUGEPAGE)
    libc.free(ctypes.c_void_p(block))


class Peak:
    """FLOP/s of matrix products, which MFU is a share of: the data sheet's of a known GPU, else
    the best measured so far.

    Other work on a machine slows a measurement and never speeds it up. So the peak is measured
    again after AGAIN_S, and what training itself reaches counts too: MFU is at most 1."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        stated = gpu_specs.stated_peak(name)
        self.stated = stated is not None
        self.flops = stated or 0.0
        if self.stated:
            self.source = f"{name}, data sheet, dense bf16"
        else:
            self.source = f"measured, {str(dtype).removeprefix('torch.')} product"
            self.measure()

    def measure(self) -> None:
        """Measure again (0.1 s on a CPU); the best counts."""
        self.flops = max(self.flops, measured_peak(self.device, self.dtype))
        self.measured_at = time.monotonic()

    def share(self, flops_per_s: float) -> float:
        """The MFU of this many model FLOPs per second on this rank."""
        if not self.stated:
            if flops_per_s > self.flops or time.monotonic() - self.measured_at > AGAIN_S:
                self.measure()
            self.flops = max(self.flops, flops_per_s)
        return flops_per_s / self.flops


# one for the process: what a loop measured, a bench that called the loop reads
peak = cache(Peak)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of eight products, measured now."""
    n = 8192 if device.type == "cuda" else 1024
    # not drawn: when it is measured depends on the clock, and no draw of a run may
    a = torch.linspace(-1.0, 1.0, n * n, device=device).view(n, n).to(dtype)
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def compile_blocks(model: Any, wanted: bool = True) -> None:
    """On a GPU, compile each block of `model.blocks` in place, where wanted; all share one
    graph. A CPU takes half a minute to minutes for it, and its steps are at most 4 % faster
    (docs/experiments/speed-on-a-cpu.md, 2026-11-27)."""
    if wanted and model.head_weight().device.type == "cuda":
        print("the blocks are compiled: the first step takes up to a minute", file=sys.stderr)
        for block in model.blocks:
            block.compile()
