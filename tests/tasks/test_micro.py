"""Generated small problems: many, different, disjoint between splits, and with tests that wrong programs fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError
from codechat.sandbox import SandboxUnavailable
from codechat.tasks.base import SPLITS, Problem
from codechat.tasks.micro import ARGUMENTS, FAMILIES, LEVELS, NAMES, dialogues, problems
from codechat.text import chat, tokenizer

BY_NAME = {f.name: f for f in FAMILIES}


def passes(problem: Problem, code: str) -> bool:
    """Whether trusted code (no sandbox) passes the tests of a problem."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    try:
        for test in problem.gold["tests"]:
            exec(test, scope)
    except (AssertionError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return False
    return True


def setting_of(problem: Problem) -> tuple[str, str]:
    return problem.meta["family"], repr(sorted(problem.meta["setting"].items()))


def test_there_are_sixty_families_on_every_level_and_some_are_held_out() -> None:
    assert len(BY_NAME) == len(FAMILIES) >= 60
    assert set(Counter(f.level for f in FAMILIES)) == set(LEVELS)
    assert 10 <= sum(f.held_out for f in FAMILIES) <= 20
    for family in FAMILIES:
        parts = {part: family.settings(part) for part in ("sft", "train", "select", "test")}
        assert all(parts.values()), f"{family.name} has too few settings to be split"


def test_answers_have_one_to_five_short_lines_and_prompts_are_short() -> None:
    tok = tokenizer.load("gpt2:4096")
    for problem in problems("train", 400) + problems("test_hard", 100):
        body = problem.gold["code"].split("\n")[1:]
        assert 1 <= len(body) <= 6 and max(map(len, body)) < 70
        assert len(chat.prompt(problem.messages, tok)) + len(chat.completion_ids(problem.gold["code"], tok)) < 300


def test_the_same_seed_gives_the_same_problems_and_another_gives_others() -> None:
    assert problems("train", 50, seed=1) == problems("train", 50, seed=1)
    first, second = ({p.id for p in problems("train", 100, seed=s)} for s in (1, 2))
    assert len(first) == 100 and len(first & second) < 5


def test_no_parameters_of_a_family_are_in_two_splits() -> None:
    seen = {split: {setting_of(p) for p in problems(split, 120, seed=3)} for split in SPLITS}
    taught = {
        (r["meta"]["family"], repr(sorted(r["meta"]["setting"].items()))) for r in dialogues("train", 120, seed=3)
    }
    for family in FAMILIES:
        dealt = [repr(s) for part in ("sft", "train", "select", "test") for s in family.settings(part)]
        assert len(set(dealt)) == len(dealt) == len(family.settings("test_hard"))
    for a, b in [("train", "select"), ("train", "test"), ("select", "test"), ("train", "test_hard")]:
        assert not seen[a] & seen[b]
    assert not taught & set.union(*seen.values())
    assert {f for f, _ in seen["test_hard"]} == {f.name for f in FAMILIES if f.held_out}
    assert {f for f, _ in taught} == {f for f, _ in seen["train"]} == {f.name for f in FAMILIES if not f.held_out}


def test_every_reference_passes_its_tests_and_its_example() -> None:
    for problem in problems("train", 300) + problems("test_hard", 60):
        assert passes(problem, problem.gold["code"])
        example = problem.messages[0]["content"].rpartition("Example: ")[2].rstrip('"')
        scope: dict[str, Any] = {}
        exec(problem.gold["code"], scope)
        assert eval(example, scope) is True
        assert not any(example in test for test in problem.gold["tests"]), "the example is shown: it tests nothing"


@pytest.mark.slow
def test_tests_separate_correct_from_wrong_programs() -> None:
    """Constant answers, the argument itself, and solutions with a parameter off by one: nearly all must fail."""
    tried, survived = Counter[str](), Counter[str]()
    for problem in problems("train", 400, seed=5) + problems("test_hard", 60, seed=5):
        family, setting = BY_NAME[problem.meta["family"]], problem.meta["setting"]
        head = problem.gold["code"].split("\n")[0]
        name, arguments = problem.gold["names"][0], head[head.index("(") + 1 : -2].split(", ")
        wrong = [
            f"{head}\n    return {problem.gold['tests'][0].rpartition(' == ')[2]}",
            f"{head}\n    return {arguments[0]}",
        ]
        for code in wrong:
            assert not passes(problem, code), (problem.id, code)
        for other in family.neighbours(setting):
            tried[family.name] += 1
            survived[family.name] += passes(problem, family.code(name, arguments, other))
    worst = {name: (survived[name], tried[name]) for name in tried if survived[name] > 0.34 * tried[name]}
    assert not worst and survived.total() < 0.07 * tried.total(), (
        worst,
        survived.total() / tried.total(),
        survived.most_common(12),
    )


def test_bodies_do_not_use_names_that_arguments_may_have() -> None:
    own = {"i", "v", "w", "total", "out", "best", "steps"}
    assert not own & {*NAMES, *(name for names in ARGUMENTS.values() for name in names)}


def test_unknown_levels_and_splits_are_user_errors() -> None:
    with pytest.raises(ConfigError, match="levels .1, 7."):
        problems("train", 5, levels=(1, 7))
    with pytest.raises(ConfigError, match="split 'prompt'"):
        tasks.load("micro").problems("prompt")
    assert {p.meta["level"] for p in tasks.load("micro:levels=[1,2]").problems("test", 40)} == {1, 2}


@pytest.mark.parametrize("split", SPLITS)
def test_reference_solutions_pass(split: str) -> None:
    task = tasks.load("micro")
    try:
        gate = tasks.check_reference_solutions(task, task.problems(split, 40))
    except SandboxUnavailable as why:
        pytest.skip(str(why))
    assert gate.require().n == 40
