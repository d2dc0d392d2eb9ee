"""Sampling: prompts of different lengths in one batch, a key-value cache, log-probabilities of the sampled tokens.

`sample` returns whole completions, `stream` yields one completion token by token. Each distinct prompt of a batch is run once, and its samples
share its cache; finished rows leave the batch.

The random number of a token is a hash of (seed, prompt key, sample, position), not the next number of a generator. So a row's tokens do not depend
on the other rows, their order, or the batch size (in float32 up to the rounding of matrix products of other shapes).

Sampling runs in the caller's autocast and leaves the model in its mode. Left out: beam search, repetition penalties, speculative decoding.

Shapes: B rows, T tokens, V ids (`GPTConfig.n_ids`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.core.errors import ConfigError
from codechat.models.gpt import GPT
from codechat.models.kv_cache import KVCache, SharedCache, new_cache

CACHE_BYTES = 2**30  # memory of keys, values and logits that the default batch size aims at
COMPACT_BELOW = 0.75  # share of unfinished rows under which copying the cache costs less than idle rows
BLOCK = 64  # our padded vocabulary is a multiple of it

StopReason = Literal["stop", "length", "context", "turns"]
CUT_OFF: tuple[StopReason, ...] = ("length", "context")
OnOverflow = Literal["raise", "stop"]


@dataclass(frozen=True)
class Completion:
    """Sampled ids (a stop sequence included), their log-probabilities in nats, and why it ended.

    "stop": a stop sequence; "length": `max_new_tokens`; "context": the model's block was full; "turns": an episode's last turn was used
    (`rl.episodes`). In an episode ids also hold the environment's text: mask is False there, and the log-probability 0."""

    ids: list[int]
    logprobs: list[float]
    stop: StopReason
    mask: list[bool] | None = None  # none = the policy sampled all of it

    @property
    def written(self) -> list[bool]:
        """True for ids that the policy sampled."""
        return [True] * len(self.ids) if self.mask is None else self.mask

    @property
    def cut_off(self) -> bool:
        """Whether it ended in the middle of an answer. An episode whose last turn was used ended in order."""
        return self.stop in CUT_OFF


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """The distribution sampled from: logits / temperature; of these the top_k largest; of these the smallest set of the largest with a total
    probability of top_p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature {self.temperature}; required is 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}; required is at least 1, or none for the whole vocabulary")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p}; required is above 0 and at most 1")

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, V) float32 logits, overwritten -> logits (B, K) at temperature, -inf where cut, and their ids (B, K).

        No ids: K = V, nothing was cut or sorted."""
        if self.temperature != 1:
            # the largest becomes 0 first: a tiny temperature would make it infinite, and inf - inf is NaN
            logits = logits.sub_(logits.amax(-1, keepdim=True)).div_(self.temperature)
        if self.top_k is None and (self.top_p is None or self.top_p == 1):
            return logits, None
        best, ids = logits.topk(min(self.top_k or logits.shape[1], logits.shape[1]))  # (B, K), largest first
        if self.top_p is not None:
            p = best.softmax(-1)
            best = best.masked_fill(p.cumsum(-1) - p >= self.top_p, -math.inf)
        return best, ids


