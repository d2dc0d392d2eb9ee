"""The anatomy of a reward: the same rollouts under other rewards, another loss mask, another parser and other precision of weights.

A run, so that a report that shows it can be traced. For each checkpoint it samples groups of calls once, then asks, with `what` in each row:

    shape     how many groups have variance, and which rungs are pulled up or down, were the reward binary, fractional, tiered or the staircase
    tier      on which part of the call the gradient of each rung falls: its tag, its name, its arguments
    mask      the share of each part in the gradient, and how far the update turns, under another mask; text tags only: a reserved tag has no pieces
    parser    what another reader of calls makes of the gold answers, of the rollouts, and of a file of conversations
    weights   how many bfloat16 values a few updates change, with float32 masters and without

What the others are is the caller's business: `dissect` takes a context manager for each (`recipe_anatomy` brings those of the original system).

Left out: other tasks than function calls (the parts are a call's), and optimizer moments in bfloat16.

Shapes: P problems, G completions each, N = P x G, C tokens of the longest completion.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codechat import tasks
from codechat.core import config, errors
from codechat.core.atomic_files import read_rows
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.data import glaive
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.models import loading, optim
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.rl import losses, rollout
from codechat.rl.advantages import group_advantages, zero_variance
from codechat.rl.rollout import RolloutBatch
from codechat.runs.run import Run
from codechat.tasks.base import Problem, Score
from codechat.tasks.funcall.staircase import TIERS
from codechat.text import chat

Broken = Mapping[str, Callable[[], AbstractContextManager[Any]]]  # mask, parser, weights: what switches each on

SHAPES = ("binary", "fractional", "tiered", "staircase")
PARTS = ("prose", "tag", "form", "name", "arguments", "end")
ROW_TOKENS, ROWS = 512, 8
_CALL = re.compile(
    r'<functioncall>(?P<call>\s*\{\s*"name"\s*:\s*"(?P<name>[^"]*)"(?:\s*,\s*"arguments"\s*:\s*(?P<arguments>.*?)\}?\s*$)?)?',
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class AnatomyConfig:
    """What to sample, and how much of it to differentiate."""

    run_name: str = opt("anatomy", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    ckpt: tuple[str, ...] = opt(config.REQUIRED, "checkpoints, in the order in which they were trained")
    task: str = opt("funcall", "task of function calls")
    data_dir: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    problems: int = opt(64, "training problems to sample")
    group_size: int = opt(16, "completions per problem")
    temperature: float = opt(1.0, "sampling temperature")
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all")
    max_new_tokens: int = opt(64, "longest completion, tokens")
    updates: int = opt(4, "updates that are compared in both precisions, on the same rollouts")
    learned: int = opt(8, "groups that are differentiated for an update")
    lrs: tuple[float, ...] = opt((3e-4, 5e-7), "learning rates of these updates")
    conversations: str | None = opt(None, "file of rows {system, chat} that both parsers read; none = not counted")
    seed: int = opt(0, "seed of problem order and sampling")

    def __post_init__(self) -> None:
        if not self.ckpt or self.problems < 1 or self.group_size < 2:
            raise ConfigError(
                f"{len(self.ckpt)} checkpoints, {self.problems} problems, groups of {self.group_size}; required at least 1, 1 and 2"
            )
        if self.learned < 1 or self.updates < 1:
            raise ConfigError(f"learned {self.learned}, updates {self.updates}; required at least 1 of each")


# ---------------------------------------------------------------- rewards


def reshaped(score: Score, shape: str) -> float:
    """The reward of a scored call under a shape.

    binary: the exact call or nothing. fractional: the share of the arguments that match, where the name is right. tiered: as for programs, 0.05 for
    a call that cannot be read, 0.15 for one that reads and is wrong, 0.15 + 0.85 f for a share f of its arguments. staircase: as it was scored."""
    if shape == "staircase":
        return score.reward
    f = 1.0 if score.correct else min(0.99, score.parts.get("f", 0.0))
    if shape == "binary":
        return float(score.correct)
    if shape == "fractional":
        return f
    if shape != "tiered":
        raise ConfigError(f"shape {shape!r} is unknown{errors.nearest(shape, SHAPES)}; shapes: {', '.join(SHAPES)}")
    if score.tier == "no_tag" or score.reward == 0:
        return 0.0
    return 0.05 if score.tier in ("bad_json", "no_name") else 0.15 + 0.85 * f


def shape_rows(batch: RolloutBatch) -> Iterator[dict[str, Any]]:
    """What each shape makes of the rollouts. pull/TIER: the rung's summed advantage over the summed size of all, so that pulls up add to 1/2."""
    tiers = [s.tier for s in batch.scores]
    for shape in SHAPES:
        rewards = torch.tensor([reshaped(s, shape) for s in batch.scores], dtype=torch.float64).view_as(batch.rewards)
        advantages = group_advantages(rewards).flatten()
        size, live = float(advantages.abs().sum()), int((~zero_variance(rewards)).sum())
        pulls = Counter[str]()
        for tier, advantage in zip(tiers, advantages.tolist(), strict=True):
            pulls[tier] += advantage / size if size else 0.0
        yield dict(
            what="shape",
            shape=shape,
            reward_mean=float(rewards.mean()),
            effective_groups=live,
            n_problems=len(rewards),
            group_variance=float(rewards.var(dim=1, correction=0).mean()),
            adv_abs_mean=size / len(tiers),
            n_samples=batch.group_size,
            **{f"pull/{t}": pulls[t] for t in TIERS},
            **{f"tier/{t}": tiers.count(t) / len(tiers) for t in TIERS},
        )


