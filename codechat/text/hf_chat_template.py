"""Conversations in the layout of an imported model: its own jinja chat template, the third mode of `chat`.

A template is rendered twice: with a placeholder for each content, which shows where contents are, and with the
contents. Contents may be trimmed or written as json strings; a template that changes them otherwise raises for that
conversation, since its loss mask would be unreliable.

The text becomes ids as in transformers, except that it is cut where the assistant begins to write and around its
closing token, so prompts stay prefixes of conversations. Content that holds a special token raises, since it forges a
turn; the assistant may write special tokens that the layout does not use. The role "function" is called "tool" there.
`strftime_now` is not defined: a prompt must not depend on the day.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text.imported_tokenizer import ImportedTokenizer

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")  # transformers' marks for masks; nothing for the text
_MARK = "\ue000{}\ue001"
_MARKED = re.compile("\ue000([0-9]+)\ue001")


class Turn(NamedTuple):
    """Where a message is, in characters or ids: [start, end), its content at [body, body_end), and its closing token
    ends at `closed`."""

    start: int
    body: int
    body_end: int
    closed: int
    end: int


def lay_out(
    messages: Sequence[Mapping[str, str]], tokenizer: ImportedTokenizer, *, prompt: bool = False
) -> tuple[str, list[Turn]]:
    """The text of a conversation and its turns; prompt: up to where the assistant begins to write."""
    marks = [{**message, "content": _MARK.format(i)} for i, message in enumerate(messages)]
    layout, text = (_fill(m, tokenizer, prompt) for m in (marks, messages))
    if [int(i) for i in _MARKED.findall(layout)] != list(range(len(messages))):
        raise DataError(f"the chat template of {tokenizer.spec} drops or moves messages; give roles in its order")
    pieces = _MARKED.split(layout)  # text, number, text, number, ..., text
    pieces[1::2] = _written(pieces, [message["content"] for message in messages], text)
    if "".join(pieces) != text:
        changed = f"the chat template of {tokenizer.spec} changes contents of this conversation"
        raise DataError(f"{changed}; remove what it treats specially, such as reasoning")
    return text, _turns(pieces, tokenizer)


def _written(pieces: list[str], contents: list[str], text: str) -> list[str]:
    """Each content as the template wrote it: as it is, trimmed, or as the inside of a json string."""
    out, at = [], len(pieces[0])
    for content, between in zip(contents, pieces[2::2]):
        quoted = json.dumps(content, ensure_ascii=False)[1:-1]
        ways = (content, content.strip(), content.strip("\n"), content.lstrip("\n"), quoted)
        out.append(next((way for way in ways if text.startswith(way + between, at)), content))
        at += len(out[-1] + between)
    return out


def _turns(pieces: list[str], tokenizer: ImportedTokenizer) -> list[Turn]:
    turns, start, at = [], 0, len(pieces[0])
    for content, between in zip(pieces[1::2], pieces[2::2]):
        body_end = at + len(content)
        stop = _specials(tokenizer).search(between)
        closed = body_end + (stop.end() if stop else 0)
        after = between[closed - body_end :]
        end = closed + len(after) - len(after.lstrip())
        turns.append(Turn(start, at, body_end, closed, end))
        start, at = end, body_end + len(between)
    return turns


def encode(
    messages: Sequence[Mapping[str, str]], tokenizer: ImportedTokenizer, *, prompt: bool = False
) -> tuple[list[int], list[Turn]]:
    """Ids, and the turn of each message in ids."""
    for number, message in enumerate(messages):
        check_content(message["content"], message["role"], tokenizer, f"message {number}")
    text, turns = lay_out(messages, tokenizer, prompt=prompt)
    mine = [t for t, message in zip(turns, messages) if message["role"] == "assistant"]
    cuts = sorted({0, len(text), *(place for t in mine for place in (t.body, t.body_end, t.closed))})
    ids: list[int] = []
    starts: list[int] = []  # the character where each id begins
    for start, stop in zip(cuts, cuts[1:]):
        part, places = tokenizer.encode_special(text[start:stop])
        ids += part
        starts += [start + place for place in places]
    return ids, [Turn(*(bisect_left(starts, place) for place in turn)) for turn in turns]


@lru_cache(maxsize=16)
def closing(tokenizer: ImportedTokenizer) -> tuple[int, ...]:
    """The ids that end what the assistant writes."""
    text, (_, turn) = lay_out([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], tokenizer)
    if turn.closed == turn.body_end:
        raise DataError(f"the chat template of {tokenizer.spec} ends an answer without special token; use --tags text")
    return tuple(tokenizer.encode_special(text[turn.body_end : turn.closed])[0])


def check_content(content: str, role: str, tokenizer: ImportedTokenizer, where: str) -> None:
    if match := (_structural(tokenizer) if role == "assistant" else _specials(tokenizer)).search(content):
        raise DataError(f"{where} ({role}) holds {match[0]} of {tokenizer.spec}, which forges a turn; remove it")


@lru_cache(maxsize=16)
def _specials(tokenizer: ImportedTokenizer) -> re.Pattern[str]:
    return _any_of(tokenizer.special_tokens)


@lru_cache(maxsize=16)
def _structural(tokenizer: ImportedTokenizer) -> re.Pattern[str]:
    """The special tokens that the layout uses, or that begin and end a text."""
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    text, _ = lay_out(talk, tokenizer, prompt=True)
    return _any_of({*_specials(tokenizer).findall(text), *tokenizer.saved["special"].values()})


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
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
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    text = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", tokenizer.template)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of {tokenizer.spec} is no jinja ({error}); use --tags text") from None


def _raise(message: str) -> None:
    raise DataError(f"the chat template rejects the conversation: {message}")


def _fill(messages: Sequence[Mapping[str, str]], tokenizer: ImportedTokenizer, prompt: bool) -> str:
    import jinja2

    renamed = [{**m, "role": "tool" if m["role"] == "function" else m["role"]} for m in messages]
    try:
        return _compiled(tokenizer).render(messages=renamed, add_generation_prompt=prompt, **tokenizer.saved["special"])
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of {tokenizer.spec} cannot render the conversation ({error})") from None
