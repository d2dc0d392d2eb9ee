"""What one rank holds at the peak of a training step: the step of one device on fake tensors (seconds for any size, and no GPU), divided by
the ranks that share the weights.

Every token counts as supervised, the most that a batch can cost. The CPU's path runs with the GPU's numeric types; `torch.compile` keeps
less than the eager step that is measured here."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from codechat.distributed import dist, hardware
from codechat.models import head, layers, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

aten = torch.ops.aten
CATEGORIES = ("weights", "gradients", "optimizer states", "gathered weights", "activations", "optimizer temporaries")
Bytes = dict[str, int]
SHALLOW = (3, 4)  # blocks are alike: every moment of a step grows by the same bytes with each of them


class Tape(TorchDispatchMode):
    """Bytes of the tensors made within it: `now`, and the `peak` since it was last set. Also of fake tensors, if it is entered after
    FakeTensorMode; there `nonzero` has every place, and a number read from a tensor is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # address of a living storage -> bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(fake := args[0] if args else None, FakeTensor):
            if func is torch.ops.prim.device.default:
                return fake.fake_device  # more than half of all calls, and answered at once
            if func is aten._local_scalar_dense.default:
                return True if fake.dtype == torch.bool else 1.0 if fake.dtype.is_floating_point else 1
            if func is aten.nonzero.default:
                func, args = aten.new_empty.default, (fake, [fake.numel(), fake.dim()])
                kwargs = {"dtype": torch.int64}
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if not isinstance(t, Tensor) or t.device.type == "meta":
                continue
            if (storage := t.untyped_storage())._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._died, storage._cdata).atexit = False
                self.add(storage.nbytes())
        return out

    def _died(self, address: int) -> None:
        self.now -= self._sizes.pop(address)

    def add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step on `ranks` ranks, of which `over` share a copy of the weights: `batch` rows of `length` tokens per microbatch and
    rank. packed: rows of conversations; logprobs: the loss of RL. gpu_bytes: by which the output head sizes its chunks (0 = as on a CPU)."""

    model: GPTConfig
    batch: int
    length: int
    grad_accum: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    ranks: int = 1
    over: int = 1
    packed: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    gpu_bytes: int = 0
    logprobs: bool = False


class Peaks(NamedTuple):
    """Bytes by category at the peak of a training step, and of an evaluation between two steps."""

    training: Bytes
    evaluation: Bytes

    @property
    def largest(self) -> Bytes:
        return max(self, key=lambda held: sum(held.values()))

    @property
    def total(self) -> int:
        return sum(self.largest.values())


@cache
def measure(step: Step, whole: bool = False) -> Peaks:
    """The peaks of a step and of an evaluation on a rank. Those of a deep model are continued from two shallow ones, unless `whole`."""
    depth = step.model.depth
    if whole or depth <= SHALLOW[1]:
        return _peaks(step, _run(step))
    few, more = (_run(replace(step, model=replace(step.model, depth=d))) for d in SHALLOW)
    return _peaks(step, {name: n + (depth - SHALLOW[1]) * (n - few[name]) for name, n in more.items()})


def _peaks(step: Step, one: Bytes) -> Peaks:
    """The largest moment of one device's step, on a rank that holds 1 / over of weights, gradients and states and gathers the rest as FSDP
    does: what is outside of blocks throughout, a block while it computes, and in a backward pass also the one before and a block's
    gradients in float32."""
    cfg, size = step.model, 4 if step.dtype == "float32" else 2
    matrices, block = cfg.depth * cfg.block_matmul_params, size * cfg.block_matmul_params
    weights, states, outside = one["weights"] // step.over, one["states"] // step.over, one["weights"] - 4 * matrices
    backward, earlier = outside + 2 * block + 4 * cfg.block_matmul_params, weights if step.grad_accum > 1 else 0
    # of Muon: a rank iterates its share of the matrices, which travel there and back; replicas keep all momenta
    mine = -(-cfg.depth // (step.over if step.over > 1 else step.ranks)) / cfg.depth
    share = 1 if step.ranks == 1 else 0.5 + 0.6 * mine if step.over == 1 else 1.95 * mine
    moments = [  # gradients, gathered weights, activations, temporaries of the optimizer
        (earlier, outside + block, one["forward"], 0),
        (earlier, backward, one["begins"], 0),
        (weights, backward, one["ends"] + earlier - weights, 0),
        (weights, 0, 0, int(share * one["update"])),
        (0, outside + size * matrices, one["evaluation"], 0),
    ]
    *training, evaluation = (
        dict(zip(CATEGORIES, (weights, gradients, states, gathered if step.over > 1 else 0, *rest)))
        for gradients, gathered, *rest in moments
    )
    return Peaks(max(training, key=lambda held: sum(held.values())), evaluation)


def _run(step: Step) -> Bytes:
    """Of a step on one device, then an evaluation: bytes of weights and optimizer states; beyond these, at the peak of a forward pass, of the
    beginning and the end of a backward pass, and of an evaluation; beyond gradients, at the peak of the optimizer."""
    with _as_on_a_gpu(step.dtype, step.gpu_bytes), FakeTensorMode(), Tape() as tape:
        model = GPT(step.model)
        hardware.leave_out_head(GPT)  # as in training, where these calls keep the last hidden states alive
        one = {"weights": tape.now}
        optimizers = optim.build(model, lr=1e-3, optimizer=step.optimizer)
        _update(model, optimizers, tape)  # so that optimizer states exist, as they do in every step but the first
        one["states"] = tape.now - one["weights"]
        one["update"] = _update(model, optimizers, tape)
        if step.over > 1:  # a rank computes with gathered weights, which are in the compute dtype
            for p in model.blocks.parameters():
                p.data = p.data.to(getattr(torch, step.dtype))
        shards, middle = [], next(model.blocks[step.model.depth // 2].parameters())

        def reduce(p: Tensor) -> None:
            """A gradient is summed over ranks, which keep their shards of it, as soon as it is there."""
            if step.over > 1 and step.grad_accum == 1:
                shards.append(torch.zeros(p.numel() // step.over))
            if step.over > 1 or step.grad_accum > 1:
                p.grad = None
            if p is middle:
                one["begins"], tape.peak = tape.peak - start, tape.now

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(reduce)
        start = tape.peak = tape.now
        loss = _loss(model, step) / (step.batch * step.length)
        one["forward"], tape.peak = tape.peak - start, tape.now
        loss.backward()
        del loss
        one["ends"] = tape.peak - start
        shards.clear()
        model.zero_grad(set_to_none=True)
        start = tape.peak = tape.now
        with torch.no_grad():
            _loss(model, step)
        return one | {"evaluation": tape.peak - start}


def _loss(model: GPT, step: Step) -> Tensor:
    ids, targets = (torch.zeros(step.batch, step.length, dtype=torch.int64) for _ in range(2))
    # a block mask of flex attention takes no memory to speak of, and its kernel keeps what the causal one does
    where = {"positions": torch.zeros_like(ids)} if step.packed else {}
    with torch.autocast("cpu", dtype=getattr(torch, step.dtype), enabled=step.dtype != "float32"):
        if not step.logprobs:
            return model.loss(ids, targets, reduction="sum", **where)
        # every token by its place: which ones a mask leaves is not known of fake tensors
        return model.token_logprobs(ids, targets, places=torch.arange(ids.numel()), **where)[0].sum()


def _update(model: GPT, optimizers: list[torch.optim.Optimizer], tape: Tape) -> int:
    """A step of the optimizers: the bytes at its peak beyond gradients and what was there before."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    start = tape.peak = tape.now
    dist.clip_gradients(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return tape.peak - start


@contextmanager
def _as_on_a_gpu(dtype: str, gpu_bytes: int) -> Iterator[None]:
    """The numeric types, norms and chunks of the output head of a GPU with so much memory (0: a CPU's), whatever this machine has. Muon
    iterates twice: further iterations hold what the second one does."""
    written_out = layers.written_out
    with (
        mock.patch.object(layers, "written_out", lambda x: not gpu_bytes and written_out(x)),
        mock.patch.object(head, "BLOCK_BYTES", sys.maxsize),
        mock.patch.object(head, "_budget", lambda _, fixed, share: max(fixed, int(share * gpu_bytes))),
        mock.patch.dict(os.environ, CODECHAT_DTYPE=dtype),
        mock.patch.object(optim, "iteration_dtype", lambda _: getattr(torch, dtype)),
        mock.patch.object(optim, "orthogonalise", partial(optim.orthogonalise, steps=2)),
    ):
        yield
