"""Training steps: forward, backward, gradient clipping and AdamW on random ids, in the machine's
compute dtype.

python -m benchmarks train                        codechat, transformers' Arcee and GPT-2, a plain
GPT; eager and compiled python -m benchmarks train --vs plain --rounds 3 python -m benchmarks
train --preset 2b --device-batch-size 4 --seq-len 2048 --model.recompute blocks     one step of 2b
on a GPU
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure, peers
from benchmarks.settings import TrainBench
from codechat.distributed import hardware
from codechat.models import optim
from codechat.models.gpt import GPT


def builders(cfg: TrainBench) -> dict[str, Callable[[], measure.Contestant]]:
    """{name: builder}: codechat as it trains first, on a GPU also eager, then each peer in each
    mode."""
    device = hardware.device()

    def codechat(name: str, compile: bool) -> measure.Contestant:
        model = GPT(cfg.model).to(device)
        hardware.compile_blocks(model, compile)
        return _contestant(cfg, name, model, model.loss, optim.build(model, lr=1e-3))

    def peer(name: str, kind: str, compile: bool) -> measure.Contestant:
        model = peers.PlainGPT(cfg.model) if kind == "plain" else peers.huggingface(kind, cfg.model)
        model = model.to(device).train()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return _contestant(cfg, name, model, _loss_of(model, kind, compile), [adamw])

    return measure.entrants(cfg.modes, codechat, peer, cfg.vs)


def _contestant(
    cfg: TrainBench,
    name: str,
    model: torch.nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizers: list[torch.optim.Optimizer],
) -> measure.Contestant:
    device = hardware.device()
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        cfg.model.vocab_size, (cfg.device_batch_size, cfg.seq_len + 1), generator=rng
    ).to(device)
    ids = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()

    step = partial(measure.step, model, optimizers, partial(loss, ids, targets))
    return measure.Contestant(name, step, ids.numel(), cfg.model.flops_per_token(cfg.seq_len))


def _loss_of(model: Any, peer: str, compile: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        return (
            model.loss(ids, targets)
            if peer == "plain"
            else model(input_ids=ids, labels=ids, use_cache=False).loss
        )

    return torch.compile(loss) if compile else loss


def bench(cfg: TrainBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    began = time.perf_counter()
    made = builders(cfg)
    memory, shown = measure.memory_alone(__name__, cfg, made) if cfg.memory else ({}, None)
    left = measure.LIMIT_S - (time.perf_counter() - began)
    peak = measure.Peak()
    timings = measure.race([build() for build in made.values()], cfg.rounds, peak, left)
    params = cfg.model.n_params / 1e6
    title = (
        f"training step: {cfg.model.depth} x {cfg.model.n_embd}, {params:.1f} M "
        f"parameters, batch {cfg.device_batch_size} x {cfg.seq_len}, {measure.dtype()}"
    )
    measure.show(title, "tokens", timings, shown)
    print(peak)
    return {"title": title, "timings": measure.rows(timings), "memory": memory} | peak.row()
