"""What one rank holds at the peak of a training step, from the step itself run on fake tensors: seconds for any size, and no GPU.

The model is built, sharded and trained by the functions that the loops call, on a fake process group of as many ranks as asked for;
only the data are missing. Every token is taken as supervised, which is the most that a batch can cost. Where the processor is named in
the code, the CPU's path is taken with the GPU's numeric types.

Left out: `torch.compile`, which keeps less than the eager step that is measured here, and rollouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal
from unittest import mock

import torch
import torch.distributed as td
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codechat.core.errors import RunError
from codechat.data import conversations
from codechat.distributed import dist, sharding
from codechat.launch.memory_tape import Tape
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step: rows of `length` tokens, `batch` of them per microbatch and rank, on `ranks` ranks of which `over` share a copy
    (1 = every rank holds its own). packed: with the mask and positions of packed conversations."""

    model: GPTConfig
    batch: int
    length: int
    grad_accum: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    ranks: int = 1
    over: int = 1
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Peaks:
    """Bytes by category at the peak of a training step, and at the peak of an evaluation between two steps."""

    training: dict[str, int]
    evaluation: dict[str, int]

    @property
    def total(self) -> int:
        return max(sum(self.training.values()), sum(self.evaluation.values()))


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of `ranks` of which only the first is here, and whose collectives do nothing. RunError inside a real group."""
    if td.is_initialized():
        raise RunError(
            "a plan needs a process without a process group; run it before training begins, not under torchrun"
        )
    if ranks == 1:
        yield
        return
    import torch.distributed._tools.fake_collectives  # noqa: F401  (gives collectives on fake tensors their shapes)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        td.destroy_process_group()


@cache
def measure(step: Step) -> Peaks:
    """Run the step, then an evaluation, on fake tensors; the peaks of this rank. Asked again, the same answer at once."""
    with fake_ranks(step.ranks), _as_on_a_gpu(step.dtype):
        mesh = sharding.mesh(step.over) if step.over > 1 else None  # made of real tensors
        with FakeTensorMode(), Tape() as tape:
            with torch.device("cpu" if mesh is None else "meta"):
                model = GPT(step.model)
            if mesh is not None:
                sharding.shard(model, mesh, step.dtype)
                model.to_empty(device="cpu")
            optimizers = optim.build(model, lr=1e-3, optimizer=step.optimizer)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            _update(model, optimizers)  # so that optimizer states exist, as they do in every step but the first
            tape.reset_peak()
            for _ in range(min(step.grad_accum, 2)):  # a third microbatch adds nothing
                _backward(model, step)
            dist.sum_gradients(model)
            _update(model, optimizers)
            training = tape.peak()
            tape.reset_peak()
            with sharding.whole(model) as reader, torch.no_grad():
                for p in reader.parameters():
                    tape.see(p, "weights" if reader is model else "gathered weights", sure=True)
                _loss(reader, step)
            return Peaks(training, tape.peak())


def _backward(model: GPT, step: Step) -> None:
    (_loss(model, step) / (step.batch * step.length)).backward()


def _loss(model: GPT, step: Step) -> Tensor:
    ids, targets = (torch.zeros(step.batch, step.length, dtype=torch.int64) for _ in range(2))
    where = {}
    if step.packed:
        docs = torch.zeros(step.batch, step.length, dtype=torch.int64)
        where = dict(positions=docs.clone(), mask=conversations.block_mask(docs))
    with torch.autocast("cpu", dtype=step.dtype, enabled=step.dtype != torch.float32):
        return model.loss(ids, targets, reduction="sum", **where)


def _update(model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    dist.clip_gradients(model, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def _as_on_a_gpu(dtype: torch.dtype) -> Iterator[None]:
    """The numeric types of a GPU, whatever this machine has."""
    with (
        mock.patch.dict(os.environ, CODECHAT_DTYPE=str(dtype).removeprefix("torch.")),
        mock.patch.object(optim, "iteration_dtype", lambda _: dtype),
    ):
        yield
