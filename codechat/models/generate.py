"""Sampling: prompts of different lengths in one batch, a key-value cache, log-probabilities of the sampled tokens.

Each distinct prompt of a batch is run once, its samples share its cache, and finished rows leave. A row's tokens do not
depend on the other rows, their order, or the batch size, but for rounding (`draws`). On a GPU a batch takes what memory
is free and runs as one graph (`decode_graph`). Sampling runs in the caller's autocast and leaves the model in its mode.

Shapes: B rows, T tokens, V ids (`GPTConfig.n_ids`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codechat.core.errors import ConfigError
from codechat.distributed import sharding
from codechat.models import attention, decode_graph, lora
from codechat.models.attention import KVCache, SharedCache
from codechat.models.decode_graph import Reader
from codechat.models.draws import (
    Batch,
    Grammar,
    Rows,
    Truncation,
    apply_grammars,
    draw,
    draw_and_note,
    row_key,
    take_allowed,
    uniform,
)
from codechat.models.gpt import GPT, MLP
from codechat.models.head import compute_dtype

CACHE_BYTES = 2**30  # on a CPU, memory of keys, values and logits that the default batch size aims at
CPU_PREFILL = 1024  # prompt tokens that a CPU runs at once
COMPACT_BELOW = 0.75  # share of unfinished rows under which copying the cache costs less than idle rows
FEW_ROWS = 48  # inputs of this many rows or fewer are faster with a transposed copy of the weight
# float32 weights of this size or more, and all in bfloat16, are faster packed by oneDNN, for any number of rows
PACKED = 1 << 19

StopReason = Literal["stop", "length", "context", "turns"]


@dataclass(frozen=True)
class Completion:
    """Sampled ids (a stop sequence included), their log-probabilities in nats, and why it ended.

    In an episode (`rl.episodes`) ids also hold the environment's text: mask is False there, the log-probability 0.
    kept (n, K) int32: of each token the ids that it could have been, -1 where there are fewer than K and where an
    environment spoke; none = any id, or `sample` was not told to note them."""

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
    """(N, K) int32: `Completion.kept` of consecutive parts of n tokens each, -1 for a part that has none; none if no
    part has any."""
    noted = [kept for _, kept in parts if kept is not None]
    if not noted:
        return None
    table = noted[0].new_full((sum(n for n, _ in parts), max(kept.shape[1] for kept in noted)), -1)
    at = 0
    for n, kept in parts:
        if kept is not None:
            table[at : at + n, : kept.shape[1]] = kept
        at += n
    return table


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
    """`samples_per_prompt` completions of each prompt, prompt-major: prompt 0 sample 0, prompt 0 sample 1 ...

    temperature: 0 takes the most likely token; its log-probability is the model's own at temperature 1. Otherwise
    log-probabilities are of the distribution sampled from, after temperature and truncation (and under a grammar).
    stop: token sequences, each matched whole at the end of the completion (never the prompt) and kept in it.
    seed: none takes one from torch's global generator.
    keys: one per prompt, part of its sampling seed: with a problem's id, samples do not depend on the other prompts.
    Default: the index, so equal prompts differ; equal keys give equal samples.
    prefix_tokens: one per prompt; prompts that share this many first tokens run them once (speed only).
    on_overflow: where prompt + max_new_tokens exceeds block_size, "raise", or "stop" with reason "context"; "empty":
    the same, and a prompt that is longer itself has an empty completion.
    graph: decode with static shapes (`decode_graph`); none = on a GPU, where no row has a grammar.
    grammars: one per prompt, which its completions follow, or none.
    note_kept: where top_k or top_p cut, each completion says which ids it could have drawn from; no grammars then."""
    how = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    stops = [list(s) for s in stop]
    budgets = [_budget(model, prompt, max_new_tokens, on_overflow) for prompt in prompts]
    cuts = [len(p) for p in prompts] if prefix_tokens is None else prefix_tokens
    names = range(len(prompts)) if keys is None else keys
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    rows = [(i, n) for i in range(len(prompts)) for n in range(samples_per_prompt)]  # prompt, sample
    done = {row: Completion([], [], "context") for row in rows if not budgets[row[0]]}
    kept = how.width(model.cfg.n_ids) if note_kept else 0
    assert not (kept and grammars), (
        "a grammar decides some tokens; the ids that were kept do not tell their probability"
    )
    if len(done) == len(rows):
        return [*done.values()]
    # similar lengths together need little padding
    order = sorted((r for r in rows if r not in done), key=lambda row: (cuts[row[0]], len(prompts[row[0]]), row))
    width = _rows_in_memory(model, prompts, max(budgets), samples_per_prompt, kept)
    with reading(model, graph if grammars is None else False) as reader:
        for start in range(0, len(order), width):
            some = order[start : start + width]
            texts, starts, most = ([values[i] for i, _ in some] for values in (prompts, cuts, budgets))
            draws = [row_key(seed, names[i], n) for i, n in some]
            states = grammars and [(grammar := grammars[i]) and grammar.begin() for i, _ in some]
            batch = Batch(texts, starts, most, draws, how, stops, states, kept)
            if reader.graph:
                ended = decode_graph.Decoder(reader, *_prefill(reader.model, batch, 0), batch).run()
            else:
                *_, last = _steps(reader, batch)
                ended = last.completions()
            for row, end in zip(some, ended):
                reason = "stop" if end.stopped else "length" if len(end.ids) == max_new_tokens else "context"
                done[row] = Completion(end.ids, end.logprobs, reason, kept=end.kept)
    return [done[row] for row in rows]


@torch.inference_mode()
def stream(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Sequence[Sequence[int]] = (),
    seed: int | None = None,
    key: int | str = 0,
    grammar: Grammar | None = None,
    kept: Conversation | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[int]:
    """Each token as it is sampled, equal to `sample` for this prompt and key but for rounding; arguments as there.

    kept: of this model and this conversation; what it has seen of the prompt is not run again."""
    budget = _budget(model, prompt, max_new_tokens, "raise")
    draws = [row_key(int(torch.randint(2**62, ())) if seed is None else seed, key, 0)]
    states = None if grammar is None else [grammar.begin()]
    how = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    stops = [list(s) for s in stop]
    batch = Batch([prompt], [len(prompt)], [budget], draws, how, stops, states)
    with nullcontext(kept) if kept else closing(Conversation(model)) as seen:
        for t, rows in enumerate(_steps(seen.reader, batch, seen.read(prompt, budget))):
            seen.ids.append(int(rows.ids[0, t]))
            yield seen.ids[-1]


class Conversation:
    """Weights copied once, and the cache of the ids seen last, for prompts that continue each other (`stream`)."""

    def __init__(self, model: GPT) -> None:
        self.ids = list[int]()
        opened = ExitStack()
        self.reader = opened.enter_context(reading(model, False))
        self.close = opened.close
        self.cache = KVCache(model.cfg, 1, 0, model.wte.weight.device, _cache_dtype(model.wte.weight))

    def read(self, prompt: Sequence[int], room: int) -> tuple[KVCache, Tensor]:
        """The cache of a prompt with room for more tokens, and its last state (1, D)."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt)))
        same = min(same, self.cache.extent, len(prompt) - 1)
        kv = self.cache.kv
        if kv.shape[4] < len(prompt) + room:
            self.cache = KVCache(self.reader.model.cfg, 1, 2 * (len(prompt) + room), kv.device, kv.dtype)
            self.cache.kv[..., :same, :] = kv[..., :same, :]
        self.ids = list(prompt)
        self.cache.extent = same
        self.cache.lengths.fill_(same)
        new = torch.tensor([prompt[same:]], device=kv.device)
        return self.cache, self.reader.model.hidden(new, cache=self.cache)[:, -1]


