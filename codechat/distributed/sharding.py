"""Weights and their gradients: whole on every rank, or split over ranks with `fully_shard`
(FSDP2) where a replica does not fit.

    model = sharding.build(lambda: GPT(shape), seed=0, shard_it=cfg.shard)
    with sharding.whole(model) as reader:      # sampling and evaluation: plain tensors, and no collectives

Master weights are float32 on the rank that owns them. Blocks are gathered in the compute dtype,
the root (embedding, last norm) and gradients in float32. Forward and backward passes of a
sharded model are collectives (`in_step`). FSDP adds the gradients of sharded weights over ranks;
`sum_gradients` adds those of replicas."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from codechat.core.errors import ConfigError
from codechat.distributed import dist, hardware, numerics

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

# float32 master, gradient and two Adam moments; a copy in bf16 for the products
BYTES_PER_WEIGHT = 18
# no gradient and no moments; 2 of a matrix in bf16, 6 of an embedding in float32 and its copy
BYTES_PER_FROZEN = 4
# Numbers, about, that `sum_gradients` adds at once: one call per matrix waits for the network each
# time, one for all needs a second copy of the gradients.
BUCKET = 1 << 24
SHARE_FOR_WEIGHTS = 0.6  # of a device's memory; activations and buffers take the rest
# importing it takes as long as torch itself: only where a model is sharded
FSDP = "torch.distributed.fsdp"
# what loops call besides forward: each gathers the root's weights
FORWARD_METHODS = (
    "loss",
    "token_logprobs",
)


def device_memory(device: torch.device) -> float:
    """Bytes of memory for one rank: its GPU's, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return (
        os.sysconf("SC_PAGE_SIZE")
        * os.sysconf("SC_PHYS_PAGES")
        / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )


def fits(n_params: int, memory: float, adapters: int = 0) -> bool:
    """Whether a device with so many bytes of memory can train its own replica. adapters:
    parameters that are trained in place of these, which are then frozen; 0 = they are
    trained."""
    held = (
        BYTES_PER_FROZEN * n_params + BYTES_PER_WEIGHT * adapters
        if adapters
        else BYTES_PER_WEIGHT * n_params
    )
    return held <= SHARE_FOR_WEIGHTS * memory


