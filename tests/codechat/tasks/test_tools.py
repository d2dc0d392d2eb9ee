"""A file of functions and rows as a task: what counts as right, worlds, limits, and bad input."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, UserError
from codechat.tasks.tools import ToolsTask, answers
from codechat.text import chat, tool_calls
from codechat.training.rl_settings import RLSettings

SHOP = '''
import dataclasses
import datetime
import time
STOCK = {"tea": 3}
def price(item: str) -> float:
    """Price of an item."""
    return {"tea": 2.5, "cup": 6.0}[item]
def order(item: str, count: int = 1) -> int:
    """Order an item."""
    STOCK[item] -= count
    return STOCK[item]
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"
def shout() -> str:
    """Shout."""
    print("loud")
    return "quiet"
@dataclasses.dataclass
class Parcel:
    item: str
    count: int = 1
def send(parcels: list[Parcel], tags: set[str], when: datetime.datetime | None = None) -> int:
    """Send parcels."""
    return len(parcels)
'''
TEA = {"name": "price", "arguments": {"item": "tea"}}
OPENAI = {"type": "function", "function": {**TEA, "arguments": json.dumps(TEA["arguments"])}}
CUP = {"name": "price", "arguments": {"item": "cup"}}
ASKED = [{"role": "user", "content": "What is tea?"}]
ORDER = {"name": "order", "arguments": {"item": "tea"}}
SEND = {
    "name": "send",
    "arguments": {
        "parcels": [{"item": "tea"}],
        "tags": ["a", "b"],
        "when": "2026-01-02T10:00:00",
    },
}


def call(name: str, **arguments: Any) -> str:
    return tool_calls.format_call(name, arguments)


def made(folder: Path, *rows: dict[str, Any], more: str = "", trust: bool = True) -> ToolsTask:
    """A task of these rows, all of them to train on."""
    (folder / "shop.py").write_text(SHOP + more)
    given = [{"prompt": f"p{i}", "split": "train"} | row for i, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return ToolsTask(str(folder / "shop.py"), str(folder / "rows.jsonl"), trust=trust)


def played(task: ToolsTask, *answers: str) -> Any:
    """The score of an episode with these answers, and all that the world told."""
    world = task.environment()
    (problem,) = task.problems("train")
    world.reset(problem)
    told = []
    for text in answers:
        said, _, done = world.step({"role": "assistant", "content": text})
        told += [json.loads(message["content"]) for message in said]
        if done:
            break
    return world.score(), told


@pytest.mark.parametrize(
    "row, answer, reward",
    [
        ({"calls": [TEA]}, call("price", item="tea"), 1.0),
        ({"calls": TEA}, call("price", item="tea"), 1.0),
        ({"calls": [OPENAI]}, call("price", item="tea"), 1.0),
        ({"calls": [TEA]}, call("price", item="cup"), 0.25),
        ({"calls": [TEA]}, call("order", item="tea"), 0.0),
        ({"calls": [TEA]}, "It costs 2.5.", 0.0),
        ({"calls": [TEA, CUP]}, call("price", item="cup") + call("price", item="tea"), 1.0),
        ({"calls": [TEA]}, call("price", item="tea") + call("price", item="cup"), 0.5),
        ({"calls": [ORDER]}, call("order", item="tea", count=1), 1.0),
        ({"calls": [ORDER]}, call("order", item="tea", count=None), 1.0),
        ({"calls": [ORDER]}, call("order", item="tea", count=True), 0.25),
        (
            {"calls": [{"name": "shout"}]},
            '<functioncall> {"name": "shout", "arguments": "loud"}',
            0.25,
        ),
        (
            {"calls": [SEND]},
            call(
                "send",
                parcels=[{"count": 1.0, "item": "tea"}],
                tags=["b", "a"],
                when="2026-01-02T10:00",
            ),
            1.0,
        ),
        ({"calls": [SEND]}, call("send", parcels=[], tags=["b", "a"]), 0.25),
        ({"calls": json.dumps([TEA]), "answer": ""}, call("price", item="tea"), 1.0),
        ({"calls": []}, "I cannot sing.", 1.0),
        ({"calls": []}, call("price", item="tea"), 0.0),
        ({"answer": 5}, "2 + 3 makes 5.0!", 1.0),
        ({"answer": 5}, "5 or 6", 0.0),
        ({"answer": "Cloudy"}, "The answer is cloudy.", 1.0),
        ({"answer": "cloudy"}, "sunny, cloudy, rainy", 0.0),
        ({"answer": 2.5, "calls": [TEA]}, call("price", item="tea") + "\n2.5", 1.0),
        ({"answer": 2.5, "calls": [TEA]}, "2.5", 0.5),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_row_says_which_calls_and_which_answer_are_right(
    tmp_path: Path, row: dict[str, Any], answer: str, reward: float
) -> None:
    score, _ = played(made(tmp_path, row), answer)
    assert score.reward == reward
    assert score.correct == (reward == 1.0)


def test_an_answer_is_no_part_of_a_word() -> None:
    assert not answers("an unclear sky", "clear sky")
    assert not answers("2,500", 500)
    assert answers("1,500 euros", 1500)
    assert answers("It is .5", 0.5)
    assert not answers("It is .5", 5)
    assert answers("see no.5", 5)
    assert answers("on 31.12.2026", 2026)
    assert answers("from 10-30", 30)
    assert answers("It is \u22125 degrees", -5)


@pytest.mark.parametrize("content", [None, ""])
def test_a_prompt_may_hold_calls_and_results_in_openais_form(
    tmp_path: Path, content: str | None
) -> None:
    prompt = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": content, "tool_calls": [OPENAI | {"id": "a"}]},
        {"role": "tool", "content": "2.5", "tool_call_id": "a"},
        {"role": "user", "content": [{"type": "text", "text": "And a cup?"}]},
    ]
    task = made(tmp_path, {"calls": [CUP], "prompt": prompt})
    (problem,) = task.problems("train")
    system, *told = task.prompt(problem)
    assert system["content"].startswith("Be brief.")
    assert [message["content"] for message in told] == [
        "What is tea?",
        call("price", item="tea"),
        "2.5",
        "And a cup?",
    ]
    assert played(task, call("price", item="cup"))[0].correct


def test_reference_solutions_of_rows_score_the_maximum(tmp_path: Path) -> None:
    task = made(tmp_path, {"calls": [TEA, CUP]}, {"calls": []}, {"answer": 3, "calls": [TEA]})
    assert tasks.check_reference_solutions(task, task.problems("train")).require().n == 3


@pytest.mark.parametrize("trust", [True, False], ids=["trusted", "sandboxed"])
def test_each_episode_has_a_world_of_its_own(tmp_path: Path, trust: bool) -> None:
    task = made(tmp_path, {"answer": "x"}, trust=trust)
    (problem,) = task.problems("train")
    one, two = task.environment(), task.environment()
    for world in (one, two):
        world.reset(problem)
    left = []
    for world in (one, two, one, two, one):
        (said,), _, _ = world.step({"role": "assistant", "content": call("order", item="tea")})
        left.append(json.loads(said["content"])["result"])
    assert left == [2, 2, 1, 1, 0]


@pytest.mark.parametrize("trust", [True, False], ids=["trusted", "sandboxed"])
def test_a_reward_of_the_file_sees_the_conversation_the_row_and_the_state(
    tmp_path: Path, trust: bool
) -> None:
    reward = """
