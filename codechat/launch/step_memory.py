"""What one rank holds at the peak of a training step, from the step itself run on fake tensors: seconds for any size, and no GPU.

The loops' own functions build, shard and train the model, on a fake process group of the requested ranks; only the data are missing. Every token
counts as supervised, the most that a batch can cost. Where code depends on the processor, the CPU's path runs with the GPU's numeric types.

Left out: `torch.compile`, which keeps less than the eager step that is measured here, and rollouts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as td
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codechat.core.errors import RunError
from codechat.distributed import dist, hardware, sharding
from codechat.launch.memory_tape import CATEGORIES, Tape
from codechat.models import head, layers, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step: rows of `length` tokens, `batch` of them per microbatch and rank, on `ranks` ranks of which `over` share a copy
    of the weights (1 = every rank holds its own). packed: with the positions of packed conversations. dtype: of compute. gpu_bytes: memory of
    the GPU, by which the output head sizes its chunks (0 = as on a CPU). logprobs: the loss is one of log-probabilities, as in RL."""

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


@dataclass(frozen=True)
class Peaks:
    """Bytes by category at the peak of a training step, and at the peak of an evaluation between two steps."""

    training: dict[str, int]
    evaluation: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.largest.values())

    @property
    def largest(self) -> dict[str, int]:
        """The larger one of the two."""
        return max(self.training, self.evaluation, key=lambda categories: sum(categories.values()))


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


# Blocks are alike: what each moment of a step holds grows by the same bytes with every block. Two blocks are special, the first and the
# last, and FSDP gathers one ahead, so that three are the fewest of a deep model.
SHALLOW = (3, 4)  # one more block
Bytes = dict[str, int]


class Moments(NamedTuple):
    """Bytes by category: at the peak of forward and backward passes, after the last forward pass, after the last backward pass, at the
    peak of the optimizer, and of an evaluation."""

    passes: Bytes
    kept: Bytes
    after: Bytes
    update: Bytes
    evaluation: Bytes


@cache
def measure(step: Step, whole: bool = False) -> Peaks:
    """The peaks of a step and of an evaluation on this rank. whole: run every block of a deep model too. Results are cached.

    Of a deep model, passes and evaluation are those of two shallow ones, continued to its depth. That is exact while the largest moment
    is the same one: a backward pass begins with all activations and ends with all gradients, and where either grows faster with depth
    than the peak of the shallow models, or that moved from one moment to another between them, the whole model is run."""
    if whole or step.model.depth <= 2 * SHALLOW[1]:
        return _peaks(_run(step))
    few, more = (_run(replace(step, model=replace(step.model, depth=depth))) for depth in SHALLOW)
    growth = [_growth(a, b) for a, b in zip(few, more)]
    passes, kept, after, *_ = (sum(g.values()) for g in growth)
    if passes < max(kept, after) or min(*growth[0].values(), *growth[4].values()) < 0:
        return _peaks(_run(step))
    plain = replace(step.model, recompute="nothing")
    update = _run_update(replace(step, model=plain, batch=1, length=1, grad_accum=1, packed=False))
    blocks = step.model.depth - SHALLOW[1]
    deep = [{c: n + blocks * grows[c] for c, n in found.items()} for found, grows in zip(more, growth)]
    return _peaks(Moments(*deep)._replace(update=update))


def _peaks(found: Moments) -> Peaks:
    return Peaks(max(found.passes, found.update, key=lambda some: sum(some.values())), found.evaluation)


def _growth(few: Bytes, more: Bytes) -> Bytes:
    """Bytes that one more block adds."""
    return {c: more.get(c, 0) - few.get(c, 0) for c in CATEGORIES}


@contextmanager
def _stepping(step: Step) -> Iterator[tuple[GPT, list[torch.optim.Optimizer], Tape]]:
    """(model, optimizers with their states, tape) on fake tensors, as they are between two steps of training."""
    with fake_ranks(step.ranks), _as_on_a_gpu(step.dtype, step.gpu_bytes):
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
            yield model, optimizers, tape


def _run(step: Step) -> Moments:
    """The whole step, then an evaluation."""
    with _stepping(step) as (model, optimizers, tape):
        tape.reset_peak()
        for _ in range(min(step.grad_accum, 2)):  # a third microbatch adds nothing
            loss = _loss(model, step) / (step.batch * step.length)
            kept = list(tape.now.items())
            loss.backward()
            del loss
        passes = tape.reset_peak()
        after = list(tape.events)
        dist.sum_gradients(model)
        _update(model, optimizers)
        update = tape.reset_peak()
        with sharding.whole(model) as reader, torch.no_grad():
            for p in reader.parameters():
                tape.see(p, "weights" if reader is model else "gathered weights", sure=True)
            _loss(reader, step)
        return Moments(*map(tape.peak, (passes, kept, after, update, tape.events)))


@cache
def _run_update(step: Step) -> Bytes:
    """The optimizer's part alone, which knows neither the batch nor what the passes keep."""
    with _stepping(step) as (model, optimizers, tape):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            tape.see(p.grad, "gradients", sure=True)
        tape.reset_peak()
        dist.sum_gradients(model)
        _update(model, optimizers)
        return tape.peak()


def _loss(model: GPT, step: Step) -> Tensor:
    ids, targets = (torch.zeros(step.batch, step.length, dtype=torch.int64) for _ in range(2))
    where = {}
    if step.packed:
        # a block mask of flex attention takes no memory to speak of, and its kernel keeps what the causal one does
        where = dict(positions=torch.zeros(step.batch, step.length, dtype=torch.int64))
    with torch.autocast("cpu", dtype=getattr(torch, step.dtype), enabled=step.dtype != "float32"):
        if not step.logprobs:
            return model.loss(ids, targets, reduction="sum", **where)
        # every token by its place: which ones a mask leaves is not known of fake tensors
        found, *_ = model.token_logprobs(ids, targets, places=torch.arange(ids.numel()), **where)
        return found.sum()


def _update(model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    dist.clip_gradients(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def _as_on_a_gpu(dtype: str, gpu_bytes: int) -> Iterator[None]:
    """The numeric types, the norms and the output head's chunks of a GPU with so much memory (0: a CPU's), whatever this machine has. Muon iterates twice: further
    iterations hold what the second one does."""
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
