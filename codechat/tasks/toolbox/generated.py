"""Tools made from tables: composed ones that really run, and invented ones that only a description explains.

The hand-written tools (`catalogue`) are too few to teach reading: a model can remember their names. Composed tools are several hundred small
functions (unit pairs, fixed factors, letters of a word), each with its own name. Invented tools pair a verb with a thing and are drawn for
one conversation: nothing but the line in the list says how such a tool is called.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from functools import cache
from string import Template
from typing import Any

from codechat.tasks.toolbox.catalogue import PHRASES, read
from codechat.tasks.toolbox.tool import Tool, neat
from codechat.tasks.toolbox.values import COMMON, VERBS, allowed, draw_word, invent, slot

WAYS = {"times": operator.mul, "plus": operator.add, "minus": operator.sub, "over": operator.truediv}
THINGS = [w for w in COMMON if w not in VERBS]
ARGUMENTS = (
    ("n", "integer:2:9999"),
    ("count", "integer:2:90"),
    ("size", "number:2:900"),
    ("word", "word"),
    ("name", "name"),
    ("owner", "name"),
    ("code", "word"),
    ("text", "phrase:2:3"),
    ("day", "date"),
    ("time", "time"),
)


@cache
def composed() -> tuple[Tool, ...]:
    """All composed tools, in a fixed order."""
    table = read("composed_tools.json")

    def tool(kind: str, run: Callable[..., Any], **words: str) -> Tool:
        row = table["tools"][kind]
        slots = {key: slot(values) for key, values in row["arguments"].items()}
        texts = (row["name"], row["description"], row["answer"], *row["asks"])
        name, description, answer, *asks = (Template(text).substitute(words) for text in texts)
        return Tool(name, description, slots, run, asks, [answer])

    tools = [
        tool("convert", lambda x, by=per_a / per_b: neat(x * by, 6), a=a, b=b)
        for units in table["units"]  # one unit of each in the first unit of its row
        for a, per_a in units.items()
        for b, per_b in units.items()
        if a != b
    ]
    for k, count in enumerate(table["counts"], start=2):
        tools += [tool(way, lambda x, k=k, run=run: neat(run(x, k)), count=count) for way, run in WAYS.items()]
    for at, ordinal in enumerate(table["ordinals"]):
        tools.append(tool("letter", lambda word, at=at: word[at], ordinal=ordinal))
    for letter in table["letters"]:
        tools.append(tool("without", lambda word, letter=letter: word.replace(letter, ""), letter=letter))
        tools.append(tool("starts", lambda word, letter=letter: word.lower().startswith(letter), letter=letter))
    return tuple(tools)


def invented(
    rng: random.Random, split: str, verb: str | None = None, thing: str | None = None, rare: float = 0.0
) -> Tool:
    """A tool for one conversation: what it does is said by two words of its description; half of the names say it too. Names belong to splits, as values do."""
    verb, thing = verb or rng.choice(VERBS), thing or draw_word(rng, rare, THINGS)
    slots = {key: slot(kind) for key, kind in rng.sample(ARGUMENTS, rng.choice((1, 1, 1, 2, 2, 3)))}
    values = ", ".join(f"{{{key}}}" for key in slots)  # in the order of the list: names may differ
    name = ""
    while not name or not allowed(name, split):
        name = rng.choice((f"{verb}_{thing}", f"{thing}_{verb}")) if rng.random() < 0.5 else invent(rng)
    words = dict(verb=verb, thing=thing, Verb=verb.capitalize(), Thing=thing.capitalize(), values=values)
    asks = [ask.format(**words) for ask in PHRASES["invented_asks"]]
    description = rng.choice(PHRASES["invented_descriptions"]).format(**words)
    return Tool(name, description, slots, lambda **given: "done", asks, ["It is done."])


def invented_offer(rng: random.Random, split: str, k: int, rare: float = 0.0) -> list[Tool]:
    """k invented tools; half of them share the first one's verb or its thing, so that both words must be read."""
    offered = [invented(rng, split, rare=rare)]
    verb, thing = words_of(offered[0])
    while len(offered) < k:
        draw = rng.random()
        other = invented(rng, split, verb if draw < 0.25 else None, thing if 0.25 <= draw < 0.5 else None, rare)
        if all(words_of(other) != words_of(tool) and other.name != tool.name for tool in offered):
            offered.append(other)
    return offered


def words_of(tool: Tool) -> tuple[str, str]:
    """(verb, thing) of an invented tool."""
    words = tool.description.lower().split()
    return next(w for w in words if w in VERBS), words[-1]
