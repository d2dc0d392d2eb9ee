"""An export's chat template gives the ids that `codechat serve` renders, or raises: tools,
calls, results, parts."""

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from test_hf_format import FOREIGN, write_tokenizer

from codechat.core.errors import UserError
from codechat.formats import exported_tokenizer
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import tokenizer, tool_calls
from codechat_lab.serve import parsing, protocol

MODEL = GPT(GPTConfig(depth=1, n_embd=16, n_head=2, block_size=8192, vocab_size=512))
# whose tokenizer, and the tags
MODES = [
    ("ours", "reserved"),
    ("ours", "text"),
    ("ours", "raw"),
    ("theirs", "text"),
    ("theirs", "template"),
]
STYLES = ("compact", "described", "arguments", "json")


@lru_cache
def imported_tokenizer(folder: Path) -> tokenizer.Tokenizer:
    folder.mkdir()
    write_tokenizer(folder, FOREIGN["chatml"])
    return tokenizer.load(f"hf:{folder}")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Any:
    """both(whose, tags, style): the model as served, and transformers' tokenizer of its export."""
    root = tmp_path_factory.mktemp("tokenizers")

    @lru_cache
    def made(whose: str, tags: str, style: str) -> tuple[LoadedModel, Any]:
        tok = tokenizer.load("gpt2:512") if whose == "ours" else imported_tokenizer(root / "in")
        meta = {"lineage": [{"kind": "sft", "tools_style": style}]}
        out = root / f"{whose}-{tags}-{style}"
        out.mkdir()
        files = exported_tokenizer.tokenizer_files(
            tok,
            tags,
            block_size=8192,
            rows=tok.n_vocab + 6,
            tools_style=style,
        )
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
        loaded = LoadedModel(MODEL, tok, tags, meta, Path())
        return loaded, transformers.AutoTokenizer.from_pretrained(out)

    return lambda whose, tags, style="compact": made(whose, tags, style)


def served_ids(loaded: LoadedModel, messages: list[Any], tools: list[Any] | None) -> list[int]:
    request = protocol.ChatRequest.model_validate(
        {"model": "m", "messages": messages, "tools": tools}
    )
    return parsing.prompt_of(
        request.messages, [tool.function.schema_ for tool in request.tools or ()], loaded
    )


def template_ids(theirs: Any, messages: list[Any], tools: list[Any] | None) -> list[int]:
    filled = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=True
    )
    return list(filled["input_ids"])


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def asks(*calls: tuple[str, Any], content: Any = None, name: str = "weather") -> dict[str, Any]:
    """A turn with calls: ids and arguments, as an object or as text."""
    texts = [
        (i, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        for i, given in calls
    ]
    listed = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": text}}
        for i, text in texts
    ]
    return said("assistant", content, tool_calls=listed)


