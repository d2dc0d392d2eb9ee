"""What the tools compute, where that takes more than an expression: tools.json and held_out_tools.json have those,
beside arguments, limits and words.

An expression may use whatever is here and the tables of tables.json. An ArithmeticError, LookupError or ValueError
means that the arguments are impossible (`Tool.call`)."""

import base64  # noqa: F401 (for expressions, as calendar, codecs, re, statistics, zlib and quote)
import calendar  # noqa: F401
import codecs  # noqa: F401
import datetime
import json
import math
import random
import re  # noqa: F401
import statistics  # noqa: F401
import zlib  # noqa: F401
from pathlib import Path
from string import ascii_lowercase, hexdigits
from typing import Any
from urllib.parse import quote  # noqa: F401

TABLES = json.loads(Path(__file__).with_name("tables.json").read_text(encoding="utf-8"))


class ToolError(ValueError):
    """Invalid arguments of a tool. The caller reads the message."""


def neat(value: float, digits: int = 4) -> int | float:
    """The number rounded, as an int if it is whole. ToolError where it is not finite."""
    if isinstance(value, complex) or not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded


def factorize(n: int) -> list[int]:
    factors = []
    d = 2
    while d * d <= n:
        while n % d == 0:
            factors.append(d)
            n //= d
        d += 1
    return factors + [n] * (n > 1)


def convert_degrees(value: float, unit: str, to: str) -> float:
    kelvin = {"C": value + 273.15, "F": (value - 32) / 1.8 + 273.15, "K": value}[unit]
    if kelvin < 0:
        raise ToolError("value is below absolute zero")
    return neat({"C": kelvin - 273.15, "F": (kelvin - 273.15) * 1.8 + 32, "K": kelvin}[to])


_day = datetime.date.fromisoformat


def _minutes(text: str) -> int:
    hour, minute = map(int, text.split(":"))
    return hour * 60 + minute


def twelve_hour(time: str) -> str:
    hour, minute = divmod(_minutes(time), 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}"


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner = row[0]
        row[0] = i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def old_from_text(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of replace_word whose old word is in the text."""
    return arguments | {"old": rng.choice(arguments["text"].split())}


def replace_word(text: str, old: str, new: str) -> str:
    if not old or len(text) // len(old) * len(new) > 10_000:
        raise ToolError("old is empty, or the result would be too long")
    return text.replace(old, new)


def _rgb(text: str) -> list[int]:
    digits = text.strip().removeprefix("#")
    if len(digits) == 3:
        digits = "".join(c * 2 for c in digits)
    return list(bytes.fromhex(digits))


def _hex(rgb: list[int]) -> str:
    return f"#{bytes(rgb).hex()}"


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio, 1 to 21."""
    dark, light = sorted(_luminance(_rgb(color)) for color in (first, second))
    return neat((light + 0.05) / (dark + 0.05), 2)


def _luminance(rgb: list[int]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def to_roman(n: int) -> str:
    letters = ""
    for symbol, value in TABLES["ROMAN"].items():
        letters += symbol * (n // value)
        n %= value
    return letters


def to_base(n: int, base: int) -> str:
    digits = ""
    rest = abs(n)
    while rest or not digits:
        digits = hexdigits[rest % base] + digits
        rest = rest // base
    return "-" * (n < 0) + digits


def caesar(text: str, shift: int) -> str:
    turned = "".join(ascii_lowercase[(i + shift) % 26] for i in range(26))
    return text.translate(str.maketrans(ascii_lowercase + ascii_lowercase.upper(), turned + turned.upper()))


def _plain(text: str) -> str:
    letters = "".join(c for c in text.lower() if c.isalnum())
    if not letters:
        raise ToolError("a name must have at least one letter")
    return letters


def knight_reach(field: str) -> int:
    column = "abcdefgh".index(field[0])
    row = int(field[1]) - 1
    jumps = [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2) if abs(a) != abs(b)]
    return sum(0 <= column + a < 8 and 0 <= row + b < 8 for a, b in jumps)


def password_bits(password: str) -> float:
    tests = ((str.islower, 26), (str.isupper, 26), (str.isdigit, 10))
    sizes = {next((test for test in tests if test[0](c)), (None, 33)) for c in password}
    return neat(len(password) * math.log2(sum(size for _, size in sizes) or 1), 1)
