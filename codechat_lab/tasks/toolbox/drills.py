"""Copying drills, whose answer repeats values of the request verbatim, and lookup drills, whose answer is the name
on one line of a list.

A call is mostly copying. A small model learns to copy from data that only copying can predict: invented words, numbers,
dates and colours, sampled for each row. Values belong to splits as in `values`, so a held-out drill has values that
training never saw. Spelling drills are the exception: their words are those of the vocabulary, in any split.

Choosing a tool by its description is a lookup: the words of the request lead to a line, and the line to a name.
Beside calls in one SFT these drills teach it to a small model (docs/experiments/reading-tools.md): with a name for
a word or two ("calls"), with more words, invented names, and words left out, added or moved in some requests
("phrases") and in most ("loose"). Lists are in the style `described` of `chat.tools_prompt`, where the name follows
its words, as copying needs it, and where declining is an entry like any other."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from codechat.tasks.base import Message
from codechat.text import chat
from codechat_lab.tasks.toolbox.catalogue import PHRASES, response
from codechat_lab.tasks.toolbox.dialogues import message
from codechat_lab.tasks.toolbox.values import COMMON, SHORT, WORDS, allowed, invent, slot, whole_words

COPIED = "word word name name phrase:1:4 integer:1:99999 number:1:999 date colour time"
SLOTS = tuple(map(slot, COPIED.split()))


def _row(domain: str, split: str, seed: int, i: int, messages: list[Message], **meta: Any) -> dict[str, Any]:
    name = f"{domain.replace('_', '-')}-{split}-{seed}-{i}"
    return {"id": name, "messages": messages, "domain": domain, "meta": meta | {"split": split}}


def copy_dialogues(split: str, n: int, seed: int = 0, *, varied: float = 0.0) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "copy", "meta"}: one to three values in a request, and the same values as the
    answer. varied: share of the words and names from further afield (`values.Slot`); half of it is also the share of
    spelling drills, which put words in quotation marks (`values.whole_words` has the reason)."""
    rng = random.Random(f"copy {split} {seed}")
    for i in range(n):
        text = " ".join(str(rng.choice(SLOTS).sample(rng, split, varied)) for _ in range(rng.choice((1, 1, 2, 3))))
        asked = rng.choice(PHRASES["repeat"]).format(text)
        answer = text
        if varied and rng.random() < varied / 2:
            words = rng.choices(whole_words(), k=rng.randint(3, 6))
            asked = rng.choice(PHRASES["quote_words"]).format(" ".join(words))
            answer = ", ".join(f'"{word}"' for word in words)
        messages = [message("user", asked), message("assistant", answer)]
        yield _row("copy", split, seed, i, messages, tools_present=False, asked="chat")


# Kinds of drills. pool: words of lines and names. entries: most lines of a list. words: most words of a line.
# loose: share of requests whose words are not the line's own. chained: share of requests for one line and then
# another, whose call takes the result of the first.
STEPS: dict[str, dict[str, Any]] = {
    "calls": dict(pool=SHORT, entries=4, words=2, loose=0.0, chained=0.0),
    "phrases": dict(pool=COMMON, entries=5, words=3, loose=0.3, chained=0.1),
    "loose": dict(pool=COMMON, entries=5, words=4, loose=0.6, chained=0.2),
}


def lookup_dialogues(
    split: str,
    n: int,
    seed: int = 0,
    *,
    step: str,
    missing: float = 0.0,
    rare_words: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "lookup_STEP", "meta"}: a list, then a request for each of its lines, in
    any order.

    step: a key of STEPS. missing: share of requests for words that no line has; the answer is then the list's last
    entry,
    `chat.NOTHING`. rare_words: share of the words of the steps "phrases" and "loose" that are of `values.WORDS`."""
    rng = random.Random(f"lookup {step} {split} {seed}")
    how = STEPS[step]
    for i in range(n):
        if rare_words and how["loose"]:
            common = STEPS[step]["pool"] if rare_words < 1 else ()
            rare = round(len(common) * rare_words / (1 - rare_words)) if common else len(WORDS)
            how = how | {"pool": [*common, *rng.sample(WORDS, min(rare, len(WORDS)))]}
        messages = _lookups(rng, split, missing, **how)
        yield _row(f"lookup_{step}", split, seed, i, messages, tools_present=True, asked="tool")


def _lookups(
    rng: random.Random,
    split: str,
    missing: float,
    pool: Sequence[str],
    entries: int,
    words: int,
    loose: float,
    chained: float,
) -> list[Message]:
    """The messages of a conversation."""
    size = rng.randint(2, entries)
    names = _names(rng, split, pool, loose, size)
    drawn = rng.sample(pool, (size + 1) * words)
    *texts, absent = (drawn[i * words :][: rng.randint(1, words)] for i in range(size + 1))
    listed = [(text, name, rng.choice(pool)) for text, name in zip(texts, names)]
    lines = [f"{' '.join(text).capitalize()}: {name}({key}: integer)" for text, name, key in listed]
    messages = [message("system", chat.described("\n".join(["Functions:", *lines])))]
    for at in rng.sample(range(size), size):
        text, name, key = listed[at]
        declined = rng.random() < missing
        if declined:
            text = absent
            name = chat.NOTHING
        request = _asked(rng, loose, text)
        twice = rng.random() < chained and not declined
        if twice:
            text, second, second_key = listed[rng.choice([i for i in range(size) if i != at])]
            then = _asked(rng, loose, text)
        value = rng.randint(1, 99)
        request = f"{request} {value}"
        turns = [message("assistant", chat.format_call(name, {} if declined else {key: value}))]
        if twice:
            result = next(n for n in iter(lambda: rng.randint(1, 999), 0) if allowed(n, split))
            form = rng.choice(PHRASES["chain"])
            request = form.format(first=f"{request}.", second=f"{then} {rng.choice(PHRASES['the_result'])}")
            last = message("assistant", chat.format_call(second, {second_key: result}))
            turns += [message("function", response(result)), last]
        messages += [message("user", request), *turns]
    return messages


def _names(rng: random.Random, split: str, pool: Sequence[str], loose: float, count: int) -> list[str]:
    """Different names: a word of the pool, or in the looser steps two words or an invented one."""
    found: list[str] = []
    while len(found) < count:
        draw = rng.random() if loose else 0.0
        name = rng.choice(pool) if draw < 0.3 else "_".join(rng.sample(pool, 2)) if draw < 0.7 else invent(rng)
        if name not in (chat.NOTHING, *found) and (draw < 0.7 or allowed(name, split)):
            found.append(name)
    return found


def _asked(rng: random.Random, loose: float, text: list[str]) -> str:
    """The words of a request: those of the line, or all but at most one of them among fillers, in any order."""
    if rng.random() < loose:
        kept = rng.sample(text, rng.randint(max(1, len(text) - 1), len(text)))
        mixed = kept + rng.choices(PHRASES["fillers"], k=rng.randint(0, 4))
        text = rng.sample(mixed, len(mixed))
    return " ".join(text).capitalize()
