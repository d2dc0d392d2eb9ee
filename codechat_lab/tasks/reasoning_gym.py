"""The tasks of the package reasoning-gym, about a hundred, with their own scorers.

    pip install 'codechat[reasoning-gym]'
    codechat diagnose --ckpt released/nano --task reasoning_gym:chain_sum --max-new-tokens 16
    codechat grpo --init-from released/nano --task reasoning_gym:chain_sum,max_terms=3,size=1000 --run-name sums

Options beside `size`, `seed` and `level` go to the configuration of the task. An answer is the
text in the last <answer> tags, or the whole text.

A hash of the question decides the split, since neighbouring seeds share nearly all questions:
no question is in two splits, whatever seed and size. Repeated questions count once.

What a scorer gives is checked. One that raises counts 0, tier "error". 0.99 and more is full. NaN
and infinity are no answers: `complex_arithmetic` pays for NaN. A task whose scorer pays the full
reward for any text (`game_of_life_halting`) is refused."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from tqdm import tqdm

from codechat.core.errors import ConfigError, check_choice
from codechat.data.sources import digest, fraction
from codechat.tasks.base import BaseTask, Problem, Score, check_split

FULL = 0.99  # scores from here on are full: some scorers miss 1 by a rounding error
HELD_OUT = 0.1  # share of the questions in select, and in test
GARBAGE = "qzx 7 lorem"  # an answer to no question
PROBED = 8  # problems on which it may not earn the full reward
NO_NUMBER = re.compile(r"[+-]?(?:nan|inf(?:inity)?)(?:[+-].*)?[ij]?", re.IGNORECASE)
SHOWN = 200  # characters of an error
SLOW_S = 5.0  # seconds before a bar shows that questions are being made


class Judged(NamedTuple):
    """A reward from 0 to 1; why there is none."""

    reward: float
    error: str = ""


def installed_factory() -> ModuleType:
    """`reasoning_gym.factory`; ConfigError without the package."""
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ConfigError(
            f"reasoning_gym needs {error.name}; run pip install 'codechat[reasoning-gym]'"
        ) from None
    return factory


class ReasoningGymTask(BaseTask):
    """dataset: its name in reasoning-gym. size: questions drawn, all splits together. level: of
    the task's curriculum; None: the task's default configuration. options: of the
    configuration. ConfigError for an unknown name or option, and without the package."""

    name = "reasoning_gym"
    first_option: ClassVar[str] = "dataset"
    tiers: tuple[str, ...] = ("none", "error", "some", "full")
    splits = ("train", "select", "test")

    def __init__(
        self,
        dataset: str = "",
        source: None = None,
        size: int = 500,
        seed: int = 0,
        level: int | None = None,
        **options: Any,
    ) -> None:
        factory = installed_factory()
        from reasoning_gym import utils

        check_choice("dataset of reasoning_gym", dataset, sorted(factory.DATASETS))
        if source is not None:
            raise ConfigError("reasoning_gym generates its problems; leave out --data-dir")
        _check_whole("size", size, least=1)
        _check_whole("seed", seed)
        if level is not None:
            _check_whole("level", level, least=0)
        self.dataset = dataset
        self.extract = utils.extract_answer
        if level is not None:
            options = _of_level(factory, dataset, level) | options
        try:
            self.made = factory.create_dataset(dataset, size=size, seed=seed, **options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"reasoning_gym:{dataset} does not accept {options} ({error}); see its configuration"
            ) from None
        self.entries: dict[str, Mapping[str, Any]] = {}  # by the id of the problem
        self.told = False

    def read(self, split: str) -> Iterable[Problem]:
        if not self.entries:
            self._generate()
        return (problem for problem in self.rows if problem.split == split)

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        check_split(split, self.splits, f"task {self.name}")
        return super().problems(split, limit, seed)

    def _generate(self) -> None:
        """All problems, each question once. ConfigError where any text earns the full reward."""
        self.rows = []
        # indices from `size` on give further items, no IndexError; some tasks take a minute for one
        asked = f"questions of {self.dataset}"
        for i in tqdm(range(self.made.size), desc=asked, unit="question", delay=SLOW_S):
            try:
                entry = self.made[i]
            except Exception as error:  # the package's code, on options of the user
                reason = f"{type(error).__name__}: {error}"
                raise ConfigError(
                    f"reasoning_gym:{self.dataset} cannot make question {i} ({reason[:SHOWN]}); "
                    "set other options"
                ) from None
            hashed = digest(entry["question"])
            id = f"{self.dataset}-{hashed[:12]}"
            if id in self.entries:
                continue
            self.entries[id] = entry
            messages = [{"role": "user", "content": entry["question"]}]
            split = _split_of(hashed)
            self.rows.append(Problem(id, messages, entry["answer"], split, {"index": i}))
        if any(problem.gold is None for problem in self.rows):
            self.no_references = f"reasoning_gym:{self.dataset} has questions without an answer"
        probed = self.rows[:PROBED]
        if probed and all(self._judge(one, GARBAGE).reward == 1 for one in probed):
            raise ConfigError(
                f"reasoning_gym:{self.dataset} gives the full reward to any text, "
                f"such as {GARBAGE!r}; take another task"
            )

    def gold(self, problem: Problem) -> str:
        return str(problem.gold)

    def score(self, problem: Problem, completion: str) -> Score:
        judged = self._judge(problem, completion)
        if judged.error:
            if not self.told:
                print(f"reasoning_gym:{self.dataset}: {judged.error}", file=sys.stderr)
            self.told = True
            return Score(0.0, "error", {"error": judged.error}, False)
        tier = "some"
        if judged.reward == 0:
            tier = "none"
        elif judged.reward == 1:
            tier = "full"
        return Score(judged.reward, tier, {}, tier == "full")

    def _judge(self, problem: Problem, completion: str) -> Judged:
        """What the dataset's own scorer says."""
        given = self.extract(completion)
        answer = (completion if given is None else given).strip()
        if NO_NUMBER.fullmatch(answer):
            return Judged(0.0)
        try:
            reward = float(self.made.score_answer(answer, self.entries[problem.id]))
        except Exception as error:  # a scorer may raise anything on the text of a model
            got = f"the scorer raised {type(error).__name__}: {error}"
            return Judged(0.0, f"{got} on {answer[:60]!r}"[:SHOWN])
        if not math.isfinite(reward):
            return Judged(0.0, f"the scorer gave {reward} for {answer[:60]!r}")
        if reward >= FULL:
            return Judged(1.0)
        return Judged(max(0.0, reward))


def _check_whole(name: str, value: Any, least: float = -math.inf) -> None:
    if type(value) is not int or value < least:
        wanted = "a whole number"
        if least > -math.inf:
            wanted += f" from {least} on"
        raise ConfigError(f"got {name} {value!r}; expected {wanted}")


def _split_of(hashed: str) -> str:
    """By a hash of the question."""
    at = fraction(hashed)
    if at < HELD_OUT:
        return "test"
    return "select" if at < 2 * HELD_OUT else "train"


def _of_level(factory: Any, dataset: str, level: int) -> dict[str, Any]:
    """The options of a level of the task's curriculum. ConfigError without one."""
    if dataset not in factory.CURRICULA:
        raise ConfigError(f"reasoning_gym:{dataset} has no curriculum; leave out level")
    curriculum = factory.create_curriculum(dataset)
    for step in range(level):
        if not curriculum.increment_global_level():
            raise ConfigError(f"got level {level}; reasoning_gym:{dataset} ends at {step}")
    made = curriculum.generate_configuration()
    # not `asdict`: a configuration may hold others, which the package wants as they are
    names = [one.name for one in dataclasses.fields(made) if one.name not in ("size", "seed")]
    return {name: getattr(made, name) for name in names}
