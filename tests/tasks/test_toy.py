"""The toy task: about 0.1 by chance, no gain from tricks. Tasks by name."""

import random
import subprocess
import sys

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError
from codechat.tasks.toy import CLASSES, COMPLETION_LENGTH, ToyTask

task = ToyTask()


def test_reference_solutions_earn_the_maximum_chance_a_tenth_and_one_answer_a_quarter() -> None:
    assert tasks.check_reference_solutions(task, task.problems("train", 40)).require().passed == 40
    rng = random.Random(0)
    texts = [rng.randbytes(COMPLETION_LENGTH).decode(errors="replace") for _ in range(4000)]
    rewards = [task.score(p, t).reward for p, t in zip(task.problems("train", 4000), texts, strict=True)]
    assert 0.06 < sum(rewards) / len(rewards) < 0.12
    for characters in CLASSES.values():
        rewards = [task.score(p, characters[0] * COMPLETION_LENGTH).reward for p in task.problems("test")]
        assert sum(rewards) / len(rewards) == 0.25


def test_the_reward_is_the_share_of_characters_in_the_class() -> None:
    problem = next(p for p in task.problems("train") if p.gold == "lower")
    shares = {"abcdefgh": 1, "abcd": 0.5, "": 0, "abcdefgh" * 2: 1, "ABCDefgh": 0.5, "abcdefgh!!!!!!!!": 0.5,
              "<|endoftext|>" * 8: 0, "<|user|>abcdefg": 7 / 8}  # fmt: skip
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
