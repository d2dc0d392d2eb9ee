"""Whether a text states the results of several calls: which value, and of which call.

A text is right where it states each value as a whole word or number, says that the failed call
failed and which one it is, has its values in the order of the calls (or in that in which it
names the calls), writes no JSON, and holds no number that neither the prompt nor the place of a
call explains. Numbers are equal whatever their digits (3 and 3.0, 1,200 and 1200); a rounded
one is another one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
TOLERANCE = 1e-6  # relative above 1 and absolute below
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
_FAILURE = re.compile(
    r"\b(?:fail\w*|errors?|unable|unavailable|could(?: not|n't)|can(?:not|'t)|did(?: not|n't)|"
    r"not)\b"
)


def state(value: Any, names: Sequence[str], error: str = "") -> dict[str, Any]:
    """What has to be stated of one call. names: words by which a text may name it. error: why it
    has no value."""
    return {
        "value": value,
        "names": list(names),
        "error": error,
    }


def stated(text: str, states: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """For each state where the text first says it; None where it does not."""
    text = text.casefold()
    return [_failure_in(text) if one["error"] else place_of(one["value"], text) for one in states]


def is_right(text: str, states: Sequence[Mapping[str, Any]], prompt: str) -> bool:
    """Whether a text states all and nothing else. prompt: the texts that it may take numbers
    from."""
    text = text.casefold()
    places = stated(text, states)
    if None in places or "{" in text or not _names_what_failed(text, states):
        return False
    if _order(places) != _order(_expected_places(text, states)):
        return False
    explained = [*_numbers(prompt), *range(1, len(states) + 1)]
    for number in _free_numbers(text, states):
        if not any(_same(number, other) for other in explained):
            return False
    return True


def place_of(value: Any, text: str) -> int | None:
    """Where a text in small letters first says a value, all items of a list; None where it does
    not."""
    if isinstance(value, list):
        places = [place_of(item, text) for item in value]
        return None if None in places else places[0]
    if isinstance(value, (int, float)):
        found = (one.start() for one in _NUMBER.finditer(text) if _same(_read(one[0]), value))
        return next(found, None)
    match = re.search(whole_words(str(value).casefold()), text)
    return match.start() if match else None


def whole_words(words: str) -> str:
    """A pattern of words that no other letter or digit touches, and that are no part of a longer
    number: 7 is not in 10.7."""
    return rf"(?<!\w)(?<!\d[.,]){re.escape(words)}(?!\w)(?![.,]\d)"


def _failure_in(text: str) -> int | None:
    match = _FAILURE.search(text)
    return match.start() if match else None


def _names_what_failed(text: str, states: Sequence[Mapping[str, Any]]) -> bool:
    return all(_named(text, one) is not None for one in states if one["error"])


def _named(text: str, one: Mapping[str, Any]) -> int | None:
    """Where the text first names a call."""
    places = [place_of(name, text) for name in one["names"]]
    return min((place for place in places if place is not None), default=None)


def _expected_places(text: str, states: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Numbers in the order in which the values are due: places of the calls' names, or the
    calls' numbers where not all are named."""
    named = [_named(text, one) for one in states]
    return list(range(len(states))) if None in named else named


def _order(places: Sequence[int | None]) -> list[int]:
    return sorted(range(len(places)), key=lambda number: (places[number], number))


def _free_numbers(text: str, states: Sequence[Mapping[str, Any]]) -> list[float]:
    """The numbers of a text outside its values that are texts."""
    for one in states:
        if isinstance(one["value"], str) and not one["error"]:
            text = re.sub(whole_words(one["value"].casefold()), " ", text)
    return _numbers(text)


def _numbers(text: str) -> list[float]:
    return [_read(one[0]) for one in _NUMBER.finditer(text)]


def _read(digits: str) -> float:
    return float(digits.replace(",", ""))


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(1.0, abs(other))
