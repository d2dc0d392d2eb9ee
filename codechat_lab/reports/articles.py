"""The parts of a report that is read as an article: its answer and its tables, as Markdown.

    articles.answer(numbers, "RL adds {gain:+.1f} points.", "...", "...")     three sentences from asserted numbers
    articles.beside([("pass@1", "0.86", "0.64", "another task set")])         published | ours | what it means
    articles.table(frame, {"lr": "learning rate", "changed": ("values changed", ".1%")})

The numbers of an answer are those that the report stores with `run_frames.headline`, which
compares them with the committed ones."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import Markdown

from codechat_lab.instruments.markdown import table_lines

VERBATIM = "verbatim"  # format of a column that shows what a model wrote


def answer(numbers: Mapping[str, float], *sentences: str) -> Markdown:
    """Sentences, a line each; every {name:format} is filled from `numbers`: no number is typed
    by hand."""
    return Markdown("\n".join(sentences).format_map(numbers))


def beside(rows: Iterable[Sequence[str]]) -> Markdown:
    """The table "published | ours | what it means"; a row is (what, published, ours, meaning)."""
    words = ("", "published", "ours", "what it means")
    return table(pd.DataFrame(rows, columns=words), dict(zip(words, words)))


def table(frame: pd.DataFrame, columns: Mapping[str, str | tuple[str, str]]) -> Markdown:
    """Every row of a frame, with words for column names and no text cut; a dash for an unknown
    value.

    columns: {column: words}, or {column: (words, format)} with a format of numbers or VERBATIM."""
    shown = {
        column: (about, "") if isinstance(about, str) else about
        for column, about in columns.items()
    }
    rows = []
    for row in frame.to_dict("records"):
        rows.append([_cell(row.get(column), how) for column, (_, how) in shown.items()])
    return Markdown("\n".join(table_lines([words for words, _ in shown.values()], rows)))


def _cell(value: Any, how: str) -> str:
    if value == "" or pd.isna(value):
        return "–"
    text = _inline_code(str(value)) if how == VERBATIM else f"{value:{how}}"
    return text.replace("|", "\\|")


def _inline_code(text: str) -> str:
    """Text whose markup Markdown leaves alone, with a fence longer than any within it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {' '.join(text.split())} {fence}"
