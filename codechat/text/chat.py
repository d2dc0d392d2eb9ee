"""The chat format: messages <-> token ids, the loss mask, and where a completion ends.

A message is {"role": "system" | "user" | "assistant" | "function", "content": str} and becomes

    {tag}\n{content}\n<|end|>\n

with the tags of `TAGS`. "reserved": one id per tag, n_vocab + its index in TAGS, so no user text can forge a turn.
"text": tags are spelled in ordinary tokens, and content that holds one raises. "template": an imported model's own chat
template (hf_chat_template). "raw", for base models: no turns; the begin-of-text token if there is one, then the
contents, with an empty line before one that follows another person's, and the end of text after the assistant's. The
inline <functioncall> is a tag too, in assistant turns only.

Tags, line ends and contents are tokenised separately, so the ids of a prompt are a prefix of the ids of the whole
conversation. A stop is a
sequence of ids: code may hold `<`, `|`, `end` and `>`. Only what the assistant writes carries loss: content, the line
end after it and <|end|>. The names of `tool_calls` are available here too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text import hf_chat_template
from codechat.text.hf_chat_template import Turn
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
    escape_surrogates,
    escape_tags,
    format_call,
    in_words,
    offered_names,
    offered_schemas,
    parse_calls,
    read_call,
    tools_prompt,
)

Message = Mapping[str, str]

MODES = ("reserved", "text")
TEMPLATE, RAW = "template", "raw"
N_TAGS = len(TAGS)
ROLES = ("system", "user", "assistant", "function")
TAG_OF = dict(zip(ROLES, TAGS))
END_TAG = "<|end|>"
# other projects' names of our roles, for the error message
OTHER_NAMES = dict(
    tool="function", human="user", gpt="assistant", model="assistant", bot="assistant", developer="system"
)


class Span(NamedTuple):
    """Where a turn is in the ids: [start, end), its content at [body_start, body_end)."""

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

    tags: dict[str, list[int]]
    line_end: list[int]
    forbidden: dict[str, tuple[str, ...]]  # role -> tags that its content may not hold

    def head(self, role: str) -> list[int]:
        return self.tags[TAG_OF[role]] + self.line_end


@lru_cache(maxsize=64)
def _layout(tokenizer: Tokenizer, tags: str) -> _Layout:
    if tags not in MODES:
        raise ConfigError(f"tags {tags!r}; required is one of {', '.join((*MODES, TEMPLATE, RAW))}")
    reserved = tags == "reserved"
    ids = {tag: [tokenizer.n_vocab + i] if reserved else tokenizer.encode(tag) for i, tag in enumerate(TAGS)}
    forbidden = {
        role: () if reserved else tuple(t for t in TAGS if t != CALL_TAG or role != "assistant") for role in ROLES
    }
    return _Layout(ids, tokenizer.encode("\n"), forbidden)


def render(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> Rendered:
    """A conversation to train on. DataError for messages that have no rendering, or no assistant turn; ConfigError for
    an unknown mode."""
    rendered = _rendered(messages, tokenizer, tags)
    if not any(span.role == "assistant" for span in rendered.spans):
        roles = ", ".join(span.role for span in rendered.spans)
        raise DataError(f"a conversation of {roles} has no assistant turn; add one or drop the conversation")
    return rendered


def prompt(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids up to where the assistant begins to write. The last message must not be the assistant's."""
    rendered = _rendered(messages, tokenizer, tags, prompt=True)
    if rendered.spans[-1].role == "assistant":
        raise DataError("the last message has the role assistant; a prompt ends with another role; remove it")
    return rendered.ids


