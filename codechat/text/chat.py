"""The protocol: messages <-> token ids, the loss mask, and where a completion ends.

A message is {"role": "system" | "user" | "assistant" | "function", "content": str} and becomes

    {tag}\n{content}\n<|end|>\n

with the tags of `TAGS`. Nothing else in the project knows this layout: fine-tuning, sampling, evaluation, command lines and exports call
`render` and `prompt`. There are three tag modes. "reserved": one id per tag, n_vocab + its index in TAGS, so no user text can forge a turn.
"text": tags are spelled in ordinary tokens, and content that holds one raises. "template": an imported model's own chat template
(hf_chat_template). The inline <functioncall> is a tag too, but only in assistant turns.

"raw" is for base models: no turns. The tokenizer's begin-of-text token, if it has one, then the contents, with an empty line between two that
the assistant did not write. The assistant continues that text and closes with the end-of-text token.

Tags, line ends and contents are tokenised separately, so the ids of a prompt are a prefix of the ids of the whole conversation. A stop is a
sequence of ids, never a set of pieces: code may hold `<`, `|`, `end` and `>`.

Only what the assistant writes carries loss, in all its turns: content, the line end after it and <|end|>. The grammar of calls is in tool_calls;
its names are available here too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text import hf_chat_template
from codechat.text.tokenizer import Tokenizer
from codechat.text.tool_calls import (  # noqa: F401 (offered here too)
    CALL_TAG,
    DECLINE,
    DECLINED,
    FORMS,
    NOTHING,
    NOTHING_FITS,
    READABLE,
    STYLES,
    TAGS,
    Call,
    check_style,
    described,
    format_call,
    in_words,
    offered_names,
    offered_schemas,
    parse_calls,
    tools_prompt,
)

Message = Mapping[str, str]

MODES = ("reserved", "text")
TEMPLATE, RAW = "template", "raw"
N_TAGS = len(TAGS)
ROLES = ("system", "user", "assistant", "function")
TAG_OF = dict(zip(ROLES, TAGS))
END_TAG = "<|end|>"
# What other projects call our roles, for the error message.
_OTHER_NAMES = {
    "tool": "function",
    "function_response": "function",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "developer": "system",
}


class Span(NamedTuple):
    """Where a turn is in the ids: [start, end) from its tag to the line end after <|end|>; its content is [body_start, body_end). An assistant
    turn carries loss from body_start up to that last line end."""

    role: str
    start: int
    end: int
    body_start: int
    body_end: int


class Rendered(NamedTuple):
    """A conversation as ids; loss_mask is 1 for ids that carry loss, else 0; a span per message."""

    ids: list[int]
    loss_mask: list[int]
    spans: list[Span]


@dataclass(frozen=True)
class _Layout:
    """The fixed ids of one tokenizer and tag mode."""

    heads: dict[str, list[int]]  # role -> tag and line end
    line_end: list[int]
    end_tag: list[int]
    call_tag: list[int]
    forbidden: dict[str, tuple[str, ...]]  # role -> tags that its content may not hold


@lru_cache(maxsize=64)
def _layout(tokenizer: Tokenizer, tags: str) -> _Layout:
    if tags not in MODES:
        raise ConfigError(f"tags {tags!r}; required is one of {', '.join((*MODES, TEMPLATE, RAW))}")
    reserved = tags == "reserved"
    ids = {tag: [tokenizer.n_vocab + i] if reserved else tokenizer.encode(tag) for i, tag in enumerate(TAGS)}
    line_end = tokenizer.encode("\n")
    turn_tags = tuple(tag for tag in TAGS if tag != CALL_TAG)
    return _Layout(
        heads={role: ids[tag] + line_end for role, tag in TAG_OF.items()},
        line_end=line_end,
        end_tag=ids[END_TAG],
        call_tag=ids[CALL_TAG],
        forbidden={role: () if reserved else turn_tags if role == "assistant" else TAGS for role in ROLES},
    )


def render(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> Rendered:
    """A conversation to train on. Raises DataError for an unknown role, content that is no string, no message, no assistant turn, and in text
    mode content that holds a tag; ConfigError for an unknown mode."""
    rendered = _rendered(messages, tokenizer, tags)
    if not any(span.role == "assistant" for span in rendered.spans):
        roles = ", ".join(span.role for span in rendered.spans)
        raise DataError(f"a conversation of {roles} has no assistant turn; add one or drop the conversation")
    return rendered


def prompt(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids up to where the assistant begins to write: the turns, its tag and a line end. Raises as `render`, except that no assistant turn is
    needed and the last message must not be one."""
    rendered = _rendered(messages, tokenizer, tags, prompt=True)
    if rendered.spans[-1].role == "assistant":
        raise DataError("the last message has the role assistant; a prompt ends with another role; remove it")
    return rendered.ids


