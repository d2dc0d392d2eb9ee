"""Sampling: prompts of different lengths in one batch, a key-value cache, log-probabilities of what was drawn.

`sample` returns whole completions, `stream` yields one completion token by token. Each distinct prompt of a batch is run once and its
cache shared by its samples; finished rows leave the batch.

A draw is a hash of (seed, prompt key, sample, position), not the next number of a generator. So a row's tokens do not depend on the
other rows, their order, or the batch size; in float32 that holds up to the rounding of matrix products of other shapes.

Runs in the caller's autocast and leaves the model in its mode. Left out: beam search, penalties, speculative decoding.

Shapes: B rows, T tokens, V owned vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.config import ConfigError
from codechat.gpt import GPT, KVCache

CACHE_BYTES = 2**30  # memory of keys, values and logits that the default batch size aims at
COMPACT_BELOW = 0.75  # share of unfinished rows under which copying the cache costs less than carrying the finished ones

StopReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Completion:
    """Sampled ids (a stop sequence included), their log-probabilities in nats, and why it ended: a stop sequence, `max_new_tokens`, or
    the model's context was full."""

    ids: list[int]
    logprobs: list[float]
    stop: StopReason


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """The distribution drawn from: logits / temperature, of which the top_k largest, of which the smallest set that holds top_p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature {self.temperature}; it must be 0 (greedy) or positive")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}; it must be at least 1, or none for the whole vocabulary")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p}; it must be above 0 and at most 1")

    def apply(self, logits: Tensor) -> Tensor:
        """(B, V) float32 logits -> logits at temperature, -inf where cut. Nothing is sorted when only the temperature is set."""
        logits = logits / self.temperature
        if self.top_k is None and (self.top_p is None or self.top_p == 1):
            return logits
        best, at = logits.topk(min(self.top_k or logits.shape[1], logits.shape[1]))  # (B, K), largest first
        if self.top_p is not None:
            p = best.softmax(-1)
            best = best.masked_fill(p.cumsum(-1) - p >= self.top_p, -math.inf)
            # the subtraction may leave a hair above 0 for the first, which must always stay
            best[:, 0] = logits.amax(-1)
        return torch.full_like(logits, -math.inf).scatter(1, at, best)


@torch.no_grad()
def sample(model: GPT, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
           top_p: float | None = None, stop: Sequence[Sequence[int]] = (), seed: int | None = None, samples_per_prompt: int = 1,
           keys: Sequence[int | str] | None = None, batch_size: int | None = None,
           on_overflow: Literal["raise", "stop"] = "raise") -> list[Completion]:
    """`samples_per_prompt` completions of each prompt, prompt-major: prompt 0 sample 0, prompt 0 sample 1, ..., prompt 1 sample 0, ...

    temperature 0 takes the most likely token; its log-probability is then the model's own at temperature 1. Otherwise log-probabilities
    are of the distribution drawn from, after temperature and truncation.
    stop: token sequences, each matched as a whole against the end of the completion (never the prompt); its tokens stay in `ids`.
    seed: none takes one from torch's global generator. keys: one per prompt; the draws of a prompt hang on its key, so a problem's id
    makes them independent of which other prompts are asked. Default: the index, so that equal prompts differ.
    batch_size: rows at a time; default: as many as keep the cache under a GiB.
    on_overflow: where prompt + max_new_tokens exceeds block_size, "raise", or "stop" with reason "context" when the block is full.
    Raises ConfigError for an empty prompt, one longer than the block, ids without an owner, and settings out of range."""
    how, stops = Truncation(temperature=temperature, top_k=top_k, top_p=top_p), _stop_sequences(stop)
    budgets = [_budget(model, i, prompt, max_new_tokens, on_overflow) for i, prompt in enumerate(prompts)]
    _at_least_1(samples_per_prompt=samples_per_prompt, batch_size=1 if batch_size is None else batch_size)
    if keys is not None and len(keys) != len(prompts):
        raise ConfigError(f"{len(keys)} keys for {len(prompts)} prompts; give one key per prompt")
    if not prompts:
        return []
    seed = _fresh_seed() if seed is None else seed
    draws = [row_key(seed, i if keys is None else keys[i], s) for i in range(len(prompts)) for s in range(samples_per_prompt)]
    rows = sorted(range(len(draws)), key=lambda r: (len(prompts[r // samples_per_prompt]), r))  # alike lengths pad little
    width = batch_size or _rows_in_memory(model, max(len(p) + b for p, b in zip(prompts, budgets)))
    done: dict[int, Completion] = {}
    for start in range(0, len(rows), width):
        part = rows[start : start + width]
        asked = [r // samples_per_prompt for r in part]
        batch = _complete(model, [prompts[i] for i in asked], [budgets[i] for i in asked], [draws[r] for r in part], how, stops,
                          max_new_tokens)
        done.update(zip(part, batch))
    return [done[r] for r in range(len(draws))]


@torch.no_grad()
def stream(model: GPT, prompt: Sequence[int], *, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
           top_p: float | None = None, stop: Sequence[Sequence[int]] = (), seed: int | None = None, key: int | str = 0,
           on_overflow: Literal["raise", "stop"] = "raise") -> Iterator[tuple[int, float]]:
    """(id, logprob) of each token as it is drawn: what `sample` returns for this prompt and key. Arguments as in `sample`."""
    how, stops = Truncation(temperature=temperature, top_k=top_k, top_p=top_p), _stop_sequences(stop)
    budget = _budget(model, 0, prompt, max_new_tokens, on_overflow)
    draws = [row_key(_fresh_seed() if seed is None else seed, key, 0)]
    for step in _decode(model, [prompt], [budget], draws, how, stops):
        yield int(step.ids), float(step.logprobs)


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class _Step:
    """One new token of each row still in the batch."""

    rows: Tensor  # (B,) rows of the batch as it was asked
    ids: Tensor  # (B,)
    logprobs: Tensor  # (B,)
    stopped: Tensor  # (B,) bool: a stop sequence is complete


def _complete(model: GPT, prompts: list[Sequence[int]], budgets: list[int], draws: list[int], how: Truncation,
              stops: list[list[int]], max_new_tokens: int) -> list[Completion]:
    """Decode one batch to its end."""
    device = model.wte.weight.device
    B, T = len(prompts), max(budgets)
    ids = torch.zeros(B, T, dtype=torch.long, device=device)
    logprobs = torch.zeros(B, T, device=device)
    ends = torch.tensor(budgets, device=device)  # (B,) tokens of each completion
    stopped = torch.zeros(B, dtype=torch.bool, device=device)
    for t, step in enumerate(_decode(model, prompts, budgets, draws, how, stops)):
        ids[step.rows, t], logprobs[step.rows, t] = step.ids, step.logprobs
        first = step.stopped & ~stopped[step.rows] & (t < ends[step.rows])  # finished rows may linger until the next compaction
        stopped[step.rows] |= first
        ends[step.rows] = torch.where(first, t + 1, ends[step.rows])
    rows = zip(ids.tolist(), logprobs.tolist(), ends.tolist(), stopped.tolist())
    return [Completion(i[:n], lp[:n], "stop" if hit else "length" if n == max_new_tokens else "context") for i, lp, n, hit in rows]


def _decode(model: GPT, prompts: Sequence[Sequence[int]], budgets: Sequence[int], draws: Sequence[int], how: Truncation,
            stops: list[list[int]]) -> Iterator[_Step]:
    """Steps until every row has stopped or used its budget. Finished rows may appear in a few more steps."""
    if not max(budgets):
        return
    cache, hidden = _prefill(model, prompts, max(budgets))
    device = hidden.device
    head = model.head_weight()[: model.cfg.owned]
    rows, budget = torch.arange(len(prompts), device=device), torch.tensor(budgets, device=device)
    keys, done = torch.tensor(draws, device=device), budget == 0
    tail = torch.full((len(prompts), max(map(len, stops), default=1)), -1, device=device)  # no id is -1: nothing matches too early
    for t in range(max(budgets)):
        ids, logprobs = draw(F.linear(hidden, head).float(), how, uniform(keys, t))
        tail = torch.cat((tail[:, 1:], ids[:, None]), dim=1)
        stopped = _matches(tail, stops)
        yield _Step(rows, ids, logprobs, stopped)
        done = done | stopped | (budget == t + 1)
        alive = len(rows) - int(done.sum())  # the one wait for the device per token
        if not alive:
            return
        if alive < COMPACT_BELOW * len(rows):
            keep = (~done).nonzero()[:, 0]
            cache = cache.select(keep)
            rows, budget, keys, done, tail, ids = (x[keep] for x in (rows, budget, keys, done, tail, ids))
        hidden = model.hidden(ids[:, None], cache=cache)[:, 0]


def _prefill(model: GPT, prompts: Sequence[Sequence[int]], room: int) -> tuple[KVCache, Tensor]:
    """Run each distinct prompt once. Returns the cache of all rows and the hidden state (B, D) of their last tokens."""
    device = model.wte.weight.device
    place: dict[tuple[int, ...], int] = {}
    row = [place.setdefault(tuple(p), len(place)) for p in prompts]
    lengths = torch.tensor([len(p) for p in place], device=device)
    ids = torch.zeros(len(place), max(map(len, place)), dtype=torch.long)
    for i, p in enumerate(place):
        ids[i, : len(p)] = torch.tensor(p)
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.wte.weight.dtype
    cache = KVCache(model.cfg, len(place), ids.shape[1] + room, device, dtype)
    hidden = model.hidden(ids.to(device), cache=cache, n_new=lengths)  # (prompts, T, D)
    last = hidden[torch.arange(len(place), device=device), lengths - 1]
    if len(place) == len(prompts):
        return cache, last
    share = torch.tensor(row, device=device)
    return cache.select(share), last[share]


def draw(logits: Tensor, how: Truncation, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from (B, V) float32 logits and (B,) uniforms: (ids, logprobs), both (B,). Inverts the cumulative distribution."""
    if how.temperature == 0:
        ids = logits.argmax(-1)
        return ids, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    logits = how.apply(logits)
    shifted = logits - logits.amax(-1, keepdim=True)
    mass = shifted.exp().cumsum(-1, dtype=torch.float64)  # (B, V): in float32 the small tail of a large vocabulary would vanish
    total = mass[:, -1:]
    # u < 1, so the first place whose mass exceeds u x total exists and has a probability above 0
    ids = torch.searchsorted(mass, u[:, None] * total, right=True)
    return ids[:, 0], (shifted.gather(1, ids) - total.log().float())[:, 0]


