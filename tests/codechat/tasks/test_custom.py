"""Custom tasks: a file, an object, the template; what their rewards may and may not do."""

import json
import subprocess
import sys
import tomllib
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raising

from codechat import tasks
from codechat.core.config import config_hash
from codechat.core.errors import ConfigError, DataError, MissingFile, UserError
from codechat.core.registry import COMMANDS
from codechat.grpo import GRPOConfig
from codechat.tasks.custom import RowsTask

ROWS = [{"prompt": f"Double {n}.", "gold": str(2 * n), "level": n % 3} for n in range(40)]
FILE = f"""
from codechat.tasks import RowsTask

def exact(completion, problem):
    return float(completion == problem.gold)

def form(completion, problem):
    return {{"digits": completion.isdigit(), "short": len(completion) < 4}}

class Doubles(RowsTask):
    rows = {ROWS!r}
    rewards = {{exact: 3.0, form: 1.0}}

    def __init__(self, source=None, add: int = 0):
        super().__init__(source)
        self.add = add
"""


def exact(completion, problem):
    return float(completion == problem.gold)


def length(completion, problem):
    return min(len(completion), 10) / 10


class Doubles(RowsTask):
    rows = ROWS
    rewards = {exact: 1.0, length: 0.0}


def task_with(*functions, **fields) -> RowsTask:
    return type(
        "Mine", (RowsTask,), {"rows": ROWS, "rewards": dict.fromkeys(functions, 1.0)} | fields
    )()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "doubles.py"
    path.write_text(FILE)
    return path


def test_a_file_gives_a_task_with_its_options_and_a_weighted_mean_of_rewards(file):
    task = tasks.load(f"{file}:Doubles:add=3")
    assert (task.name, task.add, task.max_reward) == ("doubles", 3, 1.0)
    assert isinstance(tasks.load(str(file)), tasks.Task)  # its only task
    assert tasks.check_reference_solutions(task, task.problems("train")).require().passed == len(
        task.problems("train")
    )
    problem = next(p for p in task.problems("train") if p.gold == "14")
    right, wrong, words = (task.score(problem, text) for text in ("14", "15", "a long text"))
    assert (right.reward, right.correct, right.tier) == (1.0, True, "full")
    assert (wrong.reward, wrong.correct, wrong.tier) == (0.25, False, "some")  # 3 * 0 + 1 * 1 of 4
    assert words.reward == 0
    assert words.tier == "none"
    assert wrong.terms == {"exact": 0.0, "form_digits": 1.0, "form_short": 1.0}


def test_the_splits_share_no_prompt_and_none_is_empty():
    task = Doubles()
    parts = [{p.id for p in task.problems(split)} for split in ("train", "select", "test")]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert len(parts[0]) >= 28
    assert [p.id for p in task.problems("train", 5, seed=1)] == [
        p.id for p in Doubles().problems("train", 5, seed=1)
    ]
    assert all(p.meta.keys() == {"level"} for p in task.problems("train"))
    # weight 0 is logged, not trained
    scores = [task.score(task.problems("train")[0], text) for text in ("", "x" * 10)]
    assert [s.reward for s in scores] == [0, 0]
    assert [s.terms["length"] for s in scores] == [0, 1]


def test_rows_name_their_split_or_come_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(row | {"split": "test", "reference": "x"}) + "\n" for row in ROWS[:3])
    )
    task = Doubles(source=str(path))
    assert len(task.problems("test")) == 3
    assert task.gold(task.problems("test")[0]) == "x"
    with pytest.raises(DataError):
        task.problems("train")


