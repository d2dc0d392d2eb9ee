"""What every task must pass, and what this one pays."""

from pathlib import Path

from codechat import tasks

TASK = tasks.load(f"{Path(__file__).with_name('my_task.py')}:MyTask")


def test_reference_solutions_earn_the_full_reward() -> None:
    for split in ("train", "select", "test"):
        tasks.check_reference_solutions(TASK, TASK.problems(split)).require()


def test_the_reward_takes_any_text_and_no_text_earns_it_everywhere() -> None:
    assert not tasks.check_reward(TASK, TASK.problems("train"))


def test_a_wrong_answer_earns_less_and_is_not_correct() -> None:
    problem = TASK.problems("train")[0]
    score = TASK.score(problem, "something else")
    assert score.reward < TASK.max_reward and not score.correct
