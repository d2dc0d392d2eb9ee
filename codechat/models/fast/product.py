"""Products of the rows that decode, in bfloat16 or float32, by `cpp/product.c`, where `make lab`
or `make cpp` has built it; one row is read from memory twice as fast as by oneDNN in bfloat16. They
sum in another order, so now and then a number is rounded the other way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codechat.models.fast.device import BUILT, built_library

LIBRARIES = {
    torch.bfloat16: BUILT / "librow.so",
    torch.float32: BUILT / "librow32.so",
}
WHOLE = 64  # outputs of a product are a multiple of it
# outputs that lie side by side in a packed weight
ABREAST = {torch.bfloat16: 64, torch.float32: 16}
ABREAST_IN_TILES = 32


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """With `product`, and the `rows` that `one_token` calls, for numbers of this dtype; none where
    there is none, it was not built, or the processor lacks what it needs."""
    place = LIBRARIES.get(dtype)
    if place is None:
        return None
    found = built_library(place, "product_runs_here")
    if found is None:
        return None
    found.product.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
    found.rows.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int]
    found.pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_int]
    found.product.restype = found.rows.restype = found.pack.restype = None
    return found


def abreast(dtype: torch.dtype) -> int:
    """Outputs that lie side by side in a packed weight. A processor that multiplies in tiles wants
    smaller blocks."""
    found = library(dtype)
    in_tiles = found and ctypes.c_int.in_dll(found, "in_tiles").value
    return ABREAST_IN_TILES if in_tiles else ABREAST[dtype]


def product_of(weight: Tensor, bias: Tensor | None) -> Product | None:
    """x (.., in) -> (.., out), by a copy of a weight (out, in); none for other shapes and dtypes
    than `product.c` takes, and where it does not run."""
    dtype = weight.dtype
    found = library(dtype)
    n_out, n_in = weight.shape
    if found is None or n_out % WHOLE or n_in % 32:
        return None
    whole = weight.contiguous()
    packed = torch.empty_like(whole)
    pairs = n_in * dtype.itemsize // 4  # of bfloat16; of float32 single numbers
    found.pack(
        whole.data_ptr(), packed.data_ptr(), n_out, pairs, abreast(dtype), torch.get_num_threads()
    )
    added = None if bias is None else bias.float()
    return Product(found.product, packed, packed.data_ptr(), dtype, n_in, n_out, added)


@dataclass(frozen=True)
class Product:
    """x (.., in) -> (.., out)."""

    run: Callable[..., None]
    packed: Tensor  # (out, in) in the order of product.c
    start: int  # its address
    dtype: torch.dtype
    n_in: int
    n_out: int
    bias: Tensor | None  # (out,) float32

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype).contiguous()
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
