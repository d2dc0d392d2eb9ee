"""A family of problems: one idea, parameters, some wordings, and the body that solves it.

`$x` and `$y` stand for the arguments. Any other `$name` is a parameter, written as a Python literal. A body uses i, v,
w, total, out, best and steps as its own variables; arguments never have these names.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template, ascii_lowercase
from typing import Any

LEVELS = (1, 2, 3, 4, 5)
MOST_SETTINGS = 200
PARTS = ("sft", "train", "sft", "train", "sft", "train", "sft", "train", "select", "test")
NAMES = tuple(
    """
    f g solve calc run apply make get task do go answer result compute work step build change check func
    """.split()
)
ARGUMENTS = {
    "int": ("n", "x", "num", "value", "number", "a", "k"),
    "ints": ("xs", "nums", "values", "items", "numbers", "data"),
    "word": ("s", "text", "word", "name", "line"),
    "words": ("words", "names", "items", "texts", "parts"),
}
WORDS = tuple("""apple bread chair dance eagle flame grape house igloo juice knife lemon mango night ocean piano queen river stone tiger uncle
    violin water xenon yacht zebra banana cotton dinner engine forest garden hammer island jacket kitten ladder mirror needle orange pepper
    rabbit saddle tunnel valley window sun sky tree map key box cat dog""".split())  # fmt: skip


@dataclass(frozen=True)
class Family:
    """kinds: of the arguments, keys of ARGUMENTS. choices: values of each parameter. says: wordings of the docstring.
    body: lines that end in a return. keep: which settings are allowed; None = all."""

    name: str
    level: int
    kinds: tuple[str, ...]
    choices: Mapping[str, Sequence[Any]]
    says: tuple[str, ...]
    body: str
    held_out: bool = False
    keep: Callable[[Mapping[str, Any]], bool] | None = field(default=None, compare=False)

    def settings(self, part: str) -> list[dict[str, Any]]:
        """The parameter settings of sft, train, select or test; all settings for test_hard."""
        every = [dict(zip(self.choices, values, strict=True)) for values in itertools.product(*self.choices.values())]
        every = [s for s in every if self.keep is None or self.keep(s)]
        random.Random(self.name).shuffle(every)
        every = every[:MOST_SETTINGS]
        return every if part == "test_hard" else [s for i, s in enumerate(every) if PARTS[i % len(PARTS)] == part]

    def neighbours(self, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Settings next to this one: a number plus or minus one, or the neighbouring choice."""
        found = []
        for key, values in self.choices.items():
            value, at = setting[key], list(values).index(setting[key])
            others = (value - 1, value + 1) if type(value) is int else (values[at - 1], values[(at + 1) % len(values)])
            found += [dict(setting) | {key: other} for other in others]
        return found

    def code(self, name: str, arguments: Sequence[str], setting: Mapping[str, Any]) -> str:
        """The reference solution."""
        body = Template(self.body).substitute(self._words(arguments, setting))
        return f"def {name}({', '.join(arguments)}):\n" + "\n".join("    " + line for line in body.split("\n"))

    def sentence(self, wording: str, arguments: Sequence[str], setting: Mapping[str, Any]) -> str:
        return Template(wording).substitute(self._words(arguments, setting))

    @staticmethod
    def _words(arguments: Sequence[str], setting: Mapping[str, Any]) -> dict[str, str]:
        return dict(zip("xy", arguments)) | {key: repr(value) for key, value in setting.items()}

    def inputs(self, rng: random.Random, setting: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments of one call, often at or near the parameters, where wrong programs differ from correct ones."""
        numbers = [v for v in setting.values() if type(v) is int]
        texts = [v for v in setting.values() if type(v) is str]
        return tuple(_DRAW[kind](rng, numbers, texts) for kind in self.kinds)


def _int(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> int:
    if numbers and rng.random() < 0.5:
        return max(0, rng.choice(numbers) * rng.choice((1, 1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1)))
    return rng.randint(0, 60)


def _ints(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> list[int]:
    return [_int(rng, numbers, texts) if rng.random() < 0.6 else rng.randint(0, 20) for _ in range(rng.randint(5, 7))]


def _word(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> str:
    word = rng.choice(WORDS)
    if texts and rng.random() < 0.75:
        text, at = rng.choice(texts), rng.choice((0, 0, len(word), len(word), rng.randint(0, len(word))))
        word = word[:at] + text + word[at:]
        if rng.random() < 0.3:
            at = rng.randint(0, len(word))
            word = word[:at] + rng.choice(texts) + word[at:]
    return word


def _words(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> list[str]:
    return [_word(rng, numbers, texts) for _ in range(rng.randint(3, 4))]


_DRAW: dict[str, Callable[[random.Random, Sequence[int], Sequence[str]], Any]] = {
    "int": _int,
    "ints": _ints,
    "word": _word,
    "words": _words,
}
LETTERS = tuple(ascii_lowercase)


def names_for(kinds: Sequence[str], rng: random.Random) -> list[str]:
    """Argument names without repetition."""
    found: list[str] = []
    for kind in kinds:
        found.append(rng.choice([n for n in ARGUMENTS[kind] if n not in found]))
    return found


def every_name() -> Iterator[str]:
    yield from NAMES
    yield from itertools.chain.from_iterable(ARGUMENTS.values())
