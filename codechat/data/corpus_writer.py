"""Source text -> a corpus (`data.corpus`): `codechat data corpus`.

The hash of a document decides whether it is a duplicate and whether it is held out."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from codechat.core import config, registry
from codechat.core.atomic_files import file_record, write_atomic
from codechat.core.config import opt
from codechat.core.errors import DataError, MissingFile
from codechat.data import corpus, sources
from codechat.data.prepared import print_ledgers, require_kind, written_by_one
from codechat.data.sources import MANIFEST, Document, Ledger, Row, digest, fraction
from codechat.text import tokenizer as tokenizers

VAL_SHARE = 0.02
# Enough documents that a 2 % hash split of them is not empty by chance (0.98 ** 512 is 3e-5).
FEW_DOCUMENTS = 512
CHUNK_CHARS = 1 << 20
DOCUMENT_COLUMNS = (("code",), ("content",), ("text",))  # where rows have their text
CORPUS_HUB = "codeparrot/github-code-clean"


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(config.Settings):
    """Source text -> shards of token ids."""

    source: str = opt(
        "embedded",
        "embedded, hub, or a path: parquet, jsonl, .py, .txt, a directory of them",
        reads="path",
    )
    out: str = opt("data/corpus", "directory to write")
    tokenizer: str = opt("gpt2", "gpt2, gpt2:N, python:N, chars:FILE or bytes")
    max_examples: int | None = opt(None, "documents to read; none = all", least=0)
    max_tokens: int | None = opt(None, "stop after this many tokens; none = no limit", least=1)
    val_share: float = opt(
        VAL_SHARE, "share of the documents held out for validation, by hash", least=0, most=0.99
    )
    max_lost: float = opt(
        sources.LARGEST_LOSS, "largest share of a source lost for one reason", least=0, most=1
    )


def prepare_corpus(cfg: CorpusConfig) -> dict[str, Any]:
    """Write the corpus; returns its manifest. Raises UserError."""
    out = Path(cfg.out)
    path = Path(cfg.source)
    require_kind(out, "corpus", cfg)
    ledger = Ledger(path.name, cfg.max_lost)
    if cfg.source == "embedded":
        documents = sources.embedded_python(ledger)
    elif cfg.source == "hub":
        rows = sources.hub_rows(
            CORPUS_HUB, files="data/train-*.parquet", columns=["code", "path", "language"]
        )
        documents = row_documents(rows, CORPUS_HUB, ledger)
    else:
        documents = path_documents(path, ledger)
    tokenizer = tokenizers.load(cfg.tokenizer)
    try:
        return write_corpus(
            islice(documents, cfg.max_examples),
            out,
            tokenizer,
            ledger=ledger,
            max_tokens=cfg.max_tokens,
            val_share=cfg.val_share,
        )
    finally:
        # also where too much was lost: the counts say for which reason
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
    """Tokenise the documents into `out_dir` and return the manifest. A complete corpus replaces
    an earlier one.

    max_tokens: stop after the document that reaches them. DataError: ids beyond uint16, no
    text, too large a loss. RunError if another process writes into `out_dir`."""
    if tokenizer.n_vocab > 1 << 16:
        raise DataError(
            f"tokenizer {tokenizer.spec} has {tokenizer.n_vocab} "
            "ids; shards are uint16; choose another"
        )
    out = Path(out_dir)
    ledger = ledger or Ledger("text")
    with written_by_one(out, wait=False):
        require_kind(out, "corpus")
        # An earlier corpus stays whole until the new one is complete.
        fresh = out / ".new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            writer = _ShardWriter(fresh, shard_tokens)
            # All of this is lazy: no more documents are read than are written.
            parts = _assign(_unique(documents, ledger), val_share)
            _write_parts(_encoded(parts, tokenizer), writer, ledger, max_tokens, val_share)
            ledger.check()
            np.save(fresh / corpus.TOKEN_BYTES, corpus.token_lengths(tokenizer).astype(np.uint16))
            manifest = _manifest(writer, tokenizer, ledger)
            _publish(fresh, out, manifest)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return manifest


class _ShardWriter:
    """Appends documents to the shards `{split}_{number}.bin` of a directory, and counts them."""

    def __init__(self, directory: Path, shard_tokens: int) -> None:
        self.directory = directory
        self.shard_tokens = shard_tokens
        self.shards: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
        # documents, bytes and tokens: by split, and by source
        self.totals: dict[str, Counter[str]] = {split: Counter() for split in self.shards}
        self.origins: dict[str, Counter[str]] = defaultdict(Counter)

    @property
    def tokens(self) -> int:
        return sum(counts["tokens"] for counts in self.totals.values())

    def add(self, part: Encoded) -> None:
        """Append one document and count it."""
        # halves of characters have no encoding
        size = len(part.document.text.encode("utf-8", "replace"))
        for counts in (self.totals[part.split], self.origins[part.document.source]):
            counts.update(documents=1, bytes=size, tokens=len(part.ids))
        self._append(part.ids, part.split)

    def _append(self, ids: np.ndarray, split: str) -> None:
        shards = self.shards[split]
        while len(ids):
            if not shards or shards[-1]["tokens"] == self.shard_tokens:
                shards.append(
                    {"name": f"{split}_{len(shards):06d}.bin", "split": split, "tokens": 0}
                )
            shard = shards[-1]
            fitting = ids[: self.shard_tokens - shard["tokens"]]
            with open(self.directory / shard["name"], "ab") as file:
                file.write(fitting.tobytes())
            shard["tokens"] += len(fitting)
            ids = ids[len(fitting) :]


def _write_parts(
    parts: Iterator[Encoded],
    writer: _ShardWriter,
    ledger: Ledger,
    max_tokens: int | None,
    val_share: float,
) -> None:
    """Write the parts until there are `max_tokens`, and at least one held-out document."""
    full = False
    for part in tqdm(parts, "corpus", unit=" documents", disable=None):
        if full and part.split == "train":
            continue  # a small limit may come before the first held-out document
        writer.add(part)
        ledger.kept += 1
        full = max_tokens is not None and writer.tokens >= max_tokens
        if full and (writer.shards["val"] or not val_share):
            return


def _manifest(
    writer: _ShardWriter, tokenizer: tokenizers.Tokenizer, ledger: Ledger
) -> dict[str, Any]:
    """Names, sizes and hashes of the shards, the tokenizer, and counts by source."""
    shards = chain.from_iterable(writer.shards.values())
    files = [shard | file_record(writer.directory / shard["name"]) for shard in shards]
    totals = {
        f"{split}_{unit}": counts[unit]
        for unit in ("documents", "tokens", "bytes")
        for split, counts in writer.totals.items()
    }
    what = dict(
        hash=digest("".join(file["sha256"] for file in files)),
        tokenizer=tokenizer.spec,
        tokenizer_state=tokenizer.to_dict(),
        n_vocab=tokenizer.n_vocab,
        eot_id=tokenizer.eot_id,
    )
    whence = dict(
        kept=ledger.kept,
        dropped=dict(sorted(ledger.lost.items())),
        skipped=dict(sorted(ledger.skipped.items())),
        sources={name: dict(counts) for name, counts in sorted(writer.origins.items())},
        files=files,
    )
    return what | totals | whence


def _publish(fresh: Path, out: Path, manifest: Mapping[str, Any]) -> None:
    """Move the new files from `fresh` to `out`, and remove those of an earlier corpus that are
    not replaced."""
    old = {path.name for path in out.glob("*_??????.bin")} if (out / MANIFEST).exists() else set()
    # The manifest goes first: a kill between the renames leaves sizes or files that do not
    # match, so reading raises.
    write_atomic(out / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    for path in fresh.iterdir():
        os.replace(path, out / path.name)
    for name in old - {file["name"] for file in manifest["files"]}:
        (out / name).unlink()


class Hashed(NamedTuple):
    """A document, and the hash of its text."""

    document: Document
    name: str


class Part(NamedTuple):
    """A document, or a part of one, and its split."""

    document: Document
    split: str


class Encoded(NamedTuple):
    """A part and its ids (n,) uint16, with the end-of-text id."""

    document: Document
    split: str
    ids: np.ndarray


def _unique(documents: Iterable[Document | str], ledger: Ledger) -> Iterator[Hashed]:
    """Each text once."""
    seen: set[str] = set()
    for document in documents:
        document = Document(document) if isinstance(document, str) else document
        name = digest(document.text)
        if name in seen:
            ledger.skip("duplicate")
        elif not document.text.strip():
            ledger.skip("empty")
        else:
            seen.add(name)
            yield Hashed(document, name)


def _assign(documents: Iterator[Hashed], share: float) -> Iterator[Part]:
    """The splits by hash. Of few documents the one with the smallest hash is held out, of a
    single one its tail."""
    head = list(islice(documents, FEW_DOCUMENTS))
    if len(head) == 1:
        yield from _halves(head[0].document, share)
        return
    if head and len(head) < FEW_DOCUMENTS:
        smallest = min(fraction(name) for _, name in head)
        # half a step of `fraction`, so that `<` holds out just this one
        share = max(share, smallest + 2**-33)
    for document, name in chain(head, documents):
        yield Part(document, "val" if fraction(name) < share else "train")


def _halves(document: Document, share: float) -> Iterator[Part]:
    """A document split before its last `share`, at the end of a line if there is one."""
    text = document.text
    at = int(len(text) * (1 - share))
    # a line in both halves would be held out and trained on
    at = text.rfind("\n", 0, at) + 1 or at
    yield Part(replace(document, text=text[:at]), "train")
    yield Part(replace(document, text=text[at:]), "val")


def _encoded(parts: Iterator[Part], tokenizer: tokenizers.Tokenizer) -> Iterator[Encoded]:
    """The parts with their ids, tokenised in chunks on several threads."""
    # in chunks, so that threads have work and a corpus need not fit into memory
    for chunk in _chunks(parts):
        arrays = tokenizer.encode_arrays([document.text for document, _ in chunk])
        for (document, split), ids in zip(chunk, arrays, strict=True):
            yield Encoded(document, split, np.append(ids, tokenizer.eot_id).astype("<u2"))


def _chunks(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """The parts in lists of CHUNK_CHARS characters or slightly more; the last may be shorter."""
    chunk: list[Part] = []
    chars = 0
    for part in parts:
        chunk.append(part)
        chars += len(part.document.text)
        if chars >= CHUNK_CHARS:
            yield chunk
            chunk = []
            chars = 0
    if chunk:
        yield chunk


# ---- documents


def benchmark_check() -> Callable[[Row, str], None]:
    """Raises DataError for a row of a benchmark, which must not be training data; called with the
    row and where it stands. The laboratory knows the benchmarks; without it stderr says that
    nothing is compared."""
    if "benchmark_rows" in registry.INSTRUMENTS:
        check: Callable[[Row, str], None] = registry.instrument("benchmark_rows", "")
        return check
    why = "no installed package brings the instrument 'benchmark_rows'"
    print(f"rows are not compared with benchmarks: {why}", file=sys.stderr)
    return lambda row, where: None


def path_documents(path: Path, ledger: Ledger) -> Iterator[Document]:
    """Documents of a file of rows, a .py or .txt file, or a directory of either kind."""
    if not path.exists():
        raise MissingFile(
            f"{path} does not exist; --source takes embedded, hub, or a file or directory"
        )
    root = path if path.is_dir() else path.parent
    reject = benchmark_check()
    if path.suffix in sources.ROW_ENDINGS or (path.is_dir() and _holds_rows(path)):
        yield from row_documents(sources.local_rows(path), path.name, ledger)
        return
    if path.is_dir():
        yield from sources.embedded_python(ledger, [(path.name, path)])
    elif path.suffix not in (".py", ".txt"):
        needed = f"{sources.ENDINGS}, .py, .txt or a directory of such files"
        raise DataError(
            f"{path} has the ending {path.suffix!r}; expected {needed}; convert or rename it"
        )
    for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
        document = sources.read_text_file(file, file.relative_to(root).as_posix(), "files", ledger)
        if document:
            reject({"text": document.text}, str(file))
            yield document


def _holds_rows(directory: Path) -> bool:
    """Whether a directory is one of rows: json and csv files also lie beside programs and texts."""
    if any(map(sources.row_format, directory.iterdir())):
        return True
    rows = any(path.suffix in sources.ROW_ENDINGS for path in directory.iterdir())
    return rows and not any(path.suffix in (".py", ".txt") for path in directory.rglob("*"))


def row_documents(rows: Iterable[Row], origin: str, ledger: Ledger) -> Iterator[Document]:
    """Documents of rows with Python source under `code`, `content` or `text`; other languages
    are skipped by rule."""
    reject = benchmark_check()
    for number, row in enumerate(sources.require_columns(rows, DOCUMENT_COLUMNS, origin)):
        reject(row, f"{origin}, row {number + 1},")
        text = next(
            (row[column] for (column,) in DOCUMENT_COLUMNS if row.get(column) is not None), None
        )
        if not isinstance(text, str):
            ledger.lose("no_text")
            continue
        language = str(row.get("language", row.get("lang", "Python"))).lower()
        rule = "other_language" if language != "python" else sources.text_rule(text)
        if rule:
            ledger.skip(rule)
        else:
            yield Document(text.replace("\r\n", "\n"), str(row.get("path", number)), origin)
