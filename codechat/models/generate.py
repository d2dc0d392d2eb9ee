"""Sampling: prompts of different lengths in one batch, a key-value cache, log-probabilities of
the sampled tokens.

Each distinct prompt of a batch is run once, its samples share its cache, and finished rows
leave. A row's tokens do not depend on the other rows, their order, or the batch size, but for
rounding (`draws`). On a GPU a batch takes what memory is free and runs as one graph
(`fast.decode_graph`). Sampling runs in the caller's autocast and leaves the model in its mode.

Shapes: B rows, T tokens, V ids (`GPTConfig.n_ids`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.core.errors import ConfigError
from codechat.models.attention import KVCache
from codechat.models.draws import (
    Batch,
    Ended,
    Grammar,
    GrammarState,
    Rows,
    Truncation,
    apply_grammars,
    draw_and_note,
    row_key,
    take_allowed,
    uniform,
)
from codechat.models.fast import decode_graph, memory
from codechat.models.fast.device import compute_dtype, copies_stay
from codechat.models.fast.reader import (
    SHORT_PROMPT,
    Reader,
    cache_dtype,
    reader_of,
    runs_rests_in_c,
)
from codechat.models.fast.shared_prefix import SharedCache
from codechat.models.gpt import GPT

# share of unfinished rows under which copying the cache costs less than idle rows
COMPACT_BELOW = 0.75

StopReason = Literal["stop", "length", "context", "turns"]


@dataclass(frozen=True)
class Completion:
    """Sampled ids (a stop sequence included), their log-probabilities in nats, and why it ended.

    In an episode (`rl.episodes`) ids also hold the environment's text: mask is False there, the
    log-probability 0. kept (n, K) int32: of each token the ids that it could have been, -1
    where there are fewer than K and where an environment spoke; none = any id, or `sample` was
    not told to note them."""

    ids: list[int]
    logprobs: list[float]
    stop: StopReason
    mask: list[bool] | None = None  # none = the policy sampled all of it
    kept: Tensor | None = field(default=None, compare=False)

    @property
    def written(self) -> list[bool]:
        """True for ids that the policy sampled."""
        return [True] * len(self.ids) if self.mask is None else self.mask

    @property
    def cut_off(self) -> bool:
        """Whether it ended in the middle of an answer."""
        return self.stop in ("length", "context")


def joined_kept(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor | None:
    """(N, K) int32: `Completion.kept` of consecutive parts of n tokens each, -1 for a part that
    has none; none if no part has any."""
    noted = [kept for _, kept in parts if kept is not None]
    if not noted:
        return None
    width = max(kept.shape[1] for kept in noted)
    tables = [noted[0].new_empty(n, 0) if kept is None else kept for n, kept in parts]
    return torch.cat([F.pad(table, (0, width - table.shape[1]), value=-1) for table in tables])


@torch.inference_mode()
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
    on_overflow: Literal["raise", "stop", "empty"] = "raise",
    graph: bool | None = None,
    grammars: Sequence[Grammar | None] | None = None,
    note_kept: bool = False,
) -> list[Completion]:
    """`samples_per_prompt` completions of each prompt, prompt-major: prompt 0 sample 0, prompt
    0 sample 1 ...

    temperature: 0 takes the most likely token; its log-probability is the model's own at
    temperature 1. Otherwise log-probabilities are of the distribution sampled from, after
    temperature and truncation (and under a grammar).
    stop: token sequences, each matched whole at the end of the completion (never the prompt)
    and kept in it.
    seed: none takes one from torch's global generator.
    keys: one per prompt, part of its sampling seed: with a problem's id, samples do not depend
    on the other prompts.
    Default: the index, so equal prompts differ; equal keys give equal samples.
    prefix_tokens: one per prompt; prompts that share this many first tokens run them once
    (speed only; `first_turns` finds some).
    on_overflow: where prompt + max_new_tokens exceeds block_size, "raise", or "stop" with
    reason "context"; "empty": the same, and a prompt that is longer itself has an empty
    completion.
    graph: decode with static shapes (`decode_graph`); none = on a GPU, where no row has a grammar.
    grammars: one per prompt, which its completions follow, or none.
    note_kept: where top_k or top_p cut, each completion says which ids it could have drawn
    from; no grammars then."""
    truncation = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    n_kept = truncation.width(model.cfg.n_ids) if note_kept else 0
    assert not (n_kept and grammars), (
        "a grammar decides some tokens; the ids that were kept do not tell their probability"
    )
    budgets = [_budget(model, prompt, max_new_tokens, on_overflow) for prompt in prompts]
    prefixes = [len(p) for p in prompts] if prefix_tokens is None else prefix_tokens
    names = range(len(prompts)) if keys is None else keys
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    # prompt, sample
    rows = [(i, n) for i in range(len(prompts)) for n in range(samples_per_prompt)]
    done = {(i, n): Completion([], [], "context") for i, n in rows if not budgets[i]}
    # similar lengths together need little padding
    sizes = [(prefix, len(prompt)) for prefix, prompt in zip(prefixes, prompts)]
    order = sorted((row for row in rows if row not in done), key=lambda row: (sizes[row[0]], row))
    lengths = [sizes[i] for i, _ in order]
    # before weights are copied: that takes memory
    parts = _parts(model, lengths, max(budgets, default=0), samples_per_prompt, n_kept)
    reader = _reader(model, graph if grammars is None else False)
    for part in parts:
        some = order[part]
        batch = Batch(
            prompts=[prompts[i] for i, _ in some],
            prefix_lengths=[prefixes[i] for i, _ in some],
            budgets=[budgets[i] for i, _ in some],
            keys=[row_key(seed, names[i], n) for i, n in some],
            truncation=truncation,
            stops=[list(s) for s in stop],
            states=None if grammars is None else [_begun(grammars[i]) for i, _ in some],
            kept=n_kept,
        )
        for row, end in zip(some, _decode(reader, batch)):
            done[row] = _completion(end, max_new_tokens)
    return [done[row] for row in rows]


def _parts(
    model: GPT, lengths: Sequence[tuple[int, int]], new_tokens: int, samples: int, n_kept: int
) -> list[slice]:
    """Rows that fit into memory together. lengths: tokens of each row's shared beginning and of its
    whole prompt."""
    # each row has room for the longest rest
    rest = max((whole - shared for shared, whole in lengths), default=0)
    longest = [shared + rest for shared, _ in lengths]
    weight = model.wte.weight
    products = compute_dtype(weight)
    size = cache_dtype(model.cfg, weight.device, products).itemsize
    return [*memory.batches(model, longest, new_tokens, samples, n_kept, size)]


LEAST_SHARED = 64  # tokens: a shorter beginning saves less than running it apart costs


def first_turns(
    model: GPT, prompts: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[int] | None:
    """`prefix_tokens` of `sample` for prompts with one sample each: the first turn of each, which
    a list of tools makes long and several requests share; the whole prompt where little is to be
    saved. ends: what stands at the end of a turn.

    It is a matter of the prompt alone, and with row.c so are the bits of what is drawn. None
    without row.c, where a beginning that is run apart is not faster."""
    if not runs_rests_in_c(model):
        return None
    return [_first_turn(prompt, list(ends)) for prompt in prompts]


def _first_turn(prompt: Sequence[int], ends: list[int]) -> int:
    whole = len(prompt)
    size = len(ends)
    for end in range(size, whole):
        turn_ends = list(prompt[end - size : end]) == ends
        if not turn_ends:
            continue
        if end < LEAST_SHARED or whole - end > SHORT_PROMPT:
            return whole
        return end
    return whole


# of models inside `weights_stay`: readers by `graph` and the dtype of products
_readers: dict[GPT, dict[tuple[bool | None, torch.dtype], Reader]] = {}


@contextmanager
def weights_stay(model: GPT) -> Iterator[None]:
    """Inside the block nothing changes the weights of this model, so `sample` copies them once
    and not at every call; on a CPU, since a GPU's rows take the memory between two calls."""
    outermost = model not in _readers
    if outermost:
        _readers[model] = {}
    try:
        yield
    finally:
        if outermost:
            del _readers[model]


