"""What the tools that training has compute; tools.json has their arguments, limits and words."""

from __future__ import annotations

import base64
import calendar
import codecs
import datetime
import math
import random
import re
import statistics
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from codechat.tasks.toolbox.tool import ToolError, neat


def sqrt(x: float) -> float:
    if x < 0:
        raise ToolError("x must not be negative")
    return neat(math.sqrt(x))


def is_prime(n: int) -> bool:
    _need_small(n)
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def factorize(n: int) -> list[int]:
    _need_small(n)
    if n < 2:
        raise ToolError("n must be at least 2")
    factors, d = [], 2
    while d * d <= n:
        while n % d == 0:
            factors.append(d)
            n //= d
        d += 1
    return factors + [n] * (n > 1)


def _need_small(n: int) -> None:
    if abs(n) > 10**12:
        raise ToolError("n must be at most 10^12")


def power(base: int, exponent: int) -> float:
    if abs(exponent) > 100:
        raise ToolError("exponent must be between -100 and 100")
    return neat(base**exponent)


def round_to(value: float, digits: int) -> float:
    if abs(digits) > 12:
        raise ToolError("digits must be between -12 and 12")
    return neat(round(value, digits), 12)


def clamp(value: int, low: int, high: int) -> int:
    if low > high:
        raise ToolError("low must not be above high")
    return max(low, min(value, high))


METRES = {"m": 1.0, "km": 1000.0, "cm": 0.01, "mi": 1609.344, "ft": 0.3048, "in": 0.0254}
KILOGRAMS = {"kg": 1.0, "g": 0.001, "lb": 0.45359237, "oz": 0.028349523125, "t": 1000.0}
LITRES = {"l": 1.0, "ml": 0.001, "gal": 3.785411784, "pt": 0.473176473, "cup": 0.2365882365}
METRES_PER_SECOND = {"mps": 1.0, "kph": 1000 / 3600, "mph": 1609.344 / 3600, "kn": 1852 / 3600}
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "wk": 604800}
BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def _between(scale: Mapping[str, float]) -> Callable[[float, str, str], float]:
    """Conversion between the units of a scale, each in the base unit."""
    return lambda value, unit, to: neat(value * scale[unit] / scale[to])


def convert_degrees(value: float, unit: str, to: str) -> float:
    kelvin = {"C": value + 273.15, "F": (value - 32) / 1.8 + 273.15, "K": value}[unit]
    if kelvin < 0:
        raise ToolError("value is below absolute zero")
    return neat({"C": kelvin - 273.15, "F": (kelvin - 273.15) * 1.8 + 32, "K": kelvin}[to])


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ToolError(f"{text[:40]!r} is not a date like 2024-03-05") from error


def _minutes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,2}):(\d{2})", text, re.ASCII)
    if not match or int(match[1]) > 23 or int(match[2]) > 59:
        raise ToolError(f"{text[:40]!r} is not a time like 09:30")
    return int(match[1]) * 60 + int(match[2])


def _year(year: int) -> int:
    if not 1 <= year <= 9999:
        raise ToolError("year must be between 1 and 9999")
    return year


def add_days(date: str, days: int) -> str:
    try:
        return (_day(date) + datetime.timedelta(days=days)).isoformat()
    except OverflowError as error:
        raise ToolError("the result is outside the years 1 to 9999") from error


def twelve_hour(time: str) -> str:
    hour, minute = divmod(_minutes(time), 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}"


def add_minutes(time: str, minutes: int) -> str:
    hour, minute = divmod((_minutes(time) + minutes) % 1440, 60)
    return f"{hour:02d}:{minute:02d}"


def age_in(born: int, year: int) -> int:
    if year < born:
        raise ToolError("year must not be before born")
    return year - born


def is_palindrome(word: str) -> bool:
    letters = [c for c in word.lower() if c.isalnum()]
    return letters == letters[::-1]


def repeat_text(text: str, times: int) -> str:
    if not 0 <= times <= 1000:
        raise ToolError("times must be between 0 and 1000")
    return text * times


def count_letter(text: str, letter: str) -> int:
    if len(letter) != 1:
        raise ToolError("letter must be one character")
    return text.lower().count(letter.lower())


def pad_text(text: str, width: int) -> str:
    if width > 1000:
        raise ToolError("width must be at most 1000")
    return text.ljust(width, ".")


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def old_from_text(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"old": rng.choice(arguments["text"].split())}


def replace_word(text: str, old: str, new: str) -> str:
    if not old:
        raise ToolError("old must not be empty")
    if len(text) // len(old) * len(new) > 10_000:
        raise ToolError("the result would be too long")
    return text.replace(old, new)


def cut_text(text: str, length: int) -> str:
    if length < 0:
        raise ToolError("length must not be negative")
    return text[:length]


def combinations(n: int, k: int) -> int:
    if not 0 <= k <= n <= 1000:
        raise ToolError("0 <= k <= n <= 1000 is required")
    return math.comb(n, k)


