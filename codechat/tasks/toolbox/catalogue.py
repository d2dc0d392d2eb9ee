"""All tools by name, how to run one, and which of them could serve the same request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from codechat.tasks.toolbox import (
    arithmetic,
    colours,
    dates,
    encodings,
    geometry,
    money,
    names,
    statistics,
    text,
    units,
)
from codechat.tasks.toolbox.tool import Tool, ToolError

THEMES = (arithmetic, units, dates, text, statistics, geometry, colours, encodings, money, names)
TOOLS: dict[str, Tool] = {t.name: t for theme in THEMES for t in vars(theme).values() if isinstance(t, Tool)}
# Tools that could serve the same request are never offered together: the correct call would be ambiguous.
FAMILIES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "add total",
        "double multiply square cube power rectangle_area",
        "halve split_bill",
        "to_binary to_base",
        "uppercase change_case",
        "to_metres convert_length",
        "initials acronym",
        "greet greet_in",
        "is_prime factorize",
        "reverse_text is_palindrome",
        "tip discount add_tax percentage",
        "hex_to_rgb color_channel",
        "slug url_escape",
        "largest smallest sort_numbers median",
        "total mean",
        "circle_area circumference",
        "user_name email_for",
        "is_leap_year month_days",
    )
)


def execute(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """{"result": JSON value} of a tool. ToolError for an unknown tool and for invalid arguments."""
    if name not in TOOLS:
        raise ToolError(f"there is no function {str(name)[:60]!r}")
    return {"result": TOOLS[name].call(arguments)}


def respond(name: str, arguments: Mapping[str, Any]) -> str:
    """The content of a function response: {"result": ...} or {"error": message} as JSON text."""
    try:
        return response(execute(name, arguments)["result"])
    except ToolError as error:
        return json.dumps({"error": str(error)}, ensure_ascii=False)


def response(result: Any) -> str:
    """The content of a function response that holds a result."""
    return json.dumps({"result": result}, ensure_ascii=False)


def family(name: str) -> frozenset[str]:
    """The tool and all tools that could serve its requests."""
    return frozenset({name}).union(*(f for f in FAMILIES if name in f))
