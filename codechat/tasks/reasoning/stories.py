"""Generated arithmetic word problems of four levels (stories.json): reasoning that a small model on a CPU can learn.

Levels: 1 one step, numbers up to 9; 2 one step, numbers up to 20, times tables and even sharing; 3 two steps; 4 three steps and
a number without use. A hash of the question decides its part: worked solutions, training, `select` and `test` never share a
question. `test_hard` has wordings that occur nowhere else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from codechat.data.sources import digest, fraction

LEVELS = (1, 2, 3, 4)
PARTS = {"worked": 0.5, "train": 0.8, "select": 0.88, "test": 1.0}  # cumulative shares of the hashes


class Story(NamedTuple):
    """says: wordings; the last is held out. steps: equations over the numbers a to e and the earlier results r and s.
    low, high: range of each number. Every result is a whole number above 0."""

    name: str
    level: int
    says: Sequence[str]
    steps: Sequence[str]
    low: Sequence[int]
    high: Sequence[int]


_DATA = json.loads(Path(__file__).with_name("stories.json").read_text(encoding="utf-8"))
PEOPLE, THINGS = _DATA["people"], _DATA["things"]
STORIES = tuple(Story(**story) for story in _DATA["stories"])


def part_of(text: str) -> str:
    """The part of a question with an ordinary wording."""
    at = fraction(digest(text))
    return next(part for part, end in PARTS.items() if at < end)


def draw(story: Story, rng: random.Random, held_out: bool = False) -> tuple[str, str, str]:
    """(question of this story, worked solution with an equation per line, answer); results are whole numbers above 0."""
    wording = story.says[-1] if held_out else rng.choice(story.says[:-1])
    first, second = rng.sample(PEOPLE, 2)
    thing = rng.choice(THINGS)
    while True:
        numbers = {name: rng.randint(low, high) for name, low, high in zip("abcde", story.low, story.high)}
        if (lines := list(_worked(story.steps, numbers)))[-1] is not None:
            break
    *_, answer = lines[-1].split()
    text = wording.format(A=first, B=second, x=thing, **numbers)
    return text, "\n".join(lines), answer


def _worked(steps: Sequence[str], numbers: dict[str, int]) -> Iterator[str | None]:
    """ "6 + 3 = 9" for each step; None for a result that is not a whole number above 0."""
    known: dict[str, int] = dict(numbers)
    for step, name in zip(steps, "rst"):
        left, sign, right = step.split()
        x, y = known[left], known[right]
        result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if x % y == 0 else 0}[sign]
        if result < 1:
            yield None
            return
        known[name] = result
        yield f"{x} {sign} {y} = {result}"