def reward(messages, row):
    called = [m["tool_calls"][0]["function"]["name"] for m in messages if "tool_calls" in m]
    return float(called == ["order"] and STOCK["tea"] == row["left"])
"""
    task = made(tmp_path, {"left": 2}, more=reward, trust=trust)
    assert "reward" not in task.kit.names
    assert task.no_references
    score, _ = played(task, call("order", item="tea"), "ordered")
    assert score.correct
    assert played(task, call("order", item="tea", count=2), "ordered")[0].reward == 0


def test_an_episode_ends_at_its_limits_and_when_nothing_more_can_be_earned(tmp_path: Path) -> None:
    task = made(tmp_path, {"answer": 1})
    task.max_calls = 2
    _, told = played(task, 3 * call("price", item="tea"), call("price", item="tea"))
    assert [next(iter(said)) for said in told] == ["result", "result", "error"]
    once = made(tmp_path, {"calls": [TEA]})
    assert len(played(once, *3 * [call("price", item="tea")])[1]) == 1


def test_results_are_masked_from_the_loss(tmp_path: Path) -> None:
    from codechat.models import generate
    from codechat.rl import episodes
    from codechat.text import tokenizer

    tok = tokenizer.load("gpt2:512")
    task = made(tmp_path, {"answer": 1})
    episode = episodes.Episode(task, task.problems("train")[0], 0, "0", tok, "reserved")
    for number, text in enumerate((call("price", item="tea"), "1")):
        ids = chat.completion_ids(text, tok)
        given = generate.Completion(ids, [0.0] * len(ids), "stop", [True] * len(ids), None)
        episode.take(given, last=number == 1, room=2000)
    written = [id for id, own in zip(episode.ids, episode.mask) if own]
    assert "2.5" in chat.decode(episode.ids, tok)
    assert "2.5" not in chat.decode(written, tok)


def test_a_function_that_depends_on_the_clock_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    clock = "def now() -> float:\n    return time.time()\n"
    task = made(tmp_path, {"answer": "x"}, more=clock, trust=False)
    (problem,) = task.problems("train")
    worlds = [task.environment(), task.environment()]
    for world in worlds:
        world.reset(problem)
    for world in 3 * worlds:
        world.step({"role": "assistant", "content": call("now")})
    assert capsys.readouterr().err.count("gave another result") == 1


# ---- bad input


@pytest.mark.parametrize("depth", [60, 600, 900])
def test_arguments_of_any_depth_end_no_run(tmp_path: Path, depth: int) -> None:
    deep = depth * "[" + depth * "]"
    text = f'<functioncall> {{"name": "price", "arguments": {{"item": {deep}}}}}'
    score, (said,) = played(made(tmp_path, {"calls": [TEA]}), text)
    assert score.reward <= 0.25
    assert "error" in said


@pytest.mark.parametrize("trust", [True, False], ids=["trusted", "sandboxed"])
def test_a_function_that_raises_hangs_or_prints_gives_a_result_and_the_run_goes_on(
    tmp_path: Path, trust: bool, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codechat.text.tool_functions.CALL_S", 0.5)
    task = made(tmp_path, {"answer": 1}, trust=trust)
    said = played(
        task,
        call("price", item="pot"),
        call("wait", seconds=9),
        call("shout"),
        call("order", item="tea"),
    )[1]
    assert said[0] == {"error": "KeyError: 'pot'"}
    assert "ran 0.5 seconds" in said[1]["error"]
    assert said[2:] == [{"result": "quiet"}, {"result": 2}]
    told = capsys.readouterr()
    assert told.out == ""


@pytest.mark.parametrize(
    "body",
    ["return float('nan')", "return 2", "raise ValueError('no')", "return '0.5'", "return None"],
)
def test_a_reward_that_is_no_number_from_0_to_1_counts_as_error_and_is_said_once(
    tmp_path: Path, body: str, capsys: pytest.CaptureFixture
) -> None:
    task = made(tmp_path, {"x": 1}, more=f"def reward(messages, row):\n    {body}\n")
    for _ in range(2):
        score, _ = played(task, "hello")
        assert (score.reward, score.tier) == (0.0, "error")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "row, named",
    [
        ({}, "row 1 .* expected calls or answer"),
        ({"calls": [{"name": "cost", "arguments": {}}]}, "expected calls of price, order"),
        ({"calls": [{"name": "price", "arguments": {"item": 3}}]}, "fit price: item"),
        ({"calls": [{"name": "price", "arguments": {}}]}, "fit price: .*item"),
        (
            {"calls": [{"name": "price", "arguments": {"item": "tea", "unit": "kg"}}]},
            "fit price: .*.unit. was unexpected",
        ),
        ({"calls": "price(tea)"}, "got the calls 'price.tea.'; expected a list"),
        ({"calls": [{"name": "shout", "arguments": "loud"}]}, "an object of arguments for shout"),
        ({"calls": 5}, "got the calls '5'; expected a list"),
        ({"calls": 9 * [TEA]}, "expected at most 8 calls; raise max_calls"),
        ({"answer": [1, 2]}, "expected a text or a number"),
        ({"answer": True}, "expected a text or a number"),
        ({"answer": float("nan")}, "expected a text or a number"),
        ({"answer": 10**400}, "expected a text or a number"),
        ({"answer": " !"}, "expected a text or a number"),
        ({"answer": 1, "prompt": ["hello"]}, "messages with a role"),
        ({"answer": 1, "prompt": [{"role": "boss", "content": "hello"}]}, "messages with a role"),
        ({"answer": 1, "prompt": [{"role": "user"}]}, "messages with a role"),
        (
            {"answer": 1, "prompt": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            "result_without_call",
        ),
        (
            {"answer": 1, "prompt": [*ASKED, {"role": "assistant", "content": "x"}]},
            "ends with an answer; expected a request or a result",
        ),
    ],
)
def test_a_row_without_what_is_right_is_named(tmp_path: Path, row: dict, named: str) -> None:
    with pytest.raises(DataError, match=named):
        made(tmp_path, row)


def test_a_function_without_types_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="shop.py line .*: stir: parameter x has no type hint"):
        made(tmp_path, {"answer": 1}, more="def stir(x): ...\n")


def test_hints_and_tables_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stir: its hints cannot be read .SyntaxError"):
        made(tmp_path, {"answer": 1}, more="def stir(x: 'int['): ...\n")
    with pytest.raises(DataError, match="shop.py: EXECUTORS is .1.; expected a dict"):
        made(tmp_path, {"answer": 1}, more="EXECUTORS = [1]\n")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {}, "additionalProperties": {}},
        {"allOf": [{"properties": {"item": {"type": "string"}}}]},
    ],
)
def test_a_row_may_give_what_any_part_of_a_schema_has(tmp_path: Path, schema: Any) -> None:
    task = offered(tmp_path, schema)
    assert played(task, call("price", item="tea"))[0].correct


def offered(tmp_path: Path, schema: Any) -> ToolsTask:
    """A task whose function `price` has this schema of its parameters."""
    made(tmp_path, {"calls": [TEA]})
    tools = tmp_path / "shop.json"
    tools.write_text(json.dumps([{"name": "price", "description": "", "parameters": schema}]))
    files = [str(tmp_path / "shop.py"), str(tools)]
    return ToolsTask(files, str(tmp_path / "rows.jsonl"), trust=True)


@pytest.mark.parametrize("path", ["$defs/Node", "definitions/Node", "properties/node"])
def test_a_schema_whose_default_holds_itself_is_named_before_the_run(
    tmp_path: Path, path: str
) -> None:
    key, name = path.split("/")
    again = {"$ref": f"#/{path}", "default": {}}
    node = {"type": "object", "properties": {"next": again}}
    schema: dict[str, Any] = {"properties": {"item": {"type": "string"}}}
    schema.setdefault(key, {})[name] = node
    with pytest.raises(ConfigError, match="schema of price refers to itself"):
        offered(tmp_path, schema)


def test_a_class_that_refers_to_nothing_ends_no_run_that_does_not_need_it(tmp_path: Path) -> None:
    schema = {
        "properties": {"item": {"type": "string"}},
        "$defs": {"Unused": {"anyOf": [{"$ref": "#/$defs/Gone"}, {"type": "null"}]}},
    }
    task = offered(tmp_path, schema)
    assert task.kit.schemas["price"]["parameters"]["$defs"] == schema["$defs"]


def test_a_csv_file_holds_calls_as_json(tmp_path: Path) -> None:
    made(tmp_path, {"answer": 1})
    rows = tmp_path / "rows.csv"
    rows.write_text(
        'prompt,calls,answer,split\np,"[{""name"": ""shout""}]",,train\nq,,quiet,train\n'
    )
    task = ToolsTask(str(tmp_path / "shop.py"), str(rows), trust=True)
    golds = {problem.messages[0]["content"]: problem.gold for problem in task.problems("train")}
    assert golds["p"]["calls"] == [{"name": "shout"}]
    assert golds["p"]["answer"] is None
    assert (golds["q"]["calls"], golds["q"]["answer"]) == (None, "quiet")


def test_none_of_an_optional_argument_gives_the_function_its_default(tmp_path: Path) -> None:
    more = """
