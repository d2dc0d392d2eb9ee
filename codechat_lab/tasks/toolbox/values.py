"""Argument values: their domains, their wording in a request, and their splits.

A value of a large domain (an invented word, a date, a colour, a number of three or more digits) belongs to exactly one
split by its hash. So a value memorised in training never answers a test request: the policy has to copy. One- and
two-digit numbers and enumerations are shared; a request with only shared values is assigned to a split as a whole.
Words are invented for the same reason; a share of them may come from further afield (`Slot.varied`): a model that has
only met words of the one grammar below writes those where a request has other ones (docs/experiments/reading-tools.md).
"""

import datetime
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from codechat.text import tokenizer

# words: a thousand everyday words for names, invented tools and values, none of them in a held-out tool; names of
# people and places for values. Names made of a few common one-token words teach a model those by heart
# (docs/experiments/reading-tools.md). common, verbs,
# short: one token each in a small GPT-2 vocabulary, the short ones at the beginning of a line too.
_SECTIONS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("# ")[1:]  # a title, then its words
WORDS, NAMES, PLACES, COMMON, VERBS, SHORT = (section.split()[1:] for section in _SECTIONS)
# Residues modulo 10 of a value's hash.
SHARES: dict[str, range] = {
    "train": range(0, 7),
    "select": range(7, 8),
    "test": range(8, 9),
    "test_hard": range(9, 10),
}
SHARED_DIGITS = 2
ONSETS = "b br c d dr f fl g gr h j k l m n p pl qu r s sh sk st t tr v w z".split()
VOWELS = "a e i o u ai ea oo".split()
CODAS = "b ck d g k l ll m n nd nt p r rt sh st t x".split()
ENDINGS = "a an ar el en ent er et ia in is ix o ol on or um us y".split()
LETTERS = "etaoinshrdlu" * 3 + "abcdefghijklmnopqrstuvwxyz"  # the frequent ones of English four times


def say_plainly(rng: random.Random, value: Any) -> str:
    """The value as a request writes it."""
    return ", ".join(map(str, parts(value)))


@dataclass(frozen=True)
class Slot:
    """The domain of one argument. schema: its JSON schema. draw: rng -> value. say: (rng, value) -> text of the
    request. unseen: each value belongs to one split. cost: what it adds to a tool's level. varied: draws from further
    afield than `draw`; None where there is nothing further."""

    schema: Mapping[str, Any]
    draw: Callable[[random.Random], Any]
    say: Callable[[random.Random, Any], str] = say_plainly
    unseen: bool = True
    cost: int = 1
    varied: Callable[[random.Random], Any] | None = None

    def sample(self, rng: random.Random, split: str, varied: float = 0.0) -> Any:
        """A value that `split` may use. varied: the share drawn by `varied`; 0 draws nothing beyond the value."""
        draw = self.varied if self.varied and varied and rng.random() < varied else self.draw
        while True:
            value = draw(rng)
            if not self.unseen or all(allowed(part, split) for part in parts(value)):
                return value

    def decides(self, value: Any) -> bool:
        """Whether the value alone decides the split of a request."""
        return self.unseen and not all(map(is_shared, parts(value)))


def parts(value: Any) -> list[Any]:
    """The items of a list, or the value alone."""
    return value if isinstance(value, list) else [value]


def is_shared(value: Any) -> bool:
    """Numbers of one or two digits: all splits use them, because there are too few to hold any out."""
    return isinstance(value, (int, float)) and sum(c.isdigit() for c in str(value)) <= SHARED_DIGITS


def _belongs(key: str, split: str) -> bool:
    return crc32(key.encode()) % 10 in SHARES[split]


def allowed(value: Any, split: str) -> bool:
    """Whether `split` may use this value of an open domain. Strings are compared without case."""
    return is_shared(value) or _belongs(str(value).lower(), split)


def whole(arguments: Mapping[str, Any], split: str) -> bool:
    """Whether a request with only shared values belongs to `split`."""
    return _belongs(json.dumps(arguments, sort_keys=True), split)


def draw_word(rng: random.Random, rare: float = 0.0, common: Sequence[str] = COMMON) -> str:
    """A common word, or, in a share `rare` of the draws, one of a thousand others. rare = 0 draws nothing beyond
    the word."""
    return rng.choice(WORDS if rare and rng.random() < rare else common)


def invent(rng: random.Random) -> str:
    """An invented word: onset, vowel, coda, ending."""
    return "".join(map(rng.choice, (ONSETS, VOWELS, CODAS, ENDINGS)))


@cache
def whole_words() -> tuple[str, ...]:
    """The words that are one token after a space in the vocabulary of the recipes.

    Such a token tells nothing of its letters, and after a quotation mark the same word is other tokens. So each has
    to be learned."""
    vocabulary = tokenizer.load("gpt2:4096")
    pieces = (vocabulary.token_bytes(i).decode("utf-8", "ignore") for i in range(vocabulary.n_vocab))
    return tuple(piece[1:] for piece in pieces if re.fullmatch("[ ][A-Za-z][a-z]{2,}", piece))


