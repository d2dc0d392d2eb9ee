"""Corpora, flat shards of token ids, and the loaders that read them. `corpus_writer` makes them.

A corpus is a directory: `train_000000.bin`, `val_000000.bin`, ... (uint16, little-endian,
documents joined by the end-of-text id), `token_bytes.npy` (bytes of text behind each id, for
bits per byte) and `manifest.json`.

`WindowLoader` draws the k-th window of a run as a function of (seed, k). Ranks and accumulation
steps take turns in one
sequence of windows: one rank with 8 microbatches sees what 8 ranks see.

The original project's directories (`*.bin` without a manifest) are read too; their last shard
is held out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codechat.core.atomic_files import file_record, read_json
from codechat.core.errors import DataError, MissingFile
from codechat.data.sources import IGNORE, MANIFEST, digest
from codechat.text import tokenizer as tokenizers

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = "token_bytes.npy"
AGAIN = "prepare the corpus again with codechat data corpus"


def token_lengths(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """(n_vocab,) int64: bytes of text behind each id; 0 for the end-of-text id."""
    lengths = np.array(
        [len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)], dtype=np.int64
    )
    lengths[tokenizer.eot_id] = 0  # it is predicted, but bits per byte divide by the text
    return lengths


def read_manifest(directory: Path | str) -> dict[str, Any]:
    """The manifest of a corpus; a directory of bare `*.bin` shards gets one with a `note`.
    MissingFile, DataError."""
    path = Path(directory) / MANIFEST
    if not path.exists():
        return _foreign_manifest(Path(directory))
    manifest = read_json(path)
    if not {"files", "tokenizer", "train_tokens"} <= manifest.keys():
        raise DataError(
            f"{path} is not the manifest of a corpus; codechat data corpus --out DIR makes one"
        )
    return manifest


def _foreign_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of the original project's shards: GPT-2 ids, the last shard held out."""
    paths = sorted(directory.glob("*.bin"))
    if not paths:
        make = f"make a corpus with codechat data corpus --out {directory}"
        raise MissingFile(f"{directory} holds neither {MANIFEST} nor *.bin shards; {make}")
    files = [_foreign_shard(path, "train") for path in paths[:-1]]
    files.append(_foreign_shard(paths[-1], "val"))
    last = f"{paths[-1].name} is held out for validation"
    return dict(
        tokenizer="gpt2",
        n_vocab=50257,
        eot_id=50256,
        train_tokens=sum(file["tokens"] for file in files[:-1]),
        val_tokens=files[-1]["tokens"],
        files=files,
        note=f"{directory} has no {MANIFEST}: read as GPT-2 ids in uint16; {last}",
    )


