"""GRPO on a task's reward: clipped ratios to the policy that sampled, over groups, and its variants Dr. GRPO, DAPO and GSPO.

    codechat grpo --init-from my-sft --task funcall --data-dir data/nano --run-name my-grpo
    codechat grpo --init-from qwen --preset lora --task gsm8k --data-dir hub --run-name qwen-grpo      adapters on an imported checkpoint
    torchrun --standalone --nproc-per-node 8 -m codechat.grpo --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-grpo

What REINFORCE (reinforce.py) does, and four things more: several updates on one batch of rollouts, with the ratio to the sampling policy
clipped; how tokens are weighed and rewards scaled; groups without variance replaced by fresh ones (--resample-rounds); a penalty on the KL
divergence from the starting policy (--kl-coef), in the loss or in the reward. --variant sets what the papers set; any flag overrides it.

    grpo     arXiv:2402.03300   reward / group's std; mean over each completion's tokens; clip 0.2
    dr_grpo  arXiv:2503.20783   no std, no division by length: sum over max_new_tokens
    dapo     arXiv:2503.14476   mean over all tokens; clip 0.2 below, 0.28 above; groups without variance replaced
    gspo     arXiv:2507.18071   one ratio for a completion; clip 0.0003 below, 0.0004 above

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. A KL penalty alone moves a policy that nothing rewards:
20 DEAD steps in a row end the run, and an update without any advantage is not made. Two ranks do what one does with the whole batch.
Left out: truncated sampling (sampler and trainer must agree), penalties on overlong completions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from codechat import training
from codechat.core.command import train_main
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.rl import advantages, engines, losses
from codechat.runs import run as run_module
from codechat.training.presets import LORA_RUN, TOY_ONE_UPDATE
from codechat.training.settings import MinibatchSettings, RLSettings, run_presets

if TYPE_CHECKING:
    import torch

    from codechat.rl.rollout import RolloutBatch
    from codechat.runs.run import Run

PAPER = "; none = as --variant has it"
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": dict(
        baseline="zscore",
        loss_aggregation="sequence",
        ratio="token",
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        resample_rounds=0,
    ),
    "dr_grpo": dict(
        baseline="mean",
        loss_aggregation="constant",
        ratio="token",
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        resample_rounds=0,
    ),
    "dapo": dict(
        baseline="zscore",
        loss_aggregation="token",
        ratio="token",
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        resample_rounds=4,
    ),
    "gspo": dict(
        baseline="zscore",
        loss_aggregation="sequence",
        ratio="sequence",
        clip_eps_low=3e-4,
        clip_eps_high=4e-4,
        resample_rounds=0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(MinibatchSettings, RLSettings):
    """Settings of one GRPO run."""

    run_name: str = default("grpo")
    variant: Literal["grpo", "dr_grpo", "dapo", "gspo"] = opt(
        "grpo", "the paper whose settings fill what is none below"
    )
    baseline: Literal["none", "mean", "leave_one_out", "zscore"] | None = opt(
        None, "what is subtracted from a reward" + PAPER
    )
    loss_aggregation: Literal["sequence", "token", "constant"] | None = opt(
        None,
        "what a token's loss is divided by: its completion's length, all tokens, max_new_tokens" + PAPER,
    )
    ratio: Literal["token", "sequence"] | None = opt(None, "one ratio per token, or one per completion" + PAPER)
    clip_eps_low: float | None = opt(
        None, "a ratio below 1 - this has no gradient where the advantage is negative" + PAPER, least=0
    )
    clip_eps_high: float | None = opt(
        None, "a ratio above 1 + this has no gradient where the advantage is positive" + PAPER, least=0
    )
    resample_rounds: int | None = opt(
        None, "times that groups without variance are replaced by those of further problems; 0 = never" + PAPER, least=0
    )
    kl_coef: float = opt(0.0, "weight of the KL divergence from the starting policy; 0 = no reference model", least=0)
    kl_kind: Literal["k1", "k2", "k3"] = opt("k3", "estimator of that divergence")
    kl_in: Literal["loss", "reward"] = opt(
        "loss", "where it enters; k1 in the loss is noise of mean zero, k1 in the reward is right"
    )
    old_logprobs: Literal["sampler", "trainer"] = opt(
        "sampler",
        "whose log-probabilities the ratio starts from; trainer costs one more pass and keeps a mismatch out of the ratio",
    )
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline != "none":
            self.needs_groups("a group baseline: the advantage is always 0")
        if (self.clip_eps_low or 0) >= 1:
            raise ConfigError(f"clip_eps_low {self.clip_eps_low}; a ratio is never below 0, so it must be below 1")
        if self.old_logprobs == "sampler":
            if self.top_k:
                raise ConfigError(
                    f"top_k {self.top_k}: the sampler's log-probabilities are of its cut distribution; set --old-logprobs trainer"
                )
            self.no_importance_weights("the ratio of --old-logprobs sampler starts from the sampler already")

    def resolved(self) -> GRPOConfig:
        """With what is none filled in from the variant."""
        missing = {name: value for name, value in VARIANTS[self.variant].items() if getattr(self, name) is None}
        return replace(self, **missing)


# A GRPO example on GSM8K that TRL users have copied since (W. Brown, 2025), with its own numbers: 1 problem x 4 accumulated x 16 completions
# a step, one epoch of the 7,473 problems, a tenth of it warm-up, TRL's KL weight of that time. Left out: dropout of the adapters (0.05), Adam's
# beta2 of 0.99 (here 0.95), prompts cut to 256 tokens.
GSM8K_RUN: dict[str, Any] = LORA_RUN | {
    "device_batch_size": 1,
    "grad_accum": 4,
    "max_steps": 1868,
    "warmup_steps": 187,
    "final_lr_share": 0.0,
    "weight_decay": 0.1,
    "grad_clip": 0.1,
    "kl_coef": 0.04,
    "max_new_tokens": 786,
    "row_tokens": 2048,
    "eval_every": 100,
    "save_every": 100,
}
RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE, lora=LORA_RUN, gsm8k=GSM8K_RUN)


def resample_flat_groups(
    cfg: GRPOConfig, world: Any, batch: RolloutBatch, sample: Any, cursor: int, seed: int
) -> tuple[RolloutBatch, int]:
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): groups without variance are replaced by those of the problems after `cursor`, at most
    resample_rounds times. Returns the batch and how many problems all ranks have drawn for it.

    A collective: all ranks count together, since what one replaces decides what the next one draws; each samples in every round."""
    drawn = world.size * cfg.problems_per_rank
    for _ in range(cfg.resample_rounds):
        flat = advantages.zero_variance(batch.rewards).nonzero()[:, 0].tolist()
        (wanted,) = training.totals([[len(flat) * (rank == world.rank) for rank in range(world.size)]])
        if not sum(wanted):
            break
        at = drawn + int(sum(wanted[: world.rank]))
        batch = batch.replace(flat, sample(cursor + at, len(flat), seed, key=at))
        drawn += int(sum(wanted))
    return batch, drawn


