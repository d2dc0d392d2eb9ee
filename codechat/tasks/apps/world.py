"""The world of an episode: sampled people, mails, events, notes, products and files, and the values of requests.

The hash of a value of an open domain decides its split (`toolbox.values`), so training never sees a value that a test
request asks to copy. Ids are sampled, not counted: guessing the first row does not replace a look-up.
"""

from __future__ import annotations

import random
from typing import Any

from codechat.tasks.apps.store import Row
from codechat.tasks.toolbox import values

IDS = range(10, 100)
DOMAINS = {
    "phrase": values.phrase(),
    "phone_number": values.integer(1000, 9_999_999),
    "day": values.date(2020, 2039),
    "clock": values.clock(),
}
# Kinds of values that are drawn from a list.
CHOICES = {
    "folder": ("archive", "spam", "trash"),
    "minutes": (15, 20, 30, 45, 50, 75, 90, 120),
}
RANGES = {"quantity": (2, 5), "price": (100, 999), "high_price": (1000, 9999), "stock": (6, 30)}
# Table -> column -> kind of its values, or a value. The tables `orders` and `cart` also name products.
COLUMNS: dict[str, dict[str, Any]] = {
    "contacts": {"name": "name", "phone": "phone", "email": "email"},
    "mails": {"sender": "email", "subject": "word", "body": "phrase", "unread": 1},
    "events": {"title": "word", "day": "day", "start": "clock"},
    "notes": {"title": "word", "text": "phrase"},
    "products": {"name": "word", "price": "price", "stock": "stock"},
    "orders": {"product": None, "quantity": "quantity"},
    "cart": {"product": None, "quantity": 1},
    "files": {"path": "path", "text": "phrase"},
}


class World:
    """The rows of a world by table, and values of its split. Words never repeat and never contain one another."""

    def __init__(self, rng: random.Random, split: str, size: int) -> None:
        self.rng, self.split, self.words = rng, split, list[str]()
        self.tables: dict[str, list[Row]] = {}
        for table, columns in COLUMNS.items():
            ids = rng.sample(IDS, size)
            self.tables[table] = [
                self._row(id, i, columns) for i, id in enumerate(ids[: 1 if table == "cart" else size])
            ]

    def _row(self, id: int, place: int, columns: dict[str, Any]) -> Row:
        row: Row = {"id": id}
        for column, kind in columns.items():
            if column == "product":
                row[column] = self.tables["products"][place]["id"]
            else:
                row[column] = self.draw(kind) if isinstance(kind, str) else kind
        return row

    def draw(self, kind: str) -> Any:
        """A value of this kind."""
        match kind:
            case "word":
                return self._word()
            case "name":
                return self._word().capitalize()
            case "path":
                return f"{self._word()}.txt"
            case "email":
                return f"{self._word()}@{self.rng.choice(('home', 'work', 'post'))}.org"
            case "phone":
                return str(DOMAINS["phone_number"].sample(self.rng, self.split))
        if kind in DOMAINS:
            return DOMAINS[kind].sample(self.rng, self.split)
        return self.rng.choice(CHOICES[kind]) if kind in CHOICES else self.rng.randint(*RANGES[kind])

    def _word(self) -> str:
        while True:
            word = values.invent(self.rng)
            low = word.lower()
            if values.allowed(word, self.split) and not any(low in other or other in low for other in self.words):
                self.words.append(low)
                return word

    def pick(self, table: str) -> Row:
        """A random row of a table."""
        return self.rng.choice(self.tables[table])

    def twin(self, table: str, other: dict[str, str]) -> Row:
        """One of a row and a copy of it that differs in its id and in the columns `other`, of these kinds."""
        changes = {column: self.draw(kind) for column, kind in other.items()}
        row = self.pick(table)
        taken = {r["id"] for r in self.tables[table]}
        copy = row | {"id": self.rng.choice([i for i in IDS if i not in taken])} | changes
        self.tables[table].append(copy)
        return row if self.rng.random() < 0.5 else copy
