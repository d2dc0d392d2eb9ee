"""Conversations: reading, encoding, packing, mixing.

Rows are `{"id", "messages", "domain", "meta"}` in `DOMAIN.SPLIT.jsonl`, or the original project's: `{input_ids, labels}`
(labels aligned with the ids) and `{source, conversations}`. `PackedLoader` puts several conversations into a row of T
tokens; they cannot attend to each other (`packed_mask`), positions restart, and no target crosses from one to the next.

Domains are mixed by supervised tokens: the next conversation comes from the domain furthest behind its share. All ranks
take turns in one sequence of rows, so world size and accumulation do not change what is learned.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from codechat.core import processes
from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats
from codechat.data.sources import Ledger, Row, hash_rows, read_jsonl
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # `codechat data KIND --help` needs no torch
    import torch

IGNORE = -100
BUFFER = 256  # conversations that wait for a row
CHUNK = 64  # rows that a process encodes at a time
# The block size is a choice and its cost is printed, so more conversations may exceed it than may be lost otherwise.
LIMITS = {"too_long": 0.2}
# Names of domains in the original project's conversations.
DOMAINS = {"funcall": "calls", "negative": "code"}


@dataclass(frozen=True, eq=False)
class Example:
    """An encoded conversation. ids (n,) int32; loss_mask (n,) bool, True where the token carries loss."""

    ids: np.ndarray
    loss_mask: np.ndarray
    domain: str

    def __len__(self) -> int:
        """Positions that it takes in a row: its last token is only ever a target."""
        return len(self.ids) - 1

    @property
    def supervised(self) -> int:
        return int(np.count_nonzero(self.loss_mask[1:]))


class Batch(NamedTuple):
    """Packed rows, all (B, T) int64."""

    ids: torch.Tensor
    targets: torch.Tensor  # the next token of the same conversation, -100 without loss
    docs: torch.Tensor  # number of the conversation within its row, -1 for padding
    positions: torch.Tensor  # restart in each conversation
    domains: torch.Tensor  # index into the loader's `domains`, -1 for padding

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in self))

    def places(self, device: torch.device) -> torch.Tensor | None:
        """Indices of the targets into (B T) on the device, from a batch on the host; None for a CPU."""
        from codechat.distributed import dist
        from codechat.models import attention

        found = (self.targets != IGNORE).flatten()
        return None if attention.dense(device) else dist.send(found.nonzero()[:, 0], device)

    @property
    def supervised(self) -> int:
        return int((self.targets != IGNORE).sum())


def read(path: Path | str) -> Iterator[Row]:
    """Rows of a jsonl file. MissingFile; DataError, with file and line, for what cannot be read."""
    for number, row in read_jsonl(Path(path)):
        yield check_row(row, Path(path).name.partition(".")[0], f"{path}:{number}")


def check_row(row: Row, default: str, where: str) -> Row:
    """The row with `messages` and `domain` (`default` where it names none). DataError, beginning with `where`."""
    named, source = (row.get(key) or "" for key in ("domain", "source"))
    if not isinstance(named, str) or not isinstance(source, str):
        raise DataError(f"{where}: domain is {named!r} and source {source!r}; required is text")
    row = row | {"domain": named or DOMAINS.get(source, source) or default}
    if {"input_ids", "labels"} <= row.keys():
        ids, labels = row["input_ids"], row["labels"]
        lists = isinstance(ids, list) and isinstance(labels, list) and len(ids) == len(labels)
        if not lists or any(type(i) is not int or label not in (IGNORE, i) for i, label in zip(ids, labels)):
            raise DataError(f"{where}: labels must be the whole numbers of input_ids, or {IGNORE}; make the file again")
        return row
    if chat_formats.is_disliked(row):
        written = "`codechat preference` reads it from preferences.SPLIT.jsonl"
        label = row.get("label", row.get("kto_tag"))
        raise DataError(f"{where} is an answer with the label {label}, which SFT would imitate; {written}")
    messages = chat_formats.messages_of(row, where)
    if isinstance(messages, str):
        raise DataError(f"{where} cannot be read ({messages}); correct or delete the row")
    return row | {"messages": messages}


def encode(row: Row, tokenizer: Tokenizer, tags: str, block_size: int) -> Example | str:
    """The row as ids and loss mask, or the reason why it cannot be used. DataError for unknown ids."""
    if "input_ids" in row:
        ids, mask = row["input_ids"], [label != IGNORE for label in row["labels"]]
        limit = tokenizer.n_vocab + chat.N_TAGS
        if ids and not 0 <= min(ids) <= max(ids) < limit:
            known = f"tokenizer {tokenizer.spec} and the tags have {limit}"
            raise DataError(f"row holds id {max(ids)}; {known}; use the tokenizer that wrote the file")
    elif not any(m["role"] == "assistant" and m["content"].strip() for m in row["messages"]):
        return "no_assistant"
    else:
        try:
            ids, mask, _ = chat.render(row["messages"], tokenizer, tags=tags)
        except DataError:  # `read` has checked everything else that `render` rejects
            return "tag_in_content"
    if len(ids) > block_size:
        return "too_long"
    example = Example(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool), row["domain"])
    return example if example.supervised else "no_assistant"


def encode_all(
    rows: Sequence[Row], tokenizer: Tokenizer, tags: str, block_size: int, ledger: Ledger, limit: int | None = None
) -> list[Example]:
    """The first `limit` usable rows; `ledger` counts them and the unusable ones before them. Many rows: one process per core."""
    one = partial(encode, tokenizer=tokenizer, tags=tags, block_size=block_size)
    encoded = processes.on_all_cores(one, rows, CHUNK) if limit is None else map(one, rows)
    return list(islice(ledger.counted(encoded), limit))


def domain_files(directory: Path | str, split: str) -> list[Path]:
    """Files of a split, `DOMAIN.SPLIT.jsonl` and the original's `SPLIT.jsonl`, but those of problems, probes and
    preferences. MissingFile."""
    paths = sorted(path for name in (f"*.{split}.jsonl", f"{split}.jsonl") for path in Path(directory).glob(name))
    paths = [path for path in paths if not path.name.startswith("preferences.")]
    files = [path for path in paths if not {"gold", "asked", "gt_name"} & next(read_jsonl(path))[1].keys()]
    if not files:
        make = f"make them with codechat data sft (and calls) --out {directory}"
        raise MissingFile(f"{directory} holds no conversations of split {split!r} (DOMAIN.{split}.jsonl); {make}")
    return files


def load_domains(
    directory: Path | str,
    split: str,
    tokenizer: Tokenizer,
    tags: str,
    block_size: int,
    limit: int | None = None,
    wanted: Mapping[str, float] | None = None,
) -> dict[str, list[Example]]:
    """Encoded conversations of a split by domain, at most `limit` of each file. wanted: weights by domain; those
    without one are not encoded. DataError where too many rows cannot be used, and for a domain that no file has."""
    domains, seen = dict[str, list[Example]](), set[str]()
    for path in domain_files(directory, split):
        rows, ledger = list(read(path)), Ledger(path.name, limits=LIMITS)
        seen.update(row["domain"] for row in rows)
        used = [row for row in rows if wanted is None or wanted.get(row["domain"], 0) > 0]
        for example in encode_all(used, tokenizer, tags, block_size, ledger, limit):
            domains.setdefault(example.domain, []).append(example)
        if used:
            ledger.check("raise the block size (--seq-len, --model.block-size), or repair the rows")
        if ledger.lost:
            losses = ", ".join(f"{reason} {n}" for reason, n in sorted(ledger.lost.items()))
            print(f"{path.name}: {ledger.kept} conversations, dropped {losses} (block {block_size})", file=sys.stderr)
    _check_known(wanted or (), seen)
    return domains


def _check_known(weights: Iterable[str], names: Iterable[str]) -> None:
    if unknown := sorted(set(weights) - set(names)):
        raise DataError(f"weights for {unknown}; the data hold {sorted(names)}; change --mix or prepare these domains")


Waiting = list[tuple[int, int, int, int]]  # conversations before they have a row: (length, number, domain, index)


def _take_row(waiting: Waiting, T: int) -> list[tuple[int, int]]:
    """Take (domain, index) of conversations of at most T tokens: the oldest, so that none waits for ever, then always the largest that still fits."""
    row, fitting = [], waiting[:1]
    while fitting:
        waiting.remove(taken := max(fitting))
        row.append(taken[2:])
        T -= taken[0]
        fitting = [one for one in waiting if one[0] <= T]
    return row


def _pack_rows(rows: Sequence[Sequence[tuple[int, Example]]], T: int) -> Batch:
    """Rows of (domain index, conversation) as a Batch of (len(rows), T)."""
    import torch

    fill = (0, IGNORE, -1, 0, -1)
    ids, targets, docs, positions, domains = (np.full((len(rows), T), value, dtype=np.int64) for value in fill)
    for b, row in enumerate(rows):
        start = 0
        for number, (domain, example) in enumerate(row):
            span = slice(start, start + len(example))
            ids[b, span] = example.ids[:-1]
            targets[b, span] = np.where(example.loss_mask[1:], example.ids[1:], IGNORE)
            docs[b, span] = number
            positions[b, span] = np.arange(len(example))
            domains[b, span] = domain
            start = span.stop
    return Batch(*map(torch.from_numpy, (ids, targets, docs, positions, domains)))


def hash_examples(examples: Iterable[Example]) -> str:
    """What these conversations are as ids and loss mask."""
    return hash_rows(example.ids.tobytes() + example.loss_mask.tobytes() for example in examples)


def packed_mask(docs: torch.Tensor) -> Any:
    """What the tokens of packed rows see, for `attention.attend`."""
    from codechat.models import attention

    return attention.Documents(docs) if attention.dense(docs.device) else attention.flex_mask(docs)


def held_out(examples: Sequence[Example], batch: int, T: int) -> list[Batch]:
    """Batches with each conversation once. The last may be smaller; T grows to the longest conversation."""
    T = max([T, *map(len, examples)])
    waiting: Waiting = [(len(example), i, 0, i) for i, example in enumerate(examples)]
    rows = list(iter(lambda: [(0, examples[index]) for _, index in _take_row(waiting, T)], []))
    return [_pack_rows(rows[i : i + batch], T) for i in range(0, len(rows), batch)]


@lru_cache(maxsize=64)
def _order(seed: int, domain: str, epoch: int, n: int) -> np.ndarray:
    """(n,) the order of a domain's conversations in an epoch."""
    return np.random.default_rng([seed, zlib.crc32(domain.encode()), epoch]).permutation(n)


