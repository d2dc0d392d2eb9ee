"""How often the host waits for the device: operators whose result the host must know, counted
where they are dispatched.

    with on_meta(), SyncCount() as syncs:
        grpo.train(...)
    syncs.calls      # Counter({"aten.nonzero.default": 1, "aten._local_scalar_dense.default": 1})

On a CPU nothing waits, and a copy to the host is none there. So a whole loop is counted on the
meta device, whose
tensors have shapes and no values: what the host reads of them is counted and answered with
ones, as are copies from the host that do not return at once; an operator whose result has a
shape that depends on the data raises, and so does one whose tensors lie on two devices.

Left out: what kernels and libraries do within themselves, `torch.tensor(..., device=...)`, and
compiled code, which is not dispatched operator by operator."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codechat.distributed import hardware
from codechat.models.fast import attention

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
WAITS |= {aten._unique2.default, aten.equal.default, aten.repeat_interleave.Tensor}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
COPIES = {aten._to_copy.default, aten.copy_.default}
META = torch.device("meta")


class SyncCount(TorchDispatchMode):
    """calls: by operator on the meta device, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            out: Any = 1
        elif func in COPIES and _to_host(func, args, kwargs):
            out = _ones(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        here = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        waits = func in WAITS or (
            func in INDEXING and (_masked(args[1]) or _from_host(args[0], args[1]))
        )
        if (here and waits) or (
            func in COPIES and (_to_host(func, args, kwargs) or _blocks(func, args, kwargs))
        ):
            self.calls[str(func)] += 1
        return out


@contextmanager
def on_meta() -> Iterator[None]:
    """This process computes on the meta device, as it would on a GPU. What that device has not
    is replaced: flex attention, AdamW's fused kernel, autocast."""

    def adamw(*args: Any, **how: Any) -> torch.optim.Optimizer:
        return own(*args, **how | {"fused": None})

    def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, enable_gqa: bool) -> Tensor:
        return q + (k + v).sum(1, keepdim=True)

    def autocast(kind: str, *args: Any, **how: Any) -> Any:
        return nullcontext() if kind == "meta" else own_autocast(kind, *args, **how)

    def casts(kind: str | None = None) -> bool:
        return kind != "meta" and own_casts(*([kind] if kind else []))

    own = torch.optim.AdamW
    own_autocast = torch.autocast
    own_casts = torch.is_autocast_enabled
    with (
        mock.patch.object(hardware, "device", lambda: META),
        mock.patch.object(torch.optim, "AdamW", adamw),
        mock.patch.object(attention, "_flex", lambda: flex),
        mock.patch.object(torch, "is_autocast_enabled", casts),
        mock.patch.object(torch, "autocast", autocast),
    ):
        yield


def _masked(indices: Any) -> bool:
    """A mask as an index: its places are looked up first."""
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)


def _from_host(x: Tensor, indices: Any) -> bool:
    """An index that lies on the host is copied first."""
    return x.is_meta and any(isinstance(i, Tensor) and not i.is_meta for i in indices)


def _source(func: Any, args: Any) -> Tensor:
    return args[1] if func is aten.copy_.default else args[0]


def _target(func: Any, args: Any, kwargs: Any) -> str:
    device = args[0].device if func is aten.copy_.default else kwargs.get("device")
    return (_source(func, args).device if device is None else torch.device(device)).type


def _to_host(func: Any, args: Any, kwargs: Any) -> bool:
    return _source(func, args).is_meta and _target(func, args, kwargs) == "cpu"


def _blocks(func: Any, args: Any, kwargs: Any) -> bool:
    """A copy from the host that returns when it is done."""
    at_once = args[2] if len(args) > 2 else kwargs.get("non_blocking")
    here = _source(func, args).device.type == "cpu" and _target(func, args, kwargs) == "meta"
    return here and not at_once


def _ones(func: Any, args: Any, kwargs: Any) -> Tensor:
    if func is aten.copy_.default:
        return args[0].fill_(1)
    return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
