"""This rank's device: which it is, copies to it, its allocator, its peak in matrix products (the
denominator of MFU), and whether torch.compile pays there."""

import ctypes
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


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s, source): the data sheet's figure of a known GPU, else the best of eight products
    measured now (0.1 s on a CPU)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = gpu_specs.stated_peak(name)
    if peak:
        return peak, f"{name}, data sheet, dense bf16"
    return measured_peak(device, dtype), f"measured, {str(dtype).removeprefix('torch.')} product"


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of eight products, measured now."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        a @ b
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