def _foreign_shard(path: Path, split: str) -> dict[str, Any]:
    size = path.stat().st_size
    return dict(name=path.name, bytes=size, tokens=size // 2, split=split)


def open_corpus(directory: Path | str, split: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The manifest, and a memory-mapped array of ids for each shard of a split. DataError for a
    damaged shard."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    shards: list[np.ndarray] = []
    for file in manifest["files"]:
        if file["split"] != split:
            continue
        path = directory / file["name"]
        # A kill or a full disk may leave a short shard, which would be read as a shorter text.
        size = path.stat().st_size if path.exists() else "no"
        if size != file["bytes"]:
            raise DataError(f"{path} has {size} bytes; {MANIFEST} says {file['bytes']}; {AGAIN}")
        # mapped: a corpus is larger than memory, and ranks of a host share its pages
        shards.append(np.memmap(path, dtype="<u2", mode="r"))
    if not shards:
        raise DataError(f"corpus {directory} has no split {split!r}")
    return manifest, shards


def hash_shards(directory: Path | str, manifest: dict[str, Any]) -> str:
    """The hash of the shards as they are now; a manifest has that of the shards as they were
    written. Takes about a second per 1.5 GB."""
    records = [file_record(Path(directory) / file["name"]) for file in manifest["files"]]
    return digest("".join(record["sha256"] for record in records))


class WindowLoader:
    """Endless windows of T ids of the training split, each within one shard, every start equally
    likely: `next()` -> ids and targets (B, T) int64. DataError when it holds no window of T + 1
    ids."""

    def __init__(
        self,
        directory: Path | str,
        batch: int,
        T: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        manifest, self.shards = open_corpus(directory, "train")
        if rank == 0 and "note" in manifest:
            print(manifest["note"], file=sys.stderr)
        # Windows do not cross shards, so a shard of n tokens has n - T starts.
        starts = np.array([max(0, len(shard) - T) for shard in self.shards], dtype=np.int64)
        if not starts.any():
            raise DataError(
                f"corpus {directory} holds {sum(map(len, self.shards))} train tokens; "
                f"a block of {T} needs {T + 1} in one shard; prepare more text or lower block_size"
            )
        self.ends = np.cumsum(starts)  # window numbers below ends[i] start in shard i or before
        self.batch = batch
        self.T = T
        self.seed = seed
        self.rank = rank
        self.world = world
        self.windows = 0  # of all ranks, so far
        self.hash = manifest.get("hash")

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        # A window depends only on its number, so any number of ranks sees the same sequence.
        first = self.windows + self.rank * self.batch
        counters = np.arange(first, first + self.batch, dtype=np.uint64)
        # of 64 bits: the remainder's bias is the number of starts / 2^64
        draws = (_mix(self.seed, counters) % np.uint64(self.ends[-1])).astype(np.int64)  # (B,)
        self.windows += self.batch * self.world
        shards = np.searchsorted(self.ends, draws, side="right")
        starts = draws - np.append(0, self.ends)[shards]
        rows = [self.shards[shard][at : at + self.T + 1] for shard, at in zip(shards, starts)]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def state(self) -> dict[str, Any]:
        return dict(windows=self.windows, seed=self.seed, corpus=self.hash)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken, with any number of ranks. DataError for another
        seed or corpus."""
        if state["corpus"] != self.hash or state["seed"] != self.seed:
            raise DataError(
                f"the run has learned from corpus {state['corpus']} with --seed {state['seed']}; "
                f"here are {self.hash} and seed {self.seed}; resume with the former ones"
            )
        self.windows = state["windows"]


def _mix(seed: int, counters: np.ndarray) -> np.ndarray:
    """(n,) uint64 from (n,) counters: splitmix64 (Steele et al. 2014), a bijection of the
    counter for each seed."""
    with np.errstate(over="ignore"):
        z = counters + np.uint64(seed % 2**32) * np.uint64(0x100000001) + np.uint64(1)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def val_windows(
    directory: Path | str,
    T: int,
    limit: int | None = None,
    *,
    batch: int = 1,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(ids (B, T), targets (B, T), bytes of text behind the targets). Each token of the split
    but the first is a target once. limit: windows of all ranks together; ranks take batches in
    turn. The last row is padded with target -100."""
    import torch

    manifest, shards = open_corpus(directory, "val")
    # unlike training windows these cross shards, so that each token counts once
    stream = np.concatenate(shards)
    table = Path(directory) / TOKEN_BYTES
    lengths = (
        np.load(table) if table.exists() else token_lengths(tokenizers.load(manifest["tokenizer"]))
    )
    count = -(-(len(stream) - 1) // T)
    if limit is not None:
        count = min(count, limit)
    for first in range(rank * batch, count, batch * world):
        rows = min(batch, count - first)
        part = stream[first * T : (first + rows) * T + 1].astype(np.int64)
        n = len(part) - 1
        ids = np.full(rows * T, manifest["eot_id"], dtype=np.int64)
        targets = np.full(rows * T, IGNORE, dtype=np.int64)
        ids[:n] = part[:-1]
        targets[:n] = part[1:]
        n_bytes = int(lengths[part[1:]].sum(dtype=np.int64))
        yield (
            torch.from_numpy(ids.reshape(rows, T)),
            torch.from_numpy(targets.reshape(rows, T)),
            n_bytes,
        )
