"""Draws: a truncated distribution, one token of it per row, the random numbers that decide, and
what the rows of a batch have sampled. The numbers are hashes of (seed, prompt key, sample,
position), so that a row's tokens do not depend on its neighbours. Shapes: B rows, V ids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.core.errors import ConfigError


class GrammarState(Protocol):
    """Where one completion is in its grammar."""

    ended: bool  # the grammar ends the completion here

    @property
    def inside(self) -> bool:
        """Whether a stop sequence is part of the completion here."""

    def mask(self, room: int) -> np.ndarray | None:
        """(V,) bool: ids that may come next, with `room` tokens after it; none = all."""

    def take(self, token: int, room: int) -> int:
        """Go on with a sampled id; the id that counts."""


class Grammar(Protocol):
    """What the completions of a prompt must follow, such as calls of the offered functions. The
    sampler knows masks over the ids, not why they are so."""

    def begin(self) -> GrammarState:
        """The state of a new completion."""


States = Sequence[GrammarState | None]  # none: the row follows no grammar

BLOCK = 64  # our padded vocabulary is a multiple of it
# in place of a stop sequence's id: every token matches; none does
ANY = -2
NEVER = -3
# a smaller temperature may be 0 in float32, and 0 / 0 is NaN
COLDEST = torch.finfo(torch.float32).tiny


class Ended(NamedTuple):
    """One row at its end."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool  # by a stop sequence
    kept: Tensor | None = None  # (n, K) int32: of each token, see `draw_and_note`


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """The distribution sampled from: logits / temperature; of these the top_k largest; of these
    the smallest set of the largest with a total probability of top_p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        finite = 0 <= self.temperature < math.inf
        k_fits = self.top_k is None or self.top_k >= 1
        p_fits = self.top_p is None or 0 < self.top_p <= 1
        if not (finite and k_fits and p_fits):
            raise ConfigError(
                f"got {self}; expected a temperature from 0, a top_k "
                "from 1, a top_p above 0 and up to 1; change it"
            )

    def width(self, n_ids: int) -> int:
        """How many of `n_ids` ids a draw can keep at most; 0 = it may be any of them."""
        if self.temperature == 0 or ((self.top_k or n_ids) >= n_ids and (self.top_p or 1) == 1):
            return 0
        return min(self.top_k or n_ids, n_ids)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, V) float32 logits, overwritten -> logits (B, K) at temperature, -inf where cut,
        and their ids; none: K = V."""
        if self.temperature != 1:
            # the largest becomes 0 first: a tiny temperature would make it infinite, and inf -
            # inf is NaN
            logits = logits.sub_(logits.amax(-1, keepdim=True)).div_(max(self.temperature, COLDEST))
        if self.top_k is None and (self.top_p is None or self.top_p == 1):
            return logits, None
        # (B, K), largest first
        best, ids = logits.topk(min(self.top_k or logits.shape[1], logits.shape[1]))
        if self.top_p is not None:
            p = best.softmax(-1)
            best = best.masked_fill(p.cumsum(-1) - p >= self.top_p, -math.inf)
        return best, ids


def draw(logits: Tensor, truncation: Truncation, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of (B, V) float32 logits, which are overwritten, by (B,) uniforms:
    (ids, logprobs), (B,) each.

    Inverts the cumulative distribution by blocks of the vocabulary. Sums are float64: float32
    would lose the tail."""
    ids, logprobs, _ = draw_and_note(logits, truncation, u, 0)
    return ids, logprobs


def draw_and_note(
    logits: Tensor,
    truncation: Truncation,
    u: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`draw`, and the ids that could have been drawn, (B, width) int32 with -1 where there are
    fewer; none if width is 0.

    width: of `truncation.width`. Who trains on the draws needs these ids: their log-probabilities are
    of the distribution over them."""
    if truncation.temperature == 0:
        ids = logits.argmax(-1)
        return ids, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0], None
    logits, known = truncation.candidates(logits)
    kept = None
    if width and known is not None:
        # an id of logit -inf is padding of the vocabulary, or was cut by top_p; the largest
        # come first
        kept = known.masked_fill(logits == -math.inf, -1)[:, :width].int()
    return *_draw_among(logits, known, u), kept


