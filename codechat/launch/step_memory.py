"""What one rank holds at the peak of a training step, from the step itself run on fake tensors: seconds for any size, and no GPU.

The loops' own functions build, shard and train the model, on a fake process group of the requested ranks; only the data are missing. Every token
counts as supervised, the most that a batch can cost. Where code depends on the processor, the CPU's path runs with the GPU's numeric types.

Left out: `torch.compile`, which keeps less than the eager step that is measured here, and rollouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch
import torch.distributed as td
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codechat.core.errors import RunError
from codechat.distributed import dist, hardware, sharding
from codechat.launch.memory_tape import Tape
from codechat.launch.planner import Peaks, Step
from codechat.models import optim
from codechat.models.gpt import GPT


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of `ranks` with only the first rank present; its collectives do nothing. RunError inside a real group."""
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
    """Run the step, then an evaluation, on fake tensors; the peaks of this rank. Results are cached."""
    with fake_ranks(step.ranks), _as_on_a_gpu(step.dtype):
        mesh = sharding.mesh(step.over) if step.over > 1 else None  # made of real tensors
        with FakeTensorMode(), Tape() as tape:
            with torch.device("cpu" if mesh is None else "meta"):
                model = GPT(step.model)
                hardware.leave_out_eager(GPT)  # as in training, where these calls keep the last hidden states alive
            if mesh is not None:
                sharding.shard(model, mesh, getattr(torch, step.dtype))
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
        # a block mask of flex attention takes no memory to speak of, and its kernel keeps what the causal one does
        where = dict(positions=torch.zeros(step.batch, step.length, dtype=torch.int64))
    with torch.autocast("cpu", dtype=getattr(torch, step.dtype), enabled=step.dtype != "float32"):
        return model.loss(ids, targets, reduction="sum", **where)


def _update(model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    dist.clip_gradients(model, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def _as_on_a_gpu(dtype: str) -> Iterator[None]:
    """The numeric types of a GPU, whatever this machine has."""
    with (
        mock.patch.dict(os.environ, CODECHAT_DTYPE=dtype),
        mock.patch.object(optim, "iteration_dtype", lambda _: getattr(torch, dtype)),
    ):
        yield
