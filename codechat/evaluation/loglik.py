"""Multiple choice by log-likelihood (`evaluate --score loglik`): the model reads context and choices as plain text.

It answers with the choice of the largest log-likelihood ("acc"), or the largest per character ("acc_norm"), as in EleutherAI's
lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from codechat.models import generate, gpt, loading
from codechat.rl import rollout
from codechat.tasks.base import Problem
from codechat.text.tokenizer import Tokenizer

WAYS = ("loglik, acc", "loglik, acc_norm")
PACKING: dict[str, Any] = dict(temperature=1.0, row_tokens=512, rows=4)  # a context once, its choices as branches


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of both, cut where the context alone ends; blanks at its end belong to the continuation."""
    begun = [*tokenizer.beginning, *tokenizer.encode(context.rstrip())]
    whole = [*tokenizer.beginning, *tokenizer.encode(context + continuation)]
    return begun or [tokenizer.eot_id], whole[len(begun) :]


def score_choices(
    model: gpt.GPT, tokenizer: Tokenizer, asked: Sequence[tuple[str, Sequence[str]]]
) -> list[list[generate.Completion]]:
    """The continuations of each context with their log-probabilities. A context that fills the block loses its beginning: stop "context"."""
    most, prompts, rows, longest = max(len(some) for _, some in asked), [], [], 0
    for context, continuations in asked:
        pairs = [encode_pair(tokenizer, context, continuation) for continuation in continuations]
        room = model.cfg.block_size + 1 - max(len(ids) for _, ids in pairs)
        stop: Any = "stop" if len(pairs[0][0]) <= room else "context"
        prompts.append(pairs[0][0][-room:])
        rows += [generate.Completion(ids, [], stop) for _, ids in pairs] + [generate.Completion([], [], stop)] * (
            most - len(pairs)
        )
        longest = max(longest, len(prompts[-1]) + sum(len(ids) for _, ids in pairs))
    batch = rollout.RolloutBatch([None] * len(asked), prompts, rows, [], [], most)  # type: ignore[list-item]
    packing = PACKING | dict(row_tokens=max(longest, PACKING["row_tokens"]))
    table = rollout.score_logprobs(model, batch, **packing).tolist()
    scored = [replace(c, logprobs=nats[: len(c.ids)]) for c, nats in zip(rows, table)]
    return [scored[i * most :][: len(continuations)] for i, (_, continuations) in enumerate(asked)]


class Chooser:
    """`rollout.collect` of one checkpoint, where a problem's completion is that of its likeliest choice."""

    def __init__(self, loaded: loading.LoadedModel) -> None:
        self.loaded, self.known = loaded, dict[str, list[generate.Completion]]()  # both ways share what is computed

    def __call__(self, model: Any, task: Any, problems: Sequence[Problem], *_: Any, way: str, **__: Any) -> Any:
        choices = {problem.id: task.choices(problem) for problem in problems}
        if new := [id for id in choices if id not in self.known]:
            asked = [(choices[id][0], list(choices[id][1].values())) for id in new]
            self.known |= zip(new, score_choices(self.loaded.model, self.loaded.tokenizer, asked))
        batch = rollout.RolloutBatch(list(problems), [], [], [], [], 1)
        for problem in problems:
            written, nats = choices[problem.id][1], [sum(c.logprobs) for c in self.known[problem.id]]
            sizes = [max(1, len(text.removeprefix(" "))) if way == WAYS[1] else 1 for text in written.values()]
            best = max(range(len(nats)), key=lambda i: nats[i] / sizes[i])
            score = task.score(problem, text := list(written)[best])
            batch.texts.append(text)
            batch.completions.append(self.known[problem.id][best])
            batch.scores.append(replace(score, parts={**score.parts, "loglikelihoods": nats}))
        return batch