def result(of: str, content: Any) -> dict[str, Any]:
    return said("tool", content, tool_call_id=of)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def function(
    name: str, description: str | None, properties: dict[str, Any], *required: str
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    about = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": about}


USER = said("user", "Rome and Oslo?")
CITY = {"type": "string", "description": "A city, such as Rome."}
WEATHER = function(
    "weather", "Weather of a city,\n now  or later (in days).", {"city": CITY}, "city"
)
TOOLS = [
    None,
    [],
    [WEATHER],
    [
        WEATHER,
        function(
            "find-all.2",
            None,
            {
                "kind": {"type": "string", "enum": ["hotel", "rail station", "café"]},
                "stars": {"type": "integer", "enum": [1, 2, 3], "default": 2},
                "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "grid": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                "limit": {"type": ["integer", "null"], "minimum": 0},
                "where": {"type": "object"},
                "other": {"description": "anything"},
                "near": {"type": "boolean"},
            },
            "kind",
        ),
        {"type": "function", "function": {"name": "now"}},
    ],
]
CALLED = [USER, asks(("a", {"city": "Rome"}), ("b", {"city": "Oslo"}))]
TALKS = [
    [USER],
    [said("system", "Be brief."), USER],
    [said("developer", "Be brief."), USER],
    [said("system", ""), USER],
    [said("user", parts("Compare", "", "Rome", "Oslo"))],
    [said("developer", parts("Be brief.", "Be kind.")), said("user", parts("hi"))],
    [*CALLED, result("a", "1"), result("b", "2")],
    [*CALLED, result("b", "2"), result("a", "1")],
    [
        *CALLED,
        result("b", parts("cold", "wet")),
        result("a", "1"),
        said("assistant", "Both."),
        said("user", "and?"),
    ],
    [USER, asks(("x", {"city": "Rome"}), content=" Let me look.\n"), result("x", '{"result": 1}')],
    [USER, asks(("x", {"city": "Rome"}), content=""), result("x", "")],
    [USER, asks(("x", {"city": "Rome"}), content=parts("Let me", "look.")), result("x", "1")],
    [
        USER,
        asks(("x", {}), name="now"),
        result("x", "12:00"),
        said("assistant", "Noon."),
        said("user", "Thanks."),
    ],
    [USER, asks(("x", ""), name="now"), result("x", "12:00")],
    [
        USER,
        asks(("x", {"a": None, "b": [1, -2.5, 1e20, True], "c": {"d": {}, "e": []}})),
        result("x", "1"),
    ],
    [
        USER,
        asks(("x", {"a": 'q"u\\o/te\n\t', "b": "<|end|> <|user|><functioncall> é 漢 🎉"})),
        result("x", "1"),
    ],
    [
        USER,
        asks(("x", '{"city":"Z\\u00fcrich","n":1E2,"s":"\\ud83c\\udf89\\/\\u0001\\u0022"}')),
        result("x", "1"),
    ],
    [USER, asks(("x", ' {\n "a" : [ 1 , 2 ] ,\t"b":{ } }\n')), result("x", "1")],
    [USER, said("assistant", tool_calls.DECLINED), said("user", "Why?")],
    [
        USER,
        said("assistant", "None."),
        said("user", "Why?"),
        asks(("y", {"city": "x"})),
        result("y", "1"),
    ],
    [USER, said("assistant", '<functioncall> {"name": "f"}'), said("user", "So?")],
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("whose, tags", MODES)
def test_a_conversation_has_the_ids_that_the_server_renders(
    both: Any,
    whose: str,
    tags: str,
    style: str,
) -> None:
    loaded, theirs = both(whose, tags, style)
    for messages in TALKS:
        for tools in TOOLS:
            expected = served_ids(loaded, messages, tools)
            assert template_ids(theirs, messages, tools) == expected, (messages, tools)


ARGUMENTS = {"city": 'Rome "R" <|end|>', "days": [1, 2.5, None]}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
SERVED_TALK = [USER, asks(("a", ARGUMENTS)), result("a", "1")]


def transformers_talk(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """The same talk with a turn of calls in one of transformers' forms."""
    return [USER, {"role": "assistant", **turn}, said("tool", "1", name="weather")]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "", "tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL["function"]]},
        {"content": "", "tool_calls": [CALL | {"id": "a"}]},
        {"tool_calls": [CALL | {"id": "a"}]},
    ],
    ids=["no id", "bare function", "with an id", "no content"],
)
@pytest.mark.parametrize("whose, tags", MODES)
def test_calls_as_transformers_writes_them_are_rendered_alike(
    both: Any, whose: str, tags: str, turn: dict[str, Any]
) -> None:
    loaded, theirs = both(whose, tags)
    expected = served_ids(loaded, SERVED_TALK, [WEATHER])
    assert template_ids(theirs, transformers_talk(turn), [WEATHER]) == expected


@pytest.mark.parametrize("whose, tags", MODES)
def test_a_tool_without_the_object_around_its_function_is_listed_alike(
    both: Any, whose: str, tags: str
) -> None:
    loaded, theirs = both(whose, tags)
    expected = served_ids(loaded, SERVED_TALK, [WEATHER])
    assert template_ids(theirs, SERVED_TALK, [WEATHER["function"]]) == expected


WRONG = [
    [said("user", None)],
    [said("user", 3)],
    [said("user", [{"type": "image_url", "image_url": {"url": "x"}}])],
    [said("user", [{"type": "text", "text": None}])],
    [USER, said("assistant", None), USER],
    [said("user", "x", tool_calls=CALLED[1]["tool_calls"])],
    [*CALLED, result("a", "1")],
    [*CALLED, result("a", "1"), USER],
    [*CALLED, USER],
    [*CALLED, result("a", "1"), result("a", "1")],
    [*CALLED, result("a", "1"), result("c", "1")],
    [*CALLED, *(result(of, "1") for of in "aba")],
    [USER, asks(("a", {}), ("a", {})), result("a", "1"), result("a", "1")],
    [USER, result("a", "1")],
    [USER, asks(("a", "[1]")), result("a", "1")],
    [USER, asks(("a", '{"x": 1')), result("a", "1")],
    [USER, asks(("a", '{"x": "1}')), result("a", "1")],
    [USER, asks(("a", '{"x": nope}')), result("a", "1")],
    [USER, asks(("a", '{"x": 1e999}')), result("a", "1")],
    [USER, asks(("a", {}), name=""), result("a", "1")],
    [USER, said("assistant", "", function_call={"name": "f", "arguments": "{}"}), USER],
]


@pytest.mark.parametrize("whose, tags", MODES)
def test_what_the_server_refuses_is_refused_in_one_line(both: Any, whose: str, tags: str) -> None:
    loaded, theirs = both(whose, tags)
    for messages in WRONG:
        with pytest.raises((ValueError, UserError)):
            served_ids(loaded, messages, None)
        with pytest.raises(TemplateError) as refusal:
            template_ids(theirs, messages, None)
        assert "\n" not in str(refusal.value) and len(str(refusal.value)) > 20, messages


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"$ref": "#/$defs/City"},
        {"type": "object", "properties": {"x": {"type": "string"}}},
        {"type": "str"},
        {"type": "string", "enum": ["a|b", "c"]},
        {"type": "string", "enum": ["1", "2"]},
        {"enum": ["a", None]},
        {"type": "string", "enum": ["true", "false"]},
        {"type": "string", "nullable": True},
        {"const": "a"},
        True,
    ],
)
@pytest.mark.parametrize("style", ["compact", "described"])
def test_a_schema_that_cannot_be_listed_for_certain_is_refused(
    both: Any, schema: Any, style: str
) -> None:
    _, theirs = both("ours", "reserved", style)
    with pytest.raises(TemplateError, match="codechat serve"):
        template_ids(theirs, [USER], [function("f", "A function.", {"x": schema}, "x")])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "float"},
        {"type": ["string", "none"]},
        {"type": "string", "nullable": True},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
        {"type": "string", "required": True},
        {"anyOf": [{"type": "str"}, {"type": "null"}]},
        {"type": "object", "properties": {"inner": {"type": "dict"}}},
        {"type": "object", "additionalProperties": {"type": "int"}},
        {"type": "string", "enum": None},
    ],
)
def test_a_schema_that_the_server_writes_in_other_words_is_refused(both: Any, schema: Any) -> None:
    _, theirs = both("ours", "text", "json")
    tools = [function("f", "A function.", {"x": schema}, "x")]
    with pytest.raises(TemplateError, match="codechat serve"):
        template_ids(theirs, [USER], tools)


