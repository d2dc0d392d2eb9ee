"""What a completion's ids say: its text as it grows, stop strings, function calls."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


def stable_text(text: str, end: str) -> str:
    """The part of a growing text that more tokens cannot change: without half characters, without a prefix of `end`."""
    text = text.rstrip("\ufffd")
    cut = next((n for n in range(min(len(end), len(text)), 0, -1) if text.endswith(end[:n])), 0)
    return text[: len(text) - cut]


@dataclass(frozen=True)
class Detokenizer:
    """How the ids of one completion become text.

    tags: the protocol's mode; none = plain text without turns. stops: never shown. calls: calls are separated from
    text. raw: tags are shown."""

    tokenizer: Tokenizer
    tags: str | None
    stops: tuple[str, ...] = ()
    calls: bool = False
    raw: bool = False

    def text(self, ids: Sequence[int]) -> str:
        """The whole text, up to the first stop string; an answer that declines by a call, in words."""
        text = self._until_stop(ids)
        return text if self._as_written else chat.in_words(text)

    def growing(self, ids: Sequence[int]) -> str:
        """The beginning of the text that further ids cannot change; of a text with calls, the part before the first."""
        text = self._until_stop(ids)
        if not self._as_written and (chat.DECLINE.startswith(text) or chat.in_words(text) != text):
            return ""
        text = text[: min(len(stable_text(text, ending)) for ending in self._endings)]
        return text.split(chat.CALL_TAG)[0] if self.calls else text

    def split(self, ids: Sequence[int]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Text before the calls of a finished completion, and the name and arguments of each before the first
        unreadable one. Without a readable call all is text."""
        text = self.text(ids)
        calls = chat.parse_calls(text) if self.calls else []
        readable = list(takewhile(lambda call: call.form in chat.READABLE and call.name.isprintable(), calls))
        return text.split(chat.CALL_TAG)[0] if readable else text, [(call.name, call.arguments) for call in readable]

    def piece(self, token: int) -> bytes:
        """The bytes of one id; a tag is spelled out."""
        if token < self.tokenizer.n_vocab:
            return self.tokenizer.token_bytes(token)
        return chat.decode([token], self.tokenizer).encode()

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Of each id of a plain text, the character of `text` in which its first byte is."""
        decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for token in ids:
            offsets.append(length)
            if token != self.tokenizer.eot_id:
                length += len(decoder.decode(self.piece(token)))
        return offsets

    @property
    def _as_written(self) -> bool:
        return self.raw or self.tags is None

    def _until_stop(self, ids: Sequence[int]) -> str:
        if self._as_written:
            text = chat.decode([i for i in ids if self.raw or i != self.tokenizer.eot_id], self.tokenizer)
        else:
            text = chat.completion_text(ids, self.tokenizer, self.tags)
        return text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]

    @cached_property
    def _endings(self) -> list[str]:
        """What may follow without being shown as text; "" stands for nothing."""
        endings = ["", *self.stops, *([chat.CALL_TAG] if self.calls else [])]
        if not self._as_written:
            closing = chat.decode(chat.stop_sequences(self.tokenizer, self.tags)[0], self.tokenizer)
            # a model may leave out what stands before its closing tag
            endings += [chat.answer_frame(self.tokenizer, self.tags)[1] + closing, closing]
        return endings


class StopStrings:
    """True from the token on with which one of the strings is complete, however tokens cut it."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer, self.tail = detokenizer, b""
        self.stops = [stop.encode() for stop in detokenizer.stops]

    def __call__(self, token: int) -> bool:
        tail = self.tail + self.detokenizer.piece(token)
        # bytes that the next token may complete
        self.tail = tail[max(0, len(tail) - max(map(len, self.stops)) + 1) :]
        return any(stop in tail for stop in self.stops)
