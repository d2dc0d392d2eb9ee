"""Requests of OpenAI's API, what the engine samples for them, and answers; every error names its field.

An unknown field is rejected: an answer that silently ignored it would be wrong. Of what is not supported, the
values that change nothing are accepted, since clients send them. Roles come from the request's structure alone, so
no text can open a turn. Beyond OpenAI's: `top_k`, and `return_token_ids`, `stop_token_ids`, `ignore_eos` and `key`
for trainers; beside a log-probability, the token's id and its entropy."""

import codecs
import json
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from codechat.core.errors import ConfigError, DataError, UserError
from codechat.models import generate, loading
from codechat.text import chat, tool_calls, tool_schemas
from codechat.text.tool_calls import Turn, Unreadable, messages_of_turns
from codechat_lab.serve import call_grammar
from codechat_lab.serve.engine import Detokenizer, Job, Request

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
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a character, which UTF-8 cannot encode; send whole characters") from None
    return value


def only(*neutral: Any, instead: str = "") -> AfterValidator:
    """What accepts null and the values of an unsupported field that change nothing. instead: what to send for
    others."""
    accepted = [json.dumps(value) for value in neutral]

    def check(value: Any) -> Any:
        # 0 and 0.0 are equal, 0 and false are not
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return value
        hint = f", or send {instead or ' or '.join(accepted)}" if accepted or instead else ""
        raise ValueError(f"got {json.dumps(value)[:60]}, which is not supported; leave it out{hint}")

    return AfterValidator(check)


def no_bias(value: Any) -> Any:
    """logit_bias: biases of 0 change nothing."""
    if (
        value is None
        or isinstance(value, dict)
        and all(type(bias) in (int, float) and bias == 0 for bias in value.values())
    ):
        return value
    raise ValueError(f"got {json.dumps(value)[:60]}, which is not supported; leave it out, or send {{}}")


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
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"got {json.dumps(text)[:60]}; required is a JSON object, written as a text") from None


class Called(Lenient):
    name: Text
    arguments: Annotated[Json, BeforeValidator(parsed)]


