"""The chat format: messages <-> token ids, the loss mask, and where a completion ends.

A message is {"role": "system" | "user" | "assistant" | "function", "content": str}. Five modes
turn it into ids:

    reserved    {tag}\\n{content}\\n<|end|>\\n; a tag is one id, n_vocab + its index in TAGS: no text forges a turn
    text        the same in ordinary tokens; content that holds a tag raises
    template    an imported model's own jinja template, see `chat_template`
    native      the same, and the template also lists the tools and writes the calls, see `native_template`
    raw         contents alone, for base models: a begin-of-text token if there is one, an empty line before a content
                unless it follows or is an answer, the end of text after an answer

In reserved and text mode <functioncall> is a tag too, in assistant turns only. Tags, line ends
and contents are tokenised separately, so a prompt's ids are a prefix of the conversation's. A
stop is a sequence of ids: code may hold `<`, `|`, `end` and `>`. Only what the assistant writes
carries loss: content, the line end after it and <|end|>."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text import native_calls
from codechat.text.chat_template import (
    USER,
    ChatTemplate,
    Message,
    Misplaced,
    TurnIds,
    template_of,
)
from codechat.text.native_template import NativeTemplate, native_template_of
from codechat.text.tokenizer import Tokenizer
from codechat.text.tool_calls import CALL_TAG, READABLE, TAGS, format_call, parse_calls
from codechat.text.tool_lists import (
    offered_schemas,
    texts_of,
    tools_prompt,  # noqa: F401 (notebooks take it from here)
)

MODES = ("reserved", "text")
TEMPLATE = "template"
NATIVE = "native"
TEMPLATES = (TEMPLATE, NATIVE)
RAW = "raw"
N_TAGS = len(TAGS)
ROLES = ("system", "user", "assistant", "function")
TAG_OF = dict(zip(ROLES, TAGS))
END_TAG = "<|end|>"
# the names that other projects have for our roles
OTHER_NAMES = {
    "user": "human prompter",
    "assistant": "gpt chatgpt model bot bing bard",
    "function": "tool observation ipython function_response function-response tool_response",
    "system": "developer",
}
ROLE_OF = {role: role for role in ROLES}
ROLE_OF |= {name: role for role, names in OTHER_NAMES.items() for name in names.split()}


class Rendered(NamedTuple):
    """A conversation as ids."""

    ids: list[int]
    loss_mask: list[int]  # 1 for ids that carry loss, else 0
    roles: list[str]  # whose turn each id is in, "none" after the last


class Layout(NamedTuple):
    """How a mode writes an answer: `opening`, content, `closing`, `stop`."""

    opening: str  # before the content
    closing: str  # after the content, before `stop`
    stop: tuple[int, ...]
    call: list[int]  # the ids with which a call begins
    ids: dict[str, list[int]]  # of each tag and of a line end; none in "template" and "raw"


@lru_cache(maxsize=64)  # asked for every message of a corpus
def layout(tokenizer: Tokenizer, tags: str) -> Layout:
    """The layout of a mode. ConfigError for an unknown one."""
    if tags in TEMPLATES:
        return _template_layout(_template(tokenizer, tags))
    if tags == RAW:
        return Layout("", "", (tokenizer.eot_id,), tokenizer.encode_inside(CALL_TAG), {})
    if tags not in MODES:
        raise ConfigError(f"tags {tags!r}; expected one of {', '.join((*MODES, *TEMPLATES, RAW))}")
    if tags == "reserved":
        ids = {tag: [tokenizer.n_vocab + i] for i, tag in enumerate(TAGS)}
    else:
        ids = {tag: tokenizer.encode_inside(tag) for tag in TAGS}
    ids["\n"] = tokenizer.encode_inside("\n")
    return Layout("", "\n", tuple(ids[END_TAG]), ids[CALL_TAG], ids)


def _template(tokenizer: Tokenizer, tags: str) -> ChatTemplate:
    return native_template_of(tokenizer) if tags == NATIVE else template_of(tokenizer)


def _template_layout(template: ChatTemplate) -> Layout:
    form = template.form
    begins = form.opening + CALL_TAG
    if isinstance(template, NativeTemplate):
        begins = template.beginning
    call, _ = template.tokenizer.encode_behind(form.before, begins)
    closing = form.closing.removesuffix(decode([form.stop], template.tokenizer))
    return Layout(form.blank + form.opening, closing, (form.stop,), call, {})


def stop_sequences(tokenizer: Tokenizer, tags: str = "reserved") -> tuple[tuple[int, ...], ...]:
    """The id sequences that end a completion: of <|end|>, of the closing of an answer in the
    model's own template, or of the end of text."""
    return (layout(tokenizer, tags).stop,)