@torch.no_grad()
def sample(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[Sequence[int]] = (),
    seed: int | None = None,
    samples_per_prompt: int = 1,
    keys: Sequence[int | str] | None = None,
    prefix_tokens: Sequence[int] | None = None,
    batch_size: int | None = None,
    on_overflow: OnOverflow = "raise",
) -> list[Completion]:
    """`samples_per_prompt` completions of each prompt, prompt-major: prompt 0 sample 0, prompt 0 sample 1 ...

    temperature: 0 takes the most likely token; its log-probability is the model's own at temperature 1.
    Otherwise log-probabilities are of the distribution sampled from, after temperature and truncation.
    stop: token sequences, each matched whole at the end of the completion (never the prompt) and kept in it.
    seed: none takes one from torch's global generator.
    keys: one per prompt, part of its sampling seed: with a problem's id, samples do not depend on the other prompts.
    Default: the index, so equal prompts differ; equal keys give equal samples.
    prefix_tokens: one per prompt; prompts that share this many first tokens run them once (speed only).
    batch_size: rows at a time; default: as many as keep cache and logits under a GiB.
    on_overflow: where prompt + max_new_tokens exceeds block_size, "raise", or "stop" with reason "context".

    Raises ConfigError: an empty prompt, one beyond the block, ids of padding rows, settings out of range."""
    how, stops = Truncation(temperature=temperature, top_k=top_k, top_p=top_p), _stop_sequences(stop)
    budgets = [_budget(model, i, prompt, max_new_tokens, on_overflow) for i, prompt in enumerate(prompts)]
    _at_least_1(samples_per_prompt=samples_per_prompt, batch_size=1 if batch_size is None else batch_size)
    if keys is not None and len(keys) != len(prompts):
        raise ConfigError(f"{len(keys)} keys for {len(prompts)} prompts; required is one key per prompt")
    if prefix_tokens is not None and (
        len(prefix_tokens) != len(prompts) or not all(0 < n < len(p) for n, p in zip(prefix_tokens, prompts))
    ):
        got = f"prefix_tokens {list(prefix_tokens)[:8]}"
        raise ConfigError(f"{got}; required is one per prompt, at least 1 and less than the prompt's length")
    if not prompts:
        return []
    names, seed = range(len(prompts)) if keys is None else keys, _fresh_seed() if seed is None else seed
    row_keys = [row_key(seed, name, s) for name in names for s in range(samples_per_prompt)]
    of = [i for i in range(len(prompts)) for _ in range(samples_per_prompt)]  # prompt of each row
    cuts = [len(p) for p in prompts] if prefix_tokens is None else list(prefix_tokens)
    # similar lengths together need little padding
    order = sorted(range(len(row_keys)), key=lambda r: (cuts[of[r]], len(prompts[of[r]]), r))
    width = batch_size or _rows_in_memory(model, prompts, max(budgets), samples_per_prompt)
    done: dict[int, Completion] = {}
    for start in range(0, len(order), width):
        rows = order[start : start + width]
        at = [of[r] for r in rows]
        texts, starts, most = ([values[i] for i in at] for values in (prompts, cuts, budgets))
        batch = _Batch(texts, starts, most, [row_keys[r] for r in rows])
        done.update(zip(rows, _complete(model, batch, how, stops, max_new_tokens)))
    return [done[r] for r in range(len(row_keys))]


@torch.no_grad()
def stream(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[Sequence[int]] = (),
    seed: int | None = None,
    key: int | str = 0,
    on_overflow: OnOverflow = "raise",
) -> Iterator[tuple[int, float]]:
    """(id, logprob) of each token as it is sampled, equal to `sample` for this prompt and key.

    Arguments and errors as in `sample`; errors are raised with the first token."""
    how, stops = Truncation(temperature=temperature, top_k=top_k, top_p=top_p), _stop_sequences(stop)
    budget = _budget(model, 0, prompt, max_new_tokens, on_overflow)
    row_keys = [row_key(_fresh_seed() if seed is None else seed, key, 0)]
    for step in _decode(model, _Batch([prompt], [len(prompt)], [budget], row_keys), how, stops):
        yield int(step.ids), float(step.logprobs)


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class _Batch:
    """Rows that are decoded together."""

    prompts: list[Sequence[int]]
    cuts: list[int]  # first tokens of each prompt that others may share
    budgets: list[int]  # tokens that each completion may have
    row_keys: list[int]  # `row_key` of each


@dataclass(frozen=True)
class _Step:
    """One new token of each remaining row."""

    rows: Tensor  # (B,) indices into the batch
    ids: Tensor  # (B,)
    logprobs: Tensor  # (B,)
    stopped: Tensor  # (B,) bool: a stop sequence is complete


def _complete(
    model: GPT, batch: _Batch, how: Truncation, stops: list[list[int]], max_new_tokens: int
) -> list[Completion]:
    """Decode one batch to its end."""
    device = model.wte.weight.device
    B, T = len(batch.prompts), max(batch.budgets)
    ids = torch.zeros(B, T, dtype=torch.long, device=device)
    logprobs = torch.zeros(B, T, device=device)
    ends = torch.tensor(batch.budgets, device=device)  # (B,) tokens of each completion
    stopped = torch.zeros(B, dtype=torch.bool, device=device)
    for t, step in enumerate(_decode(model, batch, how, stops)):
        ids[step.rows, t], logprobs[step.rows, t] = step.ids, step.logprobs
        # finished rows stay until the next compaction: they must not stop twice, or after their budget
        first = step.stopped & ~stopped[step.rows] & (t < ends[step.rows])
        stopped[step.rows] |= first
        ends[step.rows] = torch.where(first, t + 1, ends[step.rows])
    return [
        Completion(i[:n], lp[:n], "stop" if hit else "length" if n == max_new_tokens else "context")
        for i, lp, n, hit in zip(ids.tolist(), logprobs.tolist(), ends.tolist(), stopped.tolist())
    ]


