"""The state of an episode: an in-memory SQLite database that is refilled and compared in microseconds.

All work is in one transaction that is never committed. A reset rolls back to the empty tables and inserts the world's
rows. Connection, tables and prepared statements stay for the next episode.

A change is JSON data: ["added", table, {column: value}], ["removed", table, id] or ["set", table, id, column, value].
The id of an added row is omitted: it depends on the order of insertions, which no task specifies.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Change = list[Any]

# Columns beside `id`, with their defaults.
TABLES: dict[str, dict[str, Any]] = {
    "contacts": {"name": "", "phone": "", "email": "", "birthday": "", "circle": ""},
    "mails": {"folder": "inbox", "sender": "", "recipient": "", "subject": "", "body": "", "unread": 0, "starred": 0},
    "events": {"title": "", "day": "", "start": "", "minutes": 60, "place": "", "guests": ""},
    "notes": {"title": "", "text": "", "tag": "", "pinned": 0},
    "products": {"name": "", "price": 0, "stock": 0},
    "cart": {"product": 0, "quantity": 1},
    "orders": {"product": 0, "quantity": 1, "status": "placed"},
    "wishes": {"product": 0},
    "files": {"path": "", "text": "", "shared": ""},
    "outcome": {"kind": "", "text": ""},
}


def _create(table: str) -> str:
    columns = (
        f"{name} {'INTEGER' if isinstance(value, int) else 'TEXT'} NOT NULL DEFAULT {value!r}"
        for name, value in TABLES[table].items()
    )
    return f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(columns)})"


def _is_address(text: str) -> bool:
    name, at, domain = text.partition("@")
    return bool(name and at and domain) and " " not in text


# What the tools' statements may call beside SQLite's functions.
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "is_address": (1, _is_address),
    "joined": (2, lambda text, more: f"{text} {more}".strip()),
    "plain": (1, lambda text: " ".join(text.casefold().split()).rstrip(".")),
}


class Store:
    """Tables of one episode, filled by `reset`."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        for name, (arguments, function) in FUNCTIONS.items():
            self.db.create_function(name, arguments, function, deterministic=True)
        # Before the transaction: one that creates tables rolls back ten times slower.
        self.db.executescript(";".join(map(_create, TABLES)))
        self.db.execute("BEGIN")
        self.db.execute("SAVEPOINT empty")

    def reset(self, world: Mapping[str, Sequence[Row]]) -> None:
        """Hold the rows of `world` and nothing else. Missing columns get their default."""
        self.db.execute("ROLLBACK TO empty")
        for table, rows in world.items():
            columns = {"id": 0} | TABLES[table]
            self.db.executemany(
                f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
                [tuple((columns | row)[name] for name in columns) for row in rows],
            )
        self.start = self._rows()

    def close(self) -> None:
        self.db.close()

    def _rows(self) -> dict[str, dict[int, tuple[Any, ...]]]:
        """Every row of every table, by id."""
        return {table: {row[0]: row for row in self.db.execute(f"SELECT * FROM {table}")} for table in TABLES}

    def diff(self) -> list[Change]:
        """The changes since the reset, in order of tables and rows."""
        return [
            change
            for table, now in self._rows().items()
            if now != self.start[table]
            for change in _changes(table, self.start[table], now)
        ]


def _changes(table: str, was: Mapping[int, tuple[Any, ...]], now: Mapping[int, tuple[Any, ...]]) -> Iterable[Change]:
    names = ("id", *TABLES[table])
    for id in sorted(was.keys() | now.keys()):
        if id not in now:
            yield ["removed", table, id]
        elif id not in was:
            yield ["added", table, dict(zip(names[1:], now[id][1:], strict=True))]
        else:
            columns = zip(names, was[id], now[id], strict=True)
            yield from (["set", table, id, name, new] for name, old, new in columns if old != new)


def compare(required: Iterable[Change], changes: Iterable[Change]) -> tuple[int, list[str], list[str]]:
    """(number of required changes among the changes, missing ones, those not required), the latter two in words."""
    due, done = (Counter(map(_key, some)) for some in (required, changes))
    missing, more = (sorted(map(describe, rest.elements())) for rest in (due - done, done - due))
    return (due & done).total(), missing, more


def _key(change: Change) -> tuple[Any, ...]:
    kind, table, *rest = change
    return (kind, table, *(tuple(sorted(part.items())) if isinstance(part, dict) else part for part in rest))


def describe(change: Iterable[Any]) -> str:
    """A change in words, such as "notes 4 removed"."""
    kind, table, *rest = change
    if kind == "added":
        row = dict(rest[0])
        return f"{table} added: " + ", ".join(f"{k} {row[k]!r}" for k, v in TABLES[table].items() if row[k] != v)
    return f"{table} {rest[0]} removed" if kind == "removed" else f"{table} {rest[0]}: {rest[1]} = {rest[2]!r}"
