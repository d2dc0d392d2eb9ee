"""Function calls: one form written, all forms read, nothing guessed, nothing raised, no time
lost on hostile text."""

import ast
import contextlib
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonl import rows_of

from codechat.core.errors import ConfigError, DataError
from codechat.text import tool_calls, tool_lists
from codechat.text.tool_calls import (
    READABLE,
    Call,
    answer_text,
    as_openai,
    format_call,
    parse_calls,
    read_call,
)
from codechat.text.tool_lists import split_offer, tools_prompt
from codechat_lab.tasks.toolbox.catalogue import TOOLS

TAG = "<functioncall> "
FORMS = {*READABLE, "bad_arguments", "no_name", "bad_json"}
# {"text" behind the tag, "name", "arguments", "form"}
READ = rows_of(Path(__file__).with_name("calls.jsonl"))
CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))


AROUND = pytest.mark.parametrize(
    "before, after",
    [
        (before, after)
        for before in ("", "Sure, {one} 'moment':\n")
        for after in ("", "\n", ' I\'ll {look} "it" up.', "<|endoftext|>")
    ],
)


def test_every_form_has_a_case() -> None:
    assert {row["form"] for row in READ} == FORMS


def test_a_readable_form_has_a_name_and_arguments() -> None:
    for row in READ:
        complete = row["name"] is not None and row["arguments"] is not None
        assert complete == (row["form"] in READABLE), row


def around(row: dict[str, Any], before: str, after: str) -> tuple[str, Call]:
    """The text of a call between others, and what is read of it."""
    unfinished = row["form"] == "bad_json"
    if unfinished and after:
        after = "\n"  # what follows an unfinished call might finish it
    told = "" if unfinished else after.strip()
    call = Call(row["name"], row["arguments"], row["form"], told)
    return before + TAG + row["text"] + after, call


@AROUND
def test_each_form_is_read_whatever_stands_around_it(before: str, after: str) -> None:
    for row in READ:
        text, call = around(row, before, after)
        assert parse_calls(text) == [call], text


@AROUND
def test_each_form_is_read_where_an_unfinished_call_follows(before: str, after: str) -> None:
    for row in READ:
        text, call = around(row, before, after)
        assert parse_calls(text + TAG + "{")[0] == call, text


@pytest.mark.parametrize(
    "text",
    ["", "hello", '{"name": "f", "arguments": {}}', "functioncall> {}", "<function call> {}"],
)
def test_a_text_without_the_tag_has_no_call(text: str) -> None:
    assert parse_calls(text) == []


IN_FIELDS = ("object", "parameters", "json_string", "no_arguments", "bad_arguments", "no_name")


def test_a_call_in_fields_is_read_as_its_text() -> None:
    for row in READ:
        if row["form"] in IN_FIELDS:
            with contextlib.suppress(ValueError):  # it is no JSON
                expected = Call(row["name"], row["arguments"], row["form"])
                assert read_call(json.loads(row["text"])) == expected


@pytest.mark.parametrize("value", [None, "f", [], 3])
def test_what_is_no_object_is_no_call_in_fields(value: object) -> None:
    assert read_call(value).form == "bad_json"


def test_several_calls_are_read_in_order() -> None:
    text = (
        f'First {format_call("a", {"x": 1})} then\n{TAG}oops {TAG}{{"name": "b", "arguments": \'{{}}\'}}'
        f'<functioncall>{{"name": "c"}}{format_call("d", {})}'
    )
    assert [(call.name, call.form) for call in parse_calls(text)] == [
        ("a", "object"),
        (None, "bad_json"),
        ("b", "single_quoted"),
        ("c", "no_arguments"),
        ("d", "object"),
    ]


def test_a_list_of_calls_is_several() -> None:
    assert parse_calls(TAG + '[{"name": "a", "arguments": {}}, {"name": "b"}, 3]') == [
        Call("a", {}, "object"),
        Call("b", {}, "no_arguments"),
        Call(None, None, "bad_json"),
    ]


@pytest.mark.parametrize(
    "cut",
    [
        '{"name": "a", "arguments": {"q": "unfini',
        "{'name': 'a', 'arg",
        '{"name": "a", "arguments": \'{"q',
    ],
)
def test_an_unfinished_call_swallows_none(cut: str) -> None:
    calls = parse_calls(TAG + cut + " " + format_call("b", {"q": 1}))
    assert calls == [Call(None, None, "bad_json"), Call("b", {"q": 1}, "object")]


