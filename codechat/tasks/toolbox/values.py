"""Argument values: their domains, their wording in a request, and their splits.

A value of a large domain (an invented word, a date, a colour, a number of three or more digits) belongs to exactly one
split by its hash. So a value memorised in training never answers a test request: the policy has to copy. One- and
two-digit numbers and enumerations are shared; a request with only shared values is assigned to a split as a whole.
Words are invented for the same reason; a share of them may come from further afield (`Slot.varied`): a model that has only met words of the
one grammar below writes those where a request has other ones (docs/experiments/reading-tools.md).
"""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from codechat.text import tokenizer

# words.txt: a thousand everyday words for names, invented tools and values, none of them in a held-out tool;
# names of people and places for values. Names made of a few common one-token words teach a model those by heart (docs/experiments/reading-tools.md).
_SECTIONS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("# ")[1:]  # a title, then its words
WORDS, NAMES, PLACES = (section.split()[1:] for section in _SECTIONS)
# Residues modulo 10 of a value's hash.
SHARES: dict[str, range] = {"train": range(0, 7), "select": range(7, 8), "test": range(8, 9), "test_hard": range(9, 10)}
SHARED_DIGITS = 2
ONSETS = "b br c d dr f fl g gr h j k l m n p pl qu r s sh sk st t tr v w z".split()
VOWELS = "a e i o u ai ea oo".split()
CODAS = "b ck d g k l ll m n nd nt p r rt sh st t x".split()
ENDINGS = "a an ar el en ent er et ia in is ix o ol on or um us y".split()
LETTERS = "etaoinshrdlu" * 3 + "abcdefghijklmnopqrstuvwxyz"  # the frequent ones of English four times
# One token each in a small GPT-2 vocabulary.
COMMON = """air all art back bad base best big black body book box call car case city class close code color
cost cut dark data day deep dead door down drive early end even face fact fall family far fast field final
fine fire first five food form four free friend full game girl give good great green ground group hand hard
head heart help high home hot house human idea inside job keep key kind land large last late law lead left
letter level life light line list little local long look love low main man map market mark mind model money
morning move music name new news next night note office old open order outside page paper park part past
path people person phone place plan play point power press quick read real record red rest right road rock
room round rule run safe second self send short show side sign simple single six small song sound space
speed stand star start state step store story strong table talk team ten test text thing third three time
top town track true turn view voice walk wall watch water white wide wind word work world year
young""".split()


