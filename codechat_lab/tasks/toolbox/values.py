"""Argument values: their domains, their wording in a request, and their splits.

A value of a large domain (an invented word, a date, a colour, a number of three or more digits)
belongs to exactly one split by its hash. So a value memorised in training never answers a test
request: the policy has to copy. One- and two-digit numbers and enumerations are shared; a
request with only shared values is assigned to a split as a whole.

Words are invented for the same reason, by one grammar. A model that has only met these writes
one of them where a request has another word (docs/experiments/reading-tools.md); `Slot.varied`
draws words of other kinds."""

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

# a title, then its words
_SECTIONS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("# ")[1:]
# WORDS: a thousand everyday words for names, invented tools and values, none of them in a
# held-out tool: names made of a few common words of one token are learned by heart
# (docs/experiments/reading-tools.md). NAMES, PLACES: for values.
# COMMON, VERBS, SHORT: one token each in a small GPT-2 vocabulary, the short ones at the
# beginning of a line too.
WORDS, NAMES, PLACES, COMMON, VERBS, SHORT = (section.split()[1:] for section in _SECTIONS)
# Residues modulo 10 of a value's hash.
SHARES = {
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
# the frequent ones of English four times
LETTERS = "etaoinshrdlu" * 3 + "abcdefghijklmnopqrstuvwxyz"


def say_plainly(rng: random.Random, value: Any) -> str:
    """The value as a request writes it."""
    return ", ".join(map(str, parts(value)))


@dataclass(frozen=True)
class Slot:
    """The domain of one argument. schema: its JSON schema. draw: rng -> value. say: (rng,
    value) -> text of the request. unseen: each value belongs to one split. cost: its part of a
    tool's level. varied: as draw, but real words, compounds and random letters too; None for a
    domain that has no words."""

    schema: Mapping[str, Any]
    draw: Callable[[random.Random], Any]
    say: Callable[[random.Random, Any], str] = say_plainly
    unseen: bool = True
    cost: int = 1
    varied: Callable[[random.Random], Any] | None = None

    def sample(self, rng: random.Random, split: str, varied: float = 0.0) -> Any:
        """A value that `split` may use. varied: the share drawn by `varied`; 0 draws nothing
        beyond the value."""
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
    """Whether all splits use the value: a number of one or two digits, of which there are too
    few to hold any out."""
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
    """A common word, or, in a share `rare` of the draws, one of a thousand others. With 0
    nothing but the word is drawn."""
    return rng.choice(WORDS if rare and rng.random() < rare else common)


def invent(rng: random.Random) -> str:
    """An invented word: onset, vowel, coda, ending."""
    return "".join(map(rng.choice, (ONSETS, VOWELS, CODAS, ENDINGS)))


@cache
def whole_words() -> tuple[str, ...]:
    """The words that are one token after a space in the vocabulary of the recipes.

    The spelling of each has to be learned: after a quotation mark the same word is other tokens."""
    vocabulary = tokenizer.load("gpt2:4096")
    pieces = (
        vocabulary.token_bytes(i).decode("utf-8", "ignore") for i in range(vocabulary.n_vocab)
    )
    return tuple(piece[1:] for piece in pieces if re.fullmatch("[ ][A-Za-z][a-z]{2,}", piece))


def varied_word(rng: random.Random) -> str:
    """A word that is one token, a word of a dictionary, two of these in one, or three to nine
    letters in any order."""
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(whole_words()).lower()
    if draw < 0.7:
        return rng.choice(WORDS)
    if draw < 0.85:
        return "".join(rng.sample(WORDS, 2))
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 9)))


def varied_name(rng: random.Random) -> str:
    """The name of a person or a place, or a word with a capital."""
    draw = rng.random()
    if draw < 0.7:
        return rng.choice(NAMES if draw < 0.4 else PLACES)
    return varied_word(rng).capitalize()


TEXT = {"type": "string"}


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
        return (
            value
            if rng.random() >= decimal_share or value >= 100
            else value + rng.randint(1, 9) / 10
        )

    return Slot({"type": "number"}, draw)


