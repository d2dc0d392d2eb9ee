"""Finished and growing completions as OpenAI's API writes them.

Log-probabilities are of the distribution that was drawn from, as in `generate.sample` (at temperature 0: the model's own), and every
sampled token has its entry, the closing tag's included; beside them stand `entropy` in nats and the token's id, which OpenAI's lack.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from codechat.inference.api_requests import ParsedRequest, ServedModel
from codechat.inference.batching import Job
from codechat.inference.detokenizer import Detokenizer


class ResponseBuilder:
    """The answers to one request; a growing answer remembers what of it was said."""

    def __init__(self, asked: ParsedRequest, jobs: list[Job], served: ServedModel, *, chat: bool) -> None:
        self.asked, self.jobs, self.chat, self.reading = asked, jobs, chat, asked.reading
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "created": int(time.time()), "model": served.name}
        self.shown = [0] * len(jobs)  # characters
        self.noted = [0] * len(jobs)  # tokens whose log-probability was sent
        self.over = [False] * len(jobs)

    def whole(self, ids_too: bool) -> dict[str, Any]:
        """The body of an answer that is finished."""
        choices = [self._choice(i, job, ids_too) for i, job in enumerate(self.jobs)]
        return {
            **self.head,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, int]:
        written = sum(len(job.ids) for job in self.jobs)
        return {
            "prompt_tokens": self.asked.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.asked.prompt_tokens + written,
        }

    def _choice(self, i: int, job: Job, ids_too: bool) -> dict[str, Any]:
        text, calls = self._said(job)
        body: dict[str, Any] = {
            "index": i,
            "finish_reason": finish(job, bool(calls)),
            "logprobs": self._logprobs(job, 0, text),
        }
        if self.chat:
            body["message"] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            if calls:
                body["message"]["tool_calls"] = self._calls(i, calls)
        else:
            body["text"] = text
        return body | (
            {"token_ids": list(job.ids), "prompt_token_ids": list(job.request.prompt), "weights_version": job.version}
            if ids_too
            else {}
        )

    def _said(self, job: Job) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        text, calls = self.reading.split(job.ids)
        return text, calls[:1] if self.asked.one_call else calls

    def _calls(self, i: int, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{self.id[-12:]}_{i}_{k}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for k, (name, arguments) in enumerate(calls)
        ]

    # ---- streaming

    def opening(self) -> Iterator[dict[str, Any]]:
        if self.chat:
            for i in range(len(self.jobs)):
                yield self._chunk(
                    {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                )

    def news(self) -> Iterator[dict[str, Any]]:
        """Chunks of what came since the last call; the last of a choice says why it ended."""
        for i, job in enumerate(self.jobs):
            if self.over[i] or failed(job):
                continue
            end, ids = job.end, list(job.ids)  # in this order: `end` is set last
            text, calls = self._said(job) if end else (self.reading.growing(ids), [])
            piece = text[self.shown[i] :]
            if piece or end:
                self.shown[i] = len(text)
                logprobs = self._logprobs(job, self.noted[i], text, len(ids))
                self.noted[i] = len(ids)
                yield self._chunk(self._delta(i, piece, calls, logprobs))
            if end:
                self.over[i] = True
                last = {"delta": {}} if self.chat else {"text": ""}
                yield self._chunk({"index": i, **last, "logprobs": None, "finish_reason": finish(job, bool(calls))})

    def _delta(self, i: int, piece: str, calls: list[tuple[str, dict[str, Any]]], logprobs: Any) -> dict[str, Any]:
        if not self.chat:
            return {"index": i, "text": piece, "logprobs": logprobs, "finish_reason": None}
        delta: dict[str, Any] = {"content": piece} if piece or not calls else {}
        if calls:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(self._calls(i, calls))]
        return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def closing(self) -> dict[str, Any]:
        """The chunk that holds the usage."""
        return self._chunk() | {"usage": self.usage()}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            **self.head,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "choices": list(choices),
        }

    def _logprobs(self, job: Job, start: int, text: str, stop: int | None = None) -> dict[str, Any] | None:
        """Entries of the tokens from `start` on."""
        if not self.asked.details:
            return None
        places = range(start, len(job.ids) if stop is None else stop)
        if self.chat:
            return {"content": [entry(self.reading, job, t) for t in places], "refusal": None}
        tokens = [shown(self.reading, token) for token in job.ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": [tokens[t] for t in places],
            "token_logprobs": [job.logprobs[t] for t in places],
            "top_logprobs": [{shown(self.reading, token): lp for token, lp in job.details[t].top} for t in places]
            if job.details
            else None,
            "text_offset": [offsets[t] for t in places],
        }


def failed(job: Job) -> bool:
    """The completion ended before its time: what was written of it is no answer."""
    return job.end in ("timeout", "closed", "cancelled")


def finish(job: Job, calls: bool) -> str:
    return "tool_calls" if calls else "stop" if job.end == "stop" else "length"


def shown(reading: Detokenizer, token: int) -> str:
    return reading.piece(token).decode("utf-8", "replace")


def entry(reading: Detokenizer, job: Job, t: int) -> dict[str, Any]:
    """One token's log-probability, its entropy in nats, and the likeliest tokens beside it."""
    detail = job.details[t]
    return {
        **one(reading, job.ids[t], job.logprobs[t]),
        "entropy": max(0.0, detail.entropy),
        "top_logprobs": [one(reading, token, lp) for token, lp in detail.top],
    }


def one(reading: Detokenizer, token: int, logprob: float) -> dict[str, Any]:
    assert math.isfinite(logprob)  # json has no infinity, and what was drawn has a probability
    return {"token": shown(reading, token), "token_id": token, "logprob": logprob, "bytes": list(reading.piece(token))}
