"""The state of an episode: an in-memory SQLite database that is refilled, rolled back and compared in microseconds.

All work is in one transaction that is never committed. A reset rolls back to the empty tables and inserts the world's
rows. A snapshot is a savepoint; a restore rolls back to it. Connection, tables and prepared statements stay for the
next episode.

A change is JSON data: ["added", table, {column: value}], ["removed", table, id] or ["set", table, id, column, value].
The id of an added row is omitted: it depends on the order of insertions, which no task specifies.

Left out: what the tools do with the rows (mail, calendar, contacts, notes, shop, files).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
World = Mapping[str, Sequence[Row]]
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
COLUMNS = {table: ("id", *columns) for table, columns in TABLES.items()}


class AppError(Exception):
    """An invalid request to a tool. The caller reads the message."""


def _create(table: str) -> str:
    columns = (
        f"{name} {'INTEGER' if isinstance(value, int) else 'TEXT'} NOT NULL DEFAULT {value!r}"
        for name, value in TABLES[table].items()
    )
    return f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(columns)})"


class Store:
    """Tables of one episode, filled by `reset`. Column names come from TABLES; values are always bound."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        # Before the transaction: one that creates tables rolls back ten times slower.
        self.db.executescript(";".join(map(_create, TABLES)))
        self.db.execute("BEGIN")
        self.db.execute("SAVEPOINT empty")
        self.start: dict[str, dict[int, tuple[Any, ...]]] = {}

    def reset(self, world: World) -> None:
        """Hold the rows of `world` and nothing else. Missing columns get their default."""
        self.db.execute("ROLLBACK TO empty")
        for table, rows in world.items():
            defaults, names = TABLES[table], COLUMNS[table]
            full = [({"id": i} | defaults | row) for i, row in enumerate(rows, 1)]
            self.db.executemany(
                f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})",
                [tuple(row[n] for n in names) for row in full],
            )
        self.start = self.dump()

    def snapshot(self) -> None:
        """Save the state. Snapshots nest."""
        self.db.execute("SAVEPOINT snapshot")

    def restore(self) -> None:
        """Return to the last snapshot and drop it."""
        self.db.execute("ROLLBACK TO snapshot")
        self.db.execute("RELEASE snapshot")

    def close(self) -> None:
        self.db.close()

    # ---- rows

    def all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.db.execute(query, values).fetchall()

    def one(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        return self.db.execute(query, values).fetchone()

    def insert(self, table: str, **values: Any) -> int:
        """Add a row. Returns its id."""
        query = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
        return self.db.execute(query, tuple(values.values())).lastrowid or 0

    def row(self, table: str, id: int) -> Row:
        """The row with this id. AppError where there is none."""
        found = self.one(f"SELECT * FROM {table} WHERE id = ?", id)
        if found is None:
            raise AppError(f"nothing has id {id} in {table}")
        return dict(zip(COLUMNS[table], found, strict=True))

    def set(self, table: str, id: int, **values: Any) -> None:
        """Change columns of a row. AppError where there is none."""
        query = f"UPDATE {table} SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?"
        if not self.db.execute(query, (*values.values(), id)).rowcount:
            raise AppError(f"nothing has id {id} in {table}")

    def remove(self, table: str, id: int) -> None:
        """Delete a row. AppError where there is none."""
        if not self.db.execute(f"DELETE FROM {table} WHERE id = ?", (id,)).rowcount:
            raise AppError(f"nothing has id {id} in {table}")

    # ---- differences

    def dump(self) -> dict[str, dict[int, tuple[Any, ...]]]:
        """Every row of every table, by id."""
        return {table: {row[0]: row for row in self.db.execute(f"SELECT * FROM {table}")} for table in TABLES}

    def diff(self) -> list[Change]:
        """The changes since the reset, in order of tables and rows."""
        return [
            change
            for table, now in self.dump().items()
            if now != self.start[table]
            for change in _changes(table, self.start[table], now)
        ]


def _changes(table: str, was: Mapping[int, tuple[Any, ...]], now: Mapping[int, tuple[Any, ...]]) -> Iterable[Change]:
    names = COLUMNS[table]
    for id in sorted(was.keys() | now.keys()):
        if id not in now:
            yield ["removed", table, id]
        elif id not in was:
            yield ["added", table, dict(zip(names[1:], now[id][1:], strict=True))]
        else:
            yield from (
                ["set", table, id, name, new]
                for name, old, new in zip(names, was[id], now[id], strict=True)
                if old != new
            )


def compare(required: Iterable[Change], found: Iterable[Change]) -> tuple[int, list[str], list[str]]:
    """(number of required changes made, missing changes, changes that were not required), the latter two in words."""
    due, made = (Counter(map(_key, changes)) for changes in (required, found))
    return (
        (due & made).total(),
        sorted(map(describe, (due - made).elements())),
        sorted(map(describe, (made - due).elements())),
    )


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
