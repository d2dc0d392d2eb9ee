"""Decoding with static shapes: a GPU replays a new token of every row as one graph.

Once in CHUNK tokens the host asks who is running, and finished rows leave where a smaller
bucket holds the rest. Compiled, a token of 128 rows of 2b took 1.5 times as long on an H200,
and one of a single row three quarters.

Shapes: B rows (padded), P prompts, W most rows of a prompt, S columns of prompts, O own
columns, H heads, K key-value heads, E head width."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.attention import keys_and_values
from codechat.models.draws import Batch, Ended, Rows, draw_and_note, uniform
from codechat.models.fast.memory import bucket, room_for
from codechat.models.fast.reader import Reader
from codechat.models.fast.shared_prefix import (
    Grid,
    Prefix,
    SharedCache,
    attend_shared,
    group_members,
)
from codechat.models.gpt import rope_table

CHUNK = 16  # tokens between two questions to the device
NARROWEST = 64  # own columns that the first steps read
WARM_UP = 2  # steps before the capture: libraries allocate their workspaces in them


class Layer:
    """Keys and values of one block."""

    own: Tensor  # the part of the buffer that steps read

    def __init__(self, prompt: Tensor, buffer: Tensor, rows: Decoder) -> None:
        """What `KVCache.kv` has of one block: prompt (2, P, K, S, E) and buffer (2, B, K, O,
        E), with mla 1 for 2."""
        self.prompt = prompt
        self.buffer = buffer
        self.rows = rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `SharedCache.attend`, of one token per row: (B, H, 1, E)."""
        rows = self.rows
        for kept, new in zip(self.own, (k, v)):
            kept.index_copy_(2, rows.column, new.to(kept.dtype))
        cfg = rows.reader.model.cfg
        own_keys, own_values = keys_and_values(self.own, cfg)
        keys, values = keys_and_values(self.prompt, cfg)
        return attend_shared(
            q, own_keys, own_values, mask, Prefix(keys, values, rows.prompt_real), rows.grid
        )


def replayed(step: Callable[[], None], on_gpu: bool) -> Callable[[], None]:
    """A step whose tensors stay where they are; on a GPU captured behind WARM_UP calls, and
    replayed as one graph."""
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
            # a checkpoint may be written meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        graph.replay()

    return call


class Decoder(Rows):
    """A batch that is decoded to its end; every token changes its tensors in place."""

    PER_ROW = [*Rows.PER_ROW, "owner", "base", "hidden"]
    # (B, 1, 1, O) own columns that steps read; false = padding behind a shared beginning
    real: Tensor
    grid: Grid  # the live rows of each prompt

    def __init__(self, reader: Reader, cache: SharedCache, last: Tensor, batch: Batch) -> None:
        """cache, last (B, D): of `generate.prefill` without room."""
        count = len(batch.budgets)
        prompts = cache.prefix
        self.reader = reader
        self.batch = batch
        super().__init__(batch, bucket(count), last.device)
        B = len(self.row)
        self.most = max(batch.budgets)
        self.extent = cache.extent
        self.room = room_for(self.extent + self.most)
        self.owner = F.pad(cache.owner, (0, B - count))  # (B,) prompt of each row
        # (B,) position of the first new token
        self.base = F.pad(cache.positions(1)[:, 0], (0, B - count))
        self.hidden = F.pad(last, (0, 0, 0, B - count))  # (B, D) last states
        # (P, 1, 1, S) false = padding
        self.prompt_real = prompts.real[:, None, None, : prompts.extent]
        # (1,) own column that the next token takes
        self.column = torch.tensor([self.extent], device=last.device)
        self.all_real = torch.ones(B, 1, 1, self.room, dtype=torch.bool, device=last.device)
        self.all_real[:count, 0, 0, : self.extent] = cache.real[:, : self.extent]
        self.layers = []
        self.width = 0
        for kv, prompt in zip(cache.kv, prompts.kv):  # of each block
            buffer = prompt.new_zeros(len(kv), B, kv.shape[2], self.room, kv.shape[4])
            buffer[:, :count, :, : self.extent] = kv[..., : self.extent, :]
            self.layers.append(Layer(prompt[..., : prompts.extent, :], buffer, self))
        self._arrange(count)

    def run(self) -> list[Ended]:
        """Decode to the end of every row."""
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

    def step(self) -> None:
        """One new token of every row: drawn from its last state and noted, then read by every
        block."""
        model = self.reader.model
        logits = self.reader.logits_of(self.hidden).float()
        logits[:, model.cfg.n_ids :] = -math.inf
        # a finished row may stand behind the model's block, where there is no position
        positions = (self.base + self.t).clamp(max=model.cfg.block_size - 1)
        ids, logprobs, kept = draw_and_note(
            logits, self.batch.truncation, uniform(self.keys, self.t), self.batch.kept
        )
        self.add(ids, logprobs, kept=kept)
        # (B, 1, 1, O)
        mask = self.real & (torch.arange(self.real.shape[3], device=ids.device) <= self.column)
        x = model.embedded(ids[:, None], positions[:, None])
        rope = rope_table(model.cfg, positions[:, None]) if model.cfg.pos == "rope" else None
        for block, layer in zip(model.blocks, self.layers):
            x = block(x, rope, mask, layer.attend, None)
        self.hidden.copy_(model.norm(x)[:, 0])
        self.column.add_(1)

    def _arrange(self, live: int) -> None:
        """Give every prompt's live rows, the first ones, their places in the grid."""
        grid = group_members(self.owner[:live], len(self.prompt_real))
        self.grid = Grid(grid.members, F.pad(grid.place, (0, len(self.owner) - live)))

    def _narrow(self, columns: int) -> bool:
        """Read at least so many own columns; returns whether that changed what a step reads."""
        # a power of two: each change is captured anew
        wide = min(max(NARROWEST, 1 << (columns - 1).bit_length()), self.room)
        if wide == self.width:
            return False
        self.width = wide
        B = len(self.row)
        for layer in self.layers:
            layer.own = layer.buffer[:, :B, :, :wide]
        self.real = self.all_real[:B, :, :, :wide]
        return True

    def _compact(self, live: Tensor) -> None:
        """Keep the live rows, as the first of the same buffers, block by block: a second cache
        would not fit."""
        B = bucket(len(live))
        rows = F.pad(live, (0, B - len(live)))  # padding repeats row 0, and is done
        for layer in self.layers:
            for kept in layer.buffer:
                kept[:B] = kept[rows]
        self.all_real[:B] = self.all_real[rows]
        self.keep(rows)
        self.done[len(live) :] = True
        self.row[len(live) :] = len(self.out)
        self._arrange(len(live))
        self.width = 0  # so that `_narrow` sees a change