@contextmanager
def reading(model: GPT, graph: bool | None) -> Iterator[Reader]:
    """The reader of these weights, copied once for all batches; they must not change meanwhile. graph: none = on a
    GPU."""
    on_cpu = attention.dense(model.wte.weight.device)
    head = model.head_weight().detach()
    dtype = compute_dtype(model.wte.weight)
    if on_cpu and not graph:
        gated = [block.mlp for block in model.blocks if block.mlp.gate is not None]
        inside = {m.base for _, m in lora.adapted(model.blocks)} | {m for mlp in gated for m in (mlp.up, mlp.gate)}
        layers = {m for m in model.blocks.modules() if isinstance(m, nn.Linear | lora.LoRALinear)} - inside
        for layer in layers:  # this hides the method of the class
            layer.forward = _reads_copy(*lora.weight_and_bias(layer), dtype, partial(type(layer).forward, layer))
        for mlp in gated:  # one product for both
            weight = torch.cat([lora.weight_and_bias(part)[0] for part in (mlp.up, mlp.gate)])
            product = _reads_copy(weight, None, dtype, lambda x, mlp=mlp: torch.cat(MLP.up_and_gate(mlp, x), -1))
            mlp.up_and_gate = lambda x, product=product: product(x).chunk(2, -1)
        try:
            yield Reader(model, _reads_copy(head, None, dtype, lambda x: F.linear(x, head)), head)
        finally:
            for part in (*layers, *gated):  # another reader may have been closed before
                vars(part).pop("forward" if part in layers else "up_and_gate", None)
    else:
        copy = sharding.plain_copy(lora.merged(model), dtype)
        head = head.to(dtype)
        static = not on_cpu if graph is None else graph
        yield Reader(copy, lambda hidden: F.linear(hidden, head), head, static)


