"""Function calls: one form written, all forms read, nothing raised, no time lost on hostile text."""

from __future__ import annotations

import json
import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from codechat.core.errors import ConfigError, DataError
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.text import chat
from codechat.text.chat import Call, format_call, parse_calls, tools_prompt
from codechat.text.tool_calls import FORMS, READABLE

TAG = "<functioncall> "

# (text behind the tag, name, arguments, form)
READ = [
    # as an object
    ('{"name": "f", "arguments": {"a": 1}}', "f", {"a": 1}, "object"),
    ('{"name":"f","arguments":{}}', "f", {}, "object"),
    ('{"arguments": {"a": [1, {"b": "}{"}]}, "name": "f"}', "f", {"a": [1, {"b": "}{"}]}, "object"),
    (
        '{"name": "f", "arguments": {"q": "say \\"hi\\", it\'s {ok}"}}',
        "f",
        {"q": 'say "hi", it\'s {ok}'},
        "object",
    ),
    (
        '{"name": "f", "arguments": {"stadt": "Köln", "都市": "東京🎉"}}',
        "f",
        {"stadt": "Köln", "都市": "東京🎉"},
        "object",
    ),
    ('{"name": "f", "arguments": {"q": "\\u00e9\\ud83c\\udf89"}}', "f", {"q": "é🎉"}, "object"),
    ('\n\n {\n  "name": "f",\n  "arguments": {\n    "a": 1.5e3\n  }\n}', "f", {"a": 1500.0}, "object"),
    ('{"name": "f", "arguments": {"q": "two\nlines\tand"}}', "f", {"q": "two\nlines\tand"}, "object"),
    (
        '{"name": "f", "arguments": {"q": "<functioncall> {\\"name\\": \\"g\\"}"}}',
        "f",
        {"q": '<functioncall> {"name": "g"}'},
        "object",
    ),
    (
        '{"id": 7, "name": "f", "arguments": {"a": null, "b": [true, false]}}',
        "f",
        {"a": None, "b": [True, False]},
        "object",
    ),
    # as JSON in a string
    ('{"name": "f", "arguments": "{\\"a\\": \\"x \\\\\\"y\\\\\\"\\"}"}', "f", {"a": 'x "y"'}, "json_string"),
    ('{"name": "f", "arguments": " {} "}', "f", {}, "json_string"),
    ('{"name": "f", "arguments": "{\'a\': \'b\'}"}', "f", {"a": "b"}, "json_string"),
    # as JSON in single quotes
    ('{"name": "f", "arguments": \'{"q": "You\'ve won"}\'}', "f", {"q": "You've won"}, "single_quoted"),
    (
        '{"name": "f", "arguments": \'{"q": "the dogs\', then"}\'}',
        "f",
        {"q": "the dogs', then"},
        "single_quoted",
    ),
    ('{"name": "f", "arguments": \'{"q": "{it\'s}\'}"}\'}', "f", {"q": "{it's}'}"}, "single_quoted"),
    ('{"name": "f", "arguments": \'{}\'}', "f", {}, "single_quoted"),
    ('{"name": "f", "arguments": \' {"a": {"b": [1]}} \' }', "f", {"a": {"b": [1]}}, "single_quoted"),
    ('{"arguments": \'{"q": "it\'s"}\', "name": "f"}', "f", {"q": "it's"}, "single_quoted"),
    ("{'name': 'f', 'arguments': '{\"location\": \"Paris\"}'}", "f", {"location": "Paris"}, "single_quoted"),
    ('{"name": "f", "arguments": \'{"q": "You\\\'ve won"}\'}', "f", {"q": "You've won"}, "single_quoted"),
    ('{"name": "f", "arguments": \'{"q": "say \\"hi\\""}\'}', "f", {"q": 'say "hi"'}, "single_quoted"),
    ('{"name": "f", "arguments": \'{"q": "say \\\\"hi\\\\""}\'}', "f", {"q": 'say "hi"'}, "single_quoted"),
    ('{"name": "f", "arguments": \'{"a": 1,}\'}', "f", {"a": 1}, "single_quoted"),
    ('{"name": "f", "arguments": \'{\n    "a": 1\n}\'}', "f", {"a": 1}, "single_quoted"),
    # as Python
    (
        "{'name': 'f', 'arguments': {'a': None, 'b': [True, False], 'c': -1.5}}",
        "f",
        {"a": None, "b": [True, False], "c": -1.5},
        "python_literal",
    ),
    (
        "{'name': 'f', 'arguments': {'q': \"You've won\", 'r': 'say \"hi\"'}}",
        "f",
        {"q": "You've won", "r": 'say "hi"'},
        "python_literal",
    ),
    (
        "{'name': 'f', 'arguments': {'q': 'You\\'ve won', 'r': 'it's\\n\\x41\\u00e9'}}",
        "f",
        {"q": "You've won", "r": "it's\nAé"},
        "python_literal",
    ),
    ('{"name": "f", "arguments": {"a": True}}', "f", {"a": True}, "python_literal"),
    ("{'name': 'f', 'arguments': {'q': '\\ud83c\\udf89 \\ud83c'}}", "f", {"q": "🎉 \ud83c"}, "python_literal"),
    # a comma too many
    ('{"name": "f", "arguments": {"a": [1, 2,],},}', "f", {"a": [1, 2]}, "trailing_comma"),
    # under another key
    ('{"name": "f", "parameters": {"a": 1}}', "f", {"a": 1}, "parameters"),
    ('{"name": "f", "parameters": \'{"a": 1}\'}', "f", {"a": 1}, "single_quoted"),
    # without arguments
    ('{"name": "f"}', "f", {}, "no_arguments"),
    ('{"name": "f", "arguments": null}', "f", {}, "no_arguments"),
    ('{"name": "f", "arguments": ""}', "f", {}, "no_arguments"),
    ('{"name": "f", "arguments": \'\'}', "f", {}, "no_arguments"),
    # a name, but no arguments that could be read
    ('{"name": "f", "arguments": [1]}', "f", None, "bad_arguments"),
    ('{"name": "f", "arguments": 5}', "f", None, "bad_arguments"),
    ('{"name": "f", "arguments": "a=1"}', "f", None, "bad_arguments"),
    ('{"name": "f", "arguments": "{\\"a\\": 1"}', "f", None, "bad_arguments"),
    ('{"name": "f", "arguments": \'{"a": }\'}', "f", None, "bad_arguments"),
    # no name
    ('{"arguments": {"a": 1}}', None, {"a": 1}, "no_name"),
    ('{"name": "", "arguments": {}}', None, {}, "no_name"),
    ('{"name": ["f"], "arguments": {}}', None, {}, "no_name"),
    ("{}", None, {}, "no_name"),
    # nothing that can be read
    ('{"name": "f", "arguments": {"a": 1}', None, None, "bad_json"),
    ('{"name": "f", "arguments": {"a": "unfinished', None, None, "bad_json"),
    ('{"name": "f", "arguments": \'{"a": "unfinished', None, None, "bad_json"),
    ('{"name": "f", "arguments": {"q": "say "hi" now"}}', None, None, "bad_json"),
    ('{"name": "f" "arguments": {}}', None, None, "bad_json"),
    ('{"name": "f", "arguments": {"a": NaN}}', None, None, "bad_json"),
    ('{"name": "f", "arguments": {"a": -Infinity}}', None, None, "bad_json"),
    ('{"name": "f", "arguments": {"a": 1e999}}', None, None, "bad_json"),
    ('{"name": "f", "arguments": {"a": 01}}', None, None, "bad_json"),
    ("f(a=1)", None, None, "bad_json"),
    ("[]", None, None, "bad_json"),
    ("", None, None, "bad_json"),
]


