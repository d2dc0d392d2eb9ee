"""Runs with untrained checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.tasks.toy import TOY_MODEL
from codechat.text import tokenizer


@pytest.fixture
def make_run(runs_root: Path) -> Callable[..., Run]:
    """make_run(name, ...): a run with checkpoints of untrained toy models, each of other weights."""

    def make(
        name: str, spec: str = "bytes", steps: int = 1, lineage: Sequence[dict[str, Any]] = (), **shape: int
    ) -> Run:
        tok = tokenizer.load(spec)
        cfg = GPTConfig(**TOY_MODEL | shape, vocab_size=tok.n_vocab)
        meta = {"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": list(lineage)}
        with Run.create(name, {"a": 1}, kind="sft") as run:
            for step in range(1, steps + 1):
                checkpoint.save(run.path, step, model=GPT(cfg, seed=step), meta=meta)
        return run

    return make


@pytest.fixture
def toy_run(make_run: Callable[..., Run]) -> Run:
    return make_run("toy", steps=2)