def test_rows_with_one_prompt_and_other_answers_are_all_kept_in_one_split_and_repeated_ones_counted(
    capsys,
):
    """The rewards of TRL's users often read other columns than the prompt."""
    again = [row | {"gold": "other", "reference": f"way {i}"} for i in range(2) for row in ROWS]
    task = task_with(exact, rows=[*ROWS, *again, *ROWS[:3]])
    assert len(task.rows) == len({p.id for p in task.rows}) == 3 * len(ROWS)
    assert {p.id for p in Doubles().rows} == {
        p.id.replace("mine", "doubles") for p in task.rows[: len(ROWS)]
    }
    assert all(task.score(p, task.gold(p)).tier in ("full", "none") for p in task.rows)
    splits: dict[str, set[str]] = {}
    for problem in task.rows:
        splits.setdefault(problem.messages[0]["content"], set()).add(problem.split)
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) >= {
        "train",
        "select",
        "test",
    }
    assert capsys.readouterr().err == "task mine: 3 rows repeat another one and are left out\n"


def test_prompts_that_rows_put_into_several_splits_are_counted(capsys):
    rows = [
        row | {"split": split}
        for split, gold in (("train", {}), ("test", {"gold": "x"}))
        for row in ROWS[:5]
        for row in [row | gold]
    ]
    task = task_with(exact, rows=rows)
    assert len(task.problems("train")) == len(task.problems("test")) == 5
    assert capsys.readouterr().err == "task mine: 5 prompts are in several splits\n"


def test_rows_and_weights_that_make_no_task_are_refused():
    for row in (
        {"gold": 1},
        {"prompt": "x"},
        {"prompt": "x", "gold": 1, "split": "dev"},
        {"prompt": [], "gold": 1},
    ):
        with pytest.raises(DataError, match="row 1"):
            task_with(exact, rows=[row])
    for rewards in ({}, {exact: 0.0}, {exact: -1.0, length: 2.0}, {exact: float("nan")}):
        with pytest.raises(ConfigError):
            type("Mine", (RowsTask,), {"rows": ROWS, "rewards": rewards})()


@pytest.mark.parametrize(
    "function", [lambda text, _: 1 / len(text), lambda text, _: {text[:1]: 1.0}]
)
def test_a_reward_function_that_fails_is_a_tier_and_stops_before_training(function):
    task = task_with(function)
    score = task.score(task.problems("train")[0], "")
    assert (score.reward, score.tier, score.correct) == (0.0, "error", False)
    with pytest.raises(DataError, match="task mine"):
        tasks.check_reward(task, task.problems("train"))


class Near:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completion, problem):
        return np.float32(completion == problem.gold) * self.scale


def within(completion, problem, most):
    return np.bool_(len(completion) <= most)


def parts(completion, problem):
    return {
        "a": np.float64(1),
        "b": torch.ones(1),
        "c": Fraction(1, 2),
        "d": torch.tensor(completion == problem.gold),
    }


def trl(prompts, completions, level, **columns):
    assert prompts[0].startswith("Double")
    assert columns["gold"]
    assert level[0] in (0, 1, 2)
    return [
        None if len(text) > 9 else float(text == gold)
        for text, gold in zip(completions, columns["gold"])
    ]


def trl_plain(completions, gold):
    return np.array([text == answer for text, answer in zip(completions, gold)])


def test_rewards_may_be_any_callable_and_any_number():
    task = task_with(
        Near(1), partial(within, most=3), partial(within, most=5), parts, trl, trl_plain
    )
    problem = task.problems("train")[0]
    right = task.score(problem, problem.gold)
    wrong = task.score(problem, "abcd")
    assert (right.tier, wrong.tier) == ("some", "some"), (right.parts, wrong.parts)
    given = dict(
        Near=1,
        within=1,
        within_3=1,
        parts_a=1,
        parts_b=1,
        parts_c=0.5,
        parts_d=1,
        trl=1,
        trl_plain=1,
    )
    assert right.terms == given
    assert [name for name, value in wrong.terms.items() if value] == [
        "within_3",
        "parts_a",
        "parts_b",
        "parts_c",
    ]
    assert right.reward == pytest.approx((5 + 3.5 / 4) / 6)
    assert all(type(v) is float for v in right.terms.values())
    assert task.score(problem, "a long text").terms["trl"] == 0, "None counts as 0"
    tasks.check_reward(task, task.problems("train"))


