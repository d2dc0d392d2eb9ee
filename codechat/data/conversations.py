"""Conversations: reading, encoding, packing, mixing.

Rows are `{"id", "messages", "domain", "meta"}` in `DOMAIN.SPLIT.jsonl`, or the original
project's: `{input_ids, labels}` (labels aligned with the ids) and `{source, conversations}`.
`PackedLoader` puts several conversations into a row of T tokens; they cannot attend to each
other (`packed_mask`), positions restart, and no target crosses from one to the next.

Domains are mixed by supervised tokens: the next conversation comes from the domain furthest
behind its share. All ranks take turns in one sequence of rows, so world size and accumulation
do not change what is learned."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from codechat.core import processes
from codechat.core.atomic_files import read_json
from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats
from codechat.data.sources import (
    IGNORE,
    MANIFEST,
    PACKED_ENDINGS,
    ROW_ENDINGS,
    Ledger,
    Row,
    hash_rows,
    read_jsonl,
)
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # `codechat data KIND --help` needs no torch
    import torch

BUFFER = 256  # conversations that wait for a row
CHUNK = 64  # rows that a process encodes at a time
# The block size is a choice and its cost is printed, so more conversations may exceed it than
# may be lost otherwise.
LIMITS = {"too_long": 0.2}
# Names of domains in the original project's conversations.
DOMAINS = {"funcall": "calls", "negative": "code"}


@dataclass(frozen=True, eq=False)
class Example:
    """An encoded conversation. ids (n,) int32; loss_mask (n,) bool, True if the token carries
    loss."""

    ids: np.ndarray
    loss_mask: np.ndarray
    domain: str

    def __len__(self) -> int:
        """Tokens that it takes in a row: the last id is a target only."""
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
        """Indices of the targets into (B T) on the device, from a batch on the host; None for a
        CPU."""
        from codechat.distributed import hardware
        from codechat.models.fast.device import on_cpu

        found = (self.targets != IGNORE).flatten()
        # Counted on the host: a GPU would have to wait for the number of targets.
        return None if on_cpu(device) else hardware.send(found.nonzero()[:, 0], device)

    @property
    def supervised(self) -> int:
        return int((self.targets != IGNORE).sum())


def read(path: Path | str) -> Iterator[Row]:
    """Rows of a jsonl file. MissingFile; DataError, with file and line, for what cannot be read."""
    for number, row in read_jsonl(Path(path)):
        yield check_row(row, Path(path).name.partition(".")[0], f"{path}:{number}")


def check_row(row: Row, default: str, where: str) -> Row:
    """The row with `messages` and `domain` (`default` if it names none). DataError, beginning
    with `where`."""
    named = row.get("domain") or ""
    source = row.get("source") or ""
    if not isinstance(named, str) or not isinstance(source, str):
        raise DataError(f"{where}: domain is {named!r} and source {source!r}; expected text")
    row = row | {"domain": named or DOMAINS.get(source, source) or default}
    if {"input_ids", "labels"} <= row.keys():
        _check_ids(row["input_ids"], row["labels"], where)
        return row
    if chat_formats.is_disliked(row):
        label = row.get("label", row.get("kto_tag"))
        raise DataError(
            f"{where} is an answer with the label {label}, which SFT would imitate; "
            "`codechat preference` reads it from preferences.SPLIT.jsonl"
        )
    messages = chat_formats.messages_of(row, where)
    if isinstance(messages, str):
        raise DataError(f"{where} cannot be read ({messages}); correct or delete the row")
    return row | {"messages": messages}


def _check_ids(ids: Any, labels: Any, where: str) -> None:
    lists = isinstance(ids, list) and isinstance(labels, list) and len(ids) == len(labels)
    if not lists or any(
        type(i) is not int or label not in (IGNORE, i) for i, label in zip(ids, labels)
    ):
        raise DataError(
            f"{where}: labels must be the whole numbers of "
            f"input_ids, or {IGNORE}; make the file again"
        )


def encode(row: Row, tokenizer: Tokenizer, tags: str, block_size: int) -> Example | str:
    """The row as ids and loss mask, or the reason why it cannot be used. DataError for unknown
    ids."""
    if "input_ids" in row:
        ids = row["input_ids"]
        mask = [label != IGNORE for label in row["labels"]]
        _check_known_ids(ids, tokenizer)
    elif not any(m["role"] == "assistant" and m["content"].strip() for m in row["messages"]):
        return "no_assistant"
    else:
        try:
            ids, mask, _ = chat.render(row["messages"], tokenizer, tags=tags)
        except DataError:  # `read` has checked everything else that `render` rejects
            return "tag_in_content"
    # left out, not cut: half an answer would teach to stop in the middle
    if len(ids) > block_size:
        return "too_long"
    example = Example(
        ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask, dtype=bool),
        domain=row["domain"],
    )
    return example if example.supervised else "no_assistant"


def _check_known_ids(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    limit = tokenizer.n_vocab + chat.N_TAGS
    if ids and not 0 <= min(ids) <= max(ids) < limit:
        raise DataError(
            f"row holds id {max(ids)}; tokenizer {tokenizer.spec} and the tags have {limit}; "
            "use the tokenizer that wrote the file"
        )


def encode_all(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    tags: str,
    block_size: int,
    ledger: Ledger,
    limit: int | None = None,
) -> list[Example]:
    """The first `limit` usable rows; `ledger` counts them and the unusable ones before them.
    Without a limit, one process per core encodes many rows."""
    one = partial(encode, tokenizer=tokenizer, tags=tags, block_size=block_size)
    encoded = processes.on_all_cores(one, rows, CHUNK) if limit is None else map(one, rows)
    return list(islice(ledger.counted(encoded), limit))


def domain_files(directory: Path | str, split: str) -> list[Path]:
    """Files of a split, `DOMAIN.SPLIT.jsonl` and the original's `SPLIT.jsonl`, but those of
    problems, probes and preferences. MissingFile."""
    directory = Path(directory)
    if directory.is_file():
        raise DataError(
            f"{directory} is a file; expected a directory that a command has prepared: "
            f"codechat data calls --source {directory} --out data/mine"
        )
    _reject_unfinished(directory)
    paths = [*directory.glob(f"*.{split}.jsonl"), *directory.glob(f"{split}.jsonl")]
    files = [path for path in sorted(paths) if _holds_conversations(path)]
    _name_unread(directory, split)
    if not files:
        make = f"make them with codechat data sft (and calls) --out {directory}"
        raise MissingFile(
            f"{directory} holds no conversations of split {split!r} (DOMAIN.{split}.jsonl); {make}"
        )
    return files


def _manifest_of(directory: Path | str) -> Row:
    path = Path(directory) / MANIFEST
    return read_json(path) if path.exists() else {}


def _reject_unfinished(directory: Path) -> None:
    """DataError for a directory in which a command has replaced only some of its files."""
    unfinished = _manifest_of(directory).get("unfinished")
    if unfinished:
        raise DataError(
            f"{directory} holds files of two sources: codechat {unfinished[0]} was cut "
            "short; run it again"
        )


def _name_unread(directory: Path, split: str) -> None:
    """Print to stderr the files of a split in other formats, or compressed."""
    endings = {*ROW_ENDINGS, *PACKED_ENDINGS} - {".jsonl"}
    found = [*directory.glob(f"*.{split}.*"), *directory.glob(f"{split}.*")]
    names = sorted(path.name for path in found if path.suffix in endings)
    if names:
        print(f"{directory}: not read: {', '.join(names)}", file=sys.stderr)


def _holds_conversations(path: Path) -> bool:
    if path.name.startswith("preferences."):
        return False
    _, first = next(read_jsonl(path))
    return first.keys().isdisjoint({"gold", "asked", "gt_name"})  # columns of problems and probes


def tools_style(directory: Path | str) -> str:
    """How the system prompts of a prepared directory list tools; compact unless its manifest
    says otherwise."""
    files = _manifest_of(directory).get("files", {})
    return max((file.get("tools_style", "") for file in files.values()), default="") or "compact"


def load_domains(
    directory: Path | str,
    split: str,
    tokenizer: Tokenizer,
    tags: str,
    block_size: int,
    limit: int | None = None,
    wanted: Mapping[str, float] | None = None,
) -> dict[str, list[Example]]:
    """Encoded conversations of a split by domain, at most `limit` of each file. wanted: weights
    by domain; domains without a positive weight are not encoded. DataError if too many rows
    cannot be used, or if a domain of `wanted` is in no file."""
    domains: dict[str, list[Example]] = {}
    seen: set[str] = set()
    for path in domain_files(directory, split):
        rows = list(read(path))
        ledger = Ledger(path.name, limits=LIMITS)
        seen.update(row["domain"] for row in rows)
        # tokenising is the slow part: not for domains that are not drawn from
        used = rows if wanted is None else [row for row in rows if wanted.get(row["domain"], 0) > 0]
        for example in encode_all(used, tokenizer, tags, block_size, ledger, limit):
            domains.setdefault(example.domain, []).append(example)
        if used:
            ledger.check("raise the block size (--seq-len, --model.block-size), or repair the rows")
        if ledger.lost:
            lost = ", ".join(f"{reason} {n}" for reason, n in sorted(ledger.lost.items()))
            kept = f"{path.name}: {ledger.kept} conversations"
            print(f"{kept}, dropped {lost} (block {block_size})", file=sys.stderr)
    _check_known(wanted or (), seen)
    return domains


def _check_known(weights: Iterable[str], names: Iterable[str]) -> None:
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise DataError(
            f"weights for {unknown}; the data hold {sorted(names)}; "
            "change --mix or prepare these domains"
        )


class Waiting(NamedTuple):
    """A drawn conversation that waits for a row. Sorted by length, then by number."""

    length: int
    number: int  # counts the conversations as they are drawn
    domain: int
    example: int  # its index among the domain's conversations


def _take_row(waiting: list[Waiting], T: int) -> list[Waiting]:
    """Take conversations of at most T tokens in all from `waiting`: first the oldest, so that
    none waits for ever, then always the largest that still fits."""
    row = []
    fitting = waiting[:1]
    while fitting:
        taken = max(fitting)
        waiting.remove(taken)
        row.append(taken)
        T -= taken.length
        fitting = [one for one in waiting if one.length <= T]
    return row


def _pack_rows(
    rows: Sequence[Sequence[Waiting]], examples: Sequence[Sequence[Example]], T: int
) -> Batch:
    """Rows as a Batch of (len(rows), T). examples: the conversations of each domain."""
    import torch

    shape = (len(rows), T)
    ids = np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, IGNORE, dtype=np.int64)
    docs = np.full(shape, -1, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    domains = np.full(shape, -1, dtype=np.int64)
    for b, row in enumerate(rows):
        start = 0
        for number, taken in enumerate(row):
            # n ids are n - 1 inputs: the last id is a target only
            example = examples[taken.domain][taken.example]
            span = slice(start, start + len(example))
            ids[b, span] = example.ids[:-1]
            # the target of a token is the next id, never that of another conversation
            targets[b, span] = np.where(example.loss_mask[1:], example.ids[1:], IGNORE)
            docs[b, span] = number
            positions[b, span] = np.arange(len(example))
            domains[b, span] = taken.domain
            start = span.stop
    return Batch(*map(torch.from_numpy, (ids, targets, docs, positions, domains)))


def hash_examples(examples: Iterable[Example]) -> str:
    """The content of these conversations: ids and loss masks, in order."""
    return hash_rows(example.ids.tobytes() + example.loss_mask.tobytes() for example in examples)


def packed_mask(docs: torch.Tensor) -> Any:
    """The mask of packed rows for `attention.attend`: a token sees the earlier ones of its
    conversation."""
    from codechat.models.fast import attention

    return attention.packed_mask(docs)


def held_out(examples: Sequence[Example], batch: int, T: int) -> list[Batch]:
    """Batches with each conversation once. The last may be smaller; T grows to the longest
    conversation."""
    T = max([T, *map(len, examples)])  # an evaluation leaves no conversation out
    waiting = [Waiting(len(example), i, domain=0, example=i) for i, example in enumerate(examples)]
    rows = []
    while waiting:
        rows.append(_take_row(waiting, T))
    return [_pack_rows(rows[i : i + batch], [examples], T) for i in range(0, len(rows), batch)]


@lru_cache(maxsize=64)  # every draw asks for the order of its epoch
def _order(seed: int, domain: str, epoch: int, n: int) -> np.ndarray:
    """(n,) the order of a domain's conversations in an epoch."""
    # crc32, since hash() of a string differs between processes
    return np.random.default_rng([seed, zlib.crc32(domain.encode()), epoch]).permutation(n)


