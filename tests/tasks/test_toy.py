"""The toy task: about 0.1 by chance, no gain from tricks. Tasks by name."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError
from codechat.tasks.toy import CLASSES, COMPLETION_LENGTH, ToyTask

task = ToyTask()


def test_gold_scores_the_maximum():
    assert tasks.check_reference_solutions(task, task.problems("train", 40)).require().passed == 40


def test_chance_is_about_a_tenth():
    rng = random.Random(0)
    texts = [rng.randbytes(COMPLETION_LENGTH).decode(errors="replace") for _ in range(4000)]
    rewards = [task.score(p, t).reward for p, t in zip(task.problems("train", 4000), texts, strict=True)]
    assert 0.06 < sum(rewards) / len(rewards) < 0.12


def test_one_answer_for_all_prompts_stays_at_a_quarter():
    for characters in CLASSES.values():
        rewards = [task.score(p, characters[0] * COMPLETION_LENGTH).reward for p in task.problems("test")]
        assert sum(rewards) / len(rewards) == 0.25


@pytest.mark.parametrize(
    "text, share",
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
def test_share_of_characters(text, share):
    problem = next(p for p in task.problems("train") if p.gold == "lower")
    assert task.score(problem, text).reward == share
    assert task.score(problem, text).correct == (share == 1)


def test_unknown_tasks_options_and_splits_are_user_errors():
    assert tasks.load("toy").name == "toy"
    with pytest.raises(ConfigError, match="'toy'"):
        tasks.load("toys")
    with pytest.raises(ConfigError, match="speed"):
        tasks.load("toy", speed=3)
    with pytest.raises(ConfigError, match="split"):
        task.problems("validation")


@pytest.mark.parametrize("name", tasks.NAMES)
def test_the_error_for_an_unknown_task_names_the_nearest(name):
    with pytest.raises(ConfigError, match=f"'{name}'\\?"):
        tasks.load(name + "x")
    assert callable(tasks.task_class(name)) and tasks.TASKS[name].about


def test_names_presets_and_help_of_tasks_import_no_torch():
    code = (
        "import sys, codechat.tasks; from codechat.training.presets import LORA_RUN, TOY_RUN;"
        "[codechat.tasks.task_class(n) for n in codechat.tasks.NAMES];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_program_can_add_a_task_of_its_own(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "mine", ToyTask)
    assert tasks.load("mine").name == "toy"