def test_rewards_are_a_list_or_a_table_and_scores_are_plain_numbers():
    def least(completions, level, gold):
        return [float(len(text) >= level) for text in completions]

    # the argument of a partial, not the row's column
    task = task_with(rewards=[exact, partial(least, level=2)])
    problem = next(p for p in task.problems("train") if len(p.gold) == 1 and p.meta["level"] < 2)
    assert task.score(problem, problem.gold).terms == {"exact": 1.0, "least": 0.0}
    assert task.score(problem, problem.gold).reward == 0.5
    given = tasks.Score(np.float32(0.5), "some", {}, np.bool_(True), {"a": torch.tensor(1)})
    assert [type(v) for v in (given.reward, given.correct, given.terms["a"])] == [
        float,
        bool,
        float,
    ]


def test_a_function_of_trl_gets_conversations_where_the_prompt_is_one():
    def check(prompts, completions, gold, **_):
        assert prompts == [[{"role": "user", "content": "Hi"}]]
        return [
            float(answer[0] == {"role": "assistant", "content": g})
            for answer, g in zip(completions, gold)
        ]

    task = task_with(
        check,
        rows=[{"prompt": [{"role": "user", "content": "Hi"}], "gold": "yes", "split": "train"}],
    )
    assert [task.score(task.problems("train")[0], text).reward for text in ("yes", "no")] == [1, 0]


@pytest.mark.parametrize(
    "given", ["0.5", None, float("nan"), 1.5, np.float32(-1), [0.5], torch.ones(2), 1j]
)
def test_what_is_no_reward_is_an_error_that_is_shown_once_with_its_row(given, capsys):
    def mine(completion, problem):
        return given if "9" in problem.gold else 1.0

    task = task_with(
        mine, rows=[{"prompt": f"Say {n}.", "gold": str(n), "split": "train"} for n in (3, 9, 19)]
    )
    with pytest.raises(DataError, match="mine"):
        tasks.check_reference_solutions(task, task.problems("train")).require()
    shown = capsys.readouterr().err
    assert shown.count("task mine") == 1
    assert "Say 9." in shown or "Say 19." in shown
    assert task.score(task.problems("train")[0], "3").tier in ("full", "error")
    assert not capsys.readouterr().err


def test_shortcuts_are_reported_and_tasks_of_the_package_have_none():
    def shortcuts(task: tasks.Task) -> set[str]:
        return set(tasks.check_reward(task, task.problems("train", 8)))

    assert shortcuts(task_with(lambda text, problem: problem.gold in text)) == {"all answers"}
    assert len(shortcuts(task_with(lambda *_: 1.0))) >= 12
    for task in (task_with(exact), *map(tasks.load, ("toy", "reasoning", "repair"))):
        assert not shortcuts(task)


def test_an_object_or_a_class_is_a_setting():
    task = Doubles()
    for given in (task, Doubles):
        assert GRPOConfig(task=given).task == "doubles"
        assert tasks.load("doubles").name == "doubles"
    assert config_hash(GRPOConfig(task=task)) == config_hash(GRPOConfig(task="doubles"))
    assert tasks.load(GRPOConfig(task=task).task) is task
    tasks.TASKS.pop("doubles")


def test_what_is_no_task_is_a_user_error(tmp_path, file):
    bad = tmp_path / "bad.py"
    bad.write_text("class X:\n    name = 'x'\n\nx = 1 / 0\n")
    with pytest.raises(DataError, match="line 4: ZeroDivisionError"):
        tasks.load(f"{bad}:X")
    for make in (
        lambda: GRPOConfig(task=3),
        lambda: tasks.name_of(task_with(exact, name="toy")),
        lambda: tasks.load(f"{file}:Double"),
        lambda: tasks.load(f"{file}:Doubles:level=1"),
    ):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(MissingFile):
        tasks.load(str(tmp_path / "absent.py:X"))


