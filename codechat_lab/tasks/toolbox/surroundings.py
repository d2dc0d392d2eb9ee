"""What stands around a request: instructions beside the list of tools, and sentences that nothing
needs.

Neither says what is right. Each is drawn without a look at the request, so a text that speaks of
declining stands over requests that a tool serves too, and a long request is no sign of either."""

import random
import tomllib
from collections.abc import Sequence
from pathlib import Path

from codechat_lab.tasks.toolbox.values import invent

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# of the instructions: how many of them have a sentence of this kind
INSTRUCTIONS = {"roles": 0.6, "calling": 0.6, "declining": 0.6, "manner": 0.4}
BEHIND = 0.5  # share of the instructions that stand behind the list
MOST_STEPS = min(map(len, TEXTS["steps"]))


def texts_of(kind: str, split: str) -> list[str]:
    """The texts of a kind that a split may use."""
    known = TEXTS[kind]
    return known[:-1] if split == "train" else known[-1:]


def instructed(rng: random.Random, split: str, system: str, talk: bool = False) -> str:
    """A system text that offers tools, with instructions before or behind the list. talk: somebody
    asks who the assistant is, so no role says otherwise."""
    kinds = []
    for kind, share in INSTRUCTIONS.items():
        if rng.random() < share and not (talk and kind == "roles"):
            kinds.append(kind)
    if not kinds:
        kinds = ["manner"]
    first, *rules = kinds
    rng.shuffle(rules)
    sentences = []
    for kind in [first, *rules]:
        sentences.append(rng.choice(texts_of(kind, split)))
    parts = [" ".join(sentences), system]
    if rng.random() < BEHIND:
        parts.reverse()
    return "\n\n".join(parts)


def wordy(rng: random.Random, split: str, request: str) -> str:
    """A request among one to five sentences that nothing needs."""
    before = rng.randint(0, 3)
    after = rng.randint(0 if before else 1, 2)
    sentences = [
        *_drawn(rng, texts_of("before", split), before),
        request,
        *_drawn(rng, texts_of("after", split), after),
    ]
    return " ".join(sentences)


def _drawn(rng: random.Random, texts: Sequence[str], count: int) -> list[str]:
    """So many texts. No number is among them: it could be an argument."""
    name = invent(rng).capitalize()
    drawn = rng.sample(texts, min(count, len(texts)))
    return [text.format(name=name) for text in drawn]


def in_steps(rng: random.Random, texts: Sequence[str]) -> str:
    """Up to MOST_STEPS requests as a list of steps, in a line or each in one of its own."""
    ways = TEXTS["steps"]
    if any(text[0].isdigit() for text in texts):
        ways = [marks for marks in ways if marks[0] != "- "]  # "- 3 Celsius" reads as -3
    marks = rng.choice(ways)
    between = rng.choice(("\n", " "))
    if any(text[-1].isalnum() for text in texts):
        between = "\n"  # "the sum: 3 and 4 2. Find ..." has a number more
    steps = []
    for mark, text in zip(marks[: len(texts)], texts, strict=True):
        # "First, find flights"; "1. Find flights"
        steps.append(mark + (lowered(text) if mark.endswith(", ") else text))
    return between.join(steps)


def lowered(text: str) -> str:
    """A sentence as it goes on behind a word."""
    if text.startswith("I ") or not text[:2].istitle():  # URL stays
        return text
    return text[0].lower() + text[1:]
