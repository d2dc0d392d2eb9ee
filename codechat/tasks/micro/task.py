"""Problems and conversations from the families, and their task."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.data.synthetic import row as conversation
from codechat.tasks.base import Problem, check_levels, check_split
from codechat.tasks.coding import sources
from codechat.tasks.coding.task import CodingTask
from codechat.tasks.micro.family import LEVELS, NAMES, Family, names_for
from codechat.tasks.micro.lists import LISTS
from codechat.tasks.micro.numbers import NUMBERS
from codechat.tasks.micro.texts import TEXTS

FAMILIES = (*NUMBERS, *TEXTS, *LISTS)
DEFAULT_LIMIT = 500
TESTS = 6
CANDIDATES = 60  # calls from which the tests of a problem are chosen
DOMAIN = "solutions"


def problems(split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Problem]:
    """n different problems, the families in turn. ConfigError for an unknown split or level."""
    check_split(split)
    return _draw(split, split, n, seed, levels)


def dialogues(split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> Iterator[dict[str, Any]]:
    """Conversations of one worked solution each. In "train" they use parameters that no problem has; in select and
    test, those of the problems."""
    part = "sft" if split == "train" else split
    for problem in _draw(part, split, n, seed, levels):
        made = conversation(problem.messages[0]["content"], problem.gold["code"], DOMAIN, **problem.meta)
        yield made | {"meta": made["meta"] | {"split": split, "asked": "code"}}


def _draw(part: str, split: str, n: int, seed: int, levels: Sequence[int]) -> list[Problem]:
    check_levels(levels, LEVELS)
    rng = random.Random(f"micro {part} {seed}")
    families = [f for f in FAMILIES if f.held_out == (part == "test_hard") and f.level in levels]
    if not families:
        raise ConfigError(f"no family of levels {sorted(levels)} is in split {split}; add a level")
    settings = {f.name: f.settings(part) for f in families}
    weight = {level: levels.count(level) for level in set(levels)}
    made: dict[str, Problem] = {}
    while True:  # ends: examples differ, so no family runs out of problems
        for family in rng.sample(families, len(families)):
            for _ in range(weight[family.level]):
                if len(made) == n:
                    return list(made.values())
                problem = make(family, rng.choice(settings[family.name]), split, rng)
                made.setdefault(problem.id, problem)


def make(family: Family, setting: Mapping[str, Any], split: str, rng: random.Random) -> Problem:
    """A problem of a family, with sampled names, wording, example and hidden tests."""
    name = family.name if rng.random() < 0.4 else rng.choice(NAMES)
    arguments = names_for(family.kinds, rng)
    code = family.code(name, arguments, setting)
    example, *calls = _calls(family, setting, name, arguments, rng)
    says = family.sentence(rng.choice(family.says), arguments, setting)
    stub = f'def {name}({", ".join(arguments)}):\n    """{says} Example: {example}"""'
    gold = {"code": code, "tests": [f"assert {call}" for call in calls], "setup": "", "names": [name], "stub": ""}
    meta = {"family": family.name, "level": family.level, "setting": dict(setting)}
    prompt = f"Write this Python function.\n\n{stub}"
    return Problem(
        f"micro-{family.name}-{digest(prompt)[:10]}", [{"role": "user", "content": prompt}], gold, split, meta
    )


def _calls(
    family: Family, setting: Mapping[str, Any], name: str, arguments: Sequence[str], rng: random.Random
) -> list[str]:
    """The example and TESTS other calls, as `f(1) == 2`. Tests are chosen so that nearly correct programs fail: a
    parameter off by one, the argument returned unchanged, a constant answer."""
    solve, *rivals = (_function(family.code(name, arguments, s), name) for s in (setting, *family.neighbours(setting)))
    calls: dict[str, tuple[str, set[int]]] = {}
    for _ in range(CANDIDATES):
        given = family.inputs(rng, setting)
        words, right = ", ".join(map(repr, given)), _answer(solve, given)
        wrong = {i for i, rival in enumerate(rivals) if _answer(rival, given) != right}
        calls[f"{name}({words}) == {right}"] = right, wrong | ({-1} if right != repr(given[0]) else set())
    example, *rest = rng.sample(list(calls), len(calls))
    picked: list[str] = []
    answers: set[str] = set()
    caught: set[int] = set()
    while len(picked) < TESTS:
        best = max(rest, key=lambda call: len(calls[call][1] - caught) + (calls[call][0] not in answers))
        rest.remove(best)
        picked.append(best)
        answers.add(calls[best][0])
        caught |= calls[best][1]
    rng.shuffle(picked)
    return [example, *picked]


def _function(code: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(code, scope)  # our own reference solution
    return scope[name]


def _answer(function: Callable[..., Any], given: Sequence[Any]) -> str:
    """The result of a call as text, or the name of the error: a neighbouring setting may divide by zero."""
    try:
        return repr(function(*given))
    except (ZeroDivisionError, IndexError) as error:
        return type(error).__name__


class MicroTask(CodingTask):
    """source: "micro" generates problems, any number of them; a path reads micro.SPLIT.jsonl. levels: of the problems;
    a repeated level is sampled more often."""

    def __init__(
        self,
        source: str = "micro",
        levels: Sequence[int] = LEVELS,
        reward: str = "tiered",
        timeout_s: float = 3.0,
        isolation: str = "auto",
    ) -> None:
        self.sampled, self.levels = str(source) == "micro", tuple(levels)
        rows = [] if self.sampled else sources.read("micro", str(source))
        super().__init__("micro", rows, reward, timeout_s, 0, isolation)

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems. Without a limit: DEFAULT_LIMIT generated ones, or all of a file."""
        if self.sampled:
            return problems(split, DEFAULT_LIMIT if limit is None else limit, seed, self.levels)
        return [p for p in super().problems(split, None, seed) if p.meta.get("level", 1) in self.levels][:limit]
