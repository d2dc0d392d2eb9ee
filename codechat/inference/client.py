"""The client of a server that speaks OpenAI's API: `codechat serve`, or another.

`RemoteModel` has the methods of `terminal.LocalModel`. Calls travel as `tool_calls` and come back as the text of the project's protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from codechat.core.errors import RunError
from codechat.core.http_client import Link
from codechat.text import chat


def as_openai(messages: Sequence[chat.Message]) -> list[dict[str, Any]]:
    """The project's messages as OpenAI's: readable calls become tool_calls, and function results answer them in order."""
    out: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "function":
            id_ = open_calls.pop(0) if open_calls else "unread"
            out.append({"role": "tool", "tool_call_id": id_, "content": content})
            continue
        calls = chat.parse_calls(content) if role == "assistant" else []
        if any(call.form not in chat.READABLE for call in calls):
            calls = []
        open_calls = [f"call_{number}_{k}" for k in range(len(calls))]
        out.append({"role": role, "content": content})
        if calls:
            out[-1]["content"] = content.split(chat.CALL_TAG)[0] or None
            out[-1]["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for id_, c in zip(open_calls, calls)
            ]
    return out


class RemoteModel:
    """Answers of a server. settings: temperature, max_tokens and the like, sent with every request. The seed grows by one with each answer."""

    def __init__(
        self, url: str, settings: Mapping[str, Any], *, seed: int = 0, api_key_file: Path | None = None
    ) -> None:
        self.link, self.seed = Link(url, api_key_file), seed
        self.settings = {k: v for k, v in settings.items() if v is not None}
        self.tools: list[dict[str, Any]] = []  # schemas of the functions that the model is offered
        self.answers, self.content = 0, ""
        self.name = self.link.model()

    def say(
        self, messages: Sequence[chat.Message], raw: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[str]:
        """Pieces of the assistant's next turn. raw is ignored: tags stay with the server. tools: as in LocalModel."""
        strict = {"strict": True} if tools else {}
        tools = [{"type": "function", "function": {**schema, **strict}} for schema in self.tools]
        body = {"messages": as_openai(messages)} | ({"tools": tools} if tools else {})
        self.content, calls = "", {}
        for choice in self._choices("/v1/chat/completions", body):
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
                for key in call:
                    call[key] += (piece.get("function") or {}).get(key) or ""
            if text := choice["delta"].get("content"):
                self.content += text
                yield text
        for call in calls.values():
            text = _call_text(call["name"], call["arguments"])
            self.content += text
            yield text

    def last_content(self) -> str:
        """The content of the last turn."""
        return self.content

    def complete(self, text: str) -> Iterator[str]:
        """Pieces of the continuation of a plain text."""
        for choice in self._choices("/v1/completions", {"prompt": text}):
            if choice.get("text"):
                yield choice["text"]

    def fit(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The conversation as it is: only the server knows its length for the model."""
        return messages

    def _choices(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer: server-sent events, one JSON object each. RunError where the server gives up."""
        seed, self.answers = self.seed + self.answers, self.answers + 1
        with self.link.open(
            path, {**self.settings, "model": self.name, "seed": seed, "stream": True, **body}
        ) as answer:
            for line in answer:
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RunError(f"the server at {self.link.url} gave up: {event['error'].get('message')}")
                yield from event.get("choices", ())


def _call_text(name: str, arguments: str) -> str:
    """A call as the assistant would have written it; arguments that are no JSON object stay as they are, and count as unreadable."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    if name.strip() and isinstance(parsed, dict):
        return chat.format_call(name, parsed)
    return f'{chat.CALL_TAG} {{"name": {json.dumps(name)}, "arguments": {arguments}}}'
