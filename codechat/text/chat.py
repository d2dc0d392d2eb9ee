"""The chat format: messages <-> token ids, the loss mask, and where a completion ends.

A message is {"role": "system" | "user" | "assistant" | "function", "content": str} and becomes

    {tag}\n{content}\n<|end|>\n

with the tags of `TAGS`. "reserved": one id per tag, n_vocab + its index in TAGS, so no user text can forge a turn.
"text": tags are spelled in ordinary tokens, and content that holds one raises. "template": an imported model's own chat
template (hf_chat_template). "raw", for base models: no turns; the begin-of-text token if there is one, then the
contents, with an empty line before one that follows another person's, and the end of text after the assistant's. The
inline <functioncall> is a tag too, in assistant turns only.

Tags, line ends and contents are tokenised separately, so the ids of a prompt are a prefix of the ids of the whole
conversation. A stop is a sequence of ids: code may hold `<`, `|`, `end` and `>`. Only what the assistant writes carries
loss: content, the line end after it and <|end|>. The names of `tool_calls` are available here too.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
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
# our roles and the names that other projects have for them
ROLE_OF = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "ipython"), "function"),
    "developer": "system",
}


class Rendered(NamedTuple):
    """A conversation as ids. loss_mask: 1 for ids that carry loss, else 0; roles: whose turn each id is in, "none" after
    the last."""

    ids: list[int]
    loss_mask: list[int]
    roles: list[str]


class Layout(NamedTuple):
    """How a mode lays out answers. opening, closing: the texts with which one begins before its content, and ends
    before the ids of `stop`; call: the ids with which a call begins; ids: those of each tag and of a line end."""

    opening: str
    closing: str
    stop: tuple[int, ...]
    call: list[int]
    ids: dict[str, list[int]]


@lru_cache(maxsize=64)
def layout(tokenizer: Tokenizer, tags: str) -> Layout:
    """The layout of a mode. ConfigError for an unknown one."""
    if tags == TEMPLATE:
        form = hf_chat_template.form(tokenizer)
        call = tokenizer.encode_behind(form.before, form.opening + CALL_TAG)[0]
        closing = form.closing.removesuffix(decode([form.stop], tokenizer))
        return Layout(form.blank + form.opening, closing, (form.stop,), call, {})
    if tags == RAW:
        return Layout("", "", (tokenizer.eot_id,), tokenizer.encode_inside(CALL_TAG), {})
    if tags not in MODES:
        raise ConfigError(f"tags {tags!r}; required is one of {', '.join((*MODES, TEMPLATE, RAW))}")
    ids = {t: [tokenizer.n_vocab + i] if tags == "reserved" else tokenizer.encode_inside(t) for i, t in enumerate(TAGS)}
    return Layout("", "\n", tuple(ids[END_TAG]), ids[CALL_TAG], ids | {"\n": tokenizer.encode_inside("\n")})


def call_beginning(tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids with which an answer that is a call begins."""
    return list(layout(tokenizer, tags).call)


def stop_sequences(tokenizer: Tokenizer, tags: str = "reserved") -> tuple[tuple[int, ...], ...]:
    """The id sequences that end a completion: that of <|end|>, of what closes an answer in the model's own template, or
    of the end of text."""
    return (layout(tokenizer, tags).stop,)


def render(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> Rendered:
    """A conversation to train on. DataError for messages that have no rendering, or no assistant turn; ConfigError for
    an unknown mode."""
    turns, tail = _turns(messages, tokenizer, tags)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"a conversation of {roles} has no assistant turn; add one or drop the conversation")
    mask, roles = [], []
    for message, (head, opening, body, closing, after) in zip(messages, turns):
        learned = message["role"] == "assistant" and message.get("weight") != 0  # 0: a turn that carries no loss
        mask += [0] * len(head) + [int(learned)] * len(opening + body + closing) + [0] * len(after)
        roles += [message["role"]] * (len(mask) - len(roles))
    return Rendered(_joined(turns) + tail, mask + [0] * len(tail), roles + ["none"] * len(tail))


