"""An OpenAI-compatible server in place of a checkpoint (`evaluate --endpoint URL`); the task
scores its answers.

Functions that a prompt offers are sent as `tools`; calls come back as `tool_calls`, and what an
answer says behind them as part of the text before them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError
from codechat.core.http_client import UNCUT, Answer, Link
from codechat.models import draws, generate
from codechat.rl import episodes, rollout
from codechat.tasks.base import Problem, Task
from codechat.text import tool_calls

PARALLEL = 8  # concurrent requests
PATIENCE_S = 300.0  # with a server that is busy, or has had too many requests


class Endpoint:
    """A served model. name: empty = the first that the server lists."""

    def __init__(self, url: str, name: str = "", api_key_file: Path | None = None) -> None:
        self.link = Link(url, api_key_file, flag="--endpoint")
        self.name = name or self.link.model()

    def collect(
        self,
        policy: None,
        task: Task,
        problems: Sequence[Problem],
        tokenizer: None,
        tags: None,
        *,
        keys: Sequence[str],
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int,
        sampler: Any = None,  # ignored: the server samples
    ) -> rollout.RolloutBatch:
        """`rollout.collect`, a request for each completion. Of its ids only the number is known."""
        if episodes.has_environment(task):
            raise ConfigError(
                f"task {task.name} has episodes, which a server cannot play; evaluate a --ckpt"
            )

        # a server samples from the distribution that a checkpoint is sampled from, not from a
        # part of it
        uncut = {name: value for name, value in UNCUT.items() if name != "top_k" or top_k is None}

        def ask(job: tuple[tuple[Problem, str], int]) -> Answer:
            (problem, key), sample = job
            messages, tools = tool_calls.as_openai(task.prompt(problem))
            body = dict(
                model=self.name,
                messages=messages,
                tools=tools or None,
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                seed=draws.row_key(seed, key, sample) & (2**31 - 1),
            )
            given = {name: value for name, value in body.items() if value is not None}
            return self.link.answer(given, PATIENCE_S, dispensable=uncut)

        with ThreadPoolExecutor(PARALLEL) as pool:
            answers = list(
                pool.map(ask, product(zip(problems, keys, strict=True), range(group_size)))
            )
        if any(answer.n_tokens is None for answer in answers):
            print(
                f"{self.link.url} answers without usage; such answers count as 0 tokens long",
                file=sys.stderr,
            )
        batch = rollout.RolloutBatch(list(problems), [], [], [], [], group_size)
        for answer in answers:
            size = answer.n_tokens or 0
            stop: generate.StopReason = "length" if answer.cut else "stop"
            batch.completions.append(generate.Completion([0] * size, [0.0] * size, stop))
            batch.texts.append(tool_calls.answer_text(answer.message))
        return rollout.judged(task, batch)
