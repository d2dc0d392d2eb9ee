"""The base class of an app: a class over the store whose public methods are its tools.

A method's type hints and docstring give its JSON schema (`text.tool_functions.schema_of`). It returns JSON data and
raises AppError for an invalid request. `catalogue` checks arguments against the schema first, so methods may rely on
types.
"""

from __future__ import annotations

from typing import Any

from codechat.tasks.apps.store import Row, Store


class App:
    """table, key: the table and column that `_find` searches."""

    table, key = "", ""

    def __init__(self, store: Store) -> None:
        self.store = store

    def _find(self, query: str, *columns: str) -> list[Row]:
        """Rows whose key contains the query, ignoring case: `id`, the key and `columns` of each."""
        names = ("id", self.key, *columns)
        rows = self.store.all(
            f"SELECT {', '.join(names)} FROM {self.table} WHERE instr(lower({self.key}), lower(?)) ORDER BY id",
            query.strip(),
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _get(self, id: int) -> Row:
        return self.store.row(self.table, id)

    def _shown(self, id: int) -> Row:
        """The row without empty columns."""
        return {name: value for name, value in self._get(id).items() if value != ""}

    def _set(self, id: int, **values: Any) -> str:
        self.store.set(self.table, id, **values)
        return "ok"

    def _remove(self, id: int) -> str:
        self.store.remove(self.table, id)
        return "ok"

    def _count(self, where: str = "1", *values: Any) -> int:
        return self.store.one(f"SELECT count(*) FROM {self.table} WHERE {where}", *values)[0]
