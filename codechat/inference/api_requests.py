"""A request of the API -> prompts as ids and what the engine samples; every error names its field.

Roles come from the request's structure alone: contents become ordinary text (`chat`), so no text can open a turn. Where the model's tags are plain
text, contents that spell one are rejected.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError
from codechat.inference.api_errors import ApiError
from codechat.inference.api_schema import ChatRequest, Choice, Common, CompletionRequest, Message, Tool
from codechat.inference.batching import Request
from codechat.inference.detokenizer import Detokenizer, StopStrings
from codechat.models.generate import Truncation, row_key
from codechat.models.loading import LoadedModel
from codechat.text import chat
from codechat.text.call_grammar import CallGrammar, call_grammar

PROTOCOL_ROLES = {"developer": "system", "tool": "function"}


@dataclass(frozen=True)
class ServedModel:
    """The served model, under a name, and the limits for one request."""

    loaded: LoadedModel
    name: str
    created: int  # seconds since 1970
    max_new_tokens: int | None = None  # none = what the block leaves
    timeout_s: float = 120.0
    most_choices: int = 64
    reload_from: Path | None = None  # directory from which weights may be loaded; none = never
    meaning: str = ""  # which of its run's checkpoints it is, in words
    constrain: bool = True  # hold calls to their schemas where a request asks for it; else such a request is rejected


@dataclass(frozen=True)
class ParsedRequest:
    """What one HTTP request asks for: `requests` prompt-major, n of each prompt."""

    requests: list[Request]
    reading: Detokenizer
    prompt_tokens: int
    n: int
    details: bool  # log-probabilities are requested
    one_call: bool = False


def parse_chat(body: ChatRequest, served: ServedModel) -> ParsedRequest:
    """A chat completion. ApiError names the field."""
    check_model(body.model, served)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are one setting; keep one", "max_completion_tokens")
    loaded = served.loaded
    tools = offered_tools(body)
    ids = prompt_of(body.messages, tools, loaded)
    reading = Detokenizer(loaded.tokenizer, loaded.tags, body.stops, calls=bool(tools))
    no_calls = body.tool_choice == "none" and loaded.tags == "reserved"
    rows = requests_of(
        body, [ids], served, reading,
        stop=chat.stop_sequences(loaded.tokenizer, loaded.tags),
        banned=(loaded.tokenizer.n_vocab + chat.TAGS.index(chat.CALL_TAG),) if no_calls else (),
        top=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar_of(body, served),
    )  # fmt: skip
    check_room_for_a_call(rows[0], body)
    return ParsedRequest(
        rows, reading, len(ids), body.n or 1, bool(body.logprobs), one_call=body.parallel_tool_calls is False
    )


def parse_completion(body: CompletionRequest, served: ServedModel) -> ParsedRequest:
    """A plain continuation, of a text or of ids as they are. ApiError names the field."""
    check_model(body.model, served)
    tokenizer, n_ids = served.loaded.tokenizer, served.loaded.model.cfg.n_ids
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    given = [given] if isinstance(given[0], int) else given
    try:
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    except DataError as error:  # a character that the model's alphabet lacks
        raise ApiError(400, str(error), "prompt") from None
    stop_ids = tuple((one,) if isinstance(one, int) else tuple(one) for one in body.stop_token_ids or ())
    for field, lists in (("prompt", prompts), ("stop_token_ids", stop_ids)):
        if not all(0 <= i < n_ids for ids in lists for i in ids):
            raise ApiError(400, f"{field} holds ids beyond 0..{n_ids - 1}, which this model does not know", field)
    if body.keys is not None and len(body.keys) != len(prompts):
        raise ApiError(400, f"{len(body.keys)} keys for {len(prompts)} prompts; give one per prompt", "keys")
    reading = Detokenizer(tokenizer, None, stops=body.stops)
    stop = stop_ids if body.ignore_eos else ((tokenizer.eot_id,), *stop_ids)
    # logprobs=0 needs no details beside each token
    rows = requests_of(body, prompts, served, reading, keys=body.keys, stop=stop, top=body.logprobs or None)
    return ParsedRequest(rows, reading, sum(map(len, prompts)), body.n or 1, body.logprobs is not None)


def check_model(name: str, served: ServedModel) -> None:
    if name != served.name:
        message = f"the model {name[:100]!r} is not served here; ask for {served.name!r}"
        raise ApiError(404, message, "model", "model_not_found")


def requests_of(
    body: Common,
    prompts: Sequence[list[int]],
    served: ServedModel,
    reading: Detokenizer,
    keys: Sequence[int | str] | None = None,
    **common: Any,
) -> list[Request]:
    """n requests per prompt; each samples as `generate.sample` does for these prompts, this seed, these keys and samples_per_prompt=n.

    common: fields of every Request."""
    n, seed = body.n or 1, secrets.randbits(62) if body.seed is None else body.seed
    if n * len(prompts) > served.most_choices:
        raise ApiError(400, f"{n * len(prompts)} completions at once; at most {served.most_choices} are possible", "n")
    if body.return_token_ids and body.stream:
        raise ApiError(400, "return_token_ids goes with whole answers; leave out stream", "return_token_ids")
    temperature = 1.0 if body.temperature is None else body.temperature
    how = Truncation(temperature=temperature, top_k=body.top_k, top_p=body.top_p)
    return [
        Request(
            prompt=ids,
            max_new_tokens=budget(len(ids), body, served),
            draws=row_key(seed, key, s),
            how=how,
            should_stop=StopStrings(reading) if reading.stops else None,
            timeout_s=served.timeout_s,
            **common,
        )
        for key, ids in zip(range(len(prompts)) if keys is None else keys, prompts)
        for s in range(n)
    ]


def budget(prompt: int, body: Common, served: ServedModel) -> int:
    """Tokens that a completion may have after a prompt of so many."""
    prompt_field = "messages" if isinstance(body, ChatRequest) else "prompt"
    limits = ("max_completion_tokens", "max_tokens")
    field = next((name for name in limits if getattr(body, name, None) is not None), "max_tokens")
    requested, most, block = getattr(body, field), served.max_new_tokens, served.loaded.model.cfg.block_size
    room = block - prompt
    if room < 1:
        message = f"the prompt has {prompt} tokens; the model reads at most {block - 1}; shorten it"
        raise ApiError(400, message, prompt_field, "context_length_exceeded")
    if requested is None:
        return min(room, most or room)
    if most and requested > most:
        raise ApiError(400, f"{field} {requested}; this server writes at most {most} tokens", field)
    if requested > room:
        message = f"the prompt has {prompt} tokens and {field} is {requested}; both must fit the model's {block}; set {room} or less"
        raise ApiError(400, message, field, "context_length_exceeded")
    return requested


# ---- conversations


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """The schemas of the functions that the model may call."""
    tools, choice = [schema_of(tool) for tool in body.tools or ()], body.tool_choice
    names = [tool["name"] for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ApiError(400, f"the function {min(twice)} is offered twice; keep one", "tools")
    if choice == "none":
        return []
    if choice not in (None, "auto") and not tools:
        raise ApiError(400, "tool_choice asks for a call, but no tools are offered", "tool_choice")
    if isinstance(choice, Choice) and choice.function.name not in names:
        name = choice.function.name[:64]
        raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return tools


def schema_of(tool: Tool) -> dict[str, Any]:
    f = tool.function
    return {"name": f.name, "description": f.description or "", "parameters": f.parameters or {}}


def grammar_of(body: ChatRequest, served: ServedModel) -> CallGrammar | None:
    """The grammar of the answer where tool_choice asks for a call or a function is strict; none = anything may be written."""
    choice, tools = body.tool_choice, body.tools or ()
    required = choice == "required" or isinstance(choice, Choice)
    if choice == "none" or not (required or any(tool.function.strict for tool in tools)):
        return None
    field = "tool_choice" if required else "tools"
    if not served.constrain:
        raise ApiError(400, f"{field} asks for constrained calls; this server was started with --constrain off", field)
    if required and body.stops:
        raise ApiError(400, "stop goes with text; leave it out where tool_choice asks for a call", "stop")
    callable_ = [tool for tool in tools if not isinstance(choice, Choice) or tool.function.name == choice.function.name]
    # where only some are strict, the others may have any arguments
    schemas = [
        schema_of(tool) if required or tool.function.strict else {"name": tool.function.name, "parameters": ANY_OBJECT}
        for tool in callable_
    ]
    strict = any(tool.function.strict for tool in callable_)
    one = isinstance(choice, Choice) or body.parallel_tool_calls is False
    loaded, how = served.loaded, dict(required=required, one_call=one, strict=strict)
    try:
        return call_grammar(loaded.tokenizer, loaded.tags, schemas, declines=loaded.declines, **how)
    except ConfigError as error:
        raise ApiError(400, str(error), "tools") from None


ANY_OBJECT = {"type": "object", "additionalProperties": True}


def check_room_for_a_call(request: Request, body: ChatRequest) -> None:
    """ApiError where a required call cannot be finished in the tokens that are left."""
    needed = request.grammar.shortest if request.grammar else 0
    if request.max_new_tokens < (needed or 0):
        field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        message = (
            f"a call of these functions may need {needed} tokens, and the answer may have {request.max_new_tokens}"
        )
        raise ApiError(400, f"{message}; raise {field}, or shorten the conversation", field)


def prompt_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], loaded: LoadedModel) -> list[int]:
    """Ids of the conversation up to where the assistant begins to write."""
    turns, field = [to_protocol(number, messages, loaded.tags) for number in range(len(messages))], "tools"
    for turn in turns:
        if loaded.declines and turn == {"role": "assistant", "content": chat.DECLINED}:
            turn["content"] = chat.DECLINE  # as the model wrote it
    try:
        offer = chat.tools_prompt(tools, loaded.tools_style) if tools else ""
        if offer and turns[0]["role"] == "system":
            turns[0] = {"role": "system", "content": f"{turns[0]['content']}\n{offer}"}
        elif offer:
            turns.insert(0, {"role": "system", "content": offer})
        field = "messages"
        return chat.prompt(turns, loaded.tokenizer, loaded.tags)
    except DataError as error:
        raise ApiError(400, str(error), field) from None


def to_protocol(number: int, messages: Sequence[Message], tags: str) -> dict[str, str]:
    """Message `number` in the project's protocol: calls are part of the assistant's content."""
    message = messages[number]
    role, field = PROTOCOL_ROLES.get(message.role, message.role), f"messages[{number}]"
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"{field}.content is absent; give a text", f"{field}.content")
    if message.tool_calls and role != "assistant":
        raise ApiError(400, f"{field}.tool_calls belongs to the assistant's messages", f"{field}.tool_calls")
    if role == "function":
        check_tool_result(number, messages)
    calls = [call_text(call.function, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    content = message.text + "".join(calls)
    forbidden = [tag for tag in chat.TAGS if tag in content and not (tag == chat.CALL_TAG and role == "assistant")]
    if tags == "text" and forbidden:
        message = f"{field}.content holds the tag {forbidden[0]}, which would forge a turn of this model; take it out"
        raise ApiError(400, message, f"{field}.content")
    return {"role": role, "content": content}


def call_text(function: Any, field: str) -> str:
    try:
        return chat.format_call(function.name, json.loads(function.arguments or "{}"))
    except (ValueError, RecursionError, DataError):
        message = f"{field}.function must have a name and arguments that are a json object in a string"
        raise ApiError(400, message, f"{field}.function") from None


def check_tool_result(number: int, messages: Sequence[Message]) -> None:
    """ApiError unless message `number` answers a call of the assistant's turn before it."""
    before = next((m for m in reversed(messages[:number]) if m.role != "tool"), None)
    if before is None or before.role != "assistant" or not (before.tool_calls or chat.CALL_TAG in before.text):
        message = f"messages[{number}] is a function's result, but no call stands before it"
        raise ApiError(400, message, f"messages[{number}].role")
    given, field = messages[number].tool_call_id, f"messages[{number}].tool_call_id"
    if before.tool_calls and given not in [call.id for call in before.tool_calls]:
        raise ApiError(400, f"{field} is {given!r}; it must be the id of a call before it", field)