def show(a: str = "x", b: int | None = 3) -> list:
    return [a, b]
"""
    (said,) = played(made(tmp_path, {"answer": 1}, more=more), call("show", a=None, b=None))[1]
    assert said == {"result": ["x", None]}


def test_a_reward_may_read_calls_and_answer_as_it_likes(tmp_path: Path) -> None:
    more = "def reward(messages, row):\n    return float(row['calls'] == 5)\n"
    task = made(tmp_path, {"calls": 5, "answer": {"any": 1}}, more=more)
    assert task.no_references
    assert played(task, "hello")[0].correct


def test_an_error_whose_message_raises_one_is_a_result(tmp_path: Path) -> None:
    more = """
class Mute(Exception):
    def __str__(self):
        raise ValueError
def sulk() -> str:
    raise Mute
"""
    (said,) = played(made(tmp_path, {"answer": 1}, more=more), call("sulk"))[1]
    assert said == {"error": "Mute: <exception str() failed>"}


def test_a_file_that_prints_prints_once_and_one_that_runs_once_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    mark = tmp_path / "mark"
    more = f'print("read")\nopen({str(mark)!r}, "a").write("x")\n'
    task = made(tmp_path, {"answer": 1}, more=more)
    played(task, "hello")
    assert mark.read_text() == "xx"
    assert capsys.readouterr().out == "read\n"
    mark.unlink()
    task = made(tmp_path, {"answer": 1}, more=f'open({str(mark)!r}, "x")\n')
    with pytest.raises(DataError, match="shop.py line .*: FileExistsError"):
        played(task, "hello")


def test_a_trusted_reward_that_hangs_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codechat.text.tool_functions.CALL_S", 0.2)
    more = "def reward(messages, row):\n    time.sleep(60)\n"
    score, _ = played(made(tmp_path, {}, more=more), "hello")
    assert score.parts["error"] == "TimeoutError: reward ran 0.2 seconds"


@pytest.mark.parametrize("trust", [True, False], ids=["trusted", "sandboxed"])
def test_a_reward_cannot_change_its_row_and_reads_what_json_does_not_hold(
    tmp_path: Path, trust: bool
) -> None:
    more = """
