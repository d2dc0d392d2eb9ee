"""Tools of one's own: arguments reach a function in the types of its hints, and a file of
untyped functions takes its schemas from a json file."""

import datetime
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from codechat.core.errors import DataError
from codechat.tasks.tools import settled
from codechat.text import tool_calls
from codechat.text.tool_functions import Toolkit, read_tools, tools_of
from codechat.text.tool_worlds import World


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Item:
    """An item."""

    name: str
    sizes: list[Size]
    count: int = 1


class Place(TypedDict):
    street: str
    code: NotRequired[str]


def takes(hint: Any, given: Any) -> Any:
    """What a function receives for its parameter x of this type, as text; "refused" where it is
    not called."""

    def show(x):
        return repr(x)

    show.__annotations__["x"] = hint
    kit = Toolkit({"show": tools_of([show])["show"].schema}, World({"show": show}))
    (call,) = tool_calls.parse_calls(tool_calls.format_call("show", {"x": given}))
    return json.loads(kit.open().respond(call)).get("result", "refused")


def test_arguments_reach_a_function_in_the_types_of_its_hints() -> None:
    for hint, given, received in (
        (int, 3.0, "3"),
        (int, -0.0, "0"),
        (int, 1e20, str(10**20)),
        (int, 3.5, "refused"),
        (int, "3", "refused"),
        (int, True, "refused"),
        (int | None, 4.0, "4"),
        (list[int], [1.0, 2], "[1, 2]"),
        (list[int], [1, "2"], "refused"),
        (list[list[int]], [[1.0], []], "[[1], []]"),
        (Literal[1, 2], 2.0, "2"),
        (Literal[1, 2], 3, "refused"),
        (dict[str, int], {"a": 2.0}, "{'a': 2}"),
        (dict[str, int], {"a": "2"}, "refused"),
        (list[float], [1.5, 2.0], "[1.5, 2.0]"),
        (list[str], ["a", 1], "refused"),
        (bool, 1, "refused"),
        (bool, True, "True"),
        (float, 2, "2.0"),
        (set[int], [1, 1.0], "refused"),
        (set[int], [2, 1], "{1, 2}"),
        (tuple[int, str], [1, "a"], "(1, 'a')"),
        (tuple[int, ...], [1, 2, 3], "(1, 2, 3)"),
        (Size, "l", "<Size.LARGE: 'l'>"),
        (Size, "m", "refused"),
        (datetime.date, "2024-02-29", "datetime.date(2024, 2, 29)"),
        (
            Item,
            {"name": "tea", "sizes": ["s"]},
            "Item(name='tea', sizes=[<Size.SMALL: 's'>], count=1)",
        ),
        (Item, {"name": "tea"}, "refused"),
        (list[Place], [{"street": "x"}], "[{'street': 'x'}]"),
        (int | str, "3", "'3'"),
        (Item | None, None, "None"),
    ):
        assert takes(hint, given) == received, (hint, given)


def order(
    item: Item,
    place: Place,
    tags: list[str],
    note: str | None = None,
    when: datetime.date | None = None,
    size: Size = Size.SMALL,
    kind: Literal["a", "b"] = "a",
    ids: set[int] = frozenset(),
    pair: tuple[int, str] = (1, "x"),
    extra: dict[str, int] | None = None,
    anything: dict = {},
    number: int | str = 3,
    items: list[Item] = [],
    price: float = 1.5,
) -> str:
    """Place an order.

    More about it.

    Args:
        item: What to order.
        place (Place): where to,
            over two lines
        tags: labels

    Returns:
        A number.
    """


def weather(city: str, unit: str = "c") -> str:
    """Weather of a city.

    :param city: the city
    :param str unit: c or f
    :returns: text
    """


