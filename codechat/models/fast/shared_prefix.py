"""A cache of rows that continue shared prefixes, which are kept once.

With one new token per row, attention waits for memory: a prefix is read once for all rows of
its group.

Shapes: B rows, T new tokens, P prefixes, W most rows of a prefix, S kept tokens, H heads, K
key-value heads, E head width."""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from codechat.models.attention import Before, KVCache, Place, keys_and_values
from codechat.models.fast.attention import by_key_head, partial_attention


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

    def part(self, rows: slice) -> Self:
        """A view of some rows, which must be filled before this cache advances; all prefixes
        stay."""
        out = super().select(rows)
        out.owner = self.owner[rows]
        out.grid = group_members(out.owner, len(self.prefix.lengths))
        return out

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
