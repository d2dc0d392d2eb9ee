"""GRPO on a task's reward (group advantages, clipped ratios), and its variants Dr. GRPO, DAPO,
GSPO and CISPO.

    codechat grpo --preset toy --run-name toy-grpo        a minute on one core, no data
    codechat grpo --init-from released/nano --task examples/my_task.py:MyTask --run-name my-grpo
    codechat grpo --init-from qwen --preset lora --task my_task.py --run-name qwen-grpo
    torchrun --standalone --nproc-per-node 8 -m codechat grpo --init-from d20-sft \\
        --task my_task.py --run-name d20-grpo

GRPO adds four things to REINFORCE (reinforce.py): several updates per batch of rollouts, with
clipped ratios to the sampling policy; choices of loss aggregation and reward scale; new groups
in place of those without variance (--resample-rounds); a penalty on the KL divergence from the
starting policy (--kl-coef), in the loss or in the reward. --variant selects the settings of a
paper; any flag overrides them.

    grpo     arXiv:2402.03300   reward / group's std; mean over each completion's tokens; clip 0.2
    dr_grpo  arXiv:2503.20783   no std, no division by length: sum over max_new_tokens
    dapo     arXiv:2503.14476   mean over all tokens; clip 0.2 below, 0.28 above; groups without variance replaced
    gspo     arXiv:2507.18071   one ratio per completion; clip 0.0003 below, 0.0004 above
    cispo    arXiv:2506.13585   mean over all tokens; the ratio is a weight, cut at 1 + 4 (ours: the paper gives no
             number), not below

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. Without rewards,
the KL penalty alone would still change the policy. So 20 DEAD steps in a row end the run, and a
minibatch whose advantages are all 0 makes no update. Two ranks give the same update as one with
the whole batch."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.rl.kinds import Aggregation, Baseline
from codechat.runs.run import Run
from codechat.training.rl_settings import (
    CUT_OFF,
    LORA_RUN,
    TOY_ONE_UPDATE,
    GroupSettings,
    RatioSettings,
)
from codechat.training.settings import run_presets

Ratio = Literal["token", "sequence"]


class Paper(NamedTuple):
    """The settings that a paper sets."""

    baseline: Baseline
    loss_aggregation: Aggregation
    ratio: Ratio
    clip_eps_low: float
    clip_eps_high: float
    resample_rounds: int


PAPERS = {
    "grpo": Paper("zscore", "sequence", "token", 0.2, 0.2, 0),
    "dr_grpo": Paper("mean", "constant", "token", 0.2, 0.2, 0),
    "dapo": Paper("zscore", "token", "token", 0.2, 0.28, 4),
    "gspo": Paper("zscore", "sequence", "sequence", 3e-4, 4e-4, 0),
    "cispo": Paper("zscore", "token", "token", 1.0, 4.0, 0),
}

# TRL's --loss_type sets the aggregation alone. What our variant of this name sets beside it, as
# it is in TRL
TRL_KEEPS: dict[str, dict[str, Any]] = {
    "dapo": dict(clip_eps_high=0.2, resample_rounds=0),
    "dr_grpo": dict(baseline="zscore"),
}


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RatioSettings, GroupSettings):
    """Settings of one GRPO run."""

    run_name: str = "grpo"
    variant: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = opt(
        "grpo", f"the paper whose values fill settings left at none: {' '.join(Paper._fields)}"
    )
    baseline: Baseline | None = None  # type: ignore[assignment]  # as those below: none = the paper's
    loss_aggregation: Aggregation | None = opt(
        None,
        "what a token's loss is divided by: its completion's length, all tokens, max_new_tokens",
    )
    ratio: Ratio | None = opt(None, "one ratio per token, or one per completion")
    clip_eps_low: float | None = None  # type: ignore[assignment]
    clip_eps_high: float | None = None  # type: ignore[assignment]
    resample_rounds: int | None = opt(
        None,
        "how often groups without variance are replaced by groups of new problems; 0 = never",
        least=0,
    )
    mask_truncated: bool = opt(
        False,
        "leave completions that were cut off out of the loss (DAPO, "
        "section 3.4); where all are, the run is DEAD",
    )
    kl_in: Literal["loss", "reward"] = opt(
        "loss",
        "where the KL penalty enters; k1 is right in the "
        "reward, but only zero-mean noise in the loss",
    )
    old_logprobs: Literal["sampler", "trainer"] = opt(
        "sampler",
        "source of the ratio's old log-probabilities; trainer: one more pass, but no mismatch",
    )

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """TRL's words: --loss_type sets less than a variant does, and CISPO's ratio is cut at
        --epsilon_high, not at 1 + it."""
        given = dict(super().as_spelled(given, spelled))
        variant = str(given.get("variant"))
        if "loss_type" in spelled:
            given = TRL_KEEPS.get(variant, {}) | given
        # TRL cuts CISPO's ratio at epsilon_high itself; ours is cut at 1 + clip_eps_high
        if variant != "cispo":
            return given
        if "epsilon_low" in spelled:
            raise ConfigError(
                "--epsilon_low with cispo: TRL has no lower bound "
                "there; leave it out, or set --clip-eps-low"
            )
        if "epsilon_high" in spelled:
            try:
                given["clip_eps_high"] = float(given["clip_eps_high"]) - 1
            except (TypeError, ValueError):
                return given  # no number, which is refused where it is read
            if given["clip_eps_high"] < 0:
                got = f"--epsilon_high {given['clip_eps_high'] + 1:g} with cispo"
                raise ConfigError(
                    f"{got}: TRL cuts the ratio itself there; required at least 1, usual is 5"
                )
        elif "loss_type" in spelled and given.get("clip_eps_high") is None:
            raise ConfigError(
                "--loss_type cispo needs TRL's cut of the ratio; set "
                "--epsilon_high 5 (its own default is 0.2)"
            )
        return given

    def resolved(self) -> Self:
        """These settings with what is none filled in from the variant."""
        return replace(self, **self.choices()._asdict())

    def choices(self) -> Paper:
        """What the variant's paper sets, less what is set here."""
        set_here = {
            name: getattr(self, name) for name in Paper._fields if getattr(self, name) is not None
        }
        return PAPERS[self.variant]._replace(**set_here)

    @property
    def learns_cut_off(self) -> bool:
        return not self.mask_truncated

    @property
    def idle_reason(self) -> str:
        if self.mask_truncated:
            return f"{CUT_OFF}; raise --max-new-tokens, or leave --mask-truncated out"
        return super().idle_reason

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance_cap and self.old_logprobs == "sampler":
            why = (
                "the ratio starts from the sampler's "
                "log-probabilities, so that nothing is left to weigh"
            )
            raise ConfigError(
                f"importance_cap {self.importance_cap}: {why}; set "
                "--importance-cap 0 or --old-logprobs trainer"
            )


RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE, lora=LORA_RUN)


def train(cfg: GRPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is
    written, for bad settings or a DEAD task."""
    from codechat.rl import losses
    from codechat.rl.advantages import credit
    from codechat.training.rl_session import rl_session
    from codechat.training.step_metrics import CLIPPING

    cfg = cfg.resolved()
    chosen = cfg.choices()
    surrogate = (
        losses.weighted_policy_loss if cfg.variant == "cispo" else losses.clipped_policy_loss
    )
    clip = (chosen.clip_eps_low, chosen.clip_eps_high)
    kl_loss = bool(cfg.kl_coef) and cfg.kl_in == "loss"
    measures = (*CLIPPING, "kl_ref") if cfg.kl_coef else CLIPPING
    with rl_session(cfg, "grpo", reference=bool(cfg.kl_coef), measures=measures) as session:
        for _ in session.steps():
            batch = session.sample(chosen.resample_rounds)  # P problems x G completions
            sampled, mask = session.to_device(batch.logprobs(), batch.mask())  # (N, C) each
            # the sampler computes slightly other log-probabilities than the trainer; with the
            # trainer's own, the ratio holds only what learning has changed
            old = sampled  # (N, C)
            if cfg.old_logprobs == "trainer":
                old = session.score(session.model, batch)
            ref = session.score_reference(batch)  # (N, C)
            # (N, C)
            importance, off_policy = losses.importance_weights(
                old, sampled, mask, cfg.importance_cap
            )
            advantage, live = credit(cfg, chosen.baseline, batch, old, ref)  # (P, G) each
            # an entropy bonus and a KL term also train completions of advantage 0
            keep = None if cfg.entropy_coef or kl_loss else advantage != 0
            # the advantages above still count what was cut off: its reward is part of the group's
            # mean
            learned = batch.without_cut_off() if cfg.mask_truncated else batch
            for update in session.updates(learned, live, cfg.inner_epochs, cfg.minibatches):
                for micro in update.microbatches(keep):
                    logprobs, entropy = micro.logprobs()  # (B, C) each
                    old_logprobs = micro.rows_of(old)  # (B, C)
                    advantages = micro.rows_of(advantage)  # (B, 1)
                    ratio = losses.policy_ratio(logprobs, old_logprobs, micro.mask, chosen.ratio)
                    loss = surrogate(ratio, advantages, *clip) * micro.rows_of(importance)
                    if ref is not None and kl_loss:
                        loss = loss + cfg.kl_coef * losses.kl_estimate(
                            logprobs, micro.rows_of(ref), cfg.kl_kind
                        )
                    loss = loss - cfg.entropy_coef * entropy
                    # (B, 1)
                    weights = losses.token_weights(
                        micro.mask.sum(1),
                        chosen.loss_aggregation,
                        update.n_sequences,
                        update.n_tokens,
                        cfg.max_new_tokens,
                    )
                    sums = losses.clip_statistics(
                        ratio, logprobs, old_logprobs, advantages, micro.mask, *clip
                    )
                    if ref is not None:
                        # logged with k3, whatever --kl-kind the loss takes
                        sums["kl_ref"] = losses.masked_sum(
                            losses.kl_estimate(logprobs, micro.rows_of(ref)), micro.mask
                        )
                    micro.backward(losses.masked_sum(loss * weights, micro.mask), sums)
                update.apply()
            means = {
                "adv_abs_mean": float(advantage.abs().mean()),
                "resampled_groups": float(session.resampled),
            }
            if cfg.mask_truncated:
                means["frac_masked"] = float(batch.cut_off().float().mean())
            # with the sampler's as old log-probabilities both are one table: nothing to report
            session.log(batch, means, sums=off_policy if cfg.old_logprobs == "trainer" else {})
    return session.run
