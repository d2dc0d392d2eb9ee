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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_data(name: str, out: Path) -> None:
    """Twelve worked examples and problems of two levels."""
    sizes = "--tokenizer bytes --max-examples 12 --problems 8 --eval-examples 6 --levels 1 2"
    command.main([name, "--out", str(out), *sizes.split()])


def problems_in(name: str, folder: Path) -> dict[str, list[Problem]]:
    task = tasks.load(name, source=str(folder), levels=[1, 2])
    splits = [split for split in SPLITS if (folder / f"{name}.{split}.jsonl").exists()]
    return {split: task.problems(split) for split in splits}


@TASKS
def test_data_holds_worked_examples_and_problems_of_every_split(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path)
    splits = list(problems_in(name, tmp_path))
    assert splits[:3] == list(SPLITS[:3])
    worked = {f"{DOMAINS[name]}.{split}.jsonl" for split in SPLITS[:3]}
    written = worked | {f"{name}.{split}.jsonl" for split in splits}
    assert set(contents(tmp_path)) == {"manifest.json", *written}


@TASKS
def test_the_same_command_writes_the_same_data(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path)
    first = contents(tmp_path)
    write_data(name, tmp_path)
    assert contents(tmp_path) == first


@TASKS
def test_problems_are_not_read_as_conversations(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path)
    domains = conversations.load_domains(
        tmp_path, "train", tokenizer.load("bytes"), "reserved", 8192
    )
    assert {domain: len(rows) for domain, rows in domains.items()} == {DOMAINS[name]: 12}


@TASKS
def test_problems_on_disk_are_those_of_the_task(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path)
    problems = problems_in(name, tmp_path)
    for split, some in problems.items():
        assert len(some) == (8 if split == "train" else 6)
    assert {p.meta["level"] for p in problems["train"]} == {1, 2}
    generated = tasks.load(f"{name}:levels=[1,2]").problems("train", 8)
    assert {p.id for p in problems["train"]} == {p.id for p in generated}


@TASKS
def test_reference_solutions_of_problems_on_disk_are_correct(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path)
    task = tasks.load(name, source=str(tmp_path), levels=[1, 2])
    every = [problem for some in problems_in(name, tmp_path).values() for problem in some]
    tasks.check_reference_solutions(task, every).require()


@TASKS
def test_no_worked_example_holds_a_problem(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path)
    every = [problem for some in problems_in(name, tmp_path).values() for problem in some]
    prompts = {json.dumps(problem.messages)[1:-1] for problem in every}
    for line in (tmp_path / f"{DOMAINS[name]}.train.jsonl").read_text().splitlines():
        taught = json.dumps(json.loads(line))
        assert not any(prompt in taught for prompt in prompts)


@TASKS
def test_splits_share_no_problem(name: str) -> None:
    task = tasks.load(name)
    ids = {split: {p.id for p in task.problems(split, 40)} for split in SPLITS}
    assert {len(some) for some in ids.values()} == {40}
    assert len(set().union(*ids.values())) == 40 * len(ids)


@TASKS
def test_the_seed_decides_the_problems(name: str) -> None:
    task = tasks.load(name)
    drawn = task.problems("train", 5, seed=1)
    assert drawn == task.problems("train", 5, seed=1)
    assert drawn != task.problems("train", 5, seed=2)


@TASKS
@pytest.mark.parametrize(
    ("options", "split"), [(":levels=[9]", "train"), (":levels=[]", "train"), ("", "dev")]
)
def test_bad_levels_and_splits_are_user_errors(options: str, split: str, name: str) -> None:
    with pytest.raises(ConfigError):
        tasks.load(name + options).problems(split, 1)


@TASKS
def test_bad_levels_of_the_command_are_user_errors(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        command.main([name, "--out", str(tmp_path / "out"), "--levels", "9"])


@TASKS
def test_absent_and_bad_files_are_user_errors(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        tasks.load(name, source=str(tmp_path)).problems("train")
    row = {"id": "x", "messages": [], "gold": {}, "split": "train", "meta": {}}
    (tmp_path / f"{name}.train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{name}.train.jsonl:1.*codechat data {name}"):
        tasks.load(name, source=str(tmp_path)).problems("train")


task = ToyTask()


def test_reference_solutions_of_the_toy_task_earn_the_maximum() -> None:
    assert tasks.check_reference_solutions(task, task.problems("train", 40)).require().passed == 40


def test_chance_earns_a_tenth() -> None:
    rng = random.Random(0)
    rewards = []
    for problem in task.problems("train", 4000):
        text = rng.randbytes(COMPLETION_LENGTH).decode(errors="replace")
        rewards.append(task.score(problem, text).reward)
    assert 0.06 < sum(rewards) / len(rewards) < 0.12


@pytest.mark.parametrize("kind", CLASSES)
def test_one_answer_to_everything_earns_a_quarter(kind: str) -> None:
    text = CLASSES[kind][0] * COMPLETION_LENGTH
    rewards = [task.score(problem, text).reward for problem in task.problems("test")]
    assert sum(rewards) / len(rewards) == 0.25


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("abcdefgh", 1),
        ("abcd", 0.5),
        ("", 0),
        ("abcdefgh" * 2, 1),
        ("ABCDefgh", 0.5),
        ("abcdefgh!!!!!!!!", 0.5),
        ("<|endoftext|>" * 8, 0),
        ("<|user|>abcdefg", 7 / 8),
    ],
)
def test_the_reward_is_the_share_of_characters_in_the_class(text: str, share: float) -> None:
    problem = next(p for p in task.problems("train") if p.gold == "lower")
    score = task.score(problem, text)
    assert (score.reward, score.correct) == (share, share == 1)


