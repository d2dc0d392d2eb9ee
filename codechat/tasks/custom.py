"""Custom tasks: rows and reward functions, in a Python file that --task names or as an object in a notebook.

    class Capitals(RowsTask):
        rows = "capitals.jsonl"               # {"prompt", "gold"} a line; or a list of such rows
        rewards = {exact: 1.0, short: 0.0}    # functions of (completion, problem); weight 0: logged, not trained

    codechat grpo --task capitals.py:Capitals --init-from my-sft

A reward function returns a number in [0, 1], or a mapping of such numbers, of which the mean counts and each is logged. `codechat new task NAME`
writes such a file, its test and its rows. Any class with the methods of `tasks.base.Task` is a task too. The file runs with your rights.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from codechat.core.errors import ConfigError, DataError, nearest
from codechat.data.sources import digest, local_rows
from codechat.data.synthetic import split_of, spread
from codechat.tasks.base import SPLITS, Message, Problem, Score, Task, check_split, shuffled
from codechat.text.tool_functions import run_file

Reward = Callable[[str, Problem], "float | Mapping[str, float]"]
MEMBERS = ("name", "tiers", "max_reward", "problems", "prompt", "score", "gold")


class RowsTask:
    """A task of rows {"prompt" (text or messages), "gold", "split"?, "reference"?, ...} and reward functions with weights.

    rows: a list, or a .jsonl, .json or .parquet file beside the class's own file; `source` (--data-dir) replaces it. Without "split" the hash of the
    prompt decides. "reference" is a completion that must earn the full reward; without it that is the gold. Other fields are the problem's `meta`.
    A completion is correct where the reward is full; override `correct` for another rule."""

    name: ClassVar[str] = ""
    tiers = ("none", "error", "some", "full")  # error: a reward function failed; its message is in Score.parts
    max_reward = 1.0
    rows: Sequence[Mapping[str, Any]] | str = ()
    rewards: ClassVar[Mapping[Reward, float]] = {}

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name") or cls.__name__.lower()

    def __init__(self, source: str | None = None) -> None:
        weights = list(self.rewards.values())
        if not weights or not all(0 <= w < math.inf for w in weights) or sum(weights) == 0:
            raise ConfigError(f"task {self.name} has the reward weights {weights}; required: 0 or more, not all 0")
        rows: Any = source if source is not None else self.rows
        if isinstance(rows, str | Path):
            beside = Path(inspect.getfile(type(self))).parent if source is None else Path()
            rows = local_rows(beside / rows)
        self._problems = _problems(self.name, rows)
        self._names: dict[Reward, tuple[str, ...]] = {}  # of the terms that a reference solution gets

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        check_split(split)
        problems = [problem for problem in self._problems if problem.split == split]
        if not problems:
            raise DataError(f"task {self.name} has no row in split {split!r}; give 10 rows or more, or set their split")
        return shuffled(problems, limit, seed)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        """The reference solution."""
        gold = problem.meta.get("reference", problem.gold)
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)

    def correct(self, completion: str, problem: Problem, reward: float) -> bool:
        return reward == self.max_reward

    def score(self, problem: Problem, completion: str) -> Score:
        """The weighted mean of the rewards. Where a reward function fails: tier "error" and 0."""
        terms: dict[str, float] = {}
        reward = total = 0.0
        try:
            for function, weight in self.rewards.items():
                value, parts = _value(function, completion, problem)
                terms |= self._complete(function, parts, problem)
                reward, total = reward + weight * value, total + weight
            reward /= total
            correct = bool(self.correct(completion, problem, reward))
        except Exception as error:  # the functions are the user's and may raise anything
            names = [n for f in self.rewards for n in self._names.get(f, (f.__name__,))]
            message = f"{type(error).__name__}: {error}"[:300]
            return Score(0.0, "error", {"error": message}, False, dict.fromkeys(names, 0.0))
        tier = "none" if reward == 0 else "full" if reward == self.max_reward else "some"
        return Score(reward, tier, {}, correct, terms)

    def _complete(self, function: Reward, terms: dict[str, float], problem: Problem) -> dict[str, float]:
        """The terms, checked to have the names that they have for a reference solution: all scores of a task have the same."""
        if function not in self._names:
            self._names[function] = tuple(_value(function, self.gold(problem), problem)[1])
        if tuple(terms) != (expected := self._names[function]):
            raise ValueError(f"{function.__name__} returned {list(terms)}; a reference solution gives {list(expected)}")
        return terms


def _value(function: Reward, completion: str, problem: Problem) -> tuple[float, dict[str, float]]:
    """(what counts, terms to log) of one reward function. ValueError unless it gives numbers in [0, 1]."""
    value, name = function(completion, problem), function.__name__
    parts = {f"{name}_{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    for key, part in parts.items():
        if not isinstance(part, (bool, int, float)) or not 0 <= part <= 1:
            raise ValueError(f"{key} is {part!r}; a reward is a number from 0 to 1")
    return sum(map(float, parts.values())) / max(len(parts), 1), {key: float(part) for key, part in parts.items()}


def _problems(task: str, rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """The problems of the rows, each prompt once."""
    unique: dict[str, dict[str, Any]] = {}  # by the hash of the prompt
    for number, row in enumerate(rows, 1):
        prompt, split = row.get("prompt"), row.get("split")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not messages or "gold" not in row or split not in (None, *SPLITS):
            raise DataError(
                f"task {task}, row {number} is {str(dict(row))[:80]}; required: prompt, gold, split one of {SPLITS} or none"
            )
        key = digest(json.dumps(messages))
        meta = {"split": split or split_of(key)}
        unique.setdefault(key, {"key": key, "row": row, "messages": messages, "meta": meta})
    kept = list(unique.values())
    if not any("split" in row["row"] for row in kept):
        kept = [row for part in spread(kept, lambda row: row["key"]).values() for row in part]
    return [
        Problem(
            f"{task}-{each['key'][:12]}",
            each["messages"],
            each["row"]["gold"],
            each["meta"]["split"],
            {key: value for key, value in each["row"].items() if key not in ("prompt", "gold", "split")},
        )
        for each in kept
    ]


# ---------------------------------------------------------------- files and objects


def file_class(path: str, name: str | None) -> type:
    """The task class of a Python file; without a name the only one. MissingFile, DataError (the file fails) or ConfigError."""
    module = run_file(Path(path), "task", "--task takes a Python file and a class, such as my_task.py:MyTask")
    classes = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    tasks = {k: v for k, v in classes.items() if not _lacks(v)}
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if name in tasks:
        return tasks[name]
    if name in classes:
        raise ConfigError(f"{name} of {path} lacks {_lacks(classes[name])}; derive it from codechat.tasks.RowsTask")
    problem = f"no class {name!r}{nearest(name, tasks)}" if name else f"{len(tasks)} tasks"
    raise ConfigError(f"{path} has {problem}; required: FILE.py:CLASS with one of {', '.join(tasks) or 'its tasks'}")


def require_task(task: Any) -> Task:
    """The task; a class is instantiated. ConfigError where it lacks a member."""
    task = task() if isinstance(task, type) else task
    if lacks := _lacks(task):
        raise ConfigError(f"{type(task).__name__} lacks {lacks}; give a task, its name, or FILE.py:CLASS")
    return task


def _lacks(task: Any) -> str:
    return ", ".join(member for member in MEMBERS if not hasattr(task, member))


def is_custom(task: Task) -> bool:
    """True for a task that this package does not define."""
    return not type(task).__module__.startswith("codechat.")
