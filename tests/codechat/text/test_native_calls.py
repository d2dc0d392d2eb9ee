"""Calls in other models' words: tags, fences, bare JSON, XML and Python, read as ours."""

import json
import time
from typing import Any

import pytest

from codechat.text import native_calls, tool_calls
from codechat.text.native_calls import read

ONE = [("f", {"a": "x"})]
TWO = [("f", {"a": "x"}), ("g", {})]
JSON_F = '{"name": "f", "arguments": {"a": "x"}}'
JSON_G = '{"name": "g", "arguments": {}}'
CALLS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]], str]] = {
    "Hermes": (f"<tool_call>\n{JSON_F}\n</tool_call>", ONE, "tagged"),
    "Hermes, two": (
        f"<tool_call>\n{JSON_F}\n</tool_call>\n<tool_call>\n{JSON_G}\n</tool_call>",
        TWO,
        "tagged",
    ),
    "Hermes, two in one tag": (f"<tool_call>\n{JSON_F}\n{JSON_G}\n</tool_call>", TWO, "tagged"),
    "Hermes, cut off behind the call": (f"<tool_call>\n{JSON_F}", ONE, "tagged"),
    "Nemotron": (f"<TOOLCALL>[{JSON_F}, {JSON_G}]</TOOLCALL>", TWO, "tagged"),
    "Mistral": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}, "id": "abcdefghi"}]',
        ONE,
        "tagged",
    ),
    "Mistral, new": ('[TOOL_CALLS]f[ARGS]{"a": "x"}[TOOL_CALLS]g[ARGS]{}', TWO, "tagged"),
    "Mistral, with ids": ('[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"a": "x"}', ONE, "tagged"),
    "Granite 3": (f"<|tool_call|>[{JSON_F}, {JSON_G}]", TWO, "tagged"),
    "Phi 4": (f"<|tool_call|>[{JSON_F}]<|/tool_call|>", ONE, "tagged"),
    "Llama 3": ('{"name": "f", "parameters": {"a": "x"}}', ONE, "bare"),
    "Llama 3, with its mark": (
        '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}',
        ONE,
        "tagged",
    ),
    "Llama 3, with types": (
        '{"type": "function", "name": "f", "parameters": {"a": "x"}}',
        ONE,
        "bare",
    ),
    "LFM2": ("<|tool_call_start|>[f(a='x'), g()]<|tool_call_end|>", TWO, "tagged"),
    "Qwen3-Coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
        ONE,
        "tagged",
    ),
    "Qwen3-Coder without tags": (
        "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>",
        ONE,
        "tagged",
    ),
    "functions with JSON": ('<function=f>{"a": "x"}</function>', ONE, "tagged"),
    "GLM": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ONE,
        "tagged",
    ),
    "GLM, two": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>\n<tool_call>g\n</tool_call>",
        TWO,
        "tagged",
    ),
    "DeepSeek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ONE,
        "tagged",
    ),
    "Kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        ONE,
        "tagged",
    ),
    "a fence": (f"```json\n{JSON_F}\n```", ONE, "fenced"),
    "a fence that is never closed": (f"```json\n{JSON_F}", ONE, "fenced"),
    "a list in a fence": (f"```json\n[{JSON_F}, {JSON_G}]\n```", TWO, "fenced"),
    "objects on lines of a fence": (f"```\n{JSON_F}\n{JSON_G}\n```", TWO, "fenced"),
    "several fences": (f"```json\n{JSON_F}\n```\n```json\n{JSON_G}\n```", TWO, "fenced"),
    "a fence of another language": (f"```javascript\n{JSON_F}\n```", ONE, "fenced"),
    "bare": (JSON_F, ONE, "bare"),
    "a bare list": (f"[{JSON_F}, {JSON_G}]", TWO, "bare"),
    "objects on lines": (f"{JSON_F}\n{JSON_G}", TWO, "bare"),
    "a bare Python list": ("[f(a='x'), g()]", TWO, "bare"),
    "OpenAI's objects": (
        json.dumps([{"type": "function", "function": json.loads(JSON_F)}]),
        ONE,
        "bare",
    ),
    "arguments as text": ('{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}', ONE, "bare"),
}


@pytest.mark.parametrize("form", CALLS)
def test_calls_are_read_in_the_form_of(form: str) -> None:
    text, calls, surface = CALLS[form]
    found = read(text)
    assert [(call.name, call.arguments) for call in found.calls] == calls
    assert (found.prose, found.surface) == ("", surface)