def polygon_angle(sides: int) -> float:
    if sides < 3:
        raise ToolError("sides must be at least 3")
    return neat((sides - 2) * 180 / sides)


CHANNELS = {"red": 0, "green": 1, "blue": 2}


def _rgb(text: str) -> list[int]:
    digits = text.strip().removeprefix("#")
    if len(digits) == 3:
        digits = "".join(c * 2 for c in digits)
    if not re.fullmatch(r"[0-9a-fA-F]{6}", digits):
        raise ToolError(f"{text[:20]!r} is not a colour like #3fa or #33ffaa")
    return [int(digits[i : i + 2], 16) for i in (0, 2, 4)]


def _hex(rgb: list[int]) -> str:
    return "#" + "".join(f"{c:02x}" for c in rgb)


def to_gray(color: str) -> str:
    red, green, blue = _rgb(color)
    return _hex([round(0.299 * red + 0.587 * green + 0.114 * blue)] * 3)


def lighten(color: str, percent: int) -> str:
    if not 0 <= percent <= 100:
        raise ToolError("percent must be between 0 and 100")
    return _hex([round(c + (255 - c) * percent / 100) for c in _rgb(color)])


def rgb_to_hex(red: int, green: int, blue: int) -> str:
    if not all(0 <= c <= 255 for c in (red, green, blue)):
        raise ToolError("red, green and blue must be between 0 and 255")
    return _hex([red, green, blue])


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio, 1 to 21."""
    lights = sorted(_luminance(_rgb(color)) for color in (first, second))
    return neat((lights[1] + 0.05) / (lights[0] + 0.05), 2)


def _luminance(rgb: list[int]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


ROMAN = {
    1000: "M",
    900: "CM",
    500: "D",
    400: "CD",
    100: "C",
    90: "XC",
    50: "L",
    40: "XL",
    10: "X",
    9: "IX",
    5: "V",
    4: "IV",
    1: "I",
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MORSE = dict(
    zip(
        LETTERS,
        ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - "
        "..- ...- .-- -..- -.-- --..".split(),
        strict=True,
    )
)
DIGITS = "0123456789abcdef"
NATO = (
    "Alpha Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliett Kilo Lima Mike November Oscar Papa "
    "Quebec Romeo Sierra Tango Uniform Victor Whiskey X-ray Yankee Zulu"
).split()


def to_roman(n: int) -> str:
    if not 1 <= n <= 3999:
        raise ToolError("n must be between 1 and 3999")
    letters = ""
    for value, symbol in ROMAN.items():
        letters += symbol * (n // value)
        n %= value
    return letters


def to_base(n: int, base: int) -> str:
    digits, rest = "", abs(n)
    while rest or not digits:
        digits, rest = DIGITS[rest % base] + digits, rest // base
    return "-" * (n < 0) + digits


def to_morse(word: str) -> str:
    unknown = [c for c in word.lower() if c not in MORSE]
    if unknown:
        raise ToolError(f"{unknown[0]!r} has no Morse code here; use letters only")
    return " ".join(MORSE[c] for c in word.lower())


def encode(text: str, scheme: str) -> str:
    if scheme == "rot13":
        return codecs.encode(text, "rot13")
    data = text.encode(errors="replace")
    return data.hex() if scheme == "hex" else base64.b64encode(data).decode()


def caesar(text: str, shift: int) -> str:
    table = {ord(c): LETTERS[(i + shift) % 26] for i, c in enumerate(LETTERS)}
    table |= {ord(k.upper()): v.upper() for k, v in zip(LETTERS, table.values(), strict=True)}
    return text.translate(table)


def checksum(text: str, method: str) -> str:
    data = text.encode(errors="replace")
    return f"{zlib.crc32(data) if method == 'crc32' else zlib.adler32(data):08x}"


def radio_spell(word: str) -> str:
    spoken = {name[0].lower(): name for name in NATO}
    return " ".join(spoken.get(c, c) for c in word.lower())


def _need_count(**counts: int) -> None:
    for key, count in counts.items():
        if not 1 <= count <= 1_000_000:
            raise ToolError(f"{key} must be between 1 and 1000000")


def loan_payment(amount: int, rate: int, months: int) -> float:
    _need_count(months=months)
    monthly = rate / 1200
    return neat(amount / months if not monthly else amount * monthly / (1 - (1 + monthly) ** -months), 2)


HELLO = {"en": "Hello", "fr": "Bonjour", "de": "Hallo", "es": "Hola", "it": "Ciao"}


def _plain(text: str) -> str:
    letters = "".join(c for c in text.lower() if c.isalnum())
    if not letters:
        raise ToolError("a name must have at least one letter")
    return letters


def user_name(name: str) -> str:
    plain = _plain(name)
    return f"{plain}{sum(map(ord, plain)) % 100:02d}"


# A tool without a line here is the function of its name.
RUN: dict[str, Callable[..., Any]] = {
    "square": lambda x: neat(x * x),
    "digit_sum": lambda n: sum(map(int, str(abs(n)))),
    "add": lambda a, b: neat(a + b),
    "multiply": lambda a, b: neat(a * b),
    "modulo": lambda a, b: a % b,
    "gcd": lambda a, b: math.gcd(a, b),
    "lcm": lambda a, b: math.lcm(a, b),
    "cube": lambda x: neat(x**3),
    "convert_length": _between(METRES),
    "convert_weight": _between(KILOGRAMS),
    "convert_volume": _between(LITRES),
    "convert_speed": _between(METRES_PER_SECOND),
    "to_metres": lambda value, unit: neat(value * METRES[unit]),
    "to_seconds": lambda value, unit: neat(value * SECONDS[unit]),
    "to_bytes": lambda value, unit: neat(value * BYTES[unit]),
    "weekday": lambda date: DAYS[_day(date).weekday()],
    "days_between": lambda start, end: (_day(end) - _day(start)).days,
    "is_leap_year": lambda year: calendar.isleap(_year(year)),
    "day_of_year": lambda date: _day(date).timetuple().tm_yday,
    "week_number": lambda date: _day(date).isocalendar().week,
    "month_days": lambda month, year: calendar.monthrange(_year(year), month)[1],
    "minutes_between": lambda start, end: (_minutes(end) - _minutes(start)) % 1440,
    "reverse_text": lambda text: text[::-1],
    "count_letters": lambda text: sum(map(str.isalpha, text)),
    "uppercase": lambda text: text.upper(),
    "count_vowels": lambda word: sum((c in "aeiou" for c in word.lower())),
    "sort_letters": lambda word: "".join(sorted(word)),
    "are_anagrams": lambda a, b: sorted(a.lower()) == sorted(b.lower()),
    "change_case": lambda text, style: {"upper": text.upper(), "lower": text.lower(), "title": text.title()}[style],
    "count_words": lambda text: len(text.split()),
    "acronym": lambda text: "".join((w[0].upper() for w in text.split())),
    "slug": lambda text: "-".join(("".join((c for c in w if c.isalnum())) for w in text.lower().split())),
    "join_words": lambda first, second, mark: first + mark + second,
    "mean": lambda numbers: neat(statistics.fmean(numbers)),
    "median": lambda numbers: neat(statistics.median(numbers)),
    "total": lambda numbers: neat(math.fsum(numbers)),
    "largest": lambda numbers: neat(max(numbers)),
    "smallest": lambda numbers: neat(min(numbers)),
    "deviation": lambda numbers: neat(statistics.pstdev(numbers)),
    "sort_numbers": lambda numbers, order: sorted(numbers, reverse=order == "down"),
    "percentage": lambda part, whole: neat(100 * part / whole),
    "circle_area": lambda radius: neat(math.pi * radius**2),
    "circumference": lambda radius: neat(2 * math.pi * radius),
    "sphere_volume": lambda radius: neat(4 / 3 * math.pi * radius**3),
    "rectangle_area": lambda width, height: neat(width * height),
    "triangle_area": lambda base, height: neat(base * height / 2),
    "hypotenuse": lambda a, b: neat(math.hypot(a, b)),
    "cylinder_volume": lambda radius, height: neat(math.pi * radius**2 * height),
    "box_volume": lambda length, width, height: neat(length * width * height),
    "point_distance": lambda x1, y1, x2, y2: neat(math.hypot(x2 - x1, y2 - y1)),
    "hex_to_rgb": lambda color: _rgb(color),
    "invert_color": lambda color: _hex([255 - c for c in _rgb(color)]),
    "color_channel": lambda color, channel: _rgb(color)[CHANNELS[channel]],
    "mix_colors": lambda first, second: _hex([(a + b) // 2 for a, b in zip(_rgb(first), _rgb(second), strict=True)]),
    "to_binary": lambda n: f"{n:b}",
    "url_escape": lambda text: quote(text, safe="", errors="replace"),
    "tip": lambda amount, percent: neat(amount * percent / 100, 2),
    "split_bill": lambda amount, people: neat(amount / people, 2),
    "discount": lambda price, percent: neat(price * (1 - percent / 100), 2),
    "add_tax": lambda price, rate: neat(price * (1 + rate / 100), 2),
    "savings": lambda amount, rate, years: neat(amount * (1 + rate / 100) ** years, 2),
    "double": lambda amount: neat(amount * 2, 2),
    "halve": lambda amount: neat(amount / 2, 2),
    "greet": lambda name: f"Hello, {name.strip()}!",
    "name_tag": lambda name: f"[ {name.strip().upper()} ]",
    "greet_in": lambda name, language: f"{HELLO[language]}, {name.strip()}!",
    "initials": lambda first, last: f"{_plain(first)[0]}{_plain(last)[0]}".upper(),
    "email_for": lambda name, domain: f"{_plain(name)}@{_plain(domain)}.com",
    "seat_label": lambda name, row, seat: f"{row}-{seat} {name.strip()}",
}
