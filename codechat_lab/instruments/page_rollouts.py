"""Rows of the page reports/pages/xray.html: a policy's answers to a few requests, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from codechat.rl import advantages, rollout
from codechat.tasks.base import Problem, Task
from codechat_lab.instruments.token_attribution import gradient_norms
from codechat_lab.instruments.token_view import token_texts, visible

if TYPE_CHECKING:
    from codechat.models.gpt import GPT
    from codechat.text.tokenizer import Tokenizer


@torch.no_grad()
def page_rows(
    policy: GPT,
    task: Task,
    problems: Sequence[Problem],
    tok: Tokenizer,
    *,
    step: int,
    max_new_tokens: int,
    group_size: int = 6,
) -> list[dict[str, Any]]:
    """A row for each problem: request, answers drawn at temperature 1, and of each token its
    probability and its share of the gradient of the whole group's loss."""
    batch = rollout.collect(
        policy,
        task,
        problems,
        tok,
        "reserved",
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        seed=0,
    )
    advantage = advantages.group_advantages(batch.rewards).flatten().tolist()
    rows = []
    for at, problem in enumerate(problems):
        group = range(group_size * at, group_size * (at + 1))
        answers = [_answer_row(policy, batch, i, advantage[i], tok) for i in group]
        total = sum(sum(answer["share"]) for answer in answers) or 1.0
        for answer in answers:
            answer["share"] = [_short(norm / total) for norm in answer["share"]]
        rows.append(
            {
                "step": step,
                "id": problem.id,
                "request": problem.messages[-1]["content"],
                "gold": task.gold(problem),
                "prompt": visible("".join(token_texts(batch.prompts[at], tok))),
                "tiers": list(task.tiers),
                "rollouts": answers,
            }
        )
    return rows


def _answer_row(
    policy: GPT, batch: rollout.RolloutBatch, i: int, advantage: float, tok: Tokenizer
) -> dict[str, Any]:
    """`share` holds the norms of the gradient at the last hidden state, before they are divided by
    the group's sum."""
    prompt = batch.prompts[i // batch.group_size]
    answer = batch.completions[i]
    score = batch.scores[i]
    weights = [0.0] * len(prompt) + [advantage] * len(answer.ids)
    norms = gradient_norms(policy, prompt + answer.ids, weights, policy=True)
    return {
        "tokens": [visible(text) for text in token_texts(answer.ids, tok)],
        "p": [_short(math.exp(logprob)) for logprob in answer.logprobs],
        "share": norms[len(prompt) :].tolist(),
        "reward": _short(score.reward),
        "tier": score.tier,
        "correct": score.correct,
        "advantage": _short(advantage),
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")
