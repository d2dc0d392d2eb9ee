"""A root with a small corpus and small conversations, for loops on one process and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codechat.data import corpus
from codechat.text import tokenizer


@pytest.fixture
def home(home: Path) -> Path:
    texts = [f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(120)]
    corpus.write_corpus(texts, home / "corpus", tokenizer.load("bytes"))
    (home / "dialogues").mkdir()
    for split, n in (("train", 60), ("select", 7)):
        turns = [(f"calls {i % 7}", str(i % 7) * (1 + i % 5)) for i in range(n)]
        rows = [
            {
                "id": f"{i}",
                "domain": "calls",
                "meta": {},
                "messages": [{"role": "user", "content": asks}, {"role": "assistant", "content": answers}],
            }
            for i, (asks, answers) in enumerate(turns)
        ]
        (home / "dialogues" / f"calls.{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return home