def render(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> Rendered:
    """A conversation to train on. DataError for messages that have no rendering, or no
    assistant turn; ConfigError for an unknown mode."""
    turns, tail = _turns(messages, tokenizer, tags)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"a conversation of {roles} has no assistant turn; add one or drop the conversation"
        )
    rendered = Rendered([], [], [])
    for message, turn in zip(messages, turns):
        role = message["role"]
        learned = role == "assistant" and message.get("weight") != 0
        _add(rendered, turn.head, role, loss=0)
        _add(rendered, turn.written, role, loss=int(learned))
        _add(rendered, turn.after, role, loss=0)
    _add(rendered, tail, "none", loss=0)
    return rendered


def _add(rendered: Rendered, ids: list[int], role: str, loss: int) -> None:
    rendered.ids.extend(ids)
    rendered.loss_mask.extend([loss] * len(ids))
    rendered.roles.extend([role] * len(ids))


def prompt(messages: Sequence[Message], tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """Ids up to where the assistant begins to write. The last message must not be the
    assistant's."""
    try:
        turns, tail = _turns(messages, tokenizer, tags, prompt=True)
        ids = _joined(turns) + tail
    except Misplaced:
        ids = _template(tokenizer, tags).whole(messages)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the last message has the role assistant; a prompt ends with another role; remove it"
        )
    return ids


def between_turns(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tags: str = "reserved",
    answer: str = "y",
) -> list[int]:
    """Ids from after a sampled answer's closing tag to where the next answer begins, with
    `messages` in between.

    `prompt` + sampled ids + these = `prompt` of the whole conversation, so no earlier turn is
    tokenised again; but a template may write earlier turns anew (Qwen 3 drops their thoughts,
    Mistral's moves the tools to the last request), and then a policy continues what it wrote.
    answer: what was sampled; its calls matter in native mode, where a template may write their
    names beside their results."""
    # a dummy exchange stands for the conversation: the ids after an answer depend on the names
    # of its calls, not on its words
    readable = (
        [call for call in parse_calls(answer) if call.form in READABLE] if tags == NATIVE else []
    )
    called = "\n".join(format_call(call.name, call.arguments) for call in readable)
    talk = [USER, {"role": "assistant", "content": called or "y"}]
    turns, tail = _turns([*talk, *messages], tokenizer, tags, prompt=True)
    return turns[1].after + _joined(turns[2:]) + tail


def completion_ids(content: str, tokenizer: Tokenizer, tags: str = "reserved") -> list[int]:
    """The ids that a policy would sample for this assistant content: `prompt` + these + what
    follows = `render`."""
    message = {"role": "assistant", "content": content}
    _check([message], tokenizer, tags)
    turn = (
        _template(tokenizer, tags).answer(content)
        if tags in TEMPLATES
        else _turn(message, tokenizer, tags)
    )
    return turn.written


def decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of ids in any mode, every blank of it, reserved ids spelled as their tags. DataError
    for ids beyond them."""
    pieces: list[str] = []
    # ids since the last tag; a character may take several, so they are decoded together
    run: list[int] = []
    for token in map(int, ids):
        if token < tokenizer.n_vocab:
            run.append(token)
        elif token < tokenizer.n_vocab + N_TAGS:
            pieces += [tokenizer.decode_inside(run), TAGS[token - tokenizer.n_vocab]]
            run = []
        else:
            raise DataError(
                f"id {token}; {tokenizer.spec} and the tags have {tokenizer.n_vocab + N_TAGS} ids"
            )
    pieces.append(tokenizer.decode_inside(run))
    return "".join(pieces)


def completion_text(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    tags: str = "reserved",
    asked: Sequence[Message] = (),
) -> str:
    """Content of a sampled completion: its `transcript`; in native mode, calls are rewritten in
    our form. asked: the messages before it, whose tools say which arguments are texts."""
    text = transcript(ids, tokenizer, tags)
    if tags != NATIVE:
        return text
    texts: dict[tuple[str, str], bool] = {}
    for message in asked:
        if message["role"] in ("system", "user"):
            texts |= _texts_offered(message["content"])
    return canonical(text, tokenizer, texts)


def canonical(
    text: str, tokenizer: Tokenizer, texts: native_calls.Texts = native_calls.NO_TEXTS
) -> str:
    """What a model wrote in its own words, its calls in our form."""
    return native_calls.canonical(text, native_template_of(tokenizer).own, texts)


@lru_cache(maxsize=256)  # the answers of a group share their prompt
def _texts_offered(prompt: str) -> native_calls.Texts:
    return texts_of(offered_schemas(prompt))


def settled(text: str, tokenizer: Tokenizer) -> str:
    """The beginning of an unfinished answer in a model's own words that stays as it is."""
    return native_calls.settled(text, native_template_of(tokenizer).own)


def form_of_calls(ids: Sequence[int], tokenizer: Tokenizer, tags: str) -> str | None:
    """How a sampled completion's calls are written (`native_calls.Written.form`); None where
    they can only be ours."""
    if tags != NATIVE:
        return None
    own = native_template_of(tokenizer).own
    return native_calls.read(transcript(ids, tokenizer, tags), own).form


