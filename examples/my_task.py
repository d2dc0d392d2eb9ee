"""A task of rows and reward functions: replace the rows of my_task.jsonl and the functions by your own.

    codechat diagnose --ckpt RUN --task my_task.py:MyTask     does the reward give a gradient?
    codechat grpo --init-from RUN --task my_task.py:MyTask --run-name my_task
    codechat evaluate --ckpt my_task --task my_task.py:MyTask

`codechat new task NAME` copies this file, its rows and its test under a name of yours.
"""

from codechat.tasks import Problem, RowsTask


def exact(completion: str, problem: Problem) -> float:
    """1 where the whole answer is correct. problem.gold is the row's gold, problem.meta its other fields."""
    return float(completion.strip() == problem.gold)


def close(completion: str, problem: Problem) -> float:
    """Share of correct characters in their places: a gradient before the first whole answer is correct."""
    same = sum(a == b for a, b in zip(completion.strip(), problem.gold))
    return same / max(len(completion.strip()), len(problem.gold))


def short(completion: str, problem: Problem) -> float:
    """How much shorter than 40 characters the answer is."""
    return max(0.0, 1 - len(completion) / 40)


class MyTask(RowsTask):
    rows = "my_task.jsonl"
    rewards = {exact: 1.0, close: 1.0, short: 0.0}  # weight 0: logged as reward/short, not trained
