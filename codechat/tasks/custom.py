"""Custom tasks: rows and reward functions, in a Python file given to --task, or as an object in
a notebook.

    class Capitals(RowsTask):
        rows = "capitals.jsonl"               # {"prompt", "gold"} a line; or a list of such rows
        rewards = {exact: 1.0, short: 0.0}    # functions of (completion, problem); weight 0: logged, not trained

A reward function returns a number in [0, 1], or a mapping of such numbers: each is logged, and
the mean counts. TRL's form (prompts, completions, **columns) -> list of numbers works too. Any
class with the methods of `tasks.base.Task` is a task.

    codechat new task capitals                 a start: capitals.py, test_capitals.py and capitals.jsonl in this folder
    codechat grpo --task capitals.py:Capitals --init-from released/nano --run-name capitals
    codechat new package capitals              the same in capitals/, with a pyproject.toml
    pip install ./capitals                     then: codechat grpo --task capitals"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from codechat.core.errors import ConfigError, DataError
from codechat.data.sources import digest, hash_rows, local_rows
from codechat.data.splits import split_of, spread
from codechat.tasks.base import SPLITS, BaseTask, Problem, Score

Row = Mapping[str, Any]
Function = Callable[..., Any]  # a reward function


class Terms(NamedTuple):
    """The values of all reward functions by name, and their weighted mean."""

    values: dict[str, float]
    mean: float


class Reward(NamedTuple):
    """A reward function, the name of its term, and its weight in the mean."""

    name: str
    function: Function
    weight: float


class OwnRows(BaseTask):
    """What tasks of the user's rows share: rows {"prompt" (text or messages), "split"?, ...} as
    problems. Without "split" the hash of the prompt decides; fields that hold no answer are the
    problem's `meta`."""

    answer_fields: ClassVar[tuple[str, ...]] = ("gold",)
    rows: Any = ()  # as given; of an object the problems

    def __init__(self, source: str | None = None) -> None:
        self._rows: dict[str, Row] = {}  # by the id of the problem
        self.rows = self._problems(self._read_rows(source))

    def answer_of(self, row: Row) -> Any:
        """What is right, as JSON data."""
        return row["gold"]

    def lacks(self, row: Row) -> str:
        """What a row lacks beside a prompt, and what is expected; empty for nothing."""
        return "" if "gold" in row else "expected prompt and gold"

    def _read_rows(self, source: str | None) -> Iterable[Row]:
        """The rows of the source, or those of the class, whose file is found from any working
        directory."""
        if source is not None:
            return local_rows(Path(source))
        if isinstance(self.rows, str | Path):
            return local_rows(Path(inspect.getfile(type(self))).parent / self.rows)
        return self.rows

    def _problems(self, rows: Iterable[Row]) -> list[Problem]:
        """The problems of the rows, each row once. Rows with the same prompt are problems of
        one split, unless they name others. Repeated rows, and prompts in several splits, are
        counted on stderr."""
        problems: dict[str, Problem] = {}  # by id
        same: dict[str, list[str]] = {}  # hash of a prompt -> ids of the problems with it
        known: set[str] = set()
        repeated = 0
        for number, row in enumerate(rows, 1):
            messages = self._messages_of(row, number)
            hashed = digest(json.dumps(messages))
            meta = {
                name: value
                for name, value in row.items()
                if name not in ("prompt", "split", *self.answer_fields)
            }
            content = hash_rows([messages, self.answer_of(row), meta])
            if content in known:
                repeated += 1
                continue
            known.add(content)
            others = same.setdefault(hashed, [])
            id = f"{self.name}-{hashed[:12]}"
            if others:
                id += f"-{len(others) + 1}"
            others.append(id)
            split = row.get("split") or split_of(hashed)
            problems[id] = Problem(id, messages, self.answer_of(row), split, meta)
            self._rows[id] = row
        # A small file may leave a split empty by chance; splits that the rows name are the
        # user's choice.
        if not any("split" in row for row in self._rows.values()):
            problems = _spread(problems, same)
        self._say(repeated, "rows repeat another one and are left out")
        splits = [{problems[id].split for id in ids} for ids in same.values()]  # of each prompt
        self._say(sum(len(several) > 1 for several in splits), "prompts are in several splits")
        return list(problems.values())

    def _messages_of(self, row: Row, number: int) -> list[dict[str, str]]:
        """The prompt as messages. DataError for a row without what every row needs."""
        messages = row.get("prompt")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        listed: list[dict[str, str]] = messages if isinstance(messages, list) else []
        known_split = row.get("split") in (None, *SPLITS)
        lacks = self.lacks(row)
        if not lacks and not (known_split and listed):
            lacks = f"expected prompt, split one of {SPLITS} or none"
        if not lacks and not all(map(_is_message, listed)):
            listed, lacks = _read_messages(listed)
        if not lacks and listed[-1]["role"] == "assistant":
            lacks = "its prompt ends with an answer; expected a request or a result at its end"
        if lacks:
            raise DataError(f"task {self.name}, row {number} is {str(dict(row))[:80]}; {lacks}")
        return listed

    def _say(self, count: int, what: str) -> None:
        if count:
            print(f"task {self.name}: {count} {what}", file=sys.stderr)

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        problems = super().problems(split, limit, seed)
        if not problems:
            raise DataError(
                f"task {self.name} has no row in split {split!r}; "
                "give 10 rows or more, or set their split"
            )
        return problems