def test_each_form_is_read_whatever_stands_around_it() -> None:
    assert {form for *_, form in READ} == set(FORMS)
    for text, name, arguments, form in READ:
        assert (name is not None and arguments is not None) == (form in READABLE)
        for before, after in product(
            ["", "Sure, {one} 'moment':\n"], ["", "\n", ' I\'ll {look} "it" up.', "<|endoftext|>"]
        ):
            if form == "bad_json" and after:
                after = "\n"  # what follows an unfinished call might finish it
            told = "" if form == "bad_json" else after.strip()
            assert parse_calls(before + TAG + text + after) == [Call(name, arguments, form, told)], text
    for text in ("", "hello", '{"name": "f", "arguments": {}}', "functioncall> {}", "<function call> {}"):
        assert parse_calls(text) == []


def test_several_calls_are_read_in_order() -> None:
    text = (
        f'First {format_call("a", {"x": 1})} then\n{TAG}oops {TAG}{{"name": "b", "arguments": \'{{}}\'}}'
        f'<functioncall>{{"name": "c"}}{format_call("d", {})}'
    )
    forms = [("a", "object"), (None, "bad_json"), ("b", "single_quoted"), ("c", "no_arguments"), ("d", "object")]
    assert [(c.name, c.form) for c in parse_calls(text)] == forms
    several = parse_calls(TAG + '[{"name": "a", "arguments": {}}, {"name": "b"}, 3]')
    assert several == [Call("a", {}, "object"), Call("b", {}, "no_arguments"), Call(None, None, "bad_json")]