def _reads_copy(
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    own: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """A linear layer with a packed or transposed copy of its weight: a product of few rows waits for the weight
    from memory, and torch packs a weight (out, in) again in every such product. With gradients it is `own`, the
    layer itself."""
    if torch.backends.mkldnn.is_available() and (
        weight.numel() >= PACKED if dtype == torch.float32 else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        # private, but torch's compiler calls these
        copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), 16)
        added = None if bias is None else bias.detach().to(dtype)
        most = math.inf

        def product(x: Tensor) -> Tensor:
            return torch.ops.mkldnn._linear_pointwise(x.to(dtype), copy, added, "none", [], "")

    else:
        copy = weight.detach().to(dtype).t().contiguous()
        most = FEW_ROWS

        def product(x: Tensor) -> Tensor:
            return x @ copy if bias is None else x @ copy + bias

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() > most * x.shape[-1]:
            return own(x)
        return product(x)

    return forward


def _steps(reader: Reader, batch: Batch, begun: tuple[KVCache, Tensor] | None = None) -> Iterator[Rows]:
    """The rows after each new token, until all have ended. Those that have stay until they are many. begun:
    `_prefill`."""
    model = reader.model
    states = batch.states
    cache, hidden = begun or _prefill(model, batch, max(batch.budgets))
    rows = Rows(batch, len(batch.prompts), hidden.device)
    # a row that has filled the model's block must leave at once: it has no position for another token
    full = set(batch.budgets)
    for t in range(1, max(batch.budgets) + 1):
        logits = reader.logits_of(hidden).float()
        logits[:, model.cfg.n_ids :] = -math.inf
        if states is not None:
            room = (rows.budget - t).tolist()
            apply_grammars(logits, states, room)
        noted = None
        if batch.kept:
            ids, logprobs, noted = draw_and_note(logits, batch.how, uniform(rows.keys, rows.t), batch.kept)
        else:
            ids, logprobs = draw(logits, batch.how, uniform(rows.keys, rows.t))
        if states is not None:
            ids, logprobs = take_allowed(states, ids, logprobs, room)
        rows.add(ids, logprobs, states, noted)
        yield rows
        live = (~rows.done).nonzero()[:, 0]  # the one wait for the device per token
        if not len(live):
            return
        if len(live) < COMPACT_BELOW * len(ids) or t in full:
            cache = cache.select(live)
            ids = ids[live]
            rows.keep(live)
            states = states and [states[i] for i in live.tolist()]
        hidden = model.hidden(ids[:, None], cache=cache)[:, 0]


