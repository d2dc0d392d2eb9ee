"""PPO on a task's reward: a value head, generalised advantages, clipped ratios, several passes
in minibatches.

    codechat ppo --preset toy --run-name toy-ppo        a minute on one core, no data
    codechat ppo --init-from released/nano --task examples/my_task.py:MyTask --run-name my-ppo
    torchrun --standalone --nproc-per-node 8 -m codechat ppo --init-from d20-sft --task my_task.py \\
        --run-name d20-ppo

Like GRPO (grpo.py), but a token's advantage comes from a learned value, not from the group. A
linear head on the policy's last states predicts the future reward, `advantages.estimate_gae`
compares it with the actual one (arXiv:1506.02438), and each minibatch trains both policy and
head (arXiv:1707.06347, eq. 9). The reward arrives at the last token; with --kl-coef every token
gets a KL penalty (arXiv:2203.02155, eq. 2). With --lam 1 and a value of 0 the advantage is the
reward itself.

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. The head is saved
with the checkpoint and starts at 0. A step in which no group has variance makes no update,
since only errors of the value head would change the policy; 20 in a row end the run."""

from dataclasses import dataclass

from codechat.core.config import opt
from codechat.rl.kinds import KLKind
from codechat.runs.run import Run
from codechat.training.rl_settings import LORA_RUN, TOY_RUN, RatioSettings, RLSettings
from codechat.training.settings import run_presets


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RatioSettings, RLSettings):
    """Settings of one PPO run."""

    run_name: str = "ppo"
    inner_epochs: int = 2
    minibatches: int = 2
    kl_kind: KLKind = "k1"
    lam: float = opt(
        0.95,
        "decay of generalised advantages; 1 = the whole return, 0 = one step ahead",
        least=0,
        most=1,
    )
    value_coef: float = opt(
        0.1, "weight of the value loss; its gradient reaches the policy's body too", least=0
    )


# toy: four updates a step at a constant 4e-3 collapse to a deterministic policy before it is
# right, in some seeds; a constant rate also loses a class again late in the run, where nearly
# all rewards are equal and Adam scales up the noise that is left.
RUN_PRESETS = run_presets(toy=TOY_RUN | {"lr": 2.5e-3, "schedule": "cosine"}, lora=LORA_RUN)


def train(cfg: PPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is
    written, for bad settings or a DEAD task."""
    from codechat.rl import advantages, losses
    from codechat.training.rl_session import rl_session
    from codechat.training.step_metrics import CLIPPING

    clip = (cfg.clip_eps_low, cfg.clip_eps_high)
    measures = [*CLIPPING, "value_loss"]
    if cfg.kl_coef:
        measures.append("kl_ref")
    with rl_session(
        cfg, "ppo", reference=bool(cfg.kl_coef), value_head=True, measures=measures
    ) as session:
        assert session.head is not None
        for _ in session.steps():
            batch = session.sample()  # P problems x G completions
            old, mask = session.to_device(batch.logprobs(), batch.mask())  # (N, C) each
            # statistics leave out padding and the environment's text, which have the value 0
            (written,) = session.to_device(
                batch.mask().flatten().nonzero()[:, 0]
            )  # indices into N x C
            ref = session.score_reference(batch)  # (N, C)
            rewards = advantages.token_rewards(cfg, batch, old, ref)  # (N, C)
            old_values = advantages.values_of(
                session.cfg, session.model, session.head, batch
            )  # (N, C)
            # (N, C) each
            advantage, returns = advantages.estimate_gae(rewards, old_values, mask, lam=cfg.lam)
            explained = advantages.explained_variance(
                returns.flatten()[written], old_values.flatten()[written]
            )
            adv_abs_sum = float(advantage.flatten()[written].abs().mean()) * len(written)
            live = advantages.live_completions(batch.rewards)  # (P, G)
            for update in session.updates(batch, live, cfg.inner_epochs, cfg.minibatches):
                for micro in update.microbatches():
                    # (B, C) each, and the states before each token
                    logprobs, entropy, hidden = micro.logprobs(states=True)
                    values = micro.packed.unpack(session.head(hidden))  # (B, C)
                    old_logprobs = micro.rows_of(old)  # (B, C)
                    gae = micro.rows_of(advantage)  # (B, C)
                    ratio = losses.policy_ratio(logprobs, old_logprobs, micro.mask)
                    policy_loss = losses.clipped_policy_loss(ratio, gae, *clip)
                    value_loss = losses.value_loss(
                        values, micro.rows_of(old_values), micro.rows_of(returns)
                    )
                    loss = policy_loss + cfg.value_coef * value_loss - cfg.entropy_coef * entropy
                    sums = losses.clip_statistics(
                        ratio, logprobs, old_logprobs, gae, micro.mask, *clip
                    )
                    sums["value_loss"] = losses.masked_sum(value_loss, micro.mask)
                    # `backward` would log the whole loss under this name, value loss and bonus
                    # included
                    sums["policy_loss"] = losses.masked_mean(
                        policy_loss, micro.mask, update.n_tokens
                    )
                    if ref is not None:
                        sums["kl_ref"] = losses.masked_sum(
                            losses.kl_estimate(logprobs, micro.rows_of(ref)), micro.mask
                        )
                    micro.backward(losses.masked_mean(loss, micro.mask, update.n_tokens), sums)
                update.apply()
            session.log(
                batch, {"explained_variance": explained}, sums={"adv_abs_mean": adv_abs_sum}
            )
    return session.run
