"""AppWorld with a local checkpoint or a server: ReAct episodes, one after the other, scored by AppWorld's own evaluation.

    appworld serve environment --port 8000                       in the package's own Python environment
    codechat appworld --ckpt my/sft --tasks ~/appworld --split select
    codechat appworld --server http://127.0.0.1:8100 --tasks 82e2fac_1 82e2fac_2
    codechat data appworld --run-name appworld --out data/appworld   successful episodes -> conversations for codechat sft

Task goal completion is the share of tasks that pass every check, scenario goal completion the share of scenarios whose tasks all do; both as AppWorld
reports them, in [0, 1]. `reward_mean` is the mean share of checks passed, `idle_mean` the same for doing nothing: a score below it means damage.
trajectories.jsonl keeps every episode with its messages, per_problem.jsonl counts that `evaluate` can pair.

Left out: several episodes at once (a server holds one world; run the command once per server), and resuming after an interruption.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.evaluation.intervals import bootstrap_interval
from codechat.evaluation.results import ProblemResult
from codechat.inference import chat_command
from codechat.inference.chat_command import ChatSettings, LocalModel
from codechat.runs.run import Run
from codechat.tasks.appworld import task as appworld
from codechat.tasks.appworld.task import AppWorldEnvironment, AppWorldServer
from codechat.tasks.base import Problem

Row = dict[str, Any]
TRAJECTORIES = "trajectories.jsonl"


@dataclass(frozen=True, kw_only=True)
class AppWorldConfig:
    """A model, a world, and which of its tasks."""

    run_name: str = opt("appworld", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    ckpt: str = opt("", "run name, run@best, run@STEP, run directory or checkpoint; or give --server")
    server: str = opt("", "URL of a model server instead, such as http://127.0.0.1:8100 (codechat serve)")
    api_key_file: Path | None = opt(None, "file with the key that the model server asks for; none = no key")
    world: str = opt(appworld.DEFAULT_URL, "URL of `appworld serve environment`")
    tasks: tuple[str, ...] = opt(
        config.REQUIRED, "task ids, files with one a line, or the directory of appworld's data"
    )
    split: Literal["train", "select", "test", "test_hard"] = opt(
        "select", "AppWorld's train, dev, test_normal or test_challenge, where the ids come from"
    )
    limit: int | None = opt(None, "tasks to play, the first ones; none = all")
    max_interactions: int = opt(30, "answers of an episode")
    longest_output: int = opt(4000, "characters of an output that the model is shown, its middle left out")
    max_new_tokens: int = opt(400, "longest answer, tokens")
    temperature: float = opt(0.0, "sampling temperature; 0 = always the most likely token")
    top_p: float | None = opt(None, "sample from the smallest set of tokens that holds this probability")
    seed: int = opt(0, "seed of the sampling")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit}; at least 1 task is needed, or none for all")
        AppWorldEnvironment([AppWorldServer(self.world)], self.max_interactions, self.longest_output)
        self.sampling()

    def sampling(self) -> ChatSettings:
        """How to sample."""
        shared = ("ckpt", "server", "api_key_file", "max_new_tokens", "temperature", "top_p", "seed")
        return ChatSettings(top_k=None, **{name: getattr(self, name) for name in shared})


def evaluate_appworld(cfg: AppWorldConfig) -> Run:
    """Play the tasks; a row in eval.jsonl, and every episode in trajectories.jsonl. UserError, before anything is written, where the world, the
    model or the tasks are absent."""
    problems = appworld.problems_of(appworld.task_ids(cfg.tasks, cfg.split)[: cfg.limit], cfg.split)
    server = AppWorldServer(cfg.world)
    server.check()
    model = chat_command.open_model(cfg.sampling())
    experiment = cfg.run_name.replace("/", "-")
    world = AppWorldEnvironment([server], cfg.max_interactions, cfg.longest_output, experiment=experiment)
    who = cfg.ckpt or cfg.server
    with Run.create(cfg.run_name, cfg, kind="appworld", overwrite=cfg.overwrite) as run:
        rows: list[Row] = []
        try:
            for problem in tqdm(problems, unit="task", desc=who):
                rows.append(play(model, world, problem, cfg.seed))
                _append(run.path / TRAJECTORIES, rows[-1])
                counted = {"checkpoint": who, "split": cfg.split, **_result(rows[-1]).row()}
                _append(run.path / "per_problem.jsonl", counted)
        finally:
            world.close()
        found = summarise(rows)
        run.log_eval(0, dict(found, checkpoint=who, split=cfg.split, task="appworld"))
        print(summary_text(found, who, cfg.split))
        run.finish(found)
    return run


def play(model: Any, world: AppWorldEnvironment, problem: Problem, seed: int = 0) -> Row:
    """One episode: {"id", "split", "messages", "stop", "reward", "tier", "correct", "parts", "requirements"}.

    stop: "done" (the code said so), "interactions", or "context" where the conversation leaves a checkpoint's block no room for an answer."""
    messages, fits, done = world.reset(problem, seed), True, False
    while not done and (fits := _fits(model, messages)):
        answer = {"role": "assistant", "content": "".join(model.say(messages))}
        answers, _, done = world.step(answer)
        messages += [answer, *answers]
    score = world.score()
    stop = "context" if not fits else "done" if score.parts["completed"] else "interactions"
    row = dict(id=problem.id, split=problem.split, messages=messages, stop=stop, reward=score.reward, tier=score.tier)
    return row | dict(correct=score.correct, parts=dict(score.parts), requirements=world.requirements)


