"""REINFORCE on a task's reward, with the group's mean reward as baseline.

    codechat reinforce --preset toy --run-name toy-reinforce        a minute on one core, no data
    codechat reinforce --init-from released/nano --task examples/my_task.py:MyTask --run-name my-rl
    torchrun --standalone --nproc-per-node 8 -m codechat reinforce --init-from d20-sft \\
        --task my_task.py --run-name d20-rl

For each step: sample G completions of each problem from the policy, score them with the task
(the same score that evaluation uses), subtract each group's mean reward, and take one
policy-gradient step on the sampled ids. No
reference model, no ratio, no clipping: the data are exactly on-policy. Before the first step it
checks the task's reference solutions, and `diagnose` judges 64 groups; a DEAD task needs
--allow-dead. Twenty DEAD steps in a row end the run. --engine http or vllm samples on a server;
evaluations run in this process.

Shapes: P problems with G completions each; B completions per microbatch, C tokens of the
longest one."""

from dataclasses import dataclass

from codechat.runs.run import Run
from codechat.training.rl_settings import TOY_ONE_UPDATE, EntropySettings, GroupSettings
from codechat.training.settings import run_presets


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(EntropySettings, GroupSettings):
    """Settings of one REINFORCE run."""

    run_name: str = "reinforce"


RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE)


def train(cfg: ReinforceConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is
    written, for bad settings or a DEAD task."""
    # imported here, so that settings and --help need no torch
    from codechat.rl.advantages import group_advantages
    from codechat.rl.losses import masked_mean, policy_gradient_loss
    from codechat.training.rl_session import rl_session

    with rl_session(cfg, "reinforce", measures=("mismatch_kl", "importance_capped")) as session:
        for _ in session.steps():
            batch = session.sample()  # P problems x G completions
            advantage = group_advantages(batch.rewards, cfg.baseline)  # (P, G)
            # no update where every advantage is 0: momentum alone would move the policy
            for update in session.updates(batch, live=advantage != 0):
                # a completion of advantage 0 adds exactly 0, unless it gets an entropy bonus
                for micro in update.microbatches(keep=None if cfg.entropy_coef else advantage != 0):
                    logprobs, entropy = micro.logprobs()  # (B, C) each
                    importance = micro.importance(logprobs, cfg.importance_cap)  # (B, C)
                    weighted = micro.rows_of(advantage) * importance
                    # divided by the tokens of the whole update: microbatches and ranks change
                    # nothing
                    loss = policy_gradient_loss(logprobs, weighted, micro.mask, update.n_tokens)
                    bonus = masked_mean(entropy, micro.mask, update.n_tokens)
                    micro.backward(loss - cfg.entropy_coef * bonus)
                update.apply()
            session.log(batch, {"adv_abs_mean": advantage.abs().mean()})
    return session.run