# forms whose calls are not objects in JSON
LAYOUTS = {
    "Nemotron": "tagged list",
    "Mistral": "tagged list",
    "Mistral, new": "tagged marks",
    "Mistral, with ids": "tagged marks",
    "Granite 3": "tagged list",
    "Phi 4": "tagged list",
    "LFM2": "tagged python",
    "Qwen3-Coder": "tagged xml",
    "Qwen3-Coder without tags": "tagged xml",
    "functions with JSON": "tagged xml",
    "GLM": "tagged xml",
    "GLM, two": "tagged xml",
    "DeepSeek": "tagged marks",
    "Kimi": "tagged marks",
    "a list in a fence": "fenced list",
    "a bare list": "bare list",
    "a bare Python list": "bare python",
    "OpenAI's objects": "bare list",
}


@pytest.mark.parametrize("form", CALLS)
def test_how_calls_are_written_has_a_name(form: str) -> None:
    text, _, surface = CALLS[form]
    assert read(text).form == LAYOUTS.get(form, surface)


@pytest.mark.parametrize("form", CALLS)
def test_calls_in_our_form_are_the_same_calls(form: str) -> None:
    text, calls, _ = CALLS[form]
    ours = tool_calls.parse_calls(native_calls.canonical(text))
    assert [(call.name, call.arguments) for call in ours] == calls


@pytest.mark.parametrize("form", [form for form in CALLS if CALLS[form][2] == "tagged"])
def test_what_stands_before_a_tag_is_prose(form: str) -> None:
    found = read(f"Let me see.\n\n{CALLS[form][0]}")
    assert found.prose == "Let me see."
    assert [(call.name, call.arguments) for call in found.calls] == CALLS[form][1]


NO_CALLS = {
    "words": "The weather is fine.",
    "data with a name": '{"name": "Tom", "age": 3}',
    "a list of data": '[{"name": "Tom"}]',
    "code in a fence": "```python\ndef f(a):\n    return a\n```",
    "a Python list": "[1, 2, 3]",
    "a list of calls with positions": "[f(1), g(2)]",
    "an object in a sentence": 'Use {"a": 1} as settings.',
    "nothing": "",
    "a mark of another kind": "<b>bold</b>",
}


@pytest.mark.parametrize("kind", NO_CALLS)
def test_an_answer_without_calls_is_unchanged(kind: str) -> None:
    text = NO_CALLS[kind]
    assert read(text) == native_calls.Written(text, [], "none")
    assert native_calls.canonical(text) == text


@pytest.mark.parametrize(
    "broken",
    ['<tool_call>\n{"name": "f", "arguments": {"a":', "<tool_call>\nhello there\n</tool_call>"],
)
def test_a_call_that_cannot_be_read_stays_a_bad_call(broken: str) -> None:
    (call,) = tool_calls.parse_calls(native_calls.canonical(broken))
    assert call.form == "bad_json"


def test_a_closing_tag_within_an_argument_belongs_to_it() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}\n</tool_call>'
    (call,) = read(text).calls
    assert call.arguments == {"a": "</tool_call><tool_call>"}


@pytest.mark.parametrize("around", ["{}", "```json\n{}\n```"])
def test_a_mark_within_an_argument_is_no_mark(around: str) -> None:
    found = read(around.format('{"name": "f", "arguments": {"a": "say <tool_call> now"}}'))
    assert [call.arguments for call in found.calls] == [{"a": "say <tool_call> now"}]


def test_calls_in_prose_are_all_read() -> None:
    found = read(f"First {JSON_F}\nand then {JSON_G}")
    assert [(call.name, call.arguments) for call in found.calls] == TWO
    assert found.prose == "First\nand then"


CUT = ('{"a": 1', "a=1", "<parameter=a>1", "<parameter=a>1</parameter><parameter=b>2")
CUT += ("<parameter=a>1</parameter><parameter=a>2</parameter>",)


@pytest.mark.parametrize("body", CUT)
def test_a_call_in_tags_is_not_read_without_what_cannot_be_read(body: str) -> None:
    text = f"<tool_call><function=f>{body}</function></tool_call>"
    (call,) = tool_calls.parse_calls(native_calls.canonical(text))
    assert call.form == "bad_json"


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[1e999]"])
def test_a_number_that_json_does_not_hold_stays_text(value: str) -> None:
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    (call,) = tool_calls.parse_calls(native_calls.canonical(text))
    assert call.arguments == {"a": value}


