"""Tokens around calls that a model's makers never trained.

Qwen2.5-Coder's template writes calls between <tool_call> and </tool_call>, and the rows of both in
the embedding are those of its unused tokens, equal up to quantization. Equal rows have equal logits:
the model cannot write one of them, and low-rank updates of its blocks cannot teach it to."""

import hashlib

import torch
from torch import Tensor

from codechat.models.gpt import GPT
from codechat.text import chat, tool_calls
from codechat.text.tokenizer import Tokenizer

ALIKE = 0.999  # cosine of two rows that differ by quantization alone


def untrained_marks(model: GPT, tok: Tokenizer) -> dict[int, str]:
    """Tokens of a call, as the chat template writes it, whose rows are those of unused tokens:
    id -> text. Empty where the embedding has no unused rows to compare with."""
    unused = model.wte.weight[tok.n_vocab :]
    if not len(unused):
        return {}
    call = tool_calls.format_call("find_route", {"place": "Oslo"})
    found = {}
    for id in dict.fromkeys(chat.completion_ids(call, tok, chat.NATIVE)):
        row = model.wte.weight[id]
        likeness = torch.cosine_similarity(row[None], unused)
        if bool((likeness > ALIKE).any()):
            found[id] = tok.decode_inside([id])
    return found


@torch.no_grad()
def give_rows(model: GPT, marks: dict[int, str]) -> None:
    """Give each of these tokens a row of its own, in place: a direction drawn by its text, as
    long as other rows. A mean of other rows would not do: its logit is never the largest."""
    tables: list[Tensor] = [model.wte.weight]
    if model.head is not None:
        tables.append(model.head.weight)
    for table in tables:
        length = table[: 1 + max(marks)].norm(dim=1).median()
        for id, text in marks.items():
            digest = hashlib.sha256(text.encode()).digest()
            rng = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
            direction = torch.randn(table.shape[1], generator=rng)
            table[id] = direction / direction.norm() * length
