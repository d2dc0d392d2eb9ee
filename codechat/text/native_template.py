"""Tools in an imported model's own words: its chat template lists them and writes the calls.

Conversations stay as they are everywhere else: the system text lists functions (`tool_lists`),
an answer holds calls behind our tag (`tool_calls`), a result has the role function. Here they
become what the template knows (`tools`, `tool_calls`, the role tool), and what a model samples
becomes a conversation of ours again (`native_calls`).

A template is used only if it is proven to: calls of all kinds are rendered, read again, and
compared. One whose calls do not come back is refused with the reason; `--tags template` then
lists tools in the system message."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.text import native_calls, tool_calls
from codechat.text.chat_template import (
    ANSWER,
    CANNOT,
    USER,
    ChatTemplate,
    Message,
    TurnIds,
    TurnTexts,
    behind_last_thought,
    template_of,
)
from codechat.text.tokenizer import ImportedTokenizer, Tokenizer
from codechat.text.tool_lists import NO_TOOLS, split_offer

SYSTEM = {"role": "system", "content": "\ue0002\ue001"}
NAME = "find_route"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Finds a route.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where to."}},
            "required": ["place"],
        },
    },
}
UNDESCRIBED = {"type": "function", "function": {"name": NAME, "parameters": {}}}
# What every template must write and give back: no call, one, several; quotes, line ends,
# nesting, other types.
PROOFS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"place": "Oslo"},),
    ({},),
    ({"place": 'a "quoted" word and an apostrophe\'s'},),
    ({"place": "two\nlines, a tab\tand a \\ backslash"},),
    ({"count": 3, "share": 0.5, "on": True, "off": False, "nobody": None},),
    ({"filter": {"tags": ["a", "b"], "owner": {"name": "Ann"}}, "ids": [1, 2]},),
    ({"place": "Zürich, 東京"},),
)
TAG = (
    r"</?[\w.:-]+>|<\|[\w.:-]+\|>|\[/?[A-Z_]+\]"  # what may be a mark without being a special token
)
TWO_CALLS = ({"place": "Oslo"}, {"place": "Bergen"})
ONE_CALL = tool_calls.format_call(NAME, TWO_CALLS[0])


class Unproven(ConfigError):
    """A chat template whose calls are not proven to come back. reason: what it does."""

    def __init__(self, tokenizer: Tokenizer, reason: str) -> None:
        super().__init__(
            f"tags native with {tokenizer.spec}: its chat template {reason}; "
            f"use tags {_other_tags(tokenizer)}, which lists tools in the system message"
        )
        self.reason = reason


def _other_tags(tokenizer: Tokenizer) -> str:
    """The tags to use instead: text where the template cannot be trained without tools either."""
    try:
        template_of(tokenizer).answer("y")
    except DataError:
        return "text"
    return "template"


class Wording(NamedTuple):
    """What a template wants in `tool_calls`, which differs between models."""

    as_text: bool  # arguments as JSON text instead of an object
    no_content: None | str  # the content of an answer that says nothing beside its calls


WORDINGS = (Wording(False, ""), Wording(False, None), Wording(True, ""), Wording(True, None))


class CallForm(NamedTuple):
    """What a template writes around calls in JSON; all empty where it writes calls otherwise."""

    opening: str = ""  # before the first object
    between: str = ""  # between two objects
    closing: str = ""  # behind the last
    arguments_key: str = ""  # under which the arguments stand; "" where calls are not such objects
    several: bool = False  # whether one answer may hold several calls
    spaced: bool = False  # whether its objects have other white space than ours


@lru_cache(maxsize=16)
def native_template_of(tokenizer: Tokenizer) -> "NativeTemplate":
    """The proven template of an imported tokenizer. Unproven for one that cannot be used."""
    if not isinstance(tokenizer, ImportedTokenizer) or not tokenizer.template:
        raise ConfigError(
            f'tags "native" with {tokenizer.spec}, which has no chat template; use tags "text"'
        )
    fault = None
    # with a tool on offer where answers are otherwise written by another template
    for assumed in ([], [TOOL]):
        template = NativeTemplate(tokenizer, assumed)
        try:
            template.prove()
        except Unproven as unproven:
            if fault is None or template.calls_come_back:
                fault = unproven
        else:
            return template
    assert fault is not None
    raise fault


def knows_tools(template: str) -> bool:
    """Whether a chat template looks at tools and calls at all."""
    return bool(re.search(r"\btools\b", template)) and "tool_calls" in template


class NativeTemplate(ChatTemplate):
    """Renders conversations with tools by the template of an imported tokenizer."""

    wording = WORDINGS[0]
    own: native_calls.Own = None  # the marks around its calls, where only this template has them

    def __init__(
        self, tokenizer: ImportedTokenizer, assumed: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """assumed: on offer where the form of an answer is found."""
        super().__init__(tokenizer)
        self.assumed = [dict(tool) for tool in assumed]
        self.calls_come_back = False
        self.wants_description = False
        self.several = True

    def prove(self) -> None:
        """Find the wording in which calls come back. Unproven where there is none."""
        template = str(self.tokenizer.template)
        if not re.search(r"\btools\b", template):
            raise Unproven(self.tokenizer, "knows no tools")
        if not knows_tools(template):
            raise Unproven(self.tokenizer, "writes no calls (tool_calls) of earlier answers")
        try:
            listed = self._render([USER], [TOOL], prompt=True)
        except DataError as error:
            raise Unproven(self.tokenizer, f"lists no tools: it {self._what(error)}") from None
        if NAME not in listed or "Where to." not in listed:
            raise Unproven(self.tokenizer, "does not list the tools that it is given")
        try:
            self._render([USER], [UNDESCRIBED], prompt=True)
        except DataError:
            self.wants_description = True
        with suppress(DataError):  # a template that takes no system text says so each time
            if NAME not in self._render([SYSTEM, USER], [TOOL], prompt=True):
                raise Unproven(self.tokenizer, "does not list tools beside a system text")
        faults = [self._first_fault(wording) for wording in WORDINGS]
        if all(faults):
            # a template cannot render what is not in its own wording
            reasons = [str(fault) for fault in faults]
            told = [reason for reason in reasons if not reason.startswith(CANNOT)]
            raise Unproven(self.tokenizer, (told or reasons)[0])
        proven = [wording for wording, fault in zip(WORDINGS, faults) if fault is None]
        # a template that wants JSON text writes an object as Python does, which is read too
        self._use(next(filter(self._writes_json, proven), proven[0]))
        self.several = self._writes(TWO_CALLS) is None
        self.calls_come_back = True
        reason = self._fault_without_tools() if self.assumed else None
        if reason is not None:
            raise Unproven(self.tokenizer, reason)

    def _fault_without_tools(self) -> str | None:
        """None if an answer has the same text around it where no tools are on offer."""
        try:
            written = self._render([USER, ANSWER, USER], None, prompt=True)
        except DataError:
            return "cannot render a conversation without tools"
        form = self.form
        if form.before + form.opening + ANSWER["content"] + form.next in written:
            return None
        return "writes answers otherwise where no tools are on offer"

    def _use(self, wording: Wording) -> None:
        """Write in a wording from now on, with the marks that it gives. DataError for one in which
        a call has no place."""
        self.wording = wording
        self.own = self._own_marks()

    def _first_fault(self, wording: Wording) -> str | None:
        """What does not come back in a wording; None where all does."""
        try:
            self._use(wording)
        except DataError as error:
            return self._what(error)
        for calls in PROOFS:
            fault = self._writes(calls)
            if fault is not None:
                return fault
        return None

    def _own_marks(self) -> native_calls.Own:
        """The marks that the template writes around a call, where the reader has no such; none
        where there are none, or where they are words."""
        written = self._written(ONE_CALL, 1).removeprefix(self.form.opening)
        around = native_calls.around_call(written)
        if around is None or native_calls.read(written).prose.strip() == "":
            return None
        marked = re.compile(rf"(?:{self.specials.pattern}|{TAG})+")
        opening, closing = around
        known = marked.fullmatch(opening) and (not closing or marked.fullmatch(closing))
        return around if known else None

    def _writes_json(self, wording: Wording) -> bool:
        """Whether the arguments of a call are an object of JSON in a wording."""
        self._use(wording)
        written = _object_in(self._answer(ONE_CALL).body)
        if written is None:
            return False
        keys = written.value.keys() & set(tool_calls.ARGUMENT_KEYS)
        return all(isinstance(written.value[key], dict) for key in keys)

    def _writes(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """None where an answer with these arguments comes back from the template; else what is
        wrong."""
        content = "\n".join(tool_calls.format_call(NAME, arguments) for arguments in calls)
        try:
            self._answer(content)
        except DataError as error:
            return self._what(error)
        return None

    def _what(self, fault: DataError) -> str:
        """What a template does, without its name and the advice that another form of turns needs."""
        what = str(fault).removeprefix(f"the chat template of {self.tokenizer.spec} ")
        return what.removesuffix("; use --tags text")

    @cached_property
    def call_form(self) -> CallForm:
        """Where a call in JSON begins and ends, for masks that allow valid calls only."""
        written = self._one_call.body
        found = _object_in(written)
        if found is None:
            return CallForm()
        at, value, end = found
        key = next((key for key in tool_calls.ARGUMENT_KEYS if key in value), "")
        if list(value) != ["name", key] or value["name"] != NAME:
            return CallForm()
        opening = written[:at]
        closing = written[end:]
        between = self._between(opening, closing) if self.several else None
        return CallForm(
            opening=opening,
            between=between or "",
            closing=closing,
            arguments_key=key,
            several=between is not None,
            spaced=written[at:end] != json.dumps(value, ensure_ascii=False),
        )

    def _between(self, opening: str, closing: str) -> str | None:
        """What stands between the objects of two calls; None where it is not told apart."""
        content = "\n".join(tool_calls.format_call(NAME, arguments) for arguments in TWO_CALLS)
        written = self._answer(content).body
        if not (written.startswith(opening) and written.endswith(closing)):
            return None
        objects = written[len(opening) : len(written) - len(closing)]
        _, end = json.JSONDecoder().raw_decode(objects)
        second = objects.find("{", end)
        return objects[end:second] if second >= 0 else None

    @cached_property
    def mark(self) -> str:
        """The text with which a call begins, such as "<tool_call>\\n"; empty where it is bare."""
        written = self._one_call.body
        opens = re.compile(rf"[{{\[]|{NAME}").search(
            written, native_calls.after_mark(written, self.own)
        )
        return written[: opens.start()] if opens else ""

    @property
    def beginning(self) -> str:
        """The text with which an answer begins that is a call: an empty thought where the
        template writes one, then the mark."""
        return self._one_call.opening + self.mark

    @cached_property
    def _one_call(self) -> TurnTexts:
        return self._answer(ONE_CALL)

    def messages(
        self, messages: Sequence[Message]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Our messages as a template takes them, and the tools that their system texts list.
        DataError for an answer with a call that cannot be read."""
        said: list[dict[str, Any]] = []
        tools: list[dict[str, Any]] = []
        waiting: list[dict[str, Any]] = []  # calls whose results come next
        for message in messages:
            role = message["role"]
            content = message["content"]
            if role == "system":
                _, offered = split_offer(content, as_given=True)
                for schema in offered:
                    described = {"description": ""} | schema if self.wants_description else schema
                    tools.append({"type": "function", "function": described})
                if self._shown(message):
                    said.append({"role": role, "content": self._shown(message)})
            elif role == "function":
                said.append(_result(content, waiting))
            elif role == "assistant" and tool_calls.parse_calls(content):
                answer = self._calling(content)
                waiting = list(answer["tool_calls"])
                said.append(answer)
            else:
                said.append(
                    {
                        "role": role,
                        "content": tool_calls.in_words(content) if role == "assistant" else content,
                    }
                )
        return said, tools

    def turns(self, messages: Sequence[Message], prompt: bool) -> tuple[list[TurnIds], list[int]]:
        """The ids of each message, and those after the last. In a prompt, an answer with a call
        that cannot be read is text: a conversation goes on behind it."""
        if prompt:
            messages = [self._as_text(message) for message in messages]
        return super().turns(messages, prompt)

    def whole(self, messages: Sequence[Message]) -> list[int]:
        return super().whole([self._as_text(message) for message in messages])

    def _as_text(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        content = message["content"]
        calls = tool_calls.parse_calls(content)
        if all(call.form in tool_calls.READABLE for call in calls):
            return message
        return {**message, "content": content.replace(tool_calls.CALL_TAG, self.mark.strip())}

    def _calling(self, content: str) -> dict[str, Any]:
        """An answer with calls as a template takes it."""
        calls = tool_calls.parse_calls(content)
        if any(call.form not in tool_calls.READABLE or call.after for call in calls):
            raise self._fault(
                f"writes readable calls at the end of an answer only; got {content[:80]!r}"
            )
        prose = content.partition(tool_calls.CALL_TAG)[0].strip()
        return {
            "role": "assistant",
            "content": prose or self.wording.no_content,
            "tool_calls": [self._call(call, place) for place, call in enumerate(calls)],
        }

    def _call(self, call: tool_calls.Call, place: int) -> dict[str, Any]:
        arguments: Any = call.arguments
        if self.wording.as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            # Mistral's templates want nine letters or digits; the place in the conversation
            # must not matter, so that what follows a sampled answer is the same within a
            # rollout and in a prompt
            "id": f"call{place % 100000:05d}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _shown(self, message: Message) -> str:
        if message["role"] != "system":
            return super()._shown(message)
        text, _ = split_offer(message["content"])
        return text.replace(NO_TOOLS, "").strip("\n")

    def _fill(self, messages: Sequence[Message], prompt: bool) -> str:
        said, tools = self.messages(messages)
        if messages[0] is USER:
            tools = tools or self.assumed
        return self._render(said, tools or None, prompt)

    def _answer(self, content: str) -> TurnTexts:
        """The texts of an answer, its calls as the template writes them. DataError where they
        do not come back."""
        calls = tool_calls.parse_calls(content)
        if not calls:
            return super()._answer(tool_calls.in_words(content))
        return self._checked(self._written(content, len(calls)), content)

    def _written(self, content: str, n_calls: int) -> str:
        """What the template writes for an answer with calls, up to its closing. DataError where
        it writes them elsewhere than they are sampled."""
        form = self.form
        message = {"role": "assistant", "content": content}
        stop = self.tokenizer.decode_inside([form.stop])
        next_turn = self.specials.match(form.before)
        results = [{"role": "function", "content": "done"}] * n_calls
        followers: tuple[tuple[list[dict[str, str]], bool], ...] = (
            (results, True),
            ([USER], True),
            ([], False),
        )
        fault = ""
        for following, prompt in followers:
            try:
                text = self._fill([USER, message, *following], prompt=prompt)
            except DataError as error:
                fault = fault or self._what(error)
                continue
            if not text.startswith(form.asked):
                fault = fault or f"writes a call elsewhere than it is sampled: {content[:80]!r}"
                continue
            written, ended, _ = text.removeprefix(form.asked).partition(stop)
            if ended and not written:
                fault = fault or f"writes a call behind {stop}, with which its other answers end"
                continue
            if ended and not (next_turn and next_turn[0] in written):
                return written.removesuffix(form.closing.removesuffix(stop))
            fault = fault or f"ends a call without {stop}, with which its other answers end"
        raise self._fault(fault)

    def _checked(self, written: str, content: str) -> TurnTexts:
        """The texts of an answer, if it is read back as what it was."""
        wanted = tool_calls.parse_calls(content)
        texts: dict[tuple[str, str], bool] = {}  # what is written, whatever a tool declares
        for call in wanted:
            for key, value in (call.arguments or {}).items():
                if isinstance(value, str):
                    texts[str(call.name), key] = False
        read = native_calls.read(written, self.own, texts)
        prose = content.partition(tool_calls.CALL_TAG)[0]
        found = [(call.name, call.arguments) for call in read.calls]
        same = found == [(call.name, call.arguments) for call in wanted]
        if not same or behind_last_thought(read.prose) != behind_last_thought(prose):
            raise self._fault(
                f"writes {content[:200]!r} as {written[:200]!r}, which reads back otherwise"
            )
        opening = self.form.opening if written.startswith(self.form.opening) else ""
        body = written.removeprefix(opening)
        return TurnTexts("", opening, body, self.form.closing, self.form.after)


class _Object(NamedTuple):
    """An object of JSON in a text, and where it begins and ends."""

    at: int
    value: dict[str, Any]
    end: int


def _object_in(text: str) -> _Object | None:
    """What begins with the first brace of a text; None unless it is JSON."""
    at = max(text.find("{"), 0)
    try:
        return _Object(at, *json.JSONDecoder().raw_decode(text, at))
    except ValueError:
        return None


def _result(content: str, waiting: list[dict[str, Any]]) -> dict[str, Any]:
    """A function's result, with the name and id of the call that it answers."""
    result: dict[str, Any] = {"role": "tool", "content": content}
    if waiting:
        call = waiting.pop(0)
        result["tool_call_id"] = call["id"]
        result["name"] = call["function"]["name"]
    return result
