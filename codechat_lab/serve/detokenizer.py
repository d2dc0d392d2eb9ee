"""What the ids of a completion say: its text as it grows, stop strings, function calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from codechat.text import chat, native_calls, tool_calls
from codechat.text.tokenizer import Tokenizer


def stable_text(text: str, end: str) -> str:
    """The part of a growing text that more tokens cannot change: without half characters,
    without a prefix of `end`."""
    text = text.rstrip("\ufffd")
    for n in range(len(end), 0, -1):
        if text.endswith(end[:n]):
            return text[:-n]
    return text


@dataclass(frozen=True)
class Detokenizer:
    """How the ids of one completion become text.

    tags: the protocol's mode; none = plain text without turns. stops: never shown. calls: calls
    are separated from text."""

    tokenizer: Tokenizer
    tags: str | None
    stops: tuple[str, ...] = ()
    calls: bool = False
    texts: native_calls.Texts = field(default_factory=dict)  # arguments that are declared so

    def text(self, ids: Sequence[int]) -> str:
        """The whole text, up to the first stop string. Declining by a call becomes words."""
        text = self._until_stop(ids)
        return text if self.tags is None else tool_calls.in_words(text)

    def growing(self, ids: Sequence[int]) -> str:
        """The beginning of the text that further ids cannot change, of a text with calls at
        most up to the first."""
        text = self._until_stop(ids, growing=True)
        if self.tags is not None and (
            tool_calls.DECLINE.startswith(text) or tool_calls.in_words(text) != text
        ):
            return ""
        text = text[: min(len(stable_text(text, ending)) for ending in self._endings)]
        return text.split(tool_calls.CALL_TAG)[0] if self.calls else text

    def split(self, ids: Sequence[int]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Text of a finished completion, and the name and arguments of each call before the
        first unreadable one.

        Texts after calls follow the text before the first, a line each. Without a readable call
        all is text."""
        text = self.text(ids)
        calls = tool_calls.parse_calls(text) if self.calls else []
        readable = list(takewhile(_is_readable, calls))
        if not readable:
            return self._until_stop(ids, as_written=True) if calls else text, []
        before = text.split(tool_calls.CALL_TAG)[0]
        after = "\n".join(call.after for call in readable if call.after)
        gap = "\n" if before and after and not before.endswith("\n") else ""
        return before + gap + after, [(str(call.name), call.arguments or {}) for call in readable]

    def piece(self, token: int) -> bytes:
        """The bytes of one id; a tag is spelled out."""
        if token < self.tokenizer.n_vocab:
            return self.tokenizer.token_bytes(token)
        return chat.decode([token], self.tokenizer).encode()

    def stopped(self, ids: Sequence[int]) -> bool:
        """Whether the last id completes a stop string, however tokens cut it."""
        stops = [stop.encode() for stop in self.stops]
        # an id has at least one byte
        tail = b"".join(map(self.piece, ids[-max(map(len, stops)) :]))
        return any(stop in tail for stop in stops)

    def _until_stop(
        self, ids: Sequence[int], growing: bool = False, as_written: bool = False
    ) -> str:
        text = self._written(ids, growing, as_written)
        places = [text.find(stop) for stop in self.stops]
        return text[: min((at for at in places if at >= 0), default=len(text))]

    def _written(self, ids: Sequence[int], growing: bool, as_written: bool) -> str:
        if self.tags is None:
            return chat.decode([i for i in ids if i != self.tokenizer.eot_id], self.tokenizer)
        if self.tags != chat.NATIVE:
            return chat.completion_text(ids, self.tokenizer, self.tags)
        text = chat.transcript(ids, self.tokenizer, self.tags)
        if as_written or not self.calls:  # JSON that no tool asked for is text
            return text
        if growing:
            return chat.settled(text, self.tokenizer)
        return chat.canonical(text, self.tokenizer, self.texts)

    @cached_property
    def _endings(self) -> list[str]:
        """What may follow without being shown as text; "" stands for nothing."""
        endings = ["", *self.stops, *([tool_calls.CALL_TAG] if self.calls else [])]
        if self.tags is not None:
            closing = chat.decode(chat.stop_sequences(self.tokenizer, self.tags)[0], self.tokenizer)
            # a model may leave out what stands before its closing tag
            endings += [chat.layout(self.tokenizer, self.tags).closing + closing, closing]
        return endings


def _is_readable(call: tool_calls.Call) -> bool:
    return call.form in tool_calls.READABLE and str(call.name).isprintable()
