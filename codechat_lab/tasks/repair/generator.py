"""Repositories with a bug: problems of three levels, with failing and passing tests that decide.

Levels: 1 one module and its tests; 2 two modules and a README; 3 three modules behind a facade,
whose tests fail. Tests are chosen by running the correct and the wrong source, both ours:
FAIL_TO_PASS where they differ, PASS_TO_PASS where they agree. Some of both kinds are hidden.
Modules (`parts.toml`) are documented functions with constants, and bugs that change a line.
Constants belong to one split (`test_hard` has modules of its own); every problem shows one call
that no test has."""

import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from codechat.data.sources import digest
from codechat.tasks.base import Problem
from codechat_lab.tasks.micro import dealt
from codechat_lab.tasks.repair import draws

LEVELS = (1, 2, 3)
CANDIDATES = 60  # calls from which tests are chosen
LONGEST = 64  # characters of a call: small models read short prompts
# tests of the broken module in its file, and hidden ones: of each kind
SEEN = 1
UNSEEN = 2
HIDDEN = "hidden::"  # begins the ids of hidden tests
FACADE = "summary"
SPARSE = ("sft", "train", "select", "test")
PACKAGES = tuple("shop club town office farm lab studio garage hotel museum harbor school".split())
VERBS = tuple("get make find compute show read take build".split())
ERRORS = (ValueError, IndexError, KeyError, TypeError, ZeroDivisionError)
RAISED = frozenset(error.__name__ for error in ERRORS)
FORMAT = (
    "Answer with blocks like this:\npath\n<<<<<<< SEARCH\nold "
    "lines\n=======\nnew lines\n>>>>>>> REPLACE"
)


@dataclass(frozen=True)
class Part:
    """A module as `parts.toml` has it. files: names of the file. k: range of the constant;
    more: what m is above k."""

    name: str
    files: Sequence[str]
    code: str
    bugs: Sequence[tuple[str, str]]
    k: Sequence[int]
    more: Sequence[int] = (4,)
    held_out: bool = False

    def settings(self, part: str) -> list[dict[str, int]]:
        """The constants of a split (all for test_hard); of a module with few of them at least
        one."""
        every = [{"k": k, "m": k + more} for k in self.k for more in self.more]
        random.Random(self.name).shuffle(every)
        return dealt(every, part) or [every[SPARSE.index(part) % len(every)]]

    def source(self, names: Mapping[str, str], setting: Mapping[str, int]) -> str:
        return _filled(self.code, names, setting)

    def broken(
        self, bug: Sequence[str], names: Mapping[str, str], setting: Mapping[str, int]
    ) -> "Broken":
        """The source with a bug. ValueError unless it changes exactly one line."""
        right, wrong = (_filled(text, names, setting) for text in bug)
        good = self.source(names, setting)
        buggy = good.replace(right, wrong)
        ((old, new),) = [
            (x, y) for x, y in zip(buggy.splitlines(), good.splitlines(), strict=True) if x != y
        ]
        return Broken(buggy, old, new)


class Broken(NamedTuple):
    """A source with a bug, its wrong line and the right one."""

    source: str
    wrong: str
    right: str


def _filled(text: str, names: Mapping[str, str], setting: Mapping[str, int]) -> str:
    return Template(text).substitute(names, **setting)


PARTS = [
    Part(**row)
    for row in tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))[
        "part"
    ]
]


class Module(NamedTuple):
    """A module of a repository as it should be. calls: {call of its function: the result, as
    text}."""

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
    hardest = level == max(LEVELS)
    parts = rng.sample([p for p in PARTS if p.held_out == (part == "test_hard")], level)
    package = rng.choice(PACKAGES)
    stems = list[str]()
    for p in parts:  # file names without repetition
        stems.append(rng.choice([name for name in p.files if name not in stems]))
    first = parts[0]
    names = _names(rng, first)
    setting = rng.choice(first.settings(part))
    right = _module(first, stems[0], names, setting, rng)
    bug = first.broken(rng.choice(first.bugs), names, setting)
    calls = _told_apart(right, bug.source, rng)
    if calls is None:
        return None
    others = [
        _module(p, stem, _names(rng, p), rng.choice(p.settings(part)), rng)
        for p, stem in zip(parts[1:], stems[1:])
    ]
    tests = _chosen_tests(right, calls, others, hardest, rng)
    files = _sources(package, [right._replace(source=bug.source), *others], facade=hardest)
    named = _write_tests(package, tests, files)
    failing = [name for name, test in named.items() if test.fails]
    path = f"{package}/{right.stem}.py"
    gold = {
        "files": files,
        "imports": {test.function: f"{package}.{test.home}" for test in tests},
        "tests": {name: f"assert {test.call} == {test.result}" for name, test in named.items()},
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": [name for name, test in named.items() if not test.fails],
        "fix": {"path": path, "search": bug.wrong, "replace": bug.right},
    }
    seen = [name for name in failing if not name.startswith(HIDDEN)]
    issue = _issue(path, calls.shown, calls.wrong, right.calls[calls.shown])
    messages = [{"role": "user", "content": _request(issue, seen, files)}]
    id = f"repair-{level}-{digest(f'{messages}{files}')[:12]}"
    meta = {"level": level, "part": first.name, "files": len(files)}
    return Problem(id, messages, gold, split, meta)


