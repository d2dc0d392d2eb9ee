"""SFT steps beside a peer's: padded rows hold the same conversations as packed ones, and the command runs end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import benchmarks as bench
from benchmarks import sft
from benchmarks.settings import SFTBench
from codechat.data import conversations
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

TINY = GPTConfig(depth=1, n_embd=32, n_head=1, block_size=512)


def test_padded_rows_hold_the_conversations_of_packed_ones() -> None:
    """The same summed loss from both: each conversation sees itself alone, from position 0."""
    shape, made = sft.batches(SFTBench(model=TINY, device_batch_size=2))
    assert len(made) == sft.STEPS
    batch = made[0]
    ids, targets, mask = sft.padded(batch)
    n = int((batch.docs.max(1).values + 1).sum())
    assert ids.shape == targets.shape == mask.shape == (n, ids.shape[1]) and n > 4 and ids.shape[1] % sft.LENGTHS == 0
    assert int(mask.sum()) == int((batch.docs >= 0).sum())
    assert int((targets != conversations.IGNORE).sum()) == batch.supervised
    model = GPT(shape)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        where = dict(positions=batch.positions, mask=conversations.packed_mask(batch.docs))
        packed = model.loss(batch.ids, batch.targets, reduction="sum", **where)
        torch.testing.assert_close(model.loss(ids, targets, reduction="sum"), packed, rtol=1e-5, atol=0)


def test_an_sft_step_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "--model.depth 1 --model.n-embd 32 --model.n-head 1 --device-batch-size 2".split()
    figures = bench.run_kind("sft", [*model, "--rounds", "1", "--vs", "--modes", "eager"])
    assert 0.8 < figures["full"] <= 1 and all(t["rate"] > 0 and t["mfu"] for t in figures["timings"])
    assert "SFT step" in capsys.readouterr().out