def _draw_among(logits: Tensor, known: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` from logits (B, K), overwritten, of the ids `known` (B, K); none: of all."""
    # in place: at hundreds of rows and thousands of ids a fresh tensor costs more than the
    # arithmetic
    mass = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if known is not None:
        cumulative = mass.double().cumsum(-1)
        place, _ = invert_cumulative(cumulative, u[:, None])  # (B, 1)
        ids = known.gather(1, place)
    else:
        # first the block, then the id within it: no float64 table of the whole vocabulary
        if mass.shape[1] % BLOCK:  # imported models
            mass = F.pad(mass, (0, -mass.shape[1] % BLOCK))
        blocks = mass.unflatten(1, (-1, BLOCK))
        cumulative = blocks.sum(-1).double().cumsum(-1)  # (B, V / BLOCK)
        block, rest = invert_cumulative(cumulative, u[:, None])
        rows = torch.arange(len(u), device=u.device)
        inside = blocks[rows, block[:, 0]].double().cumsum(-1)  # (B, BLOCK)
        column, _ = invert_cumulative(inside, rest)
        place = block * BLOCK + column  # (B, 1)
        ids = place
    total = cumulative[:, -1:]
    logprobs = mass.gather(1, place).log() - total.log()
    return ids[:, 0], logprobs[:, 0].float()


def invert_cumulative(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Where u (B, 1) in [0, 1) falls in cumulative masses (B, N): the index, and the fraction
    of its mass below u."""
    target = u * mass[:, -1:]  # below the total, so the place exists and has a mass above 0
    # N where logits are NaN: token 0 with a log-probability of NaN, which `RLSession.draw` reports
    place = torch.searchsorted(mass, target, right=True) % mass.shape[1]
    edges = F.pad(mass, (1, 0))
    low = edges.gather(1, place)
    high = edges.gather(1, place + 1)
    return place, (target - low) / (high - low)


# ---- rows that follow a grammar among rows that do not


def apply_grammars(logits: Tensor, states: States, room: Sequence[int]) -> None:
    """-inf for what the grammars of the rows do not allow next; (B, V), in place. room: tokens
    that may follow."""
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, state in enumerate(states):
        mask = None if state is None else state.mask(room[row])
        if mask is not None:
            allowed[row] = False
            allowed[row, : len(mask)] = torch.from_numpy(mask)
    logits.masked_fill_(~allowed.to(logits.device), -math.inf)


def take_allowed(
    states: States,
    ids: Tensor,
    logprobs: Tensor,
    room: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The ids that count (B,), and their log-probabilities: 0 where the grammar decided."""
    drawn = ids.tolist()
    taken = [
        t if state is None else state.take(t, left) for t, state, left in zip(drawn, states, room)
    ]
    same = torch.tensor([a == b for a, b in zip(drawn, taken)], device=ids.device)
    return torch.tensor(taken, device=ids.device), logprobs * same


# constants of SplitMix64, as int64 has them
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(keys: Tensor, position: Tensor) -> Tensor:
    """(B,) float64 in [0, 1): a function of the row's key and the position in the completion,
    (1,) or (B,).

    SplitMix64 (Steele, Lea & Flood, 2014) with the position as its counter; the top 53 bits are
    kept."""
    x = keys + (position + 1) * GOLDEN
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return _shift(x ^ _shift(x, 31), 11).double() * 2.0**-53


def row_key(seed: int, key: int | str, sample_index: int) -> int:
    """Signed 64-bit key of one row's random numbers."""
    text = f"{seed}\n{sample_index}\n{'name' if isinstance(key, str) else 'number'}\n{key}"
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# ---- the rows of a batch


@dataclass(frozen=True)
class Batch:
    """Rows that are decoded together."""

    prompts: list[Sequence[int]]
    prefix_lengths: list[int]  # first tokens of each prompt that others may share
    budgets: list[int]  # tokens that each completion may have
    keys: list[int]  # `row_key` of each
    truncation: Truncation
    stops: list[list[int]]
    states: States | None = None  # none = no row has a grammar
    kept: int = 0  # how many ids to note of each draw, `Truncation.width`; 0 = none


class Rows:
    """What a batch has sampled: tensors that every token changes in place, so that a GPU can
    replay it as a graph.

    `size` rows: those of the batch, then padding, which is done from the start."""

    # tensors with a value of each row, which `keep` narrows
    PER_ROW = "row keys budget tail done stopped ends ids logprobs kept".split()

    def __init__(self, batch: Batch, size: int, device: Any) -> None:
        most = max(batch.budgets)
        longest = max(map(len, batch.stops), default=1)
        endings = [[ANY] * (longest - len(s)) + s for s in batch.stops] or [[NEVER]]
        self.endings = torch.tensor(endings, device=device)  # (N, L), right-aligned
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # tokens so far
        self.row = torch.arange(size, device=device)  # number in the batch; behind it padding
        padding = (0, size - len(batch.keys))
        self.keys = F.pad(torch.tensor(batch.keys, device=device), padding)
        self.budget = F.pad(torch.tensor(batch.budgets, device=device), padding)
        # (B, L) last tokens; -1 = none yet
        self.tail = torch.full((size, longest), -1, device=device)
        self.done = self.budget == 0
        self.stopped = torch.zeros_like(self.done)  # by a stop sequence
        self.ends = self.budget.clone()  # tokens of the completion
        self.ids = torch.zeros(size, most, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(size, most, device=device)
        self.kept = torch.zeros(size, most, batch.kept, dtype=torch.int32, device=device)
        self.out: list[Ended] = [Ended([], [], False)] * len(batch.budgets)

    def add(
        self,
        ids: Tensor,
        logprobs: Tensor,
        states: States | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """Append a token to every row (B,), and note which end with it. What is done stays as
        it is. kept (B, K): the ids that could have been drawn, where the batch notes them."""
        self.tail.copy_(torch.cat((self.tail[:, 1:], ids[:, None]), dim=1))
        hit = ((self.tail[:, None] == self.endings) | (self.endings == ANY)).all(-1).any(-1)
        # a stop sequence inside a call is part of it, and the end of a grammar is an end
        if states is not None:
            inside = torch.tensor([s is not None and s.inside for s in states], device=hit.device)
            ended = torch.tensor([s is not None and s.ended for s in states], device=hit.device)
            hit = (hit & ~inside) | ended
        first = hit & ~self.done
        self.ids.index_copy_(1, self.t, ids[:, None])
        self.logprobs.index_copy_(1, self.t, logprobs[:, None])
        if kept is not None:
            self.kept.index_copy_(1, self.t, kept[:, None])
        self.t.add_(1)
        self.stopped.logical_or_(first)
        self.ends.copy_(torch.where(first, self.t, self.ends))
        self.done.logical_or_(hit | (self.budget == self.t))

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. Rows that are done are read to the host first."""
        self._read(self.done)
        for name in self.PER_ROW:
            setattr(self, name, getattr(self, name)[rows])

    def completions(self) -> list[Ended]:
        """Ids, log-probabilities and end of every row of the batch."""
        self._read(slice(None))
        return self.out

    def _read(self, rows: Tensor | slice) -> None:
        columns = [
            x[rows].tolist() for x in (self.row, self.ends, self.stopped, self.ids, self.logprobs)
        ]
        noted = self.kept[rows].cpu() if self.kept.shape[2] else None
        for i, (row, n, hit, ids, logprobs) in enumerate(zip(*columns)):
            if row < len(self.out):
                # a copy: a view would hold the buffer of all rows
                kept = None if noted is None else noted[i, :n].clone()
                self.out[row] = Ended(ids[:n], logprobs[:n], hit, kept)
