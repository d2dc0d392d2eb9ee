"""Time to quality: the lowest validation bits per byte after some seconds of training, beside a
plain GPT with AdamW.

    python -m benchmarks quality                                    100 s each on the embedded corpus
    python -m benchmarks quality --path python.parquet --seconds 300 --peer-tokenizer python:4096

Two percent of the documents are held out, by hash. Evaluations do not count as training time. The
learning-rate schedule follows the clock, so that each contestant ends its schedule with its time.
codechat: the pretraining of recipe `nano` with the vocabulary that scored best here
(docs/experiments/pretraining.md explains why the recipe keeps another). plain: nanoGPT's
settings: 4 x 256, T 256, B 16, AdamW, learning rate 1e-3, warm-up, cosine. Bits per byte compare
across vocabularies; `python:N` was trained on the standard library, which is part of the embedded
corpus, so compare it on --path.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

from benchmarks import data, measure, peers
from benchmarks.settings import QualityBench
from codechat.core import config
from codechat.data import corpus, corpus_writer
from codechat.distributed import hardware
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.pretrain import PretrainConfig, bits_per_byte
from codechat.text import tokenizer
from codechat_lab.launch.recipes import RECIPES

TICKS = 1_000_000  # steps of the schedule; the current one is the elapsed share of the time
WARMUP_SHARE = 0.02


def prepare(cfg: QualityBench, spec: str, out: Path) -> dict[str, Any]:
    """Write the corpus tokenized with `spec`; returns its manifest."""
    documents = data.documents(cfg.path)
    sizes = accumulate(len(document.text.encode()) for document in documents)
    chosen = [
        document for document, size in zip(documents, sizes) if size < cfg.max_bytes
    ] or documents[:1]
    return corpus_writer.write_corpus(chosen, out, tokenizer.load(spec))


def contestant(
    name: str,
    vocab: int,
    device: torch.device,
    bench: QualityBench,
) -> tuple[nn.Module, list[torch.optim.Optimizer], PretrainConfig]:
    """(model with a .loss, optimizers, settings) of "codechat" or "plain"."""
    if name == "codechat":
        stage = RECIPES["nano"].stage("pretrain")
        model_of = dict(stage.settings["model"], vocab_size=vocab)
        cfg = config.from_dict(
            PretrainConfig, dict(stage.settings) | {"run_name": "bench/quality", "model": model_of}
        )
        model: Any = GPT(cfg.model, seed=bench.seed)
    else:
        shape = GPTConfig(depth=4, n_embd=256, n_head=4, block_size=256, vocab_size=vocab)
        rates = dict(
            lr=1e-3, schedule="cosine", final_lr_share=0.1, optimizer="adamw", weight_decay=0.1
        )
        cfg = PretrainConfig(model=shape, seq_len=256, device_batch_size=16, **rates)
        torch.manual_seed(bench.seed)
        model = peers.PlainGPT(shape)
    model = model.to(device)
    rates = dict(lr=cfg.lr, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay)
    return model, optim.build(model, optimizer=cfg.optimizer, **rates), cfg


def train_for(
    name: str, directory: Path, cfg: QualityBench, vocab: int
) -> Iterator[dict[str, float]]:
    """Train one contestant; yields {seconds, tokens, val_loss, val_bpb} at each evaluation."""
    device = hardware.device()
    model, optimizers, how = contestant(name, vocab, device, cfg)
    loader = corpus.WindowLoader(directory, how.device_batch_size, how.length, cfg.seed)
    schedule = dict(max_steps=TICKS, warmup_steps=int(TICKS * WARMUP_SHARE), schedule=how.schedule)
    spent, tokens, due = 0.0, 0, 1
    bar = tqdm(desc=name, total=round(cfg.seconds), unit="s", leave=False)
    while due <= cfg.evaluations:
        began = time.perf_counter()
        tick = int(TICKS * min(1.0, spent / cfg.seconds))
        optim.set_lr(optimizers, optim.lr_scale(tick, final=how.final_lr_share, **schedule))
        ids, targets = (x.to(device) for x in loader.next())
        measure.step(model, optimizers, partial(model.loss, ids, targets))
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = spent + time.perf_counter() - began
        tokens = tokens + ids.numel()
        bar.update(min(round(spent), round(cfg.seconds)) - bar.n)
        if spent >= cfg.seconds * due / cfg.evaluations:
            due += 1
            held_out = replace(
                how, data_dir=str(directory), device_batch_size=16, eval_tokens=cfg.eval_tokens
            )
            scores = bits_per_byte(model, held_out)
            yield {"seconds": spent, "tokens": tokens, **scores}
    bar.close()


def bench(cfg: QualityBench) -> dict[str, Any]:
    """Train the contestants one after the other, print the table; returns the figures."""
    specs = {"codechat": cfg.tokenizer, **dict.fromkeys(cfg.vs, cfg.peer_tokenizer)}
    found: dict[str, list[dict[str, float]]] = {}
    for name, spec in specs.items():
        with tempfile.TemporaryDirectory() as folder:
            manifest = prepare(cfg, spec, Path(folder))
            curve = train_for(name, Path(folder), cfg, manifest["n_vocab"])
            found[name] = list(curve)
    title = f"bits per byte of held-out text after {cfg.seconds:.0f} s of training"
    lowest = {name: min(r["val_bpb"] for r in rows) for name, rows in found.items()}
    table = Table(
        "",
        "tokenizer",
        "seconds",
        "tokens seen",
        "tokens/s",
        "bits per byte",
        "lowest",
        title=title,
    )
    for name, rows in found.items():
        for row in rows:
            seconds = row["seconds"]
            tokens = row["tokens"]
            cells = [
                f"{seconds:.0f}",
                f"{tokens:,}",
                f"{tokens / seconds:,.0f}",
                f"{row['val_bpb']:.4f}",
            ]
            table.add_row(
                name, specs[name], *cells, f"{lowest[name]:.4f}" if row is rows[-1] else ""
            )
    Console(width=120).print(table)
    return {"title": title, "tokenizers": specs, "curves": found, "lowest": lowest}
