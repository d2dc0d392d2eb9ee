"""What one rank holds at the peak of a training step: the step of one device on fake tensors
(seconds for any size, and no GPU), divided by the ranks that share the weights.

Every token counts as supervised, the most that a batch can cost. The CPU's path runs with the
GPU's numeric types; `torch.compile` keeps less than the eager step that is measured here."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from codechat.distributed import numerics, sharding
from codechat.models import gpt, lora, optim

if TYPE_CHECKING:
    from codechat_lab.instruments.plan_settings import PlanConfig

aten = torch.ops.aten
CATEGORIES = (
    "weights",
    "gradients",
    "optimizer states",
    "gathered weights",
    "activations",
    "optimizer temporaries",
)
Bytes = dict[str, int]
# blocks are alike: every moment of a step grows by the same bytes with each of them
SHALLOW = (3, 4)


class Tape(TorchDispatchMode):
    """Bytes of the tensors made within it: `now`, and the `peak` since it was last set. Also of
    fake tensors, if it is entered after FakeTensorMode; there `nonzero` has every place, and a
    number read from a tensor is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # address of a living storage -> bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake = args[0] if args else None
        if isinstance(fake, FakeTensor):
            if func is torch.ops.prim.device.default:
                return fake.fake_device  # more than half of all calls, and answered at once
            if func is aten._local_scalar_dense.default:
                if fake.dtype == torch.bool:
                    return True
                return 1.0 if fake.dtype.is_floating_point else 1
            if func is aten.nonzero.default:
                func = aten.new_empty.default
                args = (fake, [fake.numel(), fake.dim()])
                kwargs = {"dtype": torch.int64}
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and t.device.type != "meta":
                self._note(t.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage until it ends."""
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes()
        ended = weakref.finalize(storage, lambda key: self.add(-self._sizes.pop(key)), address)
        ended.atexit = False
        self.add(storage.nbytes())

    def add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)


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
def measure(
    cfg: PlanConfig, whole: bool = False, dtype: str = "bfloat16", cpu: bool = False
) -> Peaks:
    """The peaks of a step and of an evaluation on a rank. Those of a deep model are continued
    from two shallow ones, unless `whole`.
    cpu: with the chunks, norms and last block of a CPU."""
    depth = cfg.model.depth
    cfg = replace(cfg, shard=cfg.over > 1, shard_over=cfg.over)  # also where it is shallow
    if whole or depth <= SHALLOW[1]:
        return _peaks(cfg, dtype, _run(cfg, dtype, cpu))
    few, more = (_run(replace(cfg, model=replace(cfg.model, depth=d)), dtype, cpu) for d in SHALLOW)
    further = depth - SHALLOW[1]  # blocks
    deep = {name: n + further * (n - few[name]) for name, n in more.items()}
    return _peaks(cfg, dtype, deep)


def _peaks(cfg: PlanConfig, dtype: str, one: Bytes) -> Peaks:
    """The largest moment of one device's step, on a rank that holds 1 / over of weights,
    gradients and states and gathers the rest as FSDP does: what is outside of blocks throughout,
    a block while it computes, and in a backward pass also the one before and a block's gradients
    in float32."""
    model = cfg.model
    over = cfg.over
    size = 4 if dtype == "float32" else 2
    matrices = model.depth * model.block_matmul_params
    block = size * model.block_matmul_params
    weights = one["weights"] // over
    states = one["states"] // over
    outside = one["weights"] - 4 * matrices
    gradients = one["gradients"] // over
    backward = outside + 2 * block + 4 * model.block_matmul_params
    earlier = gradients if cfg.grad_accum > 1 else 0
    # in float32; it stays through both phases of RL
    reference = {"reference": 4 * model.n_params // over} if cfg.reference else {}

    def held(gradients: int, gathered: int, activations: int, temporaries: int = 0) -> Bytes:
        """Bytes by category at one moment. temporaries: of the optimizer."""
        gathered = gathered if over > 1 else 0
        sizes = (weights, gradients, states, gathered, activations, temporaries)
        return dict(zip(CATEGORIES, sizes, strict=True)) | reference

    training = (
        held(earlier, outside + block, one["forward"]),
        held(earlier, backward, one["begins"]),
        held(gradients, backward, one["ends"] + earlier - gradients),
        held(gradients, 0, 0, temporaries=int(_updated_share(cfg) * one["update"])),
    )
    evaluation = held(0, outside + size * matrices, one["evaluation"])
    return Peaks(max(training, key=lambda moment: sum(moment.values())), evaluation)


def _updated_share(cfg: PlanConfig) -> float:
    """Temporaries of Muon's step on one of several GPUs, as a share of those on a single one: a
    rank iterates its share of the matrices, which travel there and back; replicas keep all
    momenta."""
    if cfg.gpus == 1:
        return 1
    depth = cfg.model.depth
    mine = -(-depth // (cfg.over if cfg.over > 1 else cfg.gpus)) / depth
    return 0.5 + 0.6 * mine if cfg.over == 1 else 1.95 * mine


def _run(cfg: PlanConfig, dtype: str, cpu: bool) -> Bytes:
    """Of a step on one device, then an evaluation: bytes of weights and optimizer states;
    beyond these, at the peak of a forward pass, of the beginning and the end of a backward
    pass, and of an evaluation; beyond gradients, at the peak of the optimizer."""
    planned = numerics.Numerics(
        cpu=cpu,
        dtype=getattr(torch, dtype),
        memory=0 if cpu else cfg.usable_gib * 2**30,
    )
    with numerics.planning(planned), FakeTensorMode(), Tape() as tape:
        model = gpt.GPT(cfg.model)
        if cfg.lora_rank:
            lora.hold_matrices_in(model, planned.dtype)
        lora.attach(model, cfg.lora_rank, targets=cfg.lora_targets)
        trained = [p for p in model.parameters() if p.requires_grad]
        one = {"weights": tape.now, "gradients": sum(p.numel() * p.element_size() for p in trained)}
        optimizers = optim.build(model, lr=1e-3, optimizer=cfg.optimizer)
        # so that optimizer states exist, as they do in every step but the first
        _update(model, optimizers, tape)
        one["states"] = tape.now - one["weights"]
        one["update"] = _update(model, optimizers, tape)
        if cfg.over > 1:  # a rank computes with gathered weights, which are in the compute dtype
            for p in model.blocks.parameters():
                p.data = p.data.to(planned.dtype)
        shards = []
        middle = next(p for p in model.blocks[cfg.model.depth // 2].parameters() if p.requires_grad)

        def reduce(p: Tensor) -> None:
            """A gradient is summed over ranks, which keep their shards of it, as soon as it is
            there."""
            if cfg.over > 1 and cfg.grad_accum == 1:
                shards.append(torch.zeros(p.numel() // cfg.over))
            if cfg.over > 1 or cfg.grad_accum > 1:
                p.grad = None
            if p is middle:
                one["begins"] = tape.peak - start
                tape.peak = tape.now

        for p in trained:
            p.register_post_accumulate_grad_hook(reduce)
        start = tape.peak = tape.now
        loss = _loss(model, cfg, planned.dtype)
        one["forward"] = tape.peak - start
        tape.peak = tape.now
        loss.backward()
        del loss
        one["ends"] = tape.peak - start
        shards.clear()
        model.zero_grad(set_to_none=True)
        start = tape.peak = tape.now
        with torch.no_grad():
            _loss(model, cfg, planned.dtype)
        return one | {"evaluation": tape.peak - start}


def _loss(model: gpt.GPT, cfg: PlanConfig, dtype: torch.dtype) -> Tensor:
    """The loss of a microbatch whose every token counts."""
    ids = torch.zeros(cfg.batch, cfg.length, dtype=torch.int64)
    targets = torch.zeros_like(ids)
    # packed rows without their mask: a block mask of flex attention takes no memory to speak
    # of, and its kernel keeps what the causal one does
    positions = None if cfg.loop == "pretrain" else torch.zeros_like(ids)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        if cfg.loop != "rl":
            return model.loss(ids, targets, reduction="sum", positions=positions) / ids.numel()
        # every token by its place: which ones a mask leaves is not known of fake tensors
        places = torch.arange(ids.numel())
        return (
            model.token_logprobs(ids, targets, places=places, positions=positions)[0].sum()
            / ids.numel()
        )


def _update(model: gpt.GPT, optimizers: list[torch.optim.Optimizer], tape: Tape) -> int:
    """A step of the optimizers: the bytes at its peak beyond gradients and what was there
    before."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    start = tape.peak = tape.now
    sharding.clip_gradients(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return tape.peak - start
