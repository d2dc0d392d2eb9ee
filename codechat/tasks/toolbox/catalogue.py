"""All tools by name, the editions of the catalogue, how to run a tool, and which tools could serve the same request.

An edition is a pool of tools and says which of them it holds out. A tool flagged `held_out` is held out by the edition
that adds it; later editions train on it. So data of an older edition stays the same when tools are added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from codechat.core.errors import ConfigError
from codechat.tasks.toolbox import functions, unseen_functions
from codechat.tasks.toolbox.tool import Tool, ToolError

# Edition -> the tools that it adds.
_ADDED: dict[int, dict[str, Tool]] = {
    1: {t.name: t for t in functions.TOOLS},
    2: {t.name: t for t in unseen_functions.TOOLS},
}
EDITIONS = tuple(_ADDED)
# Of all editions.
TOOLS: dict[str, Tool] = {name: t for added in _ADDED.values() for name, t in added.items()}
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
        "back_bearing compass_rose",
    )
)


@lru_cache
def tools_of(edition: int = 1, held_out: bool | None = None) -> tuple[Tool, ...]:
    """The tools of an edition. held_out: only those that it holds out (True) or trains on (False). ConfigError for an
    unknown edition."""
    if edition not in EDITIONS:
        raise ConfigError(f"edition {edition} of the toolbox; it must be one of {', '.join(map(str, EDITIONS))}")
    pool = (t for number in EDITIONS if number <= edition for t in _ADDED[number].values())
    return tuple(t for t in pool if held_out in (None, t.held_out and t.name in _ADDED[edition]))


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
