"""The modules that repositories are made of: a documented function each, with constants, and bugs that change a line.

`$f` is the function, `$g` its helper, `$k` and `$m` are constants. A bug is (right, wrong): text that occurs once in the code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from codechat.tasks.micro import WORDS


@dataclass(frozen=True)
class Part:
    """modules: names of the file. draw: arguments of one call, from the constants. small: range of k; large: what m is above k."""

    name: str
    modules: tuple[str, ...]
    code: str
    bugs: tuple[tuple[str, str], ...]
    draw: Callable[[random.Random, int, int], tuple[Any, ...]]
    small: tuple[int, ...] = tuple(range(2, 12))
    large: tuple[int, ...] = (4,)
    held_out: bool = False

    def settings(self) -> list[dict[str, int]]:
        """Every choice of the constants, in an order of its own."""
        every = [{"k": k, "m": k + more} for k in self.small for more in self.large]
        random.Random(self.name).shuffle(every)
        return every

    def source(self, names: Mapping[str, str], setting: Mapping[str, int]) -> str:
        return Template(self.code).substitute(names, k=setting["k"], m=setting["m"])

    def lines(self, bug: tuple[str, str], names: Mapping[str, str], setting: Mapping[str, int]) -> tuple[str, str, str]:
        """(the source with the bug, the wrong line, the right line)."""
        right, wrong = (Template(text).substitute(names, k=setting["k"], m=setting["m"]) for text in bug)
        good = self.source(names, setting)
        assert good.count(right) == 1, (self.name, right)
        buggy = good.replace(right, wrong)
        a, b = ([*text.splitlines()] for text in (buggy, good))
        assert len(a) == len(b), (self.name, "a bug changes one line")
        ((old, new),) = [(x, y) for x, y in zip(a, b) if x != y]
        return buggy, old, new


def _ints(rng: random.Random, low: int = 0, high: int = 20, n: Sequence[int] = (3, 4, 5)) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.choice(n))]


def _near(rng: random.Random, *values: int) -> int:
    return max(0, rng.choice(values) + rng.choice((-2, -1, 0, 0, 1, 2)))


def _counts(rng: random.Random, n: int) -> dict[str, int]:
    return dict(zip(rng.sample(WORDS, n), rng.sample(range(1, 60), n)))


def _taken(rng: random.Random) -> tuple[dict[str, int], str, int]:
    stock = _counts(rng, 3)
    item = rng.choice(list(stock))
    return stock, item, rng.choice((stock[item], rng.randint(1, stock[item])))


def _text(rng: random.Random, n: Sequence[int]) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice(n)))


PARTS = (
    Part(
        "discount", ("prices", "orders", "checkout", "sales"),
        'def $f(prices):\n    """Sum of the prices, less $k where it is above $m."""\n    total = sum(prices)\n'
        "    if total > $m:\n        total -= $k\n    return total\n",
        (("total > $m", "total >= $m"), ("total -= $k", "total += $k"), ("sum(prices)", "max(prices)")),
        lambda rng, k, m: ([m - 1, 1] if rng.random() < 0.3 else _ints(rng, 1, m),), large=(5, 10, 20),
    ),
    Part(
        "page", ("paging", "listing", "pages"),
        'def $f(items, page):\n    """The items of a page; $k to a page, pages from 1."""\n    start = (page - 1) * $k\n'
        "    return items[start : start + $k]\n",
        (("(page - 1) * $k", "page * $k"), ("start + $k]", "start + $k - 1]")),
        lambda rng, k, m: (list(range(rng.randint(k, 3 * k))), rng.choice((1, 1, 2, 3))), small=(2, 3, 4, 5, 6),
    ),
    Part(
        "best", ("scores", "ranking", "league"),
        'def $f(scores):\n    """Names of the $k best scores, best first."""\n'
        "    order = sorted(scores, key=scores.get, reverse=True)\n    return order[:$k]\n",
        (("reverse=True", "reverse=False"), ("[:$k]", "[:$k + 1]"), ("key=scores.get, ", "")),
        lambda rng, k, m: (_counts(rng, rng.choice((k, k + 1))),), small=(1, 2, 3),
    ),
    Part(
        "slug", ("titles", "slugs", "links"),
        'def $f(title):\n    """The title in lower case, at most $k words, joined by -."""\n    words = title.lower().split()\n'
        '    return "-".join(words[:$k])\n',
        ((".lower()", ".upper()"), ("[:$k]", "[$k:]"), ('"-".join', '"".join')),
        lambda rng, k, m: (_text(rng, (1, k, k + 1)).title() if rng.random() < 0.7 else str(rng.randint(1, 99)),),
        small=(2, 3, 4, 5),
    ),
    Part(
        "stock", ("stock", "store", "shelf"),
        'def $f(stock, item, n):\n    """The stock after n of an item are sold; $k is the most of a sale."""\n    left = dict(stock)\n'
        "    left[item] -= min(n, $k)\n    return {name: count for name, count in left.items() if count > 0}\n",
        (("min(n, $k)", "max(n, $k)"), ("left[item] -=", "left[item] +="), ("count > 0", "count >= 0")),
        lambda rng, k, m: _taken(rng), small=tuple(range(5, 40, 4)),
    ),
    Part(
        "clock", ("clock", "trains", "times"),
        'def $f(minutes):\n    """Minutes as h:mm, $k minutes late."""\n    hours, rest = divmod(minutes + $k, 60)\n'
        '    return f"{hours % 24}:{rest:02d}"\n',
        (("minutes + $k", "minutes - $k"), ("rest:02d", "rest"), ("hours % 24", "hours % 12")),
        lambda rng, k, m: (rng.choice((rng.randint(60, 700), rng.randint(720, 1600), 60 * rng.randint(1, 20))),),
        small=tuple(range(3, 23, 2)),
    ),
    Part(
        "run", ("streaks", "weather", "series"),
        'def $f(values):\n    """Length of the longest run of values of at least $k."""\n    best = length = 0\n    for value in values:\n'
        "        length = length + 1 if value >= $k else 0\n        best = max(best, length)\n    return best\n",
        (("value >= $k", "value > $k"), ("else 0", "else 1"), ("max(best, length)", "length")),
        lambda rng, k, m: ([_near(rng, k, k + 2) for _ in range(rng.choice((2, 4, 6)))],),
    ),
    Part(
        "grade", ("grades", "exams", "marks"),
        'def $f(points):\n    """A from $m points, B from $k, else C."""\n    if points >= $m:\n        return "A"\n'
        '    return "B" if points >= $k else "C"\n',
        (("if points >= $m", "if points > $m"), ("points >= $k", "points > $k"), ('"B" if', '"A" if')),
        lambda rng, k, m: (_near(rng, k, m, m + 5),), small=tuple(range(10, 60, 5)), large=(10, 20, 30),
    ),
    Part(
        "clamp", ("limits", "sensors", "levels"),
        'def $f(value):\n    """The value, not below $k and not above $m."""\n    return max($k, min($m, value))\n',
        (("max($k, min($m, value))", "max($k, value)"), ("max($k, min($m, value))", "min($m, value)")),
        lambda rng, k, m: (_near(rng, k - 5, k, m, m + 5, (k + m) // 2),), small=tuple(range(6, 30, 3)), large=(5, 9),
    ),
    Part(
        "parcel", ("parcels", "fees", "shipping"),
        'def $g(weight):\n    """$k, and 2 for each kilo above 5."""\n    extra = max(0, weight - 5)\n    return $k + 2 * extra\n\n\n'
        'def $f(weights):\n    """The fees of all parcels."""\n    return sum($g(w) for w in weights)\n',
        (("weight - 5", "weight"), ("2 * extra", "extra"), ("return $k + 2", "return 2")),
        lambda rng, k, m: ([rng.choice((rng.randint(1, 5), rng.randint(6, 12))) for _ in range(rng.choice((0, 1, 2)))],),
    ),
    Part(
        "column", ("tables", "sheets"),
        'def $f(rows):\n    """Sum of column $k, from 0; a shorter row counts 0."""\n'
        "    return sum(row[$k] for row in rows if len(row) > $k)\n",
        (("row[$k] for", "row[0] for"), ("len(row) > $k", "len(row) > $k + 1")),
        lambda rng, k, m: ([_ints(rng, 0, 9, (k, k + 1, k + 2)) for _ in range(rng.choice((1, 2)))],),
        small=(1, 2, 3, 4), held_out=True,
    ),
    Part(
        "window", ("signals", "charts"),
        'def $f(values):\n    """Sums of each $k values in a row."""\n'
        "    return [sum(values[i : i + $k]) for i in range(len(values) - $k + 1)]\n",
        (("- $k + 1)", "- $k)"), ("i + $k]", "i + $k - 1]")),
        lambda rng, k, m: (_ints(rng, 0, 9, (k - 1, k, k + 1, k + 2)),), small=(2, 3, 4), held_out=True,
    ),
    Part(
        "words", ("words", "texts"),
        'def $f(text):\n    """How often each word of at least $k letters occurs."""\n    counts = {}\n    for word in text.split():\n'
        "        if len(word) >= $k:\n            counts[word] = counts.get(word, 0) + 1\n    return counts\n",
        (("len(word) >= $k", "len(word) > $k"), ("counts.get(word, 0) + 1", "1")),
        lambda rng, k, m: (" ".join([_text(rng, (1, 2))] * rng.choice((1, 1, 2))),), small=(4, 5, 6), held_out=True,
    ),
    Part(
        "lock", ("locks", "codes"),
        'def $f(digits):\n    """Each digit $k further; 9 is followed by 0."""\n    return [(digit + $k) % 10 for digit in digits]\n',
        (("digit + $k", "digit - $k"), ("% 10", "% 9")),
        lambda rng, k, m: (_ints(rng, 0, 9, (0, 1, 2)),), small=(1, 2, 3, 4, 6, 7), held_out=True,
    ),
)  # fmt: skip