def test_a_call_says_what_follows_it() -> None:
    calls = (
        '{"name": "a", "arguments": {"q": "<functioncall> {"}}',
        "{'name': 'a', 'arguments': {}}",
        '{"name": "a", "arguments": \'{"q": "x}"}\'}',
        '[{"name": "a"}]',
        '{"arguments": {}}',
    )
    for call, text in product(calls, ("", " \n", "}", " That is all.", "\n{'name': 'b'}", " then ")):
        assert parse_calls(f"Yes. {TAG}{call}{text}")[0].after == text.strip()
        assert parse_calls(f"{TAG}{call}{text}{TAG}{{")[0].after == text.strip()


def test_an_unfinished_call_does_not_swallow_the_next() -> None:
    for cut in (
        '{"name": "a", "arguments": {"q": "unfini',
        "{'name': 'a', 'arg",
        '{"name": "a", "arguments": \'{"q',
    ):
        calls = parse_calls(TAG + cut + " " + format_call("b", {"q": 1}))
        assert calls == [Call(None, None, "bad_json"), Call("b", {"q": 1}, "object")]


# ------------------------------------------------------------------ writing


def test_the_canonical_text() -> None:
    text = format_call("f", {"q": 'é "x"', "n": [1, None, True]})
    assert text == '<functioncall> {"name": "f", "arguments": {"q": "é \\"x\\"", "n": [1, null, true]}}'


def random_json(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind < 3:
        pieces = [
            *"\"'\\{}[],:\n\x00\u2028é🎉 abcdef",
            "end",
            *chat.TAGS,
            "<|endoftext|>",
            "\\u003c",
            '{"name": "g"}',
            "'}",
        ]
        return "".join(draw.choices(pieces, k=draw.randrange(8)))
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
        f"{draw.choice(['', 'a', 'name', 'arguments', '<|end|>', 'é'])}{i or ''}": random_json(draw, depth)
        for i in range(draw.randrange(4))
    }


def test_what_is_written_is_read_back() -> None:
    draw = random.Random(2)
    for _ in range(3000):
        name = draw.choice(["f", "get_weather", "a.b-c", "東京", "it's", 'say "x"', "<|end|>"])
        arguments = random_arguments(draw)
        text = format_call(name, arguments)
        assert text.count("<|") == text.count("<|endoftext|>"), "the text of a call spells a tag"
        assert parse_calls(text) == [Call(name, arguments, "object")]
        assert parse_calls(f"Sure. {text} {text}") == [Call(name, arguments, "object")] * 2


def as_single_quoted(name: str, arguments: dict[str, Any]) -> str:
    return f'{TAG}{{"name": {json.dumps(name)}, "arguments": \'{json.dumps(arguments, ensure_ascii=False)}\'}}'


def as_json_string(name: str, arguments: dict[str, Any]) -> str:
    return TAG + json.dumps({"name": name, "arguments": json.dumps(arguments)})


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return TAG + repr({"name": name, "arguments": arguments})