@pytest.mark.parametrize("name", tasks.NAMES)
def test_an_unknown_task_is_a_user_error_that_names_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'\\?"):
        tasks.load(name + "x")
    assert callable(tasks.find_class(name)[0])


def test_an_unknown_option_is_a_user_error() -> None:
    with pytest.raises(ConfigError):
        tasks.load("toy", speed=3)


def test_an_unknown_split_is_a_user_error() -> None:
    with pytest.raises(ConfigError):
        task.problems("validation")


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


def test_families_have_every_level() -> None:
    assert len(BY_NAME) == len(FAMILIES) >= 60
    assert 10 <= sum(family.held_out for family in FAMILIES) <= 20
    assert {family.level for family in FAMILIES} == set(LEVELS)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_settings_of_a_family_are_split_once(name: str) -> None:
    family = BY_NAME[name]
    parts = [family.settings(part) for part in ("sft", "train", "select", "test")]
    dealt = [repr(setting) for part in parts for setting in part]
    assert all(parts)
    assert len(set(dealt)) == len(dealt) == len(family.settings("test_hard"))


def test_no_name_is_a_variable_of_a_body() -> None:
    names = {*NAMES, *(name for kind in ARGUMENTS.values() for name in kind)}
    assert not names & {"i", "v", "w", "total", "out", "best", "steps"}


def test_prompts_and_answers_are_short() -> None:
    tok = tokenizer.load("gpt2:4096")
    for problem in problems("train", 400) + problems("test_hard", 100):
        code = problem.gold["code"]
        body = code.split("\n")[1:]
        assert 1 <= len(body) <= 6
        assert max(map(len, body)) < 70
        prompt = chat.prompt(problem.messages, tok)
        assert len(prompt) + len(chat.completion_ids(code, tok)) < 300


def test_seeds_share_few_problems() -> None:
    first = {problem.id for problem in problems("train", 100, seed=1)}
    second = {problem.id for problem in problems("train", 100, seed=2)}
    assert len(first) == 100
    assert len(first & second) < 5


def settings_in(split: str) -> set[tuple[str, str]]:
    return {setting_of(problem.meta) for problem in problems(split, 120, seed=3)}


def settings_taught() -> set[tuple[str, str]]:
    return {setting_of(row["meta"]) for row in dialogues("train", 120, seed=3)}


@pytest.mark.parametrize(
    ("a", "b"),
    [("train", "select"), ("train", "test"), ("select", "test"), ("train", "test_hard")],
)
def test_no_parameters_of_a_family_are_in_two_splits(a: str, b: str) -> None:
    assert not settings_in(a) & settings_in(b)


def test_no_parameters_of_a_problem_are_taught() -> None:
    assert not settings_taught() & set.union(*map(settings_in, SPLITS))


def test_held_out_families_are_in_test_hard_only() -> None:
    held_out = {family.name for family in FAMILIES if family.held_out}
    assert {family for family, _ in settings_in("test_hard")} == held_out
    assert {family for family, _ in settings_taught()} == BY_NAME.keys() - held_out
    assert {family for family, _ in settings_in("train")} == BY_NAME.keys() - held_out


def test_every_reference_passes_its_tests() -> None:
    for problem in problems("train", 300) + problems("test_hard", 60):
        assert passes(problem, problem.gold["code"])


def test_every_reference_passes_its_example_which_is_none_of_its_tests() -> None:
    """The example is shown: it tests nothing."""
    for problem in problems("train", 300) + problems("test_hard", 60):
        example = problem.messages[0]["content"].rpartition("Example: ")[2].rstrip('"')
        scope: dict[str, Any] = {}
        exec(problem.gold["code"], scope)
        assert eval(example, scope) is True
        assert not any(example in test for test in problem.gold["tests"])


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