def _decode(model: GPT, batch: _Batch, how: Truncation, stops: list[list[int]]) -> Iterator[_Step]:
    """Steps until every row has stopped or used its budget; rows that are done may appear in a few more."""
    if not max(batch.budgets):
        return
    with model.decoding() as logits_of:
        yield from _steps(model, logits_of, batch, how, stops)


def _steps(
    model: GPT, logits_of: Callable[[Tensor], Tensor], batch: _Batch, how: Truncation, stops: list[list[int]]
) -> Iterator[_Step]:
    cache, hidden = _prefill(model, batch, max(batch.budgets))
    rows = torch.arange(len(batch.prompts), device=hidden.device)
    budget, keys = (torch.tensor(x, device=hidden.device) for x in (batch.budgets, batch.row_keys))
    endings = [torch.tensor(s, device=hidden.device) for s in stops]
    # no id is -1, so nothing matches before enough tokens were sampled
    tail = torch.full((len(rows), max(map(len, stops), default=1)), -1, device=hidden.device)
    done = budget == 0
    # a row that has filled the model's block must leave at once: it has no position for another token
    full = {max(b, 1) for b in batch.budgets}
    for t in range(max(batch.budgets)):
        logits = logits_of(hidden).float()
        logits[:, model.cfg.n_ids :] = -math.inf
        ids, logprobs = draw(logits, how, uniform(keys, t))
        tail = torch.cat((tail[:, 1:], ids[:, None]), dim=1)
        stopped = _ends_with(tail, endings)
        yield _Step(rows, ids, logprobs, stopped)
        done = done | stopped | (budget == t + 1)
        alive = len(rows) - int(done.sum())  # the one wait for the device per token
        if not alive:
            return
        if alive < COMPACT_BELOW * len(rows) or t + 1 in full:
            keep = (~done).nonzero()[:, 0]
            cache = cache.select(keep)
            rows, budget, keys, done, tail, ids = (x[keep] for x in (rows, budget, keys, done, tail, ids))
        hidden = model.hidden(ids[:, None], cache=cache)[:, 0]


def _prefill(model: GPT, batch: _Batch, room: int) -> tuple[KVCache | SharedCache, Tensor]:
    """Run each distinct beginning once, then the rest of each prompt. Returns the cache of all rows and their last states (B, D)."""
    device = model.wte.weight.device
    beginnings = [tuple(p[:n]) for p, n in zip(batch.prompts, batch.cuts)]
    if len(set(beginnings)) == len(beginnings):  # nothing is shared: each prompt is run whole
        beginnings = [tuple(p) for p in batch.prompts]
    behind = [p[len(head) :] for p, head in zip(batch.prompts, beginnings)]
    place: dict[tuple[int, ...], int] = {}
    owner = torch.tensor([place.setdefault(head, len(place)) for head in beginnings], device=device)
    ids, lengths = pad_right(list(place), device)
    shared = len(place) < len(beginnings)
    mixed = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if mixed else model.wte.weight.dtype
    cache = new_cache(model.cfg, len(place), ids.shape[1] + (0 if shared else room), device, dtype)
    last = last_real(model.hidden(ids, cache=cache, n_new=lengths), lengths)
    if not shared:
        return cache, last
    rows, last = cache.share(owner, max(map(len, behind)) + room), last[owner]
    if not any(behind):
        return rows, last
    ids, lengths = pad_right(behind, device)
    return rows, last_real(model.hidden(ids, cache=rows, n_new=lengths), lengths)


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on the right, and how many of each row are real (B,)."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def last_real(hidden: Tensor, lengths: Tensor) -> Tensor:
    """(B, T, D) -> (B, D): the state of each row's last real token."""
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


