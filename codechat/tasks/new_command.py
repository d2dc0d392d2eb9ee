"""`codechat new task NAME`: a task of your own to start from: its reward functions, its test and its rows.

    codechat new task capitals                 capitals.py, test_capitals.py and capitals.jsonl in this folder
    codechat new task capitals --out my-tasks
    codechat grpo --task capitals.py:Capitals --init-from nano/sft --run-name capitals

Nothing is overwritten.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, nearest

KINDS = ("task",)
TASK = '''"""NAME: replace the rows of NAME.jsonl and the reward functions by your own.

    codechat diagnose --ckpt RUN --task NAME.py:CLASS     does the reward give a gradient?
    codechat grpo --init-from RUN --task NAME.py:CLASS --run-name NAME
    codechat evaluate --ckpt NAME --task NAME.py:CLASS
"""

from codechat.tasks import RowsTask


def exact(completion, problem):
    """1 where the whole answer is right. problem.gold is the row's gold, problem.meta its other fields."""
    return float(completion.strip() == problem.gold)


def close(completion, problem):
    """Share of the characters that are right at their place: a gradient before the first whole answer is right."""
    same = sum(a == b for a, b in zip(completion.strip(), problem.gold))
    return same / max(len(completion.strip()), len(problem.gold))


def short(completion, problem):
    """How much shorter than 40 characters the answer is."""
    return max(0.0, 1 - len(completion) / 40)


class CLASS(RowsTask):
    rows = "NAME.jsonl"
    rewards = {exact: 1.0, close: 1.0, short: 0.0}  # weight 0: logged as reward/short, not trained
'''
TEST = '''"""What every task must pass, and what this one pays."""

from pathlib import Path

from codechat import tasks
from codechat.tasks import redteam

TASK = tasks.load(f"{Path(__file__).with_name('NAME.py')}:CLASS")


def test_reference_solutions_earn_the_full_reward():
    for split in ("train", "select", "test"):
        tasks.check_reference_solutions(TASK, TASK.problems(split)).require()


def test_the_reward_takes_any_text_and_no_text_earns_it_everywhere():
    assert not redteam.check_reward(TASK, TASK.problems("train")).require().shortcuts


def test_a_wrong_answer_earns_less_and_is_not_correct():
    problem = TASK.problems("train")[0]
    score = TASK.score(problem, "something else")
    assert score.reward < TASK.max_reward and not score.correct
'''
ROWS = [{"prompt": f"Spell backwards: {word}", "gold": word[::-1]} for word in
        "apple bread chair dance eagle flame grape house ivory jelly knife lemon mouse night ocean piano queen river stone table".split()]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """`codechat new`."""

    out: Path = opt(Path("."), "folder to write into")


def write_task(name: str, out: Path) -> list[Path]:
    """Write the three files. ConfigError for a name that Python cannot import, and for a file that exists."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"the name {name!r}; required: small letters, digits and _, such as my_task")
    cls = "".join(part.capitalize() for part in name.split("_"))
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    texts = {f"{name}.py": TASK, f"test_{name}.py": TEST, f"{name}.jsonl": rows}
    if there := [file for file in texts if (out / file).exists()]:
        raise ConfigError(f"{out / there[0]} exists; choose another name or --out")
    out.mkdir(parents=True, exist_ok=True)
    try:
        for file, text in texts.items():
            write_atomic(out / file, text.replace("NAME", name).replace("CLASS", cls))
    except OSError:  # else the next try would find some of the files there
        for file in texts:
            (out / file).unlink(missing_ok=True)
        raise
    print(f"wrote {', '.join(texts)} in {out}; try: python -m pytest {out / f'test_{name}.py'}")
    print(f"then: codechat diagnose --ckpt RUN --task {out / name}.py:{cls}")
    return [out / file for file in texts]


def main(argv: list[str] | None = None) -> None:
    """`codechat new task NAME [--out FOLDER]`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print("usage: codechat new task NAME [--out FOLDER]\n\n" + (__doc__ or "").rstrip())
        return
    if words[0] not in KINDS:
        raise ConfigError(f"codechat new {words[0]!r}{nearest(words[0], KINDS)}; there is: {', '.join(KINDS)}")
    if len(words) < 2 or words[1].startswith("-"):
        raise ConfigError("codechat new task has no name; required: codechat new task NAME")
    write_task(words[1], config.parse(NewConfig, words[2:], prog="codechat new task", epilog=__doc__).out)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