class PackedLoader:
    """Endless packed batches. weights: domain -> share of the supervised tokens, on any positive
    scale; None = the shares of the data. No conversation may be longer than T. DataError for an
    unknown domain."""

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
            raise DataError("no domain has a positive weight; expected at least one; change --mix")
        self.weights = [weights[name] / sum(weights.values()) for name in self.domains]
        self.examples = [examples[name] for name in self.domains]
        self.hashes = {name: hash_examples(rows) for name, rows in zip(self.domains, self.examples)}
        self.batch = batch
        self.T = T
        self.seed = seed
        self.rank = rank
        self.world = world
        self.drawn = [0] * len(self.domains)
        self.supervised = [0] * len(self.domains)  # tokens drawn so far, by domain
        self.waiting: list[Waiting] = []  # oldest first

    def next(self) -> Batch:
        # Every rank draws the rows of all ranks, so the state is the same on each, and for any
        # number of them.
        rows = [self._row() for _ in range(self.batch * self.world)]
        first = self.rank * self.batch
        return _pack_rows(rows[first : first + self.batch], self.examples, self.T)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each domain so far."""
        sizes = map(len, self.examples)
        return {
            name: n / size for name, n, size in zip(self.domains, self.drawn, sizes, strict=True)
        }

    def _row(self) -> list[Waiting]:
        # From a buffer of waiting conversations rows are filled almost completely.
        while len(self.waiting) < BUFFER:
            # furthest behind its share; of equal ones the first, so that every rank draws the
            # same
            domain = min(
                range(len(self.domains)), key=lambda d: self.supervised[d] / self.weights[d]
            )
            examples = self.examples[domain]
            epoch, place = divmod(self.drawn[domain], len(examples))
            index = int(_order(self.seed, self.domains[domain], epoch, len(examples))[place])
            self.drawn[domain] += 1
            self.supervised[domain] += examples[index].supervised
            self.waiting.append(Waiting(len(examples[index]), sum(self.drawn), domain, index))
        return _take_row(self.waiting, self.T)

    def state(self) -> dict[str, Any]:
        """Plain json; `load_state` continues bitwise, with any number of ranks."""
        return dict(
            seed=self.seed,
            sizes=dict(zip(self.domains, map(len, self.examples), strict=True)),
            hashes=dict(self.hashes),
            drawn=list(self.drawn),
            supervised=list(self.supervised),
            # by name, since the numbers of domains depend on the mix
            waiting=[[self.domains[one.domain], one.example] for one in self.waiting],
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. DataError if its seed or its conversations are not those of this
        loader."""
        current = self.state()
        saved = {key: state[key] for key in ("seed", "sizes", "hashes")}
        mine = {key: current[key] for key in saved}
        if saved != mine:
            raise DataError(
                f"saved with {saved}, this run has {mine}; resume "
                "with the same data, --mix and --seed"
            )
        self.drawn = list(state["drawn"])
        self.supervised = list(state["supervised"])
        self.waiting = []
        for number, (name, index) in enumerate(state["waiting"]):
            domain = self.domains.index(name)
            self.waiting.append(Waiting(len(self.examples[domain][index]), number, domain, index))


def token_weights(
    examples: Mapping[str, Sequence[Example]], rows: Mapping[str, float]
) -> dict[str, float]:
    """Weights for the loader, in supervised tokens. rows: domain -> share of the conversations."""
    _check_known([name for name, share in rows.items() if share > 0], examples)
    return {name: share * _mean_supervised(examples.get(name, ())) for name, share in rows.items()}


def _mean_supervised(examples: Sequence[Example]) -> float:
    """Supervised tokens of a conversation; 0 without any."""
    return sum(example.supervised for example in examples) / max(1, len(examples))
