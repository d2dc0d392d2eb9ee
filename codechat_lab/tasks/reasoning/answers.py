"""Find the answer in a text, and compare it with the gold answer: equivalent("$1,234.50",
"1234.5"), (r"\\frac{1}{2}", "0.5").

Rational numbers are compared exactly, roots and pi to nine digits; anything else equals only
its own spelling, but for white space that separates nothing. Python never runs a completion,
and its length and numbers are bounded."""

import ast
import cmath
import math
import operator
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unicodedata import normalize

MAX_CHARS = 200  # of a sum
MAX_BITS = 8192  # of a power: 9^9^9 would take all memory
MAX_TEXT = 20_000  # characters at the end of a text in which a number or a letter is searched for
TOLERANCE = 1e-9
# "a mammal" is no choice, "a because ..." is one: no such word follows an article. A capital A
# is always the letter.
_ARTICLE = r"(?-i:a)[ \t]+(?!(?:is|because|since|as|and|or|but)\b)\w"
_OPEN, _CLOSE = r"[\"'“‘(\[{$]*", r"[\"'”’)\]}$]*"
# Another letter beside it makes a choice ambiguous; A-flat, C++, C# and D'Artagnan are words.
_ONE = (
    rf"{_OPEN}([A-E])(?![\w'’+#♭♯*&/-])"
    rf"(?!{_CLOSE}[ \t]*(?:\(?(?:or|and|nor|&|/|\|)[ \t]*(?:maybe|perhaps|possibly|also)?[ \t]*{_OPEN}[A-E]\b"
    rf"|,[ \t]*{_OPEN}(?-i:[A-E])\b))"
)
_NAMED = r"(?:(?:the\s+)?(?:option|choice|letter)\s+)?"
_CHOICE = re.compile(
    rf"answer(?:\s+is)?\s*[:=–—-]?\s*{_NAMED}(?!{_OPEN}{_ARTICLE})(?:{_ONE}|{_OPEN}[A-E]\b|either\b|both\b)",
    re.I,
)
_OPTION = re.compile(
    rf"\b(?:option|choice|letter)(?:\s+is)?\s*:?\s*(?!{_OPEN}{_ARTICLE}){_ONE}", re.I
)
_ALONE = re.compile(rf"\W*?{_OPEN}([A-E]){_CLOSE}[.:!]?\s*")
_LABELLED = re.compile(r"\(?([A-E])(?:[.):]|\s[-–—])\s+\S.*")
_MARKDOWN = re.compile(r"(?<![\w)*])(\*{1,3}|_{1,2}|`)(?=\S)([^\n]{1,200}?)(?<=\S)\1(?![\w(*])")
_MINUS = re.compile(  # "10 minus 5" and "the rest minus 5" are sums
    r"(?:\bnegative|(^\W*|[=:(,]\s*|\b(?:is|are|was|be|equals?|to|of|by|at|about)\s+)minus)\s+(?=[\\$€£]*\.?\d)",
    re.I,
)
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "bn": 9,
    "trillion": 12,
    "lakh": 5,
    "crore": 7,
}
_LETTER_SCALES = {"k": 3, "K": 3, "M": 6}
_PLAIN = r"\d{1,60}(?:\.\d{1,60})?|\.\d{1,60}"
_GROUPS = re.compile(
    r"(?<![\w.,])\d{1,3}(?:([, \u00a0\u2009\u202f'’_])\d{3})(?:\1\d{3})*(?![\w]|,\d)"
)
_EXPONENT = re.compile(rf"(?<![\w.])({_PLAIN})[eE]([-+]?\d{{1,2}})(?!\w|\.\d)")
# The minus in 48-24 is no sign. 1,5 and 3:30 and 2.3.4 are no numbers, and the 2 of CO2 is none.
_VALUE = re.compile(
    r"(?:(?<![\w)√±])-|(?<![\w^√±])(?<!sqrt[{( ])(?<!\d[.,:]))"
    r"(?:\d+ \d+/\d+|\d+(?:\.\d+)?(?:/\d+(?:\.\d+)?)?|\.\d+)"
    r"(?: ?\* ?10(?= ?(?:\^|\*\*)))?(?: ?(?:\^|\*\*) ?(?:-?\d+|\{-?\d+\}|\(-?\d+\)))?"
    r"(?!\d|[.,:_]\d|[eExX][-+]?\d| ?pi\b)"
)
# One letter after a space is a unit, not a variable.
_UNITS = frozenset("m g s h l L N J W V A K C F".split())
_UNIT = re.compile(
    rf"(-?(?:(?:{_PLAIN})(?:\s*/\s*\d+)?|\([^A-Za-z]*\)))\s*"
    rf"((?:[A-Za-z]{{2,}}|(?<=\s)[A-Za-z])(?:\^?\d)?(?:[\s/]+[A-Za-z]+(?:\^?\d)?)*)"
)
_IDLE_SPACE = re.compile(r"(?<![\w.]) (?!\.)|(?<!\.) (?![\w.])|(?<=\d) (?=[A-Za-z](?![A-Za-z]))")
_SPACES = re.compile(
    r"(?<!\\)\\(?:[ ,;:]|(?:quad|qquad|thinspace|medspace|thickspace|enspace|space)(?![A-Za-z]))"
)
_HEDGES = frozenset({"or", "and", "to"})  # "18 or 20" is not 18
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|sqrt|pi|[-+*/^()]")
_SIGNS = {"−": "-", "\\cdot": "*", "\\times": "*", "×": "*", "÷": "/", "\\pi": "pi", "π": "pi"}
Value = Fraction | float | complex


