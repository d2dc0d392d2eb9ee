"""The kind of device, which decides between two ways of computing the same, and the libraries
that `make lab` and `make cpp` build for one."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from codechat.distributed import numerics

CPU_KINDS = ("cpu",)  # tests empty it: a CPU then takes the ways of a GPU
BUILT = Path(__file__).parents[3] / "build" / "cpp"  # by `make lab` or `make cpp`


def on_cpu(device: torch.device) -> bool:
    """Whether this device is a CPU.

    A CPU takes any shape and any mask, and reading a value costs it nothing, so it skips
    whatever adds nothing. On a GPU a new shape compiles the blocks again, a dense mask keeps
    flash kernels from being taken, and the host waits for every value that it reads."""
    return numerics.planned.cpu if numerics.planned else device.type in CPU_KINDS


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x, under the caller's autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def early_places(places: Tensor | None, device: torch.device) -> Tensor | None:
    """The tokens on which the last block's MLP runs, of those that `places` (N,) asks for; none
    = all: a compiled block wants one shape."""
    return places if on_cpu(device) else None


def rows_to_add(n: int, most: int, device: torch.device) -> int:
    """How many rows without use to add to n of `most`, so that products of n rows have few sizes.

    A CPU prepares a product of a new size for 2 ms, and memory of a new size leaves holes in
    the heap. A GPU takes the sizes as they come."""
    if not on_cpu(device):
        return 0
    bits = (n - 1).bit_length()
    # above 512 an eighth is added at most
    step = max(64, 2**bits // 16)
    return min(-n % step, most - n)


def decodes_from_file(device: torch.device) -> bool:
    """Whether a decoder there needs no weights but those in the file: on a CPU `reader_of` copies
    them as decoding wants them, and the model's own would be a second copy in the same memory."""
    return on_cpu(device)


def copies_stay(weight: Tensor) -> bool:
    """Whether copies of weights may be kept between two calls of `sample`: a GPU's rows take the
    memory."""
    return on_cpu(weight.device)


def built_library(place: Path, runs_here: str) -> ctypes.CDLL | None:
    """A library of `make cpp`; none where it was not built, or the processor lacks what it needs.
    runs_here: the name of its function that says so."""
    if not place.exists():
        return None
    try:
        found = ctypes.CDLL(str(place))
    except OSError:  # a torch without GNU's OpenMP, of which the library has its threads
        return None
    return found if getattr(found, runs_here)() else None
