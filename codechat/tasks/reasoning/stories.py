"""Generated arithmetic word problems of four levels: reasoning that a small model on a CPU can learn.

    level 1    one step, numbers up to 9         "Mia has 6 shells and finds 3 more. How many shells does Mia have?"
    level 2    one step, numbers up to 20, times tables and even sharing
    level 3    two steps; the second uses the result of the first
    level 4    three steps, and a number without use

Numbers are small on purpose: a small model memorises sums, and the same few hundred sums occur on all levels. A worked
solution has one equation per line. A hash of the question's text decides its part: worked solutions, training, `select`
and `test` never share a question. They do share sums, since 6 + 3 must be seen before it can be used. `test_hard` has
wordings that occur nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from codechat.data.sources import digest, fraction
from codechat.tasks.base import check_levels, check_split

LEVELS = (1, 2, 3, 4)
PARTS = {"worked": 0.5, "train": 0.8, "select": 0.88, "test": 1.0}  # cumulative shares of the hashes
PEOPLE = "Ada Ben Cleo Dan Eva Finn Gia Hugo Ivy Jon Kim Leo Mia Noah Olga Paul Rosa Sam Tom Zoe".split()
THINGS = "apples books shells cards coins pens stones cups stamps eggs toys keys balls nuts".split()


class Story(NamedTuple):
    """says: wordings; the last is held out. steps: equations over the numbers a to e and the earlier results r and s.
    low, high: range of each number. Every result is a whole number above 0."""

    name: str
    level: int
    says: tuple[str, ...]
    steps: tuple[str, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]


STORIES = (
    Story(
        "gain",
        1,
        (
            "{A} has {a} {x} and finds {b} more. How many {x} does {A} have?",
            "{A} has {a} {x}. {B} gives {A} {b} {x}. How many {x} does {A} have now?",
            "First {A} wins {a} {x}, later {b} {x}. What is the number of {x} that {A} has won?",
        ),
        ("a + b",),
        (1, 1),
        (9, 9),
    ),
    Story(
        "lose",
        1,
        (
            "{A} has {a} {x} and gives {b} to {B}. How many {x} does {A} have left?",
            "There are {a} {x} on a table. {A} takes {b} of them. How many {x} are left?",
            "Out of {a} {x}, {A} breaks {b}. How many {x} are still whole?",
        ),
        ("a - b",),
        (2, 1),
        (9, 8),
    ),
    Story(
        "more",
        1,
        (
            "{A} has {a} {x} and {B} has {b}. How many more {x} does {A} have than {B}?",
            "{A} has {a} {x}, {B} has {b} {x}. How many {x} does {B} lack to have as many?",
            "By how many does {A}, who owns {a} {x}, beat {B}, who owns {b}?",
        ),
        ("a - b",),
        (2, 1),
        (9, 8),
    ),
    Story(
        "sum",
        2,
        (
            "{A} has {a} {x} and {B} has {b}. How many {x} do they have together?",
            "A shop sells {a} {x} on Monday and {b} on Tuesday. How many {x} does it sell?",
            "One shelf holds {a} {x}, another holds {b}. What do both shelves hold in all?",
        ),
        ("a + b",),
        (5, 5),
        (12, 12),
    ),
    Story(
        "rest",
        2,
        (
            "A shop has {a} {x} and sells {b}. How many {x} are left?",
            "{A} needs {a} {x} and has {b}. How many {x} are missing?",
            "Of the {a} {x} in a crate, {b} are bad. What number of {x} is good?",
        ),
        ("a - b",),
        (10, 2),
        (20, 10),
    ),
    Story(
        "boxes",
        2,
        (
            "There are {a} boxes with {b} {x} each. How many {x} are there?",
            "{A} buys {a} bags. Each bag holds {b} {x}. How many {x} does {A} buy?",
            "Every one of {a} children brings {b} {x}. What is the number of {x} brought?",
        ),
        ("a * b",),
        (2, 2),
        (5, 5),
    ),
    Story(
        "share",
        2,
        (
            "{A} shares {a} {x} among {b} friends. How many {x} does each friend get?",
            "{a} {x} are put into {b} boxes, as many into each. How many {x} are in one box?",
            "{b} children split {a} {x} evenly. What does each child receive?",
        ),
        ("a / b",),
        (4, 2),
        (25, 5),
    ),
    Story(
        "gain and lose",
        3,
        (
            "{A} has {a} {x} and finds {b} more. Then {A} gives {c} to {B}. How many {x} does {A} have left?",
            "A box holds {a} {x}. {A} puts {b} more in, and {B} takes {c} out. How many {x} are in the box?",
            "Starting with {a} {x}, {A} earns {b} and spends {c}. What is left?",
        ),
        ("a + b", "r - c"),
        (1, 1, 1),
        (9, 9, 9),
    ),
    Story(
        "boxes and rest",
        3,
        (
            "{A} buys {a} bags with {b} {x} each and gives {c} {x} away. How many {x} does {A} keep?",
            "There are {a} boxes of {b} {x}. {c} {x} are broken. How many {x} are whole?",
            "From {a} packs of {b} {x} a shop sells {c} {x}. How many remain?",
        ),
        ("a * b", "r - c"),
        (2, 2, 1),
        (5, 5, 9),
    ),
    Story(
        "both",
        3,
        (
            "{A} has {a} {x}. {B} has {b} more than {A}. How many {x} do they have together?",
            "{A} finds {a} {x}, and {B} finds {b} more than that. How many {x} do both find?",
            "{B} owns {b} {x} beyond the {a} that {A} owns. What do the two own in all?",
        ),
        ("a + b", "a + r"),
        (1, 1),
        (9, 6),
    ),
    Story(
        "sum and share",
        3,
        (
            "{A} has {a} {x} and {B} has {b}. They share all of them among {c} friends. How many {x} does each friend get?",
            "{a} {x} and {b} {x} are put into {c} boxes, as many into each. How many {x} are in one box?",
            "A heap of {a} {x} and one of {b} are split evenly by {c} children. What does each receive?",
        ),
        ("a + b", "r / c"),
        (2, 2, 2),
        (12, 12, 4),
    ),
    Story(
        "stock",
        4,
        (
            "{A} is {d} years old and buys {a} bags with {b} {x} each. {B} brings {c} more, and {e} get lost. How many {x} are left?",
            "In {d} days a shop fills {a} boxes with {b} {x} each. {c} more lie beside them, and {e} are sold. How many {x} does it have?",
            "On day {d}, {A} adds {c} {x} to {a} packs of {b} and throws {e} away. What remains?",
        ),
        ("a * b", "r + c", "s - e"),
        (2, 2, 1, 2, 1),
        (4, 4, 9, 30, 9),
    ),
    Story(
        "three",
        4,
        (
            "{A} has {a} {x}, {B} has {b} more than {A}, and a box of {d} keys holds {c} {x}. How many {x} are there in all?",
            "In {d} minutes {A} finds {a} {x}, {B} finds {b} more than {A}, and a dog finds {c}. How many {x} are found?",
            "{B}, aged {d}, owns {b} {x} beyond the {a} of {A}. With {c} on the shelf, what is the sum?",
        ),
        ("a + b", "a + r", "s + c"),
        (1, 1, 1, 2),
        (6, 4, 9, 30),
    ),
)


class Question(NamedTuple):
    """steps: the worked solution, an equation per line."""

    text: str
    steps: str
    answer: int
    story: str
    level: int


def questions(part: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Question]:
    """n different questions of "worked", "train", "select", "test" or "test_hard", the levels in turn. A repeated level
    is sampled more often.

    ConfigError for an unknown part or level."""
    check_split(part, (*PARTS, "test_hard"))
    check_levels(levels, LEVELS)
    rng, made = random.Random(f"stories {part} {seed}"), dict[str, Question]()
    while len(made) < n:  # ends: names, things and numbers give far more questions than any n in use
        level = levels[len(made) % len(levels)]
        found = draw(rng.choice([s for s in STORIES if s.level == level]), rng, held_out=part == "test_hard")
        if part in ("test_hard", part_of(found.text)):
            made.setdefault(found.text, found)
    return list(made.values())


def part_of(text: str) -> str:
    """The part of a question with an ordinary wording."""
    at = fraction(digest(text))
    return next(part for part, end in PARTS.items() if at < end)


def draw(story: Story, rng: random.Random, held_out: bool = False) -> Question:
    """A question of this story whose results are whole numbers above 0."""
    wording = story.says[-1] if held_out else rng.choice(story.says[:-1])
    first, second = rng.sample(PEOPLE, 2)
    thing = rng.choice(THINGS)
    while True:
        numbers = {name: rng.randint(low, high) for name, low, high in zip("abcde", story.low, story.high)}
        if (lines := list(_worked(story.steps, numbers)))[-1] is not None:
            break
    *_, answer = lines[-1].split()
    return Question(
        wording.format(A=first, B=second, x=thing, **numbers), "\n".join(lines), int(answer), story.name, story.level
    )


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


def about(question: Question) -> dict[str, Any]:
    """The meta of a problem."""
    return {"story": question.story, "level": question.level}