def reward(messages, row):
    row["seen"].append(row["when"])
    return float(len(row["seen"]) == 1)
"""
    task = made(tmp_path, {"seen": []}, more=more, trust=trust)
    (problem,) = task.problems("train")
    task.row_of(problem)["when"] = datetime.date(2026, 1, 2)  # as from a parquet file
    assert [played(task, "hello")[0].reward for _ in range(2)] == [1.0, 1.0]


def test_an_episode_ends_where_the_template_cannot_go_on(tmp_path: Path) -> None:
    from imported import both

    from codechat.models import generate
    from codechat.rl import episodes

    template = Path(__file__).parents[1] / "text/templates/tools_llama.jinja"
    tok = both("bytes", template.read_text().removesuffix("\n"))[0]
    task = made(tmp_path, {"answer": 1})
    episode = episodes.Episode(task, task.problems("train")[0], 0, "0", tok, "native")
    two = 2 * '{"name": "price", "parameters": {"item": "tea"}}\n'
    ids = [*tok.encode_behind("", two)[0], *chat.stop_sequences(tok, "native")[0]]
    episode.take(generate.Completion(ids, [0.0] * len(ids), "stop"), last=False, room=2000)
    assert (episode.stop, len(episode.turns[0].replies)) == ("turns", 2)
    assert "one call at a time" in episode.fault


def test_a_file_that_the_sandbox_cannot_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shop.py does not load in the sandbox .*numpy.*--trust"):
        made(tmp_path, {"answer": 1}, more="import numpy\n", trust=False)


def test_the_settings_make_the_task_of_the_files(tmp_path: Path) -> None:
    cfg = RLSettings(tools=("a.py",), data_dir="rows.jsonl")
    assert cfg.task == "tools:a.py"
    assert (
        RLSettings(tools=("a b.py", "f"), trust=True).task
        == 'tools:tools=["a b.py", "f"],trust=true'
    )
    assert tasks.find_class('tools:tools=["a b.py", "f"]')[0] is ToolsTask
    with pytest.raises(ConfigError, match="keep one"):
        RLSettings(task="toy", tools=("a.py",))
    with pytest.raises(ConfigError, match="no task"):
        RLSettings()
    with pytest.raises(ConfigError, match="--data-dir"):
        tasks.load("tools:a.py")
