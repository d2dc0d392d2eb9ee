"""The texts that a checkpoint was trained on, source by source, from the data directories that its lineage names.

A corpus is decoded shard by shard, conversations and problems are read from their files, generated problems are generated again. A source that
cannot be found is reported in `missing`: a check that read nothing proves nothing.

Left out: data that a lineage does not name (imported weights carry no record of theirs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codechat import tasks
from codechat.core.errors import UserError
from codechat.data import corpus
from codechat.data.sources import read_jsonl
from codechat.runs.paths import ROOT
from codechat.tasks.base import Problem
from codechat.text import tokenizer

PIECE = 1 << 18  # tokens decoded at a time
OVERLAP = 256  # tokens that two pieces share, so that no match is cut in two
MOST_BYTES = 1 << 29  # of text read from one source


@dataclass
class Texts:
    """Iterating gives (text, whole): whole is True for a message, False for a piece of a corpus. It fills `read` and `missing`."""

    lineage: Sequence[Mapping[str, Any]]
    most_bytes: int = MOST_BYTES
    read: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        for entry in self.lineage:
            name = f"{entry.get('run')} ({entry.get('kind')})"
            done = 0
            try:
                for text, whole in _texts_of(entry):
                    yield text, whole
                    done += len(text)
                    if done > self.most_bytes:
                        break
            except (UserError, OSError) as error:
                self.missing.append(f"{name}: {str(error)[:160]}")
                continue
            if not done:
                self.missing.append(f"{name}: no text was found")
                continue
            part = f"the first {done / 1e6:.0f} MB only" if done > self.most_bytes else f"{done / 1e6:.1f} MB"
            self.read.append(f"{name}: {part}")


def _texts_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    if entry.get("task"):
        yield from _problem_texts(entry["task"], entry.get("data_dir"))
        return
    if not entry.get("data_dir"):
        raise UserError("its lineage names no data")
    directory = _directory(entry["data_dir"])
    if entry.get("kind") == "pretrain":
        yield from ((text, False) for text in _corpus_texts(directory))
    else:
        yield from _conversation_texts(directory)


def _directory(name: str) -> Path:
    path = Path(name)
    return path if path.is_absolute() or path.exists() else ROOT / path


def _corpus_texts(directory: Path) -> Iterator[str]:
    opened = corpus.open_corpus(directory, "train")
    state = opened.manifest.get("tokenizer_state")
    known = tokenizer.from_dict(state) if state else tokenizer.load(opened.manifest["tokenizer"])
    for shard in opened.shards:
        for at in range(0, len(shard), PIECE):
            yield known.decode(shard[at : at + PIECE + OVERLAP].tolist())


def _conversation_texts(directory: Path) -> Iterator[tuple[str, bool]]:
    files = sorted([*directory.glob("*.train.jsonl"), *directory.glob("train.jsonl")])
    if not files:
        raise UserError(f"{directory} holds no training files any more")
    for file in files:
        for _, row in read_jsonl(file):
            if "gold" not in row:  # the directory also holds problems; SFT does not read them
                yield from (
                    (m["content"], True)
                    for m in row.get("messages") or row.get("conversations") or ()
                    if m["role"] != "system"
                )


def _problem_texts(name: str, data_dir: str | None) -> Iterator[tuple[str, bool]]:
    """Prompts only: RL never shows a reference solution."""
    task = tasks.load(name, **({"source": str(_directory(data_dir))} if data_dir else {}))
    for problem in task.problems("train"):
        yield request(problem), True


def request(problem: Problem) -> str:
    """The user messages of a problem, without the system prompt, which many problems share."""
    return "\n".join(m["content"] for m in problem.messages if m["role"] == "user")
