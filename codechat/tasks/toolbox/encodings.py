"""Tools that write numbers and words in another alphabet."""

from __future__ import annotations

import base64
import codecs
import zlib
from urllib.parse import quote

from codechat.tasks.toolbox.tool import ToolError, tool
from codechat.tasks.toolbox.values import choice, integer, phrase, word

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


@tool(
    "Number in Roman numerals",
    n=integer(3, 3999),
    answer="{n} is {result}.",
    asks=[
        "Write {n} in Roman numerals.",
        "What is {n} in Roman numerals?",
        "Roman numeral for {n}?",
        "Convert {n} to Roman.",
        "How did Romans write {n}?",
    ],
    hard=["Which letters stand for {n} on an old clock?", "Show {n} the Roman way."],
)
def to_roman(n: int) -> str:
    if not 1 <= n <= 3999:
        raise ToolError("n must be between 1 and 3999")
    letters = ""
    for value, symbol in ROMAN.items():
        letters += symbol * (n // value)
        n %= value
    return letters


@tool(
    "Number in binary",
    n=integer(3, 9999),
    answer="In binary it is {result}.",
    asks=[
        "Write {n} in binary.",
        "What is {n} in binary?",
        "Convert {n} to binary.",
        "Binary of {n}?",
        "Show the bits of {n}.",
    ],
    hard=["Give {n} with ones and zeros.", "How does a computer store {n}?"],
)
def to_binary(n: int) -> str:
    return f"{n:b}"


@tool(
    "Number in another base",
    n=integer(3, 9999),
    base=choice(BASES),
    answer="It is {result}.",
    asks=[
        "Write {n} in {base}.",
        "What is {n} in {base}?",
        "Convert {n} to {base}.",
        "Show {n} in {base}.",
        "I need {n} in {base}.",
    ],
    hard=["Express the number {n} in {base}.", "How is {n} written in {base}?"],
)
def to_base(n: int, base: int) -> str:
    digits, rest = "", abs(n)
    while rest or not digits:
        digits, rest = DIGITS[rest % base] + digits, rest // base
    return "-" * (n < 0) + digits


@tool(
    "Word in Morse code",
    word=word(),
    answer="In Morse: {result}",
    asks=[
        'Write "{word}" in Morse code.',
        'What is "{word}" in Morse?',
        "Morse code for {word}?",
        'Send "{word}" in Morse.',
        "Convert {word} to Morse code.",
    ],
    hard=['Spell "{word}" with dots and dashes.', "Tap out {word}."],
)
def to_morse(word: str) -> str:
    unknown = [c for c in word.lower() if c not in MORSE]
    if unknown:
        raise ToolError(f"{unknown[0]!r} has no Morse code here; use letters only")
    return " ".join(MORSE[c] for c in word.lower())


@tool(
    "Encode a text",
    text=word(),
    scheme=choice(SCHEMES),
    answer="Encoded: {result}",
    asks=[
        'Encode "{text}" as {scheme}.',
        'Write "{text}" in {scheme}.',
        "Encode {text} in {scheme}.",
        'What is "{text}" in {scheme}?',
        "Turn {text} into {scheme}.",
    ],
    hard=['Use {scheme} to encode the word "{text}".', 'Give the {scheme} form of "{text}".'],
)
def encode(text: str, scheme: str) -> str:
    if scheme == "rot13":
        return codecs.encode(text, "rot13")
    data = text.encode(errors="replace")
    return data.hex() if scheme == "hex" else base64.b64encode(data).decode()


@tool(
    "Shift letters of a word",
    text=word(),
    shift=integer(2, 25),
    answer="Shifted: {result}",
    asks=[
        'Shift "{text}" by {shift} letters.',
        "Caesar cipher of {text} with shift {shift}.",
        'Encrypt "{text}" with shift {shift}.',
        "Move each letter of {text} by {shift}.",
        'Caesar: "{text}", shift {shift}.',
    ],
    hard=['Replace each letter of "{text}" by the one {shift} places on.'],
)
def caesar(text: str, shift: int) -> str:
    table = {ord(c): LETTERS[(i + shift) % 26] for i, c in enumerate(LETTERS)}
    table |= {ord(k.upper()): v.upper() for k, v in zip(LETTERS, table.values(), strict=True)}
    return text.translate(table)


@tool(
    "Checksum of a text",
    text=word(),
    method=choice(CHECKSUMS),
    answer="The checksum is {result}.",
    asks=[
        'Checksum of "{text}" with {method}?',
        "Compute the {method} checksum of {text}.",
        'Get {method} for "{text}".',
        'Run {method} over "{text}".',
        "Hash {text} by {method}.",
    ],
    hard=['I want to check "{text}"; use {method}.'],
)
def checksum(text: str, method: str) -> str:
    data = text.encode(errors="replace")
    return f"{zlib.crc32(data) if method == 'crc32' else zlib.adler32(data):08x}"


@tool(
    "Escape a web query",
    text=phrase(),
    answer="Escaped: {result}",
    asks=[
        'Escape "{text}" for a URL.',
        'URL encode "{text}".',
        'Make "{text}" safe for a link.',
        'Quote "{text}" for the web.',
        'Encode "{text}" as a URL.',
    ],
    hard=['I will paste "{text}" into a web address; prepare it.'],
)
def url_escape(text: str) -> str:
    return quote(text, safe="", errors="replace")


@tool(
    "Spell with radio words",
    word=word(),
    answer="{result}",
    held_out=True,
    asks=[
        'Spell "{word}" for the radio.',
        "Radio spelling of {word}?",
        'How do pilots spell "{word}"?',
        'Say "{word}" in the radio alphabet.',
        "Spell out {word} in radio words.",
    ],
    hard=['Alpha, Bravo and so on: what is "{word}"?'],
)
def radio_spell(word: str) -> str:
    spoken = {name[0].lower(): name for name in NATO}
    return " ".join(spoken.get(c, c) for c in word.lower())
