"""REINFORCE on a task's reward, with the group's mean reward as baseline.

    codechat reinforce --init-from my-sft --task funcall --data-dir data/nano --run-name my-rl
    torchrun --standalone --nproc-per-node 8 -m codechat.reinforce --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-rl

For each step: sample G completions of each problem from the policy, score them with the task (the same score that evaluation uses),
subtract each group's mean reward, and take one policy-gradient step on the sampled ids. No reference model, no ratio, no clipping: the
data are exactly on-policy. Before the first step the task's reference solutions are checked and `diagnose` judges 64 groups; a DEAD task needs
--allow-dead. Twenty DEAD steps in a row end the run. --engine http or vllm samples on a server (rl/engines.py); evaluations stay here.

Same phases as the other loops: evaluate, save, roll out, credit, learn, log. Left out: KL to a reference, several epochs per batch.
Shapes: P problems with G completions each; R packed rows of T tokens.
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
from codechat.training.settings import RLSettings, run_presets

if TYPE_CHECKING:
    from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(RLSettings):
    """Settings of one REINFORCE run."""

    run_name: str = default("reinforce")
    max_steps: int = opt(50, "optimizer steps", least=1)
    top_k: int | None = default(None)
    baseline: Literal["none", "mean", "leave_one_out", "zscore"] = opt("mean", "what is subtracted from a reward")
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline != "none":
            self.needs_groups(f"baseline {self.baseline!r}: the advantage is always 0")


RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE)


def train(cfg: ReinforceConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is written, for bad settings or a DEAD task."""
    with dist.session(cfg) as world, run_module.StopSignal() as interrupt:
        cfg, parent, tok = training.load_parent(cfg)
        task, problems, evaluate = training.load_task(cfg, tok)
        model = training.build_policy(cfg, parent)
        optimizers = training.build_optimizers(cfg, model)
        engine, sample = training.open_rollouts(cfg, model, task, problems, tok, interrupt)
        lineage = training.lineage(cfg, "reinforce", parent, task=cfg.task, data_dir=cfg.data_dir)
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        run, last = training.open_run("reinforce", cfg, model, optimizers)
        start = last.step if last else 0
        if last:
            sentinel.load_state(last.extra["sentinel"])
            sample.load_state(last.extra)

        def save(step: int, wait: bool) -> None:
            extra = dict(sentinel=sentinel.state(), **sample.state())
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
                meter = training.Meter("mismatch_kl", "importance_capped")

                # roll out: G completions of this rank's next P problems, drawn by the policy as it is
                first = world.rank * cfg.problems_per_rank  # of this rank's problems among those of the step
                try:
                    engine.push(model, step)
                    at = step * world.size * cfg.problems_per_rank + first
                    batch = sample(at, cfg.problems_per_rank, training.step_seed(cfg, step), key=first)
                    sample.ahead(step + 1, at + world.size * cfg.problems_per_rank, first)
                except engines.EngineLost as error:
                    lost = error
                    if step > start:
                        save(step, wait=True)
                    break
                meter.rolled_out(model)

                # credit: a completion's reward above its group's baseline
                advantage = advantages.group_advantages(batch.rewards, cfg.baseline)  # (P, G)

                # learn: one step on the ids that were sampled, divided by the tokens of all completions of all ranks
                lr = training.set_rate(cfg, optimizers, step)
                ((n_tokens, n_live),) = training.totals([[batch.n_tokens, int((advantage != 0).sum())]])
                packs = training.packs(cfg, model, batch, advantage, skip_zero=not cfg.entropy_coef) if n_live else ()
                for packed in packs:
                    mask = packed.targets >= 0  # (R, T)
                    logprobs, entropy = training.token_logprobs(cfg, model, packed)  # (R, T) each
                    weight, off_policy = losses.importance_weights(
                        logprobs, packed.old_logprobs, mask, cfg.importance_cap
                    )
                    loss = losses.policy_gradient_loss(logprobs, packed.advantages * weight, mask, n_tokens)
                    if cfg.entropy_coef:
                        loss = loss - cfg.entropy_coef * losses.masked_mean(entropy, mask, n_tokens)
                    loss.backward()
                    meter.loss(loss, packed.n_tokens)
                    meter.add(tokens=mask.sum(), **off_policy)
                    meter.gap(logprobs, packed.old_logprobs, mask)
                # without an advantage neither momentum nor an entropy bonus may move the policy
                grad_norm = training.apply_gradients(cfg, optimizers, model) if n_live else 0.0

                # log
                row = meter.row(cfg, batch, task, adv_abs_mean=advantage.abs().mean(), **engine.metrics(step))
                row |= dict(lr=lr, grad_norm=grad_norm, **meter.rates(n_tokens))
                dead = training.log_step(run, bar, cfg, step, row, batch, sentinel)
            training.stop(run, step, interrupted=turn.stopping, dead=sentinel if dead else None, lost=lost)
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat reinforce`, `python -m codechat.reinforce` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("reinforce", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
