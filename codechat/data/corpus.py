"""Source text -> flat shards of token ids, and the loaders that read them.

A corpus is a directory: `train_000000.bin`, `val_000000.bin`, ... (uint16, little-endian, documents joined by the
end-of-text id), `token_bytes.npy` (bytes of text behind each id, for bits per byte) and `manifest.json`. The hash of a
document decides whether it is a duplicate and whether it is held out.

`WindowLoader` draws the k-th window of a run as a function of (seed, k). Ranks and accumulation steps take turns in one
sequence of windows: one rank with 8 microbatches sees what 8 ranks see.

The original project's directories (`*.bin` without a manifest) are read too; their last shard is the validation part."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from codechat.core import config
from codechat.core.atomic_files import file_record, write_atomic
from codechat.core.config import opt
from codechat.core.errors import DataError, MissingFile
from codechat.data import public_rows, sources
from codechat.data.conversations import IGNORE
from codechat.data.prepared import MANIFEST, print_ledgers, require_kind, written_by_one
from codechat.data.sources import Document, Ledger, digest, fraction
from codechat.text import tokenizer as tokenizers

if TYPE_CHECKING:  # `codechat data KIND --help` needs no torch
    import torch

TOKEN_BYTES = "token_bytes.npy"
VAL_SHARE = 0.02
# Enough documents that a 2 % hash split of them is not empty by chance (0.98 ** 512 is 3e-5).
FEW_DOCUMENTS = 512
CHUNK_CHARS = 1 << 20
AGAIN = "prepare the corpus again with codechat data corpus"
CORPUS_HUB = "codeparrot/github-code-clean"


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(config.Settings):
    """Source text -> shards of token ids."""

    source: str = opt(
        "embedded", "embedded, hub, or a path: parquet, jsonl, .py, .txt, a directory of them", reads="path"
    )
    out: str = opt("data/corpus", "directory to write")
    tokenizer: str = opt("gpt2", "gpt2, gpt2:N, python:N, chars:FILE or bytes")
    max_examples: int | None = opt(None, "documents to read; none = all", least=0)
    max_tokens: int | None = opt(None, "stop after this many tokens; none = no limit", least=1)
    val_share: float = opt(VAL_SHARE, "share of the documents held out for validation, by hash", least=0, most=0.99)
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source lost for one reason", least=0, most=1)


def prepare_corpus(cfg: CorpusConfig) -> dict[str, Any]:
    """Write the corpus; returns its manifest. Raises UserError."""
    out, path = Path(cfg.out), Path(cfg.source)
    require_kind(out, "corpus", cfg)
    ledger = Ledger(path.name, cfg.max_lost)
    if cfg.source == "embedded":
        documents = sources.embedded_python(ledger)
    elif cfg.source == "hub":
        rows = sources.hub_rows(CORPUS_HUB, files="data/train-*.parquet", columns=["code", "path", "language"])
        documents = public_rows.row_documents(rows, CORPUS_HUB, ledger)
    else:
        documents = public_rows.path_documents(path, ledger)
    texts, tok = islice(documents, cfg.max_examples), tokenizers.load(cfg.tokenizer)
    try:
        return write_corpus(texts, out, tok, ledger=ledger, max_tokens=cfg.max_tokens, val_share=cfg.val_share)
    finally:
        print_ledgers([ledger])


def write_corpus(
    documents: Iterable[Document | str],
    out_dir: Path | str,
    tokenizer: tokenizers.Tokenizer,
    *,
    ledger: Ledger | None = None,
    max_tokens: int | None = None,
    val_share: float = VAL_SHARE,
    shard_tokens: int = 1 << 24,
) -> dict[str, Any]:
    """Tokenise the documents into `out_dir` and return the manifest. An earlier corpus is replaced when this is complete.

    max_tokens: stop after the document that reaches them. DataError: ids beyond uint16, no text, too large a loss. RunError where another
    process writes into `out_dir`."""
    if tokenizer.n_vocab > 1 << 16:
        raise DataError(f"tokenizer {tokenizer.spec} has {tokenizer.n_vocab} ids; shards are uint16; choose another")
    out, ledger = Path(out_dir), ledger or Ledger("text")
    with written_by_one(out, wait=False):
        return _write_shards(documents, out, tokenizer, ledger, max_tokens, val_share, shard_tokens)


def _write_shards(
    documents: Iterable[Document | str],
    out: Path,
    tokenizer: tokenizers.Tokenizer,
    ledger: Ledger,
    max_tokens: int | None,
    val_share: float,
    shard_tokens: int,
) -> dict[str, Any]:
    """What `write_corpus` does while no other process writes into the directory."""
    require_kind(out, "corpus")
    fresh = out / ".new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shards: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    totals: dict[str, Counter[str]] = {split: Counter() for split in shards}
    origins: dict[str, Counter[str]] = defaultdict(Counter)
    full, parts = False, _encoded(_assign(_unique(documents, ledger), val_share), tokenizer)
    try:
        for document, split, ids in tqdm(parts, "corpus", unit=" documents", disable=None):
            if full and split == "train":
                continue  # a small limit may come before the first held-out document, and there must be one
            size = len(document.text.encode("utf-8", "replace"))
            for counts in (totals[split], origins[document.source]):
                counts.update(documents=1, bytes=size, tokens=len(ids))
            _append(ids, fresh, split, shards[split], shard_tokens)
            ledger.kept += 1
            full = max_tokens is not None and sum(n["tokens"] for n in totals.values()) >= max_tokens
            if full and (shards["val"] or not val_share):
                break
        ledger.check()
        files = [file | file_record(fresh / file["name"]) for split in shards.values() for file in split]
        manifest: dict[str, Any] = dict(
            hash=digest("".join(file["sha256"] for file in files)), tokenizer=tokenizer.spec
        )
        manifest |= dict(tokenizer_state=tokenizer.to_dict(), n_vocab=tokenizer.n_vocab, eot_id=tokenizer.eot_id)
        manifest |= {f"{s}_{n}": totals[s][n] for n in ("documents", "tokens", "bytes") for s in shards}
        lost, skipped = (dict(sorted(counts.items())) for counts in (ledger.lost, ledger.skipped))
        found = {name: dict(counts) for name, counts in sorted(origins.items())}
        manifest |= dict(kept=ledger.kept, dropped=lost, skipped=skipped, sources=found, files=files)
        np.save(fresh / TOKEN_BYTES, _lengths(tokenizer).astype(np.uint16))
        # The manifest goes first: a kill between the renames leaves sizes or files that do not match, so reading raises.
        old = {path.name for path in out.glob("*_??????.bin")} if (out / MANIFEST).exists() else set()
        write_atomic(out / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        for path in fresh.iterdir():
            os.replace(path, out / path.name)
        for name in old - {file["name"] for file in files}:
            (out / name).unlink()
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return manifest


def _unique(documents: Iterable[Document | str], ledger: Ledger) -> Iterator[tuple[Document, str]]:
    """Each text once, with its hash."""
    seen: set[str] = set()
    for document in documents:
        document = Document(document) if isinstance(document, str) else document
        name = digest(document.text)
        if not document.text.strip() or name in seen:
            ledger.skip("duplicate" if name in seen else "empty")
        else:
            seen.add(name)
            yield document, name


def _assign(documents: Iterator[tuple[Document, str]], share: float) -> Iterator[tuple[Document, str]]:
    """The splits by hash. Of few documents the one with the smallest hash is held out, of a single one its tail."""
    head = list(islice(documents, FEW_DOCUMENTS))
    if len(head) == 1:
        document, at = head[0][0], int(len(head[0][0].text) * (1 - share))
        at = document.text.rfind("\n", 0, at) + 1 or at
        yield replace(document, text=document.text[:at]), "train"
        yield replace(document, text=document.text[at:]), "val"
        return
    if head and len(head) < FEW_DOCUMENTS:
        share = max(share, min(fraction(name) for _, name in head) + 2**-33)
    for document, name in chain(head, documents):
        yield document, "val" if fraction(name) < share else "train"


def _encoded(
    parts: Iterator[tuple[Document, str]], tokenizer: tokenizers.Tokenizer
) -> Iterator[tuple[Document, str, np.ndarray]]:
    """The parts with their ids, tokenised in chunks on several threads."""
    while True:
        chunk, chars = [], 0
        while chars < CHUNK_CHARS and (part := next(parts, None)):
            chunk.append(part)
            chars += len(part[0].text)
        if not chunk:
            return
        arrays = tokenizer.encode_arrays([document.text for document, _ in chunk])
        for (document, split), ids in zip(chunk, arrays, strict=True):
            yield document, split, np.append(ids, tokenizer.eot_id).astype("<u2")


def _append(ids: np.ndarray, directory: Path, split: str, files: list[dict[str, Any]], shard_tokens: int) -> None:
    """Append ids to the shards `{split}_{number}.bin` of a directory, of which `files` is the list."""
    while len(ids):
        if not files or files[-1]["tokens"] == shard_tokens:
            files.append({"name": f"{split}_{len(files):06d}.bin", "split": split, "tokens": 0})
        part = ids[: shard_tokens - files[-1]["tokens"]]
        with open(directory / files[-1]["name"], "ab") as file:
            file.write(part.tobytes())
        files[-1]["tokens"] += len(part)
        ids = ids[len(part) :]


def _lengths(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """(n_vocab,) int64: bytes of text that each id stands for; the end-of-text id stands for none."""
    lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)], dtype=np.int64)
    lengths[tokenizer.eot_id] = 0
    return lengths


def read_manifest(directory: Path | str) -> dict[str, Any]:
    """The manifest of a corpus; a directory of bare `*.bin` shards gets one with a `note`. MissingFile, DataError."""
    path = Path(directory) / MANIFEST
    if not path.exists():
        return _foreign_manifest(Path(directory))
    if not {"files", "tokenizer", "train_tokens"} <= (manifest := config.read_json(path)).keys():
        raise DataError(f"{path} is not the manifest of a corpus; codechat data corpus --out DIR makes one")
    return manifest


def _foreign_manifest(directory: Path) -> dict[str, Any]:
    paths = sorted(directory.glob("*.bin"))
    if not paths:
        make = f"make a corpus with codechat data corpus --out {directory}"
        raise MissingFile(f"{directory} holds neither {MANIFEST} nor *.bin shards; {make}")
    files = [
        {"name": p.name, "bytes": n, "tokens": n // 2, "split": "train"} for p in paths for n in [p.stat().st_size]
    ]
    files[-1]["split"] = "val"
    totals = {f"{s}_tokens": sum(f["tokens"] for f in files if f["split"] == s) for s in ("train", "val")}
    note = f"{directory} has no {MANIFEST}: read as GPT-2 ids in uint16; {paths[-1].name} is held out for validation"
    return {"tokenizer": "gpt2", "n_vocab": 50257, "eot_id": 50256, **totals, "files": files, "note": note}


def open_corpus(directory: Path | str, split: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The manifest, and a memory-mapped array of ids for each shard of a split. DataError for a damaged shard."""
    directory, manifest, shards = Path(directory), read_manifest(directory), []
    for file in (file for file in manifest["files"] if file["split"] == split):
        path = directory / file["name"]
        size = path.stat().st_size if path.exists() else "no"
        if size != file["bytes"]:
            raise DataError(f"{path} has {size} bytes; {MANIFEST} says {file['bytes']}; {AGAIN}")
        shards.append(np.memmap(path, dtype="<u2", mode="r"))
    if not shards:
        raise DataError(f"corpus {directory} has no split {split!r}")
    return manifest, shards


