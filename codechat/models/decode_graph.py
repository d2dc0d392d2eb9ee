"""Decoding with static shapes: a GPU replays a new token of every row as one graph; and how many rows its memory
holds. Once in CHUNK tokens the host asks who is running, and finished rows leave where a smaller bucket holds the
rest. Compiled, a token of 128 rows of 2b took 1.5 times as long on an H200, and one of a single row three quarters.

Shapes: B rows (padded), P prompts, W most rows of a prompt, S columns of prompts, O own columns, H heads, K key-value
heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.attention import SharedCache, attend_shared, group_members, keys_and_values
from codechat.models.config import GPTConfig
from codechat.models.draws import Batch, Ended, Rows, draw, draw_and_note, uniform
from codechat.models.gpt import GPT, residual, rope_table

CHUNK = 16  # tokens between two questions to the device
NARROWEST = 64  # own columns that the first steps read
WARM_UP = 2  # steps before the capture: libraries allocate their workspaces in them
SPARE = 0.1  # of the free memory, for what the allocator cannot use
PREFILL_TOKENS = 16384  # of one prefill pass on a GPU: more are no faster, and their states would take the rows' memory
SMALLEST = 4  # slots of a batch at least
COLUMNS = 16  # the cache's room is a multiple of it


@dataclass(frozen=True)
class Reader:
    """Who decodes (`generate.reading`): the model, or on a GPU a copy in the compute dtype; its head; whether with
    static shapes."""

    model: GPT
    logits_of: Callable[[Tensor], Tensor]
    head: Tensor
    graph: bool = False


def bucket(rows: int) -> int:
    """Slots of a batch for so many rows: powers of two, and halfway between them."""
    power = max(SMALLEST, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if rows <= power * 3 // 4 and power > SMALLEST else power


def room_for(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS


def weight_bytes(cfg: GPTConfig, size: int) -> int:
    """Matrices of the blocks and the output head, `size` bytes each."""
    return size * (cfg.depth * cfg.block_matmul_params + cfg.padded_vocab * cfg.n_embd)


def row_bytes(
    cfg: GPTConfig,
    size: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    samples: int,
    kept: int = 0,
) -> float:
    """One row's keys and values, its share of the prompt's, logits (three times, with what a draw makes), the scores of
    one block and its states, and `kept` ids that are noted of each new token."""
    columns = room_for(new_tokens)
    scores = cfg.n_head * (columns + prompt_tokens) * (8 + 2 * size)
    cache = size * cfg.depth * cfg.cache_width * (columns + prompt_tokens / samples)
    noted = 4 * kept * new_tokens
    return cache + 16 * cfg.padded_vocab + scores + 12 * (cfg.n_embd + cfg.hidden_width) + noted


def rows_in_memory(
    cfg: GPTConfig, free: float, size: int, *, copies: bool = True, samples: int = 1, **tokens: int
) -> int:
    """Rows that fit into `free` bytes, a full bucket or 1. samples: per prompt; copies: weights are copied first;
    tokens: prompt_tokens, new_tokens and kept of `row_bytes`."""
    # the states of one prefill pass at the widest moment of a block
    prefill = PREFILL_TOKENS * (4 * 4 * cfg.n_embd + size * (cfg.n_embd + 3 * cfg.hidden_width))
    left = free * (1 - SPARE) - (weight_bytes(cfg, size) if copies else 0) - prefill
    most = max(1, int(left / row_bytes(cfg, size, samples=samples, **tokens)))
    return next((n for n in range(most, SMALLEST, -1) if bucket(n) == n), most)


class Layer:
    """One block's keys and values: what `gpt.Attention` calls as its cache."""

    own: Tensor  # the part of the buffer that steps read

    def __init__(self, prompt: Tensor, own: Tensor, rows: Decoder) -> None:
        """What `KVCache.kv` has of one block: (2, P, K, S, E) and (2, B, K, O, E), with mla one of both."""
        self.prompt, self.buffer, self.rows = prompt, own, rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `attention.SharedCache.attend`, of one token per row: (B, H, 1, E)."""
        at = self.rows
        for kept, new in zip(self.own, (k, v)):
            kept.index_copy_(2, at.column, new.to(kept.dtype))
        own, prompt = (keys_and_values(kept, at.reader.model.cfg) for kept in (self.own, self.prompt))
        return attend_shared(q, *own, mask, (*prompt, at.prompt_real), at.members, at.place)


def replayed(step: Callable[[], None], on_gpu: bool) -> Callable[[], None]:
    """A step whose tensors stay where they are; on a GPU captured behind WARM_UP calls, and replayed as one graph."""
    if not on_gpu:
        return step
    graph = torch.cuda.CUDAGraph()
    calls = count()

    def call() -> None:
        n = next(calls)
        if n < WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            return
        if n == WARM_UP:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a checkpoint may be written meanwhile
                step()
        graph.replay()

    return call


class Decoder(Rows):
    """A batch that is decoded to its end; every token changes its tensors in place. cache, last (B, D): of
    `generate._prefill` without room."""

    KEPT = [*Rows.KEPT, "owner", "base", "hidden"]
    real: Tensor  # (B, 1, 1, O) own columns that steps read; false = padding behind a shared beginning

    def __init__(self, reader: Reader, cache: SharedCache, last: Tensor, batch: Batch) -> None:
        count = len(batch.budgets)
        prompts = cache.prefix
        self.reader = reader
        self.how = batch.how
        self.noted = batch.kept
        super().__init__(batch, bucket(count), last.device)
        B = len(self.row)
        self.most = max(batch.budgets)
        self.extent = cache.extent
        self.room = room_for(self.extent + self.most)
        self.owner = F.pad(cache.owner, (0, B - count))  # (B,) prompt of each row
        self.base = F.pad(cache.positions(1)[:, 0], (0, B - count))  # (B,) position of the first new token
        self.hidden = F.pad(last, (0, 0, 0, B - count))  # (B, D) last states
        self.prompt_real = prompts.real[:, None, None, : prompts.extent]  # (P, 1, 1, S) false = padding
        self.column = torch.tensor([self.extent], device=last.device)  # (1,) own column that the next token takes
        self.all_real = torch.ones(B, 1, 1, self.room, dtype=torch.bool, device=last.device)
        self.all_real[:count, 0, 0, : self.extent] = cache.real[:, : self.extent]
        self.layers = []
        self.width = 0
        for kv, prompt in zip(cache.kv, prompts.kv):  # of each block
            own = prompt.new_zeros(len(kv), B, kv.shape[2], self.room, kv.shape[4])
            own[:, :count, :, : self.extent] = kv[..., : self.extent, :]
            self.layers.append(Layer(prompt[..., : prompts.extent, :], own, self))
        self._arrange(count)

    def _arrange(self, live: int) -> None:
        """Give every prompt's live rows, the first ones, their places in the grid."""
        self.members, place = group_members(self.owner[:live], len(self.prompt_real))  # (P, W); 0 = none
        self.place = F.pad(place, (0, len(self.owner) - live))  # (2, B) in that grid

    def _narrow(self, columns: int) -> bool:
        """Read at least so many own columns; returns whether that changed what a step reads."""
        # a power of two: each change is captured anew
        wide = min(max(NARROWEST, 1 << (columns - 1).bit_length()), self.room)
        if wide == self.width:
            return False
        self.width, B = wide, len(self.row)
        for layer in self.layers:
            layer.own = layer.buffer[:, :B, :, :wide]
        self.real = self.all_real[:B, :, :, :wide]
        return True

    def _compact(self, live: Tensor) -> None:
        """Keep the live rows, as the first of the same buffers, block by block: a second cache would not fit."""
        B = bucket(len(live))
        rows = F.pad(live, (0, B - len(live)))  # padding repeats row 0, and is done
        for kept in (*(half for layer in self.layers for half in layer.buffer), self.all_real):
            kept[:B] = kept[rows]
        self.keep(rows)
        self.done[len(live) :] = True
        self.row[len(live) :] = len(self.out)
        self._arrange(len(live))
        self.width = 0  # so that `_narrow` sees a change

    def step(self) -> None:
        """One new token of every row: drawn from its last state and noted, then read by every block."""
        model = self.reader.model
        how = self.how
        logits = F.linear(self.hidden, self.reader.head).float()
        logits[:, model.cfg.n_ids :] = -math.inf
        # a finished row may stand behind the model's block, where there is no position
        positions = (self.base + self.t).clamp(max=model.cfg.block_size - 1)
        if self.noted:
            ids, logprobs, kept = draw_and_note(logits, how, uniform(self.keys, self.t), self.noted)
            self.add(ids, logprobs, kept=kept)
        else:
            ids, logprobs = draw(logits, how, uniform(self.keys, self.t))
            self.add(ids, logprobs)
        mask = self.real & (torch.arange(self.real.shape[3], device=ids.device) <= self.column)  # (B, 1, 1, O)
        x = model.wte(ids[:, None]) if model.wpe is None else model.wte(ids[:, None]) + model.wpe(positions[:, None])
        x = residual(model.cfg, x)
        rope = rope_table(model.cfg, 1, positions[:, None], x.device) if model.cfg.pos == "rope" else None
        for block, layer in zip(model.blocks, self.layers):
            x = block(x, rope, mask, (layer, 0), None)
        self.hidden.copy_(model.norm(x)[:, 0])
        self.column.add_(1)

    def run(self) -> list[Ended]:
        """Of each row."""
        for done in range(0, self.most, CHUNK):
            todo = min(CHUNK, self.most - done)
            if self._narrow(self.extent + done + todo):
                step = replayed(self.step, self.hidden.is_cuda)
            for _ in range(todo):
                step()
            live = (~self.done).nonzero()[:, 0]  # waits for the device
            if not len(live):
                break
            if bucket(len(live)) < len(self.row):
                self._compact(live)
        return self.completions()
