"""The apps' state, and their tools by name. A tool is an SQL statement over the state
(`tools.jsonl`); every outcome is JSON.

Two tools belong to no app: `task_answer` answers a request, `task_decline` says that it cannot
be done. Both end the episode and add a row. The state is an in-memory SQLite database in one
transaction that is never committed; a reset rolls back. A change is ["added", table, {column:
value}] (without its id), ["removed", table, id] or ["set", table, id, column, value]."""

import inspect
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.data.sources import read_jsonl
from codechat.text.tool_calls import escape_tags

Row = dict[str, Any]
Change = list[Any]

DATA = json.loads(Path(__file__).with_name("world.json").read_text(encoding="utf-8"))
TABLES: dict[str, dict[str, Any]] = DATA["tables"]  # columns beside `id`, with their defaults


def _create(table: str) -> str:
    columns = ["id INTEGER PRIMARY KEY"]
    for name, value in TABLES[table].items():
        columns.append(
            f"{name} {'INTEGER' if isinstance(value, int) else 'TEXT'} NOT NULL DEFAULT {value!r}"
        )
    return f"CREATE TABLE {table} ({', '.join(columns)})"


# What the tools' statements may call beside SQLite's functions.


def is_address(text: str) -> bool:
    return bool(re.fullmatch("[^ @]+@[^ ]+", text))


def joined(text: str, more: str) -> str:
    return f"{text} {more}".strip()


def plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


class Store:
    """Tables of one episode, filled by `reset`."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        for function in (is_address, joined, plain):
            arguments = len(inspect.signature(function).parameters)
            self.db.create_function(function.__name__, arguments, function, deterministic=True)
        # Before the transaction: one that creates tables rolls back ten times slower.
        self.db.executescript(";".join(map(_create, TABLES)))
        self.db.execute("BEGIN")
        self.db.execute("SAVEPOINT empty")

    def reset(self, world: Mapping[str, Sequence[Row]]) -> None:
        """Hold the rows of `world` and nothing else. Missing columns get their default."""
        self.db.execute("ROLLBACK TO empty")
        for table, rows in world.items():
            columns = ("id", *TABLES[table])
            values = ", ".join(f":{name}" for name in columns)
            self.db.executemany(
                f"INSERT INTO {table} VALUES ({values})",
                [{"id": 0} | TABLES[table] | row for row in rows],
            )
        self.start = self._rows()

    def _rows(self) -> dict[str, dict[int, tuple[Any, ...]]]:
        """Every row of every table, by id."""
        every: dict[str, dict[int, tuple[Any, ...]]] = {}
        for table in TABLES:
            every[table] = {row[0]: row for row in self.db.execute(f"SELECT * FROM {table}")}
        return every

    def diff(self) -> list[Change]:
        """The changes since the reset, in order of tables and rows."""
        changes: list[Change] = []
        for table, now in self._rows().items():
            if now != self.start[table]:
                changes += _changes(table, self.start[table], now)
        return changes


def _changes(
    table: str, was: Mapping[int, tuple[Any, ...]], now: Mapping[int, tuple[Any, ...]]
) -> Iterable[Change]:
    names = ("id", *TABLES[table])
    for id in sorted(was.keys() | now.keys()):
        if id not in now:
            yield ["removed", table, id]
        elif id not in was:
            yield ["added", table, dict(zip(names[1:], now[id][1:], strict=True))]
        else:
            for name, old, new in zip(names, was[id], now[id], strict=True):
                if old != new:
                    yield ["set", table, id, name, new]


class Comparison(NamedTuple):
    """matched: how many required changes were made. missing, collateral: required changes that
    were not made, and changes that were not required, in words."""

    matched: int
    missing: list[str]
    collateral: list[str]


def compare(required: Iterable[Change], changes: Iterable[Change]) -> Comparison:
    due = _counted(required)
    done = _counted(changes)
    return Comparison((due & done).total(), _in_words(due - done), _in_words(done - due))


def _counted(changes: Iterable[Change]) -> Counter[str]:
    return Counter(json.dumps(change, sort_keys=True) for change in changes)


def _in_words(counted: Counter[str]) -> list[str]:
    return sorted(describe(json.loads(change)) for change in counted.elements())


def describe(change: Change) -> str:
    """A change in words, such as "notes 4 removed"."""
    match change:
        case ["added", table, row]:
            told = [
                f"{name} {row[name]!r}"
                for name, default in TABLES[table].items()
                if row[name] != default
            ]
            return f"{table} added: {', '.join(told)}"
        case ["removed", table, id]:
            return f"{table} {id} removed"
        case [_, table, id, column, value]:
            return f"{table} {id}: {column} = {value!r}"
    raise ValueError(f"got {change}; expected a change as `Store.diff` gives it")


KINDS: dict[str, type] = {"string": str, "integer": int}
LONGEST = 2000  # characters of an argument, and of a result
CLOSING = ("task_answer", "task_decline")


class AppError(Exception):
    """An invalid request to a tool. The caller reads the message."""


class Tool(NamedTuple):
    """schema: {"name", "description", "parameters"}. defaults: of optional parameters. gives:
    what a call returns: "ok", the "id" of the new row, the "count" of changes, "rows", "values"
    of one column, one "row" without its empty columns, or one "value". fails: the error where
    nothing changes."""

    app: str
    schema: dict[str, Any]
    defaults: dict[str, Any]
    gives: str
    statements: list[str]
    fails: str


def _read(row: Mapping[str, Any]) -> Tool:
    defaults = row.get("defaults", {})
    types: dict[str, Any] = {}
    for name, kind in row["parameters"].items():
        types[name] = {"type": "string", "enum": kind} if isinstance(kind, list) else {"type": kind}
    required = [name for name in types if name not in defaults]
    parameters = {"type": "object", "properties": types, "required": required}
    key = next(iter(required), "")
    return Tool(
        app=row["name"].partition("_")[0],
        schema={"name": row["name"], "description": row["description"], "parameters": parameters},
        defaults=defaults,
        gives=row["gives"],
        statements=[row["sql"]] if isinstance(row["sql"], str) else row["sql"],
        fails=row.get("fails", f"nothing has {key} {{{key}!r}}"),
    )


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
    last = cursors[-1]
    changes = {"ok": "ok", "id": last.lastrowid, "count": last.rowcount}
    if tool.gives in changes:
        if not any(cursor.rowcount > 0 for cursor in cursors):
            raise AppError(_failure(tool, values))
        return changes[tool.gives]
    columns = [column[0] for column in last.description]
    rows = [dict(zip(columns, row, strict=True)) for row in last]
    if tool.gives == "rows":
        return rows
    if tool.gives == "values":
        return [row[columns[0]] for row in rows]
    if not rows:
        raise AppError(_failure(tool, values))
    if tool.gives == "value":
        return rows[0][columns[0]]
    return {column: value for column, value in rows[0].items() if value != ""}


def _failure(tool: Tool, values: Mapping[str, Any]) -> str:
    short = {
        name: value[:60] if isinstance(value, str) else value for name, value in values.items()
    }
    return tool.fails.format_map(short)


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
    """{"result": ...} or {"error": ...} as JSON without chat tags, so no stored text can open a
    turn."""
    text = json.dumps({key: value}, ensure_ascii=False)
    if len(text) > LONGEST:
        return as_text(
            "error", f"the result has {len(text)} characters; at most {LONGEST} can be read"
        )
    return escape_tags(text)
