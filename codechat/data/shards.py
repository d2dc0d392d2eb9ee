"""Writing flat uint16 shards so that nothing half done is ever seen: every file is made under a `.tmp` name
first.

`Tally` counts what went into them. Left out: what a corpus is (corpus) and reading (a shard is a plain array:
`numpy.memmap`).
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from codechat.data.sources import Document


def write_atomic(path: Path, raw: bytes) -> None:
    """Replace `path` in one step; a reader sees the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(raw)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class ShardWriter:
    """Appends ids to `{split}_{number}.bin.tmp`; `publish` takes the `.tmp` away, `discard` removes what is
    left."""

    def __init__(self, out: Path, split: str, shard_tokens: int) -> None:
        self.out, self.split, self.shard_tokens = out, split, shard_tokens
        self.files: list[dict[str, Any]] = []
        self.file: BinaryIO | None = None
        self.room = 0

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            if self.room == 0:
                self._open()
            part, ids = ids[: self.room], ids[self.room :]
            raw = part.tobytes()
            self.file.write(raw)
            self.sha.update(raw)
            self.room -= len(part)
            self.files[-1]["tokens"] += len(part)

    def _open(self) -> None:
        self._seal()
        name = f"{self.split}_{len(self.files):06d}.bin"
        self.file = open(self.out / f"{name}.tmp", "wb")
        self.sha = hashlib.sha256()
        self.room = self.shard_tokens
        self.files.append({"name": name, "split": self.split, "tokens": 0})

    def _seal(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None
            self.files[-1] |= {"bytes": 2 * self.files[-1]["tokens"], "sha256": self.sha.hexdigest()}

    def close(self) -> list[dict[str, Any]]:
        self._seal()
        return self.files

    def discard(self) -> None:
        if self.file is not None:
            self.file.close()
        for file in self.files:
            (self.out / f"{file['name']}.tmp").unlink(missing_ok=True)

    def publish(self) -> None:
        for file in self.files:
            os.replace(self.out / f"{file['name']}.tmp", self.out / file["name"])


class Tally:
    """Documents, bytes of text and tokens, by split and by source."""

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.sources: dict[str, Counter[str]] = {}

    def add(self, document: Document, split: str, tokens: int) -> None:
        size = len(document.text.encode("utf-8", "replace"))
        self.documents[split] += 1
        self.bytes[split] += size
        self.tokens[split] += tokens
        source = self.sources.setdefault(document.source, Counter())
        source.update(documents=1, bytes=size, tokens=tokens)

    def totals(self) -> dict[str, int]:
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return {f"{split}_{name}": n[split] for name, n in counts.items() for split in ("train", "val")}

    def reached(self, max_tokens: int | None, max_bytes: int | None) -> bool:
        return (max_tokens is not None and self.tokens.total() >= max_tokens) or (
            max_bytes is not None and self.bytes.total() >= max_bytes
        )
