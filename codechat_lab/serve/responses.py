"""Answers of OpenAI's API, whole or in chunks, from the ids of their completions.

Log-probabilities are of the sampling distribution, the closing tag's included. Beyond OpenAI's:
the token's id and the entropy of its distribution beside each log-probability."""

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from codechat.text import chat, tool_calls
from codechat_lab.serve.detokenizer import Detokenizer
from codechat_lab.serve.engine import Job
from codechat_lab.serve.protocol import ChatRequest, Common, CompletionRequest, Json

CUT_SHORT = {  # ends that leave no answer: the status and why
    "timeout": (504, "the answer was not finished within {timeout_s:g} s; ask for fewer tokens"),
    "closed": (503, "the server is stopping"),
    "cancelled": (499, "the client left"),
}
Likeliest = Sequence[tuple[int, float]]  # ids and log-probabilities, likeliest first


@dataclass(frozen=True)
class News:
    """What came of an answer since the last look: text, whole calls, the range of its tokens;
    reason: why it ended."""

    text: str
    calls: list[Json]
    tokens: slice
    reason: str | None


@dataclass
class Choice:
    """One completion of an answer, and how much of it was sent."""

    index: int
    job: Job
    characters: int = 0
    tokens: int = 0
    over: bool = False
    offset: int = 0  # characters of the tokens in `entries`
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def next_offset(self, piece: bytes) -> int:
        """Where the token of these bytes begins in the text, in characters."""
        begin = self.offset
        self.offset += len(self.decoder.decode(piece))
        return begin


class ResponseBuilder(ABC):
    """The answers to one request; it remembers what of a growing answer was sent."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    last: ClassVar[Json]  # of the chunk that has the finish_reason

    def __init__(self, body: Common, jobs: Sequence[Job], detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.choices = [Choice(i, job) for i, job in enumerate(jobs)]
        self.stream = bool(body.stream)
        self.n = body.n or 1  # completions of each prompt
        self.return_token_ids = body.return_token_ids
        kind = self.chunk_kind if self.stream else self.kind
        self.head: Json = {
            "id": f"{kind[:4]}cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "object": kind,
        }
        self.begun = False

    # ---- of chats, or of continuations

    @abstractmethod
    def whole(self, choice: Choice) -> Json:
        """A choice of a finished answer."""

    @abstractmethod
    def first(self, choice: Choice) -> Json | None:
        """The choice of the first chunk."""

    @abstractmethod
    def parts(self, news: News, logprobs: Json | None) -> list[Json]:
        """News, in as many chunks; at least one where log-probabilities are to be sent at the
        end."""

    @abstractmethod
    def logprobs(self, choice: Choice, some: slice) -> Json | None:
        """Entries of some of the tokens; none where none came, or none are requested."""

    # ---- of both

    def body(self) -> Json:
        """The body of a finished answer."""
        choices = []
        for choice in self.choices:
            said = self.whole(choice)
            if self.return_token_ids:
                said["token_ids"] = choice.job.ids
                said["prompt_token_ids"] = choice.job.request.prompt
                said["weights_version"] = choice.job.version
            choices.append(said)
        return self.usage_chunk() | {"choices": choices}

    def new_chunks(self) -> Iterator[Json]:
        """Chunks of what came since the last call. The first of each choice has its role or the
        echoed prompt alone, the last one its finish_reason: clients take the call before it as
        complete."""
        if not self.begun:
            # in this order: OpenAI's client finds choices by their place
            for choice in self.choices:
                first = self.first(choice)
                if first:
                    yield self._chunk(first)
        self.begun = True
        for choice in self.choices:
            if choice.over:
                continue
            news = self.news(choice)
            logprobs = self.logprobs(choice, news.tokens)
            for said in self.parts(news, logprobs):
                yield self._chunk(self._choice(choice, said, logprobs))
                logprobs = None
            if news.reason:
                yield self._chunk(self._choice(choice, self.last, reason=news.reason))

    def usage_chunk(self) -> Json:
        jobs = [choice.job for choice in self.choices]
        prompt = sum(len(job.request.prompt) for job in jobs[:: self.n])
        completion = sum(len(job.ids) for job in jobs)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return self.head | {"choices": [], "usage": usage}

    def _chunk(self, choice: Json) -> Json:
        return self.head | {"choices": [choice]}

    def _choice(
        self, choice: Choice, said: Json, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {"index": choice.index, "finish_reason": reason, "logprobs": logprobs} | said

    def news(self, choice: Choice) -> News:
        """What came since the last call; of a finished answer all that is left. Tokens wait for
        text that shows them."""
        end = choice.job.end  # before the ids, since the engine sets it last
        ids = list(choice.job.ids)
        text, called = self.detokenizer.split(ids) if end else (self.detokenizer.growing(ids), [])
        piece = text[choice.characters :]
        if end in CUT_SHORT or not (piece or end):
            return News("", [], slice(choice.tokens, choice.tokens), None)
        tokens = slice(choice.tokens, len(ids))
        choice.characters = len(text)
        choice.tokens = len(ids)
        choice.over = bool(end)
        calls = [
            self._call(choice, number, name, arguments)
            for number, (name, arguments) in enumerate(called)
        ]
        if not end:
            return News(piece, calls, tokens, None)
        if end != "stop":
            return News(piece, calls, tokens, "length")
        return News(piece, calls, tokens, "tool_calls" if calls else "stop")

    def _call(self, choice: Choice, number: int, name: str, arguments: Json) -> Json:
        given = tool_calls.escape_surrogates(json.dumps(arguments, ensure_ascii=False))
        call: Json = {
            "id": f"call_{self.head['id'][-12:]}_{choice.index}_{number}",
            "type": "function",
        }
        call["function"] = {"name": name, "arguments": given}
        return call | {"index": number} if self.stream else call

    def spelled(self, token: int) -> str:
        return self.detokenizer.piece(token).decode("utf-8", "replace")


class ChatResponse(ResponseBuilder):
    """The answer of a chat."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    last: ClassVar[Json] = {"delta": {}}

    def __init__(self, body: ChatRequest, jobs: Sequence[Job], detokenizer: Detokenizer) -> None:
        super().__init__(body, jobs, detokenizer)
        self.with_logprobs = body.logprobs

    def whole(self, choice: Choice) -> Json:
        news = self.news(choice)
        content = None if news.calls and not news.text else news.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if news.calls:
            message["tool_calls"] = news.calls
        return self._choice(
            choice, {"message": message}, self.logprobs(choice, news.tokens), news.reason
        )

    def first(self, choice: Choice) -> Json:
        return self._choice(
            choice, {"delta": {"role": "assistant", "content": None, "refusal": None}}
        )

    def parts(self, news: News, logprobs: Json | None) -> list[Json]:
        deltas: list[Json] = []
        if news.text:
            deltas.append({"content": news.text})
        if news.calls:
            deltas.append({"tool_calls": news.calls})
        if news.reason and logprobs and not deltas:  # of a closing tag
            deltas.append({"content": ""})
        return [{"delta": delta} for delta in deltas]

    def logprobs(self, choice: Choice, some: slice) -> Json | None:
        if not self.with_logprobs or (self.stream and some.start == some.stop):
            return None
        job = choice.job
        entries = []
        for token, logprob, (entropy, likeliest) in zip(
            job.ids[some], job.logprobs[some], job.details[some]
        ):
            entry = self._token(token, logprob)
            entry["entropy"] = max(0.0, entropy)  # nats
            entry["top_logprobs"] = [self._token(*one) for one in likeliest]
            entries.append(entry)
        return {"content": entries, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self.spelled(token),
            "token_id": token,
            "logprob": logprob,
            "bytes": list(self.detokenizer.piece(token)),
        }