def _numbers(low: int, high: int) -> Slot:
    """A list of three or four whole numbers, said as `3, 14 and 15` or `3, 14, 15`."""
    integers = _integer(low, high)

    def draw(rng: random.Random) -> list[int]:
        return [integers.draw(rng) for _ in range(rng.randint(3, 4))]

    def say(rng: random.Random, value: list[int]) -> str:
        if rng.random() < 0.5:
            return say_plainly(rng, value)
        return f"{say_plainly(rng, value[:-1])} and {value[-1]}"

    return Slot({"type": "array", "items": {"type": "number"}}, draw, say, cost=3)


def _phrase(shortest: int = 2, longest: int = 4) -> Slot:
    """A few common words. The phrase as a whole belongs to one split."""

    def draw(rng: random.Random) -> str:
        return " ".join(rng.choices(COMMON, k=rng.randint(shortest, longest)))

    def varied(rng: random.Random) -> str:
        count = rng.randint(shortest, longest)
        return " ".join(
            rng.choice(rng.choice((COMMON, WORDS, NAMES, whole_words()))) for _ in range(count)
        )

    return Slot(TEXT, draw, cost=3, varied=varied)


def _date(first: int = 1950, last: int = 2049) -> Slot:
    """A day as YYYY-MM-DD."""
    earliest = datetime.date(first, 1, 1).toordinal()
    latest = datetime.date(last, 12, 31).toordinal()

    def draw(rng: random.Random) -> str:
        return datetime.date.fromordinal(rng.randint(earliest, latest)).isoformat()

    return Slot(TEXT, draw, cost=2)


def _choice(options: Mapping[str, str]) -> Slot:
    """An enumeration: value -> its wordings, separated by `|`. Shared by all splits."""
    spoken = {
        int(key) if key.isdecimal() else key: ways.split("|") for key, ways in options.items()
    }
    values = list(spoken)

    def draw(rng: random.Random) -> int | str:
        return rng.choice(values)

    def say(rng: random.Random, value: int | str) -> str:
        return rng.choice(spoken[value])

    schema = {"type": "integer" if isinstance(values[0], int) else "string", "enum": values}
    return Slot(schema, draw, say, unseen=False)


def _name(rng: random.Random) -> str:
    return invent(rng).capitalize()


def _common_word(rng: random.Random) -> str:
    return rng.choice(COMMON)


def _letter(rng: random.Random) -> str:
    return rng.choice("abdeilnorst")


def _time(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def _colour(rng: random.Random) -> str:
    return "#" + "".join(rng.choices("0123456789abcdef", k=3))


def _formula(rng: random.Random) -> str:
    return f"C{rng.randint(2, 30)}H{rng.randint(2, 60)}O{rng.randint(2, 9)}"


def _strand(rng: random.Random) -> str:
    return "".join(rng.choices("ACGT", k=rng.randint(6, 9)))


def _chess_field(rng: random.Random) -> str:
    return rng.choice("abcdefgh") + rng.choice("12345678")


RANGES: dict[str, Callable[..., Slot]] = {  # kinds with bounds
    "integer": _integer,
    "number": _number,
    "numbers": _numbers,
    "phrase": _phrase,
    "date": _date,
}
TEXTS = {
    "word": Slot(TEXT, invent, varied=varied_word),
    "name": Slot(TEXT, _name, varied=varied_name),
    "common_word": Slot(TEXT, _common_word, unseen=False),
    "letter": Slot(TEXT, _letter, unseen=False),
    "time": Slot(TEXT, _time),
    "colour": Slot(TEXT, _colour),
    "formula": Slot(TEXT, _formula),
    "strand": Slot(TEXT, _strand),
    "chess_field": Slot(TEXT, _chess_field),
}


def slot(kind: str | Mapping[str, str]) -> Slot:
    """The slot of a kind: a name of TEXTS, one of RANGES with its bounds ("integer:1:30"), or
    an enumeration {value: "wording|other wording"}."""
    if isinstance(kind, Mapping):
        return _choice(kind)
    title, *bounds = kind.split(":")
    if title in TEXTS:
        return TEXTS[title]
    return RANGES[title](*(float(bound) if "." in bound else int(bound) for bound in bounds))
