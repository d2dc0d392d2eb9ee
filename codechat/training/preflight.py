"""Checks before the first step of reinforcement learning: do the task's own solutions earn the full reward, and is there a gradient?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codechat import tasks
from codechat.core.errors import RunError
from codechat.evaluation import diagnose
from codechat.models.gpt import GPT
from codechat.rl.engines import Engine
from codechat.rl.rollout import RolloutBatch
from codechat.runs.run import continues
from codechat.tasks import custom, redteam
from codechat.tasks.base import Problem, Task

REFERENCE_SOLUTIONS = 512  # training problems whose own solution is scored


def check(
    cfg: Any, task: Task, problems: list[Problem], model: GPT, engine: Engine, sample: Callable[..., RolloutBatch]
) -> None:
    """Nothing where --diagnose-groups is 0 or the run is resumed. RunError for a task whose reference solutions are not correct at the full
    reward, for an own task whose reward breaks its contract, and for one that diagnose calls DEAD, unless --allow-dead. A collective."""
    if not cfg.diagnose_groups or cfg.resume or continues(cfg):
        return
    tasks.check_reference_solutions(task, problems[:REFERENCE_SOLUTIONS]).require()
    if custom.is_custom(task):
        redteam.report(task, problems)
    engine.push(model, 0)
    batch = sample(0, cfg.diagnose_groups, seed=cfg.seed + 1, group_size=max(8, cfg.group_size // 2))
    found = diagnose.judge(batch.rewards, batch.correct, min_groups=min(cfg.diagnose_groups, diagnose.MIN_GROUPS))
    if found.verdict == "DEAD" and not cfg.allow_dead:
        raise RunError(
            f"diagnose says DEAD on {cfg.task}: {found.effective_groups} of {found.n_groups} groups have any variance, mean reward "
            f"{found.reward_mean:.3f}; {found.remedy}; --allow-dead trains all the same"
        )