def transcript(ids: Sequence[int], tokenizer: Tokenizer, tags: str = "reserved") -> str:
    """Text of a sampled completion, without the opening, the closing and the stop sequence."""
    form = layout(tokenizer, tags)
    ids = list(map(int, ids))
    n_stop = len(form.stop)
    # a completion that was cut off has no end to take away
    ended = tuple(ids[-n_stop:]) == form.stop
    text = decode(ids[:-n_stop] if ended else ids, tokenizer)
    if not ended and form.opening.startswith(text):  # it has hardly begun
        return ""
    if form.opening.startswith(" "):  # a blank that a sampled answer may lack
        text = text.removeprefix(" ").removeprefix(form.opening[1:])
    else:
        text = text.removeprefix(form.opening)
    return text.removesuffix(form.closing) if ended else text


def cut_after(
    ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer
) -> tuple[int, str] | None:
    """(n, text): the first n ids reach the end of the first stop string, and text ends there,
    however tokens split the string. None without a stop string."""
    text = decode(ids, tokenizer)
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        return None

    def holds_a_stop(last: int) -> bool:
        beginning = decode(ids[: last + 1], tokenizer)
        return any(stop in beginning for stop in stops)

    # a stop once held stays held, so the first id that completes one is found by bisection
    n = bisect_left(range(len(ids)), True, key=holds_a_stop)
    return n + 1, text[: min(ends)]


def _turns(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tags: str,
    prompt: bool = False,
) -> tuple[list[TurnIds], list[int]]:
    """The ids of each message, in every mode, and the ids after the last one: the beginning of an
    answer if `prompt`, else what the template writes at the end."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"got {str(messages)[:80]!r}; expected a list of at least one message")
    _check(messages, tokenizer, tags)
    if tags in TEMPLATES:
        return _template(tokenizer, tags).turns(messages, prompt)
    # as if an answer stood before raw text
    roles_before = [
        "assistant",
        *(message["role"] for message in messages),
    ]
    turns = [
        _turn(message, tokenizer, tags, before) for message, before in zip(messages, roles_before)
    ]
    # the first text is tokenised as the beginning: some tokenizers write a blank before it
    first = messages[0]
    if tags == RAW:
        turns[0] = turns[0]._replace(
            body=[*tokenizer.beginning, *tokenizer.encode(first["content"])]
        )
    elif tags == "text":
        turns[0] = turns[0]._replace(
            head=tokenizer.encode(TAG_OF[first["role"]]) + layout(tokenizer, tags).ids["\n"]
        )
    if not prompt:
        return turns, []
    return turns, _turn({"role": "assistant", "content": ""}, tokenizer, tags).head


def _turn(message: Message, tokenizer: Tokenizer, tags: str, role_before: str = "") -> TurnIds:
    """The ids of a message, raw or between tags. role_before: of the message before it."""
    role = message["role"]
    content = message["content"]
    encode = tokenizer.encode_inside
    if tags == RAW:
        # no empty line before or after an answer: it continues the text before it
        goes_on = "assistant" in (role, role_before)
        return TurnIds(
            head=[] if goes_on else encode("\n\n"),
            opening=[],
            body=encode(content),
            closing=[tokenizer.eot_id] if role == "assistant" else [],
            after=[],
        )
    ids = layout(tokenizer, tags).ids
    # only the assistant calls: a tag in another turn is text, which nobody executes
    texts = content.split(CALL_TAG) if role == "assistant" else [content]
    body = encode(texts[0])
    for text in texts[1:]:
        body += ids[CALL_TAG] + encode(text)
    return TurnIds(
        head=ids[TAG_OF[role]] + ids["\n"],
        opening=[],
        body=body,
        closing=ids["\n"] + ids[END_TAG],
        after=ids["\n"],
    )


def _joined(turns: Sequence[TurnIds]) -> list[int]:
    return [token for turn in turns for part in turn for token in part]


def _check(messages: Sequence[Message], tokenizer: Tokenizer, tags: str) -> None:
    """DataError for a message without a known role and a text, or whose content forges a turn."""
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise DataError(
                f"message {number} is {str(message)[:80]!r}; "
                "expected a role and a content, a string"
            )
        role = message.get("role")
        if role not in ROLES:
            raise DataError(
                f"message {number} has the role {role!r}; expected one of {', '.join(ROLES)}"
            )
        forged = _forged(content, role, tokenizer, tags)
        if forged:
            remedy = "remove it" if tags in TEMPLATES else 'remove it or use tags="reserved"'
            raise DataError(
                f"message {number} ({role}) holds {forged[0]}, which forges a turn; {remedy}"
            )


def _forged(content: str, role: str, tokenizer: Tokenizer, tags: str) -> list[str]:
    """Marks of the mode that the content spells, and that would be read as a turn or a call."""
    if tags in TEMPLATES:
        template = _template(tokenizer, tags)
        marks = template.structural if role == "assistant" else template.specials
        return marks.findall(content)
    if tags == "text":
        return [tag for tag in TAGS if tag in content and (tag != CALL_TAG or role != "assistant")]
    return []