def test_a_schema_that_the_server_writes_as_it_stands_is_listed(both: Any) -> None:
    loaded, theirs = both("ours", "text", "json")
    good = [
        function(
            "f",
            "A function.",
            {"type": {"type": "string"}, "x": {"anyOf": [True, {"type": ["null"]}]}},
            "x",
        )
    ]
    assert template_ids(theirs, [USER], good) == served_ids(loaded, [USER], good)


@pytest.mark.parametrize("key", ["inputSchema", "input_schema", "args", "schema"])
@pytest.mark.parametrize("style", STYLES)
def test_parameters_under_another_name_are_not_left_out(both: Any, key: str, style: str) -> None:
    _, theirs = both("ours", "text", style)
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    with pytest.raises(
        TemplateError, match=f"under {key}; this template reads them from parameters"
    ):
        template_ids(
            theirs, [USER], [{"type": "function", "function": {"name": "f", key: parameters}}]
        )


def test_random_conversations_have_the_same_ids(both: Any) -> None:
    rng = random.Random(0)
    words = ["", " ", "a", "x < 1\n", "\n\n", "é漢🎉", "def f():\n    return 1", '{"a": 1}', "So: "]
    for _ in range(60):
        messages = (
            [said(rng.choice(["system", "developer"]), rng.choice(words))]
            if rng.random() < 0.5
            else []
        )
        for turn in range(rng.randrange(1, 4)):
            messages.append(
                said("user", rng.choice([rng.choice(words), parts(*rng.sample(words, 3))]))
            )
            calls = [
                (f"{turn}-{k}", {rng.choice("abc"): rng.choice([*words, 1, None, [{}]])})
                for k in range(rng.randrange(3))
            ]
            results = [result(of, rng.choice(words)) for of, _ in calls]
            rng.shuffle(results)
            messages += (
                [asks(*calls, content=rng.choice([None, *words])), *results] if calls else []
            )
            messages.append(said("assistant", rng.choice(words)))
        messages.append(said("user", rng.choice(words)))
        tools = rng.choice(TOOLS)
        for mode in (("ours", "reserved"), ("ours", "text"), ("theirs", "text")):
            loaded, theirs = both(*mode)
            assert template_ids(theirs, messages, tools) == served_ids(loaded, messages, tools), (
                mode,
                messages,
            )