def as_python_with_json(name: str, arguments: dict[str, Any]) -> str:
    return TAG + repr({"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)})


def test_other_writers_are_read_alike() -> None:
    """All but what the form itself makes ambiguous: a tag, or a quote like the one that ends the string."""
    draw = random.Random(3)
    words = [
        "it's",
        "dogs'",
        "O'Neil",
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
    for write in (as_single_quoted, as_json_string, as_python, as_python_with_json):
        for _ in range(1000):
            values = (" ".join(draw.choices(words, k=3)) + ".", draw.random(), [1, {"z": None}], True)
            arguments = {f"k{i}": draw.choice(values) for i in range(draw.randrange(5))}
            (call,) = parse_calls(write("f", arguments))
            assert (call.name, call.arguments) == ("f", arguments), write("f", arguments)
            assert call.form in READABLE


def test_what_is_no_call_is_not_written() -> None:
    circular: dict[str, Any] = {}
    circular["self"] = circular
    values = [{"a": value} for value in (float("nan"), float("inf"), {1, 2}, b"x")]
    for name, arguments in [("", {}), (None, {}), *(("f", a) for a in (None, [1], circular, *values))]:
        with pytest.raises(DataError):
            format_call(name, arguments)


# ------------------------------------------------------------------ hostile text

PIECES = [
    "<functioncall>",
    "<functioncall> ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    ",",
    ":",
    "name",
    '"name"',
    '"arguments"',
]
PIECES += [
    "'arguments': '{",
    "null",
    "None",
    "1",
    "-",
    "1e9",
    "\n",
    "\x00",
    "é",
    "\ud800",
    "\\u",
    "\\ud83d",
    "<|end|>",
    " ",
]


def mutate(draw: random.Random, text: str) -> str:
    for _ in range(draw.randint(1, 4)):
        at, until = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        insert = draw.choice(PIECES) if draw.random() < 0.7 else text[at:until]
        text = text[:at] + insert + text[draw.choice((at, at + 1, until)) :]
    return text


def test_no_text_raises() -> None:
    draw = random.Random(4)
    seeds = [TAG + text for text, *_ in READ] + [
        as_python("f", {"a": "it's"}),
        format_call("g", {"a": ["x"]}) * 2,
    ]
    started = time.process_time()
    for n in range(20_000):
        if n % 4:
            text = mutate(draw, draw.choice(seeds))
        else:
            text = TAG + draw.randbytes(40).decode("latin-1") + "".join(draw.choices(PIECES, k=10))
        for call in parse_calls(text):
            assert call.form in FORMS
            assert (call.form in READABLE) == (call.name is not None and isinstance(call.arguments, dict))
            if call.form in READABLE:  # whatever is read can be written, and is then read as the same
                assert parse_calls(format_call(call.name, call.arguments))[0][:2] == call[:2]
    assert time.process_time() - started < 3


HOSTILE = ["{", "[", "{'", '{"', '{"a":', "[1,", "'", '"', "\\", "\\'", "' ", "'{", "\n", " ", "-", "9"]
HOSTILE += ["<functioncall>", "<functioncall>{", '<functioncall> {"', "<functioncall> {'", '<functioncall> [1,"']
HOSTILE += [
    '<functioncall> {"a": "\\',
    '<functioncall>{"name": "f", "arguments": \'{"a": "',
    "<functioncall>[{'arguments':'{",
    "'arguments': '{\"a', ",
    '"arguments":\'{"k":\'b\',',
]


def test_hostile_text_takes_linear_time() -> None:
    for start in ("", TAG, TAG + "{", TAG + "{'a': '", TAG + '{"arguments": \'{"a": ', TAG + '{"a": "'):
        for unit in HOSTILE:
            text = start + unit * (100_000 // len(unit))
            begun = time.process_time()
            parse_calls(text)
            assert time.process_time() - begun < 1, f"{unit!r} repeated behind {start!r}"
    assert parse_calls(TAG + '{"name": "f", "arguments": {"a": ' + "9" * 50_000 + "}}")[0].form == "bad_json"


# ------------------------------------------------------------------ listing tools

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city,\n  now.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "array", "items": {"type": "integer"}},
            "extra": {},
        },
        "required": ["city"],
    },
}


