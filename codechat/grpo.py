"""GRPO on a task's reward (group advantages, clipped ratios), and its variants Dr. GRPO, DAPO, GSPO and CISPO.

    codechat grpo --init-from my-sft --task funcall --data-dir data/nano/sft --run-name my-grpo
    codechat grpo --init-from qwen --preset lora --task gsm8k --data-dir hub --run-name qwen-grpo      adapters on an
    imported checkpoint
    torchrun --standalone --nproc-per-node 8 -m codechat grpo --init-from d20-sft --task funcall --data-dir data/sft
    --run-name d20-grpo

GRPO adds four things to REINFORCE (reinforce.py): several updates per batch of rollouts, with clipped ratios to the
sampling policy; choices of loss aggregation and reward scale; new groups in place of those without variance
(--resample-rounds); a penalty on the KL divergence from the starting policy (--kl-coef), in the loss or in the
reward. --variant selects the settings of a paper; any flag overrides them.

    grpo     arXiv:2402.03300   reward / group's std; mean over each completion's tokens; clip 0.2
    dr_grpo  arXiv:2503.20783   no std, no division by length: sum over max_new_tokens
    dapo     arXiv:2503.14476   mean over all tokens; clip 0.2 below, 0.28 above; groups without variance replaced
    gspo     arXiv:2507.18071   one ratio per completion; clip 0.0003 below, 0.0004 above
    cispo    arXiv:2506.13585   mean over all tokens; the ratio is a weight, cut at 1 + 4 (ours: the paper gives no
             number), not below

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. Without rewards, the KL penalty alone
would still change the policy. So 20 DEAD steps in a row end the run, and a minibatch whose advantages are all 0
makes no update. Two ranks give the same update as one with the whole batch."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.runs.run import Run
from codechat.training.rl_settings import GSM8K_RUN, LORA_RUN, TOY_ONE_UPDATE, GroupSettings, RatioSettings
from codechat.training.settings import run_presets

# what the papers set                baseline, loss_aggregation, ratio, clip_eps_low, clip_eps_high, resample_rounds
PAPERS = {
    "grpo": ("zscore", "sequence", "token", 0.2, 0.2, 0),
    "dr_grpo": ("mean", "constant", "token", 0.2, 0.2, 0),
    "dapo": ("zscore", "token", "token", 0.2, 0.28, 4),
    "gspo": ("zscore", "sequence", "sequence", 3e-4, 4e-4, 0),
    "cispo": ("zscore", "token", "token", 1.0, 4.0, 0),
}
SET_BY_PAPER = ("baseline", "loss_aggregation", "ratio", "clip_eps_low", "clip_eps_high", "resample_rounds")
VARIANTS: dict[str, dict[str, Any]] = {name: dict(zip(SET_BY_PAPER, row)) for name, row in PAPERS.items()}

# TRL's --loss_type sets the aggregation alone. What our variant of this name sets beside it, as it is in TRL
TRL_KEEPS: dict[str, dict[str, Any]] = {
    "dapo": dict(clip_eps_high=0.2, resample_rounds=0),
    "dr_grpo": dict(baseline="zscore"),
}


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RatioSettings, GroupSettings):
    """Settings of one GRPO run."""

    run_name: str = "grpo"
    variant: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = opt(
        "grpo", f"the paper whose values fill settings left at none: {' '.join(SET_BY_PAPER)}"
    )
    baseline: Literal["none", "mean", "leave_one_out", "zscore"] | None = None
    loss_aggregation: Literal["sequence", "token", "constant"] | None = opt(
        None, "what a token's loss is divided by: its completion's length, all tokens, max_new_tokens"
    )
    ratio: Literal["token", "sequence"] | None = opt(None, "one ratio per token, or one per completion")
    clip_eps_low: float | None = None
    clip_eps_high: float | None = None
    resample_rounds: int | None = opt(
        None, "how often groups without variance are replaced by groups of new problems; 0 = never", least=0
    )
    mask_truncated: bool = opt(
        False, "completions that were cut off teach nothing (DAPO, section 3.4); where all are, the run is DEAD"
    )
    kl_in: Literal["loss", "reward"] = opt(
        "loss", "where the KL penalty enters; k1 is right in the reward, but only zero-mean noise in the loss"
    )
    old_logprobs: Literal["sampler", "trainer"] = opt(
        "sampler", "source of the ratio's old log-probabilities; trainer: one more pass, but no mismatch"
    )

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """TRL's words: --loss_type sets less than a variant does, and CISPO's ratio is cut at --epsilon_high, not
        at 1 + it."""
        given, variant = dict(super().as_spelled(given, spelled)), given.get("variant")
        if "loss_type" in spelled:
            given = TRL_KEEPS.get(variant, {}) | given
        if variant != "cispo":
            return given
        if "epsilon_low" in spelled:
            raise ConfigError(
                "--epsilon_low with cispo: TRL has no lower bound there; leave it out, or set --clip-eps-low"
            )
        if "epsilon_high" in spelled:
            try:
                given["clip_eps_high"] = float(given["clip_eps_high"]) - 1
            except (TypeError, ValueError):
                return given  # no number, which is refused where it is read
            if given["clip_eps_high"] < 0:
                got = f"--epsilon_high {given['clip_eps_high'] + 1:g} with cispo"
                raise ConfigError(f"{got}: TRL cuts the ratio itself there; required at least 1, usual is 5")
        elif "loss_type" in spelled and given.get("clip_eps_high") is None:
            raise ConfigError(
                "--loss_type cispo needs TRL's cut of the ratio; set --epsilon_high 5 (its own default is 0.2)"
            )
        return given

    def resolved(self) -> Self:
        """With what is none filled in from the variant."""
        missing = {name: value for name, value in VARIANTS[self.variant].items() if getattr(self, name) is None}
        return replace(self, **missing)


RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE, lora=LORA_RUN, gsm8k=GSM8K_RUN)


def train(cfg: GRPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is written, for bad settings
    or a DEAD task."""
    from codechat.rl import losses
    from codechat.rl.advantages import credit
    from codechat.training.rl_session import CLIPPING, rl_session

    cfg = cfg.resolved()
    surrogate = losses.weighted_policy_loss if cfg.variant == "cispo" else losses.clipped_policy_loss
    clip = (cfg.clip_eps_low, cfg.clip_eps_high)
    kl_loss = bool(cfg.kl_coef) and cfg.kl_in == "loss"
    measures = (*CLIPPING, *(("kl_ref",) if cfg.kl_coef else ()))
    with rl_session(cfg, "grpo", reference=bool(cfg.kl_coef), measures=measures) as r:
        for _ in r.steps():
            batch = r.sample(cfg.resample_rounds)  # P problems x G completions
            sampled, mask = r.to_device(batch.logprobs(), batch.mask())  # (N, C) each
            old = r.score(r.model, batch) if cfg.old_logprobs == "trainer" else sampled  # (N, C)
            ref = r.score(r.reference, batch) if cfg.kl_coef else None  # (N, C)
            importance, off_policy = losses.importance_weights(old, sampled, mask, cfg.importance_cap)  # (N, C)
            advantage, live = credit(cfg, batch, old, ref)  # (P, G) each
            keep = None if cfg.entropy_coef or kl_loss else advantage != 0
            learned = batch.without_cut_off() if cfg.mask_truncated else batch
            for update in r.updates(learned, live, cfg.inner_epochs, cfg.minibatches):
                for mb in update.microbatches(keep):
                    logprobs, entropy = mb.logprobs()  # (B, C) each
                    ratio = losses.policy_ratio(logprobs, mb.of(old), mb.mask, cfg.ratio)
                    loss = surrogate(ratio, mb.of(advantage), *clip) * mb.of(importance)
                    if kl_loss:
                        loss = loss + cfg.kl_coef * losses.kl_estimate(logprobs, mb.of(ref), cfg.kl_kind)
                    loss = loss - cfg.entropy_coef * entropy
                    weights = losses.token_weights(
                        mb.mask.sum(1),
                        cfg.loss_aggregation,
                        update.n_sequences,
                        update.n_tokens,
                        cfg.max_new_tokens,
                    )  # (B, 1)
                    sums = losses.clip_statistics(ratio, logprobs, mb.of(old), mb.of(advantage), mb.mask, *clip)
                    if cfg.kl_coef:
                        sums["kl_ref"] = losses.masked_sum(losses.kl_estimate(logprobs, mb.of(ref)), mb.mask)
                    mb.backward(losses.masked_sum(loss * weights, mb.mask), **sums)
                update.apply()
            means = dict(adv_abs_mean=advantage.abs().mean(), resampled_groups=r.resampled)
            if cfg.mask_truncated:
                means["frac_masked"] = batch.cut_off().float().mean()
            r.log(batch, sums=off_policy if cfg.old_logprobs == "trainer" else {}, **means)
    return r.run
