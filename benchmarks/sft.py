"""SFT steps on function-calling conversations: packed rows beside rows padded to the longest conversation of the step.

    python -m benchmarks sft                          codechat, and transformers' Arcee on padded rows; eager and compiled
    python -m benchmarks sft --vs --preset nano       codechat alone, in the shape of nano
    python -m benchmarks sft --ckpt smollm2 --lora-rank 16 --steps 1 --modes eager --memory true       a checkpoint's weights, and peft

Both learn from the same conversations in each step: as many as fill `device_batch_size` packed rows. A rate counts tokens of conversations, not
padding, and MFU counts their FLOPs, attention at their mean length. So a row of one contestant that is not full costs it both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks import measure, peers
from benchmarks.settings import SFTBench
from codechat.core import config
from codechat.data import conversations
from codechat.data.conversations import IGNORE, Batch
from codechat.data.sources import Ledger
from codechat.distributed import dist, hardware
from codechat.models import loading, lora, optim
from codechat.models.config import LORA_TARGETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.tasks.toolbox import dialogues
from codechat.text import tokenizer

DRAWN = 2000  # conversations that rows are packed of
LENGTHS = 64  # padded rows are a multiple of it, so that a compiled peer meets few shapes


def config_from(plain: dict[str, Any]) -> SFTBench:
    """The settings from a json object."""
    return config.from_dict(SFTBench, plain)


def batches(cfg: SFTBench) -> tuple[GPTConfig, list[Batch]]:
    """(the shape with the tokenizer's vocabulary, the packed rows of a turn's steps)."""
    tok, tags, shape = tokenizer.load(cfg.tokenizer), "reserved", cfg.model
    if cfg.ckpt:
        loaded = loading.load_model(cfg.ckpt)
        tok, tags, shape = loaded.tokenizer, loaded.tags, loaded.model.cfg
    ledger = Ledger("toolbox", 1.0)
    rows = list(dialogues.draw("train", DRAWN))
    examples = conversations.encode_all(rows, tok, tags, cfg.seq_len, ledger)
    loader = conversations.PackedLoader({"calls": examples}, None, cfg.device_batch_size, cfg.seq_len)
    return replace(shape, vocab_size=tok.n_vocab), [loader.next() for _ in range(cfg.steps)]


def padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, targets, attention mask), each (N, L): the conversations of packed rows, one in a row."""
    ids, targets = [], []
    for row, into, docs in zip(batch.ids, batch.targets, batch.docs, strict=True):
        for number in range(int(docs.max()) + 1):
            ids.append(row[docs == number])
            targets.append(into[docs == number])
    longest = -(-max(map(len, ids)) // LENGTHS) * LENGTHS
    mask = [torch.ones(len(x), dtype=torch.long) for x in ids] + [
        torch.zeros(longest, dtype=torch.long)
    ]  # sets the length
    filled = [
        pad_sequence([*some, some[0].new_zeros(longest)], batch_first=True, padding_value=fill)[:-1]
        for some, fill in ((ids, 0), (targets, IGNORE))
    ]
    return filled[0], filled[1], pad_sequence(mask, batch_first=True)[:-1]


def builders(cfg: SFTBench) -> dict[str, Callable[[], measure.Contestant]]:
    """{name: builder}: codechat as it trains, on a GPU also eager, then the peer in each mode."""
    shape, made = batches(cfg)
    device = dist.device()
    tokens = sum(int((b.docs >= 0).sum()) for b in made)
    flops = shape.flops_per_token(tokens // sum(int(b.docs[:, :].max(1).values.add(1).sum()) for b in made))

    def codechat(name: str, compile: bool) -> measure.Contestant:
        model = GPT(shape)
        if cfg.ckpt:
            model.load_state_dict(loading.load_model(cfg.ckpt).model.state_dict())
        model = lora.attach(model.to(device).train(), cfg.lora_rank, targets=LORA_TARGETS)
        hardware.compile_blocks(model, compile)

        def loss(batch: Batch) -> Tensor:
            places, batch = batch.places(device), batch.to(device)
            mask = conversations.packed_mask(batch.docs)
            return model.loss(batch.ids, batch.targets, positions=batch.positions, mask=mask, places=places)

        return contestant(name, _turn(model, optim.build(model, lr=1e-3), partial(map, loss, made)))

    def peer(name: str, compile: bool) -> measure.Contestant:
        model = peers.exported(cfg.ckpt)[0] if cfg.ckpt else peers.huggingface("arcee", shape)
        if cfg.lora_rank:
            model = peers.require("peft").get_peft_model(model, peers.lora(cfg.lora_rank))
        model = model.to(device).train()
        rows = [padded(batch) for batch in made]

        def loss(row: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            ids, targets, mask = (x.to(device) for x in row)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE
            )

        loss_of = torch.compile(loss) if compile else loss
        learned = [p for p in model.parameters() if p.requires_grad]
        return contestant(
            name, _turn(model, [torch.optim.AdamW(learned, lr=1e-3, fused=True)], partial(map, loss_of, rows))
        )

    def contestant(name: str, run: Callable[[], None]) -> measure.Contestant:
        return measure.Contestant(name, run, tokens, 0.0 if cfg.lora_rank else flops)

    found = {"codechat": partial(codechat, "codechat", True)}
    if device.type == "cuda" and "eager" in cfg.modes:
        found["codechat, eager"] = partial(codechat, "codechat, eager", False)
    names = {f"{'transformers' if cfg.ckpt else kind}, {mode}": mode for kind in cfg.vs for mode in cfg.modes}
    return found | {name: partial(peer, name, mode == "compiled") for name, mode in names.items()}


def _turn(model: Any, optimizers: list[Any], losses: Callable[[], Any]) -> Callable[[], None]:
    """Each of `losses` is a step."""

    def run() -> None:
        found = iter(losses())
        while True:
            with dist.autocast():
                value = next(found, None)
            if value is None:
                return
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run


def bench(cfg: SFTBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    made, peak = builders(cfg), measure.Peak()
    memory, shown = measure.memory_alone(__name__, cfg, made) if cfg.memory else ({}, None)
    contestants = [build() for build in made.values()]
    timings = measure.race(contestants, cfg.rounds, peak)
    dtype = str(peak.dtype).removeprefix("torch.")
    full = contestants[0].units / (cfg.steps * cfg.device_batch_size * cfg.seq_len)
    what = cfg.ckpt or f"{cfg.model.depth} x {cfg.model.n_embd}, {cfg.tokenizer}"
    learned = f"adapters of rank {cfg.lora_rank}, " * (cfg.lora_rank > 0)
    title = f"SFT step: {what}, {learned}{cfg.device_batch_size} rows of {cfg.seq_len}, {full:.0%} full, {dtype}"
    measure.show(title, "tokens", timings, shown)
    print(peak)
    return {"title": title, "full": full, "timings": measure.rows(timings), "memory": memory} | peak.row()
