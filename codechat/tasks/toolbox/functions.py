"""What the tools compute, those held out of training behind the others. tools.json and held_out_tools.json have their arguments, limits and words.

An ArithmeticError, LookupError or ValueError means that the arguments are impossible (`Tool.call`).
"""

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


def factorize(n: int) -> list[int]:
    factors, d = [], 2
    while d * d <= n:
        while n % d == 0:
            factors.append(d)
            n //= d
        d += 1
    return factors + [n] * (n > 1)


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
_day = datetime.date.fromisoformat


def _minutes(text: str) -> int:
    hour, minute = map(int, text.split(":"))
    return hour * 60 + minute


def twelve_hour(time: str) -> str:
    hour, minute = divmod(_minutes(time), 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}"


def add_minutes(time: str, minutes: int) -> str:
    hour, minute = divmod((_minutes(time) + minutes) % 1440, 60)
    return f"{hour:02d}:{minute:02d}"


def is_palindrome(word: str) -> bool:
    letters = [c for c in word.lower() if c.isalnum()]
    return letters == letters[::-1]


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
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


CHANNELS = {"red": 0, "green": 1, "blue": 2}


def _rgb(text: str) -> list[int]:
    digits = text.strip().removeprefix("#")
    if len(digits) == 3:
        digits = "".join(c * 2 for c in digits)
    return list(bytes.fromhex(digits))


def _hex(rgb: list[int]) -> str:
    return f"#{bytes(rgb).hex()}"


