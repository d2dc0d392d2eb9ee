"""Fields that the server does not support, with their values that change nothing
(`neutral_fields.json`: a list of values, or a JSON schema).

Clients send such defaults: OpenAI's own client, and those written for vLLM, llama.cpp and
SGLang. An unknown field, or another value of one of these, is rejected by name, since an answer
that silently ignored it would be wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.text import json_schemas

Neutral = Mapping[str, Any]  # by field
SECTIONS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
IN_CHATS = SECTIONS["both"] | SECTIONS["chats"]
IN_COMPLETIONS = SECTIONS["both"] | SECTIONS["completions"]
IN_MESSAGES = SECTIONS["messages"]
IN_STREAM_OPTIONS = SECTIONS["stream_options"]
INSTEAD = {"functions": "tools", "function_call": "tool_choice, or tool_calls in a message"}


class Unsupported(ValueError):
    """A value of an unsupported field that changes the answer."""

    def __init__(self, field: str, value: Any, neutral: Any) -> None:
        values = [json.dumps(one) for one in neutral] if isinstance(neutral, list) else []
        instead = INSTEAD.get(field) or " or ".join(values)
        hint = f", or send {instead}" if instead else ""
        super().__init__(
            f"got {json.dumps(value)[:60]}, which is not supported; leave it out{hint}"
        )
        self.field = field


def without_neutral(body: Mapping[str, Any], neutral: Neutral) -> dict[str, Any]:
    """A part of a request without the fields of `neutral`. Unsupported where one has another
    value; null is neutral."""
    for name, value in body.items():
        if name in neutral and value is not None and not _is_neutral(value, neutral[name]):
            raise Unsupported(name, value, neutral[name])
    return {name: value for name, value in body.items() if name not in neutral}


def _is_neutral(value: Any, neutral: Any) -> bool:
    # unlike Python's ==, a schema tells 0 from false
    schema = {"enum": neutral} if isinstance(neutral, list) else neutral
    return json_schemas.fits(value, schema)
