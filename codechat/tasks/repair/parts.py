"""The modules that repositories are made of (`parts.toml`): a documented function each, with constants, and bugs that
change a line."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from codechat.tasks.micro import WORDS


@dataclass(frozen=True)
class Part:
    """files: names of the module. arguments: expression for those of one call. k: range of the constant; more: what m is
    above k."""

    name: str
    files: Sequence[str]
    code: str
    bugs: Sequence[tuple[str, str]]
    arguments: str
    k: Sequence[int]
    more: Sequence[int] = (4,)
    held_out: bool = False

    def settings(self) -> list[dict[str, int]]:
        """Every choice of the constants, in an order of its own."""
        every = [{"k": k, "m": k + more} for k in self.k for more in self.more]
        random.Random(self.name).shuffle(every)
        return every

    def draw(self, rng: random.Random, setting: Mapping[str, int]) -> tuple[Any, ...]:
        """Arguments of one call."""
        functions = {f.__name__: partial(f, rng) for f in (ints, near, counts, sale, text)}
        return eval(self.arguments, {**functions, **setting, "rng": rng})  # our own expression

    def source(self, names: Mapping[str, str], setting: Mapping[str, int]) -> str:
        return Template(self.code).substitute(names, **setting)

    def lines(self, bug: Sequence[str], names: Mapping[str, str], setting: Mapping[str, int]) -> tuple[str, str, str]:
        """(the source with the bug, the wrong line, the right line)."""
        right, wrong = (Template(text).substitute(names, **setting) for text in bug)
        good = self.source(names, setting)
        buggy = good.replace(right, wrong)
        ((old, new),) = [(x, y) for x, y in zip(buggy.splitlines(), good.splitlines(), strict=True) if x != y]
        return buggy, old, new


PARTS = [
    Part(**row) for row in tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))["part"]
]


# ---------------------------------------------------------------- values of arguments


def ints(rng: random.Random, low: int = 0, high: int = 20, n: Sequence[int] = (3, 4, 5)) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.choice(n))]


def near(rng: random.Random, *values: int) -> int:
    return max(0, rng.choice(values) + rng.choice((-2, -1, 0, 0, 1, 2)))


def counts(rng: random.Random, n: int) -> dict[str, int]:
    return dict(zip(rng.sample(WORDS, n), rng.sample(range(1, 60), n)))


def sale(rng: random.Random) -> tuple[dict[str, int], str, int]:
    stock = counts(rng, 3)
    item = rng.choice(list(stock))
    return stock, item, rng.choice((stock[item], rng.randint(1, stock[item])))


def text(rng: random.Random, *n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice(n)))