def python_string(draw: random.Random) -> str:
    """The source of a string, with any prefix, quotes and escapes; not all of them are valid."""
    quote = draw.choice(["'", '"', "'", '"', "'''", '"""'])
    prefix = draw.choice([""] * 9 + ["r", "b", "u", "f"])
    inside = "".join(draw.choices(CASES["python strings"], k=draw.randrange(5)))
    return prefix + quote + inside + quote


def python_source(draw: random.Random, depth: int = 0) -> str:
    """The source of a literal, now and then of one that JSON has not, or with a fault."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind < 3:
        return python_string(draw) + (" " + python_string(draw) if draw.random() < 0.05 else "")
    if kind < 5:
        atoms = (
            "True False None 1 -2 1.5 1e3 -0 007 0x1f 1_000 1. .5 "
            "+3 2j 1e999 ... () (1,) {1} {1:2} --1"
        ).split()
        return draw.choice(atoms[:7] * 5 + atoms)
    space = draw.choice(["", " ", "\n"])
    comma = draw.choice(["", "", ",", ", "])
    items = [python_source(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 5:
        return "[" + f",{space}".join(items) + comma * bool(items) + "]"
    pairs = [f"{draw.choice(CASES['python keys'])}{space}:{space}{item}" for item in items]
    return "{" + f"{space},{space}".join(pairs) + comma * bool(pairs) + space + "}"


def test_python_is_read_as_literal_eval_reads_it_or_not_at_all() -> None:
    draw = random.Random(5)
    read = 0
    valid = 0
    for _ in range(20_000):
        source = (
            f"{{'name': 'f', 'arguments': {{'x': {python_source(draw)}, "
            f"{draw.choice(CASES['python keys'])}: 1}}}}"
        )
        try:
            with warnings.catch_warnings(action="ignore"):  # an unknown escape
                expected = ast.literal_eval(source)["arguments"]
        except (ValueError, SyntaxError, TypeError):
            continue
        (call,) = parse_calls(TAG + source)
        valid = valid + 1
        read = read + (call.form in READABLE)
        assert call.form not in READABLE or repr(call.arguments) == repr(expected), source
    assert valid > 5000
    assert read > 0.3 * valid


def random_json(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind < 3:
        pieces = [
            *"\"'\\{}[],:\n\x00\u2028é🎉 abcdef",
            "end",
            *tool_calls.TAGS,
            "<|endoftext|>",
            "\\u003c",
        ]
        return "".join(draw.choices([*pieces, '{"name": "g"}', "'}"], k=draw.randrange(8)))
    if kind == 3:
        return draw.choice([0, -1, 10**20, draw.randrange(-(10**6), 10**6)])
    if kind == 4:
        return draw.choice([0.1, -2.5e-300, 1.7976931348623157e308, draw.gauss(0, 1e3)])
    if kind == 5:
        return draw.choice([True, False, None])
    if kind == 6:
        return [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    return random_arguments(draw, depth + 1)


def random_arguments(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    return {
        f"{draw.choice(['', 'a', 'name', 'arguments', '<|end|>', 'é'])}{i or ''}": random_json(
            draw, depth
        )
        for i in range(draw.randrange(4))
    }


def test_a_call_is_written_as_one_line_of_json() -> None:
    text = format_call("f", {"q": 'é "x"', "n": [1, None, True]})
    written = '{"name": "f", "arguments": {"q": "é \\"x\\"", "n": [1, null, true]}}'
    assert text == f"<functioncall> {written}"


def test_what_is_written_is_read_back() -> None:
    draw = random.Random(2)
    for _ in range(3000):
        name = draw.choice(["f", "get_weather", "a.b-c", "東京", "it's", 'say "x"', "<|end|>"])
        arguments = random_arguments(draw)
        text = format_call(name, arguments)
        assert text.count("<|") == text.count("<|endoftext|>"), "the text of a call spells a tag"
        assert parse_calls(text) == [Call(name, arguments, "object")]
        assert parse_calls(f"Sure. {text} {text}") == [Call(name, arguments, "object")] * 2


def quoted_json(arguments: dict[str, Any]) -> str:
    return f'{{"name": "f", "arguments": \'{json.dumps(arguments, ensure_ascii=False)}\'}}'


def json_in_json(arguments: dict[str, Any]) -> str:
    return json.dumps({"name": "f", "arguments": json.dumps(arguments)})


def python(arguments: dict[str, Any]) -> str:
    return repr({"name": "f", "arguments": arguments})


def json_in_python(arguments: dict[str, Any]) -> str:
    return repr({"name": "f", "arguments": json.dumps(arguments, ensure_ascii=False)})


WORDS = [
    "it's",
    "dogs'",
    '"quoted"',
    "{x}",
    "[1]",
    "a:b",
    "new\nline",
    "tab\t",
    "back\\slash",
    "é東🎉",
    "",
]


@pytest.mark.parametrize("write", [quoted_json, json_in_json, python, json_in_python])
def test_other_writers_are_read_alike(write: Callable[[dict[str, Any]], str]) -> None:
    """All but what the form itself makes ambiguous: a tag, or a quote like the one that ends
    the string."""
    draw = random.Random(3)
    for _ in range(1000):
        sentence = " ".join(draw.choices(WORDS, k=3)) + "."
        values = (sentence, draw.random(), [1, {"z": None}], True)
        arguments = {f"k{i}": draw.choice(values) for i in range(draw.randrange(5))}
        (call,) = parse_calls(TAG + write(arguments))
        assert call.name == "f", write(arguments)
        assert call.arguments == arguments, write(arguments)
        assert call.form in READABLE, write(arguments)


def mutate(draw: random.Random, text: str) -> str:
    for _ in range(draw.randint(1, 4)):
        at, until = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        insert = draw.choice(CASES["pieces"]) if draw.random() < 0.7 else text[at:until]
        text = text[:at] + insert + text[draw.choice((at, at + 1, until)) :]
    return text


def hostile_texts() -> Iterator[str]:
    """Ten thousand changed calls and random bytes."""
    draw = random.Random(4)
    seeds = [TAG + row["text"] for row in READ] + [format_call("g", {"a": ["x"]}) * 2]
    for n in range(10_000):
        if n % 4:
            yield mutate(draw, draw.choice(seeds))
        else:
            noise = draw.randbytes(40).decode("latin-1")
            yield TAG + noise + "".join(draw.choices(CASES["pieces"], k=10))


def test_no_text_raises() -> None:
    for text in hostile_texts():
        for call in parse_calls(text):
            assert call.form in FORMS
            complete = call.name is not None and isinstance(call.arguments, dict)
            assert (call.form in READABLE) == complete
            # whatever is read can be written, and is then read as the same
            if call.form in READABLE:
                assert parse_calls(format_call(call.name, call.arguments))[0][:2] == call[:2]


@pytest.mark.parametrize(
    "start",
    ["", TAG, TAG + "{", TAG + "{'a': '", TAG + '{"arguments": \'{"a": ', TAG + '{"a": "'],
)
def test_hostile_text_takes_linear_time(start: str, quick: Callable[..., Any]) -> None:
    for unit in CASES["hostile"]:
        quick(0.5, parse_calls, start + unit * (50_000 // len(unit)))


@pytest.mark.parametrize("depth", [65, 600, 990])
def test_a_call_that_nests_too_deeply_is_not_readable(depth: int) -> None:
    """What compares arguments, or checks them against a schema, calls itself at each bracket."""
    deep = depth * "[" + depth * "]"
    for arguments in (
        f'{{"x": {deep}}}',
        f'"{{\\"x\\": {deep}}}"',
        f'{{"x": {deep}}}, "parameters": {{"x": {deep}}}',
    ):
        (call,) = parse_calls(f'{TAG}{{"name": "f", "arguments": {arguments}}}')
        assert call.arguments is None, arguments
        assert call.form in ("bad_json", "bad_arguments")


def test_a_number_that_python_does_not_read_is_no_json() -> None:
    text = '{"name": "f", "arguments": {"a": ' + "9" * 50_000 + "}}"
    assert parse_calls(TAG + text)[0].form == "bad_json"


WEATHER = CASES["weather"]
BARE = {"name": "now", "description": "", "parameters": {}}


OFFERED = [*(tool.schema for tool in TOOLS.values()), WEATHER]
EVERY_STYLE = pytest.mark.parametrize("style", tool_lists.STYLES)


def listed(style: str) -> str:
    """A system message with the list of all tools."""
    return "Be brief.\n" + tools_prompt(OFFERED, style)


@EVERY_STYLE
def test_the_offered_names_are_read_back_from_the_list(style: str) -> None:
    text = listed(style)
    names = [tool["name"] for tool in OFFERED]
    assert [tool["name"] for tool in tool_lists.offered_schemas(text)] == names
    assert tool_lists.offered_names(text) == set(names)


@EVERY_STYLE
def test_the_offered_arguments_are_read_back_from_the_list(style: str) -> None:
    for got, tool in zip(tool_lists.offered_schemas(listed(style)), OFFERED, strict=True):
        found = got["parameters"]
        expected = tool["parameters"]
        assert list(found["properties"]) == list(expected["properties"])
        assert found.get("required", []) == expected.get("required", [])


@EVERY_STYLE
def test_the_offered_types_are_read_back_from_the_list(style: str) -> None:
    for got, tool in zip(tool_lists.offered_schemas(listed(style)), OFFERED, strict=True):
        for name, schema in tool["parameters"]["properties"].items():
            found = got["parameters"]["properties"][name]
            if "enum" in schema:
                assert set(schema["enum"]) <= set(found["enum"])
            else:
                assert found.get("type") == schema.get("type")


@EVERY_STYLE
def test_what_stands_around_the_list_stays(style: str) -> None:
    """Text behind the list too, and an object in it is no tool."""
    behind = 'Answer in French, never as {"name": "Ann"}.'
    text, tools = split_offer(f"{listed(style)}\n\n{behind}")
    assert text.split("\n\n") == ["Be brief.", behind]
    assert [tool["name"] for tool in tools] == [tool["name"] for tool in OFFERED]
    system = {"role": "system", "content": f"{listed(style)}\n\n{behind}"}
    (said,), offered = as_openai([system])
    assert said["content"] == text
    assert len(offered) == len(OFFERED)


def test_a_list_in_json_gives_the_schemas_whole() -> None:
    text = listed("json")
    assert tool_lists.offered_schemas(text) == OFFERED
    assert text.splitlines()[1].startswith("You are a helpful assistant with access to")


def test_a_text_without_a_list_offers_nothing() -> None:
    assert tool_lists.offered_schemas("You are a helpful assistant.") == []


@EVERY_STYLE
def test_a_list_of_nothing_says_so(style: str) -> None:
    nothing = "You are a helpful assistant, with no access to external functions."
    assert tools_prompt([], style) == nothing


SIGNATURE = "get_weather(city: string, unit?: c|f, days?: integer[], extra?: any)"


def tricky(properties: dict[str, Any]) -> dict[str, Any]:
    """A tool whose description looks like a line of a list."""
    return {
        "name": "f",
        "description": "Rate (in %): a - b, g(x)",
        "parameters": {"properties": properties},
    }


def test_a_tool_is_a_line_with_its_signature_first() -> None:
    compact = f"Functions:\n{SIGNATURE} - Weather of a city, now.\nnow()\nx()"
    assert tools_prompt([WEATHER, BARE, {"name": "x"}]) == compact


def test_the_described_style_puts_the_signature_last_and_offers_none() -> None:
    text = tools_prompt([WEATHER, BARE, tricky({"x": {}})], "described")
    assert text.splitlines()[1:] == [
        f"Weather of a city, now.: {SIGNATURE}",
        "now()",
        "Rate (in %): a - b, g(x): f(x?: any)",
        "Nothing fits: none()",
    ]
    assert tool_lists.offered_names(text) == {"get_weather", "now", "f"}


def test_types_and_choices_of_a_list_are_read_back() -> None:
    texts = {"who": {"type": "list(str)"}, "n": {"enum": [1, 2, "1"]}}
    text = tools_prompt([tricky(texts), WEATHER], "described")
    assert text.splitlines()[1].endswith(': f(who?: string[], n?: 1|2|"1")')
    assert tool_lists.offered_names(text) == {"f", "get_weather"}
    assert tools_prompt(tool_lists.offered_schemas(text), "described") == text


def test_a_list_within_a_message_becomes_described() -> None:
    within = f"Be short.\n{tools_prompt([WEATHER])}\n\nToday is - Monday."
    described = f"Be short.\n{tools_prompt([WEATHER], 'described')}\n\nToday is - Monday."
    assert tool_lists.described(within) == described


@pytest.mark.parametrize("text", ["f(x) - y", tools_prompt([WEATHER, BARE], "described")])
def test_a_text_without_a_compact_list_stays_as_it_is(text: str) -> None:
    assert tool_lists.described(text) == text


def test_calling_none_is_no_call_and_reads_as_words() -> None:
    assert tool_calls.parse_calls(tool_calls.DECLINE) == []
    assert tool_calls.in_words(tool_calls.DECLINE) == tool_calls.DECLINED


NOW = tool_calls.format_call("now", {})


def test_a_call_beside_none_is_a_call() -> None:
    assert [call.name for call in tool_calls.parse_calls(f"{tool_calls.DECLINE} {NOW}")] == ["now"]


@pytest.mark.parametrize(
    "text",
    [
        NOW,
        f"{NOW} {tool_calls.DECLINE}",
        "",
        "none",
        f"{tool_calls.CALL_TAG} none",
        f"{tool_calls.DECLINE} {NOW}",
    ],
)
def test_any_other_text_than_none_alone_stays_as_it_is(text: str) -> None:
    assert tool_calls.in_words(text) == text


CIRCULAR: dict[str, Any] = {}
CIRCULAR["self"] = CIRCULAR


@pytest.mark.parametrize("name", ["", None])
def test_a_call_without_a_name_is_not_written(name: Any) -> None:
    with pytest.raises(DataError):
        format_call(name, {})


@pytest.mark.parametrize(
    "arguments",
    [
        None,
        [1],
        CIRCULAR,
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": {1, 2}},
        {"a": b"x"},
    ],
    ids=["none", "list", "circular", "nan", "inf", "set", "bytes"],
)
def test_arguments_that_json_lacks_are_not_written(arguments: Any) -> None:
    with pytest.raises(DataError):
        format_call("f", arguments)


@EVERY_STYLE
@pytest.mark.parametrize(
    "tool",
    [
        {},
        "f",
        {"name": "none"},
        {"name": "f", "parameters": [1]},
        {"name": "f", "parameters": {"properties": ["a"]}},
    ],
    ids=str,
)
def test_what_is_no_schema_is_not_listed(tool: Any, style: str) -> None:
    with pytest.raises(DataError):
        tools_prompt([tool], style)


def test_a_style_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError):
        tools_prompt([WEATHER], "xml")


def test_every_call_of_the_real_rows_is_read(shared_data: Path) -> None:
    forms: dict[str, int] = {}
    for path in sorted((shared_data / "function_calling").glob("*.jsonl")):
        for text in (row["chat"] for row in rows_of(path)):
            calls = parse_calls(text)
            assert len(calls) == text.count("<functioncall>")
            for call in calls:
                forms[call.form] = forms.get(call.form, 0) + 1
                written = format_call(call.name, call.arguments)
                assert parse_calls(written) == [Call(call.name, call.arguments, "object")]
    assert forms.keys() <= set(READABLE)
    assert sum(forms.values()) == 3020


@pytest.mark.parametrize(
    "message, text",
    [
        ({"content": "hi"}, "hi"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "", "tool_calls": None}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"text": "hm"}]},
                    {"type": "text", "text": "a"},
                ]
            },
            "a",
        ),
        ({"content": None, "reasoning_content": "hm"}, ""),
        (
            {
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            '<functioncall> {"name": "f", "arguments": {"x": 1}}',
        ),
        (
            {
                "content": "So:",
                "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}],
            },
            'So:\n<functioncall> {"name": "f", "arguments": {"x": "é"}}',
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            '<functioncall> {"name": "f", "arguments": {}}',
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": None}}]},
            '<functioncall> {"name": "f", "arguments": {}}',
        ),
        (
            {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
            '<functioncall> {"name": "f", "arguments": {}}',
        ),
        (
            {"tool_calls": [{"type": "custom", "custom": {}}]},
            '<functioncall> {"name": null, "arguments": {}}',
        ),
        (
            {"tool_calls": [{"function": "f"}]},
            '<functioncall> {"name": null, "arguments": {}}',
        ),
        (
            {"tool_calls": "f()"},
            '<functioncall> {"name": null, "arguments": {}}',
        ),
    ],
)
def test_answers_of_other_servers_become_text(message: dict[str, Any], text: str) -> None:
    assert answer_text(message) == text
