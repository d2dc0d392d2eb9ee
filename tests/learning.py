"""Lessons: what a test of learning trains, as a function of the seed, so that
`learning_margins.py` tries other seeds with the same settings.

A test of learning trains something small and asserts that it learned. With one seed on one
processor it asserts
that one trajectory is a good one: another rounding of a sum is another trajectory. Its sizes
are therefore chosen over 20 seeds, two instruction sets and one and two threads."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """One number that a lesson ends with, and the bound that it must keep."""

    what: str
    value: float
    sign: str
    bound: float

    def held(self) -> bool:
        """False also for a value that is not a number."""
        return self.value > self.bound if self.sign == ">" else self.value < self.bound


def above(what: str, value: Any, bound: float) -> Claim:
    return Claim(what, float(value), ">", float(bound))


def below(what: str, value: Any, bound: float) -> Claim:
    return Claim(what, float(value), "<", float(bound))


Lesson = Callable[[Path, int], list[Claim]]
LEARNING: dict[str, Lesson] = {}


def lesson(*variants: str) -> Callable[[Callable[..., list[Claim]]], Callable[..., list[Claim]]]:
    """Register a function of (home, seed), or one of (variant, home, seed) under each variant's
    name. `home` is a folder of its own, the root of its runs."""

    def register(taught: Callable[..., list[Claim]]) -> Callable[..., list[Claim]]:
        name = taught.__name__
        each = {f"{name}[{v}]": functools.partial(taught, v) for v in variants}
        LEARNING.update(each or {name: taught})
        return taught

    return register


def hold(claims: list[Claim]) -> None:
    """AssertionError that shows all numbers, where one of them is on the wrong side of its
    bound."""
    said = "; ".join(f"{c.what}: {c.value:.4g}, required {c.sign} {c.bound:.4g}" for c in claims)
    assert all(claim.held() for claim in claims), said