def _prefill(model: GPT, batch: Batch, room: int) -> tuple[KVCache, Tensor]:
    """Run each distinct beginning once, then the rest of each prompt: the cache of all rows with room for more tokens
    (none = the caller has its own), and last states (B, D).

    Rows that share nothing are run whole, a few at a time, so that little is padding and a CPU's caches suffice."""
    heads = [tuple(p[:n]) for p, n in zip(batch.prompts, batch.cuts)]
    alone = len(set(heads)) == len(heads)
    if alone:
        heads = [tuple(p) for p in batch.prompts]
    place = {head: i for i, head in enumerate(dict.fromkeys(heads))}
    device = model.wte.weight.device
    ids, lengths = pad_right(list(place), device)
    P, S = ids.shape
    dtype = _cache_dtype(model.wte.weight) if alone and room else compute_dtype(model.wte.weight)
    cache = KVCache(model.cfg, P, S + (room if alone else 0), device, dtype)
    states = []
    sizes = list(map(len, place))
    for some in _few_tokens(sizes, CPU_PREFILL if device.type == "cpu" else decode_graph.PREFILL_TOKENS):
        n = lengths[some]
        width = max(sizes[some])
        states.append(last_real(model.hidden(ids[some, :width], cache=cache.select(some), n_new=n), n))
    cache.advance(S, lengths)
    owner = torch.tensor([place[head] for head in heads], device=device)
    last = torch.cat(states)[owner]
    rest = [p[len(head) :] for p, head in zip(batch.prompts, heads)]
    if alone and room:
        return cache, last
    shared = SharedCache(cache, owner, max(map(len, rest)) + room)
    if any(rest):
        ids, lengths = pad_right(rest, device)
        last = last_real(model.hidden(ids, cache=shared, n_new=lengths), lengths)
    return shared, last


def _cache_dtype(weight: Tensor) -> torch.dtype:
    """Of what rows that share nothing keep: on a CPU torch's attention of one new token is 5 times slower in
    bfloat16."""
    return torch.float32 if attention.dense(weight.device) else compute_dtype(weight)


def _few_tokens(lengths: list[int], most: int) -> Iterator[slice]:
    """Neighbouring rows that, padded to the longest of them, hold at most so many tokens; at least one row each."""
    start = 0
    for i in range(1, len(lengths)):
        if (i + 1 - start) * max(lengths[start : i + 1]) > most:
            yield slice(start, i)
            start = i
    yield slice(start, len(lengths))


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), padded on the right, and how many of each row are real (B,)."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def last_real(hidden: Tensor, lengths: Tensor) -> Tensor:
    """(B, T, D) -> (B, D): the state of each row's last real token."""
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


def _budget(model: GPT, prompt: Sequence[int], max_new_tokens: int, on_overflow: str) -> int:
    """Tokens that this prompt's completion may have."""
    cfg, room = model.cfg, model.cfg.block_size - len(prompt)
    got = f"a prompt of {len(prompt)} tokens, max_new_tokens {max_new_tokens}"
    if max_new_tokens < 1 or not prompt or not 0 <= min(prompt) <= max(prompt) < cfg.n_ids:
        raise ConfigError(f"{got}; required are at least 1 each, and ids in 0..{cfg.n_ids - 1}")
    if room < 0 and on_overflow != "empty" or (room < max_new_tokens and on_overflow == "raise"):
        raise ConfigError(f"{got}; together they must fit the block_size {cfg.block_size}; shorten one of them")
    return max(0, min(room, max_new_tokens))


def _rows_in_memory(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    room: int,
    samples: int,
    noted: int,
) -> int:
    """How many rows keep caches (with a share of the prompt) and logits under CACHE_BYTES; on a GPU, in free memory.
    noted: ids that are kept of each new token."""
    cfg = model.cfg
    longest = max(map(len, prompts))
    device = model.wte.weight.device
    if device.type == "cuda":
        dtype = compute_dtype(model.wte.weight)
        copies = any(p.dtype != dtype for p in model.blocks.parameters() if p.ndim == 2)
        # what nobody uses, and what torch keeps for itself
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        how = dict(prompt_tokens=longest, new_tokens=room, samples=samples, copies=copies, kept=noted)
        return decode_graph.rows_in_memory(
            cfg,
            torch.cuda.mem_get_info(device)[0] + kept,
            dtype.itemsize,
            **how,
        )
    cache = cfg.depth * cfg.cache_width * (room + longest / samples) * model.wte.weight.element_size()
    return max(1, int(CACHE_BYTES / (cache + 16 * cfg.padded_vocab + 4 * noted * room)))
