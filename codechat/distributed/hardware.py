"""This machine's peak in matrix products (the denominator of MFU), and where torch.compile is applied."""

import shutil
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from codechat.distributed import gpu_specs, sharding


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s, source): the data sheet's figure of a known GPU, else the best of eight products measured now (0.1 s on a CPU)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if peak := gpu_specs.stated_peak(name):
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


def compiles(requested: bool | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to compile the training step. requested: None = on GPUs, and on CPUs with native bf16 and a C++ compiler."""
    if requested is not None:
        return requested
    return device.type == "cuda" or dtype == torch.bfloat16 and any(map(shutil.which, ("g++", "clang++", "c++")))


@cache
def leave_out_head(kind: Any) -> None:
    """Let torch.compile leave out a model's head, whose work depends on the data. Not a decorator of the method: it imports
    the compiler, which takes longer than torch."""
    kind._nats = torch.compiler.disable(kind._nats)


def compile_blocks(model: Any) -> None:
    """Compile each block of `model.blocks` in place; all share one graph."""
    for block in model.blocks:
        block.compile()


def maybe_compile(
    fn: Callable[..., Any], requested: bool | None, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """torch.compile(fn) where `compiles` says so; of a model's method on a GPU, and of a sharded model's, each block."""
    if not compiles(requested, device, dtype):
        return fn
    model = getattr(fn, "__self__", None)
    if sharding.is_sharded(model) or device.type == "cuda":
        compile_blocks(model)
        return fn
    leave_out_head(type(model))
    return torch.compile(fn)