def _matches(tail: Tensor, stops: list[list[int]]) -> Tensor:
    """(B,) bool: the row's last tokens are one of the stop sequences."""
    hit = torch.zeros(len(tail), dtype=torch.bool, device=tail.device)
    for stop in stops:
        hit |= (tail[:, -len(stop):] == torch.tensor(stop, device=tail.device)).all(-1)
    return hit


# ---------------------------------------------------------------- draws


_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(keys: Tensor, position: int) -> Tensor:
    """(B,) float64 in [0, 1): a function of the row's key and the position in the completion. SplitMix64 (Steele et al., 2014) with the
    position as its counter; the top 53 bits are kept."""
    x = keys + _signed((position + 1) * _GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return _shift(x ^ _shift(x, 31), 11).double() * 2.0**-53


def row_key(seed: int, key: int | str, sample_index: int) -> int:
    """Signed 64-bit key of one row's draws."""
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
            raise ConfigError(f"{name} {value}; it must be at least 1")


def _budget(model: GPT, index: int, prompt: Sequence[int], max_new_tokens: int, on_overflow: str) -> int:
    """Tokens that this prompt's completion may have."""
    cfg = model.cfg
    _at_least_1(max_new_tokens=max_new_tokens)
    if not prompt:
        raise ConfigError(f"prompt {index} is empty; give at least one token, such as the end-of-text id")
    if not 0 <= min(prompt) <= max(prompt) < cfg.owned:
        raise ConfigError(f"prompt {index} holds ids {min(prompt)}..{max(prompt)}; the model knows 0..{cfg.owned - 1}; "
                          "encode it with the tokenizer of the checkpoint")
    room = cfg.block_size - len(prompt)
    if room < 0 or (room < max_new_tokens and on_overflow == "raise"):
        raise ConfigError(f"prompt {index} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; both must fit in the model's "
                          f"block_size {cfg.block_size}; " + (f"set max_new_tokens to {room} or less, or shorten the prompt" if room > 0
                                                              else "shorten the prompt"))
    return min(room, max_new_tokens)


def _stop_sequences(stop: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token sequences as lists; a bare list of ids would be read as a set of stop tokens, so it is refused."""
    if any(isinstance(s, (int, str)) or not len(s) for s in stop):
        raise ConfigError(f"stop {stop!r}; it must be sequences of token ids, none of them empty, such as ((27, 91),)")
    return [list(s) for s in stop]


def _rows_in_memory(model: GPT, length: int) -> int:
    """Rows whose cache and logits together stay under CACHE_BYTES."""
    cfg = model.cfg
    cache = 2 * cfg.depth * cfg.kv_heads * cfg.head_dim * length * model.wte.weight.element_size()
    return max(1, CACHE_BYTES // (cache + 16 * cfg.padded_vocab))
