"""Products of the rows that decode, in bfloat16, by `cpp/product.c`, where `make lab` or `make
cpp` has built it; one row is read from memory twice as fast as by oneDNN. They sum in another
order, so now and then a number is rounded the other way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codechat.models.fast.device import BUILT, built_library

LIBRARY = BUILT / "librow.so"
BLOCK = 64  # outputs that lie side by side in a packed weight; half as many for tiles


@cache
def library() -> ctypes.CDLL | None:
    """With `product`, and the `rows` that `one_token` calls; none where it was not built, or the
    processor lacks what it needs."""
    found = built_library(LIBRARY, "product_runs_here")
    if found is None:
        return None
    found.product.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
    found.rows.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int]
    found.product.restype = found.rows.restype = None
    return found


def in_tiles() -> bool:
    """Whether the processor multiplies in tiles, for which weights lie in smaller blocks."""
    found = library()
    return bool(found and ctypes.c_int.in_dll(found, "in_tiles").value)


def product_of(weight: Tensor, bias: Tensor | None) -> Product | None:
    """x (.., in) -> (.., out), by a copy of a weight (out, in); none for other shapes and dtypes
    than `product.c` takes, and where it does not run."""
    found = library()
    n_out, n_in = weight.shape
    if found is None or n_out % BLOCK or n_in % 32 or weight.dtype != torch.bfloat16:
        return None
    block = BLOCK // 2 if in_tiles() else BLOCK
    pairs = weight.contiguous().view(torch.int32).view(n_out // block, block, n_in // 2)
    packed = pairs.transpose(1, 2).contiguous()
    wide = None if bias is None else bias.float()
    return Product(found.product, packed, packed.data_ptr(), n_in, n_out, wide)


@dataclass(frozen=True)
class Product:
    """x (.., in) -> (.., out)."""

    run: Callable[..., None]
    packed: Tensor  # (out / block, in / 2, block), each number a pair of the weight's
    start: int  # its address
    n_in: int
    n_out: int
    bias: Tensor | None  # (out,) float32

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16).contiguous()
        y = x.new_empty(*x.shape[:-1], self.n_out)
        self.run(
            x.data_ptr(),
            self.start,
            None if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            x.numel() // self.n_in,
            self.n_in,
            self.n_out,
            torch.get_num_threads(),
        )
        return y
