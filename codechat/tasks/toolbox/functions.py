"""The tools that training has: what each computes, and its parameters; tools.json has their words."""

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
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from codechat.tasks.toolbox.tool import Tool, ToolError, made, neat
from codechat.tasks.toolbox.values import (
    choice,
    clock,
    colour,
    common_word,
    date,
    integer,
    letter,
    name,
    number,
    numbers,
    phrase,
    word,
)


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

LENGTH = {
    "m": "metres|meters",
    "km": "kilometres|km",
    "cm": "centimetres|cm",
    "mi": "miles",
    "ft": "feet",
    "in": "inches",
}
WEIGHT = {"kg": "kilograms|kg|kilos", "g": "grams", "lb": "pounds", "oz": "ounces", "t": "tonnes"}
VOLUME = {"l": "litres|liters", "ml": "millilitres|ml", "gal": "gallons", "pt": "pints", "cup": "cups"}
SPEED = {"mps": "metres per second", "kph": "km per hour|kilometres per hour", "mph": "miles per hour", "kn": "knots"}
TIME = {"min": "minutes", "h": "hours", "d": "days", "wk": "weeks"}
SIZE = {"kB": "kilobytes", "MB": "megabytes", "GB": "gigabytes"}
DEGREES = {"C": "Celsius", "F": "Fahrenheit", "K": "kelvin"}


def _conversion(name: str, units: dict[str, str], scale: Mapping[str, float]) -> Tool:
    """A tool that converts between units. scale: each unit in the base unit."""
    slots = dict(value=number(3, 900), unit=choice(units), to=choice(units))
    return made(name, lambda value, unit, to: neat(value * scale[unit] / scale[to]), **slots)


def convert_degrees(value: float, unit: str, to: str) -> float:
    kelvin = {"C": value + 273.15, "F": (value - 32) / 1.8 + 273.15, "K": value}[unit]
    if kelvin < 0:
        raise ToolError("value is below absolute zero")
    return neat({"C": kelvin - 273.15, "F": (kelvin - 273.15) * 1.8 + 32, "K": kelvin}[to])


def _to_base(name: str, units: dict[str, str], scale: Mapping[str, float]) -> Tool:
    """A tool that converts to the base unit."""
    return made(name, lambda value, unit: neat(value * scale[unit]), value=number(3, 900), unit=choice(units))


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = dict(
    enumerate("January February March April May June July August September October November December".split(), 1)
)


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


