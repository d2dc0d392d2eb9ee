"""Gradients of replicas, added over ranks after the backward pass, in buckets of about 64 MB. `fully_shard` adds those of sharded weights itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from codechat.distributed import dist

BUCKET = 1 << 24  # numbers


def buckets(model: nn.Module) -> Iterator[list[Tensor]]:
    """The trained parameters of a replica, in order, in groups of at least BUCKET numbers, the last one with what is left."""
    bucket: list[Tensor] = []
    for p in model.parameters():
        if p.requires_grad and not dist.is_sharded_tensor(p):
            bucket.append(p)
            if sum(p.numel() for p in bucket) >= BUCKET:
                yield bucket
                bucket = []
    if bucket:
        yield bucket


def finish(model: nn.Module) -> None:
    """Add the gradients of all ranks; a parameter without one counts as zero on that rank. A collective."""
    if dist.world_size() == 1:
        return
    for bucket in buckets(model):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        total = dist.sum_(torch.cat([grad.reshape(-1) for grad in grads]))
        for p, grad, part in zip(bucket, grads, total.split([p.numel() for p in bucket])):
            p.grad = grad.copy_(part.view_as(p))
