"""Requests of OpenAI's API: their fields, as pydantic checks them; every error names its field.

An unknown field is rejected, and an unsupported one unless its value changes nothing
(`neutral_fields`). Roles come from the request's structure alone, so no text can open a turn.
Beyond OpenAI's: `top_k`, and `return_token_ids`, `stop_token_ids`, `ignore_eos` and `key` for
trainers."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from codechat.core.errors import DataError
from codechat.text import tool_calls, tool_schemas
from codechat.text.tool_calls import Turn
from codechat_lab.serve import neutral_fields
from codechat_lab.serve.request_errors import ApiError

Json = dict[str, Any]
PROTOCOL_ROLES = {"developer": "system", "tool": "function"}


def encodable(value: Any) -> Any:
    """Json without halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            "it holds half of a character, which UTF-8 cannot encode; send whole characters"
        ) from None
    return value


def parsed(text: Any) -> Any:
    """The JSON that a text spells."""
    try:
        return json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            f"got {json.dumps(text)[:60]}; expected a JSON object, written as a text"
        ) from None


Text = Annotated[str, Field(min_length=1), AfterValidator(encodable)]
Ids = Annotated[list[int], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(gt=0, le=1)]
# how many of a token's likeliest alternatives are returned
Likeliest = Annotated[int, Field(ge=0, le=20)]


class Part(BaseModel, strict=True, allow_inf_nan=False):
    """A part of a request. Fields of `neutral` are dropped, or rejected."""

    neutral: ClassVar[neutral_fields.Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, body: Any) -> Any:
        return neutral_fields.without_neutral(body, cls.neutral) if isinstance(body, dict) else body


# ---- messages and tools, in which clients may send more fields than we need


class TextPart(Part):
    type: Literal["text"]
    text: str


class CalledFunction(Part):
    name: Text
    arguments: Annotated[Json, BeforeValidator(parsed)]


class ToolCall(Part):
    id: Text
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Part):
    neutral = neutral_fields.IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
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
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or () if part.text)  # as in training

    @property
    def turn(self) -> Turn:
        role = PROTOCOL_ROLES.get(self.role, self.role)
        calls = self.tool_calls or ()
        written = [
            tool_calls.format_call(call.function.name, call.function.arguments) for call in calls
        ]
        result_of = None
        if role == "function":
            # "": of a call that an earlier answer wrote as text
            result_of = self.tool_call_id or ""
        return Turn(role, self.text, written, [call.id for call in calls], result_of)


class Function(Part, extra="allow"):
    """Other fields are kept, since one of them may hold the parameters: MCP's `inputSchema`,
    Anthropic's `input_schema`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[Json, AfterValidator(encodable)] | None = None
    strict: bool | None = False

    @property
    def schema_(self) -> Json:
        """Name, description and parameters in JSON Schema. ApiError where these cannot be read;
        of a strict function also where a type is not known. In others such a type is any, and
        stderr names it."""
        unknown: list[str] = []
        try:
            tool = tool_schemas.tool_schema(
                self.model_dump(exclude={"strict"}), None if self.strict else unknown
            )
        except DataError as error:
            raise ApiError(400, str(error), "tools") from None
        tool_schemas.say_unknown(unknown)
        schema = {key: tool[key] for key in ("name", "description", "parameters")}
        if self.description is None:  # a chat template would list an empty one
            del schema["description"]
        return schema


class Tool(Part):
    type: Literal["function"]
    function: Function


# ---- whole requests


class StreamOptions(Part, extra="forbid"):
    neutral = neutral_fields.IN_STREAM_OPTIONS

    include_usage: bool | None = None


class Common(Part, extra="forbid"):
    """The fields of both kinds of completion."""

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # another name of it
    temperature: Temperature | None = 1.0
    top_p: Share | None = None
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

    @field_validator("return_token_ids")
    @classmethod
    def is_whole(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("stream"):
            raise ValueError("it goes with whole answers; leave out stream")
        return value

    @property
    def longest(self) -> int | None:
        """Tokens that the answer may have; none = what the block has."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    neutral = neutral_fields.IN_CHATS

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = False
    top_logprobs: Likeliest | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None

    @field_validator("top_logprobs")
    @classmethod
    def beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: true")
        return value

    @field_validator("tools")
    @classmethod
    def differ_in_name(cls, value: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in value or ()]
        if len(set(names)) < len(names):
            raise ValueError("two functions have the same name; keep one")
        return value


class CompletionRequest(Common):
    neutral = neutral_fields.IN_COMPLETIONS

    prompt: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0: only the prompt is read
    echo: bool | None = False
    # log-probability of each token, and of so many of the likeliest
    logprobs: Likeliest | Literal[False] | None = None
    # lm-eval sends more than OpenAI's four
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    # sampling depends on it and on `seed`; none = the prompt's number
    key: int | Text | None = None
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
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def likeliest(self) -> int | None:
        """How many alternatives of each token; none = no log-probabilities."""
        return None if self.logprobs is False else self.logprobs
