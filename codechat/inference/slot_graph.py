"""One new token of every row of a running batch with static shapes: on a GPU a step is one captured graph.

What `decode_graph.Decoder` does for a batch that is decoded to its end, here for rows that come and go. Rows in use fill the first slots of a
`SlotCache`; a step runs for a BUCKET of slots over a power of two of columns, where a mask hides what lies behind a row's length. Slots behind the
rows in use compute something that nobody reads. Each pair of sizes is captured once for as long as the weights stay.

Left out: the draw, which differs from row to row (distribution, grammar, banned ids) and runs behind the step.

Shapes: B slots, S columns, D width, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from codechat.inference.slot_cache import SlotCache, store
from codechat.models import decode_graph
from codechat.models.gpt import GPT
from codechat.models.kv_cache import attend_grouped
from codechat.models.sampling_memory import bucket


class Layer:
    """One block's keys and values of the first slots and columns: what `gpt.Attention` calls as its cache."""

    empty = False  # rows join with their prompts

    def __init__(self, kept: list[Tensor], columns: Tensor) -> None:
        self.kept, self.columns = kept, columns  # (B, K, S, E) each, (B,)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `SlotCache.attend`, under a mask (B, 1, 1, S)."""
        keys, values = store(self.kept, self.columns, k, v)
        return attend_grouped(q.to(keys.dtype), keys, values, mask).to(
            q.dtype
        )  # the cache is not copied to another dtype


def _embed(model: GPT, ids: Tensor, columns: Tensor, places: Tensor) -> tuple[Tensor | None, ...]:
    """The residual stream (B, 1, D) of ids (B,), cosines, sines, and the mask (B, 1, 1, S); places (S,): 0 .. S - 1."""
    return *decode_graph.embed(model, ids, columns), (places <= columns[:, None])[:, None, None]


def _close(norm: Any, x: Tensor, hidden: Tensor) -> None:
    hidden.copy_(norm(x)[:, 0])


class SlotGraph:
    """The steps of one set of weights.

    model: `decoding.reader`; its weights must not change meanwhile. cache: made with `static`. compiled: a backend, or none to run the regions as
    they are."""

    def __init__(self, model: GPT, cache: SlotCache, compiled: str | None = None) -> None:
        self.model, self.cache, self.compiled = model, cache, compiled
        regions = (_embed, decode_graph.run_block, _close)
        self.regions = (
            regions if compiled is None else tuple(decode_graph.compiled_region(f, compiled) for f in regions)
        )
        slots, self.device = cache.kept[0].shape[1], cache.kept[0].device
        # what steps read and write in place
        self.ids, self.columns = (torch.zeros(slots, dtype=torch.long, device=self.device) for _ in range(2))
        self.hidden = torch.zeros(slots, model.cfg.n_embd, dtype=model.norm.weight.dtype, device=self.device)
        self.steps: dict[tuple[int, int], decode_graph.Replay] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def warm_up(self) -> None:
        """Compile before the first request waits for it."""
        with decode_graph.compiling(self.compiled):
            self._step(1, 1)()

    def __call__(self, last: Sequence[int]) -> Tensor:
        """(rows, D): the states behind each row's last token, which joins the cache."""
        lengths, rows = self.cache.lengths, len(last)
        for mine, new in ((self.ids, last), (self.columns, lengths)):
            mine.zero_()[:rows] = torch.tensor(new, device=self.device)
        with decode_graph.compiling(self.compiled):
            self._step(rows, max(lengths) + 1)()
        self.cache.advance(1)
        return self.hidden[:rows]

    def _step(self, rows: int, columns: int) -> decode_graph.Replay:
        """The step for the sizes that hold so many rows and columns."""
        size = bucket(rows), decode_graph.width(columns, self.cache.kept[0].shape[3])
        if size not in self.steps:
            self.steps[size] = decode_graph.Replay(self._of(*size), self.device.type == "cuda", self.pool)
        return self.steps[size]

    def _of(self, slots: int, width: int) -> Callable[[], None]:
        """A step over the first slots and columns. It holds no reference to this object: in a circle the weights would wait for the collector."""
        model, (embed, run_block, close) = self.model, self.regions
        ids, columns, hidden = (x[:slots] for x in (self.ids, self.columns, self.hidden))
        kept = [[x[n, :slots, :, :width] for x in self.cache.kept] for n in range(self.model.cfg.depth)]
        layers, places = [Layer(x, columns) for x in kept], torch.arange(width, device=self.device)

        def step() -> None:
            x, *where = embed(model, ids, columns, places)
            for block, layer in zip(model.blocks, layers):
                x = run_block(block, x, *where, layer)
            close(model.norm, x, hidden)

        return step