def test_compact_is_a_line_per_tool() -> None:
    bare = {"name": "now", "description": "", "parameters": {}}
    assert tools_prompt([WEATHER, bare, {"name": "x"}]) == (
        "Functions:\n"
        "get_weather(city: string, unit?: c|f, days?: integer[], extra?: any) - Weather of a city, now.\n"
        "now()\n"
        "x()"
    )


@pytest.mark.parametrize("style", chat.STYLES)
def test_the_offered_schemas_are_read_back_from_the_list(style: str) -> None:
    offered = [tool.schema for tool in TOOLS.values()] + [WEATHER]
    text = "Be brief.\n" + tools_prompt(offered, style)
    read = chat.offered_schemas(text)
    assert [tool["name"] for tool in read] == [tool["name"] for tool in offered]
    assert chat.offered_names(text) == {tool["name"] for tool in offered}
    for got, tool in zip((schema["parameters"] for schema in read), (schema["parameters"] for schema in offered)):
        assert list(got["properties"]) == list(tool["properties"])
        assert got.get("required", []) == tool.get("required", [])
        for name, schema in tool["properties"].items():
            if "enum" in schema:
                assert set(schema["enum"]) <= set(got["properties"][name]["enum"])
            else:
                assert got["properties"][name].get("type") == schema.get("type")
    assert chat.offered_schemas("You are a helpful assistant.") == []
    assert tools_prompt([], style) == "You are a helpful assistant, with no access to external functions."
    if style == "json":
        assert read == offered and text.splitlines()[1].startswith("You are a helpful assistant with access to")


def test_described_puts_each_name_after_its_description() -> None:
    bare = {"name": "now", "description": "", "parameters": {}}
    tricky = {"name": "f", "description": "Rate (in %): a - b, g(x)", "parameters": {"properties": {"x": {}}}}
    text = tools_prompt([WEATHER, bare, tricky], "described")
    assert text.splitlines()[1:] == [
        "Weather of a city, now.: get_weather(city: string, unit?: c|f, days?: integer[], extra?: any)",
        "now()",
        "Rate (in %): a - b, g(x): f(x?: any)",
        "Nothing fits: none()",
    ]
    assert chat.offered_names(text) == {"get_weather", "now", "f"}
    assert chat.described(text) == text and chat.described("f(x) - y") == "f(x) - y"  # no list
    within = f"Be short.\n{tools_prompt([WEATHER])}\n\nToday is - Monday."
    assert chat.described(within) == within.replace(tools_prompt([WEATHER]), tools_prompt([WEATHER], "described"))


def test_calling_none_is_no_call_and_reads_as_words() -> None:
    call = chat.format_call("now", {})
    assert chat.parse_calls(chat.DECLINE) == [] and chat.in_words(chat.DECLINE) == chat.DECLINED
    assert [c.name for c in chat.parse_calls(f"{chat.DECLINE} {call}")] == ["now"]
    for text in (call, f"{call} {chat.DECLINE}", "", "none", f"{chat.CALL_TAG} none", f"{chat.DECLINE} {call}"):
        assert chat.in_words(text) == text


def test_what_is_no_schema_raises() -> None:
    bad = [{}, {"name": 3}, "f", {"name": "f", "parameters": [1]}, {"name": "f", "parameters": {"properties": ["a"]}}]
    for tool, style in product([*bad, {"name": "none", "parameters": {}}], chat.STYLES):
        with pytest.raises(DataError):
            tools_prompt([tool], style)
    with pytest.raises(ConfigError):
        tools_prompt([WEATHER], "xml")


# ------------------------------------------------------------------ real rows


def test_every_call_of_the_real_rows_is_read(shared_data: Path) -> None:
    forms: dict[str, int] = {}
    for path in sorted((shared_data / "function_calling").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["chat"]
            calls = parse_calls(text)
            assert len(calls) == text.count("<functioncall>")
            for call in calls:
                forms[call.form] = forms.get(call.form, 0) + 1
                assert parse_calls(format_call(call.name, call.arguments)) == [
                    Call(call.name, call.arguments, "object")
                ]
    assert forms.keys() <= set(READABLE) and sum(forms.values()) == 3020