def mesh(over: int | None = None) -> DeviceMesh:
    """All ranks as ("shard",), or as ("replicate", "shard") where `over` of them (None = a
    node's) share one copy."""
    world = dist.world_size()
    over = over or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % over:
        raise ConfigError(
            f"{over} ranks to a copy of the weights do not divide {world} ranks; set --shard-over"
        )
    sizes, names = (
        ((world,), ("shard",)) if over == world else ((world // over, over), ("replicate", "shard"))
    )
    ranks = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=names)
    # torch caches the specs of sharded tensors for the life of the process; they hold the mesh,
    # and it its groups
    dist.when_destroyed(lambda: getattr(ranks, "_pg_registry", {}).clear())
    return ranks


def shard(model: M, ranks: DeviceMesh) -> M:
    """Split the parameters over the mesh, in place: each block is gathered on its own, the rest
    as one."""
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    dtype = numerics.compute_dtype()
    products = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mesh=ranks, mp_policy=products)
    fully_shard(model, mesh=ranks, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # losses are divided by the tokens of all ranks, so gradients add up;
            part.set_gradient_divide_factor(1.0)
            # gloo supports no other reduction with a factor
            part.set_force_sum_reduction_for_comms(True)
    for name in FORWARD_METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return model


def is_sharded(model: nn.Module) -> bool:
    return FSDP in sys.modules and isinstance(model, sys.modules[FSDP].FSDPModule)


def build(
    make: Callable[[], M],
    *,
    seed: int | None = 0,
    shard_it: bool | None = None,
    over: int | None = None,
    adapters: int = 0,
) -> M:
    """The model that `make` returns, initialised from `seed` (none = not at all) on this rank's
    device; the same weights whole or sharded. shard_it: None = where a replica does not fit;
    adapters: as of `fits`."""
    with torch.device("meta"):
        model = make()
    device = hardware.device()
    # on the meta device: counted before any memory is taken
    n_params = sum(p.numel() for p in model.parameters())
    if shard_it is None:
        # one decision for all: a rank that shards alone would wait for the others for ever
        shard_it = not all(dist.gather(fits(n_params, device_memory(device), adapters)))
    if dist.world_size() > 1 and shard_it:
        shard(model, mesh(over))
    model.to_empty(device=device)
    if seed is not None:
        draw: Any = model.init_weights  # of GPT, and of heads beside it
        draw(seed)
    return model


def in_step(model: nn.Module, batches: list[T], idle: T) -> list[T]:
    """Equally many batches on every rank, padded with `idle`, where forward and backward passes
    are collectives."""
    if not is_sharded(model):
        return batches
    return batches + [idle] * (max(dist.gather(len(batches))) - len(batches))


# ---- sharded tensors


def is_sharded_tensor(value: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor, whose class is imported where there is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank. A collective where it is sharded."""
    return tensor.full_tensor() if is_sharded_tensor(tensor) else tensor


@torch.no_grad()
def fill(p: Tensor, value: Tensor) -> None:
    """Copy the whole `value`, equal on all ranks, into p, or into this rank's part of it. No
    communication."""
    if is_sharded_tensor(p):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(
            value.to(p.device), p.device_mesh, p.placements, src_data_rank=None
        )
    p.copy_(value)


@torch.no_grad()
def plain_copy(model: M, dtype: torch.dtype) -> M:
    """A copy of plain tensors for reading, in evaluation mode: block matrices in the dtype of
    products, the rest shared where it is plain. A collective where the model is sharded."""
    with torch.device("meta"):
        copy = type(model)(model.cfg)  # FSDP hands back the class that it wrapped
    state = {}
    for name, p in model.named_parameters():
        product = p.ndim == 2 and name.startswith("blocks.")
        state[name] = gathered(p.to(dtype) if product else p).detach()
    copy.load_state_dict(state, assign=True)
    return copy.requires_grad_(False).eval()


@contextmanager
def whole(model: M) -> Iterator[M]:
    """The model for reading, in evaluation mode: itself, or where it is sharded a plain copy.
    Entering is a collective."""
    if is_sharded(model):
        reshard: Any = model.reshard
        reshard()  # after a forward pass the root's weights are still gathered
        yield plain_copy(model, numerics.compute_dtype())
    else:
        was_training = model.training
        try:
            yield model.eval()
        finally:
            model.train(was_training)


# ---- gradients


def sum_gradients(model: nn.Module) -> None:
    """Add the gradients of replicas over ranks, after the backward pass; a missing one counts
    as zero."""
    if dist.world_size() == 1:
        return
    params = [p for p in model.parameters() if p.requires_grad and not is_sharded_tensor(p)]
    sizes = [p.numel() for p in params]
    numbers = [end // BUCKET for end in accumulate(sizes)]  # of each weight's bucket
    for _, members in groupby(zip(numbers, params), key=itemgetter(0)):
        bucket = [p for _, p in members]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        total = dist.sum_(torch.cat([grad.flatten() for grad in grads]))
        parts = total.split([p.numel() for p in bucket])
        for p, grad, part in zip(bucket, grads, parts):
            p.grad = grad.copy_(part.view_as(p))


def clip_gradients(weights: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm` (0 = no limit);
    returns the norm before.

    A collective where some are sharded."""
    learned = [p for p in weights if p.grad is not None]
    sharded = [p for p in learned if is_sharded_tensor(p)]
    plain = [p for p in learned if not is_sharded_tensor(p)]
    # apart: torch takes no norm of both together
    kinds = [part for part in (sharded, plain) if part] or [learned]
    norms = []
    for part in kinds:
        gradients = [p.grad for p in part if p.grad is not None]
        norms.append(gathered(nn.utils.get_total_norm(gradients)))
    total = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
    for part in kinds:
        nn.utils.clip_grads_with_norm_(part, max_norm or math.inf, total)
    return float(total)
