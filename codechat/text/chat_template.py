"""The chat template of an imported model: each answer is trained exactly where it would be sampled.

An answer is rendered and tokenised behind its own generation prompt, as in sampling. DataError
for a template or
conversation in which that is impossible: the next prompt must go on from the answer, and
contents may be trimmed only. A template is somebody else's program: it runs in jinja's sandbox
and may raise anything."""

import datetime
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text.tokenizer import ImportedTokenizer, Tokenizer

# role and content, both strings; `weight` 0 for an answer that carries no loss
Message = Mapping[str, Any]

# Contents of the private use area, which no template treats specially.
USER = {"role": "user", "content": "\ue0000\ue001"}
ANSWER = {"role": "assistant", "content": "\ue0001\ue001"}
# transformers' marks around what an answer holds, for loss masks; they write nothing
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
CANNOT = "cannot render the conversation"
_CHANGED = (
    "changes contents of this conversation; remove what it treats specially, such as reasoning"
)


class Misplaced(DataError):
    """The template writes the turns of this conversation elsewhere than each was sampled, or in
    another order."""


class TurnIds(NamedTuple):
    """The ids of a message in five parts. The assistant writes the three in the middle."""

    head: list[int]  # before the message: its tag, or the generation prompt
    opening: list[int]  # what an answer begins with before its content
    body: list[int]  # the content
    closing: list[int]  # what ends the content
    after: list[int]  # what follows before the next message

    @property
    def written(self) -> list[int]:
        """The ids that a policy samples for an answer."""
        return self.opening + self.body + self.closing


class TurnTexts(NamedTuple):
    """The texts of a message in the parts of `TurnIds`."""

    head: str
    opening: str
    body: str
    closing: str
    after: str

    @property
    def written(self) -> str:
        """The text that a policy samples for an answer."""
        return self.opening + self.body + self.closing


class AnswerForm(NamedTuple):
    """What a template writes around each answer."""

    asked: str  # the generation prompt of `USER`
    before: str  # the end of it, from its last special token on
    opening: str  # what an answer begins with before its content
    closing: str  # what ends it, up to the special token `stop`
    next: str  # closing and what follows before a question
    after: str  # what follows closing at the end of a conversation
    stop: int  # the id that ends an answer
    blank: str  # what the tokenizer adds to the beginning of an answer


@lru_cache(maxsize=16)
def template_of(tokenizer: Tokenizer) -> "ChatTemplate":
    """The chat template of an imported tokenizer. ConfigError for a tokenizer without one."""
    if not isinstance(tokenizer, ImportedTokenizer) or not tokenizer.template:
        raise ConfigError(
            f'tags "template" with {tokenizer.spec}, which has none; use tags "reserved" or "text"'
        )
    return ChatTemplate(tokenizer)


