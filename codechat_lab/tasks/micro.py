"""Generated small Python problems: families with parameters, five levels, a held-out set of
families.

A family (micro_families.json) is one idea: wordings, parameters, and the body that solves it.
`$x` and `$y` stand for the arguments, any other `$name` for a parameter. SFT, training,
`select` and `test` use different settings of the parameters. Held-out families are in
`test_hard` only."""

import itertools
import json
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.tasks.base import Problem
from codechat_lab.data.synthetic import row as conversation
from codechat_lab.tasks.coding.task import GOLD, CodingTask
from codechat_lab.tasks.preparation import (
    GeneratedConfig,
    GeneratedTask,
    prepare_generated,  # noqa: F401 (of the command `data micro`)
)

LEVELS = (1, 2, 3, 4, 5)
MOST_SETTINGS = 200
# The parts that settings are dealt to, in turn.
PARTS = ("sft", "train", "sft", "train", "sft", "train", "sft", "train", "select", "test")
TESTS = 6
CANDIDATES = 60  # calls from which the tests of a problem are chosen
NAMES = (
    "f g solve calc run apply make get task do go answer "
    "result compute work step build change check func"
).split()
# No body uses these names: its own variables are i, v, w, total, out, best and steps.
ARGUMENTS = {
    "int": ("n", "x", "num", "value", "number", "a", "k"),
    "ints": ("xs", "nums", "values", "items", "numbers", "data"),
    "word": ("s", "text", "word", "name", "line"),
    "words": ("words", "names", "items", "texts", "parts"),
}


def _is_far_below(a: int, b: int) -> bool:
    return a + 2 < b


def _is_below_and_no_divisor(a: int, b: int) -> bool:
    return a < b and b % a != 0


# Conditions between two parameters of a valid setting.
CONDITIONS: dict[str, Callable[[Any, Any], bool]] = {
    "differs from": operator.ne,
    "is below": operator.lt,
    "is far below": _is_far_below,
    "is below and no divisor of": _is_below_and_no_divisor,
}


