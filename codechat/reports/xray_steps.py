"""Rollouts over the steps of RL, token by token: loss mask, advantage, share of the gradient and probability.

The rows behind the page `pages xray`. At each step the policy samples one group of answers to each of the same requests; the gradient is that of
REINFORCE with the group's mean as baseline. `freeze` writes rows below reports/frozen/xray, `of_run` samples them from the checkpoints of a run.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codechat import tasks
from codechat.core.atomic_files import json_lines, read_rows, write_atomic
from codechat.core.errors import DataError, MissingFile
from codechat.models import loading
from codechat.models.gpt import GPT
from codechat.reports import frozen_rows
from codechat.rl import rollout
from codechat.rl.advantages import group_advantages
from codechat.runs import paths
from codechat.runs.run import Run
from codechat.tasks.base import Problem, Task
from codechat.text.token_view import token_texts, visible
from codechat.text.tokenizer import Tokenizer

REQUESTS, GROUP = 4, 6


def rows_at(
    step: int,
    model: GPT,
    tokenizer: Tokenizer,
    task: Task,
    problems: Sequence[Problem],
    *,
    tags: str = "reserved",
    group_size: int = GROUP,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row per problem: the group that the policy samples at T = 1, and each token's share of the group's gradient.

    Sampling depends on `seed` only, so rows of two steps differ by the policy alone. The weights keep no gradient."""
    with torch.no_grad():
        batch = rollout.collect(
            model, task, problems, tokenizer, tags, group_size=group_size, max_new_tokens=max_new_tokens, seed=seed
        )
    advantages = group_advantages(batch.rewards)  # (P, G)
    norms = token_gradients(model, batch, advantages).unflatten(0, advantages.shape)  # (P, G, C)
    rows = []
    for p, problem in enumerate(problems):
        shares = norms[p] / (float(norms[p].sum()) or 1.0)
        numbers = range(p * group_size, (p + 1) * group_size)
        given = zip(numbers, advantages[p].tolist(), shares.tolist())
        text = visible("".join(token_texts(batch.prompts[p], tokenizer)))
        about = dict(id=problem.id, request=problem.messages[-1]["content"], gold=task.gold(problem), prompt=text)
        rollouts = [_rollout(batch, i, advantage, share, tokenizer) for i, advantage, share in given]
        rows.append(dict(step=step, **about, tiers=list(task.tiers), rollouts=rollouts))
    return rows


def token_gradients(model: GPT, batch: rollout.RolloutBatch, advantages: Tensor) -> Tensor:
    """(N, C) norm of the policy gradient at the output of the last norm, credited to the token predicted there; 0 for tokens without loss."""
    device = model.wte.weight.device
    norms = torch.zeros(batch.mask().shape)
    for packed in rollout.pack(batch, advantages != 0, row_tokens=512, rows=8):
        packed = packed.to(device)
        where = packed.where()
        with torch.no_grad():
            hidden = model.hidden(packed.ids, positions=where["positions"], mask=where["mask"])
        hidden = hidden.detach().requires_grad_()
        logprobs, _ = model.token_logprobs(packed.ids, packed.targets, hidden=hidden)
        advantage = advantages.view(-1, 1).to(device)[packed.numbers]  # (B, 1)
        (slope,) = torch.autograd.grad((packed.unpack(logprobs) * advantage).sum(), hidden)
        norms[packed.numbers.cpu(), : packed.longest] = packed.unpack(slope.norm(dim=-1)).cpu()
    return norms


def _rollout(batch: Any, i: int, advantage: float, shares: Sequence[float], tokenizer: Tokenizer) -> dict[str, Any]:
    done, score = batch.completions[i], batch.scores[i]
    texts = [visible(text) for text in token_texts(done.ids, tokenizer)]
    return dict(
        tokens=texts,
        p=[_short(math.exp(logprob)) for logprob in done.logprobs],
        share=[_short(share) for share in shares[: len(texts)]],
        reward=_short(score.reward),
        tier=score.tier,
        correct=score.correct,
        advantage=_short(advantage),
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def of_run(ref: str) -> list[dict[str, Any]]:
    """Rows of the run's checkpoints, on problems of its validation split; step 0 is the checkpoint that it began with.

    MissingFile for a run without checkpoints, DataError for one that learned no task with rewards."""
    run = Run.open(ref)
    settings, steps = run.config, run.checkpoints()
    if "task" not in settings:
        raise DataError(f"run {run.name} ({run.status['kind']}) has no task; name an RL run, such as nano/rl")
    if not steps:
        raise MissingFile(f"run {run.name} has no checkpoints; the page samples from them: train with --save-every")
    data = settings.get("data_dir")
    task = tasks.load(settings["task"], source=paths.ROOT / data if data else None)
    problems, most = task.problems("select", REQUESTS, settings.get("seed", 0)), settings.get("max_new_tokens", 64)
    parent = run.env.get("parent") or {}
    refs = {0: parent["ref"]} if parent.get("ref") and paths.exists(parent["run"]) else {}
    rows = []
    for step, place in (refs | {step: f"{ref}@{step}" for step in steps}).items():
        loaded = loading.load_model(place)
        how = dict(tags=loaded.tags, max_new_tokens=most)
        rows += rows_at(step, loaded.model, loaded.tokenizer, task, problems, **how)
    return rows


def as_page(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{steps, problems, tiers}: what the page reads, from one row for each step and request."""
    steps, problems = list(dict.fromkeys(r["step"] for r in rows)), list(dict.fromkeys(r["id"] for r in rows))
    at = {(r["step"], r["id"]): r for r in rows}
    shown = []
    for problem in problems:
        about = {k: at[steps[0], problem][k] for k in ("id", "request", "gold", "prompt")}
        shown.append(about | {"groups": [dict(rollouts=at[step, problem]["rollouts"]) for step in steps]})
    groups = {step: [at[step, problem]["rollouts"] for problem in problems] for step in steps}
    return dict(steps=[_step(step, group) for step, group in groups.items()], problems=shown, tiers=rows[0]["tiers"])


def _step(step: int, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    every = [rollout for group in groups for rollout in group]
    reward, exact = (_short(sum(float(r[name]) for r in every) / len(every)) for name in ("reward", "correct"))
    return dict(
        step=step, reward=reward, exact=exact, live=sum(len({r["reward"] for r in g}) > 1 for g in groups) / len(groups)
    )


# ---------------------------------------------------------------- frozen rows


def frozen_file() -> Path:
    return frozen_rows.frozen_dir() / "xray" / "rollouts.jsonl"


def freeze(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the rows that the committed page shows; returns their file."""
    frozen_file().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(frozen_file(), json_lines(rows))
    return frozen_file()


def frozen() -> list[dict[str, Any]]:
    """The committed rows."""
    return list(read_rows(frozen_file()))
