"""One optimizer update, and a forward pass of packed rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from codechat.distributed import dist, gradient_sums, hardware, sharding
from codechat.models import optim
from codechat.models.gpt import GPT
from codechat.rl import rollout
from codechat.rl.rollout import Packed, RolloutBatch


def set_rate(cfg: Any, optimizers: Iterable[torch.optim.Optimizer], step: int, max_steps: int | None = None) -> float:
    """Set the learning rates of this step; returns AdamW's."""
    scale = optim.lr_scale(
        step,
        max_steps=cfg.max_steps if max_steps is None else max_steps,
        warmup_steps=cfg.warmup_steps,
        schedule=cfg.schedule,
        final=cfg.final_lr_share,
    )
    optim.set_lr(optimizers, scale)
    return cfg.lr * scale


def compiled(cfg: Any, model: GPT) -> Callable[..., Tensor]:
    """`model.loss`, compiled where --compile says so or where it pays."""
    return hardware.maybe_compile(model.loss, cfg.compile, dist.device(), dist.compute_dtype())


def backward(loss: Tensor, model: nn.Module, last: bool) -> None:
    """The backward pass of a microbatch."""
    loss.backward()


def apply_gradients(
    cfg: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    model: nn.Module,
    *heads: nn.Module,
    weights: Sequence[Tensor] = (),
) -> float:
    """Add the gradients of all ranks, clip their common norm, take a step and forget them; returns the norm before clipping.

    weights: what the norm is taken over, in this order, on which its last bits depend; default: all weights of model and heads."""
    for part in (model, *heads):
        gradient_sums.finish(part)
    norm = dist.clip_gradients(weights or [p for part in (model, *heads) for p in part.parameters()], cfg.grad_clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def packs(cfg: Any, model: GPT, batch: RolloutBatch, advantages: Tensor, *, skip_zero: bool = True) -> Iterator[Packed]:
    """The batch as packed rows on this rank's device, on a GPU of one shape; where the model is sharded, equally many microbatches on every rank."""
    shapes = rollout.row_shapes(batch, cfg.row_tokens, cfg.rows, dist.device())
    found = list(rollout.pack(batch, advantages, skip_zero=skip_zero, **shapes))
    idle = rollout.idle(shapes["row_tokens"], shapes["rows"]) if shapes["fixed"] else rollout.idle()
    for packed in sharding.in_step(model, found, idle):
        yield packed.to(dist.device())


def token_logprobs(cfg: Any, model: GPT, packed: Packed, **how: Any) -> tuple[Tensor, ...]:
    """(R, T) log-probabilities of the targets at the sampling temperature, and entropies, which carry gradient where --entropy-coef asks for it;
    with states=True also the last states (R, T, D)."""
    with dist.autocast():
        return model.token_logprobs(
            packed.ids,
            packed.targets,
            temperature=cfg.temperature,
            entropy_grad=getattr(cfg, "entropy_coef", 0) != 0,
            positions=packed.positions,
            mask=packed.mask(),
            places=packed.places.flat,
            **how,
        )


def score(cfg: Any, model: GPT, batch: RolloutBatch) -> Tensor:
    """(N, C) log-probabilities of the completions under the model, without gradient. A collective where it is sharded."""
    with sharding.whole(model) as reader, dist.autocast():
        return rollout.score_logprobs(
            reader, batch, temperature=cfg.temperature, row_tokens=cfg.row_tokens, rows=cfg.rows
        )


def minibatches(batch: RolloutBatch, parts: int) -> list[tuple[list[int], RolloutBatch]]:
    """(groups, their rollouts) of each minibatch. Groups are dealt out in turn."""
    dealt = [list(range(m, len(batch.problems), parts)) for m in range(parts)]
    return [(groups, batch.take(groups)) for groups in dealt]


def rows_in(batch: RolloutBatch, groups: Sequence[int], packed: Packed) -> Tensor:
    """(B,) which completions of the whole batch lie in `packed`, which was made of these groups; on its device."""
    numbers = torch.arange(len(batch.completions)).view(-1, batch.group_size)[list(groups)].flatten()
    return dist.send(numbers, packed.ids.device)[packed.rows()]


def totals(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Numbers of this rank added up over all ranks, in their places. A collective."""
    return dist.sum_(torch.tensor(rows, dtype=torch.float64)).tolist()