def _reader(model: GPT, graph: bool | None) -> Reader:
    weight = model.wte.weight
    kept = _readers.get(model)
    if kept is None or not copies_stay(weight):
        return reader_of(model, graph)
    key = (graph, compute_dtype(weight))
    if key not in kept:
        kept[key] = reader_of(model, graph)
    return kept[key]


def _begun(grammar: Grammar | None) -> GrammarState | None:
    return None if grammar is None else grammar.begin()


def _decode(reader: Reader, batch: Batch) -> list[Ended]:
    """Every row of the batch at its end."""
    if reader.graph:
        cache, last = prefill(reader, batch, 0)
        assert isinstance(cache, SharedCache)
        return decode_graph.Decoder(reader, cache, last, batch).run()
    *_, rows = _steps(reader, batch)
    return rows.completions()


def _completion(end: Ended, max_new_tokens: int) -> Completion:
    cut: StopReason = "length" if len(end.ids) == max_new_tokens else "context"
    return Completion(end.ids, end.logprobs, "stop" if end.stopped else cut, kept=end.kept)


@torch.inference_mode()
def stream(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Sequence[Sequence[int]] = (),
    seed: int | None = None,
    key: int | str = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    grammar: Grammar | None = None,
    kept: Conversation | None = None,
) -> Iterator[int]:
    """Each token as it is sampled, equal to `sample` for this prompt and key but for rounding;
    arguments as there.

    kept: of this model and this conversation; what it has seen of the prompt is not run again."""
    budget = _budget(model, prompt, max_new_tokens, "raise")
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    batch = Batch(
        prompts=[prompt],
        prefix_lengths=[len(prompt)],
        budgets=[budget],
        keys=[row_key(seed, key, 0)],
        truncation=Truncation(temperature=temperature, top_k=top_k),
        stops=[list(s) for s in stop],
        states=None if grammar is None else [grammar.begin()],
    )
    seen = Conversation(reader_of(model, graph=False)) if kept is None else kept
    for t, rows in enumerate(_steps(seen.reader, batch, seen.read(prompt, budget))):
        seen.ids.append(int(rows.ids[0, t]))
        yield seen.ids[-1]