def _old_from_text(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
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


def _need_positive(**sizes: float) -> None:
    for key, size in sizes.items():
        if size <= 0:
            raise ToolError(f"{key} must be above 0")


def circle_area(radius: float) -> float:
    _need_positive(radius=radius)
    return neat(math.pi * radius**2)


def circumference(radius: float) -> float:
    _need_positive(radius=radius)
    return neat(2 * math.pi * radius)


def sphere_volume(radius: float) -> float:
    _need_positive(radius=radius)
    return neat(4 / 3 * math.pi * radius**3)


def polygon_angle(sides: int) -> float:
    if sides < 3:
        raise ToolError("sides must be at least 3")
    return neat((sides - 2) * 180 / sides)


def rectangle_area(width: float, height: float) -> float:
    _need_positive(width=width, height=height)
    return neat(width * height)


def triangle_area(base: float, height: float) -> float:
    _need_positive(base=base, height=height)
    return neat(base * height / 2)


def hypotenuse(a: float, b: float) -> float:
    _need_positive(a=a, b=b)
    return neat(math.hypot(a, b))


def cylinder_volume(radius: float, height: float) -> float:
    _need_positive(radius=radius, height=height)
    return neat(math.pi * radius**2 * height)


def box_volume(length: float, width: float, height: float) -> float:
    _need_positive(length=length, width=width, height=height)
    return neat(length * width * height)


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
BASES = {2: "binary|base 2", 8: "octal|base 8", 16: "hex|base 16"}
SCHEMES = {"base64": "base64|base 64", "hex": "hex|hexadecimal", "rot13": "rot13|rot 13"}
CHECKSUMS = {"crc32": "CRC-32|crc 32", "adler32": "Adler-32|adler 32"}
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


def split_bill(amount: float, people: int) -> float:
    _need_count(people=people)
    return neat(amount / people, 2)


def savings(amount: int, rate: int, years: int) -> float:
    _need_count(years=years)
    return neat(amount * (1 + rate / 100) ** years, 2)


def loan_payment(amount: int, rate: int, months: int) -> float:
    _need_count(months=months)
    monthly = rate / 1200
    return neat(amount / months if not monthly else amount * monthly / (1 - (1 + monthly) ** -months), 2)


HELLO = {"en": "Hello", "fr": "Bonjour", "de": "Hallo", "es": "Hola", "it": "Ciao"}
LANGUAGES = {"en": "English", "fr": "French", "de": "German", "es": "Spanish", "it": "Italian"}


def _plain(text: str) -> str:
    letters = "".join(c for c in text.lower() if c.isalnum())
    if not letters:
        raise ToolError("a name must have at least one letter")
    return letters


def user_name(name: str) -> str:
    plain = _plain(name)
    return f"{plain}{sum(map(ord, plain)) % 100:02d}"


TOOLS = (
    # ---- arithmetic
    made("square", lambda x: neat(x * x), x=number(3, 900)),
    made("sqrt", sqrt, x=number(3, 9000)),
    made("is_prime", is_prime, n=integer(11, 9999)),
    made("factorize", factorize, n=integer(12, 9999)),
    made("digit_sum", lambda n: sum(map(int, str(abs(n)))), n=integer(12, 99999)),
    made("add", lambda a, b: neat(a + b), a=number(3, 2000), b=number(3, 2000)),
    made("multiply", lambda a, b: neat(a * b), a=number(3, 900), b=number(3, 900)),
    made("modulo", lambda a, b: a % b, a=integer(20, 9999), b=integer(2, 99)),
    made("power", power, base=integer(2, 400), exponent=integer(2, 9)),
    made("gcd", lambda a, b: math.gcd(a, b), a=integer(12, 2000), b=integer(12, 2000)),
    made("lcm", lambda a, b: math.lcm(a, b), a=integer(12, 900), b=integer(4, 900)),
    made("cube", lambda x: neat(x**3), x=number(3, 500)),
    made("round_to", round_to, value=number(3, 99, 1.0), digits=integer(0, 5)),
    made("clamp", clamp, value=integer(3, 900), low=integer(2, 90), high=integer(91, 900)),
    # ---- units
    _conversion("convert_length", LENGTH, METRES),
    _conversion("convert_weight", WEIGHT, KILOGRAMS),
    _conversion("convert_volume", VOLUME, LITRES),
    _conversion("convert_speed", SPEED, METRES_PER_SECOND),
    made("convert_degrees", convert_degrees, value=number(3, 900), unit=choice(DEGREES), to=choice(DEGREES)),
    _to_base("to_metres", {k: v for k, v in LENGTH.items() if k != "m"}, METRES),
    _to_base("to_seconds", TIME, SECONDS),
    _to_base("to_bytes", SIZE, BYTES),
    # ---- dates
    made("weekday", lambda date: DAYS[_day(date).weekday()], date=date()),
    made("add_days", add_days, date=date(), days=integer(3, 900)),
    made("days_between", lambda start, end: (_day(end) - _day(start)).days, start=date(), end=date()),
    made("is_leap_year", lambda year: calendar.isleap(_year(year)), year=integer(1600, 2400)),
    made("day_of_year", lambda date: _day(date).timetuple().tm_yday, date=date()),
    made("week_number", lambda date: _day(date).isocalendar().week, date=date()),
    made(
        "month_days",
        lambda month, year: calendar.monthrange(_year(year), month)[1],
        month=choice(MONTHS),
        year=integer(1600, 2400),
    ),
    made("twelve_hour", twelve_hour, time=clock()),
    made("add_minutes", add_minutes, time=clock(), minutes=integer(3, 900)),
    made("minutes_between", lambda start, end: (_minutes(end) - _minutes(start)) % 1440, start=clock(), end=clock()),
    made("age_in", age_in, born=integer(1900, 1999), year=integer(2000, 2099)),
    # ---- text
    made("reverse_text", lambda text: text[::-1], text=word()),
    made("count_letters", lambda text: sum(map(str.isalpha, text)), text=word()),
    made("uppercase", lambda text: text.upper(), text=word()),
    made("count_vowels", lambda word: sum(c in "aeiou" for c in word.lower()), word=word()),
    made("is_palindrome", is_palindrome, word=word()),
    made("sort_letters", lambda word: "".join(sorted(word)), word=word()),
    made("repeat_text", repeat_text, text=word(), times=integer(2, 60)),
    made("count_letter", count_letter, text=word(), letter=letter()),
    made("pad_text", pad_text, text=word(), width=integer(8, 80)),
    made("are_anagrams", lambda a, b: sorted(a.lower()) == sorted(b.lower()), a=word(), b=word()),
    made("edit_distance", edit_distance, a=word(), b=word()),
    made(
        "change_case",
        lambda text, style: {"upper": text.upper(), "lower": text.lower(), "title": text.title()}[style],
        text=word(),
        style=choice(
            {
                "upper": "capitals|upper case",
                "lower": "small letters|lower case",
                "title": "title case|a leading capital",
            }
        ),
    ),
    made("count_words", lambda text: len(text.split()), text=phrase()),
    made("acronym", lambda text: "".join(w[0].upper() for w in text.split()), text=phrase(3, 4)),
    made(
        "slug", lambda text: "-".join("".join(c for c in w if c.isalnum()) for w in text.lower().split()), text=phrase()
    ),
    made("replace_word", replace_word, _old_from_text, text=phrase(), old=common_word(), new=word()),
    made(
        "join_words",
        lambda first, second, mark: first + mark + second,
        first=word(),
        second=word(),
        mark=choice({"-": "a dash|a hyphen", "_": "an underscore", ".": "a dot", "/": "a slash"}),
    ),
    made("cut_text", cut_text, text=phrase(3, 4), length=integer(4, 40)),
    # ---- statistics
    made("mean", lambda numbers: neat(statistics.fmean(numbers)), numbers=numbers(2, 300)),
    made("median", lambda numbers: neat(statistics.median(numbers)), numbers=numbers(2, 300)),
    made("total", lambda numbers: neat(math.fsum(numbers)), numbers=numbers(2, 300)),
    made("largest", lambda numbers: neat(max(numbers)), numbers=numbers(2, 300)),
    made("smallest", lambda numbers: neat(min(numbers)), numbers=numbers(2, 300)),
    made("deviation", lambda numbers: neat(statistics.pstdev(numbers)), numbers=numbers(2, 300)),
    made(
        "sort_numbers",
        lambda numbers, order: sorted(numbers, reverse=order == "down"),
        numbers=numbers(2, 300),
        order=choice({"up": "rising order|upward", "down": "falling order|downward"}),
    ),
    made("percentage", lambda part, whole: neat(100 * part / whole), part=integer(3, 900), whole=integer(11, 2000)),
    made("combinations", combinations, n=integer(10, 400), k=integer(2, 9)),
    # ---- geometry
    made("circle_area", circle_area, radius=number(3, 900)),
    made("circumference", circumference, radius=number(3, 900)),
    made("sphere_volume", sphere_volume, radius=number(3, 900)),
    made("polygon_angle", polygon_angle, sides=integer(3, 900)),
    made("rectangle_area", rectangle_area, width=number(3, 900), height=number(3, 900)),
    made("triangle_area", triangle_area, base=number(3, 900), height=number(3, 900)),
    made("hypotenuse", hypotenuse, a=number(3, 900), b=number(3, 900)),
    made("cylinder_volume", cylinder_volume, radius=number(3, 300), height=number(3, 900)),
    made("box_volume", box_volume, length=number(3, 300), width=number(3, 300), height=number(3, 300)),
    made(
        "point_distance",
        lambda x1, y1, x2, y2: neat(math.hypot(x2 - x1, y2 - y1)),
        x1=integer(2, 300),
        y1=integer(2, 300),
        x2=integer(2, 300),
        y2=integer(2, 300),
    ),
    # ---- colours
    made("hex_to_rgb", lambda color: _rgb(color), color=colour()),
    made("invert_color", lambda color: _hex([255 - c for c in _rgb(color)]), color=colour()),
    made("to_gray", to_gray, color=colour()),
    made(
        "color_channel",
        lambda color, channel: _rgb(color)[CHANNELS[channel]],
        color=colour(),
        channel=choice({c: c for c in CHANNELS}),
    ),
    made("lighten", lighten, color=colour(), percent=integer(3, 99)),
    made(
        "mix_colors",
        lambda first, second: _hex([(a + b) // 2 for a, b in zip(_rgb(first), _rgb(second), strict=True)]),
        first=colour(),
        second=colour(),
    ),
    made("rgb_to_hex", rgb_to_hex, red=integer(2, 255), green=integer(2, 255), blue=integer(2, 255)),
    made("contrast", contrast, first=colour(), second=colour()),
    # ---- encodings
    made("to_roman", to_roman, n=integer(3, 3999)),
    made("to_binary", lambda n: f"{n:b}", n=integer(3, 9999)),
    made("to_base", to_base, n=integer(3, 9999), base=choice(BASES)),
    made("to_morse", to_morse, word=word()),
    made("encode", encode, text=word(), scheme=choice(SCHEMES)),
    made("caesar", caesar, text=word(), shift=integer(2, 25)),
    made("checksum", checksum, text=word(), method=choice(CHECKSUMS)),
    made("url_escape", lambda text: quote(text, safe="", errors="replace"), text=phrase()),
    made("radio_spell", radio_spell, word=word()),
    # ---- money
    made("tip", lambda amount, percent: neat(amount * percent / 100, 2), amount=number(5, 900), percent=integer(5, 40)),
    made("split_bill", split_bill, amount=number(5, 900), people=integer(2, 40)),
    made(
        "discount",
        lambda price, percent: neat(price * (1 - percent / 100), 2),
        price=number(5, 900),
        percent=integer(5, 90),
    ),
    made("add_tax", lambda price, rate: neat(price * (1 + rate / 100), 2), price=number(5, 900), rate=integer(3, 30)),
    made("savings", savings, amount=integer(50, 5000), rate=integer(2, 15), years=integer(2, 40)),
    made("loan_payment", loan_payment, amount=integer(200, 9000), rate=integer(2, 15), months=integer(6, 90)),
    made("double", lambda amount: neat(amount * 2, 2), amount=number(3, 2000)),
    made("halve", lambda amount: neat(amount / 2, 2), amount=number(3, 2000)),
    # ---- names
    made("greet", lambda name: f"Hello, {name.strip()}!", name=name()),
    made("user_name", user_name, name=name()),
    made("name_tag", lambda name: f"[ {name.strip().upper()} ]", name=name()),
    made(
        "greet_in",
        lambda name, language: f"{HELLO[language]}, {name.strip()}!",
        name=name(),
        language=choice(LANGUAGES),
    ),
    made("initials", lambda first, last: f"{_plain(first)[0]}{_plain(last)[0]}".upper(), first=name(), last=name()),
    made("email_for", lambda name, domain: f"{_plain(name)}@{_plain(domain)}.com", name=name(), domain=word()),
    made(
        "seat_label",
        lambda name, row, seat: f"{row}-{seat} {name.strip()}",
        name=name(),
        row=integer(2, 90),
        seat=integer(2, 90),
    ),
)
