"""Copying drills, whose answer repeats values of the request verbatim, and lookup drills, whose answer is the name on one line of a list.

A call is mostly copying. A small model learns to copy from data that only copying can predict: invented words, numbers,
dates and colours, sampled for each row. Values belong to splits as in `values`, so a held-out drill has values that
training never saw. Spelling drills are the exception: their words are those of the vocabulary, in any split.

Choosing a tool by its description is a lookup: the words of the request lead to a line, and the line to a name. Beside
calls in one SFT these drills teach it to a small model (docs/experiments/reading-tools.md): with a name for a word or two ("calls"), with more words,
invented names, and words left out, added or moved in some requests ("phrases") and in most ("loose"). Lists are in the
style `described` of `chat.tools_prompt`, where the name follows its words, as copying needs it, and where declining is an
entry like any other.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from codechat.tasks.base import Message
from codechat.tasks.toolbox.catalogue import PHRASES, response
from codechat.tasks.toolbox.dialogues import message
from codechat.tasks.toolbox.values import COMMON, SHORT, WORDS, allowed, invent, slot, whole_words
from codechat.text import chat

COPIED = "word word name name phrase:1:4 integer:1:99999 number:1:999 date colour time"
SLOTS = tuple(map(slot, COPIED.split()))


def _row(domain: str, split: str, seed: int, i: int, messages: list[Message], **meta: Any) -> dict[str, Any]:
    name = f"{domain.replace('_', '-')}-{split}-{seed}-{i}"
    return {"id": name, "messages": messages, "domain": domain, "meta": meta | {"split": split}}


# ---------------------------------------------------------------- copying


def copy_dialogues(split: str, n: int, seed: int = 0, *, varied: float = 0.0) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "copy", "meta"}: one to three values in a request, and the same values as the
    answer. varied: share of the words and names from further afield (`values.Slot`); half of it is also the share of
    spelling drills, which put words in quotation marks (`values.whole_words` has the reason)."""
    rng = random.Random(f"copy {split} {seed}")
    for i in range(n):
        text = " ".join(str(rng.choice(SLOTS).sample(rng, split, varied)) for _ in range(rng.choice((1, 1, 2, 3))))
        asked, answer = rng.choice(PHRASES["repeat"]).format(text), text
        if varied and rng.random() < varied / 2:
            words = rng.choices(whole_words(), k=rng.randint(3, 6))
            asked = rng.choice(PHRASES["quote_words"]).format(" ".join(words))
            answer = ", ".join(f'"{word}"' for word in words)
        messages = [message("user", asked), message("assistant", answer)]
        yield _row("copy", split, seed, i, messages, tools_present=False, asked="chat")


# ---------------------------------------------------------------- lookups


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

    step: a key of STEPS. missing: share of requests for words that no line has; the answer is then the list's last entry,
    `chat.NOTHING`. rare_words: share of the words of the steps "phrases" and "loose" that are of `values.WORDS`."""
    rng = random.Random(f"lookup {step} {split} {seed}")
    for i in range(n):
        messages = _conversation(rng, split, _with_rare_words(rng, STEPS[step], rare_words), missing)
        yield _row(f"lookup_{step}", split, seed, i, messages, tools_present=True, asked="tool")


def _with_rare_words(rng: random.Random, step: Step, share: float) -> Step:
    """The step with other words for one conversation; earlier steps and share 0 stay as they are, without a draw."""
    if not share or not step.loose:
        return step
    rare = round(len(step.pool) * share / (1 - share)) if share < 1 else len(WORDS)
    return replace(step, pool=[*(step.pool if share < 1 else ()), *rng.sample(WORDS, min(rare, len(WORDS)))])


def _conversation(rng: random.Random, split: str, step: Step, missing: float) -> list[Message]:
    size = rng.randint(2, step.entries)
    names = _names(rng, split, step, size)
    words = rng.sample(step.pool, (size + 1) * step.words)
    *texts, absent = (words[i * step.words :][: rng.randint(1, step.words)] for i in range(size + 1))
    entries = [(text, name, rng.choice(step.pool)) for text, name in zip(texts, names)]
    lines = [f"{' '.join(text).capitalize()}: {name}({key}: integer)" for text, name, key in entries]
    messages = [message("system", chat.described("\n".join(["Functions:", *lines])))]
    for at in rng.sample(range(size), size):
        text, name, key = entries[at]
        if declined := rng.random() < missing:
            text, name = absent, chat.NOTHING
        words = _asked(rng, step, text)
        chained = rng.random() < step.chained and not declined
        if chained:
            text, second, second_key = entries[rng.choice([i for i in range(size) if i != at])]
            then = _asked(rng, step, text)
        value = rng.randint(1, 99)
        call = message("assistant", chat.format_call(name, {} if declined else {key: value}))
        if not chained:
            messages += [message("user", _said(words, value)), call]
            continue
        result = _result(rng, split)
        form = rng.choice(PHRASES["chain"])
        asked = form.format(first=f"{_said(words, value)}.", second=_said(then, rng.choice(PHRASES["the_result"])))
        last = message("assistant", chat.format_call(second, {second_key: result}))
        messages += [message("user", asked), call, message("function", response(result)), last]
    return messages


def _said(words: list[str], value: Any) -> str:
    return f"{' '.join(words).capitalize()} {value}"


def _result(rng: random.Random, split: str) -> int:
    while not allowed(result := rng.randint(1, 999), split):
        pass
    return result


def _names(rng: random.Random, split: str, step: Step, count: int) -> list[str]:
    """Different names: a word of the pool, or in the looser steps two words or an invented one."""
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
    mixed = kept + rng.choices(PHRASES["fillers"], k=rng.randint(0, 4))
    return rng.sample(mixed, len(mixed))
