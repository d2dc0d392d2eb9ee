"""Tokens coloured by a value each: as HTML, in terminal colours, or as plain text.

The view shows the text unchanged; a token is coloured exactly if its value is not 0. Tokens
come from a model or a
user, so they are escaped: none can become markup or control a terminal. The HTML is one string
without scripts that works offline."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from codechat.core.errors import DataError
from codechat.text import chat, tool_calls
from codechat.text.tokenizer import Tokenizer

Kind = Literal["mask", "advantage", "gradient", "value", "boundary"]


class Colours(NamedTuple):
    """Okabe-Ito colours (red, green, blue) of values above and below zero, and what they say."""

    above: tuple[int, int, int]
    below: tuple[int, int, int]
    legend: str


KINDS = {
    "mask": Colours((0, 158, 115), (0, 158, 115), "green: supervised, carries loss"),
    "advantage": Colours(
        (0, 114, 178),
        (213, 94, 0),
        "blue: advantage above 0, made likelier; orange: below 0, made unlikelier",
    ),
    "gradient": Colours((204, 121, 167), (204, 121, 167), "pink: share of the gradient"),
    "value": Colours((230, 159, 0), (86, 180, 233), "orange: above 0; blue: below 0"),
    "boundary": Colours((230, 159, 0), (86, 180, 233), "a change of colour begins a new token"),
}
LINE_END = "\u23ce"  # shown where a token holds a line break
_SIGNS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | dict.fromkeys(
    range(127, 160), "\u2421"
)
STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class XRay:
    """T tokens with a value each."""

    kind: Kind
    ids: list[int]
    texts: list[str]  # what each token adds to the text; their concatenation is the text
    values: list[float]  # 0 or 1 for the kind mask, signed for the others; 0 has no colour
    roles: list[str]

    def coloured(self) -> str:
        """The text of the tokens that have colour, and nothing else."""
        return "".join(text for text, value in zip(self.texts, self.values) if value)

    def html(self) -> str:
        """A self-contained fragment: no script, no outside file; readable on light and dark
        pages."""
        spans = "".join(map(self._span, range(len(self.ids))))
        return (
            f'<div class="xray"><style>{STYLE}</style><p>{escape(KINDS[self.kind].legend)}</p>'
            f'<div class="xray-text">{spans}</div><pre>{escape(self.table())}</pre></div>'
        )

    _repr_html_ = html

    def terminal(self, colour: bool = True) -> str:
        """The text with a background per token, then a table; without colour, [[ ]] around
        tokens with a value."""
        if colour:
            painted = "".join(map(self._painted, range(len(self.ids))))
            return f"{KINDS[self.kind].legend}\n\n{painted}\n\n{self.table()}"
        told = {"mask": "supervised", "gradient": "has a share of the gradient"}.get(
            self.kind, f"{self.kind} not 0"
        )
        return f"[[ ]]: {told}\n\n{self._bracketed()}\n\n{self.table()}"

    def _bracketed(self) -> str:
        """The text with [[ ]] around each run of tokens with a value."""
        pieces = []
        shown = [(text, bool(value)) for text, value in zip(self.texts, self.values) if text]
        for has_value, run in groupby(shown, lambda pair: pair[1]):
            text = visible("".join(text for text, _ in run))
            pieces.append(f"[[{text}]]" if has_value else text)
        return "".join(pieces)

    def __str__(self) -> str:
        return self.terminal(colour=False)

    def table(self) -> str:
        """Tokens with colour by role; for values other than a mask also the largest ones."""
        if self.kind == "boundary":  # the colours have no sum
            return f"{len(self.ids)} tokens"
        rows = [
            ["role", "supervised" if self.kind == "mask" else "not 0", "tokens", "share", "sum"]
        ]
        for role in (*dict.fromkeys(self.roles), "all"):
            values = [value for own, value in zip(self.roles, self.values) if role in (own, "all")]
            n = len(values)
            n_coloured = sum(map(bool, values))
            share = f"{100 * n_coloured / n:.0f} %" if n else ""
            rows.append([role, str(n_coloured), str(n), share, f"{sum(values):.4g}"])
        # the sum of a mask says no more
        widths = (11, 9, 8) if self.kind == "mask" else (11, 9, 8, 12)
        lines = []
        for role, *cells in rows:
            columns = [cell.rjust(width) for cell, width in zip(cells, widths)]
            lines.append(role.ljust(12) + "".join(columns))
        if self.kind == "mask":
            return "\n".join(lines)
        lines += ["", f"largest: {self.kind}, place, token"]
        order = sorted(range(len(self.ids)), key=lambda i: -abs(self.values[i]))
        for i in order[:10]:
            if self.values[i]:
                lines.append(f"{self.values[i]:>12.4g}{i:>7}  {self.texts[i]!r}")
        return "\n".join(lines)

    def _shade(self, value: float) -> tuple[tuple[int, int, int], float]:
        """(colour, opacity by size: text stays readable on dark and light pages); mask and
        boundaries have one."""
        share = (
            0.5 if self.kind in ("mask", "boundary") else abs(value) / max(map(abs, self.values))
        )
        colours = KINDS[self.kind]
        return colours.below if value < 0 else colours.above, 0.12 + 0.48 * share

    def _span(self, i: int) -> str:
        value = self.values[i]
        tip = f"token {i}, id {self.ids[i]}"
        if self.kind == "mask":
            tip += f", {self.roles[i]}, {'supervised' if value else 'not supervised'}"
        elif self.kind != "boundary":
            tip += f", {self.roles[i]}, {self.kind} {value:.4g}"
        attributes = ' class="xray-tag"' if self.texts[i] in tool_calls.TAGS else ""
        if value:
            rgb, strength = self._shade(value)
            attributes += f' style="background:rgba({",".join(map(str, rgb))},{strength:.2f})"'
        # the style draws the sign: the text stays
        shown = escape(visible(self.texts[i])).replace("\n", "<i></i>\n")
        return f'<span{attributes} title="{escape(tip)}">{shown}</span>'

    def _painted(self, i: int) -> str:
        """One token in terminal colours: black on a pastel. They end before each line break, or
        the terminal would fill the rest of the line."""
        if not self.texts[i]:
            return ""
        start = "\x1b[2m"
        if self.values[i]:
            rgb, strength = self._shade(self.values[i])
            pastel = (str(round(255 - (255 - c) * min(1.0, 1.4 * strength))) for c in rgb)
            start = f"\x1b[30;48;2;{';'.join(pastel)}m"
        return (
            start + visible(self.texts[i]).replace("\n", f"{LINE_END}\x1b[0m\n{start}") + "\x1b[0m"
        )


def visible(text: str) -> str:
    """Control characters as visible signs, so that no token controls a terminal or a browser.
    Tabs and line breaks stay."""
    return text.translate(_SIGNS)


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """What each id adds to the text. A character of several tokens appears with its last one,
    so "".join is the whole text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for token in ids:
        if token < tokenizer.n_vocab:
            texts.append(decoder.decode(tokenizer.token_bytes(token)))
        else:
            _add_rest(texts, decoder)
            texts.append(chat.decode([token], tokenizer))
    _add_rest(texts, decoder)
    return texts


