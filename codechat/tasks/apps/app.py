"""What an app is: a class over the store whose public methods are its tools.

A method's type hints and docstring are its JSON schema (`executors.schema_of`); what it returns is json data; what it refuses is an AppError. The
store is never touched before the arguments have been checked against the schema (`catalogue`), so methods may rely on types.
"""

from __future__ import annotations

from typing import Any

from codechat.tasks.apps.store import Row, Store


class App:
    """table, key: where `_find` looks."""

    table, key = "", ""

    def __init__(self, store: Store) -> None:
        self.store = store

    def _find(self, query: str, *columns: str) -> list[Row]:
        """Rows whose key holds the query, without regard to case; `id`, the key and further columns of each."""
        names = ("id", self.key, *columns)
        rows = self.store.all(
            f"SELECT {', '.join(names)} FROM {self.table} WHERE instr(lower({self.key}), lower(?)) ORDER BY id",
            query.strip(),
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _get(self, id: int) -> Row:
        return self.store.row(self.table, id)

    def _shown(self, id: int) -> Row:
        """The row as its reader gets it: without what is empty."""
        return {name: value for name, value in self._get(id).items() if value != ""}

    def _set(self, id: int, **values: Any) -> str:
        self.store.set(self.table, id, **values)
        return "ok"

    def _remove(self, id: int) -> str:
        self.store.remove(self.table, id)
        return "ok"

    def _count(self, where: str = "1", *values: Any) -> int:
        return self.store.one(f"SELECT count(*) FROM {self.table} WHERE {where}", *values)[0]
