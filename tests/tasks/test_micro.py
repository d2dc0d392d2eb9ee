"""Generated small problems: many, different, disjoint between splits, and with tests that wrong programs fail."""

from collections import Counter
from typing import Any

import pytest

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


def setting_of(meta: dict[str, Any]) -> tuple[str, str]:
    return meta["family"], repr(sorted(meta["setting"].items()))


def test_families_have_every_level_and_their_settings_are_split_once() -> None:
    assert len(BY_NAME) == len(FAMILIES) >= 60 and 10 <= sum(f.held_out for f in FAMILIES) <= 20
    assert {f.level for f in FAMILIES} == set(LEVELS)
    for family in FAMILIES:
        parts = [family.settings(part) for part in ("sft", "train", "select", "test")]
        dealt = [repr(setting) for part in parts for setting in part]
        assert all(parts) and len(set(dealt)) == len(dealt) == len(family.settings("test_hard")), family.name
    names = {*NAMES, *(name for kind in ARGUMENTS.values() for name in kind)}
    assert not names & {"i", "v", "w", "total", "out", "best", "steps"}  # the variables of bodies


def test_prompts_and_answers_are_short_and_a_seed_gives_the_same_problems() -> None:
    tok = tokenizer.load("gpt2:4096")
    for problem in problems("train", 400) + problems("test_hard", 100):
        body = problem.gold["code"].split("\n")[1:]
        assert 1 <= len(body) <= 6 and max(map(len, body)) < 70
        assert len(chat.prompt(problem.messages, tok)) + len(chat.completion_ids(problem.gold["code"], tok)) < 300
    first, second = ({p.id for p in problems("train", 100, seed=s)} for s in (1, 2))
    assert len(first) == 100 and len(first & second) < 5


def test_no_parameters_of_a_family_are_in_two_splits() -> None:
    seen = {split: {setting_of(p.meta) for p in problems(split, 120, seed=3)} for split in SPLITS}
    taught = {setting_of(r["meta"]) for r in dialogues("train", 120, seed=3)}
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
        for wrong in (problem.gold["tests"][0].rpartition(" == ")[2], arguments[0]):
            assert not passes(problem, f"{head}\n    return {wrong}"), problem.id
        for other in family.neighbours(setting):
            tried[family.name] += 1
            survived[family.name] += passes(problem, family.code(name, arguments, other))
    assert not {name for name in tried if survived[name] > 0.34 * tried[name]}
    assert survived.total() < 0.07 * tried.total(), survived.most_common(12)
