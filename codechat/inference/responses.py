"""Finished and growing completions as OpenAI's API writes them.

Log-probabilities are of the sampling distribution, the closing tag's included. Beyond OpenAI's fields, an entry has the
token's id and its entropy.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from codechat.inference.detokenizer import Detokenizer
from codechat.inference.engine import Job
from codechat.inference.protocol import ChatRequest, Common
from codechat.text.tool_calls import escape_surrogates

Json = dict[str, Any]


class ResponseBuilder:
    """The answers to one request; it remembers what of a growing answer was sent."""

    def __init__(self, body: Common, jobs: list[Job], detokenizer: Detokenizer) -> None:
        self.request, self.jobs, self.detokenizer = body, jobs, detokenizer
        self.chat = isinstance(body, ChatRequest)
        self.head = {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head |= {"model": body.model, "object": "chat.completion" if self.chat else "text_completion"}
        self.sent = [0] * len(jobs)  # characters
        self.logged = [0] * len(jobs)  # tokens whose log-probability was sent
        self.over = [False] * len(jobs)

    def body(self) -> Json:
        """The body of a finished answer."""
        choices = [self._choice(i, job) for i, job in enumerate(self.jobs)]
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(job.request.prompt) for job in self.jobs[:: self.request.n or 1])
        completion = sum(len(job.ids) for job in self.jobs)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice(self, i: int, job: Job) -> Json:
        text, calls = self._split(i, job)
        logprobs = self._logprobs(job, 0, len(job.ids))
        choice: Json = {"index": i, "finish_reason": finish_reason(job, calls), "logprobs": logprobs}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            choice["message"] |= {"tool_calls": calls} if calls else {}
        else:
            choice["text"] = text
        if self.request.return_token_ids:
            choice |= {"token_ids": job.ids, "prompt_token_ids": job.request.prompt, "weights_version": job.version}
        return choice

    def _split(self, i: int, job: Job) -> tuple[str, list[Json]]:
        """Text and calls of a finished completion."""
        text, calls = self.detokenizer.split(job.ids)
        one_call, written = self.chat and self.request.parallel_tool_calls is False, []
        for k, (name, arguments) in enumerate(calls[:1] if one_call else calls):
            function = {"name": name, "arguments": escape_surrogates(json.dumps(arguments, ensure_ascii=False))}
            written.append({"id": f"call_{self.head['id'][-12:]}_{i}_{k}", "type": "function", "function": function})
        return text, written

    # ---- streaming

    def first_chunks(self) -> Iterator[Json]:
        if self.chat:
            for i in range(len(self.jobs)):
                yield self._chunk(i, {"role": "assistant", "content": ""})

    def new_chunks(self) -> Iterator[Json]:
        """Chunks of what came since the last call; the last one of a choice gives its finish_reason."""
        for i, job in enumerate(self.jobs):
            if self.over[i] or cut_short(job):
                continue
            end, ids = job.end, list(job.ids)  # in this order: `end` is set last
            text, calls = self._split(i, job) if end else (self.detokenizer.growing(ids), [])
            piece = text[self.sent[i] :]
            if piece or end:
                delta: Json = {"content": piece} if piece or not calls else {}
                delta |= {"tool_calls": [{"index": k, **call} for k, call in enumerate(calls)]} if calls else {}
                yield self._chunk(i, delta, self._logprobs(job, self.logged[i], len(ids)))
                self.sent[i], self.logged[i] = len(text), len(ids)
            if end:
                self.over[i] = True
                yield self._chunk(i, {}, None, finish_reason(job, calls))

    def usage_chunk(self) -> Json:
        return {**self.head, "object": self._chunk_kind, "choices": [], "usage": self._usage()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, i: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": i, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head, "object": self._chunk_kind, "choices": [choice]}

    # ---- log-probabilities

    def _logprobs(self, job: Job, start: int, stop: int) -> Json | None:
        """Entries of the tokens from `start` to `stop`."""
        if self.request.logprobs is None or self.request.logprobs is False:  # 0 asks for those of the sampled ids
            return None
        if self.chat:
            return {"content": [self._entry(job, t) for t in range(start, stop)], "refusal": None}
        top: list[dict[str, float]] = []
        for detail in job.details[start:stop]:
            top.append({})
            for token, lp in detail.top:  # of tokens that look alike, as halves of characters do, the likeliest
                top[-1].setdefault(self._shown(token), lp)
        return {
            "tokens": [self._shown(token) for token in job.ids[start:stop]],
            "token_logprobs": job.logprobs[start:stop],
            "top_logprobs": top if job.details else None,
        }

    def _entry(self, job: Job, t: int) -> Json:
        """One token's log-probability, its entropy in nats, and the likeliest tokens beside it."""
        top = [self._token(token, lp) for token, lp in job.details[t].top]
        entropy = max(0.0, job.details[t].entropy)
        return self._token(job.ids[t], job.logprobs[t]) | {"entropy": entropy, "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        piece = self.detokenizer.piece(token)
        return {"token": self._shown(token), "token_id": token, "logprob": logprob, "bytes": list(piece)}

    def _shown(self, token: int) -> str:
        return self.detokenizer.piece(token).decode("utf-8", "replace")


def cut_short(job: Job) -> bool:
    """The text is no answer."""
    return job.end in ("timeout", "closed", "cancelled")


def finish_reason(job: Job, calls: list[Json]) -> str:
    return "tool_calls" if calls else "stop" if job.end == "stop" else "length"