class ChatTemplate:
    """Renders conversations by the template of an imported tokenizer."""

    def __init__(self, tokenizer: ImportedTokenizer) -> None:
        self.tokenizer = tokenizer
        # one day for all prompts: they must fit each other, past midnight too
        self.day = datetime.datetime.now()
        self.specials = _any_of(tokenizer.special_tokens)  # matches every special token

    @cached_property
    def structural(self) -> re.Pattern[str]:
        """Matches the special tokens that the layout uses, or that begin and end a text."""
        used = self.specials.findall(self._fill([USER, ANSWER, USER], prompt=True))
        return _any_of([*used, *self.tokenizer.saved["special"].values()])

    @cached_property
    def form(self) -> AnswerForm:
        """The form of answers. DataError for a template in which they cannot be trained as they
        are sampled."""
        asked = self._fill([USER], prompt=True)
        last = self._fill([USER, ANSWER], prompt=False)
        among = self._fill([USER, ANSWER, USER], prompt=True)
        opening, content, rest = among.removeprefix(asked).partition(ANSWER["content"])
        if not content or not among.startswith(asked):
            raise self._fault(
                "writes no answer behind its generation prompt, "
                "where it is sampled; use --tags text"
            )
        tail = last.rpartition(ANSWER["content"])[2]
        stop = self.specials.search(tail)
        if not stop:
            raise self._fault("ends an answer without special token; use --tags text")
        closing = tail[: stop.end()]
        if not rest.startswith(closing):
            raise self._fault(
                f"ends the last answer with {closing!r}, others with {rest[:40]!r}; use --tags text"
            )
        # merges do not cross a special token, so the rest of the prompt has no influence on an
        # answer's ids
        before = asked.rpartition(USER["content"])[2]
        last_special = max(
            (special.start() for special in self.specials.finditer(before)), default=0
        )
        before = before[last_special:]
        return AnswerForm(
            asked=asked,
            before=before,
            opening=opening,
            closing=closing,
            next=rest,
            after=tail[stop.end() :],
            stop=self.tokenizer.special_tokens[stop[0]],
            blank=self._added_blank(before, f"{opening}x{closing}"),
        )

    def turns(self, messages: Sequence[Message], prompt: bool) -> tuple[list[TurnIds], list[int]]:
        """The ids of each message, and those after the last; prompt: up to where the assistant
        begins to write."""
        turns, tail = self._texts(messages, prompt)
        parts: list[list[int]] = []  # the ids of every part of every turn, in order
        # what stands between two answers is tokenised together, behind the first one
        waiting: list[str] = []
        before = ""
        for message, turn in zip(messages, turns):
            if message["role"] == "assistant":
                parts += self._encoded([*waiting, turn.head], before)
                parts += self._answer_parts(turn)
                waiting = [turn.after]
                before = turn.closing
            else:
                waiting += turn
        parts += self._encoded([*waiting, tail], before)
        tail_ids = parts.pop()
        n_parts = len(TurnIds._fields)
        return [
            TurnIds(*parts[at : at + n_parts]) for at in range(0, len(parts), n_parts)
        ], tail_ids

    def whole(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a prompt as one text, for templates that write each turn by what follows it:
        Mistral's list tools before the last request. DataError where a content is missing."""
        text = self._fill(messages, prompt=True)
        for message in messages:
            ways: tuple[str, ...] = _ways(self._shown(message))
            if message["role"] == "assistant":
                ways = self._ways_of_answer(message["content"])
            if not any(way in text for way in ways):
                raise self._fault(f"changes the content of a message ({message['role']})")
        (ids,) = self._encoded([text], "")
        return ids

    def _ways_of_answer(self, content: str) -> tuple[str, ...]:
        """An earlier answer as the template writes it: whole, or without its thought."""
        said = behind_last_thought(content)
        try:
            body = self._answer(content).body
        except DataError:
            if said == content.strip():
                raise
            return (self._answer(said).body if said else "",)
        return body, self._answer(said).body if said else ""

    def answer(self, content: str) -> TurnIds:
        """The ids of an answer behind its generation prompt."""
        opening, body, closing = self._answer_parts(self._answer(content))
        return TurnIds([], opening, body, closing, [])

    def _answer_parts(self, answer: TurnTexts) -> list[list[int]]:
        return self._encoded(
            [answer.opening, answer.body, answer.closing], self.form.before, loses=False
        )

    def _encoded(self, pieces: Sequence[str], before: str, loses: bool = True) -> list[list[int]]:
        """The ids of pieces of a text that stands behind `before`; a token belongs to the piece
        in which it begins."""
        ids, starts = self.tokenizer.encode_behind(before, "".join(pieces), loses=loses)
        ends = accumulate(map(len, pieces[:-1]))  # of the pieces, in characters
        inner = [bisect_left(starts, end) for end in ends]
        return [ids[start:end] for start, end in pairwise([0, *inner, len(ids)])]

    def _added_blank(self, before: str, answer: str) -> str:
        ids, _ = self.tokenizer.encode_behind(before, answer)
        blank = self.tokenizer.decode_inside(ids).removesuffix(answer)
        return blank if blank.isspace() else ""

    def _texts(self, messages: Sequence[Message], prompt: bool) -> tuple[list[TurnTexts], str]:
        """The texts of each message, and the text after the last."""
        answered = messages[-1]["role"] == "assistant" and not prompt
        known = messages[:-1] if answered else messages
        text = self._fill(known, prompt=prompt or answered)
        turns: list[TurnTexts] = []
        at = 0  # where the next turn begins in the text
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                turn = self._answer_in(text, at, messages, number, len(known))
            else:
                turn = self._message_in(text, at, self._shown(message))
            turns.append(turn)
            at += sum(map(len, turn))
        return turns, self.form.after if answered else text[at:]

    def _answer_in(
        self,
        text: str,
        at: int,
        messages: Sequence[Message],
        number: int,
        n_known: int,
    ) -> TurnTexts:
        """The texts of answer `number`, which must stand behind its generation prompt. text: of
        the first `n_known` messages; at: the end of the turn before."""
        answer = self._answer(messages[number]["content"])
        wholes: Iterable[str] = [text]
        if number == n_known:
            asked = text
            wholes = self._endings(messages)
        elif number:
            asked = self._fill(messages[:number], prompt=True)
        else:  # nothing is sampled before the first message
            asked = text.partition(answer.written)[0]
        if len(asked) < at or not any(whole.startswith(asked + answer.written) for whole in wholes):
            raise Misplaced(
                str(self._fault(f"writes answer {number} elsewhere than it is sampled"))
            )
        return answer._replace(head=text[at : len(asked)], after="")

    def _endings(self, messages: Sequence[Message]) -> Iterator[str]:
        """The conversation with its last answer as the last one, and among others."""
        yield self._fill(messages, prompt=False)
        yield self._fill([*messages, USER], prompt=True)

    def _message_in(self, text: str, at: int, content: str) -> TurnTexts:
        """The texts of a message that the assistant does not write."""
        written = next((way for way in _ways(content) if text.find(way, at) >= 0), None)
        if written is None:
            raise Misplaced(str(self._fault(_CHANGED)))
        start = text.index(written, at)
        end = self.specials.match(text, start + len(written))
        return TurnTexts(text[at:start], "", written, "", end[0] if end else "")

    def _answer(self, content: str) -> TurnTexts:
        """The texts of an answer as the template writes it: among others, else as the last one
        (with its reasoning)."""
        form = self.form
        message = {"role": "assistant", "content": content}
        # some templates drop an answer's reasoning once a question follows
        among = self._fill([USER, message, USER], prompt=True)
        written = _written_between(among, form.asked + form.opening, form.next, content)
        if written is None:
            last = self._fill([USER, message], prompt=False)
            written = _written_between(
                last, form.asked + form.opening, form.closing + form.after, content
            )
        if written is None:
            raise Misplaced(str(self._fault(_CHANGED)))
        return TurnTexts("", form.opening, written, form.closing, form.after)

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self.day.strftime
        return environment.from_string(_GENERATION.sub(_plain_block, str(self.tokenizer.template)))

    def _shown(self, message: Message) -> str:
        """The content of a message that the assistant does not write, as the template gets it."""
        return str(message["content"])

    def _fill(self, messages: Sequence[Message], prompt: bool) -> str:
        """The text of messages; no tools."""
        names = {"function": "tool"}  # as templates call it
        renamed = [
            {**message, "role": names.get(message["role"], message["role"])} for message in messages
        ]
        return self._render(renamed, None, prompt)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
    ) -> str:
        """The template's text, with what transformers passes; `strftime_now` gives the day on
        which this process read the template."""
        try:
            return self._compiled.render(
                messages=messages,
                add_generation_prompt=prompt,
                tools=tools,
                documents=None,
                **self.tokenizer.saved["special"],
            )
        except Exception as error:  # a template is the model's own program and may raise anything
            said = " ".join(str(error).split())
            raise self._fault(f"{CANNOT} ({said[:200]}); use --tags text") from None

    def _fault(self, fault: str) -> DataError:
        return DataError(f"the chat template of {self.tokenizer.spec} {fault}")


def behind_last_thought(content: str) -> str:
    """What an answer says behind its last </think>; what stands before it, a template may add or
    drop."""
    return content.rpartition("</think>")[2].strip()


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of these tokens, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _ways(content: str) -> tuple[str, ...]:
    """A content as templates write it: as it is, trimmed, or as the inside of a JSON string."""
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    return content, content.strip(), content.strip("\n"), content.lstrip("\n"), quoted


def _written_between(text: str, before: str, after: str, content: str) -> str | None:
    """How a text writes a content between two others; None where it changes it."""
    return next((way for way in _ways(content) if text == before + way + after), None)


def _tojson(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    """transformers' filter, whose default keeps other characters than ASCII."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise ValueError(message)


def _plain_block(mark: re.Match[str]) -> str:
    """A `generation` mark as a block that jinja knows."""
    return f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}"
