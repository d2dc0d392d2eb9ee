"""Function calls: one form written, all forms read, nothing guessed, nothing raised, no time
lost on hostile text."""

import ast
import contextlib
import json
import random
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jsonl import rows_of

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat
from codechat.text.chat import Call, format_call, parse_calls, read_call, tools_prompt
from codechat.text.tool_calls import FORMS, READABLE, answer_text
from codechat_lab.tasks.toolbox.catalogue import TOOLS

TAG = "<functioncall> "
# {"text" behind the tag, "name", "arguments", "form"}
READ = rows_of(Path(__file__).with_name("calls.jsonl"))
CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))


def test_each_form_is_read_whatever_stands_around_it() -> None:
    assert {row["form"] for row in READ} == set(FORMS)
    for text, name, arguments, form in (row.values() for row in READ):
        assert (name is not None and arguments is not None) == (form in READABLE)
        for before, after in product(
            ["", "Sure, {one} 'moment':\n"], ["", "\n", ' I\'ll {look} "it" up.', "<|endoftext|>"]
        ):
            if form == "bad_json" and after:
                after = "\n"  # what follows an unfinished call might finish it
            told = "" if form == "bad_json" else after.strip()
            assert parse_calls(before + TAG + text + after) == [
                Call(name, arguments, form, told)
            ], text
            assert parse_calls(before + TAG + text + after + TAG + "{")[0] == Call(
                name, arguments, form, told
            ), text
    for text in (
        "",
        "hello",
        '{"name": "f", "arguments": {}}',
        "functioncall> {}",
        "<function call> {}",
    ):
        assert parse_calls(text) == []


def test_a_call_in_fields_is_read_as_its_text() -> None:
    for text, name, arguments, form in (row.values() for row in READ):
        if form in (
            "object",
            "parameters",
            "json_string",
            "no_arguments",
            "bad_arguments",
            "no_name",
        ):
            with contextlib.suppress(ValueError):  # it is no JSON
                assert read_call(json.loads(text)) == Call(name, arguments, form)
    assert [read_call(value).form for value in (None, "f", [], 3)] == ["bad_json"] * 4


def test_several_calls_are_read_in_order_and_an_unfinished_one_swallows_none() -> None:
    text = (
        f'First {format_call("a", {"x": 1})} then\n{TAG}oops {TAG}{{"name": "b", "arguments": \'{{}}\'}}'
        f'<functioncall>{{"name": "c"}}{format_call("d", {})}'
    )
    forms = [
        ("a", "object"),
        (None, "bad_json"),
        ("b", "single_quoted"),
        ("c", "no_arguments"),
        ("d", "object"),
    ]
    assert [(c.name, c.form) for c in parse_calls(text)] == forms
    several = parse_calls(TAG + '[{"name": "a", "arguments": {}}, {"name": "b"}, 3]')
    assert several == [
        Call("a", {}, "object"),
        Call("b", {}, "no_arguments"),
        Call(None, None, "bad_json"),
    ]
    for cut in (
        '{"name": "a", "arguments": {"q": "unfini',
        "{'name': 'a', 'arg",
        '{"name": "a", "arguments": \'{"q',
    ):
        calls = parse_calls(TAG + cut + " " + format_call("b", {"q": 1}))
        assert calls == [Call(None, None, "bad_json"), Call("b", {"q": 1}, "object")]


def python_string(draw: random.Random) -> str:
    """The source of a string, with any prefix, quotes and escapes; not all of them are valid."""
    quote = draw.choice(["'", '"', "'", '"', "'''", '"""'])
    prefix = draw.choice([""] * 9 + ["r", "b", "u", "f"])
    return (
        prefix + quote + "".join(draw.choices(CASES["python strings"], k=draw.randrange(5))) + quote
    )


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
            *chat.TAGS,
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


