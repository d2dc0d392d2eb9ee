"""The world of an episode: sampled people, mails, events, notes, products and files, and the values of requests.

The hash of a value of an open domain decides its split (`toolbox.values`), so training never sees a value that a test
request asks to copy. Ids are sampled, not counted: guessing the first row does not replace a look-up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from codechat.tasks.apps.store import Row
from codechat.tasks.toolbox import values

FOLDERS = ("archive", "spam", "trash")
IDS = range(10, 100)


class Draw:
    """Values of one split from one generator. Words and names never repeat and never contain one another."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        self.used: list[str] = []

    def fresh(self, make: Callable[[], str]) -> str:
        while True:
            value = make()
            low = value.lower()
            if values.allowed(value, self.split) and not any(low in other or other in low for other in self.used):
                self.used.append(low)
                return value

    def word(self) -> str:
        return self.fresh(lambda: values.invent(self.rng))

    def name(self) -> str:
        return self.word().capitalize()

    def phrase(self) -> str:
        return values.phrase().sample(self.rng, self.split)

    def phone(self) -> str:
        return str(values.integer(1000, 9_999_999).sample(self.rng, self.split))

    def email(self) -> str:
        return f"{self.word()}@{self.rng.choice(('home', 'work', 'post'))}.org"

    def day(self) -> str:
        return values.date(2020, 2039).sample(self.rng, self.split)

    def clock(self) -> str:
        return values.clock().sample(self.rng, self.split)

    def minutes(self) -> int:
        return self.rng.choice((15, 20, 30, 45, 50, 75, 90, 120))

    def quantity(self) -> int:
        return self.rng.randint(2, 5)

    def folder(self) -> str:
        return self.rng.choice(FOLDERS)

    def path(self) -> str:
        return f"{self.word()}.txt"


class Rows:
    """The rows of a world, by table."""

    def __init__(self, draw: Draw, size: int) -> None:
        self.draw, self.tables = draw, {}
        for table, make in MAKERS.items():
            ids = draw.rng.sample(IDS, size)
            self.tables[table] = [{"id": id} | row for id, row in zip(ids, make(draw, self), strict=False)]

    def pick(self, table: str) -> Row:
        """A random row of a table."""
        return self.draw.rng.choice(self.tables[table])

    def twin(self, table: str, **other: Any) -> tuple[Row, Row]:
        """A row and a copy that differs in `other` and the id, in random order."""
        row = self.pick(table)
        taken = {r["id"] for r in self.tables[table]}
        twin = row | {"id": self.draw.rng.choice([i for i in IDS if i not in taken])} | other
        self.tables[table].append(twin)
        return (row, twin) if self.draw.rng.random() < 0.5 else (twin, row)


def _contacts(draw: Draw, rows: Rows) -> Iterator[Row]:
    while True:
        yield {"name": draw.name(), "phone": draw.phone(), "email": draw.email()}


def _mails(draw: Draw, rows: Rows) -> Iterator[Row]:
    while True:
        yield {"sender": draw.email(), "subject": draw.word(), "body": draw.phrase(), "unread": 1}


def _events(draw: Draw, rows: Rows) -> Iterator[Row]:
    while True:
        yield {"title": draw.word(), "day": draw.day(), "start": draw.clock()}


def _notes(draw: Draw, rows: Rows) -> Iterator[Row]:
    while True:
        yield {"title": draw.word(), "text": draw.phrase()}


def _products(draw: Draw, rows: Rows) -> Iterator[Row]:
    while True:
        yield {"name": draw.word(), "price": draw.rng.randint(100, 999), "stock": draw.rng.randint(6, 30)}


def _orders(draw: Draw, rows: Rows) -> Iterator[Row]:
    for product in rows.tables["products"]:
        yield {"product": product["id"], "quantity": draw.quantity()}


def _cart(draw: Draw, rows: Rows) -> Iterator[Row]:
    yield {"product": rows.tables["products"][0]["id"], "quantity": 1}


def _files(draw: Draw, rows: Rows) -> Iterator[Row]:
    while True:
        yield {"path": draw.path(), "text": draw.phrase()}


MAKERS: dict[str, Callable[[Draw, Rows], Iterator[Row]]] = {
    "contacts": _contacts,
    "mails": _mails,
    "events": _events,
    "notes": _notes,
    "products": _products,
    "orders": _orders,
    "cart": _cart,
    "files": _files,
}
