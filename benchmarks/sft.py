"""SFT steps on function-calling conversations: packed rows beside rows padded to the longest
conversation of the step.

    python -m benchmarks sft                          codechat, and transformers' Arcee on padded rows; eager
        and compiled
    python -m benchmarks sft --vs --preset nano       codechat alone, in the shape of nano
    python -m benchmarks sft --vs torch               and codechat without the C kernels that `make lab`
        builds
    python -m benchmarks sft --ckpt smollm2 --lora-rank 16 --steps 1 --modes eager --memory true       a
        checkpoint's weights, and peft
    python -m benchmarks sft --ckpt coder --lora-rank 16 --steps 1 --device-batch-size 4 --modes eager --apart true
        a larger one, each turn in a process of its own

Both learn from the same conversations in each step: as many as fill `device_batch_size` packed
rows. A rate counts tokens of conversations, not padding, and MFU counts their FLOPs, attention at
their mean length. So a row of one contestant that is not full costs it both. Beside adapters of a
checkpoint, either holds the frozen weights in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure, peers
from benchmarks.settings import SFTBench
from codechat.data import conversations
from codechat.data.conversations import Batch
from codechat.data.sources import IGNORE, Ledger
from codechat.distributed import hardware, numerics
from codechat.models import loading, lora, optim
from codechat.models.config import LORA_TARGETS, GPTConfig
from codechat.runs import checkpoint, paths
from codechat.sft import SFTConfig
from codechat.text import tokenizer
from codechat.training.session import build_policy
from codechat_lab.tasks.toolbox import dialogues


def batches(cfg: SFTBench) -> tuple[GPTConfig, list[Batch]]:
    """(the shape with the tokenizer's vocabulary, the packed rows of a turn's steps)."""
    tok = tokenizer.load(cfg.tokenizer)
    tags = "reserved"
    shape = cfg.model
    if cfg.ckpt:
        meta = checkpoint.read_meta(cfg.ckpt)
        shape, tok, tags = loading.describe(checkpoint.find_checkpoint(cfg.ckpt), meta)
    rows = list(dialogues.draw("train", 2000))  # more than a turn's steps take
    examples = conversations.encode_all(rows, tok, tags, cfg.seq_len, Ledger("toolbox", 1.0))
    loader = conversations.PackedLoader(
        {"calls": examples}, None, cfg.device_batch_size, cfg.seq_len
    )
    return replace(shape, vocab_size=tok.n_vocab), [loader.next() for _ in range(cfg.steps)]


def builders(cfg: SFTBench) -> dict[str, Callable[[], measure.Contestant]]:
    """{name: builder}: codechat as it trains, on a GPU also eager, then the peer in each mode."""
    (shape, made), device = batches(cfg), hardware.device()
    tokens = sum(int((batch.docs >= 0).sum()) for batch in made)
    talks = sum(int((batch.docs.amax(1) + 1).sum()) for batch in made)
    adapters = shape.lora_params(cfg.lora_rank, LORA_TARGETS)
    flops = shape.flops_per_token(tokens // talks, adapters)

    def contestant(
        name: str, model: Any, optimizers: Any, loss: Any, rows: Any
    ) -> measure.Contestant:
        run = lambda: [measure.step(model, optimizers, partial(loss, row)) for row in rows]  # noqa: E731
        return measure.Contestant(name, run, tokens, flops)

    def codechat(name: str, compile: bool) -> measure.Contestant:
        settings = SFTConfig(
            model=shape,
            init_from=cfg.ckpt or None,
            lora_rank=cfg.lora_rank,
            lora_targets=LORA_TARGETS,
        )
        parent = checkpoint.load(cfg.ckpt, optimizer=False, mmap=True) if cfg.ckpt else None
        model = build_policy(settings, parent).train()
        hardware.compile_blocks(model, compile)

        def loss(batch: Batch) -> Tensor:
            places = batch.places(device)
            batch = batch.to(device)
            mask = conversations.packed_mask(batch.docs)
            return model.loss(
                batch.ids, batch.targets, positions=batch.positions, mask=mask, places=places
            )

        optimizers = optim.build(model, lr=1e-3)

        def save(folder: Path) -> None:
            about: dict[str, Any] = dict(parent.meta) if parent else {}
            if parent and cfg.lora_rank:
                base = paths.Base(
                    checkpoint=cfg.ckpt, fingerprint=paths.fingerprint(about), scale=1.0
                )
                about["base"] = base._asdict()
            checkpoint.save(
                folder,
                cfg.steps,
                model=model,
                optimizers=optimizers,
                meta=about,
                adapters=lora.adapters(model),
            )

        return replace(contestant(name, model, optimizers, loss, made), save=save)

    def peer(name: str, kind: str, compile: bool) -> measure.Contestant:
        dtype = numerics.compute_dtype(device) if cfg.lora_rank else torch.float32
        model = peers.exported(cfg.ckpt, dtype)[0] if cfg.ckpt else peers.huggingface(kind, shape)
        if cfg.lora_rank:
            model = peers.require("peft").get_peft_model(model, peers.lora(cfg.lora_rank))
        model = model.to(device).train()

        def loss(row: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            ids, targets, mask = (x.to(device) for x in row)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.flatten(0, 1)
            return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORE)

        adamw = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True
        )

        def save(folder: Path) -> None:
            model.save_pretrained(folder)
            torch.save(adamw.state_dict(), folder / "optimizer.pt")

        timed = contestant(
            name,
            model,
            [adamw],
            torch.compile(loss) if compile else loss,
            [*map(peers.padded, made)],
        )
        return replace(timed, save=save)

    def torch_alone() -> measure.Contestant:
        made = codechat("codechat, torch alone", True)

        def run() -> None:
            with measure.torch_alone():
                made.run()

        return replace(made, run=run)

    kinds = [kind for kind in cfg.vs if kind != "torch"]
    found = measure.entrants(
        cfg.modes,
        codechat,
        peer,
        ["transformers"] * len(kinds) if cfg.ckpt else kinds,
    )
    return found | ({"codechat, torch alone": torch_alone} if "torch" in cfg.vs else {})


def bench(cfg: SFTBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    made = builders(cfg)
    what = cfg.ckpt or f"{cfg.model.depth} x {cfg.model.n_embd}, {cfg.tokenizer}"
    learned = f"adapters of rank {cfg.lora_rank}, " * (cfg.lora_rank > 0)
    rows = f"{cfg.device_batch_size} rows of {cfg.seq_len}"
    if cfg.apart:
        title = f"SFT step: {what}, {learned}{rows}, {measure.dtype()}"
        return {"title": title, "apart": measure.apart(__name__, cfg, [*made], title)}
    peak = measure.Peak()
    memory, shown = measure.memory_alone(__name__, cfg, made) if cfg.memory else ({}, None)
    contestants = [build() for build in made.values()]
    timings = measure.race(contestants, cfg.rounds, peak)
    full = contestants[0].units / (cfg.steps * cfg.device_batch_size * cfg.seq_len)
    title = f"SFT step: {what}, {learned}{rows}, {full:.0%} full, {measure.dtype()}"
    measure.show(title, "tokens", timings, shown)
    print(peak)
    return {
        "title": title,
        "full": full,
        "timings": measure.rows(timings),
        "memory": memory,
    } | peak.row()