def plain(text: str) -> str:
    """A text without Markdown and typesetting, its numbers in plain digits: -$1,234 is -1234, 5
    million is 5000000, 1e3 is 1000."""
    for _ in range(2):  # bold in a quotation
        text = _MARKDOWN.sub(r"\2", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox|mathbf)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(
        r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!|[\u200b\u2060\ufeff]|\\\(|\\\)|\\\[|\\\]",
        "",
        text,
    )
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})", ",", text)  # 1{,}234 and 1\,234
    text = _MINUS.sub(lambda m: f"{m[1] or ''}-", text)
    text = re.sub(r"(?<!\d)[−–](?=\s?[\\$€£.\d])|−", "-", text)  # the dash of 18–20 is no minus
    text = re.sub(r"(?<=-)\s?\\?[$€£]\s?", "", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\%|%|\\\$|\$|€|£|~", " ", text)
    text = _SPACES.sub(" ", text)
    text = re.sub("[¼½¾⅐-⅞]", lambda m: " " + normalize("NFKC", m[0]).replace("⁄", "/"), text)
    text = re.sub("[⁻⁰¹²³⁴-⁹]+", lambda m: "^" + normalize("NFKC", m[0]).replace("−", "-"), text)
    for spelling, sign in _SIGNS.items():
        text = text.replace(spelling, sign)
    text = re.sub(r"(?<=\d)\s*x\s*(?=10\s*(?:\^|\*\*))", "*", text)
    text = _GROUPS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = _EXPONENT.sub(lambda m: _shifted(m[1], int(m[2])), text)
    for _ in range(2):  # three hundred thousand
        text = _scaled(text, r"[\s-]{0,3}", _SCALES, re.I)
    return text


def _scaled(text: str, gap: str, scales: dict[str, int], flags: int = 0) -> str:
    """Numbers before a scale in plain digits. Scales that are words (flags: without case) have
    a plural."""

    def written_out(match: re.Match[str]) -> str:
        return _shifted(match[1], scales[match[2] if match[2] in scales else match[2].lower()])

    plural = "s?" if flags else ""
    return re.sub(
        rf"(?<![\w.])({_PLAIN}){gap}({'|'.join(scales)}){plural}\b", written_out, text, flags=flags
    )


def _shifted(number: str, places: int) -> str:
    return format(Decimal(f"{number}e{places}"), "f")


def last_number(text: str) -> str | None:
    """The last number of a text in plain digits, a fraction or a power of such. None without
    one, and where the last digits are no number, as in 3:30."""
    text = _scaled(plain(text[-MAX_TEXT:]), "", _LETTER_SCALES)
    text = re.sub(r"(?<=[A-Za-z)])\s?(?:\^|\*\*)\s?[{(]?-?\d+[)}]?", "", text)  # cm^2
    text = re.sub(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}", r" \1/\2", text)
    text = re.sub(r"(?<![\d:])(\d{1,2}):00(?![\d:])", r"\1", text)  # 5:00 pm
    values = list(_VALUE.finditer(text))
    if not values or re.search(r"(?<![A-Za-z\d])\d", text[values[-1].end() :]):
        return None
    return values[-1][0]


def choice_letter(text: str) -> str | None:
    """The letter A to E that a text chooses, or None: after "answer is" (in either case, but no
    article), else of "option B", else alone on the first or last line, else of "B. Paris". None
    where letters disagree ("A or B")."""
    box = boxed(text)
    text = plain(f"answer is {box}" if box is not None else text[-MAX_TEXT:])
    answers = list(_CHOICE.finditer(text))
    if answers:
        return answers[-1][1].upper() if answers[-1][1] else None
    lines = [line.strip() for line in text.strip().splitlines()]
    letters = [match[1].upper() for match in _OPTION.finditer(text)]
    letters = letters or _letters(_ALONE, [*lines[:1], *lines[-1:]]) or _letters(_LABELLED, lines)
    return letters[0] if len(set(letters)) == 1 else None


def _letters(pattern: re.Pattern[str], lines: Iterable[str]) -> list[str]:
    """The letters of the lines that have this form."""
    return [match[1] for match in map(pattern.fullmatch, lines) if match]


def boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, or None."""
    opened: list[re.Match[str]] = []  # the braces that are open
    last: slice | None = None
    for match in re.finditer(r"\\boxed\s*\{|[{}]", text):
        if match[0] != "}":
            opened.append(match)
        elif opened:
            opening = opened.pop()
            # A box in a box ends first, and begins last.
            if opening[0] != "{" and (last is None or opening.end() > last.start):
                last = slice(opening.end(), match.start())
    return text[last].strip() if last else None


def stated(text: str) -> str | None:
    r"""The stated answer: \boxed{...}, else the line after "####", else the rest of the
    sentence after "answer is" or "answer:", or None."""
    answer = boxed(text)
    if answer is not None:
        return answer
    text = _MARKDOWN.sub(r"\2", text)
    hits = re.findall(r"####[ \t]*(\S[^\n]*)", text)
    if hits:
        return hits[-1].strip().rstrip(".")
    hits = re.findall(r"answer(?:\s+is\b\s*:?|\s*[:=])\s*(\S[^\n]*)", text, re.I)
    if not hits:
        return None
    return re.split(r"[.!?](?=\s|$)|,?\s(?:because|since|as|which)\b", hits[-1], maxsplit=1)[
        0
    ].strip()


def gsm8k_gold(text: str) -> str | None:
    """The number after the last "####" of a GSM8K solution without separators, or None."""
    _, mark, rest = text.rpartition("####")
    number = rest.strip().lstrip("$").replace(",", "")
    return number if mark and re.fullmatch(r"-?\d+(\.\d+)?", number) else None


def equivalent(answer: str | None, gold: str | None) -> bool:
    """Whether two answers are equal. False where one is empty or missing. Never raises."""
    if answer is None or gold is None or len(answer) > 10 * MAX_CHARS or len(gold) > 10 * MAX_CHARS:
        return False
    ours = normal(answer)
    theirs = normal(gold)
    if not ours or not theirs:
        return False
    if tight(ours) == tight(theirs):
        return True
    a, unit = split_unit(ours)
    b, gold_unit = split_unit(theirs)
    if unit and gold_unit and unit.rstrip("s") != gold_unit.rstrip("s"):
        return False
    try:
        x = value_of(a)
        y = value_of(b)
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        return cmath.isclose(x, y, rel_tol=TOLERANCE)
    except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError):
        return False


def normal(text: str) -> str:
    """An answer as `plain` spells it, its fractions and roots in brackets, without a leading "x
    =" and a full stop."""
    inner = boxed(text)
    text = re.sub(r"\\[dt]frac", r"\\frac", plain(text if inner is None else inner))
    for _ in range(5):  # a fraction in a fraction, five deep
        text, fractions = re.subn(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
        text, roots = re.subn(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
        if not fractions + roots:
            break
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"((\1)/(\2))", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"sqrt(\1)", text)
    text = re.sub(r"(?<![\w)/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", r"(\1+\2/\3)", text)  # 3 1/2
    # 3\frac{1}{2}
    text = re.sub(r"(?<![\w)/.])(\d+)\s*\(\((\d+)\)/\((\d+)\)\)", r"(\1+\2/\3)", text)
    return " ".join(re.sub(r"^\s*[A-Za-z]\s*=\s*", "", text).split()).rstrip(" .")


def tight(text: str) -> str:
    """Without the spaces that separate nothing: (1, 2) and (1,2), x + 1 and x+1, 2 x and 2x.
    Between words, digits and decimal points they stay: 1 2 is not 12, 1, 234 no thousand, and x 1
    not x1."""
    text = _IDLE_SPACE.sub("", text)
    return re.sub(r"(\\[A-Za-z]+) (?=\d)", r"\1", text)  # no command has a digit in its name


def split_unit(text: str) -> tuple[str, str]:
    """A number and the words after it ("18", "apples"); else the text itself and ""."""
    match = _UNIT.fullmatch(text)
    if (
        match is None
        or (len(match[2]) == 1 and match[2] not in _UNITS)
        or _HEDGES & set(match[2].lower().split())
    ):
        return text, ""
    return match[1], match[2].lower()


def value_of(text: str) -> Value:
    """The value of a sum in school spelling (2pi, ^). ValueError, SyntaxError or an
    ArithmeticError for what is none or too large."""
    text = text.replace("**", "^").replace("{", "(").replace("}", ")")
    tokens = _TOKEN.findall(text)
    if len(text) > MAX_CHARS or "".join(tokens) != "".join(text.split()):
        raise ValueError(text[:20])
    # 2 sqrt(3)
    source = re.sub(r"(?<=[\d.)i]) (?=\(|sqrt|pi)|(?<=\)) (?=[\d.])", " * ", " ".join(tokens))
    return _evaluated(
        ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", source).replace("^", "**"), mode="eval").body
    )


def _evaluated(node: ast.expr) -> Value:
    match node:
        case ast.Constant(number):
            return Fraction(str(number))  # by its digits: 0.1 is a tenth
        case ast.Name("pi"):
            return math.pi
        case ast.Call(ast.Name("sqrt"), [argument], []):
            root: Value = _evaluated(argument) ** 0.5
            return root
        case ast.UnaryOp(sign, operand):
            return _SUMS[type(sign)](Fraction(0), _evaluated(operand))
        case ast.BinOp(left, sign, right):
            x = _evaluated(left)
            y: Any = _evaluated(right)  # a Value, of whose `abs` the checker knows nothing
            if isinstance(sign, ast.Pow) and isinstance(x, Fraction):
                bits = x.numerator.bit_length() + x.denominator.bit_length()
                if bits * abs(y) > MAX_BITS:
                    raise ValueError("a power too large")
            return _SUMS[type(sign)](x, y)
    raise ValueError(type(node).__name__)


_SUMS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.add,
    ast.USub: operator.sub,
}
