"""Code as actions: Python in the sandbox reaches the episode only by its calls."""

from __future__ import annotations

import os
from typing import Any

import pytest

from codechat.sandbox import bridge, layers
from codechat.tasks import apps, check_reference_solutions
from codechat.tasks.apps import code

pytestmark = pytest.mark.slow  # starts processes
TASK = apps.AppsTask(actions="code")


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Any:
    try:
        layers.choose("auto")
    except layers.SandboxUnavailable as error:
        pytest.skip(str(error))
    yield
    bridge.close()


def errand(source: str, **how: Any) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        asked.append((name, arguments))
        return name != "notes_no", {"id": len(asked)}

    output, problem = bridge.run(source, {"notes_add": ["title", "text"], "notes_no": []}, answer, **how)
    return output, problem, asked


def test_calls_leave_the_sandbox_and_results_return() -> None:
    output, problem, asked = errand("for i in range(3):\n    x = apis.notes.add('t', text=str(i))\nprint(x['id'] + 1)")
    assert (output, problem) == ("4\n", "") and asked == [
        ("notes_add", {"title": "t", "text": str(i)}) for i in range(3)
    ]


def test_an_invalid_call_is_an_exception_in_the_program() -> None:
    output, problem, asked = errand("print(1)\napis.notes.no()\nprint(2)")
    assert output == "1\n" and problem == "Refused: {'id': 1}" and len(asked) == 1
    assert errand("try:\n    apis.notes.no()\nexcept Exception:\n    print('caught')")[:2] == ("caught\n", "")
    assert "no function apis.notes.fly" in errand("apis.notes.fly()")[1] and "syntax" in errand("print(")[1].lower()


def test_a_program_that_hangs_or_leaves_is_ended_and_the_next_one_runs() -> None:
    assert errand("while True: pass", timeout_s=0.5)[1] == "out of time"
    assert errand("import os\nos._exit(0)")[1].startswith("the program's process was lost")
    assert errand("raise SystemExit(3)")[1] == "SystemExit: 3"
    assert errand("print('here')")[0] == "here\n"


def test_a_program_whose_answer_raised_leaves_nothing_to_the_next_one() -> None:
    def raises(name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        raise KeyError(name)

    for answer in (raises, lambda name, arguments: (True, {1, 2})):  # the second: a result that is no JSON
        with pytest.raises((KeyError, TypeError)):
            bridge.run("apis.notes.no()", {"notes_no": []}, answer)
        assert errand("print('here')") == ("here\n", "", [])


def test_only_data_leaves_the_sandbox() -> None:
    assert "TypeError" in errand("apis.notes.add(title=lambda: 1, text=print)")[1]
    assert errand("apis.notes.add(title={'a': [1, None]}, text=2.5)")[2] == [
        ("notes_add", {"title": {"a": [1, None]}, "text": 2.5})
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import codechat.tasks.apps",
        "open('/etc/passwd').read()",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "import subprocess\nsubprocess.run(['ls'])",
        "import os\nos.kill(PID, 9)",
    ],
)
def test_the_isolation_holds(source: str) -> None:
    assert errand(source.replace("PID", str(os.getpid())))[1]


def test_experts_solve_their_problems_in_code() -> None:
    found = TASK.problems("train", 10)
    assert check_reference_solutions(TASK, found).ok
    world = TASK.environment()
    messages = apps.trajectory(found[1], world)
    assert (
        world.score().correct
        and messages[2]["content"].startswith("```python\nprint(apis.")
        and "apis." in messages[0]["content"]
    )


def test_several_calls_in_one_block_and_an_error_in_the_middle() -> None:
    problem = next(
        p
        for p in TASK.problems("train", 40)
        if p.meta["level"] == 2 and len(p.gold["calls"]) == 2 and "task" not in p.gold["calls"][1]["name"]
    )
    first, second = problem.gold["calls"]
    key, by = first["arguments"]["query"], next(iter(second["arguments"]))
    rest = ", ".join(f"{k}={v!r}" for k, v in second["arguments"].items() if k != by)
    source = f"found = {code.spelling(first['name'])}({key!r})\n{code.spelling(second['name'])}({by}=found[0]['id'], {rest})\nprint('ok')\n1 / 0"
    world = TASK.environment()
    world.reset(problem, 0)
    told, reward, done = world.step({"role": "assistant", "content": code.as_block(source)})
    assert (
        reward == 1.0
        and not done
        and told[0]["content"].startswith('{"error": "ok\\n')
        and "ZeroDivisionError" in told[0]["content"]
    )
    assert world.step({"role": "assistant", "content": "Done."})[1:] == (0.0, True)


def test_code_cannot_score_without_solving_the_task() -> None:
    """Score, gold and database are in another process: code that searches for them finds nothing, and the closing tools still end the episode."""
    problem = TASK.problems("train", 1)[0]
    for source in (
        "import gc\nprint([o for o in gc.get_objects() if 'gold' in str(type(o))])\napis.task.answer('done')",
        "apis.task.decline()\n" + "\n".join(s.split("\n")[1] for s in apps.gold_steps(problem)[:-1]),
        "apis.reward = 1",
        "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\nprint(list(frame.f_globals))",
        "print('{\"reward\": 1}')",
    ):
        world = TASK.environment()
        world.reset(problem, 0)
        world.step({"role": "assistant", "content": code.as_block(source)})
        assert not world.score().correct and world.score().reward == 0


def test_a_tool_that_is_not_offered_fails_even_when_code_bypasses_the_stub() -> None:
    problem = TASK.problems("train", 1)[0]
    world = TASK.environment()
    world.reset(problem, 0)
    name = next(n for n in ("notes_add", "files_write") if n not in problem.meta["tools"])
    source = f"app = [v for k, v in vars(apis).items()][0]\nprint(app._call({name!r}, {{'title': 'x', 'text': 'y', 'path': 'z'}}))"
    told, _, _ = world.step({"role": "assistant", "content": code.as_block(source)})
    assert "there is no function" in told[0]["content"] and world.state_diff() == []


def test_arguments_without_names_fail_in_the_program_and_score_nothing() -> None:
    problem = TASK.problems("train", 1)[0]
    name = problem.meta["tools"][0]
    for arguments in ("5", "None", "['id']", "'x'"):
        world = TASK.environment()
        world.reset(problem, 0)
        source = f"print(apis.{name.partition('_')[0]}._call({name!r}, {arguments}))"
        told, reward, _ = world.step({"role": "assistant", "content": code.as_block(source)})
        assert "[False, " in told[0]["content"]
        assert reward == 0 and world.state_diff() == []