class Conversation:
    """Weights copied once, and the cache of the ids seen last, for prompts that continue each
    other (`stream`)."""

    def __init__(self, reader: Reader) -> None:
        weight = reader.model.wte.weight
        self.ids: list[int] = []
        self.reader = reader
        self.cache = KVCache(reader.model.cfg, 1, 0, weight.device, reader.cache_dtype)

    def read(self, prompt: Sequence[int], room: int) -> tuple[KVCache, Tensor]:
        """The cache of a prompt with room for more tokens, and its last state (1, D)."""
        beginning = takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt))
        # at least one token is run: its last state gives the next token
        same = min(len(list(beginning)), self.cache.extent, len(prompt) - 1)
        kv = self.cache.kv
        needed = len(prompt) + room
        if kv.shape[4] < needed:
            # twice the need, so that a growing conversation is seldom copied
            self.cache = KVCache(self.reader.model.cfg, 1, 2 * needed, kv.device, kv.dtype)
            self.cache.kv[..., :same, :] = kv[..., :same, :]
        self.ids = list(prompt)
        self.cache.extent = same
        self.cache.lengths.fill_(same)
        new = torch.tensor([prompt[same:]], device=kv.device)
        return self.cache, self.reader.prompts(new, self.cache)[:, -1]


def _steps(
    reader: Reader, batch: Batch, begun: tuple[KVCache, Tensor] | None = None
) -> Iterator[Rows]:
    """The rows after each new token, until all have ended. Rows that have ended stay until they
    are many. begun: of `prefill`."""
    model = reader.model
    states = batch.states
    cache, hidden = prefill(reader, batch, max(batch.budgets)) if begun is None else begun
    rows = Rows(batch, len(batch.prompts), hidden.device)
    # a row that has filled the model's block must leave at once: it has no position for another
    # token
    full = set(batch.budgets)
    for t in range(1, max(batch.budgets) + 1):
        logits = reader.logits_of(hidden).float()
        # rows behind the ids only pad the embedding: they stand for no token
        logits[:, model.cfg.n_ids :] = -math.inf
        room = (rows.budget - t).tolist() if states else []
        if states:
            apply_grammars(logits, states, room)
        ids, logprobs, kept = draw_and_note(
            logits, batch.truncation, uniform(rows.keys, rows.t), batch.kept
        )
        if states:
            ids, logprobs = take_allowed(states, ids, logprobs, room)
        rows.add(ids, logprobs, states, kept)
        yield rows
        live = (~rows.done).nonzero()[:, 0]  # the one wait for the device per token
        if not len(live):
            return
        if len(live) < COMPACT_BELOW * len(ids) or t in full:
            cache = cache.select(live)
            ids = ids[live]
            rows.keep(live)
            states = states and [states[i] for i in live.tolist()]
        hidden = reader.read(ids, cache)


