"""Is there a gradient? A verdict on groups of rewards, a sentinel for running loops, and the
share of weights that an update changes.

    codechat diagnose --ckpt released/nano --task examples/my_task.py:MyTask --groups 64 --group-size 8

A group whose rewards are all equal has advantage exactly 0. `judge` counts such groups before
reinforcement learning, `Sentinel` at each step; `weights_changed_bf16` shows whether updates
survive rounding to bfloat16.

Shapes: P groups (problems), G completions each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from codechat import tasks
from codechat.core.errors import ConfigError
from codechat.distributed import dist, hardware, numerics, sharding
from codechat.evaluation import scoring
from codechat.evaluation.intervals import estimate_pass_at_k
from codechat.evaluation.settings import MIN_GROUPS, DiagnoseConfig
from codechat.models import loading
from codechat.rl import advantages, rollout
from codechat.runs.run import Run
from codechat.tasks.base import BaseTask, warn_of_shortcuts

if TYPE_CHECKING:  # the help of the command loads no torch
    from torch import Tensor, nn

Verdict = Literal["SATURATED", "DEAD", "WEAK", "PARTIAL", "LIVE"]

REFERENCE_SOLUTIONS = 256  # of training problems, which must score the maximum first
SATURATED_ABOVE = 0.85  # share of correct completions
PARTIAL_BELOW = 0.01  # of the same share
DEAD_BELOW = 0.05  # share of groups with variance
WEAK_BELOW = 0.25

LOGGED = (
    "verdict",
    "remedy",
    "reward_mean",
    "reward_std",
    "exact_match",
    "frac_zero_std_groups",
    "effective_groups",
)

# by the signal, and by pass@1
REMEDIES = json.loads(Path(__file__).with_name("remedies.json").read_text("utf-8"))


@dataclass(frozen=True)
class Diagnosis:
    """Statistics of P x G rewards. Shares are in [0, 1]; pass_at maps k to the unbiased
    estimate."""

    verdict: Verdict
    remedy: str
    n_groups: int
    group_size: int
    frac_zero_std_groups: float
    effective_groups: int  # that carry a gradient
    exact_match: float
    reward_mean: float
    reward_std: float
    pass_at: dict[int, float]

    @property
    def frac_with_variance(self) -> float:
        return self.effective_groups / self.n_groups


def _mean_pass_at_k(group_size: int, counts: Sequence[int], k: int) -> float:
    """Over groups of `group_size` completions. counts: how many of each group are correct."""
    return sum(estimate_pass_at_k(group_size, c, k) for c in counts) / len(counts)


def judge(rewards: Tensor, correct: Tensor, *, min_groups: int = MIN_GROUPS) -> Diagnosis:
    """Verdict over rewards (P, G) and exact matches (P, G) bool: SATURATED if over 85 % of
    completions are correct; else DEAD if under 5 % of groups have variance, WEAK under 25 %,
    PARTIAL if under 1 % of completions are correct, LIVE. ConfigError for too few groups."""
    n_groups, group_size = rewards.shape
    if n_groups < min_groups or group_size < 2:
        raise ConfigError(
            f"{n_groups} groups of {group_size}; a verdict needs {min_groups} groups of 2 or more"
        )
    n_equal = int(advantages.zero_variance(rewards).sum())
    n_live = n_groups - n_equal
    exact_match = float(correct.double().mean())
    verdict = verdict_of(exact_match, n_live / n_groups, DEAD_BELOW, WEAK_BELOW)
    if verdict == "LIVE" and exact_match < PARTIAL_BELOW:
        verdict = "PARTIAL"
    counts = correct.sum(dim=1).tolist()
    rewards = rewards.double()
    return Diagnosis(
        verdict=verdict,
        remedy=REMEDIES["signal"][verdict],
        n_groups=n_groups,
        group_size=group_size,
        frac_zero_std_groups=n_equal / n_groups,
        effective_groups=n_live,
        exact_match=exact_match,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        pass_at={k: _mean_pass_at_k(group_size, counts, k) for k in (1, group_size)},
    )


def verdict_of(
    correct_share: float, signal: float, dead_below: float, weak_below: float
) -> Verdict:
    """SATURATED above 85 % correct; else DEAD, WEAK or LIVE by the share `signal` of what
    learning starts from."""
    if correct_share > SATURATED_ABOVE:
        return "SATURATED"
    if signal < dead_below:
        return "DEAD"
    return "WEAK" if signal < weak_below else "LIVE"


class Sentinel:
    """Stops a loop after `patience` DEAD steps in a row. Checkpoints hold its state."""

    def __init__(self, patience: int = 20) -> None:
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
    """A copy of every parameter rounded to bfloat16, in the order of `model.parameters()`."""
    import torch

    return [p.detach().to(torch.bfloat16, copy=True) for p in model.parameters()]


def weights_changed_bf16(before: Sequence[Tensor], model: nn.Module) -> float:
    """Share of weights in [0, 1] whose bfloat16 value differs from the snapshot `before`. A
    collective if the model is sharded."""
    changed, total = count_changed_bf16(before, model)
    return share_of_all(float(changed), total, model)


def count_changed_bf16(before: Sequence[Tensor], model: nn.Module) -> tuple[Tensor, int]:
    """(how many of this rank's weights differ from the snapshot, on their device and not waited
    for; of how many)."""
    import torch

    parts = [
        (sharding.local(p.detach()), sharding.local(b))
        for p, b in zip(model.parameters(), before, strict=True)
    ]
    changed = torch.stack([(p.to(torch.bfloat16) != b).sum() for p, b in parts]).sum()
    return changed, sum(p.numel() for p, _ in parts)


def share_of_all(changed: float, total: int, model: nn.Module) -> float:
    """Share of changed weights, of all ranks where the model is sharded: then a collective."""
    import torch

    if sharding.is_sharded(model):
        changed, total = dist.sum_(torch.tensor([int(changed), total])).tolist()
    return changed / max(1, total)


# ---- the command


def diagnose(cfg: DiagnoseConfig) -> Diagnosis:
    """The reference-solution check, then samples on training problems, then the verdict;
    printed, and kept in a run."""
    import torch

    task = tasks.load(cfg.task, source=cfg.data_dir)
    problems = task.problems("train", limit=max(cfg.groups, REFERENCE_SOLUTIONS), seed=cfg.seed)
    check = tasks.check_reference_solutions(task, problems[:REFERENCE_SOLUTIONS]).require()
    warn_of_shortcuts(task, problems)
    hardware.keep_freed_memory(hardware.device())
    loaded = loading.load_model(cfg.ckpt, hardware.device(), cfg.tags)
    if isinstance(task, BaseTask):
        task.tools_style = loaded.tools_style
    cfg = scoring.with_free_name(cfg)
    with Run.create(
        cfg.run_name, cfg, kind="diagnose", parent=cfg.ckpt, overwrite=cfg.overwrite
    ) as run:
        print(f"reference-solution check: {check.passed} of {check.n} score the maximum")
        # a small task's problems are sampled in turn until there are groups enough
        groups = [problems[i % len(problems)] for i in range(cfg.groups)]
        with torch.no_grad(), numerics.autocast():
            batch = rollout.collect(
                loaded.model,
                task,
                groups,
                loaded.tokenizer,
                loaded.tags,
                group_size=cfg.group_size,
                max_new_tokens=cfg.max_new_tokens,
                temperature=cfg.temperature,
                top_k=cfg.top_k,
                seed=cfg.seed,
            )
        diagnosis = judge(batch.rewards, batch.correct)
        shares = batch.tier_shares(task.tiers)
        print(
            report(
                diagnosis,
                {k: v for k, v in shares.items() if k.startswith("tier/")},
                cfg.temperature,
            )
        )
        found = asdict(diagnosis)
        row = shares | {name: found[name] for name in LOGGED}
        row |= {f"pass@{k}": value for k, value in diagnosis.pass_at.items()}
        row |= dict(
            n_samples=cfg.group_size,
            n_problems=cfg.groups,
            temperature=cfg.temperature,
            split="train",
            task=cfg.task,
            checkpoint=cfg.ckpt,
            gold_passed=check.passed,
            gold_n=check.n,
        )
        run.log_eval(loaded.meta["step"], row)
        run.log_samples(loaded.meta["step"], batch.best_and_worst(groups=16))
        run.finish(found)
        print(f"the samples lie in {run.path}")
    return diagnosis


def report(d: Diagnosis, tiers: Mapping[str, float], temperature: float) -> str:
    """For people: pass@k, a histogram of tiers, the share of groups without variance, verdict
    and remedy."""
    passes = ", ".join(f"pass@{k} = {value:.3f}" for k, value in d.pass_at.items())
    lines = [f"{passes} (n={d.group_size}, N={d.n_groups}, temperature={temperature:g})"]
    widest = max(map(len, tiers), default=0)
    for name, share in tiers.items():
        bar = "#" * round(40 * share)
        lines.append(f"  {name:<{widest}} {share:6.1%} {bar}")
    without = d.n_groups - d.effective_groups
    lines += [
        f"zero variance: {without} of {d.n_groups} groups "
        f"({d.frac_zero_std_groups:.0%}); reward {d.reward_mean:.3f} ± {d.reward_std:.3f}",
        f"{d.verdict}: {d.remedy}",
    ]
    return "\n".join(lines)
