"""Rows of jsonl files, and `codechat data`, which writes them."""

import json
from pathlib import Path
from typing import Any

from codechat.data import command


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(kind: str, out: Path, *flags: object) -> None:
    command.main([kind, "--out", str(out), "--tokenizer", "bytes", *map(str, flags)])
