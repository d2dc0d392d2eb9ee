"""What the engine samples for a request of OpenAI's API, under the limits of the served model."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from codechat.core.errors import ConfigError, DataError
from codechat.models import loading
from codechat.models.draws import Truncation, row_key
from codechat.text import chat, tool_calls, tool_lists
from codechat.text.tool_calls import Turn, Unreadable, messages_of_turns
from codechat_lab.serve.call_grammar import CallGrammar, Rules, call_grammar
from codechat_lab.serve.detokenizer import Detokenizer
from codechat_lab.serve.engine import Request
from codechat_lab.serve.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    Function,
    Json,
    Message,
    Tool,
)
from codechat_lab.serve.request_errors import ApiError

ANY_OBJECT = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class ServedModel:
    """The served model, under a name, and the limits for one request."""

    loaded: loading.LoadedModel
    name: str
    created: int  # seconds since 1970
    max_context: int  # longest prompt with its answer, tokens
    timeout_s: float = 120.0
    reload_from: Path | None = None  # directory from which weights may be loaded; none = never
    meaning: str = ""  # which of its run's checkpoints it is, in words


@dataclass(frozen=True)
class Sampled:
    """The completions of a request, and how their ids become text."""

    requests: list[Request]
    detokenizer: Detokenizer


def parse_chat(body: ChatRequest, served: ServedModel) -> Sampled:
    """A chat completion: n requests. ApiError names the field."""
    loaded = served.loaded
    tools, grammar = tools_of(body, loaded)
    schemas = [tool.schema_ for tool in tools]
    detokenizer = Detokenizer(
        loaded.tokenizer,
        loaded.tags,
        body.stops,
        calls=bool(tools),
        texts=tool_lists.texts_of(schemas),
    )
    request = replace(
        request_of(body, prompt_of(body.messages, schemas, loaded), served, detokenizer),
        stop=chat.stop_sequences(loaded.tokenizer, loaded.tags),
        grammar=grammar,
        top=(body.top_logprobs or 0) if body.logprobs else None,
    )
    needed = grammar.shortest if grammar else None
    if needed is not None and needed > request.max_new_tokens:
        message = (
            f"a call may need {needed} tokens, and the answer may "
            f"have {request.max_new_tokens}; raise max_tokens"
        )
        raise ApiError(400, f"{message}, or shorten the conversation", "max_tokens")
    return Sampled(samples(body, request, key=0), detokenizer)


def parse_completion(body: CompletionRequest, served: ServedModel) -> Sampled:
    """Plain continuations of texts, or of ids as they are: n requests for each prompt. ApiError
    names the field."""
    tokenizer = served.loaded.tokenizer
    prompts = body.prompts
    if body.key is not None and len(prompts) > 1:
        raise ApiError(
            400, f"it goes with one prompt, and here are {len(prompts)}; leave it out", "key"
        )
    stop = [(one,) if isinstance(one, int) else tuple(one) for one in body.stop_token_ids or ()]
    if not body.ignore_eos:
        stop.append((tokenizer.eot_id,))
    detokenizer = Detokenizer(tokenizer, None, body.stops)
    requests = []
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = replace(
            request_of(body, ids, served, detokenizer),
            stop=stop,
            top=body.likeliest
            or None,  # the sampled tokens' own log-probabilities are always there
            prompt_top=body.likeliest if body.echo else None,
        )
        # the key with which `generate.sample` draws for these prompts
        requests += samples(body, request, key=number if body.key is None else body.key)
    return Sampled(requests, detokenizer)


def request_of(
    body: Common, ids: list[int], served: ServedModel, detokenizer: Detokenizer
) -> Request:
    """One completion of a prompt. ApiError where they are too long together."""
    most = served.max_context
    longest = 1 if body.longest is None else body.longest
    if len(ids) + longest > most:
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        message = (
            f"the prompt has {len(ids)} tokens and the answer may "
            f"have {longest}; both must fit into {most}"
        )
        raise ApiError(
            400, message, "max_tokens" if body.longest else field, "context_length_exceeded"
        )
    return Request(
        prompt=ids,
        max_new_tokens=most - len(ids) if body.longest is None else body.longest,
        how=Truncation(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k if (body.top_k or 0) > 0 else None,
            top_p=body.top_p,
        ),
        should_stop=detokenizer.stopped if body.stops else None,
        timeout_s=served.timeout_s,
    )


def samples(body: Common, request: Request, key: int | str) -> list[Request]:
    """n copies of a request, which sample as `generate.sample` does for this prompt, seed and
    key."""
    seed = secrets.randbits(62) if body.seed is None else body.seed
    return [replace(request, draws=row_key(seed, key, sample)) for sample in range(body.n or 1)]


def tools_of(
    body: ChatRequest, loaded: loading.LoadedModel
) -> tuple[list[Function], CallGrammar | None]:
    """The functions that the model may call, and the grammar of the answer where tool_choice
    asks for a call or a function is strict; none = free."""
    tools = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice
    if choice == "none":
        return [], None
    named = choice.function.name if isinstance(choice, Tool) else None
    required = named is not None or choice == "required"
    # what may be called; where only some are strict, the others may have any arguments
    callable_ = [tool for tool in tools if named in (None, tool.name)]
    if required and not callable_:
        needed = (
            f"for {named!r}, which is not among the tools"
            if named
            else "for a call, and no tools are offered"
        )
        raise ApiError(400, f"tool_choice asks {needed}; offer it in tools", "tool_choice")
    if required and body.stops:
        raise ApiError(
            400, "stop goes with text; leave it out where tool_choice asks for a call", "stop"
        )
    strict = any(tool.strict for tool in callable_)
    if not (required or strict):
        return tools, None
    schemas = [
        tool.schema_ | ({} if required or tool.strict else {"parameters": ANY_OBJECT})
        for tool in callable_
    ]
    rules = Rules(
        required=required, one_call=named is not None, declines=loaded.declines, strict=strict
    )
    try:
        return tools, call_grammar(loaded.tokenizer, loaded.tags, schemas, rules)
    except ConfigError as error:
        raise ApiError(400, str(error), "tools") from None


def prompt_of(
    messages: Sequence[Message], tools: Sequence[Json], loaded: loading.LoadedModel
) -> list[int]:
    """Ids of the conversation up to where the assistant begins to write, as in training."""
    turns = [message.turn for message in messages]
    for turn in turns:
        if loaded.declines and turn == Turn("assistant", tool_calls.DECLINED):
            turn.content = tool_calls.DECLINE  # as the model wrote it
    try:
        return chat.prompt(
            messages_of_turns(turns, tools, loaded.tools_style), loaded.tokenizer, loaded.tags
        )
    except Unreadable as error:
        if error.turn is None:
            raise ApiError(400, str(error), "tools") from None
        field = f"messages.{next(i for i, turn in enumerate(turns) if turn is error.turn)}"
        raise ApiError(
            400, f"{field}: every call needs an id of its own, and one result with that id", field
        ) from None
    # where tags are text, a content or a tool's description may forge a turn
    except DataError as error:
        raise ApiError(400, str(error), "messages") from None