def _roles() -> tuple[str, ...]:
    """The roles of messages."""
    # imported late: the module loads tokenizers, which no --help needs
    from codechat.text.chat import ROLES

    return ROLES


def _is_message(message: Any) -> bool:
    """Whether it is a message as conversations hold it, whose calls stand in its text."""
    known = isinstance(message, Mapping) and message.get("role") in _roles()
    called = known and (message.get("tool_calls") or message.get("function_call"))
    return known and not called and isinstance(message.get("content"), str)


def _read_messages(messages: list[Any]) -> tuple[list[dict[str, str]], str]:
    """Messages that other projects write, such as OpenAI's `tool_calls` and their results; what
    is wrong with them, empty for nothing."""
    # imported late, as in _roles
    from codechat.data.chat_formats import messages_of

    try:
        read = messages_of({"messages": messages}, "prompt")
    except DataError as error:
        read = str(error)
    if isinstance(read, str):
        return [], f"expected messages with a role and a text, or OpenAI's ({read})"
    return read, ""


class RowsTask(OwnRows):
    """A task of rows {"prompt" (text or messages), "gold", "split"?, "reference"?, ...} and
    weighted reward functions.

    rows: a list, or a .jsonl, .json or .parquet file beside the class's own file; `source`
    (--data-dir) replaces it. Without "split" the hash of the prompt decides. "reference" is a
    completion that must earn the full reward; without it, the gold must. Other fields are the
    problem's `meta`. A completion is correct if its reward is full."""

    name: str = ""
    # error: a reward function failed; its message is in Score.parts
    tiers = (
        "none",
        "error",
        "some",
        "full",
    )
    # function -> weight; in a list all weigh 1
    rewards: ClassVar[Mapping[Function, float] | Sequence[Function]] = {}

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name") or cls.__name__.lower()

    def __init__(self, source: str | None = None) -> None:
        self._rewards = self._named_rewards()
        super().__init__(source)
        # names of the terms of a reference solution; every score must have the same
        self._terms: list[str] = []
        self._shown = False

    def _named_rewards(self) -> list[Reward]:
        """The reward functions under different names. ConfigError for weights without a mean."""
        weighted = (
            self.rewards if isinstance(self.rewards, Mapping) else dict.fromkeys(self.rewards, 1.0)
        )
        weights = list(weighted.values())
        if not weights or not all(0 <= w < math.inf for w in weights) or sum(weights) == 0:
            raise ConfigError(
                f"task {self.name} has the reward weights {weights}; expected 0 or more, not all 0"
            )
        named: list[Reward] = []
        for function, weight in weighted.items():
            inner = getattr(function, "func", function)  # of a partial
            name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
            # two lambdas, or partials of one function, have one name
            if any(name == other.name for other in named):
                name = f"{name}_{len(named) + 1}"
            named.append(Reward(name, function, weight))
        return named

    def gold(self, problem: Problem) -> str:
        """The reference solution."""
        gold = problem.meta.get("reference", problem.gold)
        return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)

    def score(self, problem: Problem, completion: str) -> Score:
        """The weighted mean of the rewards; tier "error" and 0 if a function fails. The first
        failure is printed."""
        try:
            # Logged terms must be the same for all completions, also if a function fails.
            if not self._terms:
                self._terms = list(self._terms_of(self.gold(problem), problem).values)
            terms = self._terms_of(completion, problem)
            if list(terms.values) != self._terms:
                raise ValueError(
                    f"the rewards are {list(terms.values)}; of a reference solution {self._terms}"
                )
        except Exception as error:  # the functions are the user's and may raise anything
            message = f"{type(error).__name__}: {error}"[:300]
            if not self._shown:
                asked = str(problem.messages[-1]["content"])[:60]
                print(
                    f"task {self.name}, row {asked!r}, completion {completion[:60]!r}: {message}",
                    file=sys.stderr,
                )
            self._shown = True
            names = self._terms or [reward.name for reward in self._rewards]
            return Score(
                reward=0.0,
                tier="error",
                parts={"error": message},
                correct=False,
                terms=dict.fromkeys(names, 0.0),
            )
        tier = "some"
        if terms.mean == 0:
            tier = "none"
        elif terms.mean == self.max_reward:
            tier = "full"
        return Score(
            reward=terms.mean,
            tier=tier,
            parts={},
            correct=tier == "full",
            terms=terms.values,
        )

    def _terms_of(self, completion: str, problem: Problem) -> Terms:
        """The values of the reward functions. ValueError for one that is no number from 0 to 1."""
        terms: dict[str, float] = {}
        total = 0.0
        for reward in self._rewards:
            given = self._given(reward, completion, problem)
            parts = {
                key: math.nan if isinstance(part, str) else float(part)
                for key, part in given.items()
            }
            wrong = [key for key, part in parts.items() if not 0 <= part <= 1]
            if wrong:
                raise ValueError(
                    f"{wrong[0]} is {given[wrong[0]]!r}; a reward is a number from 0 to 1"
                )
            terms |= parts
            total += reward.weight * sum(parts.values()) / max(len(parts), 1)
        return Terms(terms, total / sum(reward.weight for reward in self._rewards))

    def _given(self, reward: Reward, completion: str, problem: Problem) -> dict[str, Any]:
        """The values of one reward function by the names of their terms, not yet checked."""
        if "completions" in inspect.signature(reward.function).parameters:
            value = _call_of_batch(reward.function, self._rows[problem.id], completion)
        else:
            value = reward.function(completion, problem)
        if isinstance(value, Mapping):
            return {f"{reward.name}_{key}": part for key, part in value.items()}
        return {reward.name: value}


def _spread(problems: Mapping[str, Problem], same: Mapping[str, list[str]]) -> dict[str, Problem]:
    """The problems, some of them moved into a split that is empty. same: hash of a prompt ->
    ids of its problems."""
    rows = []
    for hashed, ids in same.items():
        for id in ids:
            rows.append({"id": id, "prompt": hashed, "meta": {"split": problems[id].split}})
    moved = dict(problems)
    for split, part in spread(rows, key=lambda row: row["prompt"]).items():
        for row in part:
            moved[row["id"]] = replace(problems[row["id"]], split=split)
    return moved


def _call_of_batch(function: Function, row: Row, completion: str) -> Any:
    """The value of a function of TRL's form for one row, given as lists of one. Where the row's
    prompt is messages, the completion is too. None counts as 0."""
    answer = (
        completion
        if isinstance(row["prompt"], str)
        else [{"role": "assistant", "content": completion}]
    )
    given = {"completions": [answer]}
    given |= {"prompts" if name == "prompt" else name: [value] for name, value in row.items()}
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {name: values for name, values in given.items() if name in parameters}
    bound = getattr(function, "keywords", {})  # of a partial
    (value,) = function(**{name: values for name, values in given.items() if name not in bound})
    return 0.0 if value is None else value