def dealt(settings: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """The settings of a part; all of them for test_hard."""
    return (
        settings
        if part == "test_hard"
        else [s for i, s in enumerate(settings) if PARTS[i % len(PARTS)] == part]
    )


@dataclass(frozen=True)
class Family:
    """kinds: of the arguments, keys of ARGUMENTS. choices: values of each parameter. keep: what
    valid settings fulfil: a parameter, one of CONDITIONS, another parameter; empty for all
    settings."""

    name: str
    level: int
    kinds: Sequence[str]
    choices: Mapping[str, Sequence[Any]]
    says: Sequence[str]
    body: str
    held_out: bool = False
    keep: Sequence[str] = ()

    def settings(self, part: str) -> list[dict[str, Any]]:
        """The parameter settings of sft, train, select or test; all settings for test_hard."""
        every = [
            dict(zip(self.choices, values, strict=True))
            for values in itertools.product(*self.choices.values())
        ]
        if self.keep:
            first, condition, second = self.keep
            every = [
                setting
                for setting in every
                if CONDITIONS[condition](setting[first], setting[second])
            ]
        random.Random(self.name).shuffle(every)
        return dealt(every[:MOST_SETTINGS], part)

    def neighbours(self, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Settings next to this one: a number plus or minus one, or the neighbouring choice."""
        near = []
        for key, values in self.choices.items():
            value = setting[key]
            at = list(values).index(value)
            if type(value) is int:
                others = (value - 1, value + 1)
            else:
                others = (values[at - 1], values[(at + 1) % len(values)])
            near += [dict(setting) | {key: other} for other in others]
        return near

    def code(self, name: str, arguments: Sequence[str], setting: Mapping[str, Any]) -> str:
        """The reference solution."""
        body = self.fill(self.body, arguments, setting)
        return f"def {name}({', '.join(arguments)}):\n" + "\n".join(
            "    " + line for line in body.split("\n")
        )

    def fill(self, template: str, arguments: Sequence[str], setting: Mapping[str, Any]) -> str:
        values = {key: repr(value) for key, value in setting.items()}
        return Template(template).substitute(dict(zip("xy", arguments)) | values)

    def inputs(self, rng: random.Random, setting: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments of one call, often at or near the parameters, where wrong programs differ
        from correct ones."""
        numbers = [v for v in setting.values() if type(v) is int]
        texts = [v for v in setting.values() if type(v) is str]
        return tuple(_DRAW[kind](rng, numbers, texts) for kind in self.kinds)


def _choices(written: Any) -> Sequence[Any]:
    """The values of a choice in the file: a list, a range of whole numbers, or the name of one
    of these."""
    values = _DATA["values"].get(written, written) if isinstance(written, str) else written
    if isinstance(values, dict):
        return range(values["first"], values["last"] + 1, values.get("step", 1))
    return values


_DATA = json.loads(Path(__file__).with_name("micro_families.json").read_text(encoding="utf-8"))
WORDS = _DATA["words"]


def _family(row: dict[str, Any]) -> Family:
    choices: dict[str, Any] = {key: _choices(written) for key, written in row["choices"].items()}
    return Family(**row | {"choices": choices})


FAMILIES = tuple(map(_family, _DATA["families"]))


def _int(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> int:
    if numbers and rng.random() < 0.5:
        return max(0, rng.choice(numbers) * rng.choice((1, 1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1)))
    return rng.randint(0, 60)


def _ints(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> list[int]:
    return [
        _int(rng, numbers, texts) if rng.random() < 0.6 else rng.randint(0, 20)
        for _ in range(rng.randint(5, 7))
    ]


def _word(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> str:
    word = rng.choice(WORDS)
    if texts and rng.random() < 0.75:
        text = rng.choice(texts)
        at = rng.choice((0, 0, len(word), len(word), rng.randint(0, len(word))))
        word = word[:at] + text + word[at:]
        if rng.random() < 0.3:
            at = rng.randint(0, len(word))
            word = word[:at] + rng.choice(texts) + word[at:]
    return word


def _words(rng: random.Random, numbers: Sequence[int], texts: Sequence[str]) -> list[str]:
    return [_word(rng, numbers, texts) for _ in range(rng.randint(3, 4))]


_DRAW: dict[str, Callable[..., Any]] = {"int": _int, "ints": _ints, "word": _word, "words": _words}


def problems(split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Problem]:
    """n different problems, the families in turn. ConfigError for an unknown level."""
    return MicroTask(levels=levels).generate(split, n, seed)


def dialogues(
    split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS
) -> Iterator[dict[str, Any]]:
    """Conversations of one worked solution each. In "train" they use parameters that no problem
    has; in select and test, those of the problems."""
    return MicroTask(levels=levels).dialogues(split, n, seed)


def make(family: Family, setting: Mapping[str, Any], split: str, rng: random.Random) -> Problem:
    """A problem of a family, with sampled names, wording, example and hidden tests."""
    name = family.name if rng.random() < 0.4 else rng.choice(NAMES)
    arguments: list[str] = []
    for kind in family.kinds:
        arguments.append(
            rng.choice([argument for argument in ARGUMENTS[kind] if argument not in arguments])
        )
    code = family.code(name, arguments, setting)
    example, *calls = _calls(family, setting, name, arguments, rng)
    says = family.fill(rng.choice(family.says), arguments, setting)
    stub = f'def {name}({", ".join(arguments)}):\n    """{says} Example: {example}"""'
    prompt = f"Write this Python function.\n\n{stub}"
    tests = [f"assert {call}" for call in calls]
    gold = {"code": code, "tests": tests, "setup": "", "names": [name], "stub": ""}
    meta = {"family": family.name, "level": family.level, "setting": dict(setting)}
    id = f"micro-{family.name}-{digest(prompt)[:10]}"
    return Problem(id, [{"role": "user", "content": prompt}], gold, split, meta)


class _Call(NamedTuple):
    text: str  # f(1) == 2
    answer: str
    caught: frozenset[int]  # numbers of the rivals that answer otherwise


UNCHANGED = -1  # the number of the rival that returns its argument


def _calls(
    family: Family,
    setting: Mapping[str, Any],
    name: str,
    arguments: Sequence[str],
    rng: random.Random,
) -> list[str]:
    """The example and TESTS other calls, as `f(1) == 2`. Tests are chosen so that nearly
    correct programs fail: a parameter off by one, the argument returned unchanged, a constant
    answer."""
    solve = _function(family.code(name, arguments, setting), name)
    rivals = [
        _function(family.code(name, arguments, near), name) for near in family.neighbours(setting)
    ]
    calls: dict[str, _Call] = {}
    for _ in range(CANDIDATES):
        call = _call(name, solve, rivals, family.inputs(rng, setting))
        calls[call.text] = call
    example, *rest = (calls[text] for text in rng.sample(list(calls), len(calls)))
    tests = _most_telling(rest)
    rng.shuffle(tests)
    return [example.text, *tests]


def _call(
    name: str,
    solve: Callable[..., Any],
    rivals: Sequence[Callable[..., Any]],
    given: tuple[Any, ...],
) -> _Call:
    answer = _answer(solve, given)
    caught = {i for i, rival in enumerate(rivals) if _answer(rival, given) != answer}
    if answer != repr(given[0]):
        caught.add(UNCHANGED)
    return _Call(f"{name}({', '.join(map(repr, given))}) == {answer}", answer, frozenset(caught))


def _most_telling(calls: Sequence[_Call]) -> list[str]:
    """TESTS of the calls: each in turn catches most rivals that no test catches yet; a new
    answer counts as one."""
    left = list(calls)
    tests: list[str] = []
    answers: set[str] = set()
    caught: set[int] = set()
    while len(tests) < TESTS:
        best = max(left, key=lambda call: len(call.caught - caught) + (call.answer not in answers))
        left.remove(best)
        tests.append(best.text)
        answers.add(best.answer)
        caught |= best.caught
    return tests


def _function(code: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(code, scope)  # our own reference solution, which as text is the answer that a model learns
    return scope[name]


def _answer(function: Callable[..., Any], given: Sequence[Any]) -> str:
    """The result of a call as text, or the name of the error: the program of a neighbouring
    setting may divide by zero."""
    try:
        return repr(function(*given))
    except (ZeroDivisionError, IndexError) as error:
        return type(error).__name__


class MicroTask(GeneratedTask, CodingTask):
    """Small code problems. levels: a repeated level is sampled more often. Other options: see
    `CodingTask`."""

    name = "micro"
    domain = "solutions"
    known_levels = LEVELS
    gold_fields = GOLD
    checked = 0

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = LEVELS,
        reward: str = "tiered",
        timeout_s: float = 3.0,
    ) -> None:
        super().__init__("micro", [], reward, timeout_s)
        self.set_levels(source, levels)

    def generate(self, split: str, n: int, seed: int, worked: bool = False) -> list[Problem]:
        """The families in turn."""
        part = self.part(split, worked)
        rng = random.Random(f"micro {part} {seed}")
        drawn = dict[str, Problem]()
        families = [
            f for f in FAMILIES if f.held_out == (part == "test_hard") and f.level in self.levels
        ]
        if not families:
            raise ConfigError(
                f"no family of levels {sorted(self.levels)} is in split {split}; add a level"
            )
        settings = {f.name: f.settings(part) for f in families}
        while True:  # ends: examples differ, so no family runs out of problems
            for family in rng.sample(families, len(families)):
                for _ in range(self.levels.count(family.level)):
                    if len(drawn) == n:
                        return list(drawn.values())
                    problem = make(family, rng.choice(settings[family.name]), split, rng)
                    drawn.setdefault(problem.id, problem)

    def conversation(self, problem: Problem) -> dict[str, Any]:
        row = conversation(
            problem.messages[0]["content"], problem.gold["code"], self.domain, **problem.meta
        )
        return row | {"meta": row["meta"] | {"split": problem.split, "asked": "code"}}


@dataclass(frozen=True, kw_only=True)
class MicroConfig(GeneratedConfig):
    """Small code problems -> solutions.SPLIT.jsonl (conversations), micro.SPLIT.jsonl
    (problems)."""

    make = MicroTask
    max_examples: int = 8000
    eval_examples: int = 500
    levels: tuple[int, ...] = LEVELS