class Calls(NamedTuple):
    """Calls of the broken function. shown: in the issue, and in no test; wrong: its result with
    the bug, or the name of the error."""

    shown: str
    wrong: str
    failing: list[str]
    passing: list[str]


def _told_apart(right: Module, buggy: str, rng: random.Random) -> Calls | None:
    """Calls that fail with the bug, and calls that pass; None where there are too few of either."""
    results = _results(buggy, right.calls)
    returned = _returned(right.calls)
    failing = [call for call in returned if results[call] != returned[call]]
    passing = [call for call in returned if results[call] == returned[call]]
    tests = SEEN + UNSEEN
    if len(failing) < 1 + tests or len(passing) < tests:
        return None
    shown, *failing = rng.sample(failing, 1 + tests)
    return Calls(shown, results[shown], failing, passing)


def _chosen_tests(
    broken: Module, calls: Calls, others: Sequence[Module], facade: bool, rng: random.Random
) -> list[Test]:
    """In random order. facade: the tests of the broken module go through it, so that a failure
    does not name the module."""
    tests = list(_tests(broken, calls.failing, fails=True, facade=facade))
    tests += _tests(broken, rng.sample(calls.passing, SEEN + UNSEEN), fails=False, facade=facade)
    for module in others:
        good = list(_returned(module.calls))
        tests += _tests(
            module, rng.sample(good, min(len(good), SEEN + UNSEEN)), fails=False, facade=False
        )
    rng.shuffle(tests)
    return tests


def _issue(path: str, call: str, wrong: str, right: str) -> str:
    what = "raises" if wrong in RAISED else "returns"
    return f"`{call}` of {path} {what} {wrong}. It should return {right}."


def _request(issue: str, failing: Sequence[str], files: Mapping[str, str]) -> str:
    listed = "\n".join(f"{path}\n```\n{text}```" for path, text in files.items() if text)
    return f"Fix this repository. {issue}\nFails: {', '.join(failing)}\n\n{listed}\n\n{FORMAT}"


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
    drawn = (draws.draw(p.name, rng, setting["k"], setting["m"]) for _ in range(CANDIDATES))
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
    home = FACADE if facade else module.stem
    name = f"report_{module.part}" if facade else module.function
    for i, call in enumerate(calls):
        through = call.replace(f"{module.function}(", f"{name}(", 1)
        yield Test(home, name, through, module.calls[call], fails, hidden=i >= SEEN)


def _sources(package: str, modules: Sequence[Module], facade: bool) -> dict[str, str]:
    files = {f"{package}/__init__.py": ""}
    imports = ""
    wrappers = ""
    listed = ""
    for m in modules:
        files[f"{package}/{m.stem}.py"] = m.source
        imports += f"from {package}.{m.stem} import {m.function}\n"
        wrappers += f"\n\ndef report_{m.part}(*arguments):\n    return {m.function}(*arguments)\n"
        listed += f"- `{package}/{m.stem}.py`: `{m.function}`\n"
    if facade:
        files[f"{package}/{FACADE}.py"] = imports + wrappers
    if len(modules) > 1:
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
        files[path] = f"from {package}.{home} import {imported}\n"
        for i, test in enumerate(mine, 1):
            files[path] += f"\n\ndef test_{i}():\n    assert {test.call} == {test.result}\n"
            named[f"{path}::test_{i}"] = test
    return named | {f"{HIDDEN}test_{i}": test for i, test in enumerate(hidden, 1)}
