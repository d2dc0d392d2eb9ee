"""Decoding with static shapes: one new token of every row as a few compiled regions, which a GPU captures once and replays as one graph.

What `generate` does row by row on the host is here a mask: a finished row stays in its slot and its tokens are ignored, the column that a step writes
is a tensor, and the host asks once in CHUNK tokens who is still running. Then finished rows leave, where a smaller BUCKET holds the rest. The prompts'
keys and values are those of `KVCache`, read once for all rows of a prompt; own keys and values lie in buffers of one length.

A block is compiled once for all layers, sizes of batches and lengths (symbolic shapes). On a CPU the same regions run one after another.

Left out: streams of single tokens and rows that join, prompts of different lengths behind a shared beginning, which are
prefilled before.

Shapes: B slots of rows, P prompts, W most rows of a prompt, S columns of prompts, O own columns, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.draws import Truncation, draw, uniform
from codechat.models.gpt import GPT
from codechat.models.kv_cache import KVCache, SharedCache, partial_attention
from codechat.models.layers import residual, rope_table
from codechat.models.sampling_memory import COLUMNS, bucket

CHUNK = 16  # tokens between two questions to the device
NARROWEST = 64  # own columns that the first steps read
COMPILE_FROM = 1 << 14  # new tokens from which compiling, some tens of seconds in a process, pays
WARM_UP = 2  # steps before the capture: libraries allocate their workspaces in them


def width(columns: int, room: int) -> int:
    """Columns that a step reads of a buffer of `room`: a power of two, never all of them, whose strides would be compiled apart."""
    return min(max(NARROWEST, 1 << (columns - 1).bit_length()), room - 1)


class Layer:
    """One block's keys and values: what `gpt.Attention` calls as its cache."""

    empty = False  # there is a prompt

    def __init__(self, prompt_k: Tensor, prompt_v: Tensor | None, own_k: Tensor, own_v: Tensor | None) -> None:
        self.prompt_k, self.prompt_v = (
            prompt_k,
            prompt_v,
        )  # (P, K, S, E); no values: a latent, whose first columns they are
        self.own_k, self.own_v = own_k, own_v  # (B, K, O, E)
        self.slots: Slots

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `kv_cache.SharedCache.attend`, of one token per row: (B, H, 1, E)."""
        at, width = self.slots, v.shape[-1]
        own_k = self.own_k.index_copy_(2, at.column, k.to(self.own_k.dtype))
        own_v = own_k[..., :width] if self.own_v is None else self.own_v.index_copy_(2, at.column, v.to(own_k.dtype))
        prompt_v = self.prompt_k[..., :width] if self.prompt_v is None else self.prompt_v
        rows = (q * q.shape[3] ** -0.5).to(own_k.dtype).reshape(len(q), k.shape[1], -1, q.shape[3])  # (B, K, H/K, E)
        own, own_lse = partial_attention(rows, own_k, own_v, mask)
        grid = rows[at.members].transpose(1, 2)  # (P, K, W, H/K, E)
        past, past_lse = partial_attention(grid.flatten(2, 3), self.prompt_k, prompt_v, at.prompt_real)
        past, past_lse = (
            x.unflatten(2, grid.shape[2:4]).transpose(1, 2).flatten(0, 1)[at.place] for x in (past, past_lse)
        )
        return torch.lerp(past, own, (own_lse - past_lse).sigmoid().to(own.dtype)).to(q.dtype).reshape(*q.shape[:3], -1)


@dataclass
class Slots:
    """Where the rows lie, and what they have sampled. All are tensors that steps change in place."""

    members: Tensor  # (P, W) slots of each prompt's rows; 0 where it has fewer
    place: Tensor  # (B,) each slot's place in the flattened grid (P W)
    prompt_real: Tensor  # (P, 1, 1, S) false = padding
    own_real: Tensor  # (B, 1, 1, O) false = padding between a shared beginning and its row's first new token
    column: Tensor  # (1,) own column that the next token takes
    t: Tensor  # (1,) its number among the new tokens
    base: Tensor  # (B,) position of the first new token
    keys: Tensor  # (B,) of random numbers
    budget: Tensor  # (B,) new tokens that a row may have
    hidden: Tensor  # (B, D) last states
    tail: Tensor  # (B, L) last tokens; -1 = none yet
    endings: Tensor  # (N, L) stop sequences, right-aligned; -2 = any token
    done: Tensor  # (B,) bool
    stopped: Tensor  # (B,) bool: by a stop sequence
    ends: Tensor  # (B,) tokens of the completion
    ids: Tensor  # (B, T)
    logprobs: Tensor  # (B, T) float32

    PER_ROW = ("place", "own_real", "base", "keys", "budget", "hidden", "tail", "done", "stopped", "ends", "ids", "logprobs")  # fmt: skip


def _sample(model: GPT, head: Tensor, how: Truncation, slots: Slots) -> tuple[Tensor, ...]:
    """Draw a token of every row from its last state and note it; returns what the blocks need: (x, cos, sin, mask)."""
    logits = F.linear(slots.hidden, head).float()
    logits[:, model.cfg.n_ids :] = -math.inf
    ids, logprobs = draw(logits, how, uniform(slots.keys, slots.t))
    slots.tail.copy_(torch.cat((slots.tail[:, 1:], ids[:, None]), dim=1))
    hit = ((slots.tail[:, None] == slots.endings) | (slots.endings == -2)).all(-1).any(-1)
    first = hit & ~slots.done
    slots.stopped.logical_or_(first)
    slots.ends.copy_(torch.where(first, slots.t + 1, slots.ends))
    slots.ids.index_copy_(1, slots.t, ids[:, None])
    slots.logprobs.index_copy_(1, slots.t, logprobs[:, None])
    slots.done.logical_or_(hit | (slots.budget == slots.t + 1))
    # a finished row may stand behind the model's block, where there is no position
    positions = (slots.base + slots.t).clamp(max=model.cfg.block_size - 1)
    columns = torch.arange(slots.own_real.shape[3], device=ids.device)
    mask = slots.own_real & (columns <= slots.column)  # (B, 1, 1, O)
    return *embed(model, ids, positions), mask


def embed(model: GPT, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of one token per row, ids and positions (B,): the residual stream (B, 1, D), and cosines and sines of rotary positions."""
    x = model.wte(ids[:, None])
    if model.wpe is not None:
        x = x + model.wpe(positions[:, None])
    x = residual(model.cfg, x)
    rope = rope_table(model.cfg, 1, positions[:, None], x.device, x.dtype) if model.cfg.pos == "rope" else (None, None)
    return x, *rope


