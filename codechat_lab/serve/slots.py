"""Keys and values of the requests that are being answered: where they are, and how much memory
they may take.

Shapes: B rows, K key-value heads, E head width."""

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from codechat.core.errors import ConfigError
from codechat.models import attention
from codechat.models.config import GPTConfig
from codechat.models.fast import memory

SPARE_COLUMNS = 128  # of a cache that is made, at least: else every few tokens would copy it


# ---- how much there may be


@dataclass(frozen=True)
class Room:
    """max_context: longest prompt with its answer, tokens. most_tokens: of all requests that run
    together, each counted as the longest of them; the others wait."""

    max_context: int
    max_rows: int
    most_tokens: int

    def takes(self, needs: list[int]) -> bool:
        """Whether requests of so many tokens may run together. One always may."""
        rows = slots_for(len(needs), self.max_rows)
        columns = columns_for(max(needs), self.max_context)
        return len(needs) == 1 or rows * columns <= self.most_tokens


def room_in(
    free: int, cfg: GPTConfig, dtype: torch.dtype, *, max_context: int | None, max_rows: int
) -> tuple[Room, str]:
    """What fits into so many free bytes, and a line that says so. max_context: none = what the
    model knows, or less where not even one such request fits. ConfigError where it asks for
    more."""
    of_token = cfg.depth * cfg.cache_width * dtype.itemsize
    fitting = int(free * (1 - memory.SPARE)) // of_token
    longest = min(cfg.block_size, fitting)
    if max_context is not None and max_context > cfg.block_size:
        raise ConfigError(
            f"got max_context {max_context}; the model knows {cfg.block_size} positions; set "
            f"--max-context {cfg.block_size} or less"
        )
    if longest < (max_context or 1):
        raise ConfigError(
            f"keys and values of {max_context or 1} tokens need "
            f"{_size((max_context or 1) * of_token)}, and {_size(free)} are free; "
            f"set --max-context {longest} or less, or free memory"
        )
    context = max_context or longest
    whole = min(max_rows, max(1, fitting // context))
    waits = f"; {whole} of that length run together, more of shorter ones, others wait"
    about = (
        f"longest prompt with its answer: {context:,} tokens; keys and values: "
        f"{of_token / 2**10:,.0f} KiB a token, {_size(max_rows * context * of_token)} for "
        f"{max_rows} such requests, of {_size(free)} free"
    )
    room = Room(context, max_rows, max(context, min(fitting, max_rows * context)))
    return room, about + (waits if whole < max_rows else "")


def _size(n_bytes: float) -> str:
    if n_bytes < 2**30:
        return f"{n_bytes / 2**20:,.0f} MiB"
    return f"{n_bytes / 2**30:,.1f} GiB"


def free_memory(device: torch.device, cfg: GPTConfig, compute: torch.dtype) -> int:
    """Bytes that are free on a device behind the weights that decoding still copies."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return max(0, free - memory.weight_bytes(cfg, compute.itemsize))


def slots_for(rows: int, most: int) -> int:
    """Slots that are made for so many rows, at most `most`."""
    return min(most, memory.bucket(rows) if rows > memory.SMALLEST else rows)


def columns_for(tokens: int, most: int) -> int:
    """Columns that are made for rows of so many tokens, at most `most`: an eighth more, so that a
    row is seldom copied."""
    return min(most, memory.room_for(tokens + max(SPARE_COLUMNS, tokens // 8)))


# ---- where it is


class SlotCache(attention.KVCache):
    """Keys and values of rows that come and go: each stores its next token at its own length.

    Rows in use fill slots 0 to B - 1, so that a step reads them without a copy; the last row
    replaces one that leaves. Memory grows with the rows in use and the longest of them; there is
    none where no row is."""

    def __init__(
        self, cfg: GPTConfig, room: Room, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(cfg, 0, 0, device, dtype)
        self.room = room
        self.layers = [*self.kv]  # (2|1, slots, K, columns, E) of each block
        self.tokens: list[int] = []  # of each row in use
        # (B,) the same, while a step runs
        self.columns = torch.zeros(0, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def make_room(self, rows: int, columns: int) -> None:
        """Have slots for so many rows of so many tokens. Blocks are copied one after another: a
        second cache may not fit."""
        _, slots, _, width, _ = self.layers[0].shape
        if rows <= slots and columns <= width:
            return
        slots = slots_for(rows, self.room.max_rows)
        width = columns_for(columns, self.room.max_context)
        parts, heads, size = self.cfg.cached
        used = len(self.tokens)
        length = max(self.tokens, default=0)
        for number, old in enumerate(self.layers):
            # of zeros: a token that is hidden has weight 0, and 0 times anything finite is 0
            new = old.new_zeros(parts, slots, heads, width, size)
            new[:, :used, :, :length] = old[:, :used, :, :length]
            self.layers[number] = new

    def join(self, prefilled: attention.KVCache, row: int, length: int) -> None:
        """Copy the first `length` tokens of a prefilled row into the next free slot."""
        free = len(self.tokens)
        self.make_room(free + 1, max(length, *self.tokens, 0))
        for layer, filled in zip(self.layers, prefilled.kv):
            layer[:, free, :, :length] = filled[:, row, :, :length]
        self.tokens.append(length)

    def leave(self, slot: int) -> None:
        """Free a slot; the last row in use moves there. The last of all gives the memory back."""
        length = self.tokens.pop()
        last = len(self.tokens)
        if slot != last:
            for layer in self.layers:
                layer[:, slot, :, :length] = layer[:, last, :, :length]
            self.tokens[slot] = length
        if not self.tokens:
            self.layers = [*self.kv]

    def positions(self, new: int) -> Tensor:
        """(B, 1) position that the next token of each row takes."""
        self.columns = torch.tensor(self.tokens, device=self.kv.device)
        return self.columns[:, None]

    def mask(self, new: int) -> Tensor | None:
        """bool (B, 1, 1, S): what the next token of each row may attend to; none = everything."""
        if min(self.tokens) == max(self.tokens):
            return None
        return (torch.arange(max(self.tokens) + 1, device=self.kv.device) <= self.columns[:, None])[
            :, None, None
        ]

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, K, 1, E) of one token per row; return those of all tokens so far."""
        kv = self.layers[layer][:, : len(k)]
        rows = torch.arange(len(k), device=k.device)
        for kept, new in zip(kv, (k, v)):
            kept[rows, :, self.columns] = new[:, :, 0].to(kept.dtype)
        return attention.keys_and_values(kv[..., : max(self.tokens) + 1, :], self.cfg)

    def place(self) -> attention.Place:
        self.positions(1)
        rows = len(self.tokens)
        end = max(self.tokens) + 1
        return attention.Place(
            positions=self.columns,
            kept=[layer[:, :rows, :, :end] for layer in self.layers],
            columns=self.columns,
            mask=self.mask(1),
        )

    def advance(self, new: int, n_new: Tensor | None = None) -> None:
        self.tokens = [n + new for n in self.tokens]
