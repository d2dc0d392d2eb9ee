"""Arguments of one call of each function of `parts.toml`, drawn near the constants k and m of
its module: there the right source and the wrong one differ."""

import random
from collections.abc import Sequence
from typing import Any

from codechat_lab.tasks.micro import WORDS


def draw(part: str, rng: random.Random, k: int, m: int) -> tuple[Any, ...]:
    """The arguments for the function of a part."""
    match part:
        case "discount":
            return ([m - 1, 1] if rng.random() < 0.3 else _ints(rng, 1, m),)
        case "page":
            return list(range(rng.randint(k, 3 * k))), rng.choice((1, 1, 2, 3))
        case "best":
            return (_counts(rng, rng.choice((k, k + 1))),)
        case "slug":
            return (
                _text(rng, 1, k, k + 1).title() if rng.random() < 0.7 else str(rng.randint(1, 99)),
            )
        case "stock":
            left = _counts(rng, 3)
            item = rng.choice(list(left))
            return left, item, rng.choice((left[item], rng.randint(1, left[item])))
        case "clock":
            return (
                rng.choice((rng.randint(60, 700), rng.randint(720, 1600), 60 * rng.randint(1, 20))),
            )
        case "run":
            return ([_near(rng, k, k + 2) for _ in range(rng.choice((2, 4, 6)))],)
        case "grade":
            return (_near(rng, k, m, m + 5),)
        case "clamp":
            return (_near(rng, k - 5, k, m, m + 5, (k + m) // 2),)
        case "parcel":
            return (
                [
                    rng.choice((rng.randint(1, 5), rng.randint(6, 12)))
                    for _ in range(rng.choice((0, 1, 2)))
                ],
            )
        case "column":
            return ([_ints(rng, 0, 9, (k, k + 1, k + 2)) for _ in range(rng.choice((1, 2)))],)
        case "window":
            return (_ints(rng, 0, 9, (k - 1, k, k + 1, k + 2)),)
        case "words":
            return (" ".join([_text(rng, 1, 2)] * rng.choice((1, 1, 2))),)
        case "lock":
            return (_ints(rng, 0, 9, (0, 1, 2)),)
    raise ValueError(f"got part {part!r}; expected one whose arguments are drawn above; add a case")


def _ints(rng: random.Random, low: int, high: int, lengths: Sequence[int] = (3, 4, 5)) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.choice(lengths))]


def _near(rng: random.Random, *values: int) -> int:
    return max(0, rng.choice(values) + rng.choice((-2, -1, 0, 0, 1, 2)))


def _counts(rng: random.Random, n: int) -> dict[str, int]:
    return dict(zip(rng.sample(WORDS, n), rng.sample(range(1, 60), n)))


def _text(rng: random.Random, *lengths: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice(lengths)))
