"""A tiny model that knows some conversations by heart: what tests talk to."""

import torch

from codechat.models.gpt import GPT
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

STEPS = 300


def learn(model: GPT, tokenizer: Tokenizer, conversations: list[list[dict[str, str]]]) -> int:
    """Train until the loss of the assistants' turns is below 0.01 nats; the steps it took. AssertionError where STEPS do not do."""
    rows = [chat.render(messages, tokenizer) for messages in conversations]
    width = max(len(r.ids) for r in rows)
    ids = torch.tensor([r.ids + [tokenizer.eot_id] * (width - len(r.ids)) for r in rows])
    mask = torch.tensor([r.loss_mask + [0] * (width - len(r.ids)) for r in rows])
    targets = torch.where(mask[:, 1:] == 1, ids[:, 1:], -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        loss = model.loss(ids[:, :-1], targets)
        if loss < 0.01:
            return step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the lessons are not learned: loss {loss.item():.3f}")
