"""Tools in an imported model's own words: listed by its template, called, read and trained as
it writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from imported import both, talk

from codechat.core.errors import ConfigError, DataError
from codechat.text import chat, native_template, tokenizer, tokenizer_files, tool_calls, tool_lists
from codechat.text.chat_template import ChatTemplate
from codechat.text.tokenizer import ImportedTokenizer

TOOLS = [
    {
        "name": "get_weather",
        "description": 'Weather of a "city"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
    {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
]
OFFER = tool_lists.tools_prompt(TOOLS, "json")
CHATML = (Path(__file__).parent / "templates/chatml.jinja").read_text().removesuffix("\n")
NAMES = (
    "hermes",
    "mistral",
    "llama",
    "python",
    "xml",
    "text",
    "list",
    "thought",
    "own",
    "own_list",
)
BARE = ("llama", "list")  # templates that write calls without a mark
SINGLE = ("llama",)  # templates that write one call in an answer


def source(name: str) -> str:
    if name == "own":  # marks that no reader knows; content None would be written as a word
        said = "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
        plain = source("hermes").replace(said, "{{ '\\n' }}{{ m.content }}")
        return plain.replace("tool_call>", "use_tool>")
    if name == "own_list":
        listed = source("python").replace("<|tool_call_start|>", "<|observation|>")
        return listed.replace("<|tool_call_end|>", "[/CALLS]")
    return (Path(__file__).parent / f"templates/tools_{name}.jinja").read_text().removesuffix("\n")


def ours(name: str, kind: str = "bytes") -> ImportedTokenizer:
    return both(kind, source(name))[0]


def call(name: str = "get_weather", /, **arguments: Any) -> str:
    return (
        f"<functioncall> {json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}"
    )


def conversation(*answers: str, result: str = '{"t": 3}') -> list[dict[str, str]]:
    """A request, an answer with a result for each of its calls, and so on."""
    messages = talk(OFFER, "Weather?", roles="su")
    for answer in answers:
        messages += talk(answer, roles="a")
        messages += (
            talk(*[result] * len(tool_calls.parse_calls(answer)), roles="f")
            if tool_calls.parse_calls(answer)
            else []
        )
    return messages


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_with_tools_equals_the_one_of_transformers(name: str) -> None:
    tok, theirs = both("bytes", source(name))
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    wording = native_template.native_template_of(tok).wording
    arguments = {"city": "Oslo"}
    asked = {"id": "call00000", "type": "function"}
    asked["function"] = {
        "name": "get_weather",
        "arguments": json.dumps(arguments) if wording.as_text else arguments,
    }
    said = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": wording.no_content, "tool_calls": [asked]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "call00000", "name": "get_weather"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "And now?"},
    ]
    ours_said = conversation(call(city="Oslo")) + talk("It is 3.", "And now?", roles="au")
    for n in (1, 3, 5):
        theirs_text = theirs.apply_chat_template(
            said[:n], tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids = theirs(theirs_text, add_special_tokens=False)["input_ids"]
        assert chat.prompt(ours_said[: n + 1], tok, "native") == ids


FOR_CHAT = "\n{{ '' }} " + CHATML + "\n"


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("name", ["hermes", "xml", "python"])
def test_of_two_templates_a_request_with_tools_takes_the_one_for_them(
    name: str, in_files: bool, tmp_path: Path
) -> None:
    """As transformers, which saves them in the configuration or as files of their own."""
    _, theirs = both("bytes", "")
    theirs.chat_template = {"default": FOR_CHAT, "tool_use": f"  {source(name)}\n"}
    theirs.save_pretrained(tmp_path, save_jinja_files=in_files)
    tok = tokenizer.load(f"hf:{tmp_path}")
    asked = [{"role": "user", "content": "Weather?"}]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    for given, messages in ((None, asked), (tools, conversation()[:2])):
        prompted = theirs.apply_chat_template(
            asked, tools=given, add_generation_prompt=True, tokenize=False
        )
        ids = theirs(prompted, add_special_tokens=False)["input_ids"]
        assert chat.prompt(messages[-2 if given else -1 :], tok, "native") == ids


def joined(default: str, for_tools: str) -> tuple[ImportedTokenizer, Any]:
    """Ours has them in one; theirs by name."""
    named = {"default": default, "tool_use": for_tools}
    tok, theirs = both("bytes", str(tokenizer_files.joined_template(named)))
    theirs.chat_template = named
    return tok, theirs


@pytest.mark.parametrize(
    "for_tools",
    [
        "  {% for m in messages %}[{{ m.content }}]{% endfor %}",
        "\n  {%- for m in messages %}[{{ m.content }}]{%- endfor -%}  ",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set ns = namespace(n=1) %}\n{{ f(ns.n) }}\r\n",
        "{# a remark #}\n  {{ messages[0].content }}\t",
    ],
)
def test_two_templates_in_one_write_what_each_writes_alone(for_tools: str) -> None:
    tok, theirs = joined(FOR_CHAT, for_tools)
    asked = talk("hi", roles="u")
    tool = {"type": "function", "function": TOOLS[0]}
    ours_in_one = ChatTemplate(tok)
    for tools in (None, [tool]):
        written = theirs.apply_chat_template(
            asked,
            tools=tools,
            tokenize=False,
        )
        assert ours_in_one._render(asked, tools, prompt=False) == written


def test_an_episode_goes_on_where_calls_have_a_template_of_their_own() -> None:
    tok, _ = joined(CHATML, source("hermes"))
    messages = conversation(call(city="Oslo"))
    prompt = chat.prompt(messages[:2], tok, "native")
    answer = chat.completion_ids(messages[2]["content"], tok, "native")
    onwards = chat.between_turns(messages[3:], tok, "native", messages[2]["content"])
    assert prompt + answer + onwards == chat.prompt(messages, tok, "native")


def test_two_templates_that_write_answers_otherwise_are_refused() -> None:
    """What is trained in one conversation would not be what is sampled in another."""
    other = CHATML.replace("<|im_end|>", "<|observation|>")
    named = {"default": other, "tool_use": source("hermes")}
    tok, _ = both("bytes", str(tokenizer_files.joined_template(named)))
    with pytest.raises(ConfigError, match="otherwise where no tools are on offer"):
        native_template.native_template_of(tok)
    needs_tools = source("hermes").replace(
        "{%- if tools %}", "{% for t in tools %}{% endfor %}{% if true %}"
    )
    tok, _ = both("bytes", needs_tools)
    with pytest.raises(ConfigError, match="cannot render a conversation without tools"):
        native_template.native_template_of(tok)


THOUGHT = "<think>\nwhy?\n</think>\n\nyes"


@pytest.mark.parametrize("tags", ["template", "native"])
@pytest.mark.parametrize(
    "answer", [THOUGHT, "<think>\nwhy?\n</think>", "<think>\nwhy?\n</think>\n\n"]
)
def test_a_prompt_behind_an_answer_with_a_thought_is_that_of_transformers(
    answer: str, tags: str, shared_data: Path
) -> None:
    """Which drops the thought; an answer is trained only where it stays."""
    template = (shared_data / "chat_templates" / "qwen3.jinja").read_text()
    tok, theirs = both("bytes", template, eos_token="<|im_end|>")
    messages = talk("hi", answer, "and?", roles="uau")
    written = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "why" not in written
    assert tok.decode_inside(chat.prompt(messages, tok, tags)) == written
    with pytest.raises(DataError):
        chat.render([*messages, *talk("no", roles="a")], tok, tags)


def test_a_conversation_goes_on_behind_a_thought_with_a_call(shared_data: Path) -> None:
    template = (shared_data / "chat_templates" / "qwen3.jinja").read_text()
    tok, _ = both("bytes", template, eos_token="<|im_end|>")
    thought = "<think>\nI should look.\n</think>\n\n" + call(city="Oslo")
    messages = conversation(thought) + talk("It is 3.", "And now?", roles="au")
    shown = tok.decode_inside(chat.prompt(messages, tok, "native"))
    assert "I should look" not in shown
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}' in shown


@pytest.mark.parametrize("name", ["hermes", "xml"])
def test_a_tool_in_another_form_is_listed_in_openais(name: str) -> None:
    tok = ours(name)
    given = {"name": "find", "description": "d", "parameters": {"place": {"type": "str"}}}
    text = tool_lists.WITH_TOOLS + "\n" + json.dumps(given)
    shown = tok.decode_inside(chat.prompt(talk(text, "Where?", roles="su"), tok, "native"))
    assert '"properties": {"place": {"type": "string"' in shown


def test_a_tool_without_description_is_listed_where_a_template_reads_one() -> None:
    bare = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    messages = talk(tool_lists.tools_prompt([bare], "json"), "Time?", roles="su")
    tok = ours("xml")
    shown = tok.decode_inside(chat.prompt(messages, tok, "native"))
    assert "<name>now</name><description></description>" in shown


def test_a_tool_is_listed_without_the_keys_that_it_lacks() -> None:
    tok, theirs = both("bytes", source("hermes"))
    bare = {"name": "now"}
    written = theirs.apply_chat_template(
        talk("Time?", roles="u"),
        tools=[{"type": "function", "function": bare}],
        add_generation_prompt=True,
        tokenize=False,
    )
    messages = talk(tool_lists.tools_prompt([bare], "json"), "Time?", roles="su")
    assert tok.decode_inside(chat.prompt(messages, tok, "native")) == written


ZIP = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {"zip": {"type": "string"}, "most": {"type": "integer"}},
    },
}


@pytest.mark.parametrize("text", ["10115", "true", "null", "None", "[1]", "1e3", "007"])
def test_a_value_between_tags_is_text_where_the_tool_says_so(text: str) -> None:
    tok = ours("xml")
    asked = talk(tool_lists.tools_prompt([ZIP], "json"), "Where?", roles="su")
    content = call("find", zip=text, most=3)
    ids = chat.completion_ids(content, tok, "native")
    assert chat.completion_text(ids, tok, "native", asked) == content


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string"}, ["10", "null"]),
        ({"type": ["string", "null"]}, ["10", None]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["10", None]),
        ({"enum": ["10", "null", "x"]}, ["10", "null"]),
        ({"$ref": "#/$defs/code"}, ["10", "null"]),
        ({"type": ["string", "integer"]}, [10, None]),
        ({}, [10, None]),
    ],
)
@pytest.mark.parametrize("style", ["json", "compact"])
def test_what_a_tool_declares_decides_whether_a_value_is_text(
    schema: dict[str, Any], values: list[Any], style: str
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"code": {"type": "string"}},
    }
    offer = tool_lists.tools_prompt([{"name": "f", "parameters": parameters}], style)
    tok = ours("xml")
    written = (
        "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    for text, value in zip(("10", "null"), values, strict=True):
        ids, _ = tok.encode_behind("", written.format(text))
        asked = talk(offer, roles="s")
        read = chat.completion_text(ids, tok, "native", asked)
        assert read == call("f", a=value)


def test_a_call_behind_the_end_of_an_answer_is_refused_by_that() -> None:
    called = "<|im_start|>assistant' }}{% if m.content %}"
    assert called in source("hermes")
    behind = source("hermes").replace(
        called, called.replace("assistant'", "assistant\\n<|im_end|>'")
    )
    with pytest.raises(ConfigError, match=r"writes a call behind <\|im_end\|>"):
        chat.stop_sequences(both("bytes", behind)[0], "native")


def test_a_content_that_the_template_drops_is_refused_wherever_it_stands() -> None:
    dropping = source("mistral").replace("if m == last and system", "if loop.first and system")
    tok, _ = both("bytes", dropping)
    messages = conversation(call(city="Oslo"))
    messages[0]["content"] = "Be brief.\n" + OFFER
    with pytest.raises(DataError, match="content of a message .system"):
        chat.prompt(messages, tok, "native")


@pytest.mark.parametrize("kind", ["bytes", "prepend", "first"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_with_calls_are_trained_where_they_are_sampled(name: str, kind: str) -> None:
    tok = ours(name, kind)
    messages = conversation(call(city='a "b"\nc'), "It is 3.")
    rendered = chat.render(messages, tok, "native")
    learned: list[int] = []
    for at in (2, 4):
        prompt = chat.prompt(messages[:at], tok, "native")
        answer = chat.completion_ids(messages[at]["content"], tok, "native")
        assert rendered.ids[: len(prompt + answer)] == prompt + answer
        assert chat.completion_text(answer, tok, "native") == messages[at]["content"]
        learned += answer
    assert [i for i, on in zip(rendered.ids, rendered.loss_mask, strict=True) if on] == learned


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_between_two_answers_continues_the_sampled_ids(name: str) -> None:
    tok = ours(name)
    messages = conversation(call(city="Oslo"))
    prompt = chat.prompt(messages[:2], tok, "native")
    answer = chat.completion_ids(messages[2]["content"], tok, "native")
    onwards = chat.between_turns(messages[3:], tok, "native", messages[2]["content"])
    assert tok.decode_inside(prompt + answer + onwards) == tok.decode_inside(
        chat.prompt(messages, tok, "native")
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SINGLE])
def test_several_calls_of_one_answer_come_back(name: str) -> None:
    tok = ours(name)
    content = f"{call(city='Oslo', days=2)}\n{call('now')}"
    ids = chat.completion_ids(content, tok, "native")
    assert chat.completion_text(ids, tok, "native") == content


@pytest.mark.parametrize("name", SINGLE)
def test_several_calls_are_refused_where_the_template_writes_one(name: str) -> None:
    with pytest.raises(DataError, match="one call at a time"):
        chat.completion_ids(f"{call(city='Oslo')}\n{call('now')}", ours(name), "native")


@pytest.mark.parametrize("name", ["hermes", "xml", "python"])
def test_a_text_before_a_call_comes_back(name: str) -> None:
    tok = ours(name)
    content = f"I will look.\n{call(city='Oslo')}"
    assert (
        chat.completion_text(chat.completion_ids(content, tok, "native"), tok, "native") == content
    )


def test_a_text_that_the_template_drops_is_refused() -> None:
    with pytest.raises(DataError, match="reads back otherwise"):
        chat.completion_ids(f"I will look.\n{call(city='Oslo')}", ours("llama"), "native")


def test_an_answer_that_declines_is_written_in_words() -> None:
    tok = ours("hermes")
    ids = chat.completion_ids(tool_calls.DECLINE, tok, "native")
    assert chat.completion_text(ids, tok, "native") == tool_calls.DECLINED


def test_a_template_that_takes_json_as_text_writes_json() -> None:
    tok, _ = both("bytes", source("hermes").replace("arguments | tojson", "arguments ~ ''"))
    written = tok.decode_inside(chat.completion_ids(call(city="Oslo"), tok, "native"))
    assert '"arguments": {"city": "Oslo"}}' in written


def test_a_call_that_cannot_be_read_is_not_trained() -> None:
    with pytest.raises(DataError, match="readable calls"):
        chat.completion_ids('<functioncall> {"name": "f"', ours("hermes"), "native")


def test_a_conversation_goes_on_behind_a_call_that_cannot_be_read() -> None:
    tok = ours("hermes")
    cut = tok.encode_behind("", '<tool_call>\n{"name": "get_weather", "arg')[0]
    messages = [*talk(OFFER, "Weather?", roles="su")]
    messages += talk(chat.completion_text(cut, tok, "native"), "Again?", roles="au")
    shown = tok.decode_inside(chat.prompt(messages, tok, "native"))
    assert '<|im_start|>assistant\n<tool_call> {"name": "get_weather", "arg<|im_end|>' in shown


@pytest.mark.parametrize("name", NAMES)
def test_a_call_begins_with_its_mark(name: str) -> None:
    tok = ours(name)
    mark = tok.decode_inside(chat.layout(tok, "native").call)
    answer = tok.decode_inside(chat.completion_ids(call(city="Oslo"), tok, "native"))
    assert answer.startswith(mark)
    assert bool(mark.strip()) is (name not in BARE)


def test_a_call_of_mistral_that_cannot_be_read_keeps_its_mark() -> None:
    tok = ours("mistral")
    cut = tok.encode_behind("", '[TOOL_CALLS] [{"name": "get_weather", "arg')[0]
    messages = [*talk(OFFER, "Weather?", roles="su")]
    messages += talk(chat.completion_text(cut, tok, "native"), "Again?", roles="au")
    shown = tok.decode_inside(chat.prompt(messages, tok, "native"))
    assert '[TOOL_CALLS] [{"name": "get_weather", "arg' in shown


def test_a_conversation_without_tools_is_that_of_the_template() -> None:
    tok = ours("hermes")
    messages = talk("be brief", "hi", "yes", roles="sua")
    assert chat.render(messages, tok, "native") == chat.render(messages, tok, "template")


@pytest.mark.parametrize("text", [f"Be brief.\n{OFFER}", f"{OFFER}\n\nBe brief."])
def test_a_system_text_keeps_its_own_words_beside_the_tools(text: str) -> None:
    tok = ours("hermes")
    shown = tok.decode_inside(chat.prompt(talk(text, "hi", roles="su"), tok, "native"))
    assert shown.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert "access to the following functions" not in shown


UNUSABLE = {
    "knows no tools": CHATML,
    "writes no calls": CHATML + "{% if tools %}{% endif %}",
    "does not list the tools": CHATML
    + "{% if tools %}{% endif %}{% if messages[0].tool_calls %}{% endif %}",
    "beside a system text": source("hermes").replace(
        "if tools %}{{ '<|im_start|>system",
        "if tools and messages[0].role != 'system' %}{{ '<|im_start|>system",
    ),
    "reads back otherwise": source("hermes").replace("'\\n<tool_call>\\n{", "'\\nI call:\\n{"),
    "lists no tools": source("hermes").replace("tool | tojson", "tool.wrong.key"),
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_a_template_that_cannot_be_proven_is_refused_with_the_reason(reason: str) -> None:
    tok, _ = both("bytes", UNUSABLE[reason])
    with pytest.raises(ConfigError, match=reason) as error:
        chat.stop_sequences(tok, "native")
    assert "use tags template" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_that_needs_text_turns_without_tools_too_says_so() -> None:
    asked = "{{ '<|im_start|>assistant\\n' }}"
    assert asked in source("hermes")
    thinking = source("hermes").replace(asked, asked.replace("\\n", "\\n<think>\\n"))
    tok, _ = both("bytes", thinking)
    with pytest.raises(ConfigError, match="behind its generation prompt") as error:
        chat.stop_sequences(tok, "native")
    assert "use tags text" in str(error.value)
    assert "template" not in str(error.value).partition("; ")[2]


def test_a_call_that_ends_with_another_token_is_refused_by_that() -> None:
    calls_end = "endfor %}{{ '<|im_end|>\\n' }}\n{%- elif not"
    assert calls_end in source("hermes")
    ending = source("hermes").replace(calls_end, calls_end.replace("im_end", "observation"))
    with pytest.raises(ConfigError, match=r"ends a call without <\|im_end\|>"):
        chat.stop_sequences(both("bytes", ending)[0], "native")


def test_what_a_template_raises_is_told_once_and_on_one_line() -> None:
    raising = source("llama").replace("one call at a time", "one call\\nat a time")
    tok, _ = both("bytes", raising)
    with pytest.raises(DataError, match="one call at a time") as error:
        chat.completion_ids(f"{call(city='Oslo')}\n{call('now')}", tok, "native")
    assert str(error.value).count("the chat template of") == 1
    assert "\n" not in str(error.value)


def test_public_templates_are_proven_or_refused_by_name(shared_data: Path) -> None:
    ends = dict(phi3="<|endoftext|>", deepseekv3="<｜end▁of▁sentence｜>")
    proven = set()
    for path in sorted((shared_data / "chat_templates").glob("*.jinja")):
        tok, _ = both("bytes", path.read_text(), eos_token=ends.get(path.stem, "<|im_end|>"))
        try:
            chat.stop_sequences(tok, "native")
        except ConfigError as error:
            assert "hf:theirs" in str(error)
        else:
            proven.add(path.stem)
    assert proven == {"qwen2_5", "qwen3", "qwen3_instruct_2507"}