# ---------------------------------------------------------------- gradients


def parts_of(ids: Sequence[int], loaded: LoadedModel) -> list[str]:
    """Which of PARTS each token of a completion belongs to, by its first visible character. form: braces, quotes and keys of the call."""
    pieces = [chat.decode([i], loaded.tokenizer) for i in ids]
    text, n_end = "".join(pieces), len(chat.stop_sequences(loaded.tokenizer, loaded.tags)[0])
    closed = list(ids[-n_end:]) == list(chat.stop_sequences(loaded.tokenizer, loaded.tags)[0])
    body = len("".join(pieces[: len(pieces) - n_end])) if closed else len(text)
    kinds = ["prose"] * body + ["end"] * (len(text) - body)
    if found := _CALL.search(text[:body]):
        kinds[found.start() : body] = ["form"] * (body - found.start())
        kinds[found.start() : found.start() + len(chat.CALL_TAG)] = ["tag"] * len(chat.CALL_TAG)
        for group in ("name", "arguments"):
            start, end = found.span(group)
            kinds[start:end] = [group] * (end - start) if start >= 0 else []
    at, parts = 0, []
    for piece in pieces:
        skipped = len(piece) - len(piece.lstrip())
        parts.append(kinds[min(at + (skipped if skipped < len(piece) else 0), len(kinds) - 1)])
        at += len(piece)
    return parts


def token_gradients(model: GPT, batch: RolloutBatch, advantages: Tensor) -> Tensor:
    """(N, C) norm of the policy gradient at the output of the last norm, credited to the token that is predicted there; 0 where none is trained."""
    device = model.wte.weight.device
    norms = torch.zeros(batch.mask().shape)
    for packed in rollout.pack(batch, advantages, row_tokens=ROW_TOKENS, rows=ROWS):
        packed = packed.to(device)
        with torch.no_grad():
            hidden = model.hidden(packed.ids, positions=packed.positions, mask=packed.mask())
        hidden = hidden.detach().requires_grad_()
        logprobs, _ = model.token_logprobs(packed.ids, packed.targets, hidden=hidden)
        (slope,) = torch.autograd.grad((logprobs * packed.advantages).sum(), hidden)
        at = packed.completion >= 0
        norms[packed.completion[at].cpu(), packed.offset[at].cpu()] = slope.norm(dim=-1)[at].cpu()
    return norms


def gradient(model: GPT, batch: RolloutBatch, advantages: Tensor) -> Tensor:
    """(D,) the policy gradient of the batch over all weights, in float32, as a step would take it; the weights' own gradients are cleared."""
    model.zero_grad(set_to_none=True)
    backward(model, batch, advantages)
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return found


