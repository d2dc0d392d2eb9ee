"""What the tools of training compute; each function has the name of its tool in tools.json."""

import base64
import calendar
import codecs
import datetime
import math
import random
import statistics
import zlib
from string import ascii_lowercase, hexdigits
from typing import Any
from urllib.parse import quote

from codechat_lab.tasks.toolbox.functions import TABLES, ToolError, neat

METRES: dict[str, float] = TABLES["METRES"]
KILOGRAMS: dict[str, float] = TABLES["KILOGRAMS"]
LITRES: dict[str, float] = TABLES["LITRES"]
METRES_PER_SECOND: dict[str, float] = TABLES["METRES_PER_SECOND"]
SECONDS: dict[str, float] = TABLES["SECONDS"]
BYTES: dict[str, float] = TABLES["BYTES"]
DAYS: list[str] = TABLES["DAYS"]
CHANNELS: dict[str, int] = TABLES["CHANNELS"]
ROMAN: dict[str, int] = TABLES["ROMAN"]
MORSE: dict[str, str] = TABLES["MORSE"]
SPOKEN: dict[str, str] = TABLES["SPOKEN"]
HELLO: dict[str, str] = TABLES["HELLO"]
MINUTES_A_DAY = 24 * 60


def square(x: float) -> float:
    return neat(x * x)


def sqrt(x: float) -> float:
    return neat(math.sqrt(x))


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def factorize(n: int) -> list[int]:
    factors = []
    d = 2
    while d * d <= n:
        while n % d == 0:
            factors.append(d)
            n //= d
        d += 1
    return factors + ([n] if n > 1 else [])


def digit_sum(n: int) -> int:
    return sum(map(int, str(abs(n))))


def add(a: float, b: float) -> float:
    return neat(a + b)


def multiply(a: float, b: float) -> float:
    return neat(a * b)


def modulo(a: int, b: int) -> int:
    return a % b


def power(base: int, exponent: int) -> float:
    return neat(base**exponent)


def gcd(a: int, b: int) -> int:
    return math.gcd(a, b)


def lcm(a: int, b: int) -> int:
    return math.lcm(a, b)


def cube(x: float) -> float:
    return neat(x**3)


def round_to(value: float, digits: int) -> float:
    return neat(round(value, digits), 12)


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def convert_length(value: float, unit: str, to: str) -> float:
    return neat(value * METRES[unit] / METRES[to])


def convert_weight(value: float, unit: str, to: str) -> float:
    return neat(value * KILOGRAMS[unit] / KILOGRAMS[to])


def convert_volume(value: float, unit: str, to: str) -> float:
    return neat(value * LITRES[unit] / LITRES[to])


def convert_speed(value: float, unit: str, to: str) -> float:
    return neat(value * METRES_PER_SECOND[unit] / METRES_PER_SECOND[to])


def convert_degrees(value: float, unit: str, to: str) -> float:
    kelvin = {"C": value + 273.15, "F": (value - 32) / 1.8 + 273.15, "K": value}[unit]
    if kelvin < 0:
        raise ToolError("value is below absolute zero")
    return neat({"C": kelvin - 273.15, "F": (kelvin - 273.15) * 1.8 + 32, "K": kelvin}[to])


def to_metres(value: float, unit: str) -> float:
    return neat(value * METRES[unit])


def to_seconds(value: float, unit: str) -> float:
    return neat(value * SECONDS[unit])


def to_bytes(value: float, unit: str) -> float:
    return neat(value * BYTES[unit])


_day = datetime.date.fromisoformat


def weekday(date: str) -> str:
    return DAYS[_day(date).weekday()]


def add_days(date: str, days: int) -> str:
    return (_day(date) + datetime.timedelta(days=days)).isoformat()


def days_between(start: str, end: str) -> int:
    return (_day(end) - _day(start)).days


def is_leap_year(year: int) -> bool:
    return calendar.isleap(year)


def day_of_year(date: str) -> int:
    return _day(date).timetuple().tm_yday


def week_number(date: str) -> int:
    return _day(date).isocalendar().week


def month_days(month: int, year: int) -> int:
    return calendar.monthrange(year, month)[1]


def _minutes(time: str) -> int:
    """Minutes since midnight."""
    hour, minute = map(int, time.split(":"))
    return hour * 60 + minute


def twelve_hour(time: str) -> str:
    hour, minute = divmod(_minutes(time), 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}"


