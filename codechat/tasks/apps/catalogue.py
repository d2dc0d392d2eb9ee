"""The tools by name, and the only way to call them: arguments are checked against the schema, and every outcome is JSON
data.

A name joins the app and the method: `notes_add`; in code it is `apis.notes.add`. Two tools belong to no app:
`task_answer` gives the answer to a request, `task_decline` says that it cannot be done. Both end the episode, and both
add a row to the state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from codechat.tasks.apps.app import App
from codechat.tasks.apps.people import Contacts, Mail
from codechat.tasks.apps.plans import Calendar, Notes
from codechat.tasks.apps.store import AppError, Store
from codechat.tasks.apps.things import Files, Shop
from codechat.text.tool_calls import escape_tags
from codechat.text.tool_functions import schema_of

KINDS: dict[str, type] = {"string": str, "integer": int}
LONGEST = 2000  # characters of an argument, and of a result
LARGEST = 2**53


class Task(App):
    """The tools that end an episode."""

    def answer(self, text: str) -> str:
        """Give the answer"""
        self.store.insert("outcome", kind="answer", text=" ".join(text.casefold().split()).rstrip("."))
        return "ok"

    def decline(self) -> str:
        """Say that it cannot be done"""
        self.store.insert("outcome", kind="declined")
        return "ok"


APPS: dict[str, type[App]] = {
    "mail": Mail,
    "calendar": Calendar,
    "contacts": Contacts,
    "notes": Notes,
    "shop": Shop,
    "files": Files,
    "task": Task,
}
CLOSING = ("task_answer", "task_decline")


class Tool(NamedTuple):
    """schema: {"name", "description", "parameters"}. method: called on the episode's app."""

    app: str
    method: Callable[..., Any]
    schema: dict[str, Any]


def _tools() -> dict[str, Tool]:
    found = {}
    for app, kind in APPS.items():
        for name, method in vars(kind).items():
            if not name.startswith("_") and callable(method):
                schema = schema_of(getattr(kind(None), name))  # type: ignore[arg-type]  # bound: self is no parameter
                found[f"{app}_{name}"] = Tool(app, method, schema | {"name": f"{app}_{name}"})
    return found


TOOLS = _tools()


class Desk:
    """The apps of one episode over its store."""

    def __init__(self, store: Store) -> None:
        self.apps = {name: kind(store) for name, kind in APPS.items()}

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a call. AppError for an unknown name, invalid arguments and an impossible request."""
        tool = TOOLS.get(name)
        if tool is None:
            raise AppError(f"there is no function {name[:60]!r}")
        check(tool.schema["parameters"], arguments)
        return tool.method(self.apps[tool.app], **arguments)


def check(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """AppError where the arguments do not match the schema."""
    if not isinstance(arguments, Mapping):  # code can reach the tools past their signatures, with any value
        raise AppError(f"the arguments are of type {type(arguments).__name__}; required: an object of names and values")
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
        if type(value) is str:
            _check_text(name, value)
        elif not -LARGEST < value < LARGEST:
            raise AppError(f"{name} is too large")


def _check_text(name: str, value: str) -> None:
    if len(value) > LONGEST:
        raise AppError(f"{name} has {len(value)} characters; at most {LONGEST} are taken")
    if not value.isascii():
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
