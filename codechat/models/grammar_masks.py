"""Rows that follow a grammar (`text.call_grammar`) among rows that do not: what may be drawn, what counts as drawn, where it ends.

Shapes: B rows, V ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from codechat.text.call_grammar import GrammarState

    States = Sequence[GrammarState | None]  # none: the row follows no grammar


def apply_grammars(logits: Tensor, states: States, room: Sequence[int]) -> None:
    """-inf for what the grammars of the rows do not allow next; (B, V), in place. room: tokens that may follow."""
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, state in enumerate(states):
        if state is not None and (mask := state.mask(room[row])) is not None:
            allowed[row] = False
            allowed[row, : len(mask)] = torch.from_numpy(mask)
    logits.masked_fill_(~allowed.to(logits.device), -math.inf)


def take_allowed(states: States, ids: Tensor, logprobs: Tensor, room: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The ids that count (B,), and their log-probabilities: 0 where the grammar decided."""
    drawn = ids.tolist()
    taken = [t if state is None else state.take(t, left) for t, state, left in zip(drawn, states, room)]
    same = torch.tensor([a == b for a, b in zip(drawn, taken)], device=ids.device)
    return torch.tensor(taken, device=ids.device), logprobs * same


def stopped_by(stopped: Tensor, states: States) -> Tensor:
    """(B,) bool: a stop sequence inside a call is part of it, and the end of a grammar is an end."""
    inside = torch.tensor([state is not None and state.inside for state in states], device=stopped.device)
    ended = torch.tensor([state is not None and state.ended for state in states], device=stopped.device)
    return stopped & ~inside | ended
