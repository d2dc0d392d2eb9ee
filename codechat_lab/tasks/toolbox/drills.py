"""Copying drills repeat values of the request verbatim; lookup drills answer with the name on
one line of a list.

A call is mostly copying. A small model learns to copy from data that only copying can predict:
invented words, numbers, dates and colours, drawn for each row. Values belong to splits as in
`values`, so a held-out drill has values that training never saw; spelling drills alone use the
words of the vocabulary in any split.

Choosing a tool by its description is a lookup: the words of the request lead to a line, the
line to a name. These drills teach it beside calls in one SFT
(docs/experiments/reading-tools.md). Lists have the style `described` of `tool_lists.tools_prompt`:
the name follows its words, as copying needs it, and declining is an entry like any other."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from codechat.tasks.base import Message
from codechat.text import tool_calls, tool_lists
from codechat_lab.tasks.toolbox.catalogue import PHRASES, response
from codechat_lab.tasks.toolbox.sampler import message
from codechat_lab.tasks.toolbox.values import (
    COMMON,
    SHORT,
    WORDS,
    allowed,
    invent,
    slot,
    whole_words,
)

COPIED = "word word name name phrase:1:4 integer:1:99999 number:1:999 date colour time"
SLOTS = tuple(map(slot, COPIED.split()))


def _row(
    domain: str, split: str, seed: int, i: int, messages: list[Message], **meta: Any
) -> dict[str, Any]:
    name = f"{domain.replace('_', '-')}-{split}-{seed}-{i}"
    return {"id": name, "messages": messages, "domain": domain, "meta": meta | {"split": split}}


def copy_dialogues(
    split: str, n: int, seed: int = 0, *, varied: float = 0.0
) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "copy", "meta"}: one to three values in a request,
    and the same values as the answer. varied: share of the words and names drawn by
    `values.Slot.varied`; half of it is also the share of spelling drills, which put words in
    quotation marks (`values.whole_words` has the reason)."""
    rng = random.Random(f"copy {split} {seed}")
    for i in range(n):
        values = [
            rng.choice(SLOTS).sample(rng, split, varied) for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        text = " ".join(map(str, values))
        asked = rng.choice(PHRASES["repeat"]).format(text)
        answer = text
        if varied and rng.random() < varied / 2:
            words = rng.choices(whole_words(), k=rng.randint(3, 6))
            asked = rng.choice(PHRASES["quote_words"]).format(" ".join(words))
            answer = ", ".join(f'"{word}"' for word in words)
        messages = [message("user", asked), message("assistant", answer)]
        yield _row("copy", split, seed, i, messages, tools_present=False, asked="chat")


@dataclass(frozen=True)
class Step:
    """A kind of lookup drills. pool: words of lines and names. entries: most lines of a list.
    words: most words of a line. loose: share of requests in other words than the line's.
    chained: share of requests for two lines, where the second call takes the result of the
    first."""

    pool: Sequence[str]
    entries: int
    words: int
    loose: float
    chained: float


STEPS = {
    "calls": Step(SHORT, entries=4, words=2, loose=0.0, chained=0.0),
    "phrases": Step(COMMON, entries=5, words=3, loose=0.3, chained=0.1),
    "loose": Step(COMMON, entries=5, words=4, loose=0.6, chained=0.2),
}


class _Line(NamedTuple):
    """A line of a list: WORDS: NAME(KEY: integer)."""

    words: list[str]
    name: str
    key: str


def lookup_dialogues(
    split: str,
    n: int,
    seed: int = 0,
    *,
    step: str,
    missing: float = 0.0,
    rare_words: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "lookup_STEP", "meta"}: a list, then a request for
    each line, in any order.

    step: a key of STEPS. missing: share of requests for words that no line has; the answer is
    then the last entry, `tool_lists.NOTHING`. rare_words: share of the words of the steps "phrases"
    and "loose" that are of `values.WORDS`."""
    rng = random.Random(f"lookup {step} {split} {seed}")
    for i in range(n):
        kind = STEPS[step]
        if rare_words and kind.loose:
            kind = replace(kind, pool=_with_rare_words(rng, kind.pool, rare_words))
        messages = _lookups(rng, split, missing, kind)
        yield _row(f"lookup_{step}", split, seed, i, messages, tools_present=True, asked="tool")


def _with_rare_words(rng: random.Random, pool: Sequence[str], share: float) -> list[str]:
    """The pool and as many rare words as make up `share` of both; rare ones alone if the share
    is 1."""
    common = pool if share < 1 else ()
    rare = round(len(common) * share / (1 - share)) if common else len(WORDS)
    return [*common, *rng.sample(WORDS, min(rare, len(WORDS)))]


def _lookups(rng: random.Random, split: str, missing: float, step: Step) -> list[Message]:
    """The messages of a conversation."""
    size = rng.randint(2, step.entries)
    names = _names(rng, split, step, size)
    drawn = rng.sample(step.pool, (size + 1) * step.words)
    groups = [drawn[at : at + step.words] for at in range(0, len(drawn), step.words)]
    *texts, absent = [words[: rng.randint(1, step.words)] for words in groups]
    lines = [_Line(words, name, rng.choice(step.pool)) for words, name in zip(texts, names)]
    listed = [
        f"{' '.join(line.words).capitalize()}: {line.name}({line.key}: integer)" for line in lines
    ]
    messages = [message("system", tool_lists.described("\n".join(["Functions:", *listed])))]
    for at in rng.sample(range(size), size):
        others = [line for i, line in enumerate(lines) if i != at]
        declined = rng.random() < missing
        request = _asked(rng, step.loose, absent if declined else lines[at].words)
        twice = rng.random() < step.chained and not declined
        if declined:
            messages += _declined(rng, request)
        elif twice:
            messages += _chained(rng, split, request, lines[at], rng.choice(others), step.loose)
        else:
            value = rng.randint(1, 99)
            messages += [message("user", f"{request} {value}"), _call(lines[at], value)]
    return messages


def _call(line: _Line, value: int) -> Message:
    return message("assistant", tool_calls.format_call(line.name, {line.key: value}))


def _declined(rng: random.Random, request: str) -> list[Message]:
    answer = message("assistant", tool_calls.format_call(tool_lists.NOTHING, {}))
    return [message("user", f"{request} {rng.randint(1, 99)}"), answer]


def _chained(
    rng: random.Random, split: str, request: str, line: _Line, second: _Line, loose: float
) -> list[Message]:
    """A request for two lines, both calls, and the response between them."""
    then = _asked(rng, loose, second.words)
    value = rng.randint(1, 99)
    result = rng.randint(1, 999)
    while not allowed(result, split):
        result = rng.randint(1, 999)
    form = rng.choice(PHRASES["chain"])
    text = form.format(
        first=f"{request} {value}.", second=f"{then} {rng.choice(PHRASES['the_result'])}"
    )
    return [
        message("user", text),
        _call(line, value),
        message("function", response(result)),
        _call(second, result),
    ]


def _names(rng: random.Random, split: str, step: Step, count: int) -> list[str]:
    """Different names: a word of the pool, or in the looser steps two words or an invented one."""
    found: list[str] = []
    while len(found) < count:
        draw = rng.random() if step.loose else 0.0
        if draw < 0.3:
            name = rng.choice(step.pool)
        elif draw < 0.7:
            name = "_".join(rng.sample(step.pool, 2))
        else:
            name = invent(rng)
        if name not in (tool_lists.NOTHING, *found) and (draw < 0.7 or allowed(name, split)):
            found.append(name)
    return found


def _asked(rng: random.Random, loose: float, words: list[str]) -> str:
    """The words of a request: those of the line, or all but at most one of them among fillers,
    in any order."""
    if rng.random() < loose:
        kept = rng.sample(words, rng.randint(max(1, len(words) - 1), len(words)))
        mixed = kept + rng.choices(PHRASES["fillers"], k=rng.randint(0, 4))
        words = rng.sample(mixed, len(mixed))
    return " ".join(words).capitalize()
