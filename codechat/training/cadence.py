"""When a loop evaluates, saves and ends; and the evaluation of a policy on its task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from codechat.distributed import dist, sharding
from codechat.evaluation import evaluate
from codechat.models.gpt import GPT
from codechat.runs.run import Run
from codechat.tasks.base import Problem, Task
from codechat.text.tokenizer import Tokenizer


class Turn(NamedTuple):
    """What happens before the update of a step. last: no update follows; stopping: since the run is interrupted or DEAD."""

    evaluate: bool
    save: bool
    last: bool
    stopping: bool

    def also_stop_if(self, stop: bool, updated: bool) -> Turn:
        """The same, but saving and ending where an evaluation says so. updated: whether there is anything new to save."""
        return self._replace(save=self.save or updated, last=True, stopping=True) if stop else self


def turn(cfg: Any, step: int, start: int, run: Run, *, stopping: bool, max_steps: int | None = None) -> Turn:
    """Loops run max_steps + 1 times, so that the last weights are evaluated and saved. stopping: on any rank; a collective.

    A resumed run does not evaluate its first weights again."""
    done, stopping = step == (cfg.max_steps if max_steps is None else max_steps), dist.any(stopping)
    evaluates = done or bool(cfg.eval_every and step % cfg.eval_every == 0)
    saves = done or stopping or bool(cfg.save_every and step % cfg.save_every == 0)
    return Turn(evaluates and not (step == start and run.resumed), saves and step > start, done or stopping, stopping)


def evaluate_policy(
    cfg: Any, model: GPT, tok: Tokenizer, task: Task, problems: Sequence[Problem], probes: Sequence[Any] = ()
) -> dict[str, Any]:
    """A row of eval.jsonl: pass@k and tiers on validation problems, and the behaviour matrix where there are probes."""
    with sharding.whole(model) as policy:
        found = evaluate.evaluate_task(
            policy,
            tok,
            cfg.tags,
            task,
            problems,
            n=max(cfg.ks),
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            max_new_tokens=cfg.max_new_tokens,
            ks=cfg.ks,
            seed=cfg.seed,
        ).row()
        if probes:
            found |= evaluate.behaviour_matrix(policy, tok, cfg.tags, probes, seed=cfg.seed).metrics()
    return found
