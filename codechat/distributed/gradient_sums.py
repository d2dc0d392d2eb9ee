"""Gradients of replicas, added over ranks in buckets of about 64 MB: after the backward pass, or while it runs.

    gradient_sums.begin(model)      # before the last backward pass of a step, on a GPU: sums start as gradients arrive
    loss.backward()
    gradient_sums.finish(model)     # adds what is left

A backward pass makes the gradients of the last blocks first. As soon as all of a bucket are there, its sum runs beside the rest of the pass. Buckets hold
the same gradients either way, and every rank adds them in the same order, so the sums are equal bit by bit.

Left out: sharded weights, whose gradients `fully_shard` adds itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn

from codechat.distributed import dist

BUCKET = 1 << 24  # numbers
IN_FLIGHT = 2  # sums that run at a time, each in a buffer of its own

_running: dict[int, _Sums] = {}  # by the id of the model; between `begin` and `finish`


def buckets(model: nn.Module) -> Iterator[list[Tensor]]:
    """The trained parameters of a replica, in order, in groups of at least BUCKET numbers, the last one with what is left."""
    bucket: list[Tensor] = []
    for p in model.parameters():
        if p.requires_grad and not dist.is_sharded_tensor(p):  # the backward pass has added those of a sharded model
            bucket.append(p)
            if sum(p.numel() for p in bucket) >= BUCKET:
                yield bucket
                bucket = []
    if bucket:
        yield bucket


def _flat(bucket: list[Tensor]) -> Tensor:
    grads = []
    for p in bucket:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.append(p.grad.reshape(-1))
    return torch.cat(grads)


def _put_back(bucket: list[Tensor], flat: Tensor) -> None:
    for p, total in zip(bucket, flat.split([p.numel() for p in bucket])):
        if p.grad is not None:  # `_flat` gave every parameter one
            p.grad.copy_(total.view_as(p.grad))


class _Sums:
    """Sums of one backward pass. Buckets start in reversed order, each when its gradients and those of the buckets behind it are there."""

    def __init__(self, model: nn.Module) -> None:
        self.left = deque(reversed([*buckets(model)]))
        self.missing = {id(bucket): len(bucket) for bucket in self.left}
        self.flying: deque[tuple[list[Tensor], Tensor, Any]] = deque()
        self.early = 0  # buckets that started before `finish`
        self.hooks = [
            p.register_post_accumulate_grad_hook(lambda _, key=id(bucket): self._arrived(key))
            for bucket in self.left
            for p in bucket
        ]

    def _arrived(self, key: int) -> None:
        self.missing[key] -= 1
        while self.left and not self.missing[id(self.left[0])]:
            self._start(self.left.popleft())
            self.early += 1

    def _start(self, bucket: list[Tensor]) -> None:
        if len(self.flying) == IN_FLIGHT:
            self._land()
        flat = _flat(bucket)
        self.flying.append((bucket, flat, td.all_reduce(flat, async_op=True)))

    def _land(self) -> None:
        bucket, flat, work = self.flying.popleft()
        work.wait()
        _put_back(bucket, flat)

    def finish(self) -> None:
        for hook in self.hooks:
            hook.remove()
        while self.left:
            self._start(self.left.popleft())
        while self.flying:
            self._land()


def begin(model: nn.Module, beside: bool | None = None) -> None:
    """Let the next backward pass add the gradients of all ranks. beside: None = on a GPU; on a CPU both would share the cores.

    Nothing where gradients are off: the hooks of a pass that never goes back would add those of the one after it a second time."""
    asked = dist.device().type == "cuda" if beside is None else beside
    if asked and dist.world_size() > 1 and torch.is_grad_enabled():
        _running[id(model)] = _Sums(model)


def finish(model: nn.Module) -> None:
    """Add the gradients of all ranks, or what `begin` has left of them; a parameter without one counts as zero on that rank. A collective."""
    if sums := _running.pop(id(model), None):
        sums.finish()
    elif dist.world_size() > 1:
        for bucket in reversed([*buckets(model)]):
            _put_back(bucket, dist.sum_(_flat(bucket)))
