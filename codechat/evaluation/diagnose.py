"""Is there a gradient? A verdict over groups of rewards, a sentinel for a running loop, and the share of
weights an update changed.

A group whose rewards are all equal has advantage exactly 0 under any group baseline. `judge` counts those
groups and says what the count means before reinforcement learning is paid for; `Sentinel` watches the same
number step by step; `weights_changed_bf16` shows whether updates survive rounding to the precision that
inference will use.

    codechat diagnose --ckpt nano/sft --task funcall --data-dir data/nano/calls --groups 64 --group-size 8

Left out: why a reward is wrong (the gold gate and `xray` look at that).

Shapes: P groups (problems), G completions each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from codechat import tasks
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist, sharding
from codechat.evaluation.intervals import estimate_pass_at_k
from codechat.models import loading
from codechat.rl import rollout
from codechat.rl.advantages import zero_variance
from codechat.runs.run import Run

Verdict = Literal["SATURATED", "DEAD", "WEAK", "LIVE"]

MIN_GROUPS = 64
SATURATED_ABOVE = 0.85  # share of correct completions
DEAD_BELOW = 0.05  # share of groups with variance
WEAK_BELOW = 0.25

REMEDIES: dict[Verdict, str] = {
    "SATURATED": "the task is solved at this temperature: take harder problems, or drop those always correct",
    "DEAD": "almost no group carries a gradient: train SFT longer, densify the reward, or ease the problems",
    "WEAK": "few groups carry a gradient: raise --group-size or --temperature, or make the reward denser",
    "LIVE": "go ahead with RL",
}


@dataclass(frozen=True)
class Diagnosis:
    """What P x G rewards say. Shares are in [0, 1]; reward_std is over all P x G rewards; pass_at maps k to
    the unbiased estimate."""

    verdict: Verdict
    remedy: str
    n_groups: int
    group_size: int
    frac_zero_std: float
    effective_groups: int
    correct_share: float
    reward_mean: float
    reward_std: float
    pass_at: dict[int, float]

    @property
    def frac_with_variance(self) -> float:
        """Share of groups that carry a gradient: what `Sentinel.update` takes."""
        return self.effective_groups / self.n_groups

    def metrics(self) -> dict[str, Any]:
        """Under their declared names."""
        return dict(
            verdict=self.verdict,
            reward_mean=self.reward_mean,
            reward_std=self.reward_std,
            exact_match=self.correct_share,
            frac_zero_std_groups=self.frac_zero_std,
            effective_groups=self.effective_groups,
            **{f"pass@{k}": value for k, value in self.pass_at.items()},
        )


def judge(rewards: Tensor, correct: Tensor, *, min_groups: int = MIN_GROUPS) -> Diagnosis:
    """Verdict over rewards (P, G) and exact matches (P, G) bool; the first rule that holds:

    SATURATED: more than 85 % of completions correct. DEAD: under 5 % of groups have variance. WEAK: under 25
    %. Else LIVE. Raises ConfigError for fewer than `min_groups` groups or groups of one."""
    if rewards.ndim != 2 or rewards.shape != correct.shape:
        raise ConfigError(
            f"rewards {tuple(rewards.shape)} and correct {tuple(correct.shape)}; required the same "
            "(problems, group_size)"
        )
    n_groups, group_size = rewards.shape
    if n_groups < max(1, min_groups):
        raise ConfigError(
            f"{n_groups} groups; a verdict needs at least {max(1, min_groups)}; sample more (--groups "
            f"{max(1, min_groups)})"
        )
    if group_size < 2:
        raise ConfigError("group_size 1: a group of one never has variance; set --group-size 2 or more")
    zero_std = int(zero_variance(rewards).sum())
    share = float(correct.double().mean())
    verdict = _verdict(share, (n_groups - zero_std) / n_groups)
    return Diagnosis(
        verdict=verdict,
        remedy=REMEDIES[verdict],
        n_groups=n_groups,
        group_size=group_size,
        frac_zero_std=zero_std / n_groups,
        effective_groups=n_groups - zero_std,
        correct_share=share,
        reward_mean=float(rewards.double().mean()),
        reward_std=float(rewards.double().std(correction=0)),
        pass_at={k: _pass_at(correct, k) for k in (1, group_size)},
    )


def _verdict(correct_share: float, frac_with_variance: float) -> Verdict:
    if correct_share > SATURATED_ABOVE:
        return "SATURATED"
    if frac_with_variance < DEAD_BELOW:
        return "DEAD"
    return "WEAK" if frac_with_variance < WEAK_BELOW else "LIVE"


def _pass_at(correct: Tensor, k: int) -> float:
    """Mean over problems of the unbiased pass@k, from correct (P, G)."""
    counts = correct.sum(dim=1).tolist()
    return sum(estimate_pass_at_k(correct.shape[1], int(c), k) for c in counts) / len(counts)


class Sentinel:
    """Stops a loop after `patience` DEAD steps in a row. Its state goes into checkpoints, so that a resume
    does not start the count anew."""

    def __init__(self, patience: int = 20) -> None:
        if patience < 1:
            raise ConfigError(f"patience {patience}; required at least 1 step")
        self.patience = patience
        self.dead_steps = 0

    def update(self, frac_groups_with_variance: float) -> bool:
        """Count one step; True when the loop should stop."""
        self.dead_steps = self.dead_steps + 1 if frac_groups_with_variance < DEAD_BELOW else 0
        return self.dead_steps >= self.patience

    def state(self) -> dict[str, Any]:
        return {"dead_steps": self.dead_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.dead_steps = int(state["dead_steps"])


def bf16_snapshot(model: nn.Module) -> list[Tensor]:
    """Every parameter rounded to bfloat16, copied, in the order of `model.parameters()`."""
    return [p.detach().to(torch.bfloat16, copy=True) for p in model.parameters()]


@torch.no_grad()
def weights_changed_bf16(before: Sequence[Tensor], model: nn.Module) -> float:
    """Share of weights in [0, 1] whose bfloat16 value differs from the snapshot `before`.

    A collective where the model is sharded. Near 0 after a step: a model kept in bfloat16 would not have moved; float32 masters still collect the
    update."""
    params = list(model.parameters())
    if [p.shape for p in params] != [b.shape for b in before]:
        raise ConfigError("the snapshot has other shapes than the model; take bf16_snapshot of the same model")
    parts = [(dist.local(p), dist.local(b)) for p, b in zip(params, before, strict=True)]
    counts = torch.tensor(
        [sum(int((p.to(torch.bfloat16) != b).sum()) for p, b in parts), sum(p.numel() for p, _ in parts)]
    )
    changed, total = (dist.sum_(counts) if sharding.is_sharded(model) else counts).tolist()
    return changed / max(1, total)


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What to judge, and from how many samples."""

    run_name: str = opt("diagnose", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    ckpt: str = opt(config.REQUIRED, "checkpoint: run name, run@best, run@STEP, run directory or checkpoint")
    task: str = opt("funcall", "task, such as funcall, micro, toy or mbpp:variant=sanitized")
    data_dir: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    groups: int = opt(64, "training problems to sample")
    group_size: int = opt(8, "completions per problem")
    temperature: float = opt(1.0, "sampling temperature, the one that RL will use")
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all")
    max_new_tokens: int = opt(64, "longest completion, tokens")
    gold_examples: int = opt(256, "training problems whose gold answers must score the maximum first")
    seed: int = opt(0, "seed of problem order and sampling")

    def __post_init__(self) -> None:
        if self.groups < MIN_GROUPS:
            raise ConfigError(f"groups {self.groups}; a verdict needs at least {MIN_GROUPS}; set --groups {MIN_GROUPS}")
        if self.group_size < 2:
            raise ConfigError(
                f"group_size {self.group_size}: a group of one never has variance; set --group-size 2 or more"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: greedy groups never have variance")


def diagnose(cfg: DiagnoseConfig) -> Diagnosis:
    """The gold gate, then samples on training problems, then the verdict; printed, and kept in a run
    directory.

    Raises UserError before anything is written if a gold answer fails or the task has too few problems."""
    task = tasks.load(cfg.task, **({"source": cfg.data_dir} if cfg.data_dir else {}))
    problems = task.problems("train", limit=max(cfg.groups, cfg.gold_examples), seed=cfg.seed)
    gate = tasks.gold_gate(task, problems[: cfg.gold_examples]).require()
    loaded = loading.load_model(cfg.ckpt, device=dist.device())
    run = Run.create(cfg.run_name, cfg, kind="diagnose", parent=cfg.ckpt, overwrite=cfg.overwrite)
    with run:
        print(f"gold gate: {gate.passed} of {gate.n} gold answers score the maximum")
        loaded.model.eval()
        with torch.no_grad(), dist.autocast(dist.device()):
            batch = rollout.collect(
                loaded.model,
                task,
                problems[: cfg.groups],
                loaded.tokenizer,
                loaded.tags,
                group_size=cfg.group_size,
                max_new_tokens=cfg.max_new_tokens,
                temperature=cfg.temperature,
                top_k=cfg.top_k,
                seed=cfg.seed,
            )
        found, tiers = judge(batch.rewards, batch.correct), batch.tier_shares(task.tiers)
        print(
            format_diagnosis(
                found, {k: v for k, v in tiers.items() if k.startswith("tier/")}, temperature=cfg.temperature
            )
        )
        run.log_eval(
            loaded.meta["step"],
            dict(
                found.metrics(),
                **tiers,
                remedy=found.remedy,
                n_samples=cfg.group_size,
                n_problems=cfg.groups,
                temperature=cfg.temperature,
                split="train",
                task=cfg.task,
                checkpoint=cfg.ckpt,
                gold_passed=gate.passed,
                gold_n=gate.n,
            ),
        )
        run.log_samples(loaded.meta["step"], batch.best_and_worst(groups=16))
        run.finish({"verdict": found.verdict, "remedy": found.remedy, **asdict(found)})
    return found


def format_diagnosis(found: Diagnosis, tiers: Mapping[str, float], *, temperature: float) -> str:
    """The report for people: pass@k, a histogram of tiers, the share of groups without variance, verdict and
    remedy."""
    passes = ", ".join(f"pass@{k} = {value:.3f}" for k, value in found.pass_at.items())
    widest = max(map(len, tiers), default=0)
    bars = [f"  {name:<{widest}} {share:6.1%} {'#' * round(40 * share)}" for name, share in tiers.items()]
    return "\n".join(
        [
            f"{passes} (n={found.group_size}, N={found.n_groups}, temperature={temperature:g})",
            *bars,
            f"zero variance: {found.n_groups - found.effective_groups} of {found.n_groups} groups "
            f"({found.frac_zero_std:.0%}); "
            f"reward {found.reward_mean:.3f} ± {found.reward_std:.3f}",
            f"{found.verdict}: {found.remedy}",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    """`codechat diagnose`, `python -m codechat.evaluation.diagnose`."""
    diagnose(
        config.parse(DiagnoseConfig, sys.argv[1:] if argv is None else argv, prog="codechat diagnose", epilog=__doc__)
    )


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
