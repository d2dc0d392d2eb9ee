"""Tools made from tables: composed ones that really run, and invented ones that only a description explains.

The hand-written tools (`catalogue`) are too few to teach reading: a model can remember their names. Composed tools are several hundred small
functions (unit pairs, fixed factors, letters of a word), each with its own name. Invented tools pair a verb with a thing and are drawn for
one conversation: nothing but the line in the list says how such a tool is called.

Left out: composed tools in test_hard, whose unseen tools are written by hand (`unseen`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from codechat.tasks.toolbox.tool import Tool, ToolError, neat
from codechat.tasks.toolbox.values import (
    COMMON,
    Slot,
    allowed,
    clock,
    date,
    draw_word,
    integer,
    invent,
    name,
    number,
    phrase,
    word,
)

# ---------------------------------------------------------------- composed

# One unit of each in the first unit of its row.
UNITS: tuple[dict[str, float], ...] = (
    dict(metres=1, millimetres=1e-3, centimetres=1e-2, kilometres=1e3, inches=0.0254, feet=0.3048, yards=0.9144, miles=1609.344),
    dict(grams=1, milligrams=1e-3, kilograms=1e3, tonnes=1e6, ounces=28.349523, pounds=453.59237, stones=6350.29318),
    dict(seconds=1, minutes=60, hours=3600, days=86400, weeks=604800),
    dict(litres=1, millilitres=1e-3, cups=0.24, pints=0.568261, gallons=4.54609),
    dict(hectares=1, acres=0.404686, ares=0.01),
    dict(joules=1, kilojoules=1e3, calories=4.184),
    dict(pascals=1, bars=1e5, atmospheres=101325),
)  # fmt: skip
COUNTS = "two three four five six seven eight nine ten eleven twelve".split()
ORDINALS = "first second third fourth fifth".split()
LETTERS = "abcdefghiklmnoprstuw"


def _made(
    name: str, description: str, slots: dict[str, Slot], run: Callable[..., Any], asks: tuple[str, ...], answer: str
) -> Tool:
    return Tool(name, description, slots, run, asks, (), answer)


def _converters() -> Iterator[Tool]:
    for units in UNITS:
        for a, per_a in units.items():
            for b, per_b in units.items():
                if a != b:
                    yield _made(
                        f"{a}_to_{b}",
                        f"Convert {a} to {b}",
                        {"x": number(2, 900)},
                        lambda x, by=per_a / per_b: neat(x * by, 6),
                        (
                            f"Convert {{x}} {a} to {b}.",
                            f"How many {b} are {{x}} {a}?",
                            f"What is {{x}} {a} in {b}?",
                            f"{{x}} {a} to {b}, please.",
                        ),
                        f"{{x}} {a} are {{result}} {b}.",
                    )


def _factors() -> Iterator[Tool]:
    ways: tuple[tuple[str, str, tuple[str, ...], Callable[[float, int], float]], ...] = (
        ("times", "Multiply by {}", ("Multiply {{x}} by {}.", "What is {{x}} times {}?"), lambda x, k: x * k),
        ("plus", "Add {} to a number", ("Add {} to {{x}}.", "What is {{x}} plus {}?"), lambda x, k: x + k),
        ("minus", "Take {} from a number", ("Take {} from {{x}}.", "What is {{x}} minus {}?"), lambda x, k: x - k),
        ("over", "Divide by {}", ("Divide {{x}} by {}.", "What is {{x}} over {}?"), lambda x, k: x / k),
    )
    for k, count in enumerate(COUNTS, start=2):
        for title, description, asks, run in ways:
            yield _made(
                f"{title}_{count}",
                description.format(count),
                {"x": number(3, 900)},
                lambda x, k=k, run=run: neat(run(x, k)),
                tuple(ask.format(count) for ask in asks) + (f"{{x}} {title} {count}?",),
                "It is {result}.",
            )


def _letters() -> Iterator[Tool]:
    def nth(word: str, at: int) -> str:
        if len(word) <= at:
            raise ToolError(f"word must have at least {at + 1} letters")
        return word[at]

    for at, ordinal in enumerate(ORDINALS[:4]):
        yield _made(
            f"{ordinal}_letter",
            f"The {ordinal} letter of a word",
            {"word": word()},
            lambda word, at=at: nth(word, at),
            (
                f'What is the {ordinal} letter of "{{word}}"?',
                f"Give me the {ordinal} letter in {{word}}.",
                f"{{word}}: {ordinal} letter?",
            ),
            "It is {result}.",
        )
    for letter in LETTERS:
        yield _made(
            f"without_{letter}",
            f"Remove the letter {letter} from a word",
            {"word": word()},
            lambda word, letter=letter: word.replace(letter, ""),
            (
                f'Remove the letter {letter} from "{{word}}".',
                f"Take every {letter} out of {{word}}.",
                f"{{word}} without the letter {letter}?",
            ),
            "{result}",
        )
        yield _made(
            f"starts_with_{letter}",
            f"Check if a word starts with {letter}",
            {"word": word()},
            lambda word, letter=letter: word.lower().startswith(letter),
            (
                f'Does "{{word}}" start with {letter}?',
                f"Check if {{word}} starts with {letter}.",
                f"Is {letter} the start of {{word}}?",
            ),
            "{result}",
        )


@cache
def composed() -> tuple[Tool, ...]:
    """All composed tools, in a fixed order."""
    return (*_converters(), *_factors(), *_letters())


# ---------------------------------------------------------------- invented

VERBS = """book call check clean close count cut drive find fix hide hold lift load mark mix move open order pack
paint park pick plant play print pull push rent sell send ship show sign sort stack stop store test wash wrap""".split()
THINGS = tuple(w for w in COMMON if w not in VERBS)
ASKS = (
    "{verb} the {thing} {values}.",
    "Please {verb} the {thing} {values}.",
    "Can you {verb} the {thing} {values}?",
    "I want to {verb} the {thing} {values}.",
    "{thing} {values}: {verb} it.",
    "Go and {verb} the {thing} {values}.",
)
DESCRIPTIONS = ("{Verb} the {thing}", "{Verb} a {thing}", "Use this to {verb} the {thing}", "{Verb} {thing}")
ARGUMENTS: tuple[tuple[str, Callable[[], Slot]], ...] = (
    ("n", lambda: integer(2, 9999)),
    ("count", lambda: integer(2, 90)),
    ("size", lambda: number(2, 900)),
    ("word", word),
    ("name", name),
    ("owner", name),
    ("code", word),
    ("text", lambda: phrase(2, 3)),
    ("day", date),
    ("time", clock),
)


def invented(
    rng: random.Random, split: str, verb: str | None = None, thing: str | None = None, rare: float = 0.0
) -> Tool:
    """A tool for one conversation: what it does is said by two words of its description; half of the names say it too. Names belong to splits, as values do."""
    verb, thing = verb or rng.choice(VERBS), thing or draw_word(rng, rare, THINGS)
    slots = dict((key, make()) for key, make in rng.sample(ARGUMENTS, rng.choice((1, 1, 1, 2, 2, 3))))
    values = ", ".join(f"{{{key}}}" for key in slots)  # in the order of the list: names may differ
    title = ""
    while not allowed(title, split) or not title:
        title = rng.choice((f"{verb}_{thing}", f"{thing}_{verb}")) if rng.random() < 0.5 else invent(rng)
    words = dict(verb=verb, thing=thing, Verb=verb.capitalize())
    asks = tuple(ask.format(values=values, **words) for ask in ASKS)
    asks = tuple(ask[0].upper() + ask[1:] if ask[0] != "{" else ask for ask in asks)
    return _made(title, rng.choice(DESCRIPTIONS).format(**words), slots, lambda **given: "done", asks, "It is done.")


def invented_offer(rng: random.Random, split: str, k: int, rare: float = 0.0) -> list[Tool]:
    """An invented tool and k others; half of them share its verb or its thing, so that both words must be read."""
    tool = invented(rng, split, rare=rare)
    verb, thing = words_of(tool)
    offered, used = [tool], {(verb, thing)}
    while len(offered) <= k:
        draw = rng.random()
        other = invented(rng, split, verb if draw < 0.25 else None, thing if 0.25 <= draw < 0.5 else None, rare)
        if words_of(other) not in used and other.name not in {t.name for t in offered}:
            used.add(words_of(other))
            offered.append(other)
    return offered


def words_of(tool: Tool) -> tuple[str, str]:
    """(verb, thing) of an invented tool."""
    words = [w.lower() for w in tool.description.split()]
    return next(w for w in words if w in VERBS), words[-1]
