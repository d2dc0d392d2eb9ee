"""The texts that a checkpoint was trained on, source by source, from the data directories that its lineage names.

Generated problems are generated again with the run's seed. A source that cannot be found or read is reported in `missing`: a check that read
nothing proves nothing.
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
    preferences, data_dir = entry.get("kind") == "preference", entry.get("data_dir")
    if entry.get("task") and not (preferences and data_dir):  # with preferences from files the task only evaluates
        source = entry.get("task_data") if preferences else data_dir
        yield from _problem_texts(entry["task"], source, entry.get("seed") or 0)
        return
    if not data_dir:
        raise UserError("its lineage names no data")
    directory = _directory(data_dir)
    if preferences:
        yield from _preference_texts(directory)
    elif entry.get("kind") == "pretrain":
        yield from ((text, False) for text in _corpus_texts(directory, entry.get("data")))
    else:
        yield from _conversation_texts(directory)


def _directory(name: str) -> Path:
    path = Path(name)
    return path if path.is_absolute() or path.exists() else ROOT / path


def _corpus_texts(directory: Path, recorded: str | None) -> Iterator[str]:
    opened = corpus.open_corpus(directory, "train")
    if recorded not in (None, opened.manifest.get("hash")):
        raise UserError(f"{directory} holds another corpus than the one that was trained on")
    state = opened.manifest.get("tokenizer_state")
    known = tokenizer.from_dict(state) if state else tokenizer.load(opened.manifest["tokenizer"])
    for shard in opened.shards:
        for at in range(0, len(shard), PIECE):
            yield known.decode(shard[at : at + PIECE + OVERLAP].tolist())


def _conversation_texts(directory: Path) -> Iterator[tuple[str, bool]]:
    files = sorted([*directory.glob("*.train.jsonl"), *directory.glob("train.jsonl")])
    if not files:
        raise UserError(f"{directory} holds no training files any more")
    tokenized = []
    for file in files:
        for _, row in read_jsonl(file):
            if {"input_ids", "labels"} <= row.keys() and file.name not in tokenized:
                tokenized.append(file.name)
            if "gold" not in row:  # the directory also holds problems; SFT does not read them
                yield from (
                    (m["content"], True)
                    for m in row.get("messages") or row.get("conversations") or ()
                    if m["role"] != "system"
                )
    if tokenized:  # the rows do not name their tokenizer
        names = ", ".join(tokenized)
        raise UserError(f"{names}: rows are token ids; messages are required; search their texts (other rows were)")


def _preference_texts(directory: Path) -> Iterator[tuple[str, bool]]:
    """Prompts and completions, chosen and rejected: a model learns from both."""
    for _, row in read_jsonl(directory / "preferences.train.jsonl"):
        for value in (row.get(name) for name in ("prompt", "chosen", "rejected", "completion")):
            messages = [{"role": "", "content": value}] if isinstance(value, str) else value or ()
            yield from ((m["content"], True) for m in messages if m["role"] != "system")


def _problem_texts(name: str, source: str | None, seed: int) -> Iterator[tuple[str, bool]]:
    """Prompts only: RL never shows a reference solution. seed: of the run."""
    task = tasks.load(name, **({"source": _source(source)} if source else {}))
    yield from ((request(problem), True) for problem in task.problems("train", seed=seed))


def _source(name: str) -> str:
    """A path, or a word such as hub."""
    directory = _directory(name)
    return str(directory) if directory.exists() else name


def request(problem: Problem) -> str:
    """The user messages of a problem, without the system prompt, which many problems share."""
    return "\n".join(m["content"] for m in problem.messages if m["role"] == "user")
