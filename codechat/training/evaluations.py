"""Evaluations on a task while a loop trains: the policy on validation problems, and SFT's
--eval-task."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from codechat import tasks
from codechat.distributed import sharding
from codechat.evaluation import scoring
from codechat.evaluation.held_out import Probes
from codechat.models.gpt import GPT
from codechat.tasks.base import BaseTask, Problem, Task, hash_problems
from codechat.text.tokenizer import Tokenizer
from codechat.training.held_out import probes_hash, read_probes
from codechat.training.rl_settings import RLSettings

if TYPE_CHECKING:
    from codechat.preference import PreferenceConfig
    from codechat.sft import SFTConfig


class TaskData(NamedTuple):
    """What a loop trains on and is evaluated on."""

    task: Task
    problems: list[Problem]  # to train on
    evaluate: Callable[[GPT, int], dict[str, Any]]  # (model, step) -> a row of eval.jsonl
    hashes: dict[str, str]  # of problems and probes


def load_task(cfg: RLSettings, tok: Tokenizer, tools_style: str) -> TaskData:
    """The task of cfg, with `evaluate_policy` on its validation problems. tools_style: how
    prompts list tools for the policy."""
    task = tasks.load(cfg.task, source=cfg.data_dir)
    if isinstance(task, BaseTask):
        task.tools_style = tools_style
    held_out = scoring.problems_once(task, "select", cfg.eval_examples)
    problems = task.problems("train", seed=cfg.seed)
    probes = read_probes(cfg)
    hashes = task_hash(cfg.task, cfg.data_dir, "train", problems) | probes_hash(
        cfg.data_dir, probes
    )
    hashes |= task_hash(cfg.task, cfg.data_dir, "select", held_out)
    return TaskData(
        task=task,
        problems=problems,
        evaluate=lambda model, step: evaluate_policy(cfg, model, tok, task, held_out, probes),
        hashes=hashes,
    )


def task_hash(
    name: str | None,
    source: str | None,
    split: str,
    problems: Sequence[Problem],
) -> dict[str, str]:
    origin = f" of {source}" if source else ""
    return {f"task {name}{origin} ({split})": hash_problems(problems)} if problems else {}


def evaluate_policy(
    cfg: "RLSettings | PreferenceConfig",
    model: GPT,
    tok: Tokenizer,
    task: Task,
    problems: Sequence[Problem],
    probes: Probes | None = None,
) -> dict[str, Any]:
    """A row of eval.jsonl: pass@k and tiers on validation problems; with probes, the behaviour
    matrix too."""
    # sampling takes a step per token: sharded weights are gathered once, not at each
    with sharding.whole(model) as policy:
        scores = scoring.evaluate_task(
            policy,
            tok,
            cfg.chosen_tags,
            task,
            problems,
            n=max(cfg.ks),
            ks=cfg.ks,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            max_new_tokens=cfg.max_new_tokens,
            seed=cfg.seed,
        )
        row = scores.row()
        if probes:
            row |= probes.measure(policy, tok, cfg.chosen_tags, seed=cfg.seed).metrics()
    return row


class GreedyTask:
    """SFT's --eval-task: greedy answers to its validation problems."""

    def __init__(self, cfg: "SFTConfig", name: str, tok: Tokenizer) -> None:
        self.cfg = cfg
        self.tok = tok
        self.task = tasks.load(name, source=cfg.eval_task_data)
        self.problems = scoring.problems_once(self.task, "select", cfg.eval_examples)
        self.hashes = task_hash(cfg.eval_task, cfg.eval_task_data, "select", self.problems)

    def evaluate(self, policy: GPT) -> dict[str, Any]:
        """The task's part of a row of eval.jsonl. policy: a whole model, not a sharded one."""
        result = scoring.evaluate_task(
            policy,
            self.tok,
            self.cfg.chosen_tags,
            self.task,
            self.problems,
            n=1,
            temperature=0.0,
            max_new_tokens=self.cfg.eval_new_tokens,
            seed=self.cfg.seed,
        )
        return result.row() | {"task": self.cfg.eval_task, "split": "select"}