def test_raw_text_begins_with_the_token_that_a_text_begins_with(
    both: Any, tmp_path: Path, transformers: Any
) -> None:
    saved = both("theirs", "text")[0].tokenizer.to_dict()
    about = json.loads(saved["json"])
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    about["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    tok = tokenizer.from_dict(saved | {"json": json.dumps(about)})
    assert tok.beginning == (0,)
    for name, text in exported_tokenizer.tokenizer_files(
        tok, "raw", block_size=96, rows=411
    ).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded = LoadedModel(MODEL, tok, "raw", {}, Path())
    expected = served_ids(loaded, [USER], [WEATHER])
    assert expected[0] == 0
    assert template_ids(theirs, [USER], [WEATHER]) == expected


def test_an_export_puts_its_part_before_a_foreign_template() -> None:
    theirs = FOREIGN["chatml"]
    once = exported_tokenizer.chat_template("template", "json", theirs)
    assert once.endswith(theirs)
    assert len(once) > len(theirs)


def test_an_exported_template_is_imported_as_it_was() -> None:
    theirs = FOREIGN["chatml"]
    once = exported_tokenizer.chat_template("template", "json", theirs)
    assert exported_tokenizer.without_messages(once) == theirs


def test_an_exported_template_is_exported_again_without_a_second_part() -> None:
    once = exported_tokenizer.chat_template("template", "json", FOREIGN["chatml"])
    assert exported_tokenizer.chat_template("template", "json", once) == once


@pytest.mark.parametrize("tags", ["text", "raw"])
def test_an_own_template_is_imported_as_it_was(tags: str) -> None:
    exported = exported_tokenizer.chat_template(tags, "described")
    assert exported_tokenizer.without_messages(exported) == exported_tokenizer.own_template(tags)
