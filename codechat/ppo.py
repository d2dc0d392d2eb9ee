"""PPO on a task's reward: a value head, generalised advantages, clipped ratios, several passes in minibatches.

    codechat ppo --init-from my-sft --task funcall --data-dir data/nano --run-name my-ppo
    torchrun --standalone --nproc-per-node 8 -m codechat.ppo --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-ppo

As GRPO (grpo.py), but a token's advantage comes from a learned value instead of from the group: a linear head on the policy's own last
states predicts the reward still to come, `advantages.estimate_gae` compares it with what came (arXiv:1506.02438), and both are trained on
each minibatch (arXiv:1707.06347, eq. 9). The reward arrives at the last token; with --kl-coef every token pays for its distance from the
starting policy (arXiv:2203.02155, eq. 2). With --lam 1 and a value of 0 the advantage is the reward itself. --non-stop-penalty takes something from
completions that never stopped, whatever their text earned; what is logged as the reward stays the task's.

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. The head is saved with the checkpoint and starts at 0.
20 steps in a row in which no group has variance end the run, and such a step makes no update: only the value's errors would move the policy.
Left out: a critic with a body of its own, adaptive KL coefficients, truncated sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from codechat import training
from codechat.core.command import train_main
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.rl import advantages, engines, losses, rollout_metrics
from codechat.runs import run as run_module
from codechat.training.presets import LORA_RUN, TOY_RUN
from codechat.training.settings import MinibatchSettings, RLSettings, run_presets

if TYPE_CHECKING:
    from torch import Tensor

    from codechat.rl.rollout import RolloutBatch
    from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class PPOConfig(MinibatchSettings, RLSettings):
    """Settings of one PPO run."""

    run_name: str = default("ppo")
    inner_epochs: int = default(2)
    minibatches: int = default(2)
    clip_eps_low: float = opt(0.2, "a ratio below 1 - this has no gradient where the advantage is negative", least=0)
    clip_eps_high: float = opt(0.2, "a ratio above 1 + this has no gradient where the advantage is positive", least=0)
    lam: float = opt(0.95, "decay of generalised advantages; 1 = the whole return, 0 = one step ahead", least=0, most=1)
    gamma: float = opt(1.0, "discount per token", least=0, most=1)
    whiten: bool = opt(
        False,
        "advantages of a batch to mean 0 and standard deviation 1, over all ranks; where few groups disagree this blows up the value's noise",
    )
    value_coef: float = opt(0.1, "weight of the value loss; its gradient reaches the policy's body too", least=0)
    value_clip_eps: float | None = opt(
        0.2, "a value may move this far from its value at sampling time; none = unclipped", least=0
    )
    value_lr: float = opt(1e-2, "learning rate of the value head", least=0)
    kl_coef: float = opt(
        0.0,
        "weight of the KL divergence from the starting policy, in each token's reward; 0 = no reference model",
        least=0,
    )
    kl_kind: Literal["k1", "k2", "k3"] = opt(
        "k1", "estimator of that divergence; k1 is the one that is right in a reward"
    )
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")
    non_stop_penalty: float = opt(
        0.0, "taken from the reward of a completion that was cut off before its stop sequence", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_eps_low >= 1 or not self.gamma:
            raise ConfigError(
                f"--clip-eps-low {self.clip_eps_low}, --gamma {self.gamma}; required: below 1, above 0 and at most 1"
            )
        self.no_importance_weights("PPO's ratio starts from the sampler already")
        if self.top_k:
            raise ConfigError(
                f"top_k {self.top_k}: PPO's ratio starts from the sampler, whose distribution it cuts; set --top-k none"
            )


# toy: four updates a step at a constant 4e-3 collapse to a deterministic policy before it is right, in some seeds; a constant rate also loses a class
# again late in the run, where nearly all rewards are equal and Adam scales up the noise that is left.
RUN_PRESETS = run_presets(toy=TOY_RUN | {"lr": 2.5e-3, "schedule": "cosine"}, lora=LORA_RUN)


def token_rewards(cfg: PPOConfig, batch: RolloutBatch, paid: Tensor, old: Tensor, ref: Tensor | None) -> Tensor:
    """(N, C) reward of each token: `paid` (P, G) at the last one, less the KL penalty of each (arXiv:2203.02155, eq. 2)."""
    rows = batch.lengths().nonzero()[:, 0]  # a prompt that fills the block leaves an empty completion
    rows, ends, last = (dist.send(x, old.device) for x in (rows, batch.lengths()[rows] - 1, paid.flatten()[rows]))
    rewards = old.new_zeros(old.shape)
    rewards[rows, ends] = last.to(rewards.dtype)
    return rewards if ref is None else rewards - cfg.kl_coef * losses.kl_estimate(old, ref, cfg.kl_kind)


def train(cfg: PPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is written, for bad settings or a DEAD task."""
    with dist.session(cfg) as world, run_module.StopSignal() as interrupt:
        cfg, parent, tok = training.load_parent(cfg)
        task, problems, evaluate = training.load_task(cfg, tok)
        model = training.build_policy(cfg, parent)
        reference = training.build_model(cfg, parent) if cfg.kl_coef else None
        head = training.ValueHead(cfg.model.n_embd).to(world.device)
        optimizers = training.build_optimizers(cfg, model) + head.optimizers(cfg.value_lr)
        engine, sample = training.open_rollouts(cfg, model, task, problems, tok, interrupt)
        lineage = training.lineage(cfg, "ppo", parent, task=cfg.task, data_dir=cfg.data_dir)
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        run, last = training.open_run("ppo", cfg, model, optimizers)
        start, cursor = last.step if last else 0, 0  # cursor: problems that all ranks have drawn
        if last:
            sentinel.load_state(last.extra["sentinel"])
            sample.load_state(last.extra)
            head.load_state_dict(last.extra["value_head"])
            cursor = last.extra["cursor"]

        def save(step: int, wait: bool) -> None:
            extra = dict(sentinel=sentinel.state(), cursor=cursor, **sample.state(), value_head=head.copy_of_state())
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
                meter = training.Meter("value_loss", *(("kl_ref",) if cfg.kl_coef else ()), ratios=True)

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

                # credit: each token's reward, its value before it was written, and from both its advantage and return
                old, mask = (dist.send(x, world.device) for x in (batch.logprobs(), batch.mask()))  # (N, C)
                written = dist.send(batch.mask().flatten().nonzero()[:, 0], world.device)  # of (N C)
                paid = batch.rewards - cfg.non_stop_penalty * batch.cut_off()  # (P, G); what is logged stays the task's
                ref = training.score(cfg, reference, batch) if reference is not None else None  # (N, C)
                rewards = token_rewards(cfg, batch, paid, old, ref)  # (N, C)
                old_values = training.values_of(cfg, model, head, batch)  # (N, C)
                advantage, returns = advantages.estimate_gae(
                    rewards, old_values, mask, gamma=cfg.gamma, lam=cfg.lam
                )  # (N, C) each
                explained = training.explained_variance(returns.flatten()[written], old_values.flatten()[written])
                adv_abs_mean = float(advantage.flatten()[written].abs().mean())
                if cfg.whiten:
                    advantage = training.whiten(advantage, written)
                meter.rolled_out(model)

                # learn: each minibatch is one update, its loss divided by the tokens of all ranks
                lr = training.set_rate(cfg, optimizers, step)
                grad_norm = 0.0
                parts = training.minibatches(batch, cfg.minibatches)
                live = rollout_metrics.live_groups(paid)
                counts = training.totals([[part.n_tokens, live] for _, part in parts])
                for update in range(cfg.inner_epochs * cfg.minibatches):
                    (groups, part), (n_tokens, n_live) = parts[update % len(parts)], counts[update % len(parts)]
                    if not n_live:
                        continue
                    for packed in training.packs(cfg, model, part, part.rewards, skip_zero=False):
                        logprobs, entropy, hidden = training.token_logprobs(cfg, model, packed, states=True)
                        values = packed.unpack(head(hidden))  # (B, C)
                        new, entropy = packed.unpack(logprobs), packed.unpack(entropy)  # (B, C) each
                        rows, C = training.rows_in(batch, groups, packed), new.shape[1]
                        on = mask[rows, :C]
                        policy_loss, clipped = losses.clipped_policy_loss(
                            new,
                            old[rows, :C],
                            advantage[rows, :C],
                            on,
                            clip_eps_low=cfg.clip_eps_low,
                            clip_eps_high=cfg.clip_eps_high,
                        )  # (B, C)
                        value_loss = losses.value_loss(
                            values, old_values[rows, :C], returns[rows, :C], cfg.value_clip_eps
                        )  # (B, C)
                        token_loss = policy_loss + cfg.value_coef * value_loss - cfg.entropy_coef * entropy
                        losses.masked_mean(token_loss, on, n_tokens).backward()
                        meter.loss(losses.masked_mean(policy_loss.detach(), on, n_tokens), packed.n_tokens)
                        meter.add(**clipped)
                        meter.add(value_loss=losses.masked_sum(value_loss.detach(), on))
                        if ref is not None:
                            meter.add(kl_ref=losses.masked_sum(losses.kl_estimate(new.detach(), ref[rows, :C]), on))
                        if update == 0:
                            meter.gap(logprobs, packed.old_logprobs, packed.completion >= 0)
                    grad_norm = training.apply_gradients(cfg, optimizers, model, head)
                    meter.updates += 1

                # log
                of_tokens = dict(adv_abs_mean=(adv_abs_mean * len(written), len(written)))
                row = meter.row(cfg, batch, task, paid, ratios=of_tokens, **engine.metrics(step))
                row |= dict(
                    lr=lr, grad_norm=grad_norm, explained_variance=explained, **meter.rates(sum(n for n, _ in counts))
                )
                dead = training.log_step(run, bar, cfg, step, row, batch, sentinel)
            training.stop(run, step, interrupted=turn.stopping, dead=sentinel if dead else None, lost=lost)
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat ppo`, `python -m codechat.ppo` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("ppo", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
