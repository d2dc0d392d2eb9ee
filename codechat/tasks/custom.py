"""Custom tasks: rows and reward functions, in a Python file given to --task, or as an object in a notebook.

    class Capitals(RowsTask):
        rows = "capitals.jsonl"               # {"prompt", "gold"} a line; or a list of such rows
        rewards = {exact: 1.0, short: 0.0}    # functions of (completion, problem); weight 0: logged, not trained

A reward function returns a number in [0, 1], or a mapping of such numbers: each is logged, and the mean counts. TRL's form
(prompts, completions, **columns) -> list of numbers works too. Any class with the methods of `tasks.base.Task` is a task.

    codechat new task capitals                 capitals.py, test_capitals.py and capitals.jsonl in this folder, to start from
    codechat grpo --task capitals.py:Capitals --init-from nano/sft --run-name capitals
"""

import inspect
import json
import keyword
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any, ClassVar, Literal

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError, nearest
from codechat.data.sources import digest, local_rows
from codechat.data.synthetic import split_of, spread
from codechat.tasks.base import SPLITS, BaseTask, Problem, Score, Task
from codechat.text.tool_functions import run_file

Row = Mapping[str, Any]
MEMBERS = ("name", "tiers", "max_reward", "problems", "prompt", "score", "gold")


