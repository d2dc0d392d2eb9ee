"""Several turns with simulated systems: a wheel of two small systems stands for the downloaded
one."""

from pathlib import Path
from typing import Any

import pytest
from jsonl import write
from raising import raising

from codechat import tasks
from codechat.core.atomic_files import read_rows
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.rl import episodes
from codechat.tasks.base import Problem
from codechat.text import tokenizer, tool_calls
from codechat_lab.tasks.bfcl import multi_turn
from codechat_lab.tasks.bfcl.multi_turn import MultiTurnEnvironment, MultiTurnTask, gold_steps

FILES = """
import math
LEFT = []  # of the module: it must not outlive an episode's step

class GorillaFileSystem:
    def _load_scenario(self, config, long_context=False):
        self.names = list(config["names"]) + (["long"] if long_context else [])
        self._where = "/"

    def mkdir(self, name):
        LEFT.append(name)
        self.names.append(name)

    def ls(self):
        return {"names": self.names}

    def left(self):
        return len(LEFT)

    def cat(self, name):
        return open(name).read()

    def wait(self):
        while True:
            pass

    def stop(self):
        import os
        os._exit(0)
"""
MATH = """
class MathAPI:
    def add(self, a, b):
        return {"result": a + b}
"""
NAME = {"type": "dict", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NOTHING = {"type": "dict", "properties": {}, "required": []}
NUMBERS = {
    "type": "dict",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
DOCUMENTS = {
    "gorilla_file_system": [
        {"name": name, "description": "d", "parameters": parameters, "response": NOTHING}
        for name, parameters in (
            ("mkdir", NAME),
            ("ls", NOTHING),
            ("cat", NAME),
            ("wait", NOTHING),
            ("stop", NOTHING),
        )
    ],
    "math_api": [{"name": "add", "description": "d", "parameters": NUMBERS, "response": NOTHING}],
}
TRUTH = [["mkdir('a')", "ls()"], ["add(a=1, b=2)"]]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def entry(category: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"multi_turn_{category}_{number}",
        "question": [user("Make a folder a and list."), user("1 and 2?")],
        "initial_config": {"GorillaFileSystem": {"names": ["x"]}},
        "involved_classes": ["GorillaFileSystem", "MathAPI"],
        **more,
    }


LATE = entry(
    "miss_func",
    0,
    question=[user("Make a folder a and list."), user("1 and 2?"), []],
    missed_function={"2": ["add"]},
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The root of an unpacked wheel."""
    data = tmp_path / "bfcl_eval" / "data"
    code = tmp_path / "bfcl_eval" / multi_turn.MODULES
    (data / "possible_answer").mkdir(parents=True)
    (data / "multi_turn_func_doc").mkdir()
    code.mkdir(parents=True)
    for name, text in (("gorilla_file_system", FILES), ("math_api", MATH), ("long_context", "")):
        (code / f"{name}.py").write_text(text)
    for name, rows in DOCUMENTS.items():
        write(data / "multi_turn_func_doc" / f"{name}.json", rows)
    rows = {
        "base": ([entry("base", i) for i in range(20)], TRUTH),
        "miss_func": ([LATE], [TRUTH[0], [], TRUTH[1]]),
        "long_context": ([entry("long_context", 0)], TRUTH),
    }
    for category, (entries, truth) in rows.items():
        file = f"BFCL_v4_multi_turn_{category}.json"
        write(data / file, entries)
        answers = [{"id": row["id"], "ground_truth": truth} for row in entries]
        write(data / "possible_answer" / file, answers)
    return tmp_path


def load(wheel: Path, categories: str = "base", **options: Any) -> MultiTurnTask:
    return MultiTurnTask(str(wheel), categories, **options)


def start(wheel: Path, categories: str = "base") -> tuple[MultiTurnEnvironment, Problem]:
    task = load(wheel, categories)
    world = task.environment()
    problem = task.rows[0]
    world.reset(problem, 0)
    return world, problem


def say(world: MultiTurnEnvironment, *texts: str) -> list[str]:
    """What the world says to the last of these answers."""
    told: list[dict[str, str]] = []
    for text in texts:
        told, _, _ = world.step({"role": "assistant", "content": text})
    return [message["content"] for message in told]


def call(name: str, /, **arguments: Any) -> str:
    return tool_calls.format_call(name, arguments)


RIGHT = (call("mkdir", name="a") + call("ls"), "Done.", call("add", a=1, b=2), "Done.")


@pytest.mark.parametrize("category", ["base", "miss_func", "long_context"])
def test_the_reference_calls_of_an_episode_are_correct(wheel: Path, category: str) -> None:
    task = load(wheel, category)
    played = episodes.replay(task, task.rows[0], gold_steps(task.rows[0]), tokenizer.load("bytes"))
    assert played.score.correct
    assert sum(turn.reward for turn in played.turns) == pytest.approx(1.0)


def test_results_are_the_texts_that_the_leaderboard_writes(wheel: Path) -> None:
    world, _ = start(wheel)
    assert say(world, RIGHT[0]) == ["None", '{"names": ["x", "a"]}']
    assert say(world, "[add(a=1, b=2), foo(), add(a=1)]") == [
        '{"result": 3}',
        "Error during execution: name 'foo' is not defined",
        "Error during execution: MathAPI.add() missing 1 required positional argument: 'b'",
    ]


def test_an_answer_without_a_call_begins_the_next_turn(wheel: Path) -> None:
    world, _ = start(wheel)
    assert say(world, RIGHT[0], "Done.") == ["1 and 2?"]


def test_a_function_that_was_missing_arrives_with_its_turn(wheel: Path) -> None:
    world, problem = start(wheel, "miss_func")
    assert "add" not in world.reset(problem, 0)[0]["content"]
    (told,) = say(world, RIGHT[0], "Done.", "There is no such function.")
    assert "add(" in told
    assert multi_turn.MORE in told


@pytest.mark.parametrize(
    ("answers", "tier"),
    [
        (["Done."], "no_call"),
        ([call("mkdir", name="b") + call("ls"), "Done."], "wrong_state"),
        ([call("mkdir", name="a"), "Done."], "missing_result"),
        (["<functioncall> {"], "no_call"),
        ([*RIGHT[:2], call("add", a=1.0, b=2), "Done."], "missing_result"),
        ([*RIGHT[:2], call("ls") + RIGHT[2], "Done."], "full"),
        ([RIGHT[0], RIGHT[2], "Done.", call("ls"), "Done."], "full"),
        ([*RIGHT[:3]], "unfinished"),
    ],
)
def test_verdicts(wheel: Path, answers: list[str], tier: str) -> None:
    world, _ = start(wheel)
    say(world, *answers)
    assert world.score().tier == tier


def test_the_reward_counts_turns_before_the_first_fault(wheel: Path) -> None:
    world, _ = start(wheel)
    say(world, *RIGHT[:2], "Three.")
    assert world.score().reward == pytest.approx(0.25)


def test_more_than_twenty_steps_in_a_turn_end_the_episode(wheel: Path) -> None:
    world, _ = start(wheel)
    say(world, *[call("ls")] * 20)
    assert not world.closed
    say(world, call("ls"))
    assert world.score().tier == "too_many_steps"


def test_samples_of_an_entry_share_no_state(wheel: Path) -> None:
    """Neither that of instances nor that of modules, also where they take turns."""
    task = load(wheel)
    wrong = task.environment()
    right = task.environment()
    for world in (wrong, right):
        world.reset(task.rows[0], 0)
    say(wrong, call("mkdir", name="b"))
    assert say(right, RIGHT[0]) == ["None", '{"names": ["x", "a"]}']
    assert say(right, call("left")) == ["1"]
    say(wrong, "Done.")
    say(right, *RIGHT[1:])
    assert right.score().correct
    assert not wrong.score().correct


def test_the_systems_run_in_the_sandbox(wheel: Path) -> None:
    world, _ = start(wheel)
    (told,) = say(world, call("cat", name="/etc/passwd"))
    assert "Permission denied" in told


@pytest.mark.parametrize("name", ["wait", "stop"])
def test_a_system_that_hangs_or_ends_breaks_its_own_episode(
    wheel: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, problem = start(wheel)
    with monkeypatch.context() as hurried:
        hurried.setattr(multi_turn, "ANSWER_S", 0.5)
        say(world, call(name))
    assert world.score().tier == "broken"
    assert world.score().parts["reason"]
    world.reset(problem, 0)
    say(world, *RIGHT)
    assert world.score().correct


@pytest.mark.parametrize(
    "name",
    [
        "math_api.py",
        "long_context.py",
    ],
)
def test_a_missing_system_is_named_with_the_command_that_fetches_it(wheel: Path, name: str) -> None:
    (wheel / "bfcl_eval" / multi_turn.MODULES / name).unlink()
    with raising(MissingFile, name, "codechat download bfcl"):
        load(wheel)


def test_data_without_its_wheel_is_no_reason_to_remove_the_folder_above(wheel: Path) -> None:
    data = (wheel / "bfcl_eval" / "data").rename(wheel / "data")
    with raising(MissingFile, "is missing") as raised:
        load(data)
    assert "remove" not in str(raised.value)


def test_a_damaged_system_is_named_before_an_episode(wheel: Path) -> None:
    module = wheel / "bfcl_eval" / multi_turn.MODULES / "math_api.py"
    module.write_bytes(b"class MathAPI:\n    def (\xff")
    with raising(DataError, "math_api", "is damaged", "codechat download bfcl"):
        load(wheel)


def test_damaged_rows_are_lost_alone(wheel: Path) -> None:
    path = wheel / "bfcl_eval" / "data" / "BFCL_v4_multi_turn_base.json"
    rows = list(read_rows(path))
    rows[0]["initial_config"] = None
    write(path, rows)
    assert len(load(wheel).rows) == 19
    rows[0]["initial_config"] = {}
    rows[0]["question"] = []
    write(path, rows)
    assert len(load(wheel).rows) == 19


def test_an_unknown_system_is_named_and_not_counted_as_a_lost_row(wheel: Path) -> None:
    path = wheel / "bfcl_eval" / "data" / "BFCL_v4_multi_turn_base.json"
    rows = list(read_rows(path))
    rows[0]["involved_classes"] = ["MathAPI", "DiceAPI"]
    write(path, rows)
    with raising(DataError, "system DiceAPI is unknown", "codechat download bfcl"):
        load(wheel)


def test_without_a_download_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codechat.runs.paths.ROOT", tmp_path)
    with raising(MissingFile, "codechat download bfcl"):
        tasks.load("bfcl_multi_turn")


@pytest.mark.parametrize("name", ["memory", "web_search"])
def test_categories_that_are_left_out_are_named(wheel: Path, name: str) -> None:
    with raising(ConfigError, name, "left out"):
        load(wheel, name)


def test_rows_that_cannot_be_read_are_lost(wheel: Path) -> None:
    path = wheel / "bfcl_eval" / "data" / "possible_answer" / "BFCL_v4_multi_turn_base.json"
    answers = [{"id": f"multi_turn_base_{i}", "ground_truth": [["ls("], []]} for i in range(20)]
    write(path, answers)
    with raising(DataError, "bad_row"):
        load(wheel)


def test_splits_for_training_share_no_scenario(wheel: Path) -> None:
    task = load(wheel, "base+miss_func+long_context", train_share=0.6)
    scenarios = {
        split: {problem.meta["scenario"] for problem in task.problems(split)}
        for split in ("train", "select", "test")
    }
    assert all(scenarios.values())
    assert sum(map(len, scenarios.values())) == 20


def test_all_problems_are_the_test_unless_a_share_is_for_training(wheel: Path) -> None:
    assert len(load(wheel).problems("test")) == 20
    assert not load(wheel).problems("train")