def backward(model: GPT, batch: RolloutBatch, advantages: Tensor) -> None:
    """Add the gradient of REINFORCE's loss on the batch."""
    device = model.wte.weight.device
    for packed in rollout.pack(batch, advantages, row_tokens=ROW_TOKENS, rows=ROWS):
        packed = packed.to(device)
        logprobs, _ = model.token_logprobs(packed.ids, packed.targets, positions=packed.positions, mask=packed.mask())
        losses.policy_gradient_loss(logprobs, packed.advantages, packed.targets >= 0, count=batch.n_tokens).backward()


def tier_rows(batch: RolloutBatch, norms: Tensor, parts: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """For each rung that was met: its share of the gradient, and the shares of the parts within it."""
    total = float(norms.sum())
    for tier in TIERS:
        rows = [i for i, s in enumerate(batch.scores) if s.tier == tier]
        by_part = _by_part(norms, parts, rows)
        if mine := sum(by_part.values()):
            yield dict(
                what="tier",
                tier=tier,
                completions=len(rows),
                share=mine / total,
                **{f"part/{p}": by_part[p] / mine for p in PARTS},
            )


def _by_part(norms: Tensor, parts: Sequence[Sequence[str]], rows: Sequence[int]) -> Counter[str]:
    found = Counter[str]()
    for i in rows:
        for norm, part in zip(norms[i].tolist(), parts[i]):
            found[part] += norm
    return found


def mask_rows(
    loaded: LoadedModel,
    batch: RolloutBatch,
    parts: Sequence[Sequence[str]],
    broken: Callable[[], AbstractContextManager[Any]],
    learned: int,
) -> Iterator[dict[str, Any]]:
    """The gradient of the same rollouts under the right mask and under another."""
    advantages = group_advantages(batch.rewards)
    few = batch.take(range(min(learned, len(batch.problems))))
    right = gradient(loaded.model, few, group_advantages(few.rewards))
    for name, arm in (("right", nullcontext), ("broken", broken)):
        with arm():
            chat.stop_sequences(loaded.tokenizer, loaded.tags)  # what another mask goes by
            norms = token_gradients(loaded.model, batch, advantages)
            found = gradient(loaded.model, few, group_advantages(few.rewards))
        trained = (norms > 0).sum().item() / max(1, int((batch.mask() & (advantages.flatten()[:, None] != 0)).sum()))
        by_part, total = _by_part(norms, parts, range(len(parts))), max(float(norms.sum()), 1e-30)
        cosine = float(
            right.double() @ found.double() / (right.double().norm() * found.double().norm()).clamp(min=1e-30)
        )
        yield dict(
            what="mask",
            mask=name,
            tags=loaded.tags,
            trained_share=trained,
            cosine=cosine,
            size=float(found.norm() / right.norm().clamp(min=1e-30)),
            n_groups=len(few.problems),
            **{f"part/{p}": by_part[p] / total for p in PARTS},
        )


# ---------------------------------------------------------------- parsers and precision


def quoted(gold: Mapping[str, Any]) -> str:
    """A gold call as glaive's rows have it: the arguments as JSON in single quotes."""
    whole = chat.format_call(gold["name"], gold["arguments"])
    head, _, arguments = whole.partition('"arguments": ')
    return f"{head}\"arguments\": '{arguments.removesuffix('}')}'}}"


def parser_rows(
    task: tasks.Task,
    problems: Sequence[Problem],
    batch: RolloutBatch,
    path: str | None,
    broken: Callable[[], AbstractContextManager[Any]],
) -> Iterator[dict[str, Any]]:
    """The mean reward of gold answers in single quotes and of the rollouts, and how many conversations of a file that hold a call can be used."""
    wanted = [p for p in problems if p.gold is not None]
    rows = [r for r in read_rows(Path(path)) if chat.CALL_TAG in str(r.get("chat"))] if path else []
    for name, arm in (("ours", nullcontext), ("broken", broken)):
        with arm():
            golds = [task.score(p, quoted(p.gold)) for p in wanted]
            again = [task.score(batch.problems[i // batch.group_size], text) for i, text in enumerate(batch.texts)]
            kept = sum(not isinstance(glaive.conversation(dict(row)), str) for row in rows)
        tiers = Counter(s.tier for s in golds)
        yield dict(
            what="parser",
            parser=name,
            gold_reward=sum(s.reward for s in golds) / len(golds),
            gold_bad_json=tiers["bad_json"] / len(golds),
            n_gold=len(golds),
            reward_mean=sum(s.reward for s in again) / len(again),
            rows_with_calls=len(rows),
            rows_kept=kept,
            lost=sum(a.reward < s.reward for a, s in zip(again, batch.scores)),
        )


def weight_rows(
    loaded: LoadedModel, batch: RolloutBatch, broken: Callable[[], AbstractContextManager[Any]], cfg: AnatomyConfig
) -> Iterator[dict[str, Any]]:
    """Share of bfloat16 values that differ after cfg.updates AdamW steps on the same rollouts, and the length of the way in weight space."""
    few = batch.take(range(min(cfg.learned, len(batch.problems))))
    advantages, start = (
        group_advantages(few.rewards),
        torch.cat([p.detach().flatten() for p in loaded.model.parameters()]),
    )
    for lr in cfg.lrs:
        for name, arm in (("float32 masters", nullcontext), ("bfloat16 only", broken)):
            model = copy.deepcopy(loaded.model).train()
            before = diagnose.bf16_snapshot(model)
            with arm():
                optimizers = optim.build(model, lr=lr, optimizer="adamw", weight_decay=0.0)
            for _ in range(cfg.updates):
                backward(model, few, advantages)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            moved = torch.cat([p.detach().flatten() for p in model.parameters()])
            moved = moved - (start if name == "float32 masters" else start.to(torch.bfloat16).float())
            yield dict(
                what="weights",
                weights=name,
                lr=lr,
                updates=cfg.updates,
                changed=diagnose.weights_changed_bf16(before, model),
                way=float(moved.norm()),
            )


# ---------------------------------------------------------------- the run


def dissect(cfg: AnatomyConfig, broken: Broken | None = None) -> Run:
    """Sample each checkpoint's rollouts and log the rows of every question; mask, parser and weights only where `broken` has them, and the last
    two at the first checkpoint. Raises UserError before anything is written for missing checkpoints or failing gold answers."""
    if cfg.conversations and not Path(cfg.conversations).is_file():
        raise MissingFile(
            f"{cfg.conversations} does not exist; give a jsonl file of rows {{system, chat}}, or leave --conversations out"
        )
    task = tasks.load(cfg.task, **({"source": cfg.data_dir} if cfg.data_dir else {}))
    problems = task.problems("train", limit=max(cfg.problems, 64), seed=cfg.seed)
    tasks.gold_gate(task, problems).require()
    models = [loading.load_model(ref, device=dist.device()) for ref in cfg.ckpt]
    run = Run.create(cfg.run_name, cfg, kind="anatomy", parent=cfg.ckpt[0], overwrite=cfg.overwrite)
    with run:
        for number, (ref, loaded) in enumerate(zip(cfg.ckpt, models, strict=True)):
            with torch.no_grad():
                batch = rollout.collect(
                    loaded.model,
                    task,
                    problems[: cfg.problems],
                    loaded.tokenizer,
                    loaded.tags,
                    group_size=cfg.group_size,
                    max_new_tokens=cfg.max_new_tokens,
                    temperature=cfg.temperature,
                    top_k=cfg.top_k,
                    seed=cfg.seed,
                )
            for row in _rows(cfg, loaded, task, problems, batch, broken or {}, first=number == 0):
                run.log_eval(int(loaded.meta["step"]), dict(row, checkpoint=ref))
                print(ref, {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items() if v})
            run.log_samples(int(loaded.meta["step"]), batch.best_and_worst(groups=8))
    return run


def _rows(
    cfg: AnatomyConfig,
    loaded: LoadedModel,
    task: tasks.Task,
    problems: Sequence[Problem],
    batch: RolloutBatch,
    broken: Broken,
    first: bool,
) -> Iterator[dict[str, Any]]:
    parts = [parts_of(c.ids, loaded) for c in batch.completions]
    yield from shape_rows(batch)
    yield from tier_rows(batch, token_gradients(loaded.model, batch, group_advantages(batch.rewards)), parts)
    if "mask" in broken:
        yield from mask_rows(loaded, batch, parts, broken["mask"], cfg.learned)
    if "parser" in broken and first:
        yield from parser_rows(task, problems, batch, cfg.conversations, broken["parser"])
    if "weights" in broken and first:
        yield from weight_rows(loaded, batch, broken["weights"], cfg)
