"""Copying drills: conversations whose answer repeats a value of the request verbatim.

A call is mostly copying. A small model learns to copy from data that only copying can predict: invented words, numbers,
dates and colours, sampled for each row. Values belong to splits as in `values`, so a held-out drill has values that
training never saw. Spelling drills are the exception: their words are those of the vocabulary, in any split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from codechat.tasks.base import check_split
from codechat.tasks.toolbox.values import Slot, clock, colour, date, integer, name, number, phrase, whole_words, word

SLOTS: tuple[Slot, ...] = (
    word(),
    word(),
    name(),
    name(),
    phrase(1, 4),
    integer(1, 99_999),
    number(1, 999),
    date(),
    colour(),
    clock(),
)
ASKS = (
    "Repeat: {}",
    'Say "{}".',
    "Echo {}",
    "Write {} again.",
    "Copy this: {}",
    "{} - say that again.",
    'What did I say? "{}"',
    "Please repeat {}.",
    "Type {}",
    'Quote "{}".',
)

SPELLING = ("In quotes: {}", "Quote each word: {}", "{} - each in quotes, please", "Put quotes around {}")


def _spelling(rng: random.Random) -> tuple[str, str]:
    words = rng.choices(whole_words(), k=rng.randint(3, 6))
    return rng.choice(SPELLING).format(" ".join(words)), ", ".join(f'"{word}"' for word in words)


def copy_dialogues(split: str, n: int, seed: int = 0, *, varied: float = 0.0) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "copy", "meta"}: one to three values in a request, and the same values as the
    answer. varied: share of the words and names from further afield (`values.Slot`); half of it is also the share of
    spelling drills, which put words in quotation marks (`values.whole_words` has the reason)."""
    check_split(split)
    rng = random.Random(f"copy {split} {seed}")
    for i in range(n):
        text = " ".join(str(rng.choice(SLOTS).sample(rng, split, varied)) for _ in range(rng.choice((1, 1, 2, 3))))
        asked, answer = rng.choice(ASKS).format(text), text
        if varied and rng.random() < varied / 2:
            asked, answer = _spelling(rng)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        yield {
            "id": f"copy-{split}-{seed}-{i}",
            "messages": messages,
            "domain": "copy",
            "meta": {"tools_present": False, "asked": "chat", "split": split},
        }
