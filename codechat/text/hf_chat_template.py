"""Conversations in the layout of an imported model: its own jinja chat template, the third mode of `chat`.

Each answer is rendered behind its own generation prompt, where it is sampled: what the template writes between prompt
and content belongs to the answer, text that it adds to the last answer only (an empty <think>) is left out. A template
or a conversation where the next prompt does not go on from there raises: its loss would be on other ids than are
sampled. Contents may be trimmed or written as json strings, but not changed otherwise.

Each answer is tokenised behind its prompt, and each prompt behind the answer before, as in transformers, except for
tokens that would cross the border. Content that holds a special token raises, since it forges a turn; the assistant may
write special tokens that the layout does not use. The role "function" is called "tool" there. `strftime_now` is not
defined: a prompt must not depend on the day.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text.tokenizer import ImportedTokenizer

Messages = Sequence[Mapping[str, str]]

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")  # transformers' marks for masks; nothing for the text
_MARK = "\ue000{}\ue001"
CHANGED = "changes contents of this conversation; remove what it treats specially, such as reasoning"
# what a template may raise, being somebody else's program
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Turn(NamedTuple):
    """A message in five parts, as texts or as ids: what stands before it, what an answer begins with before its
    content, the content, what ends it, what follows. The assistant writes the three in the middle."""

    head: Any
    opening: Any
    body: Any
    closing: Any
    after: Any


class Form(NamedTuple):
    """What a template writes around each answer. asked: the generation prompt of `USER`; before: its end. closing ends
    with the special token `stop`; next: it and what follows before a question; after: what follows at the end of a
    conversation. blank: what the tokenizer adds to the beginning of an answer."""

    asked: str
    before: str
    opening: str
    closing: str
    next: str
    after: str
    stop: int
    blank: str


USER, ANSWER = ({"role": role, "content": _MARK.format(i)} for i, role in enumerate(("user", "assistant")))


@lru_cache(maxsize=16)
def form(tokenizer: ImportedTokenizer) -> Form:
    """The form of answers. DataError for a template in which they cannot be trained as they are sampled."""
    asked, last = _fill([USER], tokenizer, True), _fill([USER, ANSWER], tokenizer, False)
    among = _fill([USER, ANSWER, USER], tokenizer, True)
    opening, content, rest = among.removeprefix(asked).partition(ANSWER["content"])
    tail = last.rpartition(ANSWER["content"])[2]
    if not content or not among.startswith(asked):
        raise _fault(tokenizer, "writes no answer behind its generation prompt, where it is sampled; use --tags text")
    if not (stop := _specials(tokenizer).search(tail)):
        raise _fault(tokenizer, "ends an answer without special token; use --tags text")
    closing = tail[: stop.end()]
    if not rest.startswith(closing):
        raise _fault(tokenizer, f"ends the last answer with {closing!r}, others with {rest[:40]!r}; use --tags text")
    before = asked.rpartition(USER["content"])[2]
    before = before[max((special.start() for special in _specials(tokenizer).finditer(before)), default=0) :]
    sample = f"{opening}x{closing}"
    ids, _ = tokenizer.encode_behind(before, sample)
    blank = tokenizer.decode_inside(ids).removesuffix(sample)
    blank = blank if blank.isspace() else ""
    return Form(asked, before, opening, closing, rest, tail[stop.end() :], tokenizer.special_tokens[stop[0]], blank)


def encode(messages: Messages, tokenizer: ImportedTokenizer, *, prompt: bool = False) -> tuple[list[Turn], list[int]]:
    """The ids of each message, and those after the last; prompt: up to where the assistant begins to write."""
    form(tokenizer)
    for number, message in enumerate(messages):
        check_content(message["content"], message["role"], tokenizer, f"message {number}")
    turns, tail = lay_out(messages, tokenizer, prompt=prompt)
    ids, pieces, before = [], [], ""
    for message, turn in zip(messages, turns):
        if message["role"] != "assistant":
            pieces += turn
            continue
        ids += _encoded([*pieces, turn.head], tokenizer, before) + encode_answer(turn, tokenizer)
        pieces, before = [turn.after], turn.closing
    ids += _encoded([*pieces, tail], tokenizer, before)
    return [Turn(*ids[at : at + 5]) for at in range(0, len(ids) - 1, 5)], ids[-1]


def encode_answer(answer: Turn, tokenizer: ImportedTokenizer) -> list[list[int]]:
    """The ids of opening, content and closing of an answer."""
    return _encoded(answer[1:4], tokenizer, form(tokenizer).before, loses=False)


def _encoded(pieces: Sequence[str], tokenizer: ImportedTokenizer, before: str, loses: bool = True) -> list[list[int]]:
    """The ids of pieces of a text that stands behind `before`; a token belongs to the piece in which it begins."""
    ids, starts = tokenizer.encode_behind(before, "".join(pieces), loses=loses)
    cuts = [bisect_left(starts, at) for at in accumulate(map(len, pieces), initial=0)]
    return [ids[start:end] for start, end in zip([0, *cuts[1:-1]], [*cuts[1:-1], len(ids)])]


def answer(content: str, tokenizer: ImportedTokenizer) -> Turn:
    """The texts of an answer as the template writes it: among others, else as the last one (with its reasoning)."""
    form_ = form(tokenizer)
    message = {"role": "assistant", "content": content}
    for more, rest in (([USER], form_.next), ([], form_.closing + form_.after)):
        text = _fill([USER, message, *more], tokenizer, bool(more))
        for written in _ways(content):
            if text == form_.asked + form_.opening + written + rest:
                return Turn("", form_.opening, written, form_.closing, form_.after)
    raise _fault(tokenizer, CHANGED)


def lay_out(messages: Messages, tokenizer: ImportedTokenizer, *, prompt: bool = False) -> tuple[list[Turn], str]:
    """The texts of each message, and the text after the last; prompt: up to where the assistant begins to write."""
    last = messages[-1] if messages[-1]["role"] == "assistant" and not prompt else None
    known, turns, at = messages[:-1] if last else messages, [], 0
    text = _fill(known, tokenizer, prompt or last is not None)
    for number, message in enumerate(known):
        if message["role"] == "assistant":
            turn = answer(message["content"], tokenizer)
            sampled = turn.opening + turn.body + turn.closing
            # nothing is sampled before the first message
            asked = _fill(known[:number], tokenizer, True) if number else text.partition(sampled)[0]
            if len(asked) < at or not text.startswith(asked + sampled):
                raise _fault(tokenizer, f"writes answer {number} elsewhere than it is sampled")
            turns.append(turn._replace(head=text[at : len(asked)], after=""))
            at = len(asked + sampled)
        else:
            written = next((way for way in _ways(message["content"]) if text.find(way, at) >= 0), None)
            if written is None:
                raise _fault(tokenizer, CHANGED)
            start = text.index(written, at)
            end = _specials(tokenizer).match(text, start + len(written))
            turns.append(Turn(text[at:start], "", written, "", end[0] if end else ""))
            at = start + len(written + turns[-1].after)
    if not last:
        return turns, text[at:]
    turn = answer(last["content"], tokenizer)
    sampled = text + turn.opening + turn.body + turn.closing
    as_last = _fill(messages, tokenizer, False).startswith(sampled)
    if not as_last and not _fill([*messages, USER], tokenizer, True).startswith(sampled):
        raise _fault(tokenizer, "writes the last answer elsewhere than it is sampled")
    return [*turns, turn._replace(head=text[at:], after="")], turn.after


def _ways(content: str) -> tuple[str, ...]:
    """A content as templates write it: as it is, trimmed, or as the inside of a json string."""
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    return content, content.strip(), content.strip("\n"), content.lstrip("\n"), quoted


def _fault(tokenizer: ImportedTokenizer, fault: str) -> DataError:
    return DataError(f"the chat template of {tokenizer.spec} {fault}")


def check_content(content: str, role: str, tokenizer: ImportedTokenizer, where: str) -> None:
    if match := _specials(tokenizer, role == "assistant").search(content):
        raise DataError(f"{where} ({role}) holds {match[0]} of {tokenizer.spec}, which forges a turn; remove it")


@lru_cache(maxsize=16)
def _specials(tokenizer: ImportedTokenizer, structural: bool = False) -> re.Pattern[str]:
    """Any special token; structural: those that the layout uses, or that begin and end a text."""
    tokens = [*tokenizer.special_tokens]
    if structural:
        used = _specials(tokenizer).findall(_fill([USER, ANSWER, USER], tokenizer, True))
        tokens = [*used, *tokenizer.saved["special"].values()]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


@lru_cache(maxsize=16)
def _compiled(tokenizer: ImportedTokenizer) -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is somebody else's program

    if not getattr(tokenizer, "template", None):
        raise ConfigError(f'tags "template" with {tokenizer.spec}, which has none; use tags "reserved" or "text"')
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **({"ensure_ascii": False} | how))
    environment.globals["raise_exception"] = _raise
    text = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", tokenizer.template)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise _fault(tokenizer, f"is no jinja ({error}); use --tags text") from None


def _raise(message: str) -> None:
    raise DataError(f"the chat template rejects the conversation: {message}")


def _fill(messages: Messages, tokenizer: ImportedTokenizer, prompt: bool) -> str:
    """The text of messages; no tools or documents, which transformers passes as None."""
    import jinja2

    renamed = [{**m, "role": "tool" if m["role"] == "function" else m["role"]} for m in messages]
    template, given = _compiled(tokenizer), dict(tokenizer.saved["special"], tools=None, documents=None)
    try:
        return template.render(messages=renamed, add_generation_prompt=prompt, **given)
    except DataError:
        raise
    except (jinja2.TemplateError, *_FAULTS) as error:
        raise _fault(tokenizer, f"cannot render the conversation ({error})") from None
