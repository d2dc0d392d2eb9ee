"""Requests of OpenAI's API, what the engine samples for them, and answers; every error names its field.

An unknown field is rejected: an answer that silently ignored it would be wrong. Roles come from the request's structure
alone, so no text can open a turn. Beyond OpenAI's: `top_k`, and `return_token_ids`, `stop_token_ids`, `ignore_eos` and
`key` for trainers; beside a log-probability, the token's id and its entropy.
"""

import json
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field, model_validator

from codechat.core.errors import ConfigError, DataError, UserError
from codechat.inference.engine import Detokenizer, Job, Request
from codechat.models import generate, loading
from codechat.text import call_grammar, chat, tool_calls, tool_schemas
from codechat.text.tool_calls import Turn, Unreadable, messages_of_turns

Json = dict[str, Any]
PROTOCOL_ROLES = {"developer": "system", "tool": "function"}
ANY_OBJECT = {"type": "object", "additionalProperties": True}
CUT_SHORT = {  # ends that leave no answer: the status and why
    "timeout": (504, "the answer was not finished within {timeout_s:g} s; ask for fewer tokens"),
    "closed": (503, "the server is stopping"),
    "cancelled": (499, "the client left"),
}


class ApiError(UserError):
    """A rejected request. param: the field at fault, such as messages.2.content."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if param is None or param in message else f"{param}: {message}")
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# ---- the fields


def encodable(value: Any) -> Any:
    """Json without halves of characters."""
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError, which pydantic words
    return value


Text = Annotated[str, Field(min_length=1), AfterValidator(encodable)]
Ids = Annotated[list[int], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class Lenient(BaseModel, extra="ignore", strict=True):
    """Parts in which clients may send more fields than we need."""


class Part(Lenient):
    type: Literal["text"]
    text: str


def parsed(text: Any) -> Any:
    try:
        return json.loads(text or "{}")
    except (TypeError, RecursionError):
        raise ValueError("a json object in a string is required") from None


class Called(Lenient):
    name: Text
    arguments: Annotated[Json, BeforeValidator(parsed)]


class ToolCall(Lenient):
    id: Text
    type: Literal["function"] = "function"
    function: Called


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def complete(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is absent; give a text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the assistant's messages")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    @property
    def turn(self) -> Turn:
        role, calls = PROTOCOL_ROLES.get(self.role, self.role), self.tool_calls or ()
        result_of = (self.tool_call_id or "") if role == "function" else None  # "" answers a call in text only
        written = [chat.format_call(call.function.name, call.function.arguments) for call in calls]
        return Turn(role, self.text, written, [call.id for call in calls], result_of)


class Function(Lenient, extra="allow"):
    """Other fields are kept, since one of them may hold the parameters: MCP's `inputSchema`, Anthropic's `input_schema`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(encodable)] | None = None
    strict: bool | None = False

    @property
    def schema_(self) -> dict[str, Any]:
        """Name, description and parameters in JSON Schema. ApiError where these cannot be read, of a strict function also
        where a type is not known; of others such a type is any, and stderr names it."""
        unknown: list[str] = []
        try:
            tool = tool_schemas.tool_schema(self.model_dump(exclude={"strict"}), None if self.strict else unknown)
        except DataError as error:
            raise ApiError(400, str(error), "tools") from None
        tool_schemas.say_unknown(unknown)
        return {key: tool[key] for key in ("name", "description", "parameters")}


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class Common(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """The fields of both kinds of completion."""

    model: str
    max_tokens: Count | None = Field(None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    temperature: Annotated[float, Field(ge=0, le=10)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None


class CompletionRequest(Common):
    prompt: Text | Ids
    logprobs: Literal[0] | None = None  # those of the sampled tokens
    key: int | Text = 0  # sampling depends on it and on `seed`
    stop_token_ids: list[int | Ids] | None = None  # ids, or sequences of ids, that end a completion
    ignore_eos: bool = False


# ---- what is sampled


@dataclass(frozen=True)
class ServedModel:
    """The served model, under a name, and the limits for one request."""

    loaded: loading.LoadedModel
    name: str
    created: int  # seconds since 1970
    timeout_s: float = 120.0
    reload_from: Path | None = None  # directory from which weights may be loaded; none = never
    meaning: str = ""  # which of its run's checkpoints it is, in words


def parse_chat(body: ChatRequest, served: ServedModel) -> tuple[list[Request], Detokenizer]:
    """A chat completion: n requests, and how their ids become text. ApiError names the field."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    loaded, (tools, grammar) = served.loaded, tools_of(body, served.loaded)
    ids = prompt_of(body.messages, [t.schema_ for t in tools], loaded)
    detokenizer = Detokenizer(loaded.tokenizer, loaded.tags, body.stops, calls=bool(tools))
    top = (body.top_logprobs or 0) if body.logprobs else None
    how: Json = dict(stop=chat.stop_sequences(loaded.tokenizer, loaded.tags), grammar=grammar, top=top)
    rows = requests_of(body, ids, served, detokenizer, **how)
    if (needed := (grammar and grammar.shortest) or 0) > (longest := rows[0].max_new_tokens):
        message = f"a call may need {needed} tokens, and the answer may have {longest}; raise max_tokens"
        raise ApiError(400, f"{message}, or shorten the conversation", "max_tokens")
    return rows, detokenizer


def parse_completion(body: CompletionRequest, served: ServedModel) -> tuple[list[Request], Detokenizer]:
    """A plain continuation, of a text or of ids as they are: n requests. ApiError names the field."""
    tokenizer = served.loaded.tokenizer
    ids = tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    stops = [*(body.stop_token_ids or ()), *([] if body.ignore_eos else [tokenizer.eot_id])]
    stop = tuple((one,) if isinstance(one, int) else tuple(one) for one in stops)
    detokenizer = Detokenizer(tokenizer, None, stops=body.stops)
    return requests_of(body, ids, served, detokenizer, body.key, stop=stop), detokenizer


def requests_of(
    body: Common, ids: list[int], served: ServedModel, detokenizer: Detokenizer, key: int | str = 0, **common: Any
) -> list[Request]:
    """n requests, which sample as `generate.sample` does for this prompt, seed and key."""
    if body.return_token_ids and body.stream:
        raise ApiError(400, "return_token_ids goes with whole answers; leave out stream", "return_token_ids")
    block = served.loaded.model.cfg.block_size
    if len(ids) + (body.max_tokens or 1) > block:
        field = "max_tokens" if body.max_tokens else "messages" if isinstance(body, ChatRequest) else "prompt"
        message = f"the prompt has {len(ids)} tokens and the answer may have {body.max_tokens or 1}"
        raise ApiError(400, f"{message}; both must fit the model's {block}", field, "context_length_exceeded")
    seed = secrets.randbits(62) if body.seed is None else body.seed
    temperature = 1.0 if body.temperature is None else body.temperature
    common |= dict(
        prompt=ids,
        max_new_tokens=body.max_tokens or block - len(ids),
        how=generate.Truncation(temperature=temperature, top_k=body.top_k, top_p=body.top_p),
        should_stop=detokenizer.stopped if body.stops else None,
        timeout_s=served.timeout_s,
    )
    return [Request(draws=generate.row_key(seed, key, s), **common) for s in range(body.n or 1)]


# ---- conversations


def tools_of(body: ChatRequest, loaded: loading.LoadedModel) -> tuple[list[Function], call_grammar.CallGrammar | None]:
    """The functions that the model may call, and the grammar of the answer where tool_choice asks for a call or a function is strict; none = free."""
    tools, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "two functions have the same name; keep one", "tools")
    if choice == "none":
        return [], None
    named = choice.function.name if isinstance(choice, Tool) else None
    required = named is not None or choice == "required"
    # what may be called; where only some are strict, the others may have any arguments
    callable_ = [tool for tool in tools if named in (None, tool.name)]
    if required and not callable_:
        raise ApiError(400, f"tool_choice asks for {named or 'a call'!r}, which is not among the tools", "tool_choice")
    if required and body.stops:
        raise ApiError(400, "stop goes with text; leave it out where tool_choice asks for a call", "stop")
    strict = any(tool.strict for tool in callable_)
    if not (required or strict):
        return tools, None
    schemas = [tool.schema_ | ({} if required or tool.strict else {"parameters": ANY_OBJECT}) for tool in callable_]
    how = dict(required=required, one_call=named is not None, strict=strict, declines=loaded.declines)
    try:
        return tools, call_grammar.call_grammar(loaded.tokenizer, loaded.tags, schemas, **how)
    except ConfigError as error:
        raise ApiError(400, str(error), "tools") from None


def prompt_of(messages: Sequence[Message], tools: Sequence[Json], loaded: loading.LoadedModel) -> list[int]:
    """Ids of the conversation up to where the assistant begins to write, as in training."""
    turns = [message.turn for message in messages]
    for turn in turns:
        if loaded.declines and turn == Turn("assistant", chat.DECLINED):
            turn.content = chat.DECLINE  # as the model wrote it
    try:
        return chat.prompt(messages_of_turns(turns, tools, loaded.tools_style), loaded.tokenizer, loaded.tags)
    except Unreadable as error:
        if error.turn is None:
            raise ApiError(400, str(error), "tools") from None
        field = f"messages.{next(i for i, turn in enumerate(turns) if turn is error.turn)}"
        raise ApiError(400, f"{field}: every call needs an id of its own, and one result with that id", field) from None
    except DataError as error:  # where tags are text, a content or a tool's description may forge a turn
        raise ApiError(400, str(error), "messages") from None


# ---- answers. Log-probabilities are of the sampling distribution, the closing tag's included.


class News(NamedTuple):
    """What came of an answer since the last look: text, whole calls, the range of its tokens; reason: why it ended."""

    text: str
    calls: list[Json]
    tokens: slice
    reason: str | None


class ResponseBuilder:
    """The answers to one request; it remembers what of a growing answer was sent."""

    def __init__(self, body: Common, jobs: list[Job], detokenizer: Detokenizer) -> None:
        self.request: Any = body
        self.jobs, self.detokenizer, self.chat = jobs, detokenizer, isinstance(body, ChatRequest)
        kind = f"chat.completion{'.chunk' if body.stream else ''}" if self.chat else "text_completion"
        id, now = f"{kind[:4]}cmpl-{uuid.uuid4().hex}", int(time.time())
        self.head: Json = dict(id=id, created=now, model=body.model, object=kind)
        self.sent = [(0, 0)] * len(jobs)  # characters, tokens
        self.over = [False] * len(jobs)
        self.begun = False

    def body(self) -> Json:
        """The body of a finished answer."""
        choices = []
        for i, job in enumerate(self.jobs):
            news = self._news(i, job)
            said = {"text": news.text}
            if self.chat:
                message: Json = {"role": "assistant", "content": news.text or None if news.calls else news.text}
                message |= {"refusal": None} | ({"tool_calls": news.calls} if news.calls else {})
                said = {"message": message}
            choice = self._choice(i, said, self._logprobs(job, news.tokens), news.reason)
            if self.request.return_token_ids:
                choice |= {"token_ids": list(job.ids), "prompt_token_ids": job.request.prompt}
                choice["weights_version"] = job.version
            choices.append(choice)
        return self.usage_chunk() | {"choices": choices}

    def new_chunks(self) -> Iterator[Json]:
        """Chunks of what came since the last call. In a chat the first of each choice has its role alone. The last of
        each choice has its finish_reason alone: clients take the call before it as complete."""
        if self.chat and not self.begun:
            for i in range(len(self.jobs)):  # in this order: OpenAI's client finds choices by their place
                yield self._chunk(i, {"delta": {"role": "assistant", "content": None, "refusal": None}})
        self.begun = True
        for i, job in enumerate(self.jobs):
            if self.over[i]:
                continue
            news = self._news(i, job)
            logprobs = self._logprobs(job, news.tokens)
            deltas: list[Json] = [{"content": news.text}] if news.text else []
            deltas += [{"tool_calls": news.calls}] if news.calls else []
            if logprobs and not deltas and news.reason:  # of a closing tag
                deltas = [{"content": ""}]
            for delta in deltas:
                said = {"delta": delta} if self.chat else {"text": delta["content"]}
                yield self._chunk(i, said, logprobs)
                logprobs = None
            if news.reason:
                yield self._chunk(i, {"delta": {}} if self.chat else {"text": ""}, reason=news.reason)

    def usage_chunk(self) -> Json:
        prompt, completion = len(self.jobs[0].request.prompt), sum(len(job.ids) for job in self.jobs)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**self.head, "choices": [], "usage": usage}

    def _chunk(self, i: int, said: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {**self.head, "choices": [self._choice(i, said, logprobs, reason)]}

    def _choice(self, i: int, said: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": i, "finish_reason": reason, "logprobs": logprobs} | said

    def _news(self, i: int, job: Job) -> News:
        """What came since the last call; of a finished answer all that is left. Tokens wait for text that shows them."""
        end, ids = job.end, list(job.ids)  # in this order: `end` is set last
        text, called = self.detokenizer.split(ids) if end else (self.detokenizer.growing(ids), [])
        characters, tokens = self.sent[i]
        piece = text[characters:]
        if end in CUT_SHORT or not (piece or end):
            return News("", [], slice(tokens, tokens), None)
        self.sent[i] = (len(text), len(ids))
        self.over[i] = bool(end)
        calls = [self._call(i, k, *call) for k, call in enumerate(called)]
        reason = "length" if end != "stop" else "tool_calls" if calls else "stop"
        return News(piece, calls, slice(tokens, len(ids)), reason if end else None)

    def _call(self, i: int, k: int, name: str, arguments: Json) -> Json:
        """Call k of completion i."""
        given = tool_calls.escape_surrogates(json.dumps(arguments, ensure_ascii=False))
        call: Json = {"id": f"call_{self.head['id'][-12:]}_{i}_{k}", "type": "function"}
        return call | {"function": {"name": name, "arguments": given}} | ({"index": k} if self.request.stream else {})

    def _logprobs(self, job: Job, some: slice) -> Json | None:
        """Entries of some of the tokens; entropies in nats. None where none came, or none are requested."""
        if self.request.logprobs is None or self.request.logprobs is False:  # 0 asks for those of the sampled ids
            return None
        if some.start == some.stop and self.request.stream:
            return None
        if not self.chat:
            tokens = [self.detokenizer.piece(token).decode("utf-8", "replace") for token in job.ids[some]]
            return {"tokens": tokens, "token_logprobs": job.logprobs[some], "top_logprobs": None}
        entries = [
            self._token(id, lp) | dict(entropy=max(0.0, entropy), top_logprobs=[self._token(*one) for one in likeliest])
            for (entropy, likeliest), id, lp in list(zip(job.details, job.ids, job.logprobs))[some]
        ]
        return {"content": entries, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        piece = self.detokenizer.piece(token)
        return dict(token=piece.decode("utf-8", "replace"), token_id=token, logprob=logprob, bytes=list(piece))
