"""Tools of one's own: arguments reach a function in the types of its hints, and a file of untyped functions takes its schemas from --tools-file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from codechat.core.errors import DataError
from codechat.inference.toolkit import Toolkit, gather
from codechat.text import chat
from codechat.text.tool_functions import executors_of


def takes(function: Any, **arguments: Any) -> Any:
    """What a function of one parameter x receives, as its text; the error where it is refused."""
    kit = Toolkit([e.schema for e in executors_of([function]).values()], {function.__name__: function})
    (call,) = chat.parse_calls(chat.format_call(function.__name__, arguments))
    answer = json.loads(kit.respond(call))
    return answer.get("result", "refused")


def test_arguments_reach_a_function_in_the_types_of_its_hints() -> None:
    def an_int(x: int) -> str:
        return repr(x)

    def maybe(x: int | None = None) -> str:
        return repr(x)

    def ints(x: list[int]) -> str:
        return repr(x)

    def rows(x: list[list[int]]) -> str:
        return repr(x)

    def choice(x: Literal[1, 2]) -> str:
        return repr(x)

    def counts(x: dict[str, int]) -> str:
        return repr(x)

    def floats(x: list[float]) -> str:
        return repr(x)

    def words(x: list[str]) -> str:
        return repr(x)

    def flag(x: bool) -> str: return repr(x)  # fmt: skip

    for function, given, received in (
        (an_int, 3.0, "3"), (an_int, 3, "3"), (an_int, -0.0, "0"), (an_int, 1e20, str(10**20)), (an_int, 3.5, "refused"), (an_int, "3", "refused"),
        (an_int, True, "refused"), (an_int, [3], "refused"), (maybe, 4.0, "4"), (ints, [1.0, 2, 3.0], "[1, 2, 3]"), (ints, [1, "2"], "refused"),
        (ints, [1, 2.5], "refused"), (ints, [True], "refused"), (rows, [[1.0], []], "[[1], []]"), (rows, [[1], 2], "refused"), (choice, 2.0, "2"), (choice, 3, "refused"),
        (counts, {"a": 2.0}, "{'a': 2}"), (counts, {"a": "2"}, "refused"), (floats, [1.5, 2], "[1.5, 2]"), (floats, [True], "refused"), (words, ["a", 1], "refused"),
        (words, [["a"]], "refused"), (flag, 1, "refused"), (flag, True, "True"),
    ):  # fmt: skip
        assert takes(function, x=given) == received, (function.__name__, given)


def test_schemas_of_a_file_convert_too() -> None:
    seen = []
    integer = {"type": "integer"}
    schema = {"name": "f", "description": "", "parameters": {"type": "object", "required": [], "properties": {
        "a": integer, "b": {"anyOf": [integer, {"type": "null"}]}, "c": {"type": ["integer", "null"]}, "d": {"type": "object", "properties": {"e": integer}},
        "g": {"type": "number"}, "h": {"type": "array", "prefixItems": [integer]}, "i": {"anyOf": [{"type": "string"}, {"type": "number"}]}}}}  # fmt: skip
    kit = Toolkit([schema], {"f": lambda **given: seen.append(given)})
    (call,) = chat.parse_calls(
        chat.format_call("f", {"a": 1.0, "b": 2.0, "c": 3.0, "d": {"e": 4.0}, "g": 5.0, "h": [6.0], "i": 7.0})
    )
    assert json.loads(kit.respond(call)) == {"result": None}
    assert repr(seen[0]) == repr({"a": 1, "b": 2, "c": 3, "d": {"e": 4}, "g": 5.0, "h": [6], "i": 7.0})


ORIGINAL = """
def weather(city, unit="celsius"):
    return f"{city} in {unit}"

def helper(x):
    return x

class Counter:
    n = 0
    def __call__(self, by):
        self.n += by
        return self.n

EXECUTORS = {"get_weather": weather, "add": lambda a, b: a + b, "count": Counter(), "total": lambda args: sum(args.values())}
"""


def test_a_file_of_untyped_functions_takes_its_schemas_from_the_tools_file(tmp_path: Path) -> None:
    file, tools = tmp_path / "own.py", tmp_path / "tools.json"
    file.write_text(ORIGINAL)
    number = {"type": "integer"}
    listed = {
        "get_weather": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "add": {"a": number, "b": number},
        "count": {"by": number},
        "total": {"a": number, "b": number},
    }
    tools.write_text(
        json.dumps([{"name": name, "parameters": {"type": "object", "properties": of}} for name, of in listed.items()])
    )
    kit = gather(tools_file=tools, executors=file)
    assert kit.names == list(listed)
    for name, arguments, result in (
        ("get_weather", {"city": "Oslo"}, "Oslo in celsius"),
        ("add", {"a": 1.0, "b": 2}, 3),
        ("count", {"by": 2}, 2),
        ("count", {"by": 2}, 4),
        ("total", {"a": 1.0, "b": 2}, 3),
    ):
        (call,) = chat.parse_calls(chat.format_call(name, arguments))
        assert kit.can_run(call) and json.loads(kit.respond(call)) == {"result": result}
    file.write_text(
        ORIGINAL.partition("EXECUTORS")[0].replace("weather", "get_weather")
    )  # the functions by their own names
    kit = gather(tools_file=tools, executors=file)
    assert "get_weather" in kit.functions and "helper" not in kit.functions
    with pytest.raises(DataError, match="line 2: get_weather: parameter city .*--tools-file"):
        gather(executors=file)
    file.write_text(ORIGINAL)
    with pytest.raises(DataError, match="parameter city .*--tools-file"):
        gather(executors=file)
    file.write_text("EXECUTORS = {'f': 3}\n")
    with pytest.raises(DataError, match="EXECUTORS.*'f'"):
        gather(executors=file)
