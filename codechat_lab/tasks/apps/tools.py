"""The apps' state, and their tools by name. A tool is an SQL statement over the state (`tools.jsonl`); every
outcome is JSON.

Two tools belong to no app: `task_answer` answers a request, `task_decline` says that it cannot be done. Both end
the episode and add a row. The state is an in-memory SQLite database in one transaction that is never committed; a
reset rolls back. A change is ["added", table, {column: value}] (without its id), ["removed", table, id] or ["set",
table, id, column, value]."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.data.sources import read_jsonl
from codechat.text.tool_calls import escape_tags

Row = dict[str, Any]
Change = list[Any]

DATA = json.loads(Path(__file__).with_name("world.json").read_text(encoding="utf-8"))
TABLES: dict[str, dict[str, Any]] = DATA["tables"]  # columns beside `id`, with their defaults


def _create(table: str) -> str:
    columns = (
        f"{name} {'INTEGER' if isinstance(value, int) else 'TEXT'} NOT NULL DEFAULT {value!r}"
        for name, value in TABLES[table].items()
    )
    return f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(columns)})"


# What the tools' statements may call beside SQLite's functions.
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "is_address": (1, lambda text: bool(re.fullmatch("[^ @]+@[^ ]+", text))),
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
    due, done = (Counter(json.dumps(change, sort_keys=True) for change in some) for some in (required, changes))
    missing, more = (sorted(describe(json.loads(c)) for c in rest.elements()) for rest in (due - done, done - due))
    return (due & done).total(), missing, more


def describe(change: Change) -> str:
    """A change in words, such as "notes 4 removed"."""
    kind, table, *rest = change
    if kind == "added":
        (row,) = rest
        return f"{table} added: " + ", ".join(f"{k} {row[k]!r}" for k, v in TABLES[table].items() if row[k] != v)
    return f"{table} {rest[0]} removed" if kind == "removed" else f"{table} {rest[0]}: {rest[1]} = {rest[2]!r}"


KINDS: dict[str, type] = {"string": str, "integer": int}
LONGEST = 2000  # characters of an argument, and of a result
CLOSING = ("task_answer", "task_decline")


class AppError(Exception):
    """An invalid request to a tool. The caller reads the message."""


class Tool(NamedTuple):
    """schema: {"name", "description", "parameters"}. defaults: of optional parameters. gives: what a call returns:
    "ok", the "id" of the new row, the "count" of changes, "rows", "values" of one column, one "row" without its
    empty columns, or one "value". fails: the error where nothing changes."""

    app: str
    schema: dict[str, Any]
    defaults: dict[str, Any]
    gives: str
    statements: list[str]
    fails: str


def _read(row: Mapping[str, Any]) -> Tool:
    kinds = row["parameters"]
    defaults = row.get("defaults", {})
    types = {
        k: {"type": "string", "enum": kind} if isinstance(kind, list) else {"type": kind} for k, kind in kinds.items()
    }
    required = [name for name in kinds if name not in defaults]
    parameters = {"type": "object", "properties": types, "required": required}
    schema = {"name": row["name"], "description": row["description"], "parameters": parameters}
    key = next(iter(required), "")
    fails = row.get("fails", f"nothing has {key} {{{key}!r}}")
    statements = [row["sql"]] if isinstance(row["sql"], str) else row["sql"]
    return Tool(row["name"].partition("_")[0], schema, defaults, row["gives"], statements, fails)


TOOLS = {row["name"]: _read(row) for _, row in read_jsonl(Path(__file__).with_name("tools.jsonl"))}


def call(store: Store, name: str, arguments: dict[str, Any]) -> Any:
    """Run a call. AppError for an unknown name, invalid arguments and an impossible request."""
    tool = TOOLS.get(name)
    if tool is None:
        raise AppError(f"there is no function {name[:60]!r}")
    check(tool.schema["parameters"], arguments)
    values = tool.defaults | arguments
    try:
        cursors = [store.db.execute(statement, values) for statement in tool.statements]
    except (OverflowError, UnicodeEncodeError) as error:  # what SQLite cannot hold
        raise AppError(f"{name}: {error}") from None
    if tool.gives in ("ok", "id", "count"):
        if not any(cursor.rowcount > 0 for cursor in cursors):
            raise AppError(_failure(tool, values))
        return {"ok": "ok", "id": cursors[-1].lastrowid, "count": cursors[-1].rowcount}[tool.gives]
    rows = cursors[-1].fetchall()
    columns = [column[0] for column in cursors[-1].description]
    if tool.gives == "rows":
        return [dict(zip(columns, row, strict=True)) for row in rows]
    if tool.gives == "values":
        return [row[0] for row in rows]
    if not rows:
        raise AppError(_failure(tool, values))
    return rows[0][0] if tool.gives == "value" else {k: v for k, v in zip(columns, rows[0], strict=True) if v != ""}


def _failure(tool: Tool, values: Mapping[str, Any]) -> str:
    return tool.fails.format_map({k: v[:60] if isinstance(v, str) else v for k, v in values.items()})


def check(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """AppError where the arguments do not match the schema."""
    missing = [name for name in parameters["required"] if name not in arguments]
    if missing:
        raise AppError(f"{missing[0]} is missing")
    for name, value in arguments.items():
        schema = parameters["properties"].get(name)
        if schema is None:
            raise AppError(f"there is no argument {name[:40]!r}")
        if type(value) is not KINDS[schema["type"]]:
            raise AppError(f"{name} must be a {schema['type']}")
        if "enum" in schema and value not in schema["enum"]:
            raise AppError(f"{name} must be one of {', '.join(schema['enum'])}")
        if isinstance(value, str) and len(value) > LONGEST:
            raise AppError(f"{name} has {len(value)} characters; at most {LONGEST} are taken")


def as_text(key: str, value: Any) -> str:
    """{"result": ...} or {"error": ...} as JSON without chat tags, so no stored text can open a turn."""
    text = json.dumps({key: value}, ensure_ascii=False)
    if len(text) > LONGEST:
        return as_text("error", f"the result has {len(text)} characters; at most {LONGEST} can be read")
    return escape_tags(text)
