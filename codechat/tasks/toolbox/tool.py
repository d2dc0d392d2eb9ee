"""One tool: schema, implementation, argument sampler and the ways to ask for it.

tools.json and held_out_tools.json hold descriptions, arguments by the kinds of `values.slot`, limits, requests (asks, and
hard for test_hard) and answers. Every parameter is required; optional ones would make the correct call ambiguous.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from codechat.tasks.toolbox.values import Slot, slot, whole

MAX_TEXT, MAX_ITEMS, MAX_NUMBER = 1000, 1000, 1e15
LEVELS = (1, 2, 3)


class ToolError(ValueError):
    """Invalid arguments of a tool. The caller reads the message."""


@dataclass(frozen=True)
class Tool:
    """asks, hard_asks: request templates over the slots (hard_asks only in test_hard). answer: a template that also
    knows {result}. limits: argument -> [least, most]. adjust: (rng, arguments) -> arguments that depend on one another."""

    name: str
    description: str
    slots: Mapping[str, Slot]
    run: Callable[..., Any]
    asks: tuple[str, ...]
    hard_asks: tuple[str, ...]
    answer: str
    limits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    adjust: Callable[[random.Random, dict[str, Any]], dict[str, Any]] | None = None

    @cached_property
    def schema(self) -> dict[str, Any]:
        """{"name", "description", "parameters": JSON schema}."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": {k: dict(s.schema) for k, s in self.slots.items()},
                "required": list(self.slots),
            },
        }

    @cached_property
    def level(self) -> int:
        """1: one copied word or number. 2: two, or one and a translated choice. 3: more, lists, phrases."""
        return min(3, sum(slot.cost for slot in self.slots.values()))

    def sample(self, rng: random.Random, split: str, varied: float = 0.0) -> dict[str, Any]:
        """Arguments that only `split` uses, in schema order. Two enumerations never take the same value.

        varied: share of the words and names from further afield (`Slot.varied`)."""
        while True:
            arguments = {name: slot.sample(rng, split, varied) for name, slot in self.slots.items()}
            if self.adjust:
                arguments = self.adjust(rng, arguments)
            chosen = [v for k, v in arguments.items() if "enum" in self.slots[k].schema]
            decided = any(self.slots[k].decides(v) for k, v in arguments.items()) or whole(arguments, split)
            if decided and len(set(chosen)) == len(chosen):
                return arguments

    def ask(self, rng: random.Random, arguments: Mapping[str, Any], hard: bool = False) -> str:
        """A request in words. hard: in a phrasing that training never sees."""
        template = rng.choice(self.hard_asks if hard else self.asks)
        return template.format(**{k: self.slots[k].say(rng, v) for k, v in arguments.items()})

    def report(self, arguments: Mapping[str, Any], result: Any) -> str:
        """A short answer in words with the result."""
        return self.answer.format(result=say(result), **{k: say(v) for k, v in arguments.items()})

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Check the arguments against the schema and run. ToolError names the fault."""
        if not isinstance(arguments, Mapping):
            raise ToolError(f"{self.name}: arguments must be an object")
        missing = [k for k in self.slots if k not in arguments]
        unknown = [str(k) for k in arguments if k not in self.slots]
        if missing or unknown:
            problem = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)[:100]}"
            raise ToolError(f"{self.name}({', '.join(self.slots)}): {problem}")
        checked = {k: check(k, arguments[k], slot.schema) for k, slot in self.slots.items()}
        for key, (least, most) in self.limits.items():
            need_within(least, most, **{key: checked[key]})
        try:
            return self.run(**checked)
        except (OverflowError, ZeroDivisionError) as error:
            raise ToolError(f"{self.name}: {error}") from error


def check(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """The value in the type of its schema (2.0 becomes 2 for an integer). ToolError where it does not match."""
    kind = schema["type"]
    if kind == "array":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_ITEMS:
            raise ToolError(f"{name} must be a list of 1 to {MAX_ITEMS} items")
        return [check(f"{name}[{i}]", item, schema["items"]) for i, item in enumerate(value)]
    if kind == "boolean":
        fits = isinstance(value, bool)
    elif kind == "string":
        fits = isinstance(value, str) and len(value) <= MAX_TEXT
    else:
        fits = _is_number(value) and (kind == "number" or value == int(value))
    if not fits:
        raise ToolError(f"{name} must be {'an' if kind[0] in 'aio' else 'a'} {kind} of sensible size")
    if kind == "integer":
        value = int(value)
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} must be one of {', '.join(map(str, schema['enum']))}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def neat(value: float, digits: int = 4) -> int | float:
    """The number rounded, as an int if it is whole. ToolError where it is not finite."""
    if isinstance(value, complex) or not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded


def need_within(low: float, high: float, **values: float) -> None:
    """ToolError for a value that is not between the bounds."""
    for name, value in values.items():
        if not low <= value <= high:
            raise ToolError(f"{name} must be between {low} and {high}")


def say(value: Any) -> str:
    """A result in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(say(v) for v in value) if isinstance(value, list) else str(value)


def read_tools(path: Path, functions: Any) -> tuple[Tool, ...]:
    """The tools of a json file; `functions`, a module, has what they compute."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Tool(
            name,
            row["description"],
            {key: slot(kind) for key, kind in row["arguments"].items()},
            functions.RUN.get(name) or getattr(functions, name),
            tuple(row["asks"]),
            tuple(row["hard"]),
            row["answer"],
            row.get("limits", {}),
        )
        for name, row in rows.items()
    )
