"""Every tensor's bytes from birth to death, by category: what a training step holds at its peak.

    with Tape() as tape:
        train_step(); tape.reset_peak(); train_step()
    tape.peak()      # {"weights": ..., "activations": ..., ...}, the categories at the moment of the largest sum

It works on real tensors and on fake ones (`FakeTensorMode`), where a model of any size takes seconds. It sees what operators return, not what a
kernel allocates and frees within itself. A storage's category may become known after its birth (a gradient is one when the optimizer reads it), so
sums are made at the end, from a list of births, deaths and sizes.

Under fake tensors, DTensor's sharding propagation allocates tensors of global shape in the same mode (torch 2.13: 139 GiB for a model of 18); the
tape pauses while it runs. Data-dependent values have no fake: `nonzero` returns every place, a number read by Python is 1.

Left out: the allocator's rounding and fragmentation, CUDA context and NCCL buffers: `planner` adds a stated reserve. torch's own MemTracker gives the
same total for an unsharded step once data-dependent values are replaced, in up to 2.6 times the time; its FSDPMemTracker (private, torch 2.13)
rejects gradient accumulation and methods other than `forward`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer states",
    "gathered weights",
    "activations",
    "backward",
    "optimizer temporaries",
)
aten, functional = torch.ops.aten, torch.ops._c10d_functional
GATHERS = (
    "all_gather_copy_in",
    "_allgather_base_",
    "allgather_",
    "split_with_sizes_copy",
    "chunk_cat",
    "_reduce_scatter_base_",
)  # by FSDP


Events = list[tuple[int, int]]  # (storage, bytes more or fewer)


def local(t: Tensor) -> Tensor:
    """This rank's part."""
    return t.to_local() if isinstance(t, DTensor) else t


class Tape(TorchDispatchMode):
    """Records while it is entered; enter it after FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[int, int] = {}  # storage -> bytes
        self.category: dict[int, str] = {}
        self.events: Events = []
        self._names: dict[int, int] = {}  # address -> storage; an address is used again, a name never
        self._paused = self._optimizing = False
        self._exits: list[Any] = []

    # births, sizes, deaths

    def see(self, t: Tensor, category: str, sure: bool = False) -> None:
        """Count a tensor's storage if it is new. sure=True: the category replaces an earlier guess."""
        if not isinstance(t, Tensor) or t.device.type == "meta":
            return
        storage = local(t).untyped_storage()
        name = self._names.get(storage._cdata)
        if name is None:
            name = self._names[storage._cdata] = len(self.category)
            self.category[name], self.now[name] = category, 0
            weakref.finalize(storage, self._died, storage._cdata, name).atexit = False
        elif sure:
            self.category[name] = category
        self._resized(name, storage.nbytes())

    def _resized(self, name: int, size: int) -> None:
        if size != self.now[name]:
            self.events.append((name, size - self.now[name]))
            self.now[name] = size

    def _died(self, address: int, name: int) -> None:
        if self._names.get(address) == name:
            del self._names[address]
        self._resized(name, 0)
        del self.now[name]

    def reset_peak(self) -> Events:
        """Start again from the tensors that live now; what happened until now."""
        before, self.events = self.events, [(name, size) for name, size in self.now.items() if size]
        return before

    def peak(self, events: Events | None = None) -> dict[str, int]:
        """Bytes of each category at the moment when their sum was largest since `reset_peak`, or within `events` of an earlier time."""
        events = self.events if events is None else events
        total, largest, at = 0, 0, 0
        for i, (_, change) in enumerate(events):
            total += change
            if total > largest:
                largest, at = total, i + 1
        sums: dict[str, int] = defaultdict(int)
        for name, change in events[:at]:
            sums[self.category[name]] += change
        return {c: sums[c] for c in CATEGORIES if sums[c]}

    # what an operator returns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls, and answered at once
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first turns it into operators on local tensors
        out = self._stand_in(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        if not self._paused:
            category = self._category(func)
            for t in tree_iter(out):
                self.see(t, category)
            if func._opname in GATHERS:
                for t in tree_iter((args, kwargs, out)):
                    self._mark_gathered(t)
        return out

    def _category(self, func: Any) -> str:
        if self._optimizing:
            return "optimizer temporaries"
        return "backward" if torch._C._current_graph_task_id() != -1 else "activations"

    def _mark_gathered(self, t: Any) -> None:
        """Buffers of collectives, and the whole weights that are copied out of them; the sharded weights that go in stay what they are."""
        if isinstance(t, Tensor) and t.device.type != "meta":
            name = self._names.get(local(t).untyped_storage()._cdata)
            if name is not None and self.category[name] in ("activations", "backward"):
                self.category[name] = "gathered weights"

    @staticmethod
    def _stand_in(func: Any, args: Any) -> Any:
        """The result of an operator on fake tensors that depends on data: every place, or 1. None for other operators."""
        if func not in (
            aten.nonzero.default,
            aten._local_scalar_dense.default,
            functional.wait_tensor.default,
        ) or not isinstance(args[0], FakeTensor):
            return None
        x = args[0]
        if func is functional.wait_tensor.default:
            return x  # its fake makes a new tensor, which the real one does not
        if func is aten._local_scalar_dense.default:
            return True if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1
        return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)

    # entering

    def __enter__(self) -> Tape:
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if (name := self._names.get(storage._cdata)) is not None:
                self._resized(name, storage.nbytes())
            return out

        def propagate_(*args: Any, **kwargs: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                return propagate(*args, **kwargs)
            finally:
                self._paused = before

        patches = [mock.patch.object(torch.UntypedStorage, "resize_", resize_),
                   mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_)]  # fmt: skip
        for patch in patches:
            patch.start()
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._exits = [*(p.stop for p in patches), *(h.remove for h in hooks)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for leave in self._exits:
            leave()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizing = True
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.see(p, "weights", sure=True)
                if p.grad is not None:
                    self.see(p.grad, "gradients", sure=True)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizing = False
        for state in optimizer.state.values():
            for value in state.values():
                self.see(value, "optimizer states", sure=True)
