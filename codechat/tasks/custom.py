"""Custom tasks: rows and reward functions, in a Python file given to --task, or as an object in a notebook.

    class Capitals(RowsTask):
        rows = "capitals.jsonl"               # {"prompt", "gold"} a line; or a list of such rows
        rewards = {exact: 1.0, short: 0.0}    # functions of (completion, problem); weight 0: logged, not trained

A reward function returns a number in [0, 1], or a mapping of such numbers: each is logged, and the mean counts. TRL's form
(prompts, completions, **columns) -> list of numbers works too. Any class with the methods of `tasks.base.Task` is a task.

    codechat new task capitals                 capitals.py, test_capitals.py and capitals.jsonl in this folder, to start from
    codechat grpo --task capitals.py:Capitals --init-from nano/sft --run-name capitals
    codechat new package capitals              the same in capitals/, with a pyproject.toml
    pip install ./capitals                     then: codechat grpo --task capitals
"""

import inspect
import json
import keyword
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any, ClassVar, Literal

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError
from codechat.data.sources import digest, hash_rows, local_rows
from codechat.data.splits import split_of, spread
from codechat.tasks.base import SPLITS, BaseTask, Problem, Score

Row = Mapping[str, Any]


class RowsTask(BaseTask):
    """A task of rows {"prompt" (text or messages), "gold", "split"?, "reference"?, ...} and reward functions with weights.

    rows: a list, or a .jsonl, .json or .parquet file beside the class's own file; `source` (--data-dir) replaces it. Without "split" the hash of the
    prompt decides. "reference" is a completion that must earn the full reward; without it that is the gold. Other fields are the problem's `meta`.
    A completion is correct where the reward is full."""

    name: ClassVar[str] = ""
    tiers = ("none", "error", "some", "full")  # error: a reward function failed; its message is in Score.parts
    rows: Any = ()  # as given; of an object the problems
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
        self._rows: dict[str, Row] = {}  # by the id of the problem
        self.rows = self._problems(rows)
        self._rewards: dict[str, tuple[Callable[..., Any], float]] = {}
        for function, weight in rewards.items():
            inner = getattr(function, "func", function)  # of a partial
            name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
            self._rewards[f"{name}_{len(self._rewards) + 1}" if name in self._rewards else name] = function, weight
        self._terms: list[str] = []  # names of the terms of a reference solution, which those of every score must be
        self._shown = False

    def _problems(self, rows: Iterable[Row]) -> list[Problem]:
        """The problems of the rows, each row once. Rows with one prompt and another answer, or other fields, are problems of one split, unless they
        name others. What is repeated, and prompts in several splits, are counted on stderr."""
        problems: dict[str, Problem] = {}  # by id
        same: dict[str, list[str]] = {}  # hash of a prompt -> ids of the problems with it
        known: set[str] = set()
        repeated = 0
        for number, row in enumerate(rows, 1):
            prompt, split = row.get("prompt"), row.get("split")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if "gold" not in row or split not in (None, *SPLITS) or not isinstance(messages, list) or not messages:
                needed = f"required: prompt, gold, split one of {SPLITS} or none"
                raise DataError(f"task {self.name}, row {number} is {str(dict(row))[:80]}; {needed}")
            hashed = digest(json.dumps(messages))
            meta = {name: value for name, value in row.items() if name not in ("prompt", "gold", "split")}
            content = hash_rows([messages, row["gold"], meta])
            if content in known:
                repeated += 1
                continue
            known.add(content)
            others = same.setdefault(hashed, [])
            id = f"{self.name}-{hashed[:12]}" + (f"-{len(others) + 1}" if others else "")
            others.append(id)
            problems[id] = Problem(id, messages, row["gold"], split or split_of(hashed), meta)
            self._rows[id] = row
        if not any("split" in row for row in self._rows.values()):
            prompts = {id: hashed for hashed, ids in same.items() for id in ids}
            kept = spread(
                [{"id": id, "meta": {"split": p.split}} for id, p in problems.items()], lambda r: prompts[r["id"]]
            )
            problems |= {row["id"]: replace(problems[row["id"]], split=s) for s, part in kept.items() for row in part}
        spread_over = sum(len({problems[id].split for id in ids}) > 1 for ids in same.values())
        for count, what in (
            (repeated, "rows repeat another one and are left out"),
            (spread_over, "prompts are in several splits"),
        ):
            if count:
                print(f"task {self.name}: {count} {what}", file=sys.stderr)
        return list(problems.values())

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        problems = super().problems(split, limit, seed)
        if not problems:
            raise DataError(f"task {self.name} has no row in split {split!r}; give 10 rows or more, or set their split")
        return problems

    def gold(self, problem: Problem) -> str:
        """The reference solution."""
        gold = problem.meta.get("reference", problem.gold)
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)

    def score(self, problem: Problem, completion: str) -> Score:
        """The weighted mean of the rewards. Where a reward function fails: tier "error" and 0; the first failure is printed."""
        try:
            self._terms = self._terms or list(self._rewarded(self.gold(problem), problem)[0])
            terms, reward = self._rewarded(completion, problem)
            if list(terms) != self._terms:
                raise ValueError(f"the rewards are {list(terms)}; of a reference solution {self._terms}")
        except Exception as error:  # the functions are the user's and may raise anything
            message = f"{type(error).__name__}: {error}"[:300]
            if not self._shown:
                asked = str(problem.messages[-1]["content"])[:60]
                print(f"task {self.name}, row {asked!r}, completion {completion[:60]!r}: {message}", file=sys.stderr)
            self._shown = True
            return Score(0.0, "error", {"error": message}, False, dict.fromkeys(self._terms or self._rewards, 0.0))
        tier = "none" if reward == 0 else "full" if reward == self.max_reward else "some"
        return Score(reward, tier, {}, tier == "full", terms)

    def _rewarded(self, completion: str, problem: Problem) -> tuple[dict[str, float], float]:
        """(the terms of all reward functions, their weighted mean). ValueError for what is no number from 0 to 1."""
        terms: dict[str, float] = {}
        total = 0.0
        for name, (function, weight) in self._rewards.items():
            parameters = inspect.signature(function).parameters
            trl = "completions" in parameters
            value = self._of_batch(function, parameters, completion, problem) if trl else function(completion, problem)
            given = {f"{name}_{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
            parts = {key: math.nan if isinstance(part, str) else float(part) for key, part in given.items()}
            if wrong := [key for key, part in parts.items() if not 0 <= part <= 1]:
                raise ValueError(f"{wrong[0]} is {given[wrong[0]]!r}; a reward is a number from 0 to 1")
            terms |= parts
            total += weight * sum(parts.values()) / max(len(parts), 1)
        return terms, total / sum(weight for _, weight in self._rewards.values())

    def _of_batch(
        self, function: Callable[..., Any], parameters: Mapping[str, Any], completion: str, problem: Problem
    ) -> Any:
        """The value of a function of lists, of one row each. Where the row's prompt is messages, the completion is too. None counts as 0."""
        row = self._rows[problem.id]
        answer = completion if isinstance(row["prompt"], str) else [{"role": "assistant", "content": completion}]
        given = {"completions": [answer]} | {"prompts" if k == "prompt" else k: [v] for k, v in row.items()}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = {k: v for k, v in given.items() if k in parameters}
        bound = getattr(function, "keywords", {})  # of a partial
        (value,) = function(**{k: v for k, v in given.items() if k not in bound})
        return 0.0 if value is None else value


TEMPLATE = Path(__file__).with_name("new_task")  # links to examples/my_task.py, its test and its rows


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """What to write, and where."""

    what: Literal["task", "package"] = opt(config.REQUIRED, "a task, or a folder that pip installs", positional=True)
    name: str = opt(config.REQUIRED, "name of the files and the class", positional=True)
    out: Path = opt(Path("."), "folder to write into")


def write_new(cfg: NewConfig) -> None:
    """Write the three files, of a package pyproject.toml too. ConfigError for a name that Python cannot import, and for a file that exists."""
    packed, name = cfg.what == "package", cfg.name
    out = cfg.out / name if packed else cfg.out
    cls = "".join(part.capitalize() for part in name.split("_"))
    if {name, cls} & {*keyword.kwlist} or not re.fullmatch("[a-z][a-z0-9_]*", name) or util.find_spec(name):
        raise ConfigError(f"the name {name!r}; required: small letters, digits, _, and no module or keyword of Python")
    files = [file for file in TEMPLATE.iterdir() if packed or file.stem != "pyproject.toml"]
    paths = {out / file.stem.replace("my_task", name): file.read_text(encoding="utf-8") for file in files}
    if existing := [path for path in paths if path.exists()]:
        raise ConfigError(f"{existing[0]} exists; choose another name or --out")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        write_atomic(path, text.replace("my_task", name).replace("MyTask", cls))
    print(f"wrote {', '.join(path.name for path in paths)} in {out}; try: python -m pytest {out / f'test_{name}.py'}")
    how = f"pip install {cfg.out}/{name}; " if packed else ""  # with a slash, or pip takes it for a name in its index
    print(f"then: {how}codechat diagnose --ckpt RUN --task {name if packed else f'{out / name}.py:{cls}'}")
