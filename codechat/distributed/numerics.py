"""The dtype of matrix products: bfloat16 where the processor has it, under autocast. Weights,
gradients and optimizer states stay float32.

    with numerics.autocast():
        loss = model.loss(tokens)

A plan of another machine sets its dtype and memory with `planning`."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from codechat.core.errors import ConfigError
from codechat.distributed import dist, hardware


def _cpu_has_bf16() -> bool:
    """avx512_bf16 or amx_bf16 on x86, bf16 on ARM; emulated bf16 is slower than float32."""
    words = set(Path("/proc/cpuinfo").read_text(errors="replace").split())
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


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
    why = "native" if native else f"this {kind} has no native bfloat16"
    if requested:
        why = "CODECHAT_DTYPE"
    if dist.is_main():
        print(f"compute: {name} on {kind} ({why}); weights float32", file=sys.stderr)
    return getattr(torch, name)


class Numerics(NamedTuple):
    """What a machine decides of how a step is computed."""

    cpu: bool  # any mask and any shape; reading a value costs nothing
    dtype: torch.dtype  # of matrix products
    memory: float  # bytes of the GPU, of which chunks of logits take shares; 0 on a CPU


# of the machine that a plan is for; no ContextVar, which torch.compile cannot read
planned: Numerics | None = None


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
    return _dtype((where or hardware.device()).type, os.environ.get("CODECHAT_DTYPE", ""))


def autocast(where: torch.device | None = None) -> AbstractContextManager[Any]:
    """Matrix products in the compute dtype; weights stay float32."""
    dtype = compute_dtype(where)
    return (
        nullcontext()
        if dtype == torch.float32
        else torch.autocast((where or hardware.device()).type, dtype=dtype)
    )
