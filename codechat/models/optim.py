"""Optimizers and learning-rate schedules, which are pure functions of the step: resuming needs
no scheduler state."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from codechat.distributed import numerics
from codechat.models.config import Schedule

# GPT-3's (arXiv:2005.14165, appendix B): 0.999 would average a thousand steps, more than many
# runs here have
BETAS = (0.9, 0.95)  # of AdamW
DECAY_SHARE = 0.4  # of the steps of warmup-stable-decay
QUINTIC = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz (Keller Jordan et al., 2024)
NEWTON_SCHULZ_STEPS = 5


def lr_scale(
    step: int,
    *,
    max_steps: int,
    warmup_steps: int = 0,
    schedule: Schedule = "cosine",
    final: float = 0.0,
) -> float:
    """Factor on the base learning rate at `step` (0-based), in [final, 1].

    Linear warm-up over `warmup_steps`; then constant, half a cosine down to `final` at
    `max_steps`, or warmup-stable-decay: constant, then linear to `final` over the last 40 % of
    the steps (arXiv:2405.18392)."""
    # step + 1: a rate of 0 would waste the first step
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
    return 1 - (1 - final) * max(0.0, (done - (1 - DECAY_SHARE)) / DECAY_SHARE)


def set_lr(optimizers: Iterable[torch.optim.Optimizer], scale: float) -> None:
    """Set each group's rate to its `base_lr` times `scale`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * scale