class CompletionResponse(ResponseBuilder):
    """The continuations of prompts."""

    kind = chunk_kind = "text_completion"
    last: ClassVar[Json] = {"text": ""}

    def __init__(
        self, body: CompletionRequest, jobs: Sequence[Job], detokenizer: Detokenizer
    ) -> None:
        super().__init__(body, jobs, detokenizer)
        self.prompts = body.prompts
        self.echo = body.echo
        self.likeliest = body.likeliest

    def whole(self, choice: Choice) -> Json:
        echoed, entries = self._echo(choice)
        news = self.news(choice)
        logprobs = self.logprobs(choice, news.tokens)
        if entries and logprobs:
            logprobs = {
                name: entries[name] and [*entries[name], *(logprobs[name] or ())]
                for name in entries
            }
        return self._choice(choice, {"text": echoed + news.text}, logprobs, news.reason)

    def first(self, choice: Choice) -> Json | None:
        if not self.echo:
            return None
        text, entries = self._echo(choice)
        return self._choice(choice, {"text": text}, entries)

    def parts(self, news: News, logprobs: Json | None) -> list[Json]:
        return [{"text": news.text}] if news.text or (news.reason and logprobs) else []

    def logprobs(self, choice: Choice, some: slice) -> Json | None:
        if self.likeliest is None or (self.stream and some.start == some.stop):
            return None
        job = choice.job
        likeliest = [tokens for _, tokens in job.details[some]]
        return self._entries(choice, job.ids[some], job.logprobs[some], likeliest)

    def _echo(self, choice: Choice) -> tuple[str, Json | None]:
        """The prompt of a choice, if it is to come back, and the entries of its tokens."""
        if not self.echo:
            return "", None
        prompt = self.prompts[choice.index // self.n]
        text = (
            prompt if isinstance(prompt, str) else chat.decode(prompt, self.detokenizer.tokenizer)
        )
        if self.likeliest is None:
            return text, None
        job = choice.job
        # nothing stands before the first token, so it has no probability
        logprobs = [None, *job.prompt_logprobs]
        return text, self._entries(
            choice, job.request.prompt, logprobs, [None, *job.prompt_likeliest]
        )

    def _entries(
        self,
        choice: Choice,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        likeliest: Sequence[Likeliest | None],
    ) -> Json:
        """Log-probabilities in the form of /v1/completions."""
        entries: Json = {
            "tokens": [self.spelled(token) for token in ids],
            "token_logprobs": list(logprobs),
            "text_offset": [choice.next_offset(self.detokenizer.piece(token)) for token in ids],
            "top_logprobs": None,
        }
        if self.likeliest:
            entries["top_logprobs"] = [
                None if top is None or logprob is None else self._by_text([*top, (token, logprob)])
                for token, logprob, top in zip(ids, logprobs, likeliest, strict=True)
            ]
        return entries

    def _by_text(self, tokens: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Of two tokens with the same text the likelier counts."""
        named: dict[str, float] = {}
        for token, logprob in tokens:
            named.setdefault(self.spelled(token), logprob)
        return named


def response_of(body: Common, jobs: Sequence[Job], detokenizer: Detokenizer) -> ResponseBuilder:
    """The builder of the answers to a request."""
    if isinstance(body, ChatRequest):
        return ChatResponse(body, jobs, detokenizer)
    assert isinstance(body, CompletionRequest)
    return CompletionResponse(body, jobs, detokenizer)
