"""How often the host waits for the device: operators whose result the host must know, counted where they are dispatched.

    with SyncCount() as syncs:
        step()
    syncs.calls      # Counter({"aten.nonzero.default": 1, "aten._local_scalar_dense.default": 1})

The same operators are dispatched on a CPU, where nothing waits: so a machine without a GPU counts what a GPU would wait for, except copies to the host.

Left out: what kernels and libraries do within themselves, and compiled code, which is not dispatched operator by operator.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}


class SyncCount(TorchDispatchMode):
    """calls: by operator, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in WAITS or (func in INDEXING and _masked(args[1])) or (func in COPIES and _to_host(func, args, out)):
            self.calls[str(func)] += 1
        return out


def _masked(indices: Any) -> bool:
    """A mask as an index: its places are looked up first."""
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)


def _to_host(func: Any, args: Any, out: Any) -> bool:
    source = args[1] if func is aten.copy_.default else args[0]
    return isinstance(source, Tensor) and source.is_cuda and not out.is_cuda
