"""All tools by name, how to run one, and which tools could serve the same request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from codechat.tasks.toolbox import functions, held_out_functions
from codechat.tasks.toolbox.tool import Tool, ToolError, read_tools

_HERE = Path(__file__).parent
SEEN = tuple(
    replace(tool, adjust=functions.old_from_text) if tool.name == "replace_word" else tool
    for tool in read_tools(_HERE / "tools.json", functions)
)
HELD_OUT = read_tools(
    _HERE / "held_out_tools.json", held_out_functions
)  # in test_hard only, elsewhere not even offered
TOOLS: dict[str, Tool] = {t.name: t for t in (*SEEN, *HELD_OUT)}
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
def tools_of(split: str, level: int | None = None) -> tuple[Tool, ...]:
    """The tools that a split may offer, or those of a level."""
    tools = (*SEEN, *HELD_OUT) if split == "test_hard" else SEEN
    return tuple(t for t in tools if level in (None, t.level))


def draw_others(rng: random.Random, split: str, tools: Iterable[Tool], k: int) -> list[Tool]:
    """k tools that could not serve a request for any of `tools`, nor for one another."""
    taken, others = set().union(*(family(t.name) for t in tools)), list[Tool]()
    while len(others) < k:
        other = rng.choice(tools_of(split))
        if other.name not in taken:
            others.append(other)
            taken |= family(other.name)
    return others


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