def draw(logits: Tensor, how: Truncation, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from (B, V) float32 logits and (B,) uniforms: (ids, logprobs), both (B,).

    The logits are overwritten; a V that is a multiple of BLOCK is not copied. Inverts the cumulative distribution: first the block of the
    vocabulary, then the token in it; of a truncated distribution, the candidate. Sums are float64: float32 would lose the tail."""
    if how.temperature == 0:
        ids = logits.argmax(-1)
        return ids, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    logits, known = how.candidates(logits)
    # in place: at hundreds of rows and thousands of ids a fresh tensor costs more than the arithmetic
    mass = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if known is not None:
        cumulative = mass.double().cumsum(-1)
        place, _ = invert_cumulative(cumulative, u[:, None])  # (B, 1)
        return known.gather(1, place)[:, 0], (mass.gather(1, place).log() - cumulative[:, -1:].log())[:, 0].float()
    if mass.shape[1] % BLOCK:  # imported models
        mass = F.pad(mass, (0, -mass.shape[1] % BLOCK))
    grid = mass.unflatten(1, (-1, BLOCK))
    blocks = grid.sum(-1).double().cumsum(-1)  # (B, V / BLOCK)
    block, rest = invert_cumulative(blocks, u[:, None])
    tokens = grid[torch.arange(len(u), device=u.device), block[:, 0]]  # (B, BLOCK)
    inside, _ = invert_cumulative(tokens.double().cumsum(-1), rest)
    ids = block * BLOCK + inside  # (B, 1)
    return ids[:, 0], (mass.gather(1, ids).log() - blocks[:, -1:].log())[:, 0].float()


def invert_cumulative(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Where u (B, 1) in [0, 1) falls in cumulative masses (B, N): the index, and the fraction of its mass below u."""
    target = u * mass[:, -1:]  # below the total, so the place exists and has a mass above 0
    place = torch.searchsorted(mass, target, right=True)
    edges = F.pad(mass, (1, 0))
    low, high = edges.gather(1, place), edges.gather(1, place + 1)
    return place, (target - low) / (high - low)


def _ends_with(tail: Tensor, endings: list[Tensor]) -> Tensor:
    """(B,) bool: the row's last tokens are one of the endings."""
    hit = torch.zeros(len(tail), dtype=torch.bool, device=tail.device)
    for ending in endings:
        hit |= (tail[:, -len(ending) :] == ending).all(-1)
    return hit


# ---------------------------------------------------------------- random numbers


_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """(B,) float64 in [0, 1): a function of the row's key and the position in the completion, one for all or (B,).

    SplitMix64 (Steele, Lea & Flood, 2014) with the position as its counter; the top 53 bits are kept."""
    step = (position + 1) * _signed(_GOLDEN)  # of a tensor: modulo 2**64 as it is
    x = keys + (step if isinstance(step, Tensor) else _signed(step))
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return _shift(x ^ _shift(x, 31), 11).double() * 2.0**-53


def row_key(seed: int, key: int | str, sample_index: int) -> int:
    """Signed 64-bit key of one row's random numbers."""
    kind = "name" if isinstance(key, str) else "number"
    digest = blake2b(f"{seed}\n{sample_index}\n{kind}\n{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of x."""
    return (x + 2**63) % 2**64 - 2**63


def _fresh_seed() -> int:
    return int(torch.randint(2**62, ()))


# ---------------------------------------------------------------- checks


def _at_least_1(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} {value}; required is at least 1")


def _budget(model: GPT, index: int, prompt: Sequence[int], max_new_tokens: int, on_overflow: OnOverflow) -> int:
    """Tokens that this prompt's completion may have."""
    cfg = model.cfg
    _at_least_1(max_new_tokens=max_new_tokens)
    if not prompt:
        raise ConfigError(f"prompt {index} is empty; required is at least one token, such as the end-of-text id")
    if not 0 <= min(prompt) <= max(prompt) < cfg.n_ids:
        found = f"prompt {index} holds ids {min(prompt)}..{max(prompt)}"
        raise ConfigError(f"{found}; the model has 0..{cfg.n_ids - 1}; encode it with the tokenizer of the checkpoint")
    room = cfg.block_size - len(prompt)
    if room < 0 or (room < max_new_tokens and on_overflow == "raise"):
        remedy = f"set max_new_tokens to {room} or less, or shorten" if room > 0 else "shorten"
        found = f"prompt {index} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}"
        raise ConfigError(f"{found}; together they must fit the block_size {cfg.block_size}; {remedy} the prompt")
    return min(room, max_new_tokens)


def _stop_sequences(stop: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token sequences as lists. ConfigError for bare ids, which would read as a set of stop tokens."""
    if any(isinstance(s, (int, str)) or not len(s) for s in stop):
        raise ConfigError(f"stop {stop!r}; required are token sequences, none empty, such as ((27, 91),)")
    return [list(s) for s in stop]


def _rows_in_memory(model: GPT, prompts: Sequence[Sequence[int]], room: int, samples_per_prompt: int) -> int:
    """How many rows keep their caches (each with its share of the prompt) and logits under CACHE_BYTES."""
    cfg = model.cfg
    length = room + max(map(len, prompts)) / samples_per_prompt
    cache = cfg.depth * cfg.cache_width * length * model.wte.weight.element_size()
    return max(1, int(CACHE_BYTES / (cache + 16 * cfg.padded_vocab)))