class RowsTask(BaseTask):
    """A task of rows {"prompt" (text or messages), "gold", "split"?, "reference"?, ...} and reward functions with weights.

    rows: a list, or a .jsonl, .json or .parquet file beside the class's own file; `source` (--data-dir) replaces it. Without "split" the hash of the
    prompt decides. "reference" is a completion that must earn the full reward; without it that is the gold. Other fields are the problem's `meta`.
    A completion is correct where the reward is full; override `correct` for another rule."""

    name: ClassVar[str] = ""
    tiers = ("none", "error", "some", "full")  # error: a reward function failed; its message is in Score.parts
    rows: Sequence[Row] | str = ()
    rewards: ClassVar[Mapping[Callable[..., Any], float] | Sequence[Callable[..., Any]]] = {}  # in a list all weigh 1

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name") or cls.__name__.lower()

    def __init__(self, source: str | None = None) -> None:
        rewards = self.rewards if isinstance(self.rewards, Mapping) else dict.fromkeys(self.rewards, 1.0)
        weights = list(rewards.values())
        if not weights or not all(0 <= w < math.inf for w in weights) or sum(weights) == 0:
            raise ConfigError(f"task {self.name} has the reward weights {weights}; required: 0 or more, not all 0")
        rows: Any = source if source is not None else self.rows
        if isinstance(rows, str | Path):
            beside = Path(inspect.getfile(type(self))).parent if source is None else Path()
            rows = local_rows(beside / rows)
        self._problems, self._rows = _problems(self.name, rows)
        self._rewards = dict(zip(_names(rewards), rewards.items()))  # name -> (function, weight)
        self._terms: list[str] = []  # names of the terms of a reference solution, which those of every score must be
        self._shown = False

    def read(self, split: str) -> list[Problem]:
        problems = [problem for problem in self._problems if problem.split == split]
        if not problems:
            raise DataError(f"task {self.name} has no row in split {split!r}; give 10 rows or more, or set their split")
        return problems

    def gold(self, problem: Problem) -> str:
        """The reference solution."""
        gold = problem.meta.get("reference", problem.gold)
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)

    def correct(self, completion: str, problem: Problem, reward: float) -> bool:
        return reward == self.max_reward

    def score(self, problem: Problem, completion: str) -> Score:
        """The weighted mean of the rewards. Where a reward function fails: tier "error" and 0; the first failure is printed with its row."""
        try:
            self._terms = self._terms or list(self._rewarded(self.gold(problem), problem)[0])
            terms, reward = self._rewarded(completion, problem)
            if list(terms) != self._terms:
                raise ValueError(f"the rewards are {list(terms)}; of a reference solution {self._terms}")
            correct = bool(self.correct(completion, problem, reward))
        except Exception as error:  # the functions are the user's and may raise anything
            message = f"{type(error).__name__}: {error}"[:300]
            if not self._shown:
                self._shown = True
                row = f"row {self._rows.get(problem.id, ('?',))[0]} ({str(problem.messages[-1]['content'])[:60]!r})"
                print(f"task {self.name}, {row}, completion {completion[:60]!r}: {message}", file=sys.stderr)
            return Score(0.0, "error", {"error": message}, False, dict.fromkeys(self._terms or self._rewards, 0.0))
        tier = "none" if reward == 0 else "full" if reward == self.max_reward else "some"
        return Score(reward, tier, {}, correct, terms)

    def _rewarded(self, completion: str, problem: Problem) -> tuple[dict[str, float], float]:
        """(the terms of all reward functions, their weighted mean)."""
        terms: dict[str, float] = {}
        total = 0.0
        for name, (function, weight) in self._rewards.items():
            trl = "completions" in _parameters(function)
            value = self._value_of_batch(name, function, completion, problem) if trl else function(completion, problem)
            parts = {f"{name}_{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
            parts = {key: _number(key, part) for key, part in parts.items()}
            terms |= parts
            total += weight * sum(parts.values()) / max(len(parts), 1)
        return terms, total / sum(weight for _, weight in self._rewards.values())

    def _value_of_batch(self, name: str, function: Callable[..., Any], completion: str, problem: Problem) -> Any:
        """The value of a function of lists, of one row each. Where the row's prompt is messages, the completion is too. None counts as 0."""
        _, row = self._rows.get(problem.id, (0, {"prompt": problem.messages, "gold": problem.gold, **problem.meta}))
        answer = completion if isinstance(row["prompt"], str) else [{"role": "assistant", "content": completion}]
        given = {"completions": [answer]} | {"prompts" if k == "prompt" else k: [v] for k, v in row.items()}
        parameters, bound = _parameters(function), getattr(function, "keywords", {})
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        values = list(function(**{k: v for k, v in given.items() if k not in bound and (any_name or k in parameters)}))
        if len(values) != 1:
            raise ValueError(f"{name} returned {len(values)} rewards for 1 completion")
        return 0.0 if values[0] is None else values[0]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # written in C
        return {}


def _names(functions: Iterable[Callable[..., Any]]) -> Iterator[str]:
    """A name for each reward function; one that is used twice gets a number."""
    used = Counter[str]()
    for function in functions:
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
        used[name] += 1
        yield f"{name}_{used[name]}" if used[name] > 1 else name


def _number(name: str, value: Any) -> float:
    """A reward as a float, also of numpy, torch or fractions. ValueError unless it is in [0, 1]."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"{name} is {value!r}; a reward is a number from 0 to 1")
    return number


def _problems(task: str, rows: Iterable[Row]) -> tuple[list[Problem], dict[str, tuple[int, Row]]]:
    """The problems of the rows, each prompt once, and {problem id: (number, row)}."""
    problems: dict[str, Problem] = {}  # by the hash of the prompt
    origin: dict[str, tuple[int, Row]] = {}
    for number, row in enumerate(rows, 1):
        prompt = row.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        known = "gold" in row and row.get("split") in (None, *SPLITS)
        if not known or not isinstance(messages, list) or not messages:
            needed = f"required: prompt, gold, split one of {SPLITS} or none"
            raise DataError(f"task {task}, row {number} is {str(dict(row))[:80]}; {needed}")
        id, split = digest(json.dumps(messages)), row.get("split")
        meta = {name: value for name, value in row.items() if name not in ("prompt", "gold", "split")}
        problems.setdefault(id, Problem(f"{task}-{id[:12]}", messages, row["gold"], split or split_of(id), meta))
        origin.setdefault(f"{task}-{id[:12]}", (number, row))
    if not any("split" in row for _, row in origin.values()):
        kept = spread([{"id": id, "meta": {"split": p.split}} for id, p in problems.items()], lambda row: row["id"])
        problems |= {row["id"]: replace(problems[row["id"]], split=s) for s, part in kept.items() for row in part}
    return list(problems.values()), origin


# ---------------------------------------------------------------- files and objects


def file_class(path: str, name: str | None) -> type:
    """The task class of a Python file; without a name the only one. MissingFile, DataError (the file fails) or ConfigError."""
    module = run_file(Path(path), "task", "--task takes a Python file and a class, such as my_task.py:MyTask")
    classes = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    tasks = {k: v for k, v in classes.items() if not _lacks(v)}
    if name in tasks or (name is None and len(tasks) == 1):
        return tasks[name or next(iter(tasks))]
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


# ---------------------------------------------------------------- codechat new task

TEMPLATE = Path(__file__).with_name("new_task")  # links to examples/my_task.py, its test and its rows
FILES = ("my_task.py", "test_my_task.py", "my_task.jsonl")


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """What to write, and where."""

    what: Literal["task"] = opt(config.REQUIRED, "what to write", positional=True)
    name: str = opt(config.REQUIRED, "name of the files and the class", positional=True)
    out: Path = opt(Path("."), "folder to write into")


def write_new(cfg: NewConfig) -> None:
    """Write the three files. ConfigError for a name that Python cannot import, and for a file that exists."""
    name, out = cfg.name, cfg.out
    cls = "".join(part.capitalize() for part in name.split("_"))
    taken = keyword.iskeyword(name) or keyword.iskeyword(cls) or name in sys.stdlib_module_names
    if taken or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or util.find_spec(name):
        raise ConfigError(f"the name {name!r}; required: small letters, digits, _, and no module or keyword of Python")
    paths = {
        out / file.replace("my_task", name): (TEMPLATE / f"{file}.txt").read_text(encoding="utf-8") for file in FILES
    }
    if existing := [path for path in paths if path.exists()]:
        raise ConfigError(f"{existing[0]} exists; choose another name or --out")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        write_atomic(path, text.replace("my_task", name).replace("MyTask", cls))
    print(f"wrote {', '.join(path.name for path in paths)} in {out}; try: python -m pytest {out / f'test_{name}.py'}")
    print(f"then: codechat diagnose --ckpt RUN --task {out / name}.py:{cls}")