def test_what_is_written_is_read_back() -> None:
    text = format_call("f", {"q": 'é "x"', "n": [1, None, True]})
    assert (
        text
        == '<functioncall> {"name": "f", "arguments": {"q": "é \\"x\\"", "n": [1, null, true]}}'
    )
    draw = random.Random(2)
    for _ in range(3000):
        name = draw.choice(["f", "get_weather", "a.b-c", "東京", "it's", 'say "x"', "<|end|>"])
        arguments = random_arguments(draw)
        text = format_call(name, arguments)
        assert text.count("<|") == text.count("<|endoftext|>"), "the text of a call spells a tag"
        assert parse_calls(text) == [Call(name, arguments, "object")]
        assert parse_calls(f"Sure. {text} {text}") == [Call(name, arguments, "object")] * 2


WRITERS = (
    lambda a: f'{{"name": "f", "arguments": \'{json.dumps(a, ensure_ascii=False)}\'}}',
    lambda a: json.dumps({"name": "f", "arguments": json.dumps(a)}),
    lambda a: repr({"name": "f", "arguments": a}),
    lambda a: repr({"name": "f", "arguments": json.dumps(a, ensure_ascii=False)}),
)


def test_other_writers_are_read_alike() -> None:
    """All but what the form itself makes ambiguous: a tag, or a quote like the one that ends
    the string."""
    draw = random.Random(3)
    words = [
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
    for write in WRITERS:
        for _ in range(1000):
            values = (
                " ".join(draw.choices(words, k=3)) + ".",
                draw.random(),
                [1, {"z": None}],
                True,
            )
            arguments = {f"k{i}": draw.choice(values) for i in range(draw.randrange(5))}
            (call,) = parse_calls(TAG + write(arguments))
            assert (call.name, call.arguments) == ("f", arguments) and call.form in READABLE, write(
                arguments
            )


def mutate(draw: random.Random, text: str) -> str:
    for _ in range(draw.randint(1, 4)):
        at, until = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        insert = draw.choice(CASES["pieces"]) if draw.random() < 0.7 else text[at:until]
        text = text[:at] + insert + text[draw.choice((at, at + 1, until)) :]
    return text


def test_no_text_raises() -> None:
    draw = random.Random(4)
    seeds = [TAG + row["text"] for row in READ] + [format_call("g", {"a": ["x"]}) * 2]
    for n in range(10_000):
        if n % 4:
            text = mutate(draw, draw.choice(seeds))
        else:
            text = (
                TAG
                + draw.randbytes(40).decode("latin-1")
                + "".join(draw.choices(CASES["pieces"], k=10))
            )
        for call in parse_calls(text):
            assert call.form in FORMS
            assert (call.form in READABLE) == (
                call.name is not None and isinstance(call.arguments, dict)
            )
            # whatever is read can be written, and is then read as the same
            if call.form in READABLE:
                assert parse_calls(format_call(call.name, call.arguments))[0][:2] == call[:2]


def test_hostile_text_takes_linear_time(quick: Callable[..., Any]) -> None:
    for start in (
        "",
        TAG,
        TAG + "{",
        TAG + "{'a': '",
        TAG + '{"arguments": \'{"a": ',
        TAG + '{"a": "',
    ):
        for unit in CASES["hostile"]:
            quick(0.5, parse_calls, start + unit * (50_000 // len(unit)))
    assert (
        parse_calls(TAG + '{"name": "f", "arguments": {"a": ' + "9" * 50_000 + "}}")[0].form
        == "bad_json"
    )


WEATHER = CASES["weather"]
BARE = {"name": "now", "description": "", "parameters": {}}


@pytest.mark.parametrize("style", chat.STYLES)
def test_the_offered_schemas_are_read_back_from_the_list(style: str) -> None:
    offered = [tool.schema for tool in TOOLS.values()] + [WEATHER]
    text = "Be brief.\n" + tools_prompt(offered, style)
    read = chat.offered_schemas(text)
    assert [tool["name"] for tool in read] == [tool["name"] for tool in offered]
    assert chat.offered_names(text) == {tool["name"] for tool in offered}
    for got, tool in zip(
        (schema["parameters"] for schema in read), (schema["parameters"] for schema in offered)
    ):
        assert list(got["properties"]) == list(tool["properties"])
        assert got.get("required", []) == tool.get("required", [])
        for name, schema in tool["properties"].items():
            if "enum" in schema:
                assert set(schema["enum"]) <= set(got["properties"][name]["enum"])
            else:
                assert got["properties"][name].get("type") == schema.get("type")
    assert chat.offered_schemas("You are a helpful assistant.") == []
    assert (
        tools_prompt([], style)
        == "You are a helpful assistant, with no access to external functions."
    )
    if style == "json":
        assert read == offered
        assert text.splitlines()[1].startswith("You are a helpful assistant with access to")


def test_a_tool_is_a_line_and_described_puts_its_name_last() -> None:
    tricky = {
        "name": "f",
        "description": "Rate (in %): a - b, g(x)",
        "parameters": {"properties": {"x": {}}},
    }
    signature = "get_weather(city: string, unit?: c|f, days?: integer[], extra?: any)"
    compact = f"Functions:\n{signature} - Weather of a city, now.\nnow()\nx()"
    assert tools_prompt([WEATHER, BARE, {"name": "x"}]) == compact
    text = tools_prompt([WEATHER, BARE, tricky], "described")
    lines = [
        f"Weather of a city, now.: {signature}",
        "now()",
        "Rate (in %): a - b, g(x): f(x?: any)",
    ]
    assert text.splitlines()[1:] == [*lines, "Nothing fits: none()"]
    assert chat.offered_names(text) == {"get_weather", "now", "f"}
    # no list
    assert chat.described(text) == text
    assert chat.described("f(x) - y") == "f(x) - y"
    texts = {"who": {"type": "list(str)"}, "n": {"enum": [1, 2, "1"]}}
    text = tools_prompt([tricky | {"parameters": {"properties": texts}}, WEATHER], "described")
    assert text.splitlines()[1].endswith(': f(who?: string[], n?: 1|2|"1")')
    assert chat.offered_names(text) == {"f", "get_weather"}
    assert tools_prompt(chat.offered_schemas(text), "described") == text
    within = f"Be short.\n{tools_prompt([WEATHER])}\n\nToday is - Monday."
    assert chat.described(within) == within.replace(
        tools_prompt([WEATHER]), tools_prompt([WEATHER], "described")
    )


def test_calling_none_is_no_call_and_reads_as_words() -> None:
    call = chat.format_call("now", {})
    assert chat.parse_calls(chat.DECLINE) == []
    assert chat.in_words(chat.DECLINE) == chat.DECLINED
    assert [c.name for c in chat.parse_calls(f"{chat.DECLINE} {call}")] == ["now"]
    for text in (
        call,
        f"{call} {chat.DECLINE}",
        "",
        "none",
        f"{chat.CALL_TAG} none",
        f"{chat.DECLINE} {call}",
    ):
        assert chat.in_words(text) == text


def test_what_is_no_call_and_no_schema_is_not_written() -> None:
    circular: dict[str, Any] = {}
    circular["self"] = circular
    values = [{"a": value} for value in (float("nan"), float("inf"), {1, 2}, b"x")]
    for name, arguments in [
        ("", {}),
        (None, {}),
        *(("f", a) for a in (None, [1], circular, *values)),
    ]:
        with pytest.raises(DataError):
            format_call(name, arguments)
    parameters = ({"name": "f", "parameters": p} for p in ([1], {"properties": ["a"]}))
    for tool, style in product([{}, "f", {"name": "none"}, *parameters], chat.STYLES):
        with pytest.raises(DataError):
            tools_prompt([tool], style)
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
    ],
)
def test_answers_of_other_servers_become_text(message: dict[str, Any], text: str) -> None:
    assert answer_text(message) == text
