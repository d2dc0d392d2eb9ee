"""The client of a server that speaks OpenAI's API: `codechat serve`, or another.

`RemoteModel` has the methods of `terminal.LocalModel`. Calls travel as `tool_calls` and come back as the text of the
project's protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from codechat.core.errors import RunError
from codechat.core.http_client import Link
from codechat.text import chat


def as_openai(messages: Sequence[chat.Message]) -> list[dict[str, Any]]:
    """The project's messages as OpenAI's: readable calls that have a result each become tool_calls; others stay text."""
    out: list[dict[str, Any]] = []
    ids: list[str] = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "function":
            out.append({"role": "tool", "content": content} | ({"tool_call_id": ids.pop(0)} if ids else {}))
            continue
        out.append({"role": role, "content": content})
        calls = chat.parse_calls(content) if role == "assistant" else []
        results = list(takewhile(lambda m: m["role"] == "function", messages[number + 1 :]))
        readable = all(call.form in chat.READABLE for call in calls)
        ids = [f"call_{number}_{k}" for k in range(len(calls))] if readable and len(calls) == len(results) else []
        if ids:
            functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
            given = [{"id": id_, "type": "function", "function": f} for id_, f in zip(ids, functions)]
            out[-1] |= {"content": content.split(chat.CALL_TAG)[0] or None, "tool_calls": given}
    return out


class RemoteModel:
    """Answers of a server. settings: temperature and the like, sent with every request. The seed grows with each
    answer."""

    def __init__(
        self, url: str, settings: Mapping[str, Any], *, seed: int = 0, api_key_file: Path | None = None
    ) -> None:
        self.link, self.seed = Link(url, api_key_file), seed
        self.settings = {k: v for k, v in settings.items() if v is not None}
        self.tools: list[dict[str, Any]] = []  # schemas of the functions that the model is offered
        self.content = ""  # of the last turn
        self.name = self.link.model()

    def say(self, messages: Sequence[chat.Message], tools: Sequence[Any] = (), raw: bool = False) -> Iterator[str]:
        """Pieces of the assistant's next turn. tools: not empty = calls are held to the schemas of those offered."""
        strict = {"strict": True} if tools else {}
        offered = [{"type": "function", "function": {**schema, **strict}} for schema in self.tools]
        body = {"messages": as_openai(messages)} | ({"tools": offered} if offered else {})
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
            line_end = "\n" if self.content and not self.content.endswith("\n") else ""
            text = line_end + _call_text(call["name"], call["arguments"])
            self.content += text
            yield text

    def complete(self, text: str) -> Iterator[str]:
        """Pieces of the continuation of a plain text."""
        for choice in self._choices("/v1/completions", {"prompt": text}):
            if choice.get("text"):
                yield choice["text"]

    def fit(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The conversation as it is: only the server knows its length for the model."""
        return messages

    def _choices(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer: server-sent events, one JSON object each. RunError where the server gives
        up."""
        seed, self.seed = self.seed, self.seed + 1
        with self.link.open(path, {**self.settings, "model": self.name, "seed": seed, "stream": True, **body}) as lines:
            for line in lines:
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RunError(f"the server at {self.link.url} gave up: {event['error'].get('message')}")
                yield from event.get("choices", ())


def _call_text(name: str, arguments: str) -> str:
    """A call as the assistant would have written it; arguments that are no JSON object stay, and count as
    unreadable."""
    try:
        return chat.format_call(name, json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return f'{chat.CALL_TAG} {{"name": {json.dumps(name)}, "arguments": {arguments}}}'
