"""Texts put together from the pieces of calls, few of them a call: no scorer may raise on any, or pay for one."""

import random
from collections.abc import Iterator

PIECES = [
    "<functioncall> ",
    "{",
    "}",
    '"name"',
    ": ",
    '"arguments"',
    "'",
    '"',
    "\\",
    "[",
    "]",
    ", ",
    "\ud800",
    "\x00",
    "\n",
]


def noise(*pieces: str, longest: int = 20) -> Iterator[str]:
    """3000 texts of up to `longest` pieces, the same ones every time; pieces: what only this scorer knows."""
    rng = random.Random(0)
    for _ in range(3000):
        yield "".join(rng.choices([*PIECES, *pieces], k=rng.randint(1, longest)))
