"""A root with a small corpus and small conversations, for loops on one process and on several ranks."""

from pathlib import Path
from typing import Any

import pytest
from contracts import write_corpus, write_rows


@pytest.fixture
def home(home: Path) -> Path:
    def row(i: int) -> dict[str, Any]:
        talk = [dict(role="user", content=f"calls {i % 7}"), dict(role="assistant", content=str(i % 7) * (1 + i % 5))]
        return dict(id=f"{i}", domain="calls", meta={}, messages=talk)

    write_corpus(home)
    for split, n in (("train", 60), ("select", 7)):  # seven do not divide over ranks
        write_rows(home / "dialogues" / f"calls.{split}.jsonl", [row(i) for i in range(n)])
    return home