@dataclass(frozen=True)
class Slot:
    """The domain of one argument. schema: its JSON schema. draw: rng -> value. say: (rng, value) -> text of the
    request. unseen: each value belongs to one split. cost: what it adds to a tool's level. varied: draws from further
    afield than `draw`; None where there is nothing further."""

    schema: Mapping[str, Any]
    draw: Callable[[random.Random], Any]
    say: Callable[[random.Random, Any], str]
    unseen: bool = True
    cost: int = 1
    varied: Callable[[random.Random], Any] | None = None

    def sample(self, rng: random.Random, split: str, varied: float = 0.0) -> Any:
        """A value that `split` may use. varied: the share drawn by `varied`; 0 draws nothing beyond the value."""
        draw = self.varied if self.varied and varied and rng.random() < varied else self.draw
        while True:
            value = draw(rng)
            if not self.unseen or all(allowed(part, split) for part in _parts(value)):
                return value

    def decides(self, value: Any) -> bool:
        """Whether the value alone decides the split of a request."""
        return self.unseen and any(not is_shared(part) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else (value,)


def is_shared(value: Any) -> bool:
    """Numbers of one or two digits: all splits use them, because there are too few to hold any out."""
    return isinstance(value, (int, float)) and sum(c.isdigit() for c in str(value)) <= SHARED_DIGITS


def belongs(key: str, split: str) -> bool:
    """Whether the hash of `key` assigns it to `split`."""
    return crc32(key.encode()) % 10 in SHARES[split]


def allowed(value: Any, split: str) -> bool:
    """Whether `split` may use this value of an open domain. Strings are compared without case."""
    return is_shared(value) or belongs(str(value).lower(), split)


def draw_word(rng: random.Random, rare: float = 0.0, common: Sequence[str] = COMMON) -> str:
    """A common word, or, in a share `rare` of the draws, one of a thousand others. rare = 0 draws nothing beyond the word."""
    return rng.choice(WORDS if rare and rng.random() < rare else common)


def say_plainly(rng: random.Random, value: Any) -> str:
    """The value as a request writes it."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def integer(low: int, high: int) -> Slot:
    """Whole numbers, log-uniform: every number of digits occurs."""
    ratio = (high + 1) / max(low, 1)

    def draw(rng: random.Random) -> int:
        return max(low, min(high, int(max(low, 1) * ratio ** rng.random())))

    return Slot({"type": "integer"}, draw, say_plainly)


def number(low: int, high: int, decimal_share: float = 0.2) -> Slot:
    """Numbers, a share of them with one decimal."""
    whole = integer(low, high)

    def draw(rng: random.Random) -> int | float:
        value = whole.draw(rng)
        if rng.random() >= decimal_share or value >= 100:
            return value
        return value + rng.randint(1, 9) / 10

    return Slot({"type": "number"}, draw, say_plainly)


def numbers(low: int, high: int, shortest: int = 3, longest: int = 4) -> Slot:
    """A list of whole numbers, said as `3, 14 and 15`."""
    item = integer(low, high)

    def draw(rng: random.Random) -> list[int]:
        return [item.draw(rng) for _ in range(rng.randint(shortest, longest))]

    def say(rng: random.Random, value: list[int]) -> str:
        if rng.random() < 0.5:
            return say_plainly(rng, value)
        return f"{', '.join(map(str, value[:-1]))} and {value[-1]}"

    return Slot({"type": "array", "items": {"type": "number"}}, draw, say, cost=3)


def invent(rng: random.Random) -> str:
    """An invented word: onset, vowel, coda, ending."""
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) + rng.choice(ENDINGS)


def spell(rng: random.Random) -> str:
    """Three to nine letters in any order."""
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 9)))


@cache
def whole_words() -> tuple[str, ...]:
    """The words that are one token after a space in the vocabulary of the recipes.

    Such a token tells nothing of its letters, and after a quotation mark the same word is other tokens. So each has to be learned."""
    vocabulary = tokenizer.load("gpt2:4096")
    pieces = (vocabulary.token_bytes(i).decode("utf-8", "ignore") for i in range(vocabulary.n_vocab))
    return tuple(piece[1:] for piece in pieces if re.fullmatch("[ ][A-Za-z][a-z]{2,}", piece))


def varied_word(rng: random.Random) -> str:
    """A word that is one token, a word of a dictionary, two of these in one, or letters in any order."""
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(whole_words()).lower()
    if draw < 0.7:
        return rng.choice(WORDS)
    return "".join(rng.sample(WORDS, 2)) if draw < 0.85 else spell(rng)


def varied_name(rng: random.Random) -> str:
    """The name of a person or a place, or a word with a capital."""
    draw = rng.random()
    return rng.choice(NAMES if draw < 0.4 else PLACES) if draw < 0.7 else varied_word(rng).capitalize()


def word() -> Slot:
    """An invented word in lower case."""
    return Slot({"type": "string"}, invent, say_plainly, varied=varied_word)


def name() -> Slot:
    """An invented name with a capital."""
    return Slot({"type": "string"}, lambda rng: invent(rng).capitalize(), say_plainly, varied=varied_name)


def phrase(shortest: int = 2, longest: int = 4) -> Slot:
    """A few common words. The phrase as a whole belongs to one split."""

    def draw(rng: random.Random) -> str:
        return " ".join(rng.choices(COMMON, k=rng.randint(shortest, longest)))

    def varied(rng: random.Random) -> str:
        return " ".join(
            rng.choice(rng.choice((COMMON, WORDS, NAMES, whole_words()))) for _ in range(rng.randint(shortest, longest))
        )

    return Slot({"type": "string"}, draw, say_plainly, cost=3, varied=varied)


def common_word() -> Slot:
    """One common word, shared by all splits."""
    return Slot({"type": "string"}, lambda rng: rng.choice(COMMON), say_plainly, unseen=False)


def letter() -> Slot:
    """One lower-case letter, shared by all splits."""
    return Slot({"type": "string"}, lambda rng: rng.choice("abdeilnorst"), say_plainly, unseen=False)


def date(first: int = 1950, last: int = 2049) -> Slot:
    """A day as YYYY-MM-DD."""
    start, end = datetime.date(first, 1, 1).toordinal(), datetime.date(last, 12, 31).toordinal()

    def draw(rng: random.Random) -> str:
        return datetime.date.fromordinal(rng.randint(start, end)).isoformat()

    return Slot({"type": "string"}, draw, say_plainly, cost=2)


def clock() -> Slot:
    """A time of day as HH:MM."""
    return Slot({"type": "string"}, lambda rng: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}", say_plainly)


def colour() -> Slot:
    """A colour as #rgb."""
    return Slot({"type": "string"}, lambda rng: "#" + "".join(rng.choices("0123456789abcdef", k=3)), say_plainly)


def formula() -> Slot:
    """A molecule of carbon, hydrogen and oxygen, such as C12H22O4."""

    def draw(rng: random.Random) -> str:
        return f"C{rng.randint(2, 30)}H{rng.randint(2, 60)}O{rng.randint(2, 9)}"

    return Slot({"type": "string"}, draw, say_plainly)


def strand() -> Slot:
    """Six to nine bases of DNA."""
    return Slot({"type": "string"}, lambda rng: "".join(rng.choices("ACGT", k=rng.randint(6, 9))), say_plainly)


def chess_field() -> Slot:
    """A field of a chess board, such as e4."""
    return Slot({"type": "string"}, lambda rng: rng.choice("abcdefgh") + rng.choice("12345678"), say_plainly)


def choice(options: Mapping[Any, str]) -> Slot:
    """An enumeration: value -> its wordings, separated by `|`. Shared by all splits."""
    values, kind = list(options), type(next(iter(options)))
    spoken = {value: ways.split("|") for value, ways in options.items()}
    schema: dict[str, Any] = {"type": {str: "string", int: "integer", bool: "boolean"}[kind]}
    if kind is not bool:
        schema["enum"] = values
    return Slot(schema, lambda rng: rng.choice(values), lambda rng, value: rng.choice(spoken[value]), unseen=False)


KINDS: dict[str, Callable[..., Slot]] = {
    "integer": integer,
    "number": number,
    "numbers": numbers,
    "word": word,
    "name": name,
    "phrase": phrase,
    "common_word": common_word,
    "letter": letter,
    "date": date,
    "time": clock,
    "colour": colour,
    "formula": formula,
    "strand": strand,
    "chess_field": chess_field,
}


def slot(kind: str | Mapping[str, str]) -> Slot:
    """The slot of a kind: a name of KINDS with its bounds ("integer:1:30"), or an enumeration {value: "wording|other wording"}."""
    if isinstance(kind, Mapping):
        return choice({int(key) if key.isdecimal() else key: ways for key, ways in kind.items()})
    title, *bounds = kind.split(":")
    return KINDS[title](*(float(bound) if "." in bound else int(bound) for bound in bounds))


def whole(arguments: Mapping[str, Any], split: str) -> bool:
    """Whether a request with only shared values belongs to `split`."""
    return belongs(json.dumps(arguments, sort_keys=True), split)
