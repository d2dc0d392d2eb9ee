"""The chat format: messages <-> token ids, the loss mask, and where a completion ends.

A message is {"role": "system" | "user" | "assistant" | "function", "content": str} and becomes {tag}\\n{content}\\n<|end|>\\n, the tags being one id each
("reserved": n_vocab + its index in TAGS, so no text can forge a turn) or ordinary tokens ("text": content that holds one raises). "template": an imported
model's own jinja template. "raw", for base models: the begin-of-text token if there is one, then the contents, an empty line before one that follows
another person's, the end of text after the assistant's. The inline <functioncall> is a tag too, in assistant turns only.

Tags, line ends and contents are tokenised separately, so a prompt's ids are a prefix of the conversation's. A stop is a sequence of ids: code may hold
`<`, `|`, `end` and `>`. Only what the assistant writes carries loss: content, the line end after it and <|end|>. Names of `tool_calls` are offered here too.

In "template" each answer is rendered and tokenised behind its own generation prompt, where it is sampled. A template or conversation in which the next
prompt does not go on from there raises, and so does one that changes contents beyond trimming, or content that holds a special token of the layout."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text.tokenizer import Tokenizer
from codechat.text.tool_calls import (  # noqa: F401 (offered here too)
    CALL_TAG,
    DECLINE,
    DECLINED,
    FORMS,
    READABLE,
    TAGS,
    Call,
    escape_surrogates,
    escape_tags,
    format_call,
    in_words,
    parse_calls,
    read_call,
)  # fmt: skip
from codechat.text.tool_lists import (  # noqa: F401 (offered here too)
    NOTHING,
    NOTHING_FITS,
    STYLES,
    described,
    offered_names,
    offered_schemas,
    tools_prompt,
)  # fmt: skip

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
    **dict.fromkeys(("tool", "observation", "ipython"), "function"),
    **dict.fromkeys(("function_response", "function-response", "tool_response"), "function"),
    "developer": "system",
}


class Rendered(NamedTuple):
    """A conversation as ids. loss_mask: 1 for ids that carry loss, else 0; roles: whose turn each id is in, "none" after
    the last."""

    ids: list[int]
    loss_mask: list[int]
    roles: list[str]


class Turn(NamedTuple):
    """A message in five parts, as texts or as ids: what stands before it, what an answer begins with before its
    content, the content, what ends it, what follows. The assistant writes the three in the middle."""

    head: Any
    opening: Any
    body: Any
    closing: Any
    after: Any


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
        form = _template_form(tokenizer)
        call = tokenizer.encode_behind(form.before, form.opening + CALL_TAG)[0]
        closing = form.closing.removesuffix(decode([form.stop], tokenizer))
        return Layout(form.blank + form.opening, closing, (form.stop,), call, {})
    if tags == RAW:
        return Layout("", "", (tokenizer.eot_id,), tokenizer.encode_inside(CALL_TAG), {})
    if tags not in MODES:
        raise ConfigError(f"tags {tags!r}; required is one of {', '.join((*MODES, TEMPLATE, RAW))}")
    ids = {t: [tokenizer.n_vocab + i] if tags == "reserved" else tokenizer.encode_inside(t) for i, t in enumerate(TAGS)}
    return Layout("", "\n", tuple(ids[END_TAG]), ids[CALL_TAG], ids | {"\n": tokenizer.encode_inside("\n")})


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
    _check([message := {"role": "assistant", "content": content}], tokenizer, tags)
    if tags == TEMPLATE:
        return sum(_answer_ids(_answer(content, tokenizer), tokenizer), [])
    turn = _turn(message, tokenizer, tags)
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


def _turns(
    messages: Sequence[Message], tokenizer: Tokenizer, tags: str, prompt: bool = False
) -> tuple[list[Turn], list[int]]:
    """The ids of each message in every mode, and those after the last: where the assistant begins to write, if a prompt
    is asked for."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"got {str(messages)[:80]!r}; required is a list of at least one message")
    _check(messages, tokenizer, tags)
    if tags == TEMPLATE:
        return _template_turns(messages, tokenizer, prompt)
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


def _check(messages: Sequence[Message], tokenizer: Tokenizer, tags: str) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), str):
            raise DataError(f"message {number} is {str(message)[:80]!r}; required are a role and a content, a string")
        if (role := message.get("role")) not in ROLES:
            raise DataError(f"message {number} has the role {role!r}; required is one of {', '.join(ROLES)}")
        forged = [tag for tag in TAGS if tag in content and (tag != CALL_TAG or role != "assistant")]
        if tags == TEMPLATE:
            forged = _specials(tokenizer, structural=role == "assistant").findall(content)
        if tags in ("text", TEMPLATE) and forged:
            remedy = "remove it" if tags == TEMPLATE else 'remove it or use tags="reserved"'
            raise DataError(f"message {number} ({role}) holds {forged[0]}, which forges a turn; {remedy}")


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


_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")  # transformers' marks for masks; nothing for the text
_CHANGED = "changes contents of this conversation; remove what it treats specially, such as reasoning"
USER, ANSWER = {"role": "user", "content": "\ue0000\ue001"}, {"role": "assistant", "content": "\ue0001\ue001"}


@lru_cache(maxsize=16)
def _template_form(tokenizer: Any) -> Form:
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
    blank = tokenizer.decode_inside(tokenizer.encode_behind(before, sample)[0]).removesuffix(sample)
    blank = blank if blank.isspace() else ""
    return Form(asked, before, opening, closing, rest, tail[stop.end() :], tokenizer.special_tokens[stop[0]], blank)