def prefill(reader: Reader, batch: Batch, room: int) -> tuple[KVCache, Tensor]:
    """Run each distinct beginning once, then the rest of each prompt: the cache of all rows
    with room for more tokens (0 = the caller keeps them elsewhere), and last states (B, D)."""
    model = reader.model
    heads = [tuple(p[:n]) for p, n in zip(batch.prompts, batch.prefix_lengths)]
    longest = max(len(p) - len(head) for p, head in zip(batch.prompts, heads))  # of the rests
    nothing_shared = len(set(heads)) == len(heads)
    # in C a rest is run apart in any case: the bits of a row then depend on no other
    if nothing_shared and not (longest and reader.takes_rests(longest)):
        heads = [tuple(p) for p in batch.prompts]
        if room:
            return _prefill_distinct(reader, heads, room, reader.cache_dtype)
    distinct = list(dict.fromkeys(heads))
    cache, last = _prefill_distinct(reader, distinct, 0, compute_dtype(model.wte.weight))
    index = {head: i for i, head in enumerate(distinct)}
    owner = torch.tensor([index[head] for head in heads], device=last.device)
    last = last[owner]
    rest = [p[len(head) :] for p, head in zip(batch.prompts, heads)]
    shared = SharedCache(cache, owner, max(map(len, rest)) + room)
    if any(rest):
        last = _run_rests(reader, shared, rest, last)
    return shared, last


def _run_rests(
    reader: Reader, shared: SharedCache, rests: Sequence[Sequence[int]], last: Tensor
) -> Tensor:
    """Run what stands behind the prefixes, a few rows at a time; the last states of all rows."""
    ids, lengths = pad_right(rests, last.device)
    sizes = [len(rest) for rest in rests]
    states = []
    for some in _few_tokens(sizes, memory.prefill_tokens(last.device)):
        longest = max(sizes[some])
        if not longest:
            states.append(last[some])
            continue
        n = lengths[some]
        hidden = reader.prompts(ids[some, :longest], shared.part(some), n)
        # a row without a rest keeps its state
        states.append(last_real(hidden, n).where(n[:, None] > 0, last[some]))
    shared.advance(max(sizes), lengths)
    return torch.cat(states)


def _prefill_distinct(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    room: int,
    dtype: torch.dtype,
) -> tuple[KVCache, Tensor]:
    """Run each prompt, a few at a time, so that little is padding and a CPU's caches suffice."""
    model = reader.model
    device = model.wte.weight.device
    ids, lengths = pad_right(prompts, device)
    n_prompts, longest = ids.shape
    cache = KVCache(model.cfg, n_prompts, longest + room, device, dtype)
    last = []
    sizes = [len(prompt) for prompt in prompts]
    for some in _few_tokens(sizes, memory.prefill_tokens(device)):
        n = lengths[some]
        hidden = reader.prompts(ids[some, : max(sizes[some])], cache.select(some), n)
        last.append(last_real(hidden, n))
    cache.advance(longest, lengths)
    return cache, torch.cat(last)


def _few_tokens(lengths: list[int], most: int) -> Iterator[slice]:
    """Neighbouring rows that, padded to the longest of them, hold at most so many tokens; at
    least one row each. Short and long ones stay apart, so that the way in which a prompt is
    computed, and its bits, depend on no other."""
    start = 0
    for i in range(1, len(lengths)):
        longest = max(lengths[start : i + 1])
        tokens = longest * (i + 1 - start)
        mixed = (lengths[start] > SHORT_PROMPT) != (lengths[i] > SHORT_PROMPT)
        if mixed or tokens > most:
            yield slice(start, i)
            start = i
    yield slice(start, len(lengths))


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on the right, and how many of each row are real (B,)."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True
    )
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def last_real(hidden: Tensor, lengths: Tensor) -> Tensor:
    """(B, T, D) -> (B, D): the state of each row's last real token."""
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


def _budget(model: GPT, prompt: Sequence[int], max_new_tokens: int, on_overflow: str) -> int:
    """Tokens that this prompt's completion may have."""
    cfg = model.cfg
    room = cfg.block_size - len(prompt)
    got = f"got a prompt of {len(prompt)} tokens, max_new_tokens {max_new_tokens}"
    if max_new_tokens < 1 or not prompt or not 0 <= min(prompt) <= max(prompt) < cfg.n_ids:
        raise ConfigError(
            f"{got}; expected at least 1 of each, and ids in 0..{cfg.n_ids - 1}; mend the request"
        )
    too_long = room < 0 and on_overflow != "empty"
    if too_long or (room < max_new_tokens and on_overflow == "raise"):
        raise ConfigError(
            f"{got}; expected both to fit the block_size {cfg.block_size}; shorten one of them"
        )
    return max(0, min(room, max_new_tokens))