def to_gray(color: str) -> str:
    red, green, blue = _rgb(color)
    return _hex([round(0.299 * red + 0.587 * green + 0.114 * blue)] * 3)


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio, 1 to 21."""
    dark, light = sorted(_luminance(_rgb(color)) for color in (first, second))
    return neat((light + 0.05) / (dark + 0.05), 2)


def _luminance(rgb: list[int]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


ROMAN = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40, "X": 10, "IX": 9, "V": 5}
ROMAN |= {"IV": 4, "I": 1}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DOTS = ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."
MORSE = dict(zip(LETTERS, DOTS.split(), strict=True))
DIGITS = "0123456789abcdef"
NATO = """Alpha Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliett Kilo Lima Mike November Oscar Papa Quebec Romeo
Sierra Tango Uniform Victor Whiskey X-ray Yankee Zulu""".split()
SPOKEN = dict(zip(LETTERS, NATO, strict=True))


def to_roman(n: int) -> str:
    letters = ""
    for symbol, value in ROMAN.items():
        letters += symbol * (n // value)
        n %= value
    return letters


def to_base(n: int, base: int) -> str:
    digits, rest = "", abs(n)
    while rest or not digits:
        digits, rest = DIGITS[rest % base] + digits, rest // base
    return "-" * (n < 0) + digits


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


def loan_payment(amount: int, rate: int, months: int) -> float:
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


# ---------------------------------------------------------------- held out of training

ATOMIC_MASSES = {"H": 1.008, "C": 12.011, "N": 14.007, "O": 15.999, "Na": 22.990, "S": 32.06, "Cl": 35.45, "Fe": 55.845}
COMPLEMENT = str.maketrans("ACGTacgt", "TGCAtgca")
# Gravity in metres per second squared.
GRAVITY = {"mercury": 3.70, "mars": 3.71, "venus": 8.87, "jupiter": 24.79, "saturn": 10.44}
LIGHT_SPEED = 0.299792458  # million kilometres per second
SOUND_SPEED = 0.343  # kilometres per second
NOTES = "C C# D D# E F F# G G# A A# B".split()
TILES = {1: "aeilnorstu", 2: "dg", 3: "bcmp", 4: "fhvwy", 5: "k", 8: "jx", 10: "qz"}
SUBJECTS = (
    "general works,philosophy,religion,social sciences,language,science,technology,arts,literature,history".split(",")
)
WINDS = "N NE E SE S SW W NW".split()


def molar_mass(formula: str) -> float:
    parts = re.findall(r"([A-Z][a-z]?)([0-9]*)", formula)
    return neat(sum(ATOMIC_MASSES[element] * int(atoms or 1) for element, atoms in parts), 3)


def running_pace(kilometres: float, minutes: int) -> str:
    whole, rest = divmod(round(minutes * 60 / kilometres), 60)
    return f"{whole}:{rest:02d}"


def elo_rating(own: int, rival: int, outcome: str) -> int:
    expected = 1 / (1 + 10 ** ((rival - own) / 400))
    return round(own + 20 * ({"win": 1.0, "draw": 0.5, "loss": 0.0}[outcome] - expected))


def knight_reach(field: str) -> int:
    column, row = "abcdefgh".index(field[0]), int(field[1]) - 1
    jumps = [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 1, 2) if abs(a) != abs(b)]
    return sum(0 <= column + a < 8 and 0 <= row + b < 8 for a, b in jumps)


def subnet_mask(hosts: int) -> str:
    mask = 2**32 - 2 ** (hosts + 1).bit_length()
    return ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))


def password_bits(password: str) -> float:
    kinds = {
        ("lower", 26)
        if c.islower()
        else ("upper", 26)
        if c.isupper()
        else ("digit", 10)
        if c.isdigit()
        else ("other", 33)
        for c in password
    }
    return neat(len(password) * math.log2(sum(size for _, size in kinds) or 1), 1)


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
    "is_leap_year": lambda year: calendar.isleap(year),
    "day_of_year": lambda date: _day(date).timetuple().tm_yday,
    "week_number": lambda date: _day(date).isocalendar().week,
    "month_days": lambda month, year: calendar.monthrange(year, month)[1],
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
    "sqrt": lambda x: neat(math.sqrt(x)),
    "is_prime": lambda n: n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)),
    "power": lambda base, exponent: neat(base**exponent),
    "round_to": lambda value, digits: neat(round(value, digits), 12),
    "add_days": lambda date, days: (_day(date) + datetime.timedelta(days=days)).isoformat(),
    "repeat_text": lambda text, times: text * times,
    "pad_text": lambda text, width: text.ljust(width, "."),
    "cut_text": lambda text, length: text[:length],
    "polygon_angle": lambda sides: neat((sides - 2) * 180 / sides),
    "lighten": lambda color, percent: _hex([round(c + (255 - c) * percent / 100) for c in _rgb(color)]),
    "rgb_to_hex": lambda red, green, blue: _hex([red, green, blue]),
    "to_morse": lambda word: " ".join(MORSE[c] for c in word.lower()),
    "radio_spell": lambda word: " ".join(SPOKEN.get(c, c) for c in word.lower()),
    "clamp": lambda value, low, high: max(low, min(value, high)),
    "age_in": lambda born, year: year - born,
    "count_letter": lambda text, letter: text.lower().count(letter.lower()),
    "combinations": lambda n, k: math.comb(n, k),
    # held out of training
    "dilution": lambda acid, strength, target: neat(acid * (strength / target - 1), 2),
    "dna_complement": lambda strand: strand.translate(COMPLEMENT),
    "christen": lambda ship: f"I name this ship MS {ship.strip()}",
    "parallel_ohms": lambda ohms: neat(1 / sum(1 / value for value in ohms)),
    "latin_species": lambda genus, species: f"{genus.strip()[0].upper()}. {species.strip().lower()}",
    "isotope_left": lambda grams, half_life, elapsed: neat(grams * 2 ** (-(elapsed / half_life))),
    "voltage": lambda amperes, ohms: neat(amperes * ohms),
    "orbit_period": lambda radius: neat(radius**1.5, 2),
    "light_delay": lambda kilometres: neat(kilometres / LIGHT_SPEED, 1),
    "planet_pull": lambda kilos, planet: neat(kilos * GRAVITY[planet], 2),
    "amino_acids": lambda bases: bases // 3,
    "storm_range": lambda delay: neat(delay * SOUND_SPEED, 2),
    "piano_pitch": lambda key: neat(440 * 2 ** ((key - 49) / 12), 2),
    "beat_gap": lambda tempo: neat(60000 / tempo, 2),
    "transpose": lambda note, semitones: NOTES[(NOTES.index(note) + semitones) % len(NOTES)],
    "film_frames": lambda seconds: seconds * 24,
    "stage_cue": lambda actor, scene, side: f"Scene {scene}: {actor.strip()} enters {side}",
    "crop_focal": lambda focal: neat(focal * 1.5, 1),
    "exposure": lambda aperture, shutter: neat(math.log2(aperture**2 * shutter), 1),
    "pool_laps": lambda metres: math.ceil(metres / 25),
    "league_score": lambda wins, draws, losses: 3 * wins + draws,
    "team_chant": lambda team: f"Go, {team.strip()}, go!",
    "gear_ratio": lambda chainring, cog: neat(chainring / cog, 2),
    "tyre_pressure": lambda kilos: neat(kilos / 10, 1),
    "dice_odds": lambda rolls: neat(100 * (1 - (5 / 6) ** rolls), 2),
    "scrabble_score": lambda tiles: sum(n for c in tiles.lower() for n, some in TILES.items() if c in some),
    "yarn_balls": lambda grams: math.ceil(grams / 50),
    "hedge_shrubs": lambda metres: metres * 3,
    "sow_seeds": lambda plants, sprout: math.ceil(plants * 100 / sprout),
    "paint_tins": lambda wall: math.ceil(wall / 12),
    "recipe_scale": lambda grams, serves, guests: neat(grams * guests / serves, 1),
    "body_mass": lambda kilos, centimetres: neat(kilos / (centimetres / 100) ** 2, 1),
    "heart_limit": lambda age: 220 - age,
    "download_wait": lambda megabytes, megabits: neat(megabytes * 8 / megabits, 1),
    "majority": lambda ballots: ballots // 2 + 1,
    "droop_quota": lambda votes, mandates: votes // (mandates + 1) + 1,
    "queue_wait": lambda customers, tills, minutes: customers // tills * minutes,
    "dewey_subject": lambda shelf: SUBJECTS[shelf // 100],
    "parcel_girth": lambda depth, breadth, height: neat(2 * sum(sorted((depth, breadth, height))[:2]), 1),
    "telegram": lambda message: f"{message.strip()} STOP",
    "back_bearing": lambda bearing: (bearing + 180) % 360,
    "compass_rose": lambda course: WINDS[round(course / 45) % 8],
    "font_leading": lambda size: neat(size * 1.2, 1),
    "booklet_sheets": lambda pages: math.ceil(pages / 4),
}