def add_minutes(time: str, minutes: int) -> str:
    hour, minute = divmod((_minutes(time) + minutes) % MINUTES_A_DAY, 60)
    return f"{hour:02d}:{minute:02d}"


def minutes_between(start: str, end: str) -> int:
    return (_minutes(end) - _minutes(start)) % MINUTES_A_DAY


def age_in(born: int, year: int) -> int:
    return year - born


def _letters_and_digits(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def reverse_text(text: str) -> str:
    return text[::-1]


def count_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def uppercase(text: str) -> str:
    return text.upper()


def count_vowels(word: str) -> int:
    return sum(letter in "aeiou" for letter in word.lower())


def is_palindrome(word: str) -> bool:
    letters = _letters_and_digits(word)
    return letters == letters[::-1]


def sort_letters(word: str) -> str:
    return "".join(sorted(word))


def repeat_text(text: str, times: int) -> str:
    return text * times


def count_letter(text: str, letter: str) -> int:
    return text.lower().count(letter.lower())


def pad_text(text: str, width: int) -> str:
    return text.ljust(width, ".")


def are_anagrams(a: str, b: str) -> bool:
    return sorted(a.lower()) == sorted(b.lower())


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner = row[0]
        row[0] = i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def change_case(text: str, style: str) -> str:
    return {"upper": str.upper, "lower": str.lower, "title": str.title}[style](text)


def count_words(text: str) -> int:
    return len(text.split())


def acronym(text: str) -> str:
    return "".join(word[0].upper() for word in text.split())


def slug(text: str) -> str:
    return "-".join(map(_letters_and_digits, text.split()))


def old_from_text(rng: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of replace_word whose old word is in the text."""
    return arguments | {"old": rng.choice(arguments["text"].split())}


def replace_word(text: str, old: str, new: str) -> str:
    if not old or len(text) // len(old) * len(new) > 10_000:
        raise ToolError("old is empty, or the result would be too long")
    return text.replace(old, new)


def join_words(first: str, second: str, mark: str) -> str:
    return first + mark + second


def cut_text(text: str, length: int) -> str:
    return text[:length]


def mean(numbers: list[float]) -> float:
    return neat(statistics.fmean(numbers))


def median(numbers: list[float]) -> float:
    return neat(statistics.median(numbers))


def total(numbers: list[float]) -> float:
    return neat(math.fsum(numbers))


def largest(numbers: list[float]) -> float:
    return neat(max(numbers))


def smallest(numbers: list[float]) -> float:
    return neat(min(numbers))


def deviation(numbers: list[float]) -> float:
    return neat(statistics.pstdev(numbers))


def sort_numbers(numbers: list[float], order: str) -> list[float]:
    return sorted(numbers, reverse=order == "down")


def percentage(part: int, whole: int) -> float:
    return neat(100 * part / whole)


def combinations(n: int, k: int) -> int:
    return math.comb(n, k)


def circle_area(radius: float) -> float:
    return neat(math.pi * radius**2)


def circumference(radius: float) -> float:
    return neat(2 * math.pi * radius)


def sphere_volume(radius: float) -> float:
    return neat(4 / 3 * math.pi * radius**3)


def polygon_angle(sides: int) -> float:
    return neat((sides - 2) * 180 / sides)


def rectangle_area(width: float, height: float) -> float:
    return neat(width * height)


def triangle_area(base: float, height: float) -> float:
    return neat(base * height / 2)


def hypotenuse(a: float, b: float) -> float:
    return neat(math.hypot(a, b))


def cylinder_volume(radius: float, height: float) -> float:
    return neat(math.pi * radius**2 * height)


def box_volume(length: float, width: float, height: float) -> float:
    return neat(length * width * height)


def point_distance(x1: int, y1: int, x2: int, y2: int) -> float:
    return neat(math.hypot(x2 - x1, y2 - y1))


def _rgb(color: str) -> list[int]:
    digits = color.strip().removeprefix("#")
    if len(digits) == 3:
        digits = "".join(digit * 2 for digit in digits)
    return list(bytes.fromhex(digits))


def _hex(rgb: list[int]) -> str:
    return f"#{bytes(rgb).hex()}"


def hex_to_rgb(color: str) -> list[int]:
    return _rgb(color)


def invert_color(color: str) -> str:
    return _hex([255 - c for c in _rgb(color)])


def to_gray(color: str) -> str:
    luma = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), _rgb(color)))
    return _hex([round(luma)] * 3)


def color_channel(color: str, channel: str) -> int:
    return _rgb(color)[CHANNELS[channel]]


def lighten(color: str, percent: int) -> str:
    return _hex([round(c + (255 - c) * percent / 100) for c in _rgb(color)])


def mix_colors(first: str, second: str) -> str:
    return _hex([(a + b) // 2 for a, b in zip(_rgb(first), _rgb(second), strict=True)])


def rgb_to_hex(red: int, green: int, blue: int) -> str:
    return _hex([red, green, blue])


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio, 1 to 21."""
    dark, light = sorted(_luminance(_rgb(color)) for color in (first, second))
    return neat((light + 0.05) / (dark + 0.05), 2)


def _luminance(rgb: list[int]) -> float:
    """Relative luminance of WCAG 2, 0 to 1."""
    red, green, blue = (_linear(part / 255) for part in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(part: float) -> float:
    """A channel of sRGB, 0 to 1, without its gamma."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def to_roman(n: int) -> str:
    letters = ""
    for symbol, value in ROMAN.items():
        letters += symbol * (n // value)
        n %= value
    return letters


def to_binary(n: int) -> str:
    return f"{n:b}"


def to_base(n: int, base: int) -> str:
    digits = ""
    rest = abs(n)
    while rest or not digits:
        digits = hexdigits[rest % base] + digits
        rest //= base
    return f"-{digits}" if n < 0 else digits


def to_morse(word: str) -> str:
    return " ".join(MORSE[c] for c in word.lower())


def encode(text: str, scheme: str) -> str:
    data = text.encode(errors="replace")
    if scheme == "rot13":
        return codecs.encode(text, "rot13")
    return data.hex() if scheme == "hex" else base64.b64encode(data).decode()


def caesar(text: str, shift: int) -> str:
    turned = "".join(ascii_lowercase[(i + shift) % 26] for i in range(26))
    return text.translate(
        str.maketrans(ascii_lowercase + ascii_lowercase.upper(), turned + turned.upper())
    )


def checksum(text: str, method: str) -> str:
    compute = {"crc32": zlib.crc32, "adler32": zlib.adler32}[method]
    return format(compute(text.encode(errors="replace")), "08x")


def url_escape(text: str) -> str:
    return quote(text, safe="", errors="replace")


def radio_spell(word: str) -> str:
    return " ".join(SPOKEN.get(c, c) for c in word.lower())


def tip(amount: float, percent: int) -> float:
    return neat(amount * percent / 100, 2)


def split_bill(amount: float, people: int) -> float:
    return neat(amount / people, 2)


def discount(price: float, percent: int) -> float:
    return neat(price * (1 - percent / 100), 2)


def add_tax(price: float, rate: int) -> float:
    return neat(price * (1 + rate / 100), 2)


def savings(amount: int, rate: int, years: int) -> float:
    return neat(amount * (1 + rate / 100) ** years, 2)


def loan_payment(amount: int, rate: int, months: int) -> float:
    """The annuity that repays a loan; rate: percent a year."""
    monthly = rate / 1200
    return neat(
        amount * monthly / (1 - (1 + monthly) ** -months) if monthly else amount / months, 2
    )


def double(amount: float) -> float:
    return neat(amount * 2, 2)


def halve(amount: float) -> float:
    return neat(amount / 2, 2)


def greet(name: str) -> str:
    return f"Hello, {name.strip()}!"


def _plain(text: str) -> str:
    """A name in lower case, its letters and digits only. ToolError where it has none."""
    plain = _letters_and_digits(text)
    if not plain:
        raise ToolError("a name must have at least one letter")
    return plain


def user_name(name: str) -> str:
    plain = _plain(name)
    return f"{plain}{sum(map(ord, plain)) % 100:02d}"


def name_tag(name: str) -> str:
    return f"[ {name.strip().upper()} ]"


def greet_in(name: str, language: str) -> str:
    return f"{HELLO[language]}, {name.strip()}!"


def initials(first: str, last: str) -> str:
    return f"{_plain(first)[0]}{_plain(last)[0]}".upper()


def email_for(name: str, domain: str) -> str:
    return f"{_plain(name)}@{_plain(domain)}.com"


def seat_label(name: str, row: int, seat: int) -> str:
    return f"{row}-{seat} {name.strip()}"