def between_turns(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids from after a sampled answer's closing tag to where the next answer begins, with `messages` in between.

    `prompt` + sampled ids + these = `prompt` of the whole conversation, so no earlier turn is tokenised again."""
    if tags == TEMPLATE:
        opening = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        ids, turns = hf_chat_template.encode([*opening, *messages], tokenizer, prompt=True)
        return ids[turns[1].closed :]
    ids, _ = _turns(messages, tokenizer, tags)
    if tags == RAW:
        return ids
    layout = _layout(tokenizer, tags)
    return layout.line_end + ids + layout.head("assistant")


def completion_ids(content: str, tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids that a policy would sample for this assistant content: `prompt` + these + line end = `render`."""
    if tags == TEMPLATE:
        hf_chat_template.check_content(content, "assistant", tokenizer, "the completion")
        return tokenizer.encode_special(content)[0] + list(hf_chat_template.closing(tokenizer))
    ids, ((_, body, _, closed, _),) = _turns([{"role": "assistant", "content": content}], tokenizer, tags)
    return ids[body:closed]


def call_beginning(tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids of the tag with which an answer that is a call begins."""
    if tags == TEMPLATE:
        return tokenizer.encode_special(CALL_TAG)[0]
    return tokenizer.encode(CALL_TAG) if tags == RAW else list(_layout(tokenizer, tags).tags[CALL_TAG])


def stop_sequences(tokenizer: Tokenizer, tags: str = "reserved") -> tuple[tuple[int, ...], ...]:
    """The id sequences that end a completion: that of <|end|>, of what closes an answer in the model's own template, or
    of the end of text."""
    if tags == TEMPLATE:
        return (hf_chat_template.closing(tokenizer),)
    return ((tokenizer.eot_id,),) if tags == RAW else (tuple(_layout(tokenizer, tags).tags[END_TAG]),)


def decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of ids in any mode, reserved ids spelled as their tags. DataError for ids beyond the tags."""
    pieces, run = [], []
    for token in map(int, ids):
        if token < tokenizer.n_vocab:
            run.append(token)
            continue
        if token >= tokenizer.n_vocab + N_TAGS:
            raise DataError(f"id {token}; the ids of {tokenizer.spec} and tags end at {tokenizer.n_vocab + N_TAGS - 1}")
        pieces += [tokenizer.decode(run), TAGS[token - tokenizer.n_vocab]]
        run = []
    return "".join([*pieces, tokenizer.decode(run)])


def completion_text(ids: Sequence[int], tokenizer: Tokenizer, tags: str = "reserved") -> str:
    """Content of a sampled completion: without the closing tag and the line end before it, if there."""
    (end_tag,), ids = stop_sequences(tokenizer, tags), list(map(int, ids))
    if tuple(ids[-len(end_tag) :]) != end_tag:
        return decode(ids, tokenizer)
    return decode(ids[: -len(end_tag)], tokenizer).removesuffix("" if tags in (TEMPLATE, RAW) else "\n")


def cut_after(ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> tuple[int, str] | None:
    """(how many ids reach the end of the first of these strings, the text up to there), however tokens cut it; None
    where none occurs."""
    text = decode(ids, tokenizer)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return None
    n = bisect_left(range(len(ids)), True, key=lambda last: any(s in decode(ids[: last + 1], tokenizer) for s in stops))
    return n + 1, text[: min(ends)]


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, tags: str, prompt: bool = False) -> Rendered:
    """Ids, mask and spans in every mode."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"got {str(messages)[:80]!r}; required is a list of at least one message")
    if tags == TEMPLATE:
        _check_roles(messages)
        hf_chat_template.closing(tokenizer)  # raises where no token ends an answer
        ids, turns = hf_chat_template.encode(messages, tokenizer, prompt=prompt)
    else:
        ids, turns = _turns(messages, tokenizer, tags, getattr(tokenizer, "beginning", ()) if tags == RAW else ())
        ids += _layout(tokenizer, tags).head("assistant") if prompt and tags != RAW else []
    mask, spans = [0] * len(ids), []
    for message, turn in zip(messages, turns):
        spans.append(Span(message["role"], turn.start, turn.end, turn.body, turn.body_end))
        if message["role"] == "assistant" and message.get("weight") != 0:  # 0: a turn that carries no loss
            mask[turn.body : turn.closed] = [1] * (turn.closed - turn.body)
    return Rendered(ids, mask, spans)


def _turns(
    messages: Sequence[Message], tokenizer: Tokenizer, tags: str, beginning: Sequence[int] = ()
) -> tuple[list[int], list[Turn]]:
    """The ids of messages, and where each turn is, with tags or raw."""
    _check_roles(messages)
    layout = None if tags == RAW else _layout(tokenizer, tags)
    ids, turns, previous = list(beginning), [], "assistant"
    for number, message in enumerate(messages):
        role, content, start = message["role"], message["content"], len(ids)
        if layout is None:
            head = [] if "assistant" in (role, previous) else tokenizer.encode("\n\n")
            body, closing, after = tokenizer.encode(content), [tokenizer.eot_id] * (role == "assistant"), []
        else:
            if tag := next((tag for tag in layout.forbidden[role] if tag in content), None):
                raise DataError(
                    f'message {number} ({role}) holds {tag}, which forges a turn; remove it or use tags="reserved"'
                )
            head, body = layout.head(role), _body(content, role, tokenizer, layout)
            closing, after = layout.line_end + layout.tags[END_TAG], layout.line_end
        ids += head + body + closing + after
        at = start + len(head)
        turns.append(Turn(start, at, at + len(body), len(ids) - len(after), len(ids)))
        previous = role
    return ids, turns


def _body(content: str, role: str, tokenizer: Tokenizer, layout: _Layout) -> list[int]:
    if role != "assistant" or CALL_TAG not in content:
        return tokenizer.encode(content)
    first, *rest = content.split(CALL_TAG)
    return tokenizer.encode(first) + [i for piece in rest for i in layout.tags[CALL_TAG] + tokenizer.encode(piece)]


def _check_roles(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise DataError(f"message {number} is {str(message)[:80]!r}; required are a role and a content, a string")
        if (role := message.get("role")) not in ROLES:
            remedy = f"rename it to {OTHER_NAMES.get(str(role), 'one of them')}"
            raise DataError(f"message {number} has the role {role!r}; roles are {', '.join(ROLES)}; {remedy}")