def varied_word(rng: random.Random) -> str:
    """A word that is one token, a word of a dictionary, two of these in one, or three to nine letters in any order."""
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(whole_words()).lower()
    if draw < 0.7:
        return rng.choice(WORDS)
    return "".join(rng.sample(WORDS, 2) if draw < 0.85 else rng.choices(LETTERS, k=rng.randint(3, 9)))


def varied_name(rng: random.Random) -> str:
    """The name of a person or a place, or a word with a capital."""
    draw = rng.random()
    return rng.choice(NAMES if draw < 0.4 else PLACES) if draw < 0.7 else varied_word(rng).capitalize()


def _text(draw: Callable[[random.Random], str], **how: Any) -> Slot:
    return Slot({"type": "string"}, draw, **how)


def _integer(low: int, high: int) -> Slot:
    """Whole numbers, log-uniform: every number of digits occurs."""
    ratio = (high + 1) / max(low, 1)

    def draw(rng: random.Random) -> int:
        return max(low, min(high, int(max(low, 1) * ratio ** rng.random())))

    return Slot({"type": "integer"}, draw)


def _number(low: int, high: int, decimal_share: float = 0.2) -> Slot:
    """Numbers, a share of them with one decimal."""
    integers = _integer(low, high)

    def draw(rng: random.Random) -> int | float:
        value = integers.draw(rng)
        return value if rng.random() >= decimal_share or value >= 100 else value + rng.randint(1, 9) / 10

    return Slot({"type": "number"}, draw)


def _numbers(low: int, high: int) -> Slot:
    """A list of three or four whole numbers, said as `3, 14 and 15` or `3, 14, 15`."""
    integers = _integer(low, high)

    def say(rng: random.Random, value: list[int]) -> str:
        if rng.random() < 0.5:
            return say_plainly(rng, value)
        return f"{say_plainly(rng, value[:-1])} and {value[-1]}"

    items = {"type": "array", "items": {"type": "number"}}
    return Slot(items, lambda rng: [integers.draw(rng) for _ in range(rng.randint(3, 4))], say, cost=3)


def _phrase(shortest: int = 2, longest: int = 4) -> Slot:
    """A few common words. The phrase as a whole belongs to one split."""

    def varied(rng: random.Random) -> str:
        count = rng.randint(shortest, longest)
        return " ".join(rng.choice(rng.choice((COMMON, WORDS, NAMES, whole_words()))) for _ in range(count))

    return _text(lambda rng: " ".join(rng.choices(COMMON, k=rng.randint(shortest, longest))), cost=3, varied=varied)


def _date(first: int = 1950, last: int = 2049) -> Slot:
    """A day as YYYY-MM-DD."""
    days = datetime.date(first, 1, 1).toordinal(), datetime.date(last, 12, 31).toordinal()
    return _text(lambda rng: datetime.date.fromordinal(rng.randint(*days)).isoformat(), cost=2)


def _choice(options: Mapping[str, str]) -> Slot:
    """An enumeration: value -> its wordings, separated by `|`. Shared by all splits."""
    spoken = {int(key) if key.isdecimal() else key: ways.split("|") for key, ways in options.items()}
    values = list(spoken)
    schema = {"type": "integer" if isinstance(values[0], int) else "string", "enum": values}
    return Slot(
        schema,
        lambda rng: rng.choice(values),
        lambda rng, value: rng.choice(spoken[value]),
        unseen=False,
    )


KINDS: dict[str, Callable[..., Slot]] = {
    "integer": _integer,
    "number": _number,
    "numbers": _numbers,
    "phrase": _phrase,
    "date": _date,
    "word": lambda: _text(invent, varied=varied_word),
    "name": lambda: _text(lambda rng: invent(rng).capitalize(), varied=varied_name),
    "common_word": lambda: _text(lambda rng: rng.choice(COMMON), unseen=False),
    "letter": lambda: _text(lambda rng: rng.choice("abdeilnorst"), unseen=False),
    "time": lambda: _text(lambda rng: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"),
    "colour": lambda: _text(lambda rng: "#" + "".join(rng.choices("0123456789abcdef", k=3))),
    "formula": lambda: _text(lambda rng: f"C{rng.randint(2, 30)}H{rng.randint(2, 60)}O{rng.randint(2, 9)}"),
    "strand": lambda: _text(lambda rng: "".join(rng.choices("ACGT", k=rng.randint(6, 9)))),
    "chess_field": lambda: _text(lambda rng: rng.choice("abcdefgh") + rng.choice("12345678")),
}


def slot(kind: str | Mapping[str, str]) -> Slot:
    """The slot of a kind: a name of KINDS with its bounds ("integer:1:30"), or an enumeration {value:
    "wording|other wording"}."""
    if isinstance(kind, Mapping):
        return _choice(kind)
    title, *bounds = kind.split(":")
    return KINDS[title](*(float(bound) if "." in bound else int(bound) for bound in bounds))
