"""Count the supervised tokens in files of conversations, with and without a limit on their length.

    python tools/supervised_tokens.py --files calls=glaive.jsonl code=data/sft/code.train.jsonl --tokenizer gpt2
        --limit 2049

Rows are conversations, or {system, chat} as in glaive. The run gets one row per file. A cut
conversation keeps its tokens before the limit, as in the original system; our preparation drops
such conversations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from codechat.cli import guarded
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.data import chat_formats, conversations
from codechat.data.sources import local_rows
from codechat.runs.run import Run
from codechat.text import tokenizer


@dataclass(frozen=True, kw_only=True)
class SupervisionConfig:
    """Which files to count, and how."""

    run_name: str = opt("supervision", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(
        False, "replace the run of this name: it is deleted once this one has begun", identity=False
    )
    files: tuple[str, ...] = opt(
        config.REQUIRED, "files of conversations, DOMAIN=PATH each", reads="path"
    )
    tokenizer: str = opt("gpt2", "tokenizer")
    tags: Literal["reserved", "text"] = opt(
        "text", "turn tags as plain text, or as single reserved ids"
    )
    limit: int = opt(2049, "longest row, tokens; what is longer is cut")
    rows: int | None = opt(None, "rows per file; none = all")

    def __post_init__(self) -> None:
        for file in self.files:
            if not all(file.partition("=")):
                raise ConfigError(
                    f"{file!r} names no domain; give DOMAIN=PATH, such as calls=glaive.jsonl"
                )


def masks(path: Path, cfg: SupervisionConfig) -> Iterator[list[int]]:
    """The loss mask of each usable conversation of a file, uncut, as it predicts."""
    tok = tokenizer.load(cfg.tokenizer)
    for number, row in enumerate(islice(local_rows(path), cfg.rows), 1):
        if "chat" in row:
            if isinstance(messages := chat_formats.messages_of(row, f"{path} row {number}"), str):
                continue
            row = {"messages": messages}
        checked = conversations.check_row(row, "", f"{path} row {number}")
        example = conversations.encode(checked, tok, cfg.tags, 1 << 30)
        if not isinstance(example, str):
            yield example.loss_mask[1:].astype(int).tolist()


def count(loss_masks: Iterator[list[int]], limit: int) -> dict[str, Any]:
    """Conversations, cut ones, and supervised tokens; a row of `limit` ids predicts limit - 1."""
    rows = [(len(mask) + 1, sum(mask), sum(mask[: limit - 1])) for mask in loss_masks]
    if not rows:
        return dict(conversations=0, cut=0, supervised=0, supervised_uncut=0, most=0)
    mean = sum(kept for _, _, kept in rows) / len(rows)
    return dict(
        conversations=len(rows),
        sd=(sum((kept - mean) ** 2 for _, _, kept in rows) / max(1, len(rows) - 1)) ** 0.5,
        cut=sum(n > limit for n, _, _ in rows),
        supervised=sum(kept for _, _, kept in rows),
        supervised_uncut=sum(whole for _, whole, _ in rows),
        tokens=sum(min(n, limit) for n, _, _ in rows),
        most=max(kept for _, _, kept in rows),
    )


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    cfg = config.parse(
        SupervisionConfig, words, prog="python tools/supervised_tokens.py", epilog=__doc__
    )
    places = {name: Path(path) for name, _, path in (file.partition("=") for file in cfg.files)}
    for path in places.values():
        if not path.is_file():
            raise MissingFile(
                f"{path} does not exist; give a jsonl or parquet file of conversations"
            )
    with Run.create(cfg.run_name, cfg, kind="supervision", overwrite=cfg.overwrite) as run:
        for domain, path in places.items():
            row = dict(
                domain=domain,
                limit=cfg.limit,
                tokenizer=cfg.tokenizer,
                **count(masks(path, cfg), cfg.limit),
            )
            run.log_eval(0, row)
            counts = (
                f"{row['conversations']} conversations, {row['supervised']:,} supervised tokens"
            )
            print(f"{domain}: {counts}, {row['cut']} cut at {cfg.limit}")


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