def _template_turns(messages: Sequence[Message], tokenizer: Any, prompt: bool) -> tuple[list[Turn], list[int]]:
    """`_turns` of this mode: each answer behind its prompt, and what stands between answers behind the one before."""
    turns, tail = _template_texts(messages, tokenizer, prompt)
    ids, pieces, before = [], [], ""
    for message, turn in zip(messages, turns):
        if message["role"] == "assistant":
            ids += _encoded([*pieces, turn.head], tokenizer, before) + _answer_ids(turn, tokenizer)
            pieces, before = [turn.after], turn.closing
        else:
            pieces += turn
    ids += _encoded([*pieces, tail], tokenizer, before)
    return [Turn(*ids[at : at + 5]) for at in range(0, len(ids) - 1, 5)], ids[-1]


def _answer_ids(answer: Turn, tokenizer: Any) -> list[list[int]]:
    """The ids of opening, content and closing of an answer."""
    return _encoded(answer[1:4], tokenizer, _template_form(tokenizer).before, loses=False)


def _encoded(pieces: Sequence[str], tokenizer: Any, before: str, loses: bool = True) -> list[list[int]]:
    """The ids of pieces of a text that stands behind `before`; a token belongs to the piece in which it begins."""
    ids, starts = tokenizer.encode_behind(before, "".join(pieces), loses=loses)
    inner = [bisect_left(starts, at) for at in accumulate(map(len, pieces[:-1]))]
    return [ids[start:end] for start, end in zip([0, *inner], [*inner, len(ids)])]


def _answer(content: str, tokenizer: Any) -> Turn:
    """The texts of an answer as the template writes it: among others, else as the last one (with its reasoning)."""
    form, message = _template_form(tokenizer), {"role": "assistant", "content": content}
    for more, rest in (([USER], form.next), ([], form.closing + form.after)):
        text = _fill([USER, message, *more], tokenizer, bool(more))
        for written in _ways(content):
            if text == form.asked + form.opening + written + rest:
                return Turn("", form.opening, written, form.closing, form.after)
    raise _fault(tokenizer, _CHANGED)


def _template_texts(messages: Sequence[Message], tokenizer: Any, prompt: bool) -> tuple[list[Turn], str]:
    """The texts of each message, and the text after the last; prompt: up to where the assistant begins to write."""
    answered = messages[-1]["role"] == "assistant" and not prompt
    known, turns, at = messages[:-1] if answered else messages, [], 0
    text = _fill(known, tokenizer, prompt or answered)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            turn = _answer(message["content"], tokenizer)
            sampled, wholes = turn.opening + turn.body + turn.closing, iter([text])
            if number == len(known):  # the last answer, as the last one or among others
                asked, ways = text, ((messages, False), ([*messages, USER], True))
                wholes = (_fill(some, tokenizer, goes_on) for some, goes_on in ways)
            else:  # nothing is sampled before the first message
                asked = _fill(known[:number], tokenizer, True) if number else text.partition(sampled)[0]
            if len(asked) < at or not any(whole.startswith(asked + sampled) for whole in wholes):
                raise _fault(tokenizer, f"writes answer {number} elsewhere than it is sampled")
            turns.append(turn._replace(head=text[at : len(asked)], after=""))
            at = len(asked + sampled)
        else:
            written = next((way for way in _ways(message["content"]) if text.find(way, at) >= 0), None)
            if written is None:
                raise _fault(tokenizer, _CHANGED)
            start = text.index(written, at)
            end = _specials(tokenizer).match(text, start + len(written))
            turns.append(Turn(text[at:start], "", written, "", end[0] if end else ""))
            at = start + len(written + turns[-1].after)
    return turns, turn.after if answered else text[at:]


def _ways(content: str) -> tuple[str, ...]:
    """A content as templates write it: as it is, trimmed, or as the inside of a json string."""
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    return content, content.strip(), content.strip("\n"), content.lstrip("\n"), quoted


def _fault(tokenizer: Tokenizer, fault: str) -> DataError:
    return DataError(f"the chat template of {tokenizer.spec} {fault}")


@lru_cache(maxsize=16)
def _specials(tokenizer: Any, structural: bool = False) -> re.Pattern[str]:
    """Any special token; structural: those that the layout uses, or that begin and end a text."""
    tokens = [*tokenizer.special_tokens]
    if structural:
        used = _specials(tokenizer).findall(_fill([USER, ANSWER, USER], tokenizer, True))
        tokens = [*used, *tokenizer.saved["special"].values()]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


@lru_cache(maxsize=16)
def _compiled(tokenizer: Any) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is somebody else's program

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **({"ensure_ascii": False} | how))
    environment.globals["raise_exception"] = _raise
    text = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", tokenizer.template)
    return environment.from_string(text)


def _raise(message: str) -> None:
    raise ValueError(message)


def _fill(messages: Sequence[Message], tokenizer: Any, prompt: bool) -> str:
    """The text of messages; no tools or documents, which transformers passes as None, and no `strftime_now`: a prompt
    must not depend on the day."""
    if not getattr(tokenizer, "template", None):
        raise ConfigError(f'tags "template" with {tokenizer.spec}, which has none; use tags "reserved" or "text"')
    renamed = [{**m, "role": "tool" if m["role"] == "function" else m["role"]} for m in messages]
    given = dict(tokenizer.saved["special"], tools=None, documents=None)
    try:
        return _compiled(tokenizer).render(messages=renamed, add_generation_prompt=prompt, **given)
    except Exception as error:  # a template is somebody else's program and may raise anything
        raise _fault(tokenizer, f"cannot render the conversation ({error}); use --tags text") from None
