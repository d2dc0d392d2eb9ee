"""One tool: schema, implementation, argument sampler and the ways to ask for it.

The json files hold descriptions, arguments by the kinds of `values.slot`, what is computed, limits, requests (asks, and hard
for test_hard) and answers. Every parameter is required; optional ones would make the correct call ambiguous.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from codechat.tasks.toolbox.values import Slot, parts, whole

MAX_TEXT, MAX_ITEMS, MAX_NUMBER = 1000, 1000, 1e15


class ToolError(ValueError):
    """Invalid arguments of a tool. The caller reads the message."""


@dataclass(frozen=True)
class Tool:
    """asks, hard_asks: request templates over the slots (hard_asks only in test_hard). answers: templates that also
    know {result}; the first is used. limits: argument -> [least, most], of which one may be another argument's name; or a
    pattern. adjust: (rng, arguments) -> arguments that depend on one another. alias, keys: other names of the tool and of
    some of its arguments in one conversation."""

    name: str
    description: str
    slots: Mapping[str, Slot]
    run: Callable[..., Any]
    asks: Sequence[str]
    answers: Sequence[str]
    hard_asks: Sequence[str] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    adjust: Callable[[random.Random, dict[str, Any]], dict[str, Any]] | None = None
    alias: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """{"name", "description", "parameters": JSON schema}, as the conversation offers it."""
        properties = {self.keys.get(key, key): dict(slot.schema) for key, slot in self.slots.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"name": self.alias or self.name, "description": self.description, "parameters": parameters}

    def written(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """{"name", "arguments"} of a call, as the conversation names them."""
        named = {self.keys.get(key, key): value for key, value in arguments.items()}
        return {"name": self.alias or self.name, "arguments": named}

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

    def ask(self, rng: random.Random, arguments: Mapping[str, Any], asks: Sequence[str] = ()) -> str:
        """A request in words, in one of `asks` instead of the tool's own where there are any."""
        template = rng.choice(asks or self.asks)
        return template.format(**{k: self.slots[k].say(rng, v) for k, v in arguments.items()})

    def report(self, arguments: Mapping[str, Any], result: Any) -> str:
        """A short answer in words with the result."""
        return self.answers[0].format(result=say(result), **{k: say(v) for k, v in arguments.items()})

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Check the arguments against the schema and the limits, and run. ToolError names the fault."""
        if arguments.keys() != self.slots.keys():
            given = ", ".join(map(str, arguments))[:100]
            raise ToolError(f"{self.name} takes ({', '.join(self.slots)}), not ({given})")
        checked = {k: check(k, arguments[k], slot.schema) for k, slot in self.slots.items()}
        for key, limit in self.limits.items():
            if isinstance(limit, str):
                if not re.fullmatch(limit, checked[key]):
                    raise ToolError(f"{key} must match {limit}")
                continue
            least, most = (checked.get(bound, bound) for bound in limit)
            if not all(least <= value <= most for value in parts(checked[key])):
                raise ToolError(f"{key} must be between {least} and {most}")
        try:
            return self.run(**checked)
        except (ArithmeticError, LookupError, ValueError) as error:
            raise ToolError(f"{self.name}: {str(error)[:200]}") from error


def check(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """The value in the type of its schema (2.0 becomes 2 for an integer). ToolError where it does not match."""
    kind = schema["type"]
    if kind == "array":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_ITEMS:
            raise ToolError(f"{name} must be a list of 1 to {MAX_ITEMS} items")
        return [check(f"{name}[{i}]", item, schema["items"]) for i, item in enumerate(value)]
    if kind == "string":
        fits = isinstance(value, str) and len(value) <= MAX_TEXT
    else:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
        fits = fits and (kind == "number" or value == int(value))
    if not fits:
        raise ToolError(f"{name} must be {'an' if kind == 'integer' else 'a'} {kind} of sensible size")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} must be one of {', '.join(map(str, schema['enum']))}")
    return int(value) if kind == "integer" else value


def neat(value: float, digits: int = 4) -> int | float:
    """The number rounded, as an int if it is whole. ToolError where it is not finite."""
    if isinstance(value, complex) or not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded


def say(value: Any) -> str:
    """A result in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(say, value)) if isinstance(value, list) else str(value)
