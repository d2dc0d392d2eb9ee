"""Expert iteration on a task's reward: sample, keep the best completions, fine-tune on them,
repeat.

    codechat expert --preset toy --run-name toy-expert        a minute on one core, no data
    codechat expert --init-from released/nano --task examples/my_task.py:MyTask --run-name my-expert
    torchrun --standalone --nproc-per-node 8 -m codechat expert --init-from d20-sft \\
        --task my_task.py --run-name d20-exp

Rejection sampling: it learns from kept completions only, never from failures, and has no ratio,
baseline or clipping. --keep correct keeps every exactly correct completion (STaR,
arXiv:2203.14465; the start needs some). --keep best keeps the best completions of each group
with unequal rewards (RAFT, arXiv:2304.06767; rewards need only differ). Each step samples with
the newest policy, like REINFORCE (reinforce.py), and makes inner_epochs x minibatches updates
on the kept completions.

Twenty steps in a row in which no group has variance, or no completion is kept, end the run."""

from dataclasses import dataclass
from typing import Literal

from codechat.core.config import opt
from codechat.runs.run import Run
from codechat.training.rl_settings import TOY_ONE_UPDATE, RLSettings
from codechat.training.settings import MinibatchSettings, run_presets


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(MinibatchSettings, RLSettings):
    """Settings of one run of expert iteration."""

    run_name: str = "expert"
    keep: Literal["best", "correct"] = opt(
        "best",
        "train on the best of each group with unequal "
        "rewards, or on all exactly correct completions",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == "best":
            self.needs_groups("--keep best: a group of one never disagrees")

    @property
    def idle_reason(self) -> str:
        if self.keep == "correct":
            return (
                "no completion was exactly correct, and --keep "
                "correct trains on no other; set --keep best"
            )
        return super().idle_reason


# it learns from the best alone, and so more slowly than from all completions; with four
# problems a step, one seed in eight ends with a class unlearned
RUN_PRESETS = run_presets(toy=TOY_ONE_UPDATE | {"max_steps": 260})


def train(cfg: ExpertConfig) -> Run:
    """Optimise the task's reward; returns the finished run. UserError, before anything is
    written, for bad settings or a DEAD task."""
    from codechat.rl.advantages import kept_completions
    from codechat.rl.losses import masked_mean, masked_sum
    from codechat.training.rl_session import rl_session

    with rl_session(cfg, "expert", measures=("train_loss",)) as session:
        for _ in session.steps():
            batch = session.sample()  # P problems x G completions
            kept = kept_completions(batch, cfg.keep)  # (P, G)
            for update in session.updates(batch, kept, cfg.inner_epochs, cfg.minibatches):
                for micro in update.microbatches(keep=kept):
                    # a likelihood is over all tokens under --top-k too: it must take probability
                    # from those that were cut
                    logprobs, _ = micro.logprobs(whole=True)  # (B, C)
                    # kept completions alone are counted: the mean is over what is learned
                    loss = -masked_mean(logprobs, micro.mask, update.n_live_tokens)
                    micro.backward(loss, {"train_loss": -masked_sum(logprobs, micro.mask)})
                update.apply()
            session.log(batch, {"kept_frac": kept.float().mean()})
    return session.run