def build(
    model: nn.Module,
    *,
    lr: float,
    optimizer: Literal["adamw", "muon"] = "adamw",
    muon_lr: float = 0.02,
    weight_decay: float = 0.1,
) -> list[torch.optim.Optimizer]:
    """The optimizers of a model. Tensors of two or more dimensions have weight decay; gains and
    biases have none.

    With "muon" the block matrices take Muon at `muon_lr`; `lr` drives AdamW for the rest."""
    matrices: list[Tensor] = []
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        # embeddings and head stay with AdamW: Muon is for matrices that map a hidden state to
        # another
        if optimizer == "muon" and p.ndim == 2 and "blocks." in name:
            matrices.append(p)
        elif p.ndim >= 2:
            decaying.append(p)
        else:
            others.append(p)
    # no decay of gains and biases: it would pull a gain from its neutral 1 to 0
    groups: list[dict[str, Any]] = []
    for params, decay in ((decaying, weight_decay), (others, 0.0)):
        if params:
            groups.append({"params": params, "weight_decay": decay, "base_lr": lr})
    optimizers: list[torch.optim.Optimizer] = []
    # none where Muon has all that is trained, as it does with adapters: each lies in a block
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True))
    if matrices:
        optimizers.append(Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
    return optimizers


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for weight matrices (Keller Jordan et al.,
    2024; decay as in arXiv:2502.16982).

    The update of an (m, n) matrix has singular values near 1 and is scaled by sqrt(max(1, m /
    n)), so that `lr` means the same for every shape. Matrices of one shape are orthogonalised
    as one batch."""

    def __init__(
        self, params: Iterable[Tensor], *, lr: float = 0.02, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, dict(lr=lr, base_lr=lr, momentum=0.95, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["lr"]
            decay = 1 - lr * group["weight_decay"]
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape), []).append(p)
            for (m, n), params in shapes.items():
                updates = _orthogonalise_all([self._momentum(p, group["momentum"]) for p in params])
                rate = lr * max(1.0, m / n) ** 0.5
                for p, update in zip(params, updates):
                    # decoupled from the gradient, as in AdamW (arXiv:1711.05101)
                    p.mul_(decay)
                    p.add_(update.to(p.dtype), alpha=-rate)

    def _momentum(self, p: Tensor, beta: float) -> Tensor:
        """Nesterov momentum of p's gradient."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        buffer = state["momentum"].lerp_(p.grad, 1 - beta)
        return p.grad.lerp(buffer, beta)


def _orthogonalise_all(matrices: list[Tensor]) -> Sequence[Tensor]:
    """N matrices of one shape, orthogonalised; each rank does N / ranks of them."""
    sharded = [g for g in matrices if isinstance(g, DTensor)]
    if sharded:
        return _orthogonalise_sharded(sharded)
    if td.is_initialized() and td.get_world_size() > 1:
        return _orthogonalise_replicated(matrices)
    return list(orthogonalise(torch.stack(matrices)))


def _orthogonalise_replicated(matrices: list[Tensor]) -> list[Tensor]:
    """Every rank has all matrices. Each orthogonalises its share, then gathers the other shares."""
    first = matrices[0]
    ranks = td.get_world_size()
    share = -(-len(matrices) // ranks)
    mine = matrices[td.get_rank() * share :][:share]
    # equal shares, since all_gather takes tensors of one size; behind the last matrix they hold
    # zeros
    done = first.new_zeros(share, *first.shape, dtype=numerics.compute_dtype(first.device))
    if mine:
        done[: len(mine)] = orthogonalise(torch.stack(mine))
    every = done.new_empty(ranks * share, *first.shape)
    # torch 2.13 renames it
    gather = getattr(td, "all_gather_single", None) or td.all_gather_into_tensor
    gather(every, done)
    return list(every[: len(matrices)])


def _orthogonalise_sharded(matrices: list[DTensor]) -> list[Tensor]:
    """Every rank has some rows of each matrix. Two all-to-alls: it receives all rows of its
    share of the matrices, and returns them orthogonalised."""
    first = matrices[0]
    group = first.device_mesh.get_group("shard")
    ranks = td.get_world_size(group)
    m, n = first.shape
    share = -(-len(matrices) // ranks)
    rows = -(-m // ranks)  # of a rank, the last with fewer
    sent = first.to_local().new_zeros(ranks * share, rows, n)
    for to, g in zip(sent, matrices):
        to[: len(g.to_local())] = g.to_local()
    received = torch.empty_like(sent)  # rank-major: the rows that each rank has of my S matrices
    td.all_to_all_single(received, sent, group=group)
    whole = (
        received.view(ranks, share, rows, n).transpose(0, 1).reshape(share, ranks * rows, n)[:, :m]
    )
    done = F.pad(orthogonalise(whole).to(sent.dtype), (0, 0, 0, ranks * rows - m))
    td.all_to_all_single(
        received, done.view(share, ranks, rows, n).transpose(0, 1).contiguous(), group=group
    )
    return [
        DTensor.from_local(
            part[: len(g.to_local())],
            g.device_mesh,
            g.placements,
            shape=g.shape,
            stride=g.stride(),
        )
        for part, g in zip(received.view(ranks * share, rows, n), matrices)
    ]


def orthogonalise(g: Tensor) -> Tensor:
    """(N, m, n) -> matrices of the same singular vectors and singular values in about [0.7,
    1.2]: Muon's quintic Newton-Schulz iteration.

    Each step multiplies x by q = a + b s + c s^2 with s = x x', which commute. Where x is wide
    and float32, steps are taken on the small s. The rounding of s grows a^2 = 12 times a step,
    so it is computed anew after three."""
    a, b, c = QUINTIC
    x = g.to(numerics.compute_dtype(g.device))  # bfloat16 suffices (Keller Jordan et al., 2024)
    if g.shape[-2] > g.shape[-1]:
        x = x.mT
    # the Frobenius norm bounds the spectral norm: singular values begin within [0, 1]
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2]:
        for taken in range(0, NEWTON_SCHULZ_STEPS, 3):
            x = _product_of_steps(x @ x.mT, min(3, NEWTON_SCHULZ_STEPS - taken)) @ x
    else:
        for _ in range(NEWTON_SCHULZ_STEPS):
            s = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if g.shape[-2] > g.shape[-1] else x


def _product_of_steps(s: Tensor, steps: int) -> Tensor:
    """The product of the factors q of some steps, from s (N, m, m) of the first."""
    a, b, c = QUINTIC
    product = None
    for step in range(steps):
        q = torch.baddbmm(s, s, s, beta=b, alpha=c)
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        product = q if product is None else q @ product
        if step < steps - 1:
            s = q @ s @ q
    assert product is not None
    return product
