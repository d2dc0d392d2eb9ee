"""The requests of OpenAI's API, field by field, and which of them this server supports.

An unknown or unsupported field is rejected by name: an answer that silently ignored it would be wrong. Fields beyond OpenAI's: `top_k`, and what a
trainer needs to avoid tokenizing again and to repeat a sample: `return_token_ids` (prompt and completion as ids, and the version of the weights),
`stop_token_ids` and `ignore_eos` as in vLLM, `keys` of `generate.sample`.

Left out: images and sound, response_format, penalties, logit_bias, suffix, best_of, stored conversations.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MOST_STOPS = 4
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """Parts in which clients may send more fields than we need."""

    model_config = ConfigDict(extra="ignore", strict=True)


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
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = False


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


class Common(Strict):
    """The fields of both kinds of completion."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    stop: Text | list[Text] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("frequency_penalty", "presence_penalty", "logit_bias")
    @classmethod
    def _not_done(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            raise ValueError("this server does not support it; leave it out")
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MOST_STOPS:
            raise ValueError(f"{len(value)} stop strings; at most {MOST_STOPS} are supported")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> Any:
        if value is not None and value.get("type") != "text":
            raise ValueError('this server writes text; leave it out, or give {"type": "text"}')
        return value

    @field_validator("store")
    @classmethod
    def _nothing_is_stored(cls, value: bool | None) -> Any:
        if value:
            raise ValueError("this server stores nothing; leave it out")
        return value


class WeightsRequest(Strict):
    """Weights to load: a checkpoint, as its path below the directory of --reload-from."""

    path: Text


class CompletionRequest(Common):
    prompt: Text | Annotated[list[Text], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # one per prompt: sampling seeds depend on it and on `seed`; none = the prompt's index
    keys: list[int | str] | None = None
    # ids that end a completion, or (beyond vLLM) sequences of ids; kept in token_ids
    stop_token_ids: list[int | Ids] | None = None
    ignore_eos: bool = False
    echo: bool | None = False

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, value: bool | None) -> Any:
        if value:
            raise ValueError("this server does not repeat the prompt; leave it out")
        return value
