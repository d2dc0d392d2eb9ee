"""What of a training step is compiled, and that compiling breaks on no batch; `tests/gpu` counts graphs and waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from codechat.distributed import hardware
from codechat.models import attention
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

SHAPE = GPTConfig(depth=12, n_embd=32, n_head=2, block_size=128, vocab_size=300)


@pytest.mark.slow
def test_block_masks_of_every_batch_go_through_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention becomes part of the block's graph, with the mask as its input. Without gradients, which it does
    not have on a CPU."""
    monkeypatch.setattr(attention, "DENSE", ())
    torch._dynamo.reset()
    model = GPT(replace(SHAPE, block_size=256)).requires_grad_(False)
    hardware.compile_blocks(model, backend="eager", fullgraph=True)
    counters.clear()
    for i in range(4):
        docs, branches = ((torch.arange(256) // n).expand(2, 256).contiguous() for n in (20 + i, 5 + i))
        ids = torch.randint(300, (2, 256))
        found = model.hidden(ids, mask=attention.flex_mask(docs, branches % 3))
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
                losses_of[compiled] = loss(ids, ids, mask=attention.Documents(docs))
            losses_of[compiled].backward()
            assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        torch.testing.assert_close(losses_of[True], losses_of[False], rtol=1e-2, atol=0)


def test_without_looking_at_targets_the_loss_and_its_gradient_are_bitwise_the_same() -> None:
    found = []
    for every in (False, True):
        model = GPT(replace(SHAPE, depth=2))
        ids = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(0))
        loss = model.loss(ids, ids, reduction="sum", every=every)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found))