class PackedLoader:
    """Endless packed batches. weights: domain -> share of the supervised tokens (any positive scale); None keeps the
    shares of the data. No conversation may be longer than T. DataError for an unknown domain."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[Example]],
        weights: Mapping[str, float] | None,
        batch: int,
        T: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if weights is None:
            weights = {name: sum(e.supervised for e in rows) for name, rows in examples.items()}
        self.domains = sorted(name for name, weight in weights.items() if weight > 0)
        _check_known(self.domains, examples)
        if not self.domains:
            raise DataError("no domain has a positive weight; required is at least one; change --mix")
        self.weights = [weights[name] / sum(weights.values()) for name in self.domains]
        self.examples = [examples[name] for name in self.domains]
        self.hashes = {name: hash_examples(rows) for name, rows in zip(self.domains, self.examples)}
        self.batch, self.T, self.seed, self.rank, self.world = batch, T, seed, rank, world
        self.drawn = [0] * len(self.domains)
        self.supervised = [0] * len(self.domains)
        self.waiting: Waiting = []  # oldest first

    def next(self) -> Batch:
        rows = [self._row() for _ in range(self.batch * self.world)][self.rank * self.batch :][: self.batch]
        return _pack_rows([[(d, self.examples[d][i]) for d, i in row] for row in rows], self.T)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each domain so far."""
        sizes = map(len, self.examples)
        return {name: n / size for name, n, size in zip(self.domains, self.drawn, sizes, strict=True)}

    def _row(self) -> list[tuple[int, int]]:
        while len(self.waiting) < BUFFER:
            domain = min(range(len(self.domains)), key=lambda d: self.supervised[d] / self.weights[d])
            epoch, place = divmod(self.drawn[domain], len(self.examples[domain]))
            index = int(_order(self.seed, self.domains[domain], epoch, len(self.examples[domain]))[place])
            example = self.examples[domain][index]
            self.drawn[domain] += 1
            self.supervised[domain] += example.supervised
            self.waiting.append((len(example), sum(self.drawn), domain, index))
        return _take_row(self.waiting, self.T)

    def state(self) -> dict[str, Any]:
        """Plain json; `load_state` continues bitwise, with any number of ranks."""
        return {
            "seed": self.seed,
            "sizes": dict(zip(self.domains, map(len, self.examples), strict=True)),
            "hashes": dict(self.hashes),
            "drawn": list(self.drawn),
            "supervised": list(self.supervised),
            "waiting": [[self.domains[d], i] for *_, d, i in self.waiting],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """DataError when the seed or the conversations are not those of the saved state."""
        saved, mine = ({key: at[key] for key in ("seed", "sizes", "hashes")} for at in (state, self.state()))
        if saved != mine:
            raise DataError(f"saved with {saved}, this run has {mine}; resume with the same data, --mix and --seed")
        self.drawn, self.supervised = list(state["drawn"]), list(state["supervised"])
        waiting = [(self.domains.index(name), index) for name, index in state["waiting"]]
        self.waiting = [(len(self.examples[d][i]), number, d, i) for number, (d, i) in enumerate(waiting)]


class Prefetched:
    """A loader (next, state, load_state) whose batches a thread prepares, `ahead` of them, in pinned memory while a step
    runs. beside: whether to have the thread; None = on a GPU. `state()` is that of the batches handed out."""

    def __init__(self, loader: Any, device: torch.device, ahead: int = 1, beside: bool | None = None) -> None:
        self.loader, self.pins, self.ahead = loader, device.type == "cuda", ahead
        self.load_state, self.state = loader.load_state, loader.state  # the former before the first batch
        self._waiting: deque[Future[tuple[Any, Any]]] = deque()
        self._thread = ThreadPoolExecutor(1, "batches") if (self.pins if beside is None else beside) else None

    def next(self) -> Any:
        if self._thread is None:
            return self.loader.next()
        while len(self._waiting) <= self.ahead:
            self._waiting.append(self._thread.submit(self._prepare))
        batch, state = self._waiting.popleft().result()
        self.state = lambda: state
        return batch

    def _prepare(self) -> tuple[Any, Any]:
        batch = self.loader.next()
        if self.pins:
            batch = getattr(batch, "_make", tuple)(part.pin_memory() for part in batch)
        return batch, self.loader.state()


def token_weights(examples: Mapping[str, Sequence[Example]], rows: Mapping[str, float]) -> dict[str, float]:
    """The loader's weights that give the mix of `rows`: domain -> share of the conversations."""
    _check_known([name for name, share in rows.items() if share > 0], examples)
    means = {name: sum(e.supervised for e in found) / max(1, len(found)) for name, found in examples.items()}
    return {name: share * means.get(name, 0.0) for name, share in rows.items()}
