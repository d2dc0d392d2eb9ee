"""Multiple choice by log-likelihood (`evaluate --score loglik`): the model reads context and
choices as plain text.

It answers with the choice of the largest log-likelihood ("acc"), or the largest per character
("acc_norm"), as in EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from codechat.models import generate, gpt, loading
from codechat.rl import rollout
from codechat.tasks.base import Problem
from codechat.text.tokenizer import Tokenizer

WAYS = ("loglik, acc", "loglik, acc_norm")
# of the packing: a context once, its choices as branches
ROW_TOKENS = 512
ROWS = 4


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Ids of both, cut where the context alone ends; blanks at its end belong to the
    continuation."""
    begun = [*tokenizer.beginning, *tokenizer.encode(context.rstrip())]
    whole = [*tokenizer.beginning, *tokenizer.encode(context + continuation)]
    return begun or [tokenizer.eot_id], whole[len(begun) :]


def score_choices(
    model: gpt.GPT, tokenizer: Tokenizer, asked: Sequence[tuple[str, Sequence[str]]]
) -> list[list[generate.Completion]]:
    """The continuations of each context with their log-probabilities. A context that fills the
    block loses its beginning: stop "context"."""
    most = max(len(continuations) for _, continuations in asked)
    prompts = []
    completions: list[generate.Completion] = []
    longest = 0  # tokens of a context with all its choices
    for context, continuations in asked:
        pairs = [encode_pair(tokenizer, context, continuation) for continuation in continuations]
        begun = pairs[0][0]
        choices = [ids for _, ids in pairs]
        room = model.cfg.block_size + 1 - max(map(len, choices))
        prompt = begun[-room:]
        prompts.append(prompt)
        longest = max(longest, len(prompt) + sum(map(len, choices)))
        stop: generate.StopReason = "stop" if len(begun) <= room else "context"
        choices += [[]] * (most - len(choices))  # a batch has groups of one size
        completions += [generate.Completion(ids, [], stop) for ids in choices]
    batch = rollout.RolloutBatch(
        problems=[None] * len(asked),  # type: ignore[list-item]
        prompts=prompts,
        completions=completions,
        texts=[],
        scores=[],
        group_size=most,
    )
    table = rollout.score_logprobs(
        model,
        batch,
        temperature=1.0,
        row_tokens=max(longest, ROW_TOKENS),
        rows=ROWS,
    )
    scored = [
        replace(c, logprobs=nats[: len(c.ids)]) for c, nats in zip(completions, table.tolist())
    ]
    groups = [scored[at : at + most] for at in range(0, len(scored), most)]
    return [group[: len(choices)] for group, (_, choices) in zip(groups, asked)]


class Chooser:
    """`rollout.collect` of one checkpoint, where a problem's completion is that of its
    likeliest choice."""

    def __init__(self, loaded: loading.LoadedModel) -> None:
        self.loaded = loaded
        self.known: dict[str, list[generate.Completion]] = {}  # both ways share what is computed

    def __call__(
        self, model: Any, task: Any, problems: Sequence[Problem], *_: Any, way: str, **__: Any
    ) -> rollout.RolloutBatch:
        """way: of WAYS. What a sampler would need besides is ignored."""
        # id -> context, {text that `score` reads: continuation}
        choices = {problem.id: task.choices(problem) for problem in problems}
        asked = {
            id: (context, list(written.values()))
            for id, (context, written) in choices.items()
            if id not in self.known
        }
        if asked:
            scored = score_choices(self.loaded.model, self.loaded.tokenizer, list(asked.values()))
            self.known |= zip(asked, scored)
        batch = rollout.RolloutBatch(list(problems), [], [], [], [], 1)
        for problem in problems:
            _, written = choices[problem.id]
            completions = self.known[problem.id]
            nats = [sum(c.logprobs) for c in completions]
            sizes = [1] * len(nats)
            if way == WAYS[1]:
                sizes = [max(1, len(text.removeprefix(" "))) for text in written.values()]
            best = max(range(len(nats)), key=lambda i: nats[i] / sizes[i])
            text = list(written)[best]
            score = task.score(problem, text)
            batch.texts.append(text)
            batch.completions.append(completions[best])
            batch.scores.append(replace(score, parts=dict(score.parts) | {"loglikelihoods": nats}))
        return batch