def test_a_schema_is_the_one_that_other_packages_make_of_the_function() -> None:
    """The file was written by openai-agents 0.24.0 and pydantic-ai 2.66.0, which agree; without titles and
    additionalProperties false."""
    expected = json.loads(Path(__file__).with_name("function_schemas.json").read_text())
    made = {name: tool.schema for name, tool in tools_of([order, weather]).items()}
    assert made == expected


def area(width: float, height: float = 1.0) -> float:
    """Area of a rectangle.

    Parameters
    ----------
    width : float
        From left to right,
        in metres.
    height : float, optional
        From the floor.

    Returns
    -------
    float
        In square metres.
    """


def test_a_rule_in_a_docstring_is_no_heading_of_numpys() -> None:
    def show(x: int) -> int:
        """Show it.

        ---
        Args:
            x: how many
        """
        return x

    (about,) = tools_of([show])["show"].schema["parameters"]["properties"].values()
    assert about["description"] == "how many"


def test_numpys_docstrings_describe_parameters() -> None:
    schema = tools_of([area])["area"].schema
    assert schema["description"] == "Area of a rectangle."
    said = [about["description"] for about in schema["parameters"]["properties"].values()]
    assert said == ["From left to right,\nin metres.", "From the floor."]


class Range(enum.Enum):
    LOW = (1, 2)


class Nothing(enum.Enum):
    pass


@pytest.mark.parametrize(
    "hint, named",
    [
        (Range, "x, Range has the choice .1, 2."),
        (Nothing, "x, Nothing has no choice"),
        (Literal[b"a"], "has the choice b'a'"),
        (datetime.date | str, "write one type, or one and None"),
        (Item | list[Item] | None, "write one type, or one and None"),
        (dict[int, str], "keys in JSON are texts; write dict.str"),
        (Annotated[int, range(3)], "annotated with range.0, 3., which is not read"),
    ],
    ids=str,
)
def test_hints_of_which_a_function_would_get_something_else_are_named(
    hint: Any, named: str
) -> None:
    def show(x):
        return repr(x)

    show.__annotations__["x"] = hint
    with pytest.raises(DataError, match=f"show: parameter .*{named}"):
        tools_of([show])


def test_a_text_of_annotated_describes_its_parameter() -> None:
    def show(x: Annotated[int, "how many"]) -> int:
        return x

    (about,) = tools_of([show])["show"].schema["parameters"]["properties"].values()
    assert about == {"type": "integer", "description": "how many"}


