"""Expert iteration on a task's reward: sample, keep the best completions, fine-tune on them, repeat.

    codechat expert --init-from my-sft --task funcall --data-dir data/nano --run-name my-expert
    torchrun --standalone --nproc-per-node 8 -m codechat.expert_iteration --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-expert

Rejection sampling: what is not kept is never pushed away, so nothing is learned from failures, and there is no ratio, no baseline and no
clipping. --keep correct takes every exactly right completion (STaR, arXiv:2203.14465; needs some from the start), --keep best the best ones of
each group that disagrees (RAFT, arXiv:2304.06767; needs only that rewards differ). Each step samples with the newest policy, as REINFORCE
(reinforce.py) does, and makes inner_epochs x minibatches updates on what it kept.

20 steps in a row in which no group has variance end the run. Left out: a pool of kept completions over steps, restarting each round from the
first weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from codechat import training
from codechat.core.command import train_main
from codechat.core.config import default, opt
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.rl import advantages, engines, losses
from codechat.runs import run as run_module
from codechat.training.presets import TOY_ONE_UPDATE
from codechat.training.settings import MinibatchSettings, RLSettings, run_presets

if TYPE_CHECKING:
    from torch import Tensor

    from codechat.rl.rollout import RolloutBatch
    from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(MinibatchSettings, RLSettings):
    """Settings of one run of expert iteration."""

    run_name: str = default("expert")
    keep: Literal["best", "correct"] = opt(
        "best", "what is trained on: the best of each group that disagrees, or all that are exactly right"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == "best":
            self.needs_groups("--keep best: a group of one never disagrees")
        self.no_importance_weights("expert iteration learns by the likelihood alone, without weights")


# it learns from the best alone, and so more slowly than from all completions; with four problems a step, one seed in eight ends with a class unlearned
RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE | {"max_steps": 260})


def kept_completions(batch: RolloutBatch, keep: str) -> Tensor:
    """(P, G) bool. correct: what is exactly right. best: what has the largest reward of its group, in groups that disagree."""
    if keep == "correct":
        return batch.correct
    best = batch.rewards == batch.rewards.amax(1, keepdim=True)
    return best & ~advantages.zero_variance(batch.rewards)[:, None]


def train(cfg: ExpertConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is written, for bad settings or a DEAD task."""
    with dist.session(cfg) as world, run_module.StopSignal() as interrupt:
        cfg, parent, tok = training.load_parent(cfg)
        task, problems, evaluate = training.load_task(cfg, tok)
        model = training.build_policy(cfg, parent)
        optimizers = training.build_optimizers(cfg, model)
        engine, sample = training.open_rollouts(cfg, model, task, problems, tok, interrupt)
        lineage = training.lineage(cfg, "expert", parent, task=cfg.task, data_dir=cfg.data_dir)
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        run, last = training.open_run("expert", cfg, model, optimizers)
        start, cursor = last.step if last else 0, 0  # cursor: problems that all ranks have drawn
        if last:
            sentinel.load_state(last.extra["sentinel"])
            sample.load_state(last.extra)
            cursor = last.extra["cursor"]

        def save(step: int, wait: bool) -> None:
            extra = dict(sentinel=sentinel.state(), cursor=cursor, **sample.state())
            training.save(run, step, cfg, model, optimizers, tok=tok, lineage=lineage, wait=wait, **extra)

        with training.running(run, start, cfg.max_steps) as bar:
            dead, lost = False, None
            for step in range(start, cfg.max_steps + 1):
                turn = training.turn(cfg, step, start, run, stopping=interrupt.requested or dead)
                if turn.evaluate:
                    run.log_eval(step, evaluate(model))
                if turn.save:
                    save(step, wait=turn.last)
                if turn.last:
                    break
                meter = training.Meter("train_loss")

                # roll out: G completions of this rank's next P problems, drawn by the policy as it is
                first = world.rank * cfg.problems_per_rank
                try:
                    engine.push(model, step)
                    batch = sample(cursor + first, cfg.problems_per_rank, training.step_seed(cfg, step), key=first)
                    sample.ahead(step + 1, cursor + world.size * cfg.problems_per_rank + first, first)
                except engines.EngineLost as error:
                    lost = error
                    if step > start:
                        save(step, wait=True)
                    break
                cursor += world.size * cfg.problems_per_rank
                meter.rolled_out(model)

                # credit: 1 for what is kept, 0 for the rest
                kept = kept_completions(batch, cfg.keep)  # (P, G)

                # learn: each minibatch is one update, its loss divided by the kept tokens of all ranks
                lr = training.set_rate(cfg, optimizers, step)
                grad_norm = 0.0
                parts = training.minibatches(batch, cfg.minibatches)
                counts = training.totals([[int(part.mask()[kept[g].flatten()].sum())] for g, part in parts])
                for update in range(cfg.inner_epochs * cfg.minibatches):
                    (groups, part), (n_tokens,) = parts[update % len(parts)], counts[update % len(parts)]
                    if not n_tokens:
                        continue
                    for packed in training.packs(cfg, model, part, kept[groups].float()):
                        mask = packed.targets >= 0  # (R, T)
                        logprobs, _ = training.token_logprobs(cfg, model, packed)  # (R, T)
                        loss = losses.policy_gradient_loss(logprobs, packed.advantages, mask, n_tokens)
                        loss.backward()
                        meter.loss(loss, packed.n_tokens)
                        meter.add(tokens=mask.sum(), train_loss=-packed.at_targets(logprobs.detach()).sum())
                        if update == 0:
                            meter.gap(logprobs, packed.old_logprobs, mask)
                    grad_norm = training.apply_gradients(cfg, optimizers, model)
                    meter.updates += 1

                # log
                row = meter.row(cfg, batch, task, kept_frac=kept.float().mean(), **engine.metrics(step))
                row |= dict(lr=lr, grad_norm=grad_norm, **meter.rates(sum(n for (n,) in counts)))
                dead = training.log_step(run, bar, cfg, step, row, batch, sentinel)
            training.stop(run, step, interrupted=turn.stopping, dead=sentinel if dead else None, lost=lost)
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat expert`, `python -m codechat.expert_iteration` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("expert_iteration", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