@pytest.mark.parametrize("tag", ["think", "scratch_pad"])
def test_reasoning_before_the_answer_is_prose_whatever_it_holds(tag: str) -> None:
    thought = f"<{tag}>\nmaybe {JSON_F}\n</{tag}>"
    assert read(f"{thought}\n\nNo.").calls == []
    assert [call.name for call in read(f"{thought}\n\n{JSON_G}").calls] == ["g"]


def test_data_behind_a_call_is_prose() -> None:
    found = read(f'{JSON_F}\n{{"result": 144}}')
    assert [call.name for call in found.calls] == ["f"]
    assert found.prose == '{"result": 144}'


def test_text_behind_a_call_is_kept() -> None:
    assert read(f"<tool_call>\n{JSON_F}\n</tool_call>\nThat is all.").prose == "That is all."


@pytest.mark.parametrize("value", ["3", "true", "null", '["a"]', '{"b": 1}'])
def test_values_in_tags_are_json_where_they_can_be(value: str) -> None:
    (call,) = read(
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    ).calls
    assert call.arguments == {"a": json.loads(value)}


# Each mark alone, again and again: a pattern that looks for its end beyond the next one would
# take time that grows with the square of the text.
HOSTILE = [*native_calls.MARKS, "<function=f>", "<function=f><parameter=a>", "```json\n"]
HOSTILE += ['{"name": ', "[", "<tool_call>f<arg_key>a</arg_key>"]
HOSTILE += [
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n",
    "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>",
]


def test_a_name_with_a_dash_is_read_behind_a_mark_alone() -> None:
    marked = native_calls.read('<|tool_call_start|>[get-weather(city="Oslo")]<|tool_call_end|>')
    assert [call.name for call in marked.calls] == ["get-weather"]
    assert not native_calls.read('[get-weather(city="Oslo")]').calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f><parameter=a>\n10\n</parameter></function></tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>10</arg_value></tool_call>",
    ],
)
def test_a_value_in_tags_is_text_where_its_argument_is_declared_so(text: str) -> None:
    def value(*texts: tuple[str, str]) -> Any:
        (call,) = native_calls.read(text, None, dict.fromkeys(texts, False)).calls
        return (call.arguments or {})["a"]

    assert value() == 10
    assert value(("f", "a")) == "10"
    assert value(("g", "a")) == 10  # of another function


@pytest.mark.parametrize("piece", HOSTILE)
def test_reading_hostile_text_takes_time_that_grows_with_its_length(piece: str) -> None:
    def took(text: str) -> float:
        began = time.process_time()
        read(text)
        native_calls.settled(text)
        return time.process_time() - began

    half = took(piece * 4000)
    assert took(piece * 8000) < 3 * half + 0.1  # with its square it would be four times as long


STREAMED = [text for text, _, _ in CALLS.values()]
STREAMED += [f"Let me see.\n\n{text}" for text, _, surface in CALLS.values() if surface == "tagged"]
STREAMED += [f"Let me see.\n\n{CALLS[form][0]}" for form in ("a fence", "a list in a fence")]
STREAMED += [
    *NO_CALLS.values(),
    "Use a < b and {x}.",
    "```python\nprint(1)\n```\nThat is all.",
    "```js\nlet a = [f(1)];\n```",
    f"```js\nlet a = {JSON_F};\n```",
    f"```js\nlet a = 1;\n```\n```json\n{JSON_F}\n```",
    f"So: {JSON_F}",
]


@pytest.mark.parametrize("text", STREAMED)
def test_what_a_stream_shows_stays(text: str) -> None:
    whole = native_calls.canonical(text)
    shown = [native_calls.settled(text[:n]) for n in range(len(text) + 1)]
    assert all(whole.startswith(part) for part in shown)
    assert all(later.startswith(part) for part, later in zip(shown, shown[1:]))


def test_code_in_a_fence_is_shown_before_it_closes() -> None:
    assert native_calls.settled("```js\nalert(1)\nalert(") == "```js\nalert(1)\nalert("
    assert native_calls.settled("So:\n```js\n") == "So:"


def test_code_in_a_closed_fence_is_shown_before_the_answer_ends() -> None:
    assert (
        native_calls.settled("```python\nprint(1)\n```\nThat is")
        == "```python\nprint(1)\n```\nThat is"
    )
