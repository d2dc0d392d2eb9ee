"""A run's beginning and end: created or resumed, saved whole, stopped with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from codechat.distributed import dist
from codechat.evaluation.diagnose import REMEDIES, Sentinel
from codechat.models import lora
from codechat.models.gpt import GPT
from codechat.rl.rollout import RolloutBatch
from codechat.runs import checkpoint
from codechat.runs.checkpoint import Checkpoint
from codechat.runs.run import Run
from codechat.text.tokenizer import Tokenizer
from codechat.training.meters import Pace, check_finite
from codechat.training.updates import totals


def open_run(
    kind: str, cfg: Any, model: GPT, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Run, Checkpoint | None]:
    """A new run, or the one that --resume continues: then also its last checkpoint, with weights, adapters, optimizers and random states restored."""
    run = Run.create(cfg.run_name, cfg, kind=kind, parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite)
    if not run.resumed:
        return run, None
    last = checkpoint.load(run.path)
    checkpoint.restore(last, lora.merged(model), optimizers)
    lora.load(model, last.extra.get("lora", {}))
    return run, last


def save(
    run: Run,
    step: int,
    cfg: Any,
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    tok: Tokenizer,
    lineage: list[Any],
    wait: bool,
    tags: str | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint beside training; `wait` for it. extra: what the loop needs to go on from here. tags: none = cfg.tags."""
    checkpoint.save(
        run.path,
        step,
        model=lora.merged(model),
        optimizers=optimizers,
        extra={"lora": lora.adapters(model), **extra},
        meta={"tokenizer": tok.to_dict(), "tags": tags or cfg.tags, "lineage": lineage},
        keep_last=cfg.keep_last,
        keep_every=cfg.keep_every,
        wait=wait,
    )


@contextmanager
def running(run: Run, start: int, max_steps: int) -> Iterator[tqdm]:
    """The run while it trains, with its progress bar; no checkpoint is half written when it ends."""
    with run, checkpoint.settled():
        with tqdm(initial=start, total=max_steps, desc=run.name, unit="step", disable=not dist.is_main()) as bar:
            yield bar


def log_step(
    run: Run, bar: tqdm, cfg: Any, step: int, row: dict[str, float], batch: RolloutBatch, sentinel: Sentinel
) -> bool:
    """Write the metrics of a step of RL, and every --log-rollouts-every steps its best and worst rollouts for people; move the progress bar.

    Returns whether the sentinel ends the run: too many DEAD steps in a row."""
    dead = sentinel.update(1.0 - row["frac_zero_std_groups"])
    run.log(step + 1, {**row, "dead_steps": sentinel.dead_steps})
    if cfg.log_rollouts_every and step % cfg.log_rollouts_every == 0 and dist.is_main():
        run.log_samples(step + 1, batch.best_and_worst(groups=4))
    bar.update(1)
    reward, exact, groups = (row[name] for name in ("reward_mean", "exact_match", "effective_groups"))
    bar.set_postfix(reward=f"{reward:.3f}", exact=f"{exact:.2f}", groups=f"{groups:.0f}")
    return dead


def check_before_save(step: int, nats: Tensor) -> None:
    """RunError where the loss of the step that a checkpoint follows is not finite: most steps are not logged, and the new checkpoint would
    take the place of a good one. nats: as in `log_supervised`. A collective."""
    ((loss,),) = totals([[float(nats)]])
    check_finite(step, loss=loss)


def log_supervised(
    run: Run, bar: tqdm, cfg: Any, step: int, nats: Tensor, pace: Pace, tokens_per_step: int, **row: float
) -> None:
    """Every --log-every steps the row of a step that learned from given tokens; RunError where its loss is not finite.

    nats: this rank's part of the mean loss of the step; `train_loss` is that of all ranks. A collective in the steps that are logged."""
    if (step + 1) % cfg.log_every and step + 1 != cfg.max_steps:
        return
    ((train_loss,),) = totals([[float(nats)]])
    rates = pace.rates(step + 1, tokens_per_step, cfg.model.flops_per_token(cfg.length))
    run.log(step + 1, dict(tokens=(step + 1) * tokens_per_step, train_loss=train_loss, **row, **rates))
    bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{rates['tok_per_s']:,.0f}")
    check_finite(step + 1, loss=train_loss)


def stop(
    run: Run,
    step: int,
    *,
    interrupted: bool,
    dead: Sentinel | None = None,
    lost: Exception | None = None,
    why: str = "",
) -> None:
    """End a run before its last step, with the reason; nothing where there is none. dead: the sentinel that ends it; why: another reason."""
    if why and interrupted:
        run.stop(why)
    elif dead:
        run.stop(
            f"DEAD: {dead.dead_steps} steps in a row in which under 5 % of groups had variance; {REMEDIES['DEAD']}"
        )
    elif interrupted or lost:
        run.stop(f"{lost or 'interrupted'} at step {step}; continue with --resume")
