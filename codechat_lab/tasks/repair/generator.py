"""Repositories with a bug: problems of three levels, with failing and passing tests that decide.

Levels: 1 one module and its tests; 2 two modules and a README; 3 three modules behind a facade, whose tests fail.
Tests are chosen by running the correct and the wrong source, both ours: FAIL_TO_PASS where they differ,
PASS_TO_PASS where they agree. Some of both kinds are hidden. Modules (`parts.toml`) are documented functions with
constants, and bugs that change a line. Constants belong to one split (`test_hard` has modules of its own); every
problem shows one call that no test has."""

import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from codechat.data.sources import digest
from codechat.tasks.base import Problem
from codechat_lab.tasks.micro import WORDS, dealt

LEVELS = (1, 2, 3)
CANDIDATES, LONGEST = 60, 64  # calls from which tests are chosen, and their characters: small models read short prompts
SEEN, UNSEEN = 1, 2  # tests of the broken module in its file, and hidden ones: of each kind
HIDDEN = "hidden::"  # begins the ids of hidden tests
FACADE = "summary"
SPARSE = ("sft", "train", "select", "test")
PACKAGES = tuple("shop club town office farm lab studio garage hotel museum harbor school".split())
VERBS = tuple("get make find compute show read take build".split())
ERRORS = (ValueError, IndexError, KeyError, TypeError, ZeroDivisionError)
RAISED = frozenset(error.__name__ for error in ERRORS)
FORMAT = "Answer with blocks like this:\npath\n<<<<<<< SEARCH\nold lines\n=======\nnew lines\n>>>>>>> REPLACE"


@dataclass(frozen=True)
class Part:
    """files: names of the module. arguments: expression for those of one call. k: range of the constant; more: what
    m is above k."""

    name: str
    files: Sequence[str]
    code: str
    bugs: Sequence[tuple[str, str]]
    arguments: str
    k: Sequence[int]
    more: Sequence[int] = (4,)
    held_out: bool = False

    def settings(self, part: str) -> list[dict[str, int]]:
        """The constants of a split (all for test_hard); of a module with few of them at least one."""
        every = [{"k": k, "m": k + more} for k in self.k for more in self.more]
        random.Random(self.name).shuffle(every)
        return dealt(every, part) or [every[SPARSE.index(part) % len(every)]]

    def draw(self, rng: random.Random, setting: Mapping[str, int]) -> tuple[Any, ...]:
        """Arguments of one call."""
        functions = {f.__name__: partial(f, rng) for f in (ints, near, counts, sale, text)}
        return eval(self.arguments, {**functions, **setting, "rng": rng})  # our own expression

    def source(self, names: Mapping[str, str], setting: Mapping[str, int]) -> str:
        return Template(self.code).substitute(names, **setting)

    def lines(
        self,
        bug: Sequence[str],
        names: Mapping[str, str],
        setting: Mapping[str, int],
    ) -> tuple[str, str, str]:
        """(the source with the bug, the wrong line, the right line)."""
        right, wrong = (Template(text).substitute(names, **setting) for text in bug)
        good = self.source(names, setting)
        buggy = good.replace(right, wrong)
        ((old, new),) = [(x, y) for x, y in zip(buggy.splitlines(), good.splitlines(), strict=True) if x != y]
        return buggy, old, new


PARTS = [
    Part(**row) for row in tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))["part"]
]


def ints(rng: random.Random, low: int = 0, high: int = 20, n: Sequence[int] = (3, 4, 5)) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.choice(n))]


def near(rng: random.Random, *values: int) -> int:
    return max(0, rng.choice(values) + rng.choice((-2, -1, 0, 0, 1, 2)))


def counts(rng: random.Random, n: int) -> dict[str, int]:
    return dict(zip(rng.sample(WORDS, n), rng.sample(range(1, 60), n)))


def sale(rng: random.Random) -> tuple[dict[str, int], str, int]:
    stock = counts(rng, 3)
    item = rng.choice(list(stock))
    return stock, item, rng.choice((stock[item], rng.randint(1, stock[item])))


def text(rng: random.Random, *n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice(n)))


class Module(NamedTuple):
    """A module of a repository as it should be. calls: {call of its function: the result, as text}."""

    stem: str
    part: str
    function: str
    source: str
    calls: dict[str, str]


class Test(NamedTuple):
    """home: the module that it imports from; function: what it calls there."""

    home: str
    function: str
    call: str
    result: str
    fails: bool
    hidden: bool


