"""Tasks by name, the toy task, and tasks that generate their problems: what is written is read
back, splits share nothing, and what is wrong is a user error."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import command, conversations
from codechat.tasks.base import SPLITS, Problem
from codechat.tasks.toy import CLASSES, COMPLETION_LENGTH, ToyTask
from codechat.text import chat, tokenizer
from codechat_lab.tasks.micro import ARGUMENTS, FAMILIES, LEVELS, NAMES, dialogues, problems

DOMAINS = {"apps": "episodes", "micro": "solutions", "reasoning": "worked", "repair": "repairs"}
TASKS = pytest.mark.parametrize("name", DOMAINS)


@TASKS
def test_worked_examples_and_problems_on_disk(name: str, tmp_path: Path) -> None:
    sizes = "--tokenizer bytes --max-examples 12 --problems 8 --eval-examples 6 --levels 1 2"
    words = [name, "--out", str(tmp_path), *sizes.split()]
    domain = DOMAINS[name]
    command.main(words)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    splits = [s for s in SPLITS if f"{name}.{s}.jsonl" in first]
    written = {f"{domain}.{s}.jsonl" for s in SPLITS[:3]} | {f"{name}.{s}.jsonl" for s in splits}
    assert set(first) == {"manifest.json", *written}
    assert splits[:3] == list(SPLITS[:3])
    domains = conversations.load_domains(
        tmp_path, "train", tokenizer.load("bytes"), "reserved", 8192
    )
    assert list(domains) == [domain] and len(domains[domain]) == 12, (
        "problems are not read as conversations"
    )
    task = tasks.load(name, source=str(tmp_path), levels=[1, 2])
    problems = {split: task.problems(split) for split in splits}
    assert {split: len(some) for split, some in problems.items()} == {
        s: 8 if s == "train" else 6 for s in splits
    }
    assert {p.meta["level"] for p in problems["train"]} == {1, 2}
    assert {p.id for p in problems["train"]} == {
        p.id for p in tasks.load(f"{name}:levels=[1,2]").problems("train", 8)
    }
    tasks.check_reference_solutions(task, [p for some in problems.values() for p in some]).require()
    prompts = {json.dumps(p.messages)[1:-1] for some in problems.values() for p in some}
    taught = (tmp_path / f"{domain}.train.jsonl").read_text()
    assert not any(
        prompt in json.dumps(json.loads(line)) for line in taught.splitlines() for prompt in prompts
    )
    command.main(words)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


@TASKS
def test_splits_share_no_problem_and_the_seed_decides(name: str) -> None:
    task = tasks.load(name)
    ids = {split: {p.id for p in task.problems(split, 40)} for split in SPLITS}
    assert {len(some) for some in ids.values()} == {40}
    assert len(set().union(*ids.values())) == 40 * len(ids)
    assert (
        task.problems("train", 5, seed=1)
        == task.problems("train", 5, seed=1)
        != task.problems("train", 5, seed=2)
    )


@TASKS
def test_bad_settings_and_files_are_user_errors(name: str, tmp_path: Path) -> None:
    for words, split in (
        (f"{name}:levels=[9]", "train"),
        (f"{name}:levels=[]", "train"),
        (name, "dev"),
    ):
        with pytest.raises(ConfigError):
            tasks.load(words).problems(split, 1)
    with pytest.raises(ConfigError):
        command.main([name, "--out", str(tmp_path / "out"), "--levels", "9"])
    with pytest.raises(MissingFile):
        tasks.load(name, source=str(tmp_path)).problems("train")
    row = {"id": "x", "messages": [], "gold": {}, "split": "train", "meta": {}}
    (tmp_path / f"{name}.train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{name}.train.jsonl:1.*codechat data {name}"):
        tasks.load(name, source=str(tmp_path)).problems("train")


task = ToyTask()


def test_reference_solutions_earn_the_maximum_chance_a_tenth_and_one_answer_a_quarter() -> None:
    assert tasks.check_reference_solutions(task, task.problems("train", 40)).require().passed == 40
    rng = random.Random(0)
    texts = [rng.randbytes(COMPLETION_LENGTH).decode(errors="replace") for _ in range(4000)]
    rewards = [
        task.score(p, t).reward for p, t in zip(task.problems("train", 4000), texts, strict=True)
    ]
    assert 0.06 < sum(rewards) / len(rewards) < 0.12
    for characters in CLASSES.values():
        rewards = [
            task.score(p, characters[0] * COMPLETION_LENGTH).reward for p in task.problems("test")
        ]
        assert sum(rewards) / len(rewards) == 0.25


def test_the_reward_is_the_share_of_characters_in_the_class() -> None:
    problem = next(p for p in task.problems("train") if p.gold == "lower")
    shares = {
        "abcdefgh": 1,
        "abcd": 0.5,
        "": 0,
        "abcdefgh" * 2: 1,
        "ABCDefgh": 0.5,
        "abcdefgh!!!!!!!!": 0.5,
        "<|endoftext|>" * 8: 0,
        "<|user|>abcdefg": 7 / 8,
    }
    for text, share in shares.items():
        score = task.score(problem, text)
        assert (score.reward, score.correct) == (share, share == 1), text


def test_unknown_tasks_options_and_splits_are_user_errors() -> None:
    for name in tasks.NAMES:
        with pytest.raises(ConfigError, match=f"'{name}'\\?"):
            tasks.load(name + "x")
        assert callable(tasks.find_class(name)[0])
    for wrong in (lambda: tasks.load("toy", speed=3), lambda: task.problems("validation")):
        with pytest.raises(ConfigError):
            wrong()


def test_names_presets_and_classes_of_tasks_import_no_torch() -> None:
    code = (
        "import sys, codechat.tasks, codechat.training.settings;"
        "[codechat.tasks.find_class(n) for n in codechat.tasks.NAMES]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- generated small problems

BY_NAME = {f.name: f for f in FAMILIES}


def passes(problem: Problem, code: str) -> bool:
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
    assert len(BY_NAME) == len(FAMILIES) >= 60
    assert 10 <= sum(f.held_out for f in FAMILIES) <= 20
    assert {f.level for f in FAMILIES} == set(LEVELS)
    for family in FAMILIES:
        parts = [family.settings(part) for part in ("sft", "train", "select", "test")]
        dealt = [repr(setting) for part in parts for setting in part]
        assert all(parts) and len(set(dealt)) == len(dealt) == len(family.settings("test_hard")), (
            family.name
        )
    names = {*NAMES, *(name for kind in ARGUMENTS.values() for name in kind)}
    assert not names & {"i", "v", "w", "total", "out", "best", "steps"}  # the variables of bodies


def test_prompts_and_answers_are_short_and_a_seed_gives_the_same_problems() -> None:
    tok = tokenizer.load("gpt2:4096")
    for problem in problems("train", 400) + problems("test_hard", 100):
        body = problem.gold["code"].split("\n")[1:]
        assert 1 <= len(body) <= 6
        assert max(map(len, body)) < 70
        assert (
            len(chat.prompt(problem.messages, tok))
            + len(chat.completion_ids(problem.gold["code"], tok))
            < 300
        )
    first, second = ({p.id for p in problems("train", 100, seed=s)} for s in (1, 2))
    assert len(first) == 100
    assert len(first & second) < 5


def test_no_parameters_of_a_family_are_in_two_splits() -> None:
    seen = {split: {setting_of(p.meta) for p in problems(split, 120, seed=3)} for split in SPLITS}
    taught = {setting_of(r["meta"]) for r in dialogues("train", 120, seed=3)}
    for a, b in [
        ("train", "select"),
        ("train", "test"),
        ("select", "test"),
        ("train", "test_hard"),
    ]:
        assert not seen[a] & seen[b]
    assert not taught & set.union(*seen.values())
    assert {f for f, _ in seen["test_hard"]} == {f.name for f in FAMILIES if f.held_out}
    assert (
        {f for f, _ in taught}
        == {f for f, _ in seen["train"]}
        == {f.name for f in FAMILIES if not f.held_out}
    )


def test_every_reference_passes_its_tests_and_its_example() -> None:
    for problem in problems("train", 300) + problems("test_hard", 60):
        assert passes(problem, problem.gold["code"])
        example = problem.messages[0]["content"].rpartition("Example: ")[2].rstrip('"')
        scope: dict[str, Any] = {}
        exec(problem.gold["code"], scope)
        assert eval(example, scope) is True
        assert not any(example in test for test in problem.gold["tests"]), (
            "the example is shown: it tests nothing"
        )


@pytest.mark.slow
def test_tests_separate_correct_from_wrong_programs() -> None:
    """Constant answers, the argument itself, and solutions with a parameter off by one: nearly
    all must fail."""
    tried = Counter[str]()
    survived = Counter[str]()
    for problem in problems("train", 400, seed=5) + problems("test_hard", 60, seed=5):
        family = BY_NAME[problem.meta["family"]]
        setting = problem.meta["setting"]
        head = problem.gold["code"].split("\n")[0]
        name = problem.gold["names"][0]
        arguments = head[head.index("(") + 1 : -2].split(", ")
        for wrong in (problem.gold["tests"][0].rpartition(" == ")[2], arguments[0]):
            assert not passes(problem, f"{head}\n    return {wrong}"), problem.id
        for other in family.neighbours(setting):
            tried[family.name] += 1
            survived[family.name] += passes(problem, family.code(name, arguments, other))
    assert not {name for name in tried if survived[name] > 0.34 * tried[name]}
    assert survived.total() < 0.07 * tried.total(), survived.most_common(12)
