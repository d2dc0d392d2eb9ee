"""SFT steps on function-calling conversations: packed rows beside rows padded to the longest conversation of the step.

    python -m benchmarks sft                          codechat, and transformers' Arcee on padded rows; eager and compiled
    python -m benchmarks sft --vs --preset nano       codechat alone, in the shape of nano

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
from codechat.data import conversations
from codechat.data.conversations import IGNORE, Batch
from codechat.data.sources import Ledger
from codechat.distributed import dist, hardware
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.tasks.toolbox import dialogues
from codechat.text import tokenizer

STEPS = 4  # of a turn
DRAWN = 2000  # conversations that rows are packed of
LENGTHS = 64  # padded rows are a multiple of it, so that a compiled peer meets few shapes


def batches(cfg: SFTBench) -> tuple[GPTConfig, list[Batch]]:
    """(the shape with the tokenizer's vocabulary, the packed rows of STEPS steps)."""
    tok = tokenizer.load(cfg.tokenizer)
    ledger = Ledger("toolbox", 1.0)
    rows = dialogues.draw("train", DRAWN)
    examples = conversations.encode_all(rows, tok, "reserved", cfg.seq_len, ledger)
    loader = conversations.PackedLoader({"calls": examples}, None, cfg.device_batch_size, cfg.seq_len)
    return replace(cfg.model, vocab_size=tok.n_vocab), [loader.next() for _ in range(STEPS)]


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


def contestants(cfg: SFTBench) -> list[measure.Contestant]:
    """codechat in its default mode, then in the other, then the peer in each mode."""
    shape, made = batches(cfg)
    device, dtype = dist.device(), dist.compute_dtype()
    tokens = sum(int((b.docs >= 0).sum()) for b in made)
    flops = shape.flops_per_token(tokens // sum(int(b.docs[:, :].max(1).values.add(1).sum()) for b in made))
    compiled = hardware.compiles(None, device, dtype)

    def codechat(compile: bool) -> Callable[[], None]:
        model = GPT(shape).to(device)
        loss_of = hardware.maybe_compile(model.loss, compile, device, dtype)

        def loss(batch: Batch) -> Tensor:
            places, batch = batch.places(device), batch.to(device)
            mask = conversations.packed_mask(batch.docs)
            return loss_of(batch.ids, batch.targets, positions=batch.positions, mask=mask, places=places)

        return _turn(model, optim.build(model, lr=1e-3), partial(map, loss, made))

    def peer(compile: bool) -> Callable[[], None]:
        model = peers.huggingface("arcee", shape).to(device).train()
        rows = [padded(batch) for batch in made]

        def loss(row: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            ids, targets, mask = (x.to(device) for x in row)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE
            )

        loss_of = torch.compile(loss) if compile else loss
        return _turn(model, [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)], partial(map, loss_of, rows))

    other = "eager" if compiled else "compiled"
    runs = {"codechat": codechat(compiled)}
    if other in cfg.modes:
        runs[f"codechat, {other}"] = codechat(not compiled)
    runs |= {f"{kind}, {mode}": peer(mode == "compiled") for kind in cfg.vs for mode in cfg.modes}
    return [measure.Contestant(name, run, tokens, flops) for name, run in runs.items()]


def _turn(model: Any, optimizers: list[Any], losses: Callable[[], Any]) -> Callable[[], None]:
    """STEPS steps, each on the next of `losses`."""

    def run() -> None:
        found = iter(losses())
        for _ in range(STEPS):
            with dist.autocast():
                value = next(found)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run


def bench(cfg: SFTBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    peak = measure.Peak()
    made = contestants(cfg)
    timings = measure.race(made, cfg.rounds, peak)
    dtype = str(peak.dtype).removeprefix("torch.")
    full = made[0].units / (STEPS * cfg.device_batch_size * cfg.seq_len)
    title = f"SFT step: {cfg.model.depth} x {cfg.model.n_embd}, {cfg.tokenizer}, {cfg.device_batch_size} rows of {cfg.seq_len}, {full:.0%} full, {dtype}"
    measure.show(title, "tokens", timings)
    print(peak)
    return {"title": title, "full": full, "timings": measure.rows(timings)} | peak.row()
