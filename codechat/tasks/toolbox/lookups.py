"""Lookup drills: lists whose entries are a few words, a name and an argument, and requests that repeat the words.

Choosing a tool by its description is a lookup: the words of the request lead to a line, and the line to a name. Beside
calls in one SFT these drills teach it to a small model (docs/experiments/reading-tools.md): with a name for a word or two ("calls"), with more words,
invented names, and words left out, added or moved in some requests ("phrases") and in most ("loose"). Lists are in the
style `described` of `chat.tools_prompt`, where the name follows its words, as copying needs it, and where declining is an
entry like any other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from codechat.core.errors import ConfigError
from codechat.tasks.base import check_split
from codechat.tasks.toolbox.catalogue import response
from codechat.tasks.toolbox.dialogues import CHAIN, RESULT, message
from codechat.tasks.toolbox.values import COMMON, WORDS, allowed, invent
from codechat.text import chat

# One token each in a small GPT-2 vocabulary, at the beginning of a line too.
SHORT = """air all art back body book box day down end face field form ground head key land light line man name new night old order part
play read red rest right room round self side stand ten thing time view work year""".split()
FILLERS = "please can you the a now want to me of I with and for it".split()


@dataclass(frozen=True)
class Step:
    """A kind of drill. entries: most lines of a list. words: most words of a line. loose: share of requests whose words
    are not the line's own. chained: share of requests for one line and then another, whose call takes the result of the
    first."""

    pool: Sequence[str]
    entries: int
    words: int
    loose: float = 0.0
    chained: float = 0.0


STEPS = {
    "calls": Step(SHORT, entries=4, words=2),
    "phrases": Step(COMMON, entries=5, words=3, loose=0.3, chained=0.1),
    "loose": Step(COMMON, entries=5, words=4, loose=0.6, chained=0.2),
}


def lookup_dialogues(
    split: str, n: int, seed: int = 0, *, step: str, missing: float = 0.0, rare_words: float = 0.0
) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "lookup_STEP", "meta"}: a list, then a request for each of its lines, in any order.

    missing: share of requests for words that no line has; the answer is then the list's last entry, `chat.NOTHING`. rare_words: share of the words of the
    steps "phrases" and "loose" that are of `words.WORDS`. ConfigError for an unknown step."""
    check_split(split)
    if step not in STEPS:
        raise ConfigError(f"step {step!r}; required is one of {', '.join(STEPS)}")
    rng = random.Random(f"lookup {step} {split} {seed}")
    for i in range(n):
        messages = _conversation(rng, split, _with_rare_words(rng, STEPS[step], rare_words), missing)
        meta = {"tools_present": True, "asked": "tool", "split": split}
        yield {
            "id": f"lookup-{step}-{split}-{seed}-{i}",
            "messages": messages,
            "domain": f"lookup_{step}",
            "meta": meta,
        }


def _with_rare_words(rng: random.Random, step: Step, share: float) -> Step:
    """The step with other words for one conversation; earlier steps and share 0 stay as they are, without a draw."""
    if not share or not step.loose:
        return step
    rare = round(len(step.pool) * share / (1 - share)) if share < 1 else len(WORDS)
    return replace(step, pool=[*(step.pool if share < 1 else ()), *rng.sample(WORDS, min(rare, len(WORDS)))])


def _conversation(rng: random.Random, split: str, step: Step, missing: float) -> list[dict[str, str]]:
    count = rng.randint(2, step.entries)
    names = _names(rng, split, step, count)
    words = rng.sample(step.pool, (count + 1) * step.words)
    texts = [words[i * step.words :][: rng.randint(1, step.words)] for i in range(count + 1)]  # the last is on no line
    keys = [rng.choice(step.pool) for _ in names]
    lines = [_line(*entry) for entry in zip(texts, names, keys)]
    messages = [message("system", chat.described("\n".join(["Functions:", *lines])))]
    for at in rng.sample(range(count), count):
        absent = rng.random() < missing
        first = _Ask(
            _asked(rng, step, texts[-1] if absent else texts[at]), chat.NOTHING if absent else names[at], keys[at]
        )
        if rng.random() < step.chained and not absent:
            other = rng.choice([i for i in range(count) if i != at])
            messages += _chain(rng, split, first, _Ask(_asked(rng, step, texts[other]), names[other], keys[other]))
            continue
        value = rng.randint(1, 99)
        messages.append(message("user", first.said(value)))
        messages.append(message("assistant", first.call(value)))
    return messages


@dataclass(frozen=True)
class _Ask:
    """A request in words for one entry: its name, and the key of its argument."""

    words: list[str]
    name: str
    key: str

    def said(self, value: Any) -> str:
        return f"{' '.join(self.words).capitalize()} {value}".strip()

    def call(self, value: int) -> str:
        return chat.format_call(self.name, {} if self.name == chat.NOTHING else {self.key: value})


def _chain(rng: random.Random, split: str, first: _Ask, second: _Ask) -> list[dict[str, str]]:
    """A request for two entries in turn: the first call, its result, and the second call with it."""
    value, result = rng.randint(1, 99), _result(rng, split)
    asked = rng.choice(CHAIN).format(first=f"{first.said(value)}.", second=second.said(rng.choice(RESULT)))
    return [
        message("user", asked),
        message("assistant", first.call(value)),
        message("function", response(result)),
        message("assistant", second.call(result)),
    ]


def _result(rng: random.Random, split: str) -> int:
    while not allowed(result := rng.randint(1, 999), split):
        pass
    return result


def _line(text: list[str], name: str, key: str) -> str:
    return f"{' '.join(text).capitalize()}: {name}({key}: integer)"


def _names(rng: random.Random, split: str, step: Step, count: int) -> list[str]:
    """Different names: a word of the pool, or in the loosest step two words or an invented one."""
    found: list[str] = []
    while len(found) < count:
        draw = rng.random() if step.loose else 0.0
        name = (
            rng.choice(step.pool) if draw < 0.3 else "_".join(rng.sample(step.pool, 2)) if draw < 0.7 else invent(rng)
        )
        if name not in (chat.NOTHING, *found) and (draw < 0.7 or allowed(name, split)):
            found.append(name)
    return found


def _asked(rng: random.Random, step: Step, text: list[str]) -> list[str]:
    """The words of a request: those of the line, or all but at most one of them among fillers, in any order."""
    if rng.random() >= step.loose:
        return text
    kept = rng.sample(text, rng.randint(max(1, len(text) - 1), len(text)))
    mixed = kept + rng.choices(FILLERS, k=rng.randint(0, 4))
    return rng.sample(mixed, len(mixed))
