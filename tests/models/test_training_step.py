"""A training step as a GPU runs it: blocks share one compiled graph, rows have one shape, the host waits at most
twice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sync_count import SyncCount
from test_packed_attention import DOCS, rollouts
from torch._dynamo.utils import counters

from codechat.distributed import dist, hardware
from codechat.models import head, optim, packed_attention
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import losses, rollout
from codechat.rl.rollout import RolloutBatch

SHAPE = GPTConfig(depth=12, n_embd=32, n_head=2, block_size=128, vocab_size=300)
RL = SimpleNamespace(temperature=1.0, row_tokens=64, rows=2, grad_clip=1.0)


def random_rollouts(seed: int) -> RolloutBatch:
    """Three groups of four completions of random lengths."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (12,), generator=rng).tolist()
    return rollouts(rng, [5, 6, 7], lengths, torch.rand(12, generator=rng).tolist())


def pretrain_step(model: GPT, optimizers: list[Any], accum: int = 1) -> None:
    for i in range(accum):
        ids = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(i))
        (model.loss(ids, ids, reduction="sum", every=True) / ids.numel()).backward()
    take_step(optimizers, model)


def sft_step(model: GPT, optimizers: list[Any]) -> None:
    ids = torch.zeros(2, 256, dtype=torch.long)
    targets = ids.masked_fill(DOCS != 1, -100)
    mask = packed_attention.Documents(DOCS).mask  # the mask of a GPU reaches no operator that waits
    model.loss(ids, targets, reduction="sum", positions=ids, mask=mask).backward()
    take_step(optimizers, model)


def take_step(optimizers: list[Any], model: GPT) -> None:
    dist.clip_gradients(model.parameters(), RL.grad_clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def rl_step(model: GPT, optimizers: list[Any], seed: int) -> int:
    batch = random_rollouts(seed)
    n = 0
    shapes = rollout.row_shapes(batch, RL.row_tokens, RL.rows, dist.device())
    for n, packed in enumerate(rollout.pack(batch, batch.rewards != 0.5, **shapes), 1):
        assert packed.ids.shape == (2, 64)
        with torch.enable_grad():
            mask = packed_attention.Documents(packed.docs).mask
            logprobs, _ = model.token_logprobs(packed.ids, packed.targets, positions=packed.positions, mask=mask)
            advantages = (batch.rewards - 0.5).view(-1, 1)[packed.numbers]
            losses.policy_gradient_loss(packed.unpack(logprobs), advantages, packed.mask(), 100).backward()
    take_step(optimizers, model)
    return n


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["pretrain", "recomputing", "rl"])
def test_twelve_blocks_are_one_graph_and_stay_it(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "DENSE", ())
    torch._dynamo.reset()
    model = GPT(replace(SHAPE, recompute="blocks" if loop == "recomputing" else "nothing"))
    optimizers = optim.build(model, lr=1e-3, optimizer="muon")
    hardware.compile_blocks(model, backend="eager")
    counters.clear()
    for step in range(5):
        rl_step(model, optimizers, step) if loop == "rl" else pretrain_step(model, optimizers)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    eager, compiled = GPT(SHAPE), GPT(SHAPE)
    hardware.compile_blocks(compiled, backend="eager")
    ids = torch.arange(64)[None]
    torch.testing.assert_close(eager.loss(ids, ids), compiled.loss(ids, ids))


@pytest.mark.slow
def test_block_masks_of_every_batch_go_through_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention becomes part of the block's graph, with the mask as its input. Without gradients, which it does
    not have on a CPU."""
    monkeypatch.setattr(packed_attention, "DENSE", ())
    torch._dynamo.reset()
    model = GPT(replace(SHAPE, block_size=256)).requires_grad_(False)
    hardware.compile_blocks(model, backend="eager", fullgraph=True)
    counters.clear()
    for i in range(4):
        docs, branches = ((torch.arange(256) // n).expand(2, 256).contiguous() for n in (20 + i, 5 + i))
        ids = torch.randint(300, (2, 256))
        found = model.hidden(ids, mask=packed_attention.flex_mask(docs, branches % 3))
        assert found.shape == (2, 256, 32) and counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_on_a_gpu_blocks_are_compiled_and_on_a_cpu_the_whole_loss_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: seen.append(self))
    monkeypatch.setattr(torch, "compile", lambda fn: seen.append(fn) or fn)
    monkeypatch.setattr(hardware, "leave_out_head", lambda kind: None)
    model = GPT(SHAPE)
    for requested, kind, dtype, expected in (
        (True, "cuda", torch.bfloat16, list(model.blocks)),
        (True, "cpu", torch.bfloat16, [model.loss]),
        (None, "cpu", torch.bfloat16, [model.loss]),
        (None, "cpu", torch.float32, []),
    ):
        seen.clear()
        hardware.maybe_compile(model.loss, requested, torch.device(kind), dtype)
        assert seen == expected


@pytest.mark.slow
def test_stages_of_one_process_compile_rows_of_every_length() -> None:
    """A recipe trains its stages in one process: a graph made for one length of packed rows must not break the next."""
    torch._dynamo.reset()
    shape = replace(SHAPE, depth=1, n_embd=64, n_head=1, block_size=512)
    for T in (192, 160, 136):
        ids = torch.randint(300, (2, T), generator=torch.Generator().manual_seed(T))
        losses_of = {}
        for compiled in (False, True):
            model = GPT(shape, seed=1)
            loss = hardware.maybe_compile(model.loss, compiled, torch.device("cpu"), torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                docs = torch.arange(T).div(50, rounding_mode="floor").expand(2, T).contiguous()
                losses_of[compiled] = loss(ids, ids, mask=packed_attention.Documents(docs))
            losses_of[compiled].backward()
            assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        torch.testing.assert_close(losses_of[True], losses_of[False], rtol=1e-2, atol=0)


def test_the_host_waits_at_most_twice_in_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of the gradients, and in SFT where the targets are; however many chunks the head has."""
    monkeypatch.setattr(packed_attention, "DENSE", ())
    monkeypatch.setattr(head, "CHUNK_BYTES", 32 * 4 * 320)
    model = GPT(replace(SHAPE, depth=2, block_size=256))
    optimizers = optim.build(model, lr=1e-3, optimizer="muon")
    for step, most in (
        (lambda: pretrain_step(model, optimizers), 1),
        (lambda: pretrain_step(model, optimizers, accum=3), 1),
        (lambda: sft_step(model, optimizers), 2),
    ):
        step()  # the first step makes the states of the optimizer
        with SyncCount() as syncs:
            step()
        assert syncs.calls.total() == most <= 2, syncs.calls


def test_without_looking_at_targets_the_loss_and_its_gradient_are_bitwise_the_same() -> None:
    found = []
    for every in (False, True):
        model = GPT(replace(SHAPE, depth=2))
        ids = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(0))
        loss = model.loss(ids, ids, reduction="sum", every=every)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found))