def run_block(block: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor, layer: Any) -> Tensor:
    """One block over one token per row; layer: its keys and values, with a method `attend` as that of `Layer`."""
    return block(x, None if cos is None else (cos, sin), mask, (layer, 0))


def _advance(norm: Any, x: Tensor, slots: Slots) -> None:
    slots.hidden.copy_(norm(x)[:, 0])
    slots.column.add_(1)
    slots.t.add_(1)


@cache
def compiled_region(region: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A region, compiled once per process for all sizes."""
    return torch.compile(region, fullgraph=True, dynamic=True, backend=backend)


@contextmanager
def compiling(compiled: str | None) -> Iterator[None]:
    """While regions run: as many sizes as there are, and sizes that happen to be equal are not taken for one."""
    with ExitStack() as stack:
        if compiled is not None:
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
            stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))
        yield


class Replay:
    """A step whose tensors stay where they are. On a GPU it is captured the third time, and replayed as one graph from then on."""

    def __init__(self, step: Callable[[], None], on_gpu: bool, pool: Any = None) -> None:
        """pool: memory that graphs which never run at the same time share."""
        self.step, self.on_gpu, self.pool = step, on_gpu, pool
        self.seen = 0
        self.graph: Any = None

    def __call__(self) -> None:
        if not self.on_gpu:
            self.step()
        elif self.seen < WARM_UP:
            self.seen += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                # a checkpoint may be written meanwhile
                with torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"):
                    self.step()
            self.graph.replay()


class Decoder:
    """A batch that is decoded to its end.

    model, head: `decoding.reader`; its weights must not change meanwhile. prefix, owner (B,): the prompts' cache, and which each row continues;
    tails: what the rows' prompts have behind a shared beginning; last (B, D): the states there.
    how: the distribution. compiled: a backend, or none to run the regions as they are."""

    def __init__(
        self,
        model: GPT,
        head: Tensor,
        prefix: KVCache,
        owner: Tensor,
        last: Tensor,
        *,
        tails: SharedCache | None = None,
        budgets: list[int],
        keys: list[int],
        stops: list[list[int]],
        how: Truncation,
        compiled: str | None = None,
    ) -> None:
        self.model, self.head, self.how = model, head, how
        self.compiled = compiled
        regions = (_sample, run_block, _advance)
        self.regions = regions if compiled is None else tuple(compiled_region(f, compiled) for f in regions)
        self.count, self.most, self.extent = len(budgets), max(budgets), tails.extent if tails else 0
        self.steps = self.waits = 0  # tokens so far; questions to the device
        self._open(prefix, owner, tails, last, budgets, keys, stops)

    def _open(
        self,
        prefix: KVCache,
        owner: Tensor,
        tails: SharedCache | None,
        last: Tensor,
        budgets: list[int],
        keys: list[int],
        stops: list[list[int]],
    ) -> None:
        device, B, extra = last.device, bucket(self.count), bucket(self.count) - self.count
        self.owner = F.pad(owner, (0, extra))
        self.row = torch.arange(B, device=device)  # the batch's row in each slot; rows from count on are padding
        self.room = -(-(self.extent + self.most) // COLUMNS) * COLUMNS + COLUMNS
        self.own_real = torch.ones(B, 1, 1, self.room, dtype=torch.bool, device=device)
        if tails and tails.real is not None:
            self.own_real[: self.count, 0, 0, : self.extent] = tails.real[:, : self.extent]
        base = prefix.lengths[owner] + (tails.lengths if tails else 0)
        budget = torch.tensor([*budgets, *[0] * extra], device=device)
        longest = max(map(len, stops), default=1)
        endings = [[-2] * (longest - len(s)) + s for s in stops] or [[-3]]  # -3: no token
        self.slots = Slots(
            members=self.owner[:0, None], place=self.owner, prompt_real=prefix.real[:, None, None, : prefix.extent],
            own_real=self.own_real[..., :0], column=torch.tensor([self.extent], device=device), t=torch.zeros(1, dtype=torch.long, device=device),
            base=F.pad(base, (0, extra)), keys=torch.tensor([*keys, *[0] * extra], device=device),
            budget=budget, hidden=F.pad(last, (0, 0, 0, extra)), tail=torch.full((B, longest), -1, device=device),
            endings=torch.tensor(endings, device=device), done=budget == 0, stopped=torch.zeros(B, dtype=torch.bool, device=device),
            ends=budget.clone(), ids=torch.zeros(B, self.most, dtype=torch.long, device=device),
            logprobs=torch.zeros(B, self.most, device=device),
        )  # fmt: skip
        self._open_layers(prefix, tails, B)
        self.out: list[Any] = [None] * self.count
        self._arrange(torch.arange(self.count, device=device))

    def _open_layers(self, prefix: KVCache, tails: SharedCache | None, B: int) -> None:
        """Buffers of own keys and values for each block. A latent's keys hold its values."""
        depth, n, _, K, _, W = prefix.kv.shape
        self.layers, self.buffers = [], []
        for layer in range(depth):
            own: list[Tensor | None] = [prefix.kv.new_zeros(B, K, self.room, W) for _ in range(n)]
            for i, buffer in enumerate(own):
                if tails:
                    buffer[: self.count, :, : self.extent] = tails.kv[layer, i, :, :, : self.extent]
            prompt: list[Tensor | None] = [prefix.kv[layer, i, :, :, : prefix.extent] for i in range(n)]
            k, v, prompt_k, prompt_v = *(own + [None])[:2], *(prompt + [None])[:2]
            self.buffers.append((k, v))
            self.layers.append(Layer(prompt_k, prompt_v, k, v))

    # ---- between chunks: on the host

    def _arrange(self, live: Tensor) -> None:
        """Give every prompt's live slots their places in the grid."""
        owner, P = self.owner[live], len(self.slots.prompt_real)
        members = F.one_hot(owner, P).cumsum(0)
        nth = members.gather(1, owner[:, None])[:, 0] - 1
        width = max(1, int(members[-1].max())) if len(live) else 1
        self.slots.members = owner.new_zeros(P, width).index_put((owner, nth), live)
        self.slots.place = owner.new_zeros(len(self.owner)).index_put((live,), owner * width + nth)

    def _narrow(self, columns: int) -> bool:
        """Read at least so many own columns; returns whether that changed what a step reads."""
        wide = width(columns, self.room)
        if wide == self.slots.own_real.shape[3]:
            return False
        B = len(self.owner)
        for layer, (k, v) in zip(self.layers, self.buffers):
            layer.own_k, layer.own_v = k[:B, :, :wide], None if v is None else v[:B, :, :wide]
            layer.slots = self.slots
        self.slots.own_real = self.own_real[:B, :, :, :wide]
        return True

    def _compact(self, live: Tensor) -> None:
        """Keep the live rows, in the first slots of the same buffers. A block's buffers are copied at a time: a second cache would not fit."""
        B = bucket(len(live))
        slots = F.pad(live, (0, B - len(live)))  # padding repeats slot 0, and is done
        padding = torch.arange(B, device=live.device) >= len(live)
        for k, v in self.buffers:
            for x in (k, v):
                if x is not None:
                    x[:B] = x[slots]
        self.own_real[:B] = self.own_real[slots]
        for name in Slots.PER_ROW:
            if name != "own_real":
                setattr(self.slots, name, getattr(self.slots, name)[slots])
        self.slots.done |= padding
        self.owner, self.row = self.owner[slots], torch.where(padding, self.count, self.row[slots])
        self._arrange(torch.arange(len(live), device=live.device))
        self.slots.own_real = self.own_real[:B, :, :, :0]  # so that `_narrow` sees a change

    def _flush(self, slots: Tensor) -> None:
        """Read the completions of these slots to the host."""
        columns = (self.row, self.slots.ends, self.slots.stopped, self.slots.ids, self.slots.logprobs)
        for row, n, hit, ids, logprobs in zip(*(x[slots].tolist() for x in columns)):
            if row < self.count:
                self.out[row] = ids[:n], logprobs[:n], hit

    # ---- a token

    def step(self) -> None:
        """One new token of every row."""
        sample, block_of, advance = self.regions
        x, *rope, mask = sample(self.model, self.head, self.how, self.slots)
        for block, layer in zip(self.model.blocks, self.layers):
            x = block_of(block, x, *rope, mask, layer)
        advance(self.model.norm, x, self.slots)

    def run(self) -> list[tuple[list[int], list[float], bool]]:
        """(ids, log-probabilities, whether a stop sequence ended it) of each row."""
        with compiling(self.compiled):
            replay = Replay(self.step, self.owner.is_cuda)
            while self.steps < self.most:
                todo = min(CHUNK, self.most - self.steps)
                if self._narrow(self.extent + self.steps + todo):
                    replay = Replay(self.step, self.owner.is_cuda)
                for _ in range(todo):
                    replay()
                self.steps += todo
                self.waits += 1
                live = (~self.slots.done).nonzero()[:, 0]  # waits for the device
                if not len(live):
                    break
                if bucket(len(live)) < len(self.owner) and self.steps < self.most:
                    self._flush(self.slots.done.nonzero()[:, 0])
                    self._compact(live)
        self._flush(torch.arange(len(self.owner), device=self.owner.device))
        return self.out
