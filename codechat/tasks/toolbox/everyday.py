"""What people ask an assistant for, in their words: services of everyday life, and further wordings for tools of the catalogue.

Both are tables, written one by one without sight of any test: everyday_services.json has functions with twelve requests each,
everyday_wordings.json sixteen more requests for most of the tools that training has; the others keep their own. A service does nothing: its
result is drawn, always the same one for the same arguments. So a model meets results and answers that it could not have computed.

No service shares a word of its name with a held-out tool. Three are about the weather, as is one of the 50 held-out tools (`storm_range`).

Left out: services in problems. The strata are those of the catalogue.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from codechat.tasks.toolbox.tool import Tool
from codechat.tasks.toolbox.values import slot

SERVICES = Path(__file__).with_name("everyday_services.json")
WORDINGS = Path(__file__).with_name("everyday_wordings.json")
VARIED = 0.5  # share of the words and names in results that are not invented
RESULTS = ("word", "word", "phrase", "name", "date:2020:2040", "time", "integer:0:9999", "number:2:900")


def _run(results: str | Sequence[str], /, **arguments: Any) -> Any:
    """One of the results, or a value of their kind: always the same one for the same arguments."""
    rng = random.Random(json.dumps(arguments, sort_keys=True))
    return slot(results).sample(rng, "train", VARIED) if isinstance(results, str) else rng.choice(results)


def with_drawn_results(rng: random.Random, tool: Tool, answer: str) -> Tool:
    """The tool with results of one kind, drawn as a service's are, and an answer that states them."""
    return replace(tool, run=partial(_run, rng.choice(RESULTS)), answer=answer)


@cache
def _services() -> tuple[tuple[Tool, tuple[str, ...]], ...]:
    made = []
    for row in json.loads(SERVICES.read_text(encoding="utf-8")):
        slots = {key: slot(kind) for key, kind in row["arguments"].items()}

        answers, run = tuple(row["answers"]), partial(_run, row["results"])
        made.append((Tool(row["name"], row["description"], slots, run, tuple(row["asks"]), (), answers[0]), answers))
    return tuple(made)


def services() -> tuple[Tool, ...]:
    """All services, in the order of the table."""
    return tuple(tool for tool, _ in _services())


@cache
def _of_split(split: str) -> tuple[tuple[Tool, tuple[str, ...]], ...]:
    """Those that have arguments of their own in a split: a few combinations of choices may all belong to training."""
    return tuple(s for s in _services() if split == "train" or any(slot.unseen for slot in s[0].slots.values()))


def draw_services(rng: random.Random, split: str, k: int) -> list[Tool]:
    """k different services, each with one of its answers."""
    return [replace(tool, answer=rng.choice(answers)) for tool, answers in rng.sample(_of_split(split), k)]


@cache
def wordings() -> dict[str, tuple[str, ...]]:
    """Tool -> its further request templates over the slots."""
    return {tool: tuple(asks) for tool, asks in json.loads(WORDINGS.read_text(encoding="utf-8")).items()}


def ask(rng: random.Random, tool: Tool, arguments: Mapping[str, Any]) -> str:
    """A request for a tool in one of its further wordings; in its own where it has none."""
    if tool.name not in wordings():
        return tool.ask(rng, arguments)
    return replace(tool, asks=wordings()[tool.name]).ask(rng, arguments)
