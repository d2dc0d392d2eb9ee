"""The functions of the toolbox that fit a request: BM25 over names, descriptions, and the arguments' names and choices.

Functions that could serve the same request (`toolbox.FAMILIES`) are never offered together, as in training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from codechat.tasks import toolbox

OFFERED = 4  # as many as a training prompt offers at most
NEAR = 0.7  # least share of the best score: others distract a small model more often than they help
ASKING = frozenset("write show give tell make find please program function code".split())  # not what a request is about
GOES_ON = re.compile(r"\s*(and|also|or|now|then|(what|how) about)\b", re.IGNORECASE)  # begins like a follow-up
POINTS_BACK = re.compile(r"\b(it|its|them|again)\b", re.IGNORECASE)
STEM = 5  # letters of a word that count: "squared" finds "square"


def tools_for(request: str, before: Sequence[str] = ()) -> list[str]:
    """Names to offer for a request: those that fit it, else those offered `before` where it goes on ("and of 13?")."""
    return fitting_tools(request) or (list(before) if _continues(request) else [])


def goes_on(request: str) -> bool:
    """Whether a request needs the one before it: by how it begins, a word that points back, or no word of its own."""
    return _continues(request) or bool(POINTS_BACK.search(request))


def _continues(request: str) -> bool:
    return bool(GOES_ON.match(request)) or not _words(request)


def fitting_tools(request: str) -> list[str]:
    """Names of at most OFFERED functions, best first; none where no word of the request is in any description."""
    index, names = _index()
    known = sorted(set(_words(request)) & index.vocab_dict.keys())
    scores, chosen = index.get_scores(known) if known else [], []
    for score, name in sorted(zip(scores, names), reverse=True):
        near = score >= NEAR * scores.max() and len(chosen) < OFFERED
        if near and not any(name in toolbox.family(other) for other in chosen):
            chosen.append(name)
    return chosen


@lru_cache(maxsize=1)
def _index() -> tuple[Any, list[str]]:
    import bm25s  # here: only a request needs it

    texts = []
    for tool in toolbox.TOOLS.values():
        properties = tool.schema["parameters"]["properties"].items()
        arguments = " ".join(f"{name} {' '.join(map(str, about.get('enum', ())))}" for name, about in properties)
        # the name counts twice: its words are chosen to be told apart
        texts.append(f"{tool.name} {tool.name} {tool.schema['description']} {arguments}".replace("_", " "))
    index = bm25s.BM25()
    index.index([_words(text) for text in texts], show_progress=False)
    return index, list(toolbox.TOOLS)


def _words(text: str) -> list[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return [word[:STEM] for word in re.findall(r"[a-z]+", text.lower()) if word not in ASKING.union(STOPWORDS_EN)]
