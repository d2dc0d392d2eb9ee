"""Requests of OpenAI's API, and what the engine samples for them; every error names its field.

An unknown field is rejected: an answer that silently ignored it would be wrong. Roles come from the request's structure
alone, so no text can open a turn. Beyond OpenAI's: `top_k`, and `return_token_ids`, `stop_token_ids`, `ignore_eos` and
`keys` for trainers.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from codechat.core.errors import ConfigError, DataError, UserError
from codechat.inference.detokenizer import Detokenizer, StopStrings
from codechat.inference.engine import Request
from codechat.models.generate import Truncation, row_key
from codechat.models.loading import LoadedModel
from codechat.text import chat
from codechat.text.call_grammar import CallGrammar, call_grammar
from codechat.text.turns import Turn, Unreadable, messages_of_turns

PROTOCOL_ROLES = {"developer": "system", "tool": "function"}
ANY_OBJECT = {"type": "object", "additionalProperties": True}
# pydantic's locations also name members of a union, such as str, Choice or list[Part]
FIELD = re.compile(r"(?!(?:str|int|float|bool|body)$)[a-z_][a-z0-9_]*")


class ApiError(UserError):
    """A rejected request. param: the field at fault, such as messages[2].content."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if param is None or param in message else f"{param}: {message}")
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def validation_error(error: Mapping[str, Any]) -> ApiError:
    """An error of pydantic in OpenAI's form, with the field's name as a client writes it."""
    unknown, loc = error["type"] == "extra_forbidden", () if error["type"] == "json_invalid" else error["loc"]
    last = len(loc) - 1
    path = [p for i, p in enumerate(loc) if isinstance(p, int) or FIELD.fullmatch(p) or (unknown and i == last)]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".") or None
    return ApiError(400, f"{param or 'the body'}: {error['msg']}", param, "unknown_parameter" if unknown else None)


# ---- the fields


def encodable(value: Any) -> Any:
    """Json without halves of characters."""
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError, which pydantic words
    return value


def unsupported(value: Any) -> Any:
    if value:
        raise ValueError("this server does not support it; leave it out")
    return value


