"""Tasks of your own: rows and reward functions, in a Python file that --task names or as an object in a notebook.

    from codechat.tasks import RowsTask

    def exact(completion, problem):
        return float(completion.strip() == problem.gold)

    def short(completion, problem):
        return float(len(completion) <= 20)

    class Capitals(RowsTask):
        rows = "capitals.jsonl"               # {"prompt", "gold"} a line; or a list of such rows
        rewards = {exact: 1.0, short: 0.0}    # weight 0: logged, not trained

    codechat grpo --task capitals.py:Capitals --init-from my-sft

A reward function gets the completion's text and the problem. It returns a number in [0, 1], or a mapping of numbers in [0, 1], of which the mean
counts and each is logged. The reward is the weighted mean of the functions. `codechat new task NAME` writes such a file, its test and its rows.

A task may also be any class with the methods of `tasks.base.Task`. The file runs with your rights, like any script that you start.
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
from codechat.data.synthetic import SPLITS, split_of, spread
from codechat.tasks.base import Message, Problem, Score, Task, check_split, shuffled
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
            got = {function.__name__: weight for function, weight in self.rewards.items()}
            raise ConfigError(
                f"task {self.name} has the rewards {got}; required: functions with weights of 0 or more, not all 0"
            )
        self._problems = _problems(self, self._source(source))
        self._names: dict[Reward, tuple[str, ...]] = {}

    def _source(self, source: str | None) -> Iterable[Mapping[str, Any]]:
        given = source if source is not None else self.rows
        if not isinstance(given, (str, Path)):
            return given
        beside = Path(inspect.getfile(type(self))).parent if source is None else Path()
        return local_rows(beside / given)

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        check_split(split)
        found = [problem for problem in self._problems if problem.split == split]
        if not found:
            counts = {s: sum(p.split == s for p in self._problems) for s in SPLITS}
            raise DataError(
                f"task {self.name} has no row in split {split!r} ({counts}); give 10 rows or more, or set their split"
            )
        return shuffled(found, limit, seed)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        """The reference solution."""
        gold = problem.meta.get("reference", problem.gold)
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)

    def correct(self, completion: str, problem: Problem, reward: float) -> bool:
        return reward == self.max_reward

    def score(self, problem: Problem, completion: str) -> Score:
        """The weighted mean of the rewards. What a reward function does wrong gives tier "error" and 0."""
        terms: dict[str, float] = {}
        reward = total = 0.0
        try:
            for function, weight in self.rewards.items():
                value, named = _value(function, completion, problem)
                terms |= self._complete(function, named, problem)
                reward, total = reward + weight * value, total + weight
            reward /= total
            correct = bool(self.correct(completion, problem, reward))
        except Exception as error:  # the functions are the user's and may raise anything
            what = f"{type(error).__name__}: {error}"
            names = [n for f in self.rewards for n in self._names.get(f, (f.__name__,))]
            return Score(0.0, "error", {"error": what[:300]}, False, dict.fromkeys(names, 0.0))
        tier = "none" if reward == 0 else "full" if reward == self.max_reward else "some"
        return Score(reward, tier, {}, correct, terms)

    def _complete(self, function: Reward, named: dict[str, float], problem: Problem) -> dict[str, float]:
        """The terms, checked to have the names that they have for a reference solution: every score of a task has the same."""
        if function not in self._names:
            self._names[function] = tuple(_value(function, self.gold(problem), problem)[1])
        if tuple(named) != self._names[function]:
            raise ValueError(
                f"{function.__name__} returned {list(named)}; a reference solution gives {list(self._names[function])}"
            )
        return named


def _value(function: Reward, completion: str, problem: Problem) -> tuple[float, dict[str, float]]:
    """(what counts, terms to log) of one reward function. ValueError for what is no number in [0, 1]."""
    found, name = function(completion, problem), function.__name__
    parts = {f"{name}_{k}": v for k, v in found.items()} if isinstance(found, Mapping) else {name: found}
    for key, value in parts.items():
        if not isinstance(value, (bool, int, float)) or not 0 <= value <= 1:
            raise ValueError(f"{key} is {value!r}; a reward is a number from 0 to 1")
    return sum(map(float, parts.values())) / max(len(parts), 1), {key: float(value) for key, value in parts.items()}


def _problems(task: RowsTask, rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    made, seen = [], set[str]()
    for number, row in enumerate(rows, 1):
        prompt, given = row.get("prompt"), row.get("split")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if (
            not isinstance(messages, list)
            or not messages
            or "gold" not in row
            or given not in (None, *SPLITS, "test_hard")
        ):
            raise DataError(
                f"task {task.name}, row {number} is {str(dict(row))[:80]}; required: prompt and gold, split one of {', '.join(SPLITS)}"
            )
        key = digest(json.dumps(messages))
        if key not in seen:  # a repeated prompt weighs no more than another
            seen.add(key)
            made.append({"row": row, "key": key, "messages": messages, "meta": {"split": given or split_of(key)}})
    parts = {} if any("split" in each["row"] for each in made) else spread(made, lambda each: each["key"])
    if not parts:
        parts = {split: [m for m in made if m["meta"]["split"] == split] for split in (*SPLITS, "test_hard")}
    own = ("prompt", "gold", "split")
    return [
        Problem(
            f"{task.name}-{m['key'][:12]}",
            m["messages"],
            m["row"]["gold"],
            split,
            {k: v for k, v in m["row"].items() if k not in own},
        )
        for split, found in parts.items()
        for m in found
    ]


# ---------------------------------------------------------------- files and objects


def file_class(path: str, name: str | None) -> type:
    """The task class of a Python file; without a name the only one. MissingFile, DataError (the file fails) or ConfigError."""
    module = run_file(Path(path), "task", "--task takes a Python file and a class, such as my_task.py:MyTask")
    own = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    found = {k: v for k, v in own.items() if all(hasattr(v, member) for member in MEMBERS)}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    if name in own:
        lacks = ", ".join(m for m in MEMBERS if not hasattr(own[name], m))
        raise ConfigError(
            f"{name} of {path} is no task: it lacks {lacks}; derive it from codechat.tasks.RowsTask or add them"
        )
    wrong = f"no class {name!r}{nearest(name, found)}" if name else f"{len(found)} tasks"
    raise ConfigError(
        f"{path} has {wrong}; required: FILE.py:CLASS with one of {', '.join(found) or 'its classes (there is no task)'}"
    )


def require_task(task: Any) -> Task:
    """The task, made where a class was given. ConfigError where it lacks a member."""
    task = task() if isinstance(task, type) else task
    if lacks := [member for member in MEMBERS if not hasattr(task, member)]:
        raise ConfigError(
            f"{type(task).__name__} is no task: it lacks {', '.join(lacks)}; give a task, its name, or FILE.py:CLASS"
        )
    return task


def is_own(task: Task) -> bool:
    """True for a task that this package does not define: the one whose rewards the red-team check tries."""
    return not type(task).__module__.startswith("codechat.")
