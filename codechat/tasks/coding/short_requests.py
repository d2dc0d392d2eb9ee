"""Short requests for well-known programs, as people type them: "write quicksort", "is prime in python".

Every program of `short_programs` is asked for in each of its names and of `FORMS`. The program is the same in every split, only the wording is
new in validation and test: these rows teach a chat model to answer a short request with code, and some programs by heart.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codechat.data import synthetic

PROGRAMS = Path(__file__).with_name("short_programs.py")
FORMS = (
    "write {x}",
    "write {x} in python",
    "{x} in Python",
    "please write {x}",
    "can you write {x}?",
    "give me {x}",
    "i need {x}",
    "I need {x} in Python.",
    "python code for {x}",
    "python: {x}",
    "how do I write {x}?",
    "show me {x} in python",
    "could you code {x} for me",
    "Write a Python program for {x}.",
    "code {x}, thanks",
)


def programs() -> Iterator[tuple[tuple[str, ...], str]]:
    """(names, source text) of each program of the file."""
    text = PROGRAMS.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = lines[node.lineno - 2].removeprefix("# ").split(" | ")
            yield tuple(names), "\n".join(lines[node.lineno - 1 : node.end_lineno])


def short_rows() -> Iterator[dict[str, Any]]:
    """A conversation (domain "short") for each name and form, in a fixed random order; the split follows the hash of the request."""
    asked = [(form.format(x=name), code) for names, code in programs() for name in names for form in FORMS]
    random.Random("short requests").shuffle(asked)
    for request, code in asked:
        split = synthetic.split_of(synthetic.digest(request))
        yield synthetic.row(request, code, "short", asked="code", split=split)