class ToolCall(Lenient):
    id: Text
    type: Literal["function"] | None = None
    function: Called


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, only(instead="tool_calls")] = None  # OpenAI's of 2023; a call must not be lost
    audio: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def complete(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is absent; give a text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the assistant's messages")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or () if part.text)  # as in training

    @property
    def turn(self) -> Turn:
        role = PROTOCOL_ROLES.get(self.role, self.role)
        calls = self.tool_calls or ()
        result_of = (self.tool_call_id or "") if role == "function" else None  # "" answers a call in text only
        written = [chat.format_call(call.function.name, call.function.arguments) for call in calls]
        return Turn(role, self.text, written, [call.id for call in calls], result_of)


class Function(Lenient, extra="allow"):
    """Other fields are kept, since one of them may hold the parameters: MCP's `inputSchema`, Anthropic's
    `input_schema`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(encodable)] | None = None
    strict: bool | None = False

    @property
    def schema_(self) -> dict[str, Any]:
        """Name, description and parameters in JSON Schema. ApiError where these cannot be read, of a strict
        function also where a type is not known; of others such a type is any, and stderr names it."""
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


class Unsupported(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """What clients send though it changes nothing: neutral values of fields that are not supported."""

    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    logit_bias: Annotated[Any, AfterValidator(no_bias)] = None
    min_p: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None


class UnsupportedInChats(Unsupported):
    """Of a chat, beside the above."""

    response_format: Annotated[Any, only({"type": "text"})] = None
    parallel_tool_calls: Annotated[Any, only(True)] = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Annotated[Any, only("medium")] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    functions: Annotated[Any, only([], instead="tools")] = None
    function_call: Annotated[Any, only("none", "auto", instead="tool_choice")] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    # of plain continuations
    echo: Annotated[Any, only(False)] = None
    best_of: Annotated[Any, only(1)] = None
    ignore_eos: Annotated[Any, only(False)] = None
    stop_token_ids: Annotated[Any, only([])] = None
    # who asks, and hints for caches: no part of the answer
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class UnsupportedInCompletions(Unsupported):
    """Of a plain continuation, beside the above."""

    suffix: Annotated[Any, only("")] = None


class StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class Common(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """The fields of both kinds of completion."""

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # another name of it
    temperature: Annotated[float, Field(ge=0, le=10)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: all
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    user: str | None = None  # who asks: no part of the answer

    @field_validator("max_completion_tokens")
    @classmethod
    def agrees(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if None not in (value, other) and value != other:
            raise ValueError(f"got {value} beside max_tokens {other}; give one of them")
        return value

    @property
    def longest(self) -> int | None:
        """Tokens that the answer may have; none = what the block has."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common, UnsupportedInChats):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None


class CompletionRequest(Common, UnsupportedInCompletions):
    prompt: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0: only the prompt is read
    echo: bool | None = False
    # of each token, and of so many of the likeliest
    logprobs: Annotated[int, Field(ge=0, le=20)] | Literal[False] | None = None
    # lm-eval sends more than OpenAI's four
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    key: int | Text | None = None  # sampling depends on it and on `seed`; none = the prompt's number
    stop_token_ids: list[int | Ids] | None = None  # ids, or sequences of ids, that end a completion
    ignore_eos: bool | None = False
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def all_are_returned(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 1, info.data.get("n")):
            raise ValueError(f"got {value}, which is not supported; leave it out, or send n")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


def supported_fields(chat: bool) -> list[str]:
    """The names of the fields that mean something in a chat, or in a plain continuation."""
    request, unsupported = (ChatRequest, UnsupportedInChats) if chat else (CompletionRequest, UnsupportedInCompletions)
    return [name for name in request.model_fields if name not in unsupported.model_fields]


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
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    loaded, (tools, grammar) = served.loaded, tools_of(body, served.loaded)
    ids = prompt_of(body.messages, [t.schema_ for t in tools], loaded)
    detokenizer = Detokenizer(loaded.tokenizer, loaded.tags, body.stops, calls=bool(tools))
    top = (body.top_logprobs or 0) if body.logprobs else None
    how: Json = dict(stop=chat.stop_sequences(loaded.tokenizer, loaded.tags), grammar=grammar, top=top)
    rows = requests_of(body, ids, served, detokenizer, **how)
    needed = (grammar and grammar.shortest) or 0
    if needed > (longest := rows[0].max_new_tokens):
        message = f"a call may need {needed} tokens, and the answer may have {longest}; raise max_tokens"
        raise ApiError(400, f"{message}, or shorten the conversation", "max_tokens")
    return rows, detokenizer


def parse_completion(body: CompletionRequest, served: ServedModel) -> tuple[list[Request], Detokenizer]:
    """Plain continuations of texts, or of ids as they are: n requests for each prompt. ApiError names the field."""
    tokenizer = served.loaded.tokenizer
    if body.key is not None and len(body.prompts) > 1:
        raise ApiError(400, f"it goes with one prompt, and here are {len(body.prompts)}; leave it out", "key")
    stops = [*(body.stop_token_ids or ()), *([] if body.ignore_eos else [tokenizer.eot_id])]
    stop = tuple((one,) if isinstance(one, int) else tuple(one) for one in stops)
    detokenizer = Detokenizer(tokenizer, None, stops=body.stops)
    likeliest = None if body.logprobs is False else body.logprobs
    rows = []
    for number, prompt in enumerate(body.prompts):
        rows += requests_of(
            body,
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
            served,
            detokenizer,
            key=number if body.key is None else body.key,  # as `generate.sample` draws for these prompts
            stop=stop,
            top=likeliest or None,  # the sampled tokens' own log-probabilities are always there
            prompt_top=likeliest if body.echo else None,
        )
    return rows, detokenizer


def requests_of(
    body: Common, ids: list[int], served: ServedModel, detokenizer: Detokenizer, key: int | str = 0, **common: Any
) -> list[Request]:
    """n requests, which sample as `generate.sample` does for this prompt, seed and key."""
    if body.return_token_ids and body.stream:
        raise ApiError(400, "return_token_ids goes with whole answers; leave out stream", "return_token_ids")
    block = served.loaded.model.cfg.block_size
    longest = 1 if body.longest is None else body.longest
    if len(ids) + longest > block:
        field = "max_tokens" if body.longest else "messages" if isinstance(body, ChatRequest) else "prompt"
        message = f"the prompt has {len(ids)} tokens and the answer may have {longest}"
        raise ApiError(400, f"{message}; both must fit the model's {block}", field, "context_length_exceeded")
    seed = secrets.randbits(62) if body.seed is None else body.seed
    temperature = 1.0 if body.temperature is None else body.temperature
    common |= dict(
        prompt=ids,
        max_new_tokens=block - len(ids) if body.longest is None else body.longest,
        how=generate.Truncation(
            temperature=temperature,
            top_k=body.top_k if (body.top_k or 0) > 0 else None,
            top_p=body.top_p,
        ),
        should_stop=detokenizer.stopped if body.stops else None,
        timeout_s=served.timeout_s,
    )
    return [Request(draws=generate.row_key(seed, key, s), **common) for s in range(body.n or 1)]


# ---- conversations


def tools_of(body: ChatRequest, loaded: loading.LoadedModel) -> tuple[list[Function], call_grammar.CallGrammar | None]:
    """The functions that the model may call, and the grammar of the answer where tool_choice asks for a call or a
    function is strict; none = free."""
    tools = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice
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
        needed = f"for {named!r}, which is not among the tools" if named else "for a call, and no tools are offered"
        raise ApiError(400, f"tool_choice asks {needed}; offer it in tools", "tool_choice")
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


class Offsets:
    """Where the tokens of a text begin, in characters."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = 0

    def of(self, piece: bytes) -> int:
        """Where the next token begins."""
        begin = self.at
        self.at += len(self.decoder.decode(piece))
        return begin


class ResponseBuilder:
    """The answers to one request; it remembers what of a growing answer was sent."""

    def __init__(self, body: Common, jobs: list[Job], detokenizer: Detokenizer) -> None:
        self.request: Any = body
        self.jobs = jobs
        self.detokenizer = detokenizer
        self.chat = isinstance(body, ChatRequest)
        kind = f"chat.completion{'.chunk' if body.stream else ''}" if self.chat else "text_completion"
        id = f"{kind[:4]}cmpl-{uuid.uuid4().hex}"
        now = int(time.time())
        self.head: Json = dict(id=id, created=now, model=body.model, object=kind)
        self.sent = [(0, 0)] * len(jobs)  # characters, tokens
        self.offsets = [Offsets() for _ in jobs]
        self.over = [False] * len(jobs)
        self.begun = False

    def body(self) -> Json:
        """The body of a finished answer."""
        choices = []
        for i, job in enumerate(self.jobs):
            echoed, entries = self._echo(i, job)
            news = self._news(i, job)
            said: Json = {"text": echoed + news.text}
            if self.chat:
                message: Json = {"role": "assistant", "content": news.text or None if news.calls else news.text}
                message |= {"refusal": None} | ({"tool_calls": news.calls} if news.calls else {})
                said = {"message": message}
            logprobs = self._logprobs(i, job, news.tokens)
            if entries and logprobs:
                logprobs = {name: entries[name] and [*entries[name], *(logprobs[name] or ())] for name in entries}
            choice = self._choice(i, said, logprobs, news.reason)
            if self.request.return_token_ids:
                choice |= {"token_ids": list(job.ids), "prompt_token_ids": job.request.prompt}
                choice["weights_version"] = job.version
            choices.append(choice)
        return self.usage_chunk() | {"choices": choices}

    def new_chunks(self) -> Iterator[Json]:
        """Chunks of what came since the last call. The first of each choice has its role or the echoed prompt
        alone, the
        last one its finish_reason: clients take the call before it as complete."""
        if not self.begun:
            for i, job in enumerate(self.jobs):  # in this order: OpenAI's client finds choices by their place
                if self.chat:
                    yield self._chunk(i, {"delta": {"role": "assistant", "content": None, "refusal": None}})
                elif self.request.echo:
                    text, entries = self._echo(i, job)
                    yield self._chunk(i, {"text": text}, entries)
        self.begun = True
        for i, job in enumerate(self.jobs):
            if self.over[i]:
                continue
            news = self._news(i, job)
            logprobs = self._logprobs(i, job, news.tokens)
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
        n = self.request.n or 1  # completions of each prompt
        prompt = sum(len(job.request.prompt) for job in self.jobs[::n])
        completion = sum(len(job.ids) for job in self.jobs)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**self.head, "choices": [], "usage": usage}

    def _chunk(self, i: int, said: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {**self.head, "choices": [self._choice(i, said, logprobs, reason)]}

    def _choice(self, i: int, said: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": i, "finish_reason": reason, "logprobs": logprobs} | said

    def _news(self, i: int, job: Job) -> News:
        """What came since the last call; of a finished answer all that is left. Tokens wait for text that shows
        them."""
        # in this order: `end` is set last
        end = job.end
        ids = list(job.ids)
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

    def _echo(self, i: int, job: Job) -> tuple[str, Json | None]:
        """The prompt of choice i, if it is to come back, and the entries of its tokens."""
        if self.chat or not self.request.echo:
            return "", None
        prompt = self.request.prompts[i // (self.request.n or 1)]
        text = prompt if isinstance(prompt, str) else chat.decode(prompt, self.detokenizer.tokenizer)
        if self.request.logprobs is None or self.request.logprobs is False:
            return text, None
        # nothing stands before the first token, so it has no probability
        logprobs = [None, *job.prompt_logprobs]
        likeliest = [None, *job.prompt_likeliest]
        return text, self._text_entries(i, job.request.prompt, logprobs, likeliest)

    def _logprobs(self, i: int, job: Job, some: slice) -> Json | None:
        """Entries of some of the tokens; entropies in nats. None where none came, or none are requested."""
        if self.request.logprobs is None or self.request.logprobs is False:  # 0 asks for those of the sampled ids
            return None
        if some.start == some.stop and self.request.stream:
            return None
        if not self.chat:
            likeliest = [tokens for _, tokens in job.details[some]]
            return self._text_entries(i, job.ids[some], job.logprobs[some], likeliest)
        entries = [
            self._token(id, lp) | dict(entropy=max(0.0, entropy), top_logprobs=[self._token(*one) for one in likeliest])
            for (entropy, likeliest), id, lp in list(zip(job.details, job.ids, job.logprobs))[some]
        ]
        return {"content": entries, "refusal": None}

    def _text_entries(
        self,
        i: int,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        likeliest: Sequence[Sequence[tuple[int, float]] | None],
    ) -> Json:
        """Log-probabilities in the form of /v1/completions. Of two tokens with the same text the likelier counts."""
        entries: Json = {"tokens": [], "token_logprobs": list(logprobs), "text_offset": [], "top_logprobs": None}
        for token in ids:
            piece = self.detokenizer.piece(token)
            entries["tokens"].append(piece.decode("utf-8", "replace"))
            entries["text_offset"].append(self.offsets[i].of(piece))
        if self.request.logprobs:
            entries["top_logprobs"] = [
                None if top is None or logprob is None else self._by_text([*top, (token, logprob)])
                for token, logprob, top in zip(ids, logprobs, likeliest, strict=True)
            ]
        return entries

    def _by_text(self, tokens: Iterable[tuple[int, float]]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token, logprob in tokens:
            named.setdefault(self.detokenizer.piece(token).decode("utf-8", "replace"), logprob)
        return named

    def _token(self, token: int, logprob: float) -> Json:
        piece = self.detokenizer.piece(token)
        return dict(
            token=piece.decode("utf-8", "replace"),
            token_id=token,
            logprob=logprob,
            bytes=list(piece),
        )
