"""This machine's peak in matrix products (the denominator of MFU), and where torch.compile is applied."""

import math
import shutil
import sys
import time
from functools import cache
from typing import Any

import torch

from codechat.distributed import gpu_specs, sharding

PAYS_BACK_S = (
    120.0  # compiling takes half a minute on two cores and makes a step a tenth faster, at about 40 % of the peak
)


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


def compiles(requested: bool | None, device: torch.device, dtype: torch.dtype, flops: float = math.inf) -> bool:
    """Whether to compile the training step. requested: None = on GPUs, and in bf16 on CPUs that need PAYS_BACK_S for `flops` at their peak."""
    if requested is not None or device.type == "cuda":
        return requested is not False
    able = dtype == torch.bfloat16 and any(map(shutil.which, ("g++", "clang++", "c++")))
    return able and flops > PAYS_BACK_S * peak_flops(device, dtype)[0]


@cache
def leave_out_head(kind: Any) -> None:
    """Let torch.compile leave out a model's head, whose work depends on the data. No decorator of the method: that imports the compiler."""
    kind._nats = torch.compiler.disable(kind._nats)


def compile_blocks(model: Any) -> None:
    """Compile each block of `model.blocks` in place; all share one graph."""
    for block in model.blocks:
        block.compile()


def maybe_compile(
    fn: Any, requested: bool | None, device: torch.device, dtype: torch.dtype, flops: float = math.inf
) -> Any:
    """torch.compile(fn) where `compiles` says so; of a model's method on a GPU, and of a sharded model's, each block."""
    if not compiles(requested, device, dtype, flops):
        return fn
    print("the step is compiled: its first run takes up to a minute", file=sys.stderr)
    model = getattr(fn, "__self__", None)
    if sharding.is_sharded(model) or device.type == "cuda":
        compile_blocks(model)
        return fn
    leave_out_head(type(model))
    return torch.compile(fn)