def _fits(model: Any, messages: Sequence[dict[str, str]]) -> bool:
    """Whether a checkpoint has room for an answer; only a server knows the length of a conversation for its model."""
    if not isinstance(model, LocalModel):
        return True
    return len(model.prompt(messages)) + (model.cfg.max_new_tokens or chat_command.DEFAULT_TOKENS) <= model.block_size


def _append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _result(row: Row) -> ProblemResult:
    return ProblemResult(id=row["id"], n=1, c=int(row["correct"]), reward_mean=row["reward"], tiers={row["tier"]: 1})


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of the episodes, with 95 % intervals over tasks, and over scenarios where these are counted."""
    scenarios: dict[str, bool] = {}
    for row in rows:
        name = row["id"].partition("_")[0]
        scenarios[name] = scenarios.get(name, True) and row["correct"]
    measured = {
        "task_goal_completion": bootstrap_interval([float(r["correct"]) for r in rows]),
        "scenario_goal_completion": bootstrap_interval([float(v) for v in scenarios.values()]),
        "reward_mean": bootstrap_interval([r["reward"] for r in rows]),
    }
    found: dict[str, float] = {}
    for name, interval in measured.items():
        found |= {name: interval.value, f"{name}/lo": interval.lo, f"{name}/hi": interval.hi}
    found |= {f"tier/{tier}": _mean(r["tier"] == tier for r in rows) for tier in appworld.TIERS}
    found |= {f"stop/{stop}": _mean(r["stop"] == stop for r in rows) for stop in ("done", "interactions", "context")}
    return found | {
        "idle_mean": _mean(r["parts"]["idle"] / max(r["parts"]["total"], 1) for r in rows),
        "n_problems": len(rows),
        "n_scenarios": len(scenarios),
        "interactions_mean": _mean(r["parts"]["interactions"] for r in rows),
    }


def _mean(values: Iterable[float]) -> float:
    numbers = [float(v) for v in values]
    return sum(numbers) / len(numbers)


def summary_text(found: dict[str, float], who: str, split: str) -> str:
    """The summary in three lines."""

    def with_interval(name: str) -> str:
        return f"{found[name]:.3f} [{found[f'{name}/lo']:.3f}, {found[f'{name}/hi']:.3f}]"

    tiers = ", ".join(f"{tier} {found[f'tier/{tier}']:.2f}" for tier in reversed(appworld.TIERS))
    stops = ", ".join(
        f"{name.removeprefix('stop/')} {share:.2f}" for name, share in found.items() if name.startswith("stop/")
    )
    return (
        f"{who} on appworld {split}: task goal completion {with_interval('task_goal_completion')} (N={found['n_problems']} tasks), scenario goal "
        f"completion {with_interval('scenario_goal_completion')} ({found['n_scenarios']} scenarios)\n"
        f"  checks passed {with_interval('reward_mean')}; doing nothing passes {found['idle_mean']:.3f}\n"
        f"  {tiers}; ended by {stops}; {found['interactions_mean']:.1f} interactions an episode"
    )


def main(argv: list[str] | None = None) -> int:
    """`codechat appworld`; 0 when all tasks are played."""
    argv = sys.argv[1:] if argv is None else argv
    evaluate_appworld(config.parse(AppWorldConfig, argv, prog="codechat appworld", epilog=__doc__))
    return 0


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