@pytest.mark.parametrize(
    "kind", ["async def f() -> int:\n    yield 1\n", "def f():\n    yield 1\n"]
)
def test_a_function_whose_call_gives_no_result_is_named(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(kind)
    with pytest.raises(DataError, match="own.py line 1: f: .* write a plain def"):
        read_tools([str(file)], trust=True)


def test_a_function_with_a_cache_is_offered(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import functools\n@functools.cache\ndef half(x: float) -> str:\n    return repr(x / 2)\n"
    )
    kit = read_tools([str(file)], trust=True)
    (call,) = tool_calls.parse_calls(tool_calls.format_call("half", {"x": 4}))
    assert json.loads(kit.open().respond(call)) == {"result": "2.0"}


def test_a_result_that_is_only_an_address_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f() -> object:\n    return (x for x in [1])\n")
    (call,) = tool_calls.parse_calls(tool_calls.format_call("f", {}))
    said = json.loads(read_tools([str(file)], trust=True).open().respond(call))
    assert "a result of type generator; return" in said["error"]


def test_none_is_left_out_where_a_schema_of_ones_own_takes_none() -> None:
    """Its classes may stand under `definitions`, as in older drafts."""

    def show(x: Any = 1, y: Any = 2) -> list:
        return [x, y]

    unit = {"$ref": "#/definitions/Unit"}
    parameters = {
        "type": "object",
        "properties": {"x": unit, "y": {"anyOf": [unit, {"type": "null"}]}},
        "definitions": {"Unit": {"enum": ["kg"]}},
    }
    kit = Toolkit({"show": {"name": "show", "parameters": parameters}}, World({"show": show}))
    (call,) = tool_calls.parse_calls(tool_calls.format_call("show", {"x": None, "y": None}))
    assert json.loads(kit.open().respond(call)) == {"result": [1, None]}
    assert settled({"y": "kg"}, parameters, parameters) == {"y": "kg"}


@pytest.mark.parametrize(
    "kind, value, as_got",
    [
        ({"$ref": "#/definitions/Size"}, {}, {"width": 1}),
        ({"oneOf": [{"$ref": "#/definitions/Size"}, {"type": "null"}]}, {}, {"width": 1}),
        ({"prefixItems": [{"format": "date"}]}, ["20260102"], ["2026-01-02"]),
    ],
)
def test_values_in_any_part_of_a_schema_compare_as_the_function_gets_them(
    kind: Any, value: Any, as_got: Any
) -> None:
    size = {"type": "object", "properties": {"width": {"default": 1}}}
    root = {"properties": {"x": kind}, "definitions": {"Size": size}}
    assert settled({"x": value}, root, root) == {"x": as_got}


def test_a_field_that_a_class_does_not_have_is_named() -> None:
    def show(x: Item) -> str:
        return repr(x)

    kit = Toolkit({"show": tools_of([show])["show"].schema}, World({"show": show}))
    given = {"name": "tea", "sizes": [], "colour": "red"}
    (call,) = tool_calls.parse_calls(tool_calls.format_call("show", {"x": given}))
    said = json.loads(kit.open().respond(call))
    assert said == {"error": "TypeError: Item has no 'colour'; it has name, sizes, count"}


@pytest.mark.parametrize(
    "reward, named",
    [
        ("reward = 3\n", "reward: 3 is not .*; expected a plain function reward.messages, row."),
        ("def reward(messages): ...\n", "reward: too many positional arguments; expected"),
        ("reward = max\n", "reward: no signature found .*; expected"),
        ("async def reward(messages, row): ...\n", "reward is async or yields; expected"),
    ],
)
def test_a_reward_that_could_judge_nothing_is_named(
    tmp_path: Path, reward: str, named: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f() -> int:\n    return 1\n" + reward)
    with pytest.raises(DataError, match=named):
        read_tools([str(file)], trust=True)


ORIGINAL = Path(__file__).with_name("own_functions.txt").read_text()


def test_a_file_of_untyped_functions_takes_its_schemas_from_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    tools = tmp_path / "tools.json"
    listed = {
        "get_weather": {"city": "string", "unit": "string"},
        "add": {"a": "integer", "b": "integer"},
    }
    listed["count"] = {"by": "integer"}
    shapes = (
        {"type": "object", "properties": {p: {"type": t} for p, t in ps.items()}}
        for ps in listed.values()
    )
    tools.write_text(
        json.dumps([{"name": name, "parameters": shape} for name, shape in zip(listed, shapes)])
    )
    file.write_text(ORIGINAL)
    both = [str(file), str(tools)]
    kit = read_tools(both, trust=True)
    bench = kit.open()
    assert kit.names == list(listed)
    for name, arguments, result in (
        ("get_weather", {"city": "Oslo"}, "Oslo in celsius"),
        ("add", {"a": 1.0, "b": 2}, 3),
        ("count", {"by": 2}, 2),
        ("count", {"by": 2}, 4),
    ):
        (call,) = tool_calls.parse_calls(tool_calls.format_call(name, arguments))
        assert json.loads(bench.respond(call)) == {"result": result}
    with pytest.raises(DataError, match="parameter city .*json"):
        read_tools([str(file)], trust=True)
    # by their own names
    file.write_text(ORIGINAL.partition("EXECUTORS")[0].replace("weather", "get_weather"))
    assert read_tools(both, trust=True).missing == {"add", "count"}
    file.write_text("EXECUTORS = {'f': 3}\n")
    with pytest.raises(DataError, match="EXECUTORS.*'f'"):
        read_tools([str(file)], trust=True)