def hash_shards(directory: Path | str, manifest: dict[str, Any]) -> str:
    """The hash of the shards as they are now, which a manifest has of those that were written; about a second per 1.5 GB."""
    return digest("".join(file_record(Path(directory) / file["name"])["sha256"] for file in manifest["files"]))


class WindowLoader:
    """Endless windows of T ids, each within one shard, every start equally likely: `next()` -> ids and targets (B, T)
    int64. DataError when the corpus holds no window of T + 1 ids."""

    def __init__(
        self, directory: Path | str, split: str, batch: int, T: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        manifest, self.shards = open_corpus(directory, split)
        if rank == 0 and "note" in manifest:
            print(manifest["note"], file=sys.stderr)
        starts = np.array([max(0, len(shard) - T) for shard in self.shards], dtype=np.int64)
        if not starts.any():
            held = f"corpus {directory} holds {sum(map(len, self.shards))} {split} tokens"
            raise DataError(f"{held}; a block of {T} needs {T + 1} in one shard; prepare more text or lower block_size")
        self.ends = np.cumsum(starts)  # window numbers below ends[i] start in shard i or before
        self.batch, self.T, self.seed, self.rank, self.world = batch, T, seed, rank, world
        self.windows, self.hash = 0, manifest.get("hash")

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        first = self.windows + self.rank * self.batch
        draws = _mix(self.seed, np.arange(first, first + self.batch, dtype=np.uint64)) % np.uint64(self.ends[-1])
        self.windows += self.batch * self.world
        shards = np.searchsorted(self.ends, draws.astype(np.int64), side="right")
        starts = draws.astype(np.int64) - np.append(0, self.ends)[shards]
        rows = [self.shards[shard][at : at + self.T + 1] for shard, at in zip(shards, starts)]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def state(self) -> dict[str, Any]:
        return {"windows": self.windows, "seed": self.seed, "corpus": self.hash}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken, with any number of ranks. DataError for another seed or corpus."""
        here, before = self.state(), f"the run has learned from corpus {state['corpus']} with --seed {state['seed']}"
        if any(state[key] != here[key] for key in ("corpus", "seed")):
            raise DataError(f"{before}; here are {here['corpus']} and seed {here['seed']}; resume with the former ones")
        self.windows = state["windows"]


def _mix(seed: int, counters: np.ndarray) -> np.ndarray:
    """(n,) uint64 from (n,) counters: splitmix64 (Steele et al. 2014), a bijection of the counter for each seed."""
    with np.errstate(over="ignore"):
        z = counters + np.uint64(seed % 2**32) * np.uint64(0x100000001) + np.uint64(1)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def val_windows(
    directory: Path | str, T: int, limit: int | None = None, *, batch: int = 1, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(ids (B, T), targets (B, T), bytes of text behind the targets). Each token of the split but the first is a target
    once. limit: windows of all ranks together; ranks take batches in turn. The last row is padded with target -100."""
    import torch

    manifest, shards = open_corpus(directory, "val")
    stream, table = np.concatenate(shards), Path(directory) / TOKEN_BYTES
    lengths = np.load(table) if table.exists() else _lengths(tokenizers.load(manifest["tokenizer"]))
    count = min(-(-(len(stream) - 1) // T), sys.maxsize if limit is None else limit)
    for first in range(rank * batch, count, batch * world):
        rows = min(batch, count - first)
        part = stream[first * T : (first + rows) * T + 1].astype(np.int64)
        ids = np.full(rows * T, manifest["eot_id"], dtype=np.int64)
        targets = np.full(rows * T, IGNORE, dtype=np.int64)
        ids[: len(part) - 1], targets[: len(part) - 1] = part[:-1], part[1:]
        ids, targets = (torch.from_numpy(array.reshape(rows, T)) for array in (ids, targets))
        yield ids, targets, int(lengths[part[1:]].sum(dtype=np.int64))
