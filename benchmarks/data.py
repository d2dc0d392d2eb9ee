"""Data: text to token shards beside tiktoken's own batch encoder, and the share of a training step
spent waiting for its batch.

python -m benchmarks data                         the embedded corpus, GPT-2's tokenizer
python -m benchmarks data --megabytes 64 --path some.parquet
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tiktoken
import torch
from tqdm import tqdm

from benchmarks import measure
from benchmarks.settings import DataBench
from codechat.data import corpus, corpus_writer, sources
from codechat.data.sources import Document, Ledger
from codechat.distributed import hardware
from codechat.models import optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.text import tokenizer

STEPS = 10  # training steps in which the loader's share is measured


def documents(path: str | None) -> list[Document]:
    """The documents of a path; without one, the embedded corpus."""
    name = "embedded" if path is None else Path(path).name
    ledger = Ledger(name)
    return list(
        sources.embedded_python(ledger)
        if path is None
        else corpus_writer.path_documents(Path(path), ledger)
    )


def contestants(cfg: DataBench, out: Path) -> list[measure.Contestant]:
    """codechat (deduplicated, split, hashed, written) and tiktoken (ids in memory) on the same
    text and threads."""
    chosen = []
    n_bytes = 0
    for document in tqdm(documents(cfg.path), "reading", unit=" documents", leave=False):
        chosen.append(document)
        n_bytes += len(document.text.encode("utf-8", "replace"))
        if n_bytes >= cfg.megabytes * 1e6:
            break
    known = tokenizer.load(cfg.tokenizer)
    texts = [document.text for document in chosen]
    merged = tokenizer.merged_ranks(known.spec.partition(":")[0])
    ranks = {token: rank for token, rank in merged.items() if rank < known.n_vocab - 1}
    plain = tiktoken.Encoding(
        "plain",
        pat_str=tokenizer.GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={},
    )
    threads = os.cpu_count() or 1
    runs = {
        "codechat": lambda: corpus_writer.write_corpus(chosen, out, known),
        "tiktoken's batch encoder": lambda: plain.encode_ordinary_batch(texts, num_threads=threads),
    }
    return [measure.Contestant(name, run, n_bytes / 1e6) for name, run in runs.items()]


def loader_share(directory: Path, known: tokenizer.Tokenizer) -> float:
    """Share of a `nano` training step (16 x 256 tokens) spent waiting for its batch."""
    device = hardware.device()
    loader = corpus.WindowLoader(directory, 16, 256)
    model = GPT(replace(GPTConfig(**PRESETS["nano"]), vocab_size=known.n_vocab)).to(device)
    optimizers = optim.build(model, lr=1e-3)
    waited = 0.0
    began = time.perf_counter()
    for _ in range(STEPS):
        start = time.perf_counter()
        ids, targets = (x.to(device) for x in loader.next())
        waited += time.perf_counter() - start
        measure.step(model, optimizers, partial(model.loss, ids, targets))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return waited / (time.perf_counter() - began)


def bench(cfg: DataBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        timings = measure.race(contestants(cfg, Path(folder)), cfg.rounds)
        title = f"tokenizing and sharding, {cfg.tokenizer}, {os.cpu_count()} threads"
        measure.show(title, "MB", timings)
        share = loader_share(Path(folder), tokenizer.load(cfg.tokenizer))
    print(
        f"codechat reaches {timings[1].ratio:.0%} of tiktoken's rate; a "
        f"nano step waits {share:.2%} of its time for the loader"
    )
    return {"title": title, "timings": measure.rows(timings), "loader_share": share}
