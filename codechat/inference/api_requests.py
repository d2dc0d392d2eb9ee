"""A request of the API -> prompts in ids and what the engine is to draw; all refusals that name a field.

Roles come from the request's structure alone: contents become ordinary text (`chat`), so no text can open a turn. Where the model's
tags are plain text, contents that spell one are refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError
from codechat.inference.api_errors import ApiError
from codechat.inference.api_schema import ChatRequest, Common, CompletionRequest, Message, Tool
from codechat.inference.batching import Request
from codechat.inference.detokenizer import Detokenizer, StopStrings
from codechat.models.generate import Truncation, row_key
from codechat.models.loading import LoadedModel
from codechat.text import chat

PROTOCOL_ROLES = {"developer": "system", "tool": "function"}


@dataclass(frozen=True)
class ServedModel:
    """The model that is served, under a name, and the limits for one request."""

    loaded: LoadedModel
    name: str
    created: int  # seconds since 1970
    max_new_tokens: int | None = None  # none = what the block leaves
    timeout_s: float = 120.0
    most_choices: int = 64
    reload_from: Path | None = None  # directory from which weights may be taken over; none = never


@dataclass(frozen=True)
class ParsedRequest:
    """What one HTTP request asks for: `requests` prompt-major, n of each prompt."""

    requests: list[Request]
    reading: Detokenizer
    prompt_tokens: int
    n: int
    details: bool  # log-probabilities are wanted
    one_call: bool = False


def parse_chat(body: ChatRequest, served: ServedModel) -> ParsedRequest:
    """A chat completion. ApiError names the field."""
    check_model(body.model, served)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are one setting; keep one", "max_completion_tokens")
    tools, prefix = offered_tools(body)
    ids = prompt_of(body.messages, tools, served.loaded) + prefix_ids(prefix, served.loaded)
    loaded = served.loaded
    reading = Detokenizer(loaded.tokenizer, loaded.tags, prefix, body.stops, calls=bool(tools))
    refused = body.tool_choice == "none" and loaded.tags == "reserved"
    banned = (loaded.tokenizer.n_vocab + chat.TAGS.index(chat.CALL_TAG),) if refused else ()
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    rows = requests_of(
        body,
        [ids],
        served,
        reading,
        chat.stop_sequences(loaded.tokenizer, loaded.tags),
        banned,
        (body.top_logprobs or 0) if body.logprobs else None,
        field,
        "messages",
    )
    return ParsedRequest(
        rows, reading, len(ids), body.n or 1, bool(body.logprobs), one_call=body.parallel_tool_calls is False
    )


def parse_completion(body: CompletionRequest, served: ServedModel) -> ParsedRequest:
    """A plain continuation, of a text or of ids as they are. ApiError names the field."""
    check_model(body.model, served)
    tokenizer = served.loaded.tokenizer
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    prompts = (
        [given]
        if isinstance(given[0], int)
        else [tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    )
    owned = served.loaded.model.cfg.owned
    for field, lists in (("prompt", prompts), ("stop_token_ids", stop_ids(body))):
        if not all(0 <= i < owned for ids in lists for i in ids):
            raise ApiError(400, f"{field} holds ids beyond 0..{owned - 1}, which this model does not know", field)
    if body.keys is not None and len(body.keys) != len(prompts):
        raise ApiError(400, f"{len(body.keys)} keys for {len(prompts)} prompts; give one per prompt", "keys")
    reading = Detokenizer(tokenizer, None, stops=body.stops)
    stop = (() if body.ignore_eos else ((tokenizer.eot_id,),)) + stop_ids(body)
    # without likeliest tokens there is nothing to note beside a draw
    rows = requests_of(
        body, prompts, served, reading, stop, (), body.logprobs or None, "max_tokens", "prompt", body.keys
    )
    return ParsedRequest(rows, reading, sum(map(len, prompts)), body.n or 1, body.logprobs is not None)


def stop_ids(body: CompletionRequest) -> tuple[tuple[int, ...], ...]:
    return tuple((one,) if isinstance(one, int) else tuple(one) for one in body.stop_token_ids or ())


def check_model(name: str, served: ServedModel) -> None:
    if name != served.name:
        raise ApiError(
            404, f"the model {name[:100]!r} is not served here; ask for {served.name!r}", "model", "model_not_found"
        )


def requests_of(
    body: Common,
    prompts: Sequence[list[int]],
    served: ServedModel,
    reading: Detokenizer,
    stop: tuple[tuple[int, ...], ...],
    banned: tuple[int, ...],
    top: int | None,
    limit_field: str,
    prompt_field: str,
    keys: Sequence[int | str] | None = None,
) -> list[Request]:
    """n requests per prompt; each draws as `generate.sample` does for these prompts, this seed, these keys and samples_per_prompt=n."""
    n, seed = body.n or 1, secrets.randbits(62) if body.seed is None else body.seed
    if n * len(prompts) > served.most_choices:
        raise ApiError(400, f"{n * len(prompts)} completions at once; at most {served.most_choices} are possible", "n")
    if body.return_token_ids and body.stream:
        raise ApiError(400, "return_token_ids goes with whole answers; leave out stream", "return_token_ids")
    how = Truncation(
        temperature=1.0 if body.temperature is None else body.temperature, top_k=body.top_k, top_p=body.top_p
    )
    asked = getattr(body, limit_field)
    return [
        Request(
            prompt=ids,
            max_new_tokens=budget(len(ids), asked, served, limit_field, prompt_field),
            draws=row_key(seed, key, s),
            how=how,
            stop=stop,
            should_stop=StopStrings(reading) if reading.stops else None,
            banned=banned,
            top=top,
            timeout_s=served.timeout_s,
        )
        for key, ids in zip(range(len(prompts)) if keys is None else keys, prompts)
        for s in range(n)
    ]


def budget(prompt: int, asked: int | None, served: ServedModel, limit_field: str, prompt_field: str) -> int:
    """Tokens that a completion may have."""
    block = served.loaded.model.cfg.block_size
    room = block - prompt
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens; the model reads at most {block - 1}; shorten it",
            prompt_field,
            "context_length_exceeded",
        )
    if asked is None:
        return min(room, served.max_new_tokens or room)
    if served.max_new_tokens and asked > served.max_new_tokens:
        raise ApiError(
            400, f"{limit_field} {asked}; this server writes at most {served.max_new_tokens} tokens", limit_field
        )
    if asked > room:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and {limit_field} is {asked}; both must fit the model's {block}; set {room} or less",
            limit_field,
            "context_length_exceeded",
        )
    return asked


# ---- conversations


def offered_tools(body: ChatRequest) -> tuple[list[dict[str, Any]], str]:
    """The schemas of the functions that the model may call, and the text that its answer must begin with."""
    tools, choice = [schema_of(tool) for tool in body.tools or ()], body.tool_choice
    names = [tool["name"] for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ApiError(400, f"the function {min(twice)} is offered twice; keep one", "tools")
    if choice in (None, "auto"):
        return tools, ""
    if choice == "none":
        return [], ""
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, but no tools are offered", "tool_choice")
    if choice == "required":
        return tools, f'{chat.CALL_TAG} {{"name":'
    if choice.function.name not in names:
        raise ApiError(
            400, f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools", "tool_choice"
        )
    return tools, f'{chat.CALL_TAG} {{"name": {json.dumps(choice.function.name)}, "arguments":'


def schema_of(tool: Tool) -> dict[str, Any]:
    f = tool.function
    return {"name": f.name, "description": f.description or "", "parameters": f.parameters or {}}


def prefix_ids(prefix: str, loaded: LoadedModel) -> list[int]:
    """The ids of a forced beginning, as a completion would hold them. It ends where the tokenizer cuts words anyway."""
    if not prefix:
        return []
    closing = chat.completion_ids("", loaded.tokenizer, loaded.tags)
    return chat.completion_ids(prefix, loaded.tokenizer, loaded.tags)[: -len(closing)]


def prompt_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], loaded: LoadedModel) -> list[int]:
    """Ids of the conversation up to where the assistant begins to write."""
    house = [to_protocol(message, number, messages, loaded.tags) for number, message in enumerate(messages)]
    try:
        offer = chat.tools_prompt(tools, "compact") if tools else ""
    except DataError as error:
        raise ApiError(400, str(error), "tools") from None
    if offer and house[0]["role"] == "system":
        house[0] = {"role": "system", "content": f"{house[0]['content']}\n{offer}"}
    elif offer:
        house.insert(0, {"role": "system", "content": offer})
    try:
        return chat.prompt(house, loaded.tokenizer, loaded.tags)
    except DataError as error:
        raise ApiError(400, str(error), "messages") from None


def to_protocol(message: Message, number: int, messages: Sequence[Message], tags: str) -> dict[str, str]:
    """The message in the project's protocol: calls are written into the assistant's content."""
    role, field = PROTOCOL_ROLES.get(message.role, message.role), f"messages[{number}]"
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"{field}.content is absent; give a text", f"{field}.content")
    if message.tool_calls and role != "assistant":
        raise ApiError(400, f"{field}.tool_calls belongs to the assistant's messages", f"{field}.tool_calls")
    if role == "function":
        check_tool_result(message, number, messages)
    content = message.text + "".join(
        call_text(call.function, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
    )
    if tags == "text":
        allowed = (chat.CALL_TAG,) if role == "assistant" else ()
        if found := next((tag for tag in chat.TAGS if tag in content and tag not in allowed), None):
            raise ApiError(
                400,
                f"{field}.content holds the tag {found}, which would forge a turn of this model; take it out",
                f"{field}.content",
            )
    return {"role": role, "content": content}


def call_text(function: Any, field: str) -> str:
    try:
        arguments = json.loads(function.arguments or "{}")
        return chat.format_call(function.name, arguments)
    except (ValueError, RecursionError, DataError):
        raise ApiError(
            400,
            f"{field}.function must have a name and arguments that are a json object in a string",
            f"{field}.function",
        ) from None


def check_tool_result(message: Message, number: int, messages: Sequence[Message]) -> None:
    """A function's result must belong to a call of the assistant's turn before it."""
    before = number - 1
    while before >= 0 and messages[before].role == "tool":
        before -= 1
    asked = messages[before] if before >= 0 else None
    if asked is None or asked.role != "assistant" or not (asked.tool_calls or chat.CALL_TAG in asked.text):
        raise ApiError(
            400, f"messages[{number}] is a function's result, but no call stands before it", f"messages[{number}].role"
        )
    if asked.tool_calls and message.tool_call_id not in [call.id for call in asked.tool_calls]:
        raise ApiError(
            400,
            f"messages[{number}].tool_call_id is {message.tool_call_id!r}; it must be the id of a call before it",
            f"messages[{number}].tool_call_id",
        )
