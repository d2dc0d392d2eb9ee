"""A cache of rows that continue shared prefixes, which are kept once.

With one new token per row, attention waits for memory: a prefix is read once for all rows of
its group.

Shapes: B rows, T new tokens, P prefixes, W most rows of a prefix, S kept tokens, H heads, K
key-value heads, E head width."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.attention import Before, KVCache, Place, keys_and_values
from codechat.models.fast.attention import by_key_head, partial_attention

LEAST_SHARED = 64  # tokens: a shorter beginning saves less than running it apart costs


def shared_lengths(prompts: Sequence[Sequence[int]], longest_rest: int) -> list[int]:
    """For each prompt how many of its first tokens it shares with others, all of it where it
    shares none. Behind them stand at most longest_rest tokens.

    Neighbours in sorted order form a group while each rest is short enough."""
    lengths = [len(prompt) for prompt in prompts]
    numbers = range(len(prompts))
    order = sorted(numbers, key=lambda i: list(prompts[i]))
    group: list[int] = []
    shared = 0
    longest = 0
    for i in order:
        longest = max(longest, len(prompts[i]))
        now = _alike(prompts[group[0]], prompts[i], shared) if group else 0
        if now < LEAST_SHARED or longest - now > longest_rest:
            group = [i]
            shared = len(prompts[i])
            longest = shared
            continue
        group.append(i)
        shared = now
        for member in group:
            lengths[member] = shared
    return lengths


def _alike(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """How many first tokens are the same, at most `most`."""
    pairs = zip(a[:most], b)
    same = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(list(same))


class Grid(NamedTuple):
    """Who continues which prefix. members (P, W): the rows of each prefix, 0 where it has
    fewer; place (2, B): of each row in that grid."""

    members: Tensor
    place: Tensor


def group_members(owner: Tensor, groups: int) -> Grid:
    """owner (B,): the prefix of each row, of `groups` prefixes."""
    counts = F.one_hot(owner, groups).cumsum(0)
    nth = counts.gather(1, owner[:, None])[:, 0] - 1
    width = max(1, int(counts[-1].max())) if len(owner) else 1
    rows = torch.arange(len(owner), device=owner.device)
    return Grid(
        owner.new_zeros(groups, width).index_put((owner, nth), rows), torch.stack((owner, nth))
    )


class Prefix(NamedTuple):
    """What one block keeps of the prefixes: keys and values (P, K, S, E), and bool (P, 1, 1,
    S), false = padding."""

    keys: Tensor
    values: Tensor
    real: Tensor | None


class SharedCache(KVCache):
    """Row i continues row owner[i] of `prefix`, which is not copied, by `room` tokens."""

    def __init__(self, prefix: KVCache, owner: Tensor, room: int) -> None:
        super().__init__(prefix.cfg, len(owner), room, prefix.kv.device, prefix.kv.dtype)
        self.lengths = prefix.lengths[owner]  # positions go on from there
        self._share(prefix, owner)

    def _share(self, prefix: KVCache, owner: Tensor) -> None:
        self.prefix = prefix
        self.owner = owner
        self.grid = group_members(owner, len(prefix.lengths))
        # (P, 1, 1, S)
        self.prefix_mask = prefix.real[:, None, None, : prefix.extent] if prefix.padded else None

    @property
    def empty(self) -> bool:
        return False  # there is a prefix

    def place(self) -> Place:
        return super().place()._replace(before=self._before(self.owner))

    def place_of(self, slots: Tensor, ahead: Tensor) -> Place:
        before = self._before(self.owner[slots])
        return super().place_of(slots, ahead)._replace(before=before)

    def _before(self, owner: Tensor) -> Before:
        prefixes = self.prefix.kv[..., : self.prefix.extent, :].unbind()
        return Before(prefixes, owner, self.prefix_mask)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = keys_and_values(
            self.prefix.kv[layer, :, :, :, : self.prefix.extent], self.cfg
        )
        k, v = self.store(layer, k, v)
        return attend_shared(q, k, v, mask, Prefix(keys, values, self.prefix_mask), self.grid)

    def select(self, rows: Tensor | slice) -> Self:
        """The cache of `rows`, and of the prefixes that they still need."""
        out = super().select(rows)
        used, owner = self.owner[rows].unique(return_inverse=True)
        out._share(
            self.prefix.select(used) if len(used) < len(self.prefix.lengths) else self.prefix, owner
        )
        return out


def attend_shared(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix: Prefix, grid: Grid
) -> Tensor:
    """Attention (B, H, T, E) of q over its row's k and v (B, K, S, E) under a mask (B|1, 1, T,
    S) and over its prefix.

    Each part has its own softmax; their log-sum-exps a and b weight them by sigmoid(a - b)."""
    rows, mask = by_key_head(q, k, mask)
    rows = rows.to(k.dtype)
    behind, behind_lse = partial_attention(rows, mask, k, v)
    # (P, K, W, H/K x T, E): a group's queries as one matrix
    queries = rows[grid.members].transpose(1, 2)
    past, past_lse = partial_attention(
        queries.flatten(2, 3), prefix.real, prefix.keys, prefix.values
    )
    past = _of_rows(past, queries, grid)
    past_lse = _of_rows(past_lse, queries, grid)
    share = (behind_lse - past_lse).sigmoid().to(behind.dtype)
    return torch.lerp(past, behind, share).to(q.dtype).reshape(*q.shape[:3], -1)


def _of_rows(x: Tensor, queries: Tensor, grid: Grid) -> Tensor:
    """(B, K, H/K x T, n): the part of each row of x (P, K, W x H/K x T, n), computed for
    queries of the grid."""
    return x.unflatten(2, queries.shape[2:4]).transpose(1, 2)[tuple(grid.place)]