def _add_rest(texts: list[str], decoder: codecs.IncrementalDecoder) -> None:
    """Add the bytes of an unfinished character to the last text."""
    if texts:
        texts[-1] += decoder.decode(b"", final=True)


def picture(
    kind: Kind,
    ids: Sequence[int],
    values: Sequence[float],
    tokenizer: Tokenizer,
    roles: Sequence[str],
) -> XRay:
    """Tokens, their values and roles, T each. DataError where a value is not a finite number."""
    odd = [value for value in values if not math.isfinite(value)]
    if odd:
        raise DataError(f"{kind} holds {odd[0]}; expected finite numbers")
    return XRay(kind, list(ids), token_texts(ids, tokenizer), list(values), list(roles))


def xray_boundaries(text: str, tokenizer: Tokenizer) -> XRay:
    """Where the tokens of a text begin: two colours in turn."""
    ids = tokenizer.encode(text)
    values = [1.0 if i % 2 else -1.0 for i in range(len(ids))]
    return picture("boundary", ids, values, tokenizer, ["text"] * len(ids))


def xray_mask(
    messages: Sequence[chat.Message], tokenizer: Tokenizer, tags: str = "reserved"
) -> XRay:
    """The loss mask of a conversation, exactly as training sees it."""
    rendered = chat.render(messages, tokenizer, tags)
    return picture(
        "mask", rendered.ids, [float(m) for m in rendered.loss_mask], tokenizer, rendered.roles
    )
