"""Fields that the server does not support, with their values that change nothing.

Clients send such defaults: OpenAI's own client, and those written for vLLM, llama.cpp and SGLang. An unknown field, or
another value of one of these, is rejected by name, since an answer that silently ignored it would be wrong."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

# Of a field: neutral values, and types all of whose values are neutral. Null is neutral for every field.
Neutral = Mapping[str, tuple[Any, ...]]


def _each(values: tuple[Any, ...], names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), values)


SAMPLING = {
    **_each((0,), "frequency_penalty presence_penalty min_p top_a min_tokens n_keep min_keep"),
    **_each((0,), "mirostat xtc_probability dynatemp_range dry_multiplier"),
    **_each((1,), "repetition_penalty repeat_penalty length_penalty typical_p tfs_z"),
    **_each((-1,), "top_n_sigma n_predict"),  # n_predict: max_tokens says how many
    **_each((False,), "use_beam_search early_stopping"),
    "logit_bias": ({},),  # biases of 0 are as if left out
    "bad_words": ([],),
    # settings of samplers that are off above
    **_each((int, float), "mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent repeat_last_n"),
    **_each((int, float), "dry_base dry_allowed_length dry_penalty_last_n"),
    "penalize_nl": (bool,),
}
OUTPUT = {
    **_each((True,), "skip_special_tokens spaces_between_special_tokens"),
    **_each((False,), "include_stop_str_in_output no_stop_trim return_tokens_as_token_ids"),
    **_each((False,), "timings_per_token return_progress"),
    **_each(({},), "vllm_xargs mm_processor_kwargs"),
    "n_probs": (0,),
    "grammar": ("",),
    "lora": ([],),
}
# Who asks, and hints for caches and queues: no part of the answer.
HINTS = {
    "cache_prompt": (bool,),
    "id_slot": (-1,),
    "priority": (0,),
    **_each((str,), "cache_salt request_id safety_identifier prompt_cache_key prompt_cache_retention"),
    **_each((dict,), "metadata prompt_cache_options"),
}
IN_BOTH = SAMPLING | OUTPUT | HINTS
IN_COMPLETIONS: Neutral = IN_BOTH | {
    "suffix": ("",),
    "add_special_tokens": (bool,),  # a prompt has none to add
}
IN_CHATS: Neutral = IN_BOTH | {
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    **_each((True,), "parallel_tool_calls add_generation_prompt"),
    **_each((False,), "store echo ignore_eos continue_final_message add_special_tokens"),
    **_each(([],), "functions stop_token_ids documents"),
    **_each((), "audio prediction web_search_options moderation chat_template"),
    **_each((bool,), "include_reasoning separate_reasoning"),  # there is none
    "chat_template_kwargs": ({},),
}
IN_MESSAGES: Neutral = {
    "function_call": (),  # OpenAI's of 2023; a call must not be lost
    "audio": (),
}
IN_STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,)}
INSTEAD = {"functions": "tools", "function_call": "tool_choice, or tool_calls in a message"}


def without_neutral(body: Mapping[str, Any], neutral: Neutral) -> dict[str, Any]:
    """A part of a request without the fields of `neutral`. Another value of one is a fault of type "unsupported", whose
    context names the field."""
    for name, value in body.items():
        if name in neutral and not _is_neutral(name, value, neutral[name]):
            words = {"field": name, "got": json.dumps(value)[:60], "instead": _instead(name, neutral[name])}
            raise PydanticCustomError("unsupported", "got {got}, which is not supported; leave it out{instead}", words)
    return {name: value for name, value in body.items() if name not in neutral}


def _is_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> bool:
    if name == "logit_bias" and isinstance(value, dict):
        value = {token: bias for token, bias in value.items() if not _same(bias, 0)}
    return value is None or any(_same(value, one) or type(value) is one for one in neutral)


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON values: 0 and 0.0 are equal, 0 and false are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _instead(name: str, neutral: tuple[Any, ...]) -> str:
    """The end of a message: what to send."""
    values = [json.dumps(one) for one in neutral if not isinstance(one, type)]
    instead = INSTEAD.get(name) or " or ".join(values)
    return f", or send {instead}" if instead else ""