def credit(
    cfg: GRPOConfig, batch: RolloutBatch, old: torch.Tensor, ref: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, G) advantages, and which of them come from the reward: rewards within their group, less the completion's KL divergence from the
    reference where --kl-in reward.

    The penalty is centred as the reward is, but never divided by its standard deviation, which would blow it up where rewards agree. It makes no
    completion live: where rewards agree, rounding alone gives each completion a penalty of its own."""
    advantage = advantages.group_advantages(batch.rewards, cfg.baseline)
    live = advantage != 0
    if ref is None or cfg.kl_in == "loss":
        return advantage, live
    penalty = (losses.kl_estimate(old, ref, cfg.kl_kind).cpu() * batch.mask()).sum(1).view_as(advantage)
    baseline = "mean" if cfg.baseline == "zscore" else cfg.baseline
    return advantage - cfg.kl_coef * advantages.group_advantages(penalty, baseline), live


def train(cfg: GRPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is written, for bad settings or a DEAD task."""
    with dist.session(cfg) as world, run_module.StopSignal() as interrupt:
        cfg, parent, tok = training.load_parent(cfg.resolved())
        task, problems, evaluate = training.load_task(cfg, tok)
        model = training.build_policy(cfg, parent)
        reference = training.build_model(cfg, parent) if cfg.kl_coef else None
        optimizers = training.build_optimizers(cfg, model)
        engine, sample = training.open_rollouts(cfg, model, task, problems, tok, interrupt)
        lineage = training.lineage(cfg, "grpo", parent, task=cfg.task, data_dir=cfg.data_dir)
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        run, last = training.open_run("grpo", cfg, model, optimizers)
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
                meter = training.Meter(*(("kl_ref",) if cfg.kl_coef else ()), ratios=True)

                # roll out: G completions of this rank's next P problems, drawn by the policy as it is
                first, seed = world.rank * cfg.problems_per_rank, training.step_seed(cfg, step)
                try:
                    engine.push(model, step)
                    batch = sample(cursor + first, cfg.problems_per_rank, seed, key=first)
                    batch, drawn = resample_flat_groups(cfg, world, batch, sample, cursor, seed)
                    sample.ahead(step + 1, cursor + drawn + first, first)
                except engines.EngineLost as error:
                    lost = error
                    if step > start:
                        save(step, wait=True)
                    break
                cursor += drawn

                # credit: a completion's reward above its group's baseline; log-probabilities that ratio and KL start from
                sampler = dist.send(batch.logprobs(), world.device)  # (N, C)
                old = training.score(cfg, model, batch) if cfg.old_logprobs == "trainer" else sampler  # (N, C)
                ref = training.score(cfg, reference, batch) if reference is not None else None  # (N, C)
                importance, off_policy = losses.importance_weights(
                    old, sampler, dist.send(batch.mask(), world.device), cfg.importance_cap
                )  # (N, C)
                advantage, live = credit(cfg, batch, old, ref)  # (P, G) each
                per_completion = dist.send(advantage.view(-1, 1), world.device)  # (N, 1)
                meter.rolled_out(model)

                # learn: each minibatch is one update, its loss divided by the sequences or tokens of all ranks
                lr = training.set_rate(cfg, optimizers, step)
                grad_norm = 0.0
                parts = training.minibatches(batch, cfg.minibatches)
                counts = training.totals([[len(p.completions), p.n_tokens, int(live[g].sum())] for g, p in parts])
                for update in range(cfg.inner_epochs * cfg.minibatches):
                    (groups, part), (n_sequences, n_tokens, n_live) = (
                        parts[update % len(parts)],
                        counts[update % len(parts)],
                    )
                    if not advantages.worth_an_update(n_live):
                        continue
                    skip_zero = not (cfg.entropy_coef or (cfg.kl_coef and cfg.kl_in == "loss"))
                    for packed in training.packs(cfg, model, part, advantage[groups], skip_zero=skip_zero):
                        logprobs, entropy = training.token_logprobs(cfg, model, packed)  # (R, T) each
                        new, mask = packed.unpack(logprobs), packed.unpack(packed.completion >= 0)  # (B, C)
                        rows, C = training.rows_in(batch, groups, packed), new.shape[1]
                        token_loss, clipped = losses.clipped_policy_loss(
                            new,
                            old[rows, :C],
                            per_completion[rows],
                            mask,
                            level=cfg.ratio,
                            clip_eps_low=cfg.clip_eps_low,
                            clip_eps_high=cfg.clip_eps_high,
                        )  # (B, C)
                        token_loss = token_loss * importance[rows, :C]
                        if ref is not None and cfg.kl_in == "loss":
                            token_loss = token_loss + cfg.kl_coef * losses.kl_estimate(new, ref[rows, :C], cfg.kl_kind)
                        if cfg.entropy_coef:
                            token_loss = token_loss - cfg.entropy_coef * packed.unpack(entropy)
                        weights = losses.token_weights(
                            mask.sum(1),
                            cfg.loss_aggregation,
                            n_sequences=n_sequences,
                            n_tokens=n_tokens,
                            max_tokens=cfg.max_new_tokens,
                        )  # (B, 1)
                        loss = losses.masked_sum(token_loss * weights, mask)
                        loss.backward()
                        meter.loss(loss, packed.n_tokens)
                        meter.add(**clipped)
                        if ref is not None:
                            meter.add(kl_ref=losses.masked_sum(losses.kl_estimate(new.detach(), ref[rows, :C]), mask))
                        if update == 0:
                            meter.gap(logprobs, packed.old_logprobs, packed.completion >= 0)
                    grad_norm = training.apply_gradients(cfg, optimizers, model)
                    meter.updates += 1

                # log
                off_policy = (
                    {k: (float(v), batch.n_tokens) for k, v in off_policy.items()}
                    if cfg.old_logprobs == "trainer"
                    else {}
                )
                row = meter.row(
                    cfg, batch, task, ratios=off_policy, adv_abs_mean=advantage.abs().mean(), **engine.metrics(step)
                )
                row |= dict(
                    lr=lr,
                    grad_norm=grad_norm,
                    resampled_groups=drawn - world.size * cfg.problems_per_rank,
                    **meter.rates(sum(n for _, n, _ in counts)),
                )
                dead = training.log_step(run, bar, cfg, step, row, batch, sentinel)
            training.stop(run, step, interrupted=turn.stopping, dead=sentinel if dead else None, lost=lost)
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat grpo`, `python -m codechat.grpo` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("grpo", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
