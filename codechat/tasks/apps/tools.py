"""The tools of the apps by name. A tool is an SQL statement over the store (`tools.jsonl`); every outcome is JSON data.

Arguments are checked against the tool's schema. A statement that changes nothing, or shows no row where one is needed,
is an error. Two tools belong to no app: `task_answer` gives the answer to a request, `task_decline` says that it cannot
be done. Both end the episode, and both add a row to the state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from codechat.data.sources import read_jsonl
from codechat.tasks.apps.store import Store
from codechat.text.tool_calls import escape_tags

KINDS: dict[str, type] = {"string": str, "integer": int}
LONGEST = 2000  # characters of an argument, and of a result
LARGEST = 2**53
CLOSING = ("task_answer", "task_decline")


class AppError(Exception):
    """An invalid request to a tool. The caller reads the message."""


class Tool(NamedTuple):
    """schema: {"name", "description", "parameters"}. defaults: of optional parameters. gives: what a call returns: "ok",
    the "id" of the new row, the "count" of changes, "rows", "values" of one column, one "row" without its empty columns,
    or one "value". fails: the error where nothing changes."""

    app: str
    schema: dict[str, Any]
    defaults: dict[str, Any]
    gives: str
    statements: list[str]
    fails: str


def _read(row: Mapping[str, Any]) -> Tool:
    kinds, defaults = row["parameters"], row.get("defaults", {})
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
    cursors = [store.db.execute(statement, values) for statement in tool.statements]
    if tool.gives in ("ok", "id", "count"):
        if not any(cursor.rowcount > 0 for cursor in cursors):
            raise AppError(_failure(tool, values))
        return {"ok": "ok", "id": cursors[-1].lastrowid, "count": cursors[-1].rowcount}[tool.gives]
    rows, columns = cursors[-1].fetchall(), [column[0] for column in cursors[-1].description]
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
    properties = parameters["properties"]
    for name in parameters["required"]:
        if name not in arguments:
            raise AppError(f"{name} is missing")
    for name, value in arguments.items():
        schema = properties.get(name)
        if schema is None:
            raise AppError(f"there is no argument {name[:40]!r}")
        if type(value) is not KINDS[schema["type"]]:
            raise AppError(f"{name} must be a {schema['type']}")
        if "enum" in schema and value not in schema["enum"]:
            raise AppError(f"{name} must be one of {', '.join(schema['enum'])}")
        if isinstance(value, str):
            _check_text(name, value)
        elif isinstance(value, int) and not -LARGEST < value < LARGEST:
            raise AppError(f"{name} is too large")


def _check_text(name: str, value: str) -> None:
    if len(value) > LONGEST:
        raise AppError(f"{name} has {len(value)} characters; at most {LONGEST} are taken")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise AppError(f"{name} holds half a character") from None


def as_text(key: str, value: Any) -> str:
    """{"result": ...} or {"error": ...} as JSON without chat tags, so no stored text can open a turn."""
    text = json.dumps({key: value}, ensure_ascii=False)
    if len(text) > LONGEST:
        return as_text("error", f"the result has {len(text)} characters; at most {LONGEST} can be read")
    return escape_tags(text)