def test_the_template_passes_its_own_tests(tmp_path):
    three = {"my_words.py", "test_my_words.py", "my_words.jsonl"}
    for what, files in {"package": three | {"pyproject.toml"}, "task": three}.items():
        COMMANDS["new"].run([what, "my_words", "--out", str(tmp_path)])
        assert {
            p.name
            for p in (tmp_path / ("my_words" if what == "package" else ".")).iterdir()
            if p.is_file()
        } == files
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_words.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    # of modules, keywords, and its files
    names = (
        "My-Task",
        "json",
        "torch",
        "codechat",
        "class",
        "none",
        "my_words",
    )
    for words in (
        ["tusk", "x"],
        ["task"],
        *(["task", name, "--out", str(tmp_path)] for name in names),
    ):
        with pytest.raises(ConfigError):
            COMMANDS["new"].run(words)
    assert len(list(tmp_path.glob("*.py"))) == 2


def test_a_new_task_does_not_replace_a_file(tmp_path, monkeypatch):
    """Also in the folder that Python imports from, where the file is a module too."""
    (tmp_path / "my_words.py").write_text("mine = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"got .*my_words\.py, which exists; expected a new file; choose another name",
    ):
        COMMANDS["new"].run(["task", "my_words", "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.glob("*my_words*")] == ["my_words.py"]


def test_an_installed_package_adds_a_task_and_never_replaces_one(tmp_path, monkeypatch):
    """What pip would write of `codechat new package`, whose pyproject.toml declares the class;
    then a clash, and classes that cannot be had."""
    COMMANDS["new"].run(["package", "my_words", "--out", str(tmp_path)])
    declared = tomllib.loads((tmp_path / "my_words" / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    ((group, points),) = declared.items()
    about = tmp_path / "my_words-0.1.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Name: my-words\nVersion: 0.1\n")
    more = {
        "toy": "my_words.my_words:MyWords",
        "gone": "my_words.nowhere:MyWords",
        "loose": "my_words.my_words:exact",
    }
    lines = (f"{name} = {value}\n" for name, value in (points | more).items())
    about.joinpath("entry_points.txt").write_text(f"[{group}]\n" + "".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert len(tasks.load("my_words").problems("train")) == 17
    for name, error in {
        "toy": ConfigError,
        "gone": DataError,
        "loose": DataError,
        "my_word": ConfigError,
    }.items():
        with raising(error, name, "my_words" if name == "my_word" else "my-words"):
            tasks.load(name)


def test_an_environment_of_verifiers_gives_its_rows_weights_and_awaited_rewards(tmp_path):
    pytest.importorskip("verifiers")
    adapter = Path(__file__).parents[3] / "examples" / "verifiers_task.py"
    env = tmp_path / "environment.py"
    env.write_text(Path(__file__).with_name("verifiers_env.txt").read_text())
    task = tasks.load(f"{adapter}:Verifiers:env={env},n=30", reference="{answer}")
    parts = [task.problems(split) for split in ("train", "select", "test")]
    assert [len(part) for part in parts] == [24, 3, 3]
    tasks.check_reference_solutions(task, parts[0]).require()
    assert tasks.check_reward(task, parts[0]) == {}
    problem = next(p for part in parts for p in part if p.gold == "14")
    assert [m["content"] for m in problem.messages] == ["Answer with a number.", "Double 7."]
    found = list(tasks.score_all(task, [problem] * 3, ["14", "15", "fourteen"]))
    assert [score.reward for score in found] == pytest.approx([1, 0.2 / 0.8, 0])
    assert [(score.tier, score.correct) for score in found] == [
        ("full", True),
        ("some", False),
        ("none", False),
    ]
    assert {name: found[1].terms[name] for name in ("exact", "digits")} == {"exact": 0, "digits": 1}
    wrongs = {
        f"{env},k=3": "k",
        "nowhere": "nowhere",
        "json": "json",
        f"{env},max_turns=2": "turns",
    }
    for wrong, named in wrongs.items():
        with raising(UserError, named):
            tasks.load(f"{adapter}:Verifiers:env={wrong}")