Text = Annotated[str, Field(min_length=1), AfterValidator(encodable)]
Ids = Annotated[list[int], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Unsupported = Annotated[Any, AfterValidator(unsupported)]


class Lenient(BaseModel):
    """Parts in which clients may send more fields than we need."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Part(Lenient):
    type: Literal["text"]
    text: str


class Called(Lenient):
    name: str
    arguments: str


class ToolCall(Lenient):
    id: Text
    type: Literal["function"] = "function"
    function: Called


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class Function(Lenient):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(encodable)] | None = None
    strict: bool | None = False

    @property
    def schema_(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description or "", "parameters": self.parameters or {}}


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class Name(Lenient):
    name: str


class Choice(Lenient):
    type: Literal["function"]
    function: Name


class StreamOptions(Lenient):
    include_usage: bool = False


class PlainText(Lenient):
    type: Literal["text"]


class Common(Strict):
    """The fields of both kinds of completion."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = True
    response_format: PlainText | None = None
    metadata: dict[str, str] | None = None
    store: Unsupported = None


class CompletionRequest(Common):
    prompt: Text | Annotated[list[Text], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    keys: list[int | Text] | None = None  # one per prompt: sampling depends on it and on `seed`; none = its index
    stop_token_ids: list[int | Ids] | None = None  # ids, or sequences of ids, that end a completion
    ignore_eos: bool = False
    echo: Unsupported = None


# ---- what is sampled


@dataclass(frozen=True)
class ServedModel:
    """The served model, under a name, and the limits for one request."""

    loaded: LoadedModel
    name: str
    created: int  # seconds since 1970
    timeout_s: float = 120.0
    most_choices: int = 64
    reload_from: Path | None = None  # directory from which weights may be loaded; none = never
    meaning: str = ""  # which of its run's checkpoints it is, in words

    def check_name(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name[:100]!r} is not served here; ask for {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")


@dataclass(frozen=True)
class ParsedRequest:
    """What one HTTP request asks for. requests: prompt-major, n of each prompt; details: log-probabilities too."""

    requests: list[Request]
    detokenizer: Detokenizer
    prompt_tokens: int
    details: bool
    one_call: bool = False


def parse_chat(body: ChatRequest, served: ServedModel) -> ParsedRequest:
    """A chat completion. ApiError names the field."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are one setting; keep one", "max_completion_tokens")
    loaded, tools = served.loaded, offered_tools(body)
    ids = prompt_of(body.messages, [tool.schema_ for tool in tools], loaded)
    detokenizer = Detokenizer(loaded.tokenizer, loaded.tags, body.stops, calls=bool(tools))
    no_calls = body.tool_choice == "none" and loaded.tags == "reserved"
    grammar = grammar_of(body, tools, loaded)
    rows = requests_of(
        body,
        [ids],
        served,
        detokenizer,
        stop=chat.stop_sequences(loaded.tokenizer, loaded.tags),
        banned=tuple(chat.call_beginning(loaded.tokenizer)) if no_calls else (),
        top=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    needed = (grammar and grammar.shortest) or 0
    if rows[0].max_new_tokens < needed:
        message = f"a call may need {needed} tokens, and the answer may have {rows[0].max_new_tokens}; raise the limit"
        raise ApiError(400, f"{message}, or shorten the conversation", limit_of(body)[0])
    return ParsedRequest(rows, detokenizer, len(ids), bool(body.logprobs), body.parallel_tool_calls is False)


def parse_completion(body: CompletionRequest, served: ServedModel) -> ParsedRequest:
    """A plain continuation, of a text or of ids as they are. ApiError names the field."""
    tokenizer, n_ids = served.loaded.tokenizer, served.loaded.model.cfg.n_ids
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    given = [given] if isinstance(given[0], int) else given
    try:
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    except DataError as error:  # a character that the model's alphabet lacks
        raise ApiError(400, str(error), "prompt") from None
    stop = tuple((stop,) if isinstance(stop, int) else tuple(stop) for stop in body.stop_token_ids or ())
    for field, lists in (("prompt", prompts), ("stop_token_ids", stop)):
        if not all(0 <= i < n_ids for ids in lists for i in ids):
            raise ApiError(400, f"{field} holds ids beyond 0..{n_ids - 1}, which this model does not know", field)
    if body.keys is not None and len(body.keys) != len(prompts):
        raise ApiError(400, f"{len(body.keys)} keys for {len(prompts)} prompts; give one per prompt", "keys")
    detokenizer = Detokenizer(tokenizer, None, stops=body.stops)
    stop = stop if body.ignore_eos else ((tokenizer.eot_id,), *stop)
    # logprobs=0 needs no details beside each token
    rows = requests_of(body, prompts, served, detokenizer, body.keys, stop=stop, top=body.logprobs or None)
    return ParsedRequest(rows, detokenizer, sum(map(len, prompts)), body.logprobs is not None)


def requests_of(
    body: Common,
    prompts: Sequence[list[int]],
    served: ServedModel,
    detokenizer: Detokenizer,
    keys: Sequence[int | str] | None = None,
    **common: Any,
) -> list[Request]:
    """n requests per prompt, which sample as `generate.sample` does for this seed and these keys. common: other
    fields."""
    n, seed = body.n or 1, secrets.randbits(62) if body.seed is None else body.seed
    if n * len(prompts) > served.most_choices:
        raise ApiError(400, f"{n * len(prompts)} completions at once; at most {served.most_choices} are possible", "n")
    if body.return_token_ids and body.stream:
        raise ApiError(400, "return_token_ids goes with whole answers; leave out stream", "return_token_ids")
    temperature = 1.0 if body.temperature is None else body.temperature
    common |= dict(how=Truncation(temperature=temperature, top_k=body.top_k, top_p=body.top_p))
    common |= dict(timeout_s=served.timeout_s)
    return [
        Request(
            prompt=ids,
            max_new_tokens=budget(len(ids), body, served),
            draws=row_key(seed, key, s),
            should_stop=StopStrings(detokenizer) if body.stops else None,
            **common,
        )
        for key, ids in zip(range(len(prompts)) if keys is None else keys, prompts)
        for s in range(n)
    ]


def limit_of(body: Common) -> tuple[str, int | None]:
    """The longest completion asked for, and the field that says so."""
    longest = getattr(body, "max_completion_tokens", None)
    return ("max_tokens", body.max_tokens) if longest is None else ("max_completion_tokens", longest)


def budget(prompt: int, body: Common, served: ServedModel) -> int:
    """Tokens that a completion may have after a prompt of so many."""
    (field, requested), block = limit_of(body), served.loaded.model.cfg.block_size
    room = block - prompt
    if room < 1:
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        message = f"the prompt has {prompt} tokens; the model reads at most {block - 1}; shorten it"
        raise ApiError(400, message, field, "context_length_exceeded")
    if (requested or 0) > room:
        message = f"the prompt has {prompt} tokens and {field} is {requested}; both must fit the model's {block}"
        raise ApiError(400, f"{message}; set {room} or less", field, "context_length_exceeded")
    return requested or room


# ---- conversations


def offered_tools(body: ChatRequest) -> list[Function]:
    """The functions that the model may call."""
    tools, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "two functions have the same name; keep one", "tools")
    if choice == "none":
        return []
    if choice not in (None, "auto") and not tools:
        raise ApiError(400, "tool_choice asks for a call, but no tools are offered", "tool_choice")
    if isinstance(choice, Choice) and choice.function.name not in names:
        message = f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools"
        raise ApiError(400, message, "tool_choice")
    return tools


def grammar_of(body: ChatRequest, tools: Sequence[Function], loaded: LoadedModel) -> CallGrammar | None:
    """The grammar of the answer where tool_choice asks for a call or a function is strict; none = free."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, Choice) else None
    required = named is not None or body.tool_choice == "required"
    if not (required or any(tool.strict for tool in tools)):
        return None
    if required and body.stops:
        raise ApiError(400, "stop goes with text; leave it out where tool_choice asks for a call", "stop")
    callable_ = [tool for tool in tools if named in (None, tool.name)]
    # where only some are strict, the others may have any arguments
    schemas = [tool.schema_ | ({} if required or tool.strict else {"parameters": ANY_OBJECT}) for tool in callable_]
    how = dict(required=required, one_call=named is not None or body.parallel_tool_calls is False)
    how |= dict(strict=any(tool.strict for tool in callable_), declines=loaded.declines)
    try:
        return call_grammar(loaded.tokenizer, loaded.tags, schemas, **how)
    except ConfigError as error:
        raise ApiError(400, str(error), "tools") from None


def prompt_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], loaded: LoadedModel) -> list[int]:
    """Ids of the conversation up to where the assistant begins to write, as in training."""
    turns = [to_turn(message, f"messages[{number}]", loaded.tags) for number, message in enumerate(messages)]
    for turn in turns:
        if loaded.declines and turn == Turn("assistant", chat.DECLINED):
            turn.content = chat.DECLINE  # as the model wrote it
    try:
        return chat.prompt(messages_of_turns(turns, tools, loaded.tools_style), loaded.tokenizer, loaded.tags)
    except Unreadable as error:
        if error.turn is None:
            raise ApiError(400, str(error), "tools") from None
        field = f"messages[{next(i for i, turn in enumerate(turns) if turn is error.turn)}]"
        field += ".tool_call_id" if error.turn.role == "function" else ".tool_calls"
        raise ApiError(400, f"{field}: every call needs an id of its own, and one result with that id", field) from None
    except DataError as error:  # where tags are text, also of a tool's description
        raise ApiError(400, str(error), "messages") from None


def to_turn(message: Message, field: str, tags: str) -> Turn:
    """A message whose calls are texts of the project's protocol."""
    role, given = PROTOCOL_ROLES.get(message.role, message.role), message.tool_calls or []
    if message.content is None and not given:
        raise ApiError(400, f"{field}.content is absent; give a text", f"{field}.content")
    if given and role != "assistant":
        raise ApiError(400, f"{field}.tool_calls belongs to the assistant's messages", f"{field}.tool_calls")
    calls = [call_text(call.function, f"{field}.tool_calls[{i}]") for i, call in enumerate(given)]
    forbidden = [tag for tag in chat.TAGS if tag in message.text and not (tag == chat.CALL_TAG and role == "assistant")]
    if tags == "text" and forbidden:
        problem = f"{field}.content holds the tag {forbidden[0]}, which would forge a turn of this model; take it out"
        raise ApiError(400, problem, f"{field}.content")
    result_of = (message.tool_call_id or "") if role == "function" else None  # "" answers a call in text only
    return Turn(role, message.text, calls, [call.id for call in given], result_of)


def call_text(function: Called, field: str) -> str:
    try:
        return chat.format_call(function.name, json.loads(function.arguments or "{}"))
    except (ValueError, RecursionError, DataError):
        message = f"{field}.function must have a name and arguments that are a json object in a string"
        raise ApiError(400, message, f"{field}.function") from None
