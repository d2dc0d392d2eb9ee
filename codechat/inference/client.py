"""Talking to a server that speaks OpenAI's API: ours (`codechat serve`), or another.

`RemoteModel` says what `talk.LocalModel` says, from a URL instead of a checkpoint: function calls go over the wire as `tool_calls` and come back
as the text that the project's protocol has for them.

Left out: what only a model at hand can give (the prompt as text, the length of a prompt); a server refuses what is too long.
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
            out.append(
                {"role": "tool", "tool_call_id": open_calls.pop(0) if open_calls else "unread", "content": content}
            )
            continue
        calls = chat.parse_calls(content) if role == "assistant" else []
        out.append({"role": role, "content": content})
        open_calls = []
        if calls and all(call.form in chat.READABLE for call in calls):
            open_calls = [f"call_{number}_{k}" for k in range(len(calls))]
            out[-1] = {
                "role": role,
                "content": content.split(chat.CALL_TAG)[0] or None,
                "tool_calls": [
                    {
                        "id": id_,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                    }
                    for id_, call in zip(open_calls, calls)
                ],
            }
    return out


class RemoteModel:
    """Answers of a server. settings: temperature, max_tokens and the like, sent with every request; seed grows by one with each answer, so
    that asking twice may differ."""

    def __init__(
        self, url: str, settings: Mapping[str, Any], *, seed: int = 0, api_key_file: Path | None = None
    ) -> None:
        self.link, self.settings, self.seed = (
            Link(url, api_key_file),
            {k: v for k, v in settings.items() if v is not None},
            seed,
        )
        self.tools: list[dict[str, Any]] = []  # schemas that the model is offered
        self.answers, self.said = 0, ""
        self.model = self.link.model()

    def say(self, messages: Sequence[chat.Message], raw: bool = False) -> Iterator[str]:
        """Pieces of the assistant's next turn, calls as the protocol writes them. raw is ignored: tags stay with the server."""
        body = {"messages": as_openai(messages)} | (
            {"tools": [{"type": "function", "function": s} for s in self.tools]} if self.tools else {}
        )
        self.said, calls = "", {}
        for choice in self._choices("/v1/chat/completions", body):
            for call in choice["delta"].get("tool_calls") or ():
                _grow(calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""}), call.get("function") or {})
            if piece := choice["delta"].get("content"):
                self.said += piece
                yield piece
        for call in calls.values():
            text = _call_text(call)
            self.said += text
            yield text

    def last_content(self) -> str:
        """The content of the turn that was said last."""
        return self.said

    def complete(self, text: str) -> Iterator[str]:
        """Pieces of the continuation of a plain text."""
        for choice in self._choices("/v1/completions", {"prompt": text}):
            if choice.get("text"):
                yield choice["text"]

    def fit(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The conversation as it is: only the server knows how long it is for the model."""
        return messages

    def _choices(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        seed, self.answers = self.seed + self.answers, self.answers + 1
        with self.link.open(
            path, {**self.settings, "model": self.model, "seed": seed, "stream": True, **body}
        ) as answer:
            for line in answer:
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RunError(f"the server at {self.link.url} gave up: {event['error'].get('message')}")
                yield from event.get("choices", ())


def _grow(call: dict[str, str], piece: Mapping[str, Any]) -> None:
    for key in call:
        call[key] += piece.get(key) or ""


def _call_text(call: Mapping[str, str]) -> str:
    """A call as the assistant would have written it; arguments that are no json object stay as they came, to be called unreadable."""
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError:
        arguments = None
    if call["name"].strip() and isinstance(arguments, dict):
        return chat.format_call(call["name"], arguments)
    return f'{chat.CALL_TAG} {{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}'
