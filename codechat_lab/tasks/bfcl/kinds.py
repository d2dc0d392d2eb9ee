"""What is wrong with an answer, in words: the tiers of `task`, with wrong values and wrong counts
sorted further. The kinds count errors for a reader; no score depends on them.

A wrong value is the first one of the call that `matching.missed_answer` finds. Its kind is the
first of these that holds: it is a text of another argument; it fills an argument that may be left
out and of which the request states nothing; it is a number, or a list or an object; it is part of
an acceptable text, or holds one; it is another choice of a list; it is another text."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from codechat.tasks.base import Problem
from codechat.text import tool_calls
from codechat_lab.tasks.bfcl.matching import (
    ABSENT,
    fault_of_argument,
    missed_answer,
    standardised,
)

OF_TIERS = {
    "needless_call": "a call where none is right",
    "no_call": "no call where one is right",
    "unreadable": "not readable as calls",
    "wrong_name": "another function",
    "missing_argument": "an argument left out",
    "unexpected_argument": "an argument that the function does not have",
    "wrong_type": "a value of another type",
}
FEWER = "fewer calls than asked for"
MORE = "more calls than asked for"
OF_ANOTHER = "another argument's value"
GUESS = "an optional argument filled with a guess"
NUMBER = "another number"
COMPOUND = "another list or object"
PART = "part of a text, or more than it"
CHOICE = "another choice of a list"
TEXT = "another text"
OF_VALUES = (OF_ANOTHER, GUESS, NUMBER, COMPOUND, PART, CHOICE, TEXT)
KINDS = (*OF_TIERS.values(), FEWER, MORE, *OF_VALUES)


def kind_of_fault(tier: str, calls: Sequence[tool_calls.Call], problem: Problem) -> str:
    """One of KINDS. tier: of a wrong answer. calls: its calls."""
    if tier in OF_TIERS:
        return OF_TIERS[tier]
    gold = problem.gold
    if tier == "wrong_count":
        return FEWER if len(calls) < len(gold["answers"]) else MORE
    read = [(str(call.name), call.arguments or {}) for call in calls]
    missed = missed_answer(read, gold["answers"], gold["tools"])
    assert missed is not None  # the tier says so
    name, arguments = read[missed.call]
    ways_of = gold["answers"][missed.answer]["arguments"]
    tool = gold["tools"][name]
    wrong = next(k for k, v in arguments.items() if fault_of_argument(k, v, ways_of, tool))
    value = arguments[wrong]
    ways = ways_of[wrong]
    others = [way for key, listed in ways_of.items() if key != wrong for way in listed]
    if _is_among(value, others):
        return OF_ANOTHER
    request = " ".join(message["content"] for message in problem.messages)
    if ABSENT in ways and not _states(request, ways):
        return GUESS
    return kind_of_value(value, ways, tool["properties"][wrong])


def kind_of_value(value: Any, ways: Sequence[Any], schema: Mapping[str, Any]) -> str:
    """NUMBER, COMPOUND, PART, CHOICE or TEXT. value: the wrong one. ways: the acceptable values."""
    if isinstance(value, bool | int | float):
        return NUMBER
    if isinstance(value, list | dict):
        return COMPOUND
    if any(_overlap(value, way) for way in ways):
        return PART
    return CHOICE if schema.get("enum") else TEXT


def _is_among(value: Any, others: Collection[Any]) -> bool:
    """Texts alone: two arguments of a request often have the same number."""
    if not isinstance(value, str) or not standardised(value):
        return False
    return any(
        isinstance(other, str) and standardised(other) == standardised(value) for other in others
    )


def _states(request: str, ways: Sequence[Any]) -> bool:
    """The request holds an acceptable value or an item of one, apart from case, blanks and
    marks."""
    said = standardised(request)
    stated = [standardised(str(leaf)) for way in ways for leaf in _leaves(way)]
    return any(text and text in said for text in stated)


def _leaves(way: Any) -> Iterator[Any]:
    if isinstance(way, Mapping):
        way = list(way.values())
    if isinstance(way, list):
        for item in way:
            yield from _leaves(item)
    else:
        yield way


def _overlap(value: Any, way: Any) -> bool:
    """One of two texts holds the other, apart from case, blanks and marks."""
    if not isinstance(value, str) or not isinstance(way, str):
        return False
    mine = standardised(value)
    theirs = standardised(way)
    return bool(mine and theirs) and (mine in theirs or theirs in mine)