def between_turns(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids from after a sampled answer's closing tag to where the next answer begins, with `messages` in between.

    `prompt` + sampled ids + these = `prompt` of the whole conversation, so no earlier turn is tokenised again. Raises as `render`."""
    if tags == TEMPLATE:
        ids, turns = hf_chat_template.encode(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, *messages], tokenizer, prompt=True
        )
        return ids[turns[1][3] :]
    if tags == RAW:
        return _raw(messages, tokenizer).ids
    layout = _layout(tokenizer, tags)
    return layout.line_end + _turns(messages, tokenizer, layout).ids + layout.heads["assistant"]


def completion_ids(content: str, tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids that a policy would sample for this assistant content: `prompt` + these + line end = `render`."""
    if tags == TEMPLATE:
        hf_chat_template.check_content(content, "assistant", tokenizer, "the completion")
        return tokenizer.encode_special(content)[0] + list(hf_chat_template.closing(tokenizer))
    if tags == RAW:
        return tokenizer.encode(content) + [tokenizer.eot_id]
    layout = _layout(tokenizer, tags)
    _check_content(content, "assistant", layout, "the completion")
    return _body(content, "assistant", tokenizer, layout) + layout.line_end + layout.end_tag


def call_beginning(tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids of the tag with which an answer that is a call begins."""
    if tags == TEMPLATE:
        return tokenizer.encode_special(CALL_TAG)[0]
    return tokenizer.encode(CALL_TAG) if tags == RAW else list(_layout(tokenizer, tags).call_tag)


def stop_sequences(tokenizer: Tokenizer, tags: str = "reserved") -> tuple[tuple[int, ...], ...]:
    """The id sequences that end a completion: that of <|end|>, of what closes an answer in the model's own template, or of the end of text."""
    if tags == TEMPLATE:
        return (hf_chat_template.closing(tokenizer),)
    if tags == RAW:
        return ((tokenizer.eot_id,),)
    return (tuple(_layout(tokenizer, tags).end_tag),)


def decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of ids in any mode, reserved ids spelled as their tags. DataError for ids beyond the tags."""
    pieces, run = [], []
    for token in map(int, ids):
        if token < tokenizer.n_vocab:
            run.append(token)
            continue
        pieces += [tokenizer.decode(run), _tag_of(token - tokenizer.n_vocab, tokenizer)]
        run = []
    return "".join([*pieces, tokenizer.decode(run)])


def completion_text(ids: Sequence[int], tokenizer: Tokenizer, tags: str = "reserved") -> str:
    """Content of a sampled completion: without the closing tag and the line end before it, if there."""
    end_tag = list(stop_sequences(tokenizer, tags)[0])
    ids = list(map(int, ids))
    if ids[-len(end_tag) :] != end_tag:
        return decode(ids, tokenizer)
    return decode(ids[: -len(end_tag)], tokenizer).removesuffix("" if tags in (TEMPLATE, RAW) else "\n")


def cut_after(ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> tuple[int, str] | None:
    """(how many ids reach the end of the first of these strings, the text up to there), however tokens cut it; None where none occurs."""
    text = decode(ids, tokenizer)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return None
    whole = text[: min(ends)]
    n = bisect_left(range(len(ids)), True, key=lambda last: any(s in decode(ids[: last + 1], tokenizer) for s in stops))
    return n + 1, whole


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, tags: str, prompt: bool = False) -> Rendered:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"got {str(messages)[:80]!r}; required is a list of at least one message")
    if tags == TEMPLATE:
        return _templated(messages, tokenizer, prompt)
    if tags == RAW:
        return _raw(messages, tokenizer, list(getattr(tokenizer, "beginning", ())))
    layout = _layout(tokenizer, tags)
    rendered = _turns(messages, tokenizer, layout)
    return rendered._replace(ids=rendered.ids + layout.heads["assistant"]) if prompt else rendered


def _templated(messages: Sequence[Message], tokenizer: Tokenizer, prompt: bool) -> Rendered:
    for number, message in enumerate(messages):
        _check_role(message, number)
    hf_chat_template.closing(tokenizer)  # raises where no token ends an answer
    ids, turns = hf_chat_template.encode(messages, tokenizer, prompt=prompt)
    spans, loss_mask = [], [0] * len(ids)
    for message, (start, body, body_end, closed, end) in zip(messages, turns):
        spans.append(Span(message["role"], start, end, body, body_end))
        if message["role"] == "assistant":
            loss_mask[body:closed] = [1] * (closed - body)
    return Rendered(ids, loss_mask, spans)


def _raw(messages: Sequence[Message], tokenizer: Tokenizer, beginning: Sequence[int] = ()) -> Rendered:
    ids, loss_mask, spans, former = list(beginning), [0] * len(beginning), [], "assistant"
    for number, message in enumerate(messages):
        role, content = _check_role(message, number), message["content"]
        if not isinstance(content, str):
            raise DataError(
                f"message {number} ({role}) has content of type {type(content).__name__}; required is a string"
            )
        start, mine = len(ids), role == "assistant"
        ids += [] if mine or former == "assistant" else tokenizer.encode("\n\n")
        body = len(ids)
        ids += tokenizer.encode(content)
        spans.append(Span(role, start, len(ids) + mine, body, len(ids)))
        ids += [tokenizer.eot_id] * mine
        loss_mask += [0] * (body - start) + [int(mine)] * (len(ids) - body)
        former = role
    return Rendered(ids, loss_mask, spans)


def _turns(messages: Sequence[Message], tokenizer: Tokenizer, layout: _Layout) -> Rendered:
    ids: list[int] = []
    loss_mask: list[int] = []
    spans = []
    tail = layout.line_end + layout.end_tag + layout.line_end
    for number, message in enumerate(messages):
        role, content = _checked(message, number, layout)
        body = _body(content, role, tokenizer, layout)
        start, body_start = len(ids), len(ids) + len(layout.heads[role])
        ids += layout.heads[role] + body + tail
        spans.append(Span(role, start, len(ids), body_start, body_start + len(body)))
        supervised = len(ids) - len(layout.line_end) - body_start if role == "assistant" else 0
        loss_mask += [0] * (body_start - start) + [1] * supervised
        loss_mask += [0] * (len(ids) - len(loss_mask))
    return Rendered(ids, loss_mask, spans)


def _body(content: str, role: str, tokenizer: Tokenizer, layout: _Layout) -> list[int]:
    if role != "assistant" or CALL_TAG not in content:
        return tokenizer.encode(content)
    first, *rest = content.split(CALL_TAG)
    ids = tokenizer.encode(first)
    for piece in rest:
        ids += layout.call_tag + tokenizer.encode(piece)
    return ids


def _checked(message: Message, number: int, layout: _Layout) -> tuple[str, str]:
    role, content = _check_role(message, number), message["content"]
    _check_content(content, role, layout, f"message {number} ({role})")
    return role, content


def _check_role(message: Message, number: int) -> str:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise DataError(f"message {number} is {str(message)[:80]!r}; required are a role and a content")
    role = message["role"]
    if role not in ROLES:
        remedy = f"rename it to {_OTHER_NAMES.get(str(role), 'one of them')}"
        raise DataError(f"message {number} has the role {role!r}; roles are {', '.join(ROLES)}; {remedy}")
    return role


def _check_content(content: str, role: str, layout: _Layout, where: str) -> None:
    if not isinstance(content, str):
        raise DataError(f"{where} has content of type {type(content).__name__}; required is a string")
    if tag := next((tag for tag in layout.forbidden[role] if tag in content), None):
        raise DataError(
            f'{where} holds the tag {tag}, which forges a turn in text mode; remove it or use tags="reserved"'
        )


def _tag_of(index: int, tokenizer: Tokenizer) -> str:
    if index >= N_TAGS:
        known = f"the ids of {tokenizer.spec} and the tags end at {tokenizer.n_vocab + N_TAGS - 1}"
        raise DataError(f"id {tokenizer.n_vocab + index} is no token; {known}; use the tokenizer that made the ids")
    return TAGS[index]