def make(level: int, part: str, split: str, rng: random.Random) -> Problem | None:
    """A problem; None where the calls that were drawn tell too little apart."""
    first, *rest = parts = rng.sample([p for p in PARTS if p.held_out == (part == "test_hard")], level)
    # file names without repetition
    package = rng.choice(PACKAGES)
    stems = list[str]()
    for p in parts:
        stems.append(rng.choice([name for name in p.files if name not in stems]))
    names = _names(rng, first)
    setting = rng.choice(first.settings(part))
    broken = _module(first, stems[0], names, setting, rng)
    buggy, old, new = first.lines(rng.choice(first.bugs), names, setting)
    wrong = _results(buggy, broken.calls)
    right = _returned(broken.calls)
    failing = [call for call in right if wrong[call] != right[call]]
    passing = [call for call in right if wrong[call] == right[call]]
    if len(failing) < 1 + SEEN + UNSEEN or len(passing) < SEEN + UNSEEN:
        return None
    shown, *failing = rng.sample(failing, 1 + SEEN + UNSEEN)
    others = [_module(p, stem, _names(rng, p), rng.choice(p.settings(part)), rng) for p, stem in zip(rest, stems[1:])]
    facade = level == max(LEVELS)
    tests = list(_tests(broken, failing, True, facade))
    tests += _tests(broken, rng.sample(passing, SEEN + UNSEEN), False, facade)
    for module in others:
        good = list(_returned(module.calls))
        tests += _tests(module, rng.sample(good, min(len(good), SEEN + UNSEEN)), False, False)
    rng.shuffle(tests)
    files = _sources(package, [broken._replace(source=buggy), *others], facade)
    named = _write_tests(package, tests, files)
    path = f"{package}/{broken.stem}.py"
    gold = {
        "files": files,
        "imports": {test.function: f"{package}.{test.home}" for test in tests},
        "tests": {name: f"assert {test.call} == {test.result}" for name, test in named.items()},
        "FAIL_TO_PASS": [name for name, test in named.items() if test.fails],
        "PASS_TO_PASS": [name for name, test in named.items() if not test.fails],
        "fix": {"path": path, "search": old, "replace": new},
    }
    what = "raises" if wrong[shown] in RAISED else "returns"
    issue = f"`{shown}` of {path} {what} {wrong[shown]}. It should return {right[shown]}."
    seen = ", ".join(name for name in gold["FAIL_TO_PASS"] if not name.startswith(HIDDEN))
    listed = "\n".join(f"{path}\n```\n{text}```" for path, text in files.items() if text)
    request = f"Fix this repository. {issue}\nFails: {seen}\n\n{listed}\n\n{FORMAT}"
    messages = [{"role": "user", "content": request}]
    meta = {"level": level, "part": first.name, "files": len(files)}
    return Problem(f"repair-{level}-{digest(f'{messages}{files}')[:12]}", messages, gold, split, meta)


def _names(rng: random.Random, p: Part) -> dict[str, str]:
    verb, helper = rng.sample(VERBS, 2)
    return {"f": f"{verb}_{p.name}", "g": f"{helper}_one"}


def _module(
    p: Part,
    stem: str,
    names: Mapping[str, str],
    setting: Mapping[str, int],
    rng: random.Random,
) -> Module:
    source = p.source(names, setting)
    drawn = (p.draw(rng, setting) for _ in range(CANDIDATES))
    calls = dict.fromkeys(f"{names['f']}({', '.join(map(repr, arguments))})" for arguments in drawn)
    short = [call for call in calls if len(call) <= LONGEST]
    return Module(stem, p.name, names["f"], source, _results(source, short))


def _results(source: str, calls: Iterable[str]) -> dict[str, str]:
    """{call: its result, or the name of the error}."""
    scope: dict[str, Any] = {}
    exec(source, scope)  # our own source, with our own bug
    results = {}
    for call in calls:
        try:
            results[call] = repr(eval(call, scope))
        except ERRORS as error:
            results[call] = type(error).__name__
    return results


def _returned(results: Mapping[str, str]) -> dict[str, str]:
    """The results without those that are errors."""
    return {call: result for call, result in results.items() if result not in RAISED}


def _tests(module: Module, calls: Sequence[str], fails: bool, facade: bool) -> Iterator[Test]:
    """The first SEEN are in the module's file; facade: the call goes through it."""
    home, name = (FACADE, f"report_{module.part}") if facade else (module.stem, module.function)
    for i, call in enumerate(calls):
        through = call.replace(f"{module.function}(", f"{name}(", 1)
        yield Test(home, name, through, module.calls[call], fails, hidden=i >= SEEN)


def _sources(package: str, modules: Sequence[Module], facade: bool) -> dict[str, str]:
    files = {f"{package}/__init__.py": ""}
    files |= {f"{package}/{m.stem}.py": m.source for m in modules}
    if facade:
        imports = "".join(f"from {package}.{m.stem} import {m.function}\n" for m in modules)
        wrappers = "".join(
            f"\n\ndef report_{m.part}(*arguments):\n    return {m.function}(*arguments)\n" for m in modules
        )
        files[f"{package}/{FACADE}.py"] = imports + wrappers
    if len(modules) > 1:
        listed = "".join(f"- `{package}/{m.stem}.py`: `{m.function}`\n" for m in modules)
        files["README.md"] = f"# The {package}\n\n{listed}"
    return files


def _write_tests(package: str, tests: Sequence[Test], files: dict[str, str]) -> dict[str, Test]:
    """Add the test files; {test id: test}, hidden ones last."""
    hidden = [test for test in tests if test.hidden]
    named: dict[str, Test] = {}
    for home in dict.fromkeys(test.home for test in tests):
        mine = [test for test in tests if test.home == home and not test.hidden]
        path = f"tests/test_{home}.py"
        imported = ", ".join(sorted({test.function for test in mine}))
        bodies = [f"\n\ndef test_{i}():\n    assert {test.call} == {test.result}\n" for i, test in enumerate(mine, 1)]
        files[path] = f"from {package}.{home} import {imported}\n" + "".join(bodies)
        named |= {f"{path}::test_{i}": test for i, test in enumerate(mine, 1)}
    return named | {f"{HIDDEN}test_{i}": test for i, test in enumerate(hidden, 1)}
