"""An environment of the library verifiers as a task: its rows, and its rewards by hand."""

from pathlib import Path

import pytest
from raising import raising

pytest.importorskip("verifiers")

from codechat import tasks
from codechat.core.errors import UserError

ADAPTER = Path(__file__).parents[2] / "examples" / "verifiers_task.py"


def test_rows_weights_and_awaited_rewards_are_those_of_the_environment(tmp_path: Path) -> None:
    env = tmp_path / "doubles.py"
    env.write_text((Path(__file__).parent / "verifiers_env.txt").read_text())
    task = tasks.load(f"{ADAPTER}:Verifiers:env={env},n=30", reference="{answer}")
    parts = [task.problems(split) for split in ("train", "select", "test")]
    assert [len(part) for part in parts] == [24, 3, 3] and task.problems("test_hard") == []
    tasks.check_reference_solutions(task, parts[0]).require()
    assert tasks.check_reward(task, parts[0]) == {}
    problem = next(p for part in parts for p in part if p.gold == "14")
    system = {"role": "system", "content": "Answer with a number."}
    assert problem.messages == [system, {"role": "user", "content": "Double 7."}]
    found = list(tasks.score_all(task, [problem] * 3, ["14", "15", "fourteen"]))
    assert [score.reward for score in found] == pytest.approx([1, 0.2 / 0.8, 0])
    assert [(score.tier, score.correct) for score in found] == [("full", True), ("some", False), ("none", False)]
    assert {name: found[1].terms[name] for name in ("exact", "digits")} == {"exact": 0, "digits": 1}
    wrongs = {
        f"{env},k=3": "k",
        "nowhere": "nowhere",
        "json": "json",
        f"{env},n=none": "none",
        f"{env},max_turns=2": "turns",
    }
    for wrong, named in wrongs.items():
        with raising(UserError, named):
            tasks.load(f"{ADAPTER}:Verifiers:env={wrong}")