def prompt(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids up to where the assistant begins to write. The last message must not be the assistant's."""
    turns, tail = _turns(messages, tokenizer, tags, prompt=True)
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message has the role assistant; a prompt ends with another role; remove it")
    return _joined(turns) + tail


def between_turns(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids from after a sampled answer's closing tag to where the next answer begins, with `messages` in between.

    `prompt` + sampled ids + these = `prompt` of the whole conversation, so no earlier turn is tokenised again."""
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    turns, tail = _turns([*talk, *messages], tokenizer, tags, prompt=True)
    return turns[1].after + _joined(turns[2:]) + tail


def completion_ids(content: str, tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids that a policy would sample for this assistant content: `prompt` + these + what follows = `render`."""
    if tags == TEMPLATE:
        hf_chat_template.check_content(content, "assistant", tokenizer, "the completion")
        return sum(hf_chat_template.encode_answer(hf_chat_template.answer(content, tokenizer), tokenizer), [])
    _check(messages := [{"role": "assistant", "content": content}], tags)
    turn = _turn(messages[0], tokenizer, tags)
    return turn.body + turn.closing


def decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of ids in any mode, every blank of it, reserved ids spelled as their tags. DataError for ids beyond them."""
    pieces, run = [], []
    for token in map(int, ids):
        if token < tokenizer.n_vocab:
            run.append(token)
        elif token < tokenizer.n_vocab + N_TAGS:
            pieces += [tokenizer.decode_inside(run), TAGS[token - tokenizer.n_vocab]]
            run = []
        else:
            raise DataError(f"id {token}; {tokenizer.spec} and the tags have {tokenizer.n_vocab + N_TAGS} ids")
    return "".join([*pieces, tokenizer.decode_inside(run)])


def completion_text(ids: Sequence[int], tokenizer: Tokenizer, tags: str = "reserved") -> str:
    """Content of a sampled completion: without what it opens with, the closing tag and what stands before that."""
    (opening, closing, stop, *_), ids = layout(tokenizer, tags), list(map(int, ids))
    ended = tuple(ids[-len(stop) :]) == stop
    text = decode(ids[: -len(stop)] if ended else ids, tokenizer)
    if not ended and opening.startswith(text):  # it has hardly begun
        return ""
    for begun in (opening[:1], opening[1:]) if opening[:1] == " " else (opening,):  # a blank may be missing
        text = text.removeprefix(begun)
    return text.removesuffix(closing) if ended else text


def cut_after(ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> tuple[int, str] | None:
    """(how many ids reach the end of the first of these strings, the text up to there), however tokens cut it; None
    where none occurs."""
    text = decode(ids, tokenizer)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return None
    n = bisect_left(range(len(ids)), True, key=lambda last: any(s in decode(ids[: last + 1], tokenizer) for s in stops))
    return n + 1, text[: min(ends)]


# ------------------------------------------------------------------ the parts of each message


def _turns(
    messages: Sequence[Message], tokenizer: Tokenizer, tags: str, prompt: bool = False
) -> tuple[list[Turn], list[int]]:
    """The ids of each message in every mode, and those after the last: where the assistant begins to write, if a prompt
    is asked for."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"got {str(messages)[:80]!r}; required is a list of at least one message")
    _check(messages, tags)
    if tags == TEMPLATE:
        return hf_chat_template.encode(messages, tokenizer, prompt=prompt)
    before = [{"role": "assistant"}, *messages]  # as if an answer stood before raw text
    turns = [_turn(m, tokenizer, tags, last["role"]) for last, m in zip(before, messages)]
    if tags == RAW:
        turns[0] = turns[0]._replace(body=[*tokenizer.beginning, *tokenizer.encode(messages[0]["content"])])
        return turns, []
    if tags == "text":  # some tokenizers write a blank before a text
        opened = tokenizer.encode(TAG_OF[messages[0]["role"]])
        turns[0] = turns[0]._replace(head=opened + layout(tokenizer, tags).ids["\n"])
    return turns, _turn({"role": "assistant", "content": ""}, tokenizer, tags).head if prompt else []


def _turn(message: Message, tokenizer: Tokenizer, tags: str, previous: str = "") -> Turn:
    """The ids of a message, raw or between tags. previous: the role of the message before it."""
    role, content, encode = message["role"], message["content"], tokenizer.encode_inside
    if tags == RAW:
        head = [] if "assistant" in (role, previous) else encode("\n\n")
        return Turn(head, [], encode(content), [tokenizer.eot_id] * (role == "assistant"), [])
    ids = layout(tokenizer, tags).ids
    first, *rest = content.split(CALL_TAG) if role == "assistant" else [content]
    body = encode(first) + [i for piece in rest for i in ids[CALL_TAG] + encode(piece)]
    return Turn(ids[TAG_OF[role]] + ids["\n"], [], body, ids["\n"] + ids[END_TAG], ids["\n"])


def _joined(turns: Sequence[Turn]) -> list[int]:
    return [i for turn in turns for part in turn for i in part]


def _check(messages: Sequence[Message], tags: str) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), str):
            raise DataError(f"message {number} is {str(message)[:80]!r}; required are a role and a content, a string")
        if (role := message.get("role")) not in ROLES:
            raise DataError(f"message {number} has the role {role!r}; required is one of {', '.join(ROLES)}")
        forged = [tag for tag in TAGS if tag in content and (tag != CALL_TAG or role != "assistant")]
        if tags == "text" and forged:
            remedy = 'which forges a turn; remove it or use tags="reserved"'
            raise DataError(f"message {number} ({role}) holds {forged[0]}, {remedy}")
