"""Conversations in the forms of other projects: what they become, what is dropped, and what training reads of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codechat.core.errors import ConfigError, DataError
from codechat.data import chat_formats, command, conversations, public_rows, synthetic
from codechat.data.sources import Ledger
from codechat.text import chat, tokenizer

BYTES = tokenizer.load("bytes")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}  # fmt: skip
SCHEMA = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": SCHEMA}]
OFFER = chat.tools_prompt([SCHEMA])


def called(city: str, **more) -> str:
    return chat.format_call("get_weather", {"city": city, **more})


def call(id: str, city: str) -> dict:
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}


OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Oslo and Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("a", "Oslo"), call("b", "Rome")]},
        {"role": "tool", "tool_call_id": "b", "content": "20"},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "assistant", "content": "Oslo 3, Rome 20."},
    ],
    "tools": TOOLS,
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Oslo and Rome?"},
        {"from": "function_call", "value": json.dumps([{"name": "get_weather", "arguments": {"city": c}} for c in ("Oslo", "Rome")])},
        {"from": "observation", "value": "3"},
        {"from": "observation", "value": "20"},
        {"from": "gpt", "value": "Oslo 3, Rome 20."},
    ],
    "system": "Be brief.",
    "tools": json.dumps(TOOLS),
}  # fmt: skip
HERMES = {
    "conversations": [
        {
            "from": "system",
            "value": f"You call functions. Signatures are within <tools></tools> tags: <tools>{json.dumps(TOOLS)}</tools> "
            "For each call return <tool_call>{...}</tool_call>",
        },
        {"from": "human", "value": "Oslo and Rome?"},
        {
            "from": "gpt",
            "value": "<tool_call>\n{'arguments': {'city': 'Oslo'}, 'name': 'get_weather'}\n</tool_call>\n"
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        },
        {"from": "tool", "value": "<tool_response>\n3\n</tool_response>\n<tool_response>20</tool_response>"},
        {"from": "gpt", "value": "Oslo 3, Rome 20."},
    ]
}
QWEN = {
    "text": f"<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call functions.\n<tools>\n{json.dumps(TOOLS[0])}\n</tools>\n\n"
    "For each call return <tool_call>{...}</tool_call><|im_end|>\n<|im_start|>user\nOslo and Rome?<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n20\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\nOslo 3, Rome 20.<|im_end|>\n"
}
GLAIVE = {
    "system": f"SYSTEM: You have access to the following functions -\n{json.dumps(SCHEMA, indent=4)}\n",
    "chat": 'USER: Oslo and Rome?\n\n\nASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": "Oslo"}\'}\n'
    '<functioncall> {"name": "get_weather", "arguments": {"city": "Rome"}} <|endoftext|>\n\n\nFUNCTION RESPONSE: 3\n\n\n'
    "FUNCTION RESPONSE: 20\n\n\nASSISTANT: Oslo 3, Rome 20. <|endoftext|>\n\n\n\n",
}
FORMS = {"openai": OPENAI, "sharegpt": SHAREGPT, "hermes": HERMES, "qwen": QWEN, "glaive": GLAIVE}
EXPECTED = [
    {"role": "system", "content": f"Be brief.\n{OFFER}"},
    {"role": "user", "content": "Oslo and Rome?"},
    {"role": "assistant", "content": f"{called('Oslo')}\n{called('Rome')}"},
    {"role": "function", "content": "3"},
    {"role": "function", "content": "20"},
    {"role": "assistant", "content": "Oslo 3, Rome 20."},
]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(kind: str, source: Path | str, out: Path, *flags: object) -> None:
    command.main([kind, "--source", str(source), "--out", str(out), "--tokenizer", "bytes", *map(str, flags)])


def changed(number: int, **fields) -> dict:
    return OPENAI | {"messages": [m | fields if i == number else m for i, m in enumerate(OPENAI["messages"])]}


def test_every_form_becomes_the_same_conversation():
    for form, row in FORMS.items():
        system, *turns = chat_formats.messages_of(row, "x")
        # the text of Hermes only explains its tags, that of glaive comes with the schemas
        assert turns == EXPECTED[1:] and system["content"] == (
            OFFER if form in ("hermes", "glaive") else EXPECTED[0]["content"]
        )
    own = [{"role": "user", "content": " x "}, {"role": "assistant", "content": f"Now {called('Oslo')}"}]
    assert chat_formats.messages_of({"messages": own}, "x") == own
    first = {"content": "Let me see.", "function_call": {"name": "f", "arguments": ""}}  # OpenAI's first form of a call
    result = {"role": "function", "name": "f", "content": "3"}
    row = {"messages": [{"role": "user", "content": "Oslo?"}, {"role": "assistant", **first}, result]}
    messages = chat_formats.messages_of(row, "x")
    assert messages[1]["content"] == "Let me see.\n" + chat.format_call("f", {}) and messages[2]["role"] == "function"
    text = QWEN["text"].replace(
        "</function>", "<parameter=days>\n2\n</parameter>\n</function>"
    )  # as the schema types it
    assert chat_formats.messages_of({"text": text}, "x")[2]["content"].endswith(called("Rome", days=2))
    prose = GLAIVE["chat"].replace("ASSISTANT: <", "ASSISTANT: Sure. <").replace("Oslo 3", "A paint.\n\nA: no turn")
    messages = chat_formats.messages_of(GLAIVE | {"chat": prose}, "x")
    assert messages[2]["content"] == f"Sure.\n{EXPECTED[2]['content']}"
    assert messages[-1]["content"].startswith("A paint.\n\nA: no turn")
    bare = chat_formats.messages_of({"system": "SYSTEM: No functions.\n\n\n", "chat": "USER: a\n\n\nASSISTANT: b"}, "x")
    assert [m["content"] for m in bare] == ["No functions.", "a", "b"]


def test_arguments_are_read_under_each_known_name():
    calls = OPENAI["messages"][2]["tool_calls"]
    for key in ("args", "input", "parameters"):
        for beside in ({}, {"arguments": None}, {"args": None, "arguments": ""}):
            functions = [call["function"] for call in calls]
            renamed = [beside | {"name": f["name"], key: f["arguments"]} for f in functions]
            row = changed(2, tool_calls=[{"id": c["id"], "function": f} for c, f in zip(calls, renamed)])
            assert chat_formats.messages_of(row, "x") == EXPECTED


def glaive(answer: str) -> dict:
    return GLAIVE | {"chat": f"USER: Oslo?\n\n\nASSISTANT: {answer} <|endoftext|>"}


CALLED = called("Oslo")
UNUSABLE = {
    "result_without_call": [changed(3, tool_call_id="z")],
    "call_without_result": [OPENAI | {"messages": [*OPENAI["messages"][:4], *OPENAI["messages"][5:]]}],
    "unreadable_call": [
        changed(2, tool_calls=[{"id": "a", "function": {"name": "f", "arguments": '{"a": '}}]),
        changed(2, tool_calls=["f"]),
        changed(2, tool_calls=[{"name": "f", "kwargs": {"city": "Oslo"}}]),
        changed(2, tool_calls=[{"function": {"name": "f", "arguments": None, "kw": '{"a": 1}'}}]),
        changed(2, tool_calls=True),
        glaive("<functioncall> {oops"),
    ],
    "empty_turn": [changed(5, content=None)],
    "not_text": [changed(1, content=[{"type": "image_url", "image_url": {}}])],
    "unreadable_tools": [
        OPENAI | {"tools": [{"type": "function", "function": {"description": "x"}}]},
        OPENAI | {"tools": '[{"name": '},
        OPENAI | {"tools": [json.dumps(SCHEMA) * 2]},
        *(OPENAI | {"tools": [{"name": "f", "parameters": p}]} for p in ([[]], {"properties": 1.5}, {"properties": {}, "required": True})),
        *(GLAIVE | {"system": system} for system in ("{broken", None)),
    ],
    "no_turns": [{"messages": []}, GLAIVE | {"chat": "nothing"}],
    "no_answer": [{"text": "plain words"}],
    "text_after_call": [
        changed(5, content="<tool_call>{}</tool_call> and more"),
        *(glaive(CALLED + after) for after in ("}", " I called it.", f" Now: {CALLED}")),  # else lost silently
    ],
    "bad_row": [{"question": "[", "functions": "[]", "ground_truth": "[]"}],
}  # fmt: skip


def test_rows_that_cannot_be_taught_give_a_reason():
    for reason, rows in UNUSABLE.items():
        assert [chat_formats.messages_of(row, "x") for row in rows] == [reason] * len(rows)


# ------------------------------------------------------------------ columns and marks beside the text

USER, BOT = {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}
PLAIN = {"instruction": "Two?", "input": "", "output": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]
SILENT = BOT | {"weight": 0}
HONOURED = [
    (PLAIN | {"system": "", "history": [], "tools": None}, [USER, BOT]),
    *[(PLAIN | {column: "Be brief."}, [SYSTEM, USER, BOT]) for column in ("system", "system_prompt", "system_message")],
    (PLAIN | {"history": [["One?", "1"]]}, [*EARLIER, USER, BOT]),
    (PLAIN | {"history": EARLIER, "system": "Be brief."}, [SYSTEM, *EARLIER, USER, BOT]),
    ({"instruction": "Sum", "context": "1, 1", "response": "2"}, [USER | {"content": "Sum\n\n1, 1"}, BOT]),
    ({"prompt": [SYSTEM, USER], "completion": [BOT]}, [SYSTEM, USER, BOT]),
    (PLAIN | {"tools": TOOLS}, [{"role": "system", "content": OFFER}, USER, BOT]),
    *[(PLAIN | {"tools": [{"name": "get_weather", "description": "Weather of a city", key: SCHEMA["parameters"]}]}, [{"role": "system", "content": OFFER}, USER, BOT]) for key in ("input_schema", "inputSchema")],
    ({"messages": [SYSTEM, USER, BOT], "system": "Be brief."}, [SYSTEM, USER, BOT]),
    ({"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}], "system_prompt": "Be brief."}, [SYSTEM, USER, BOT]),
    *[({"messages": [USER, BOT | mark, USER, BOT]}, [USER, SILENT, USER, BOT]) for mark in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}, {"loss": False})],
    *[({"messages": [USER | mark, BOT | mark]}, [USER, BOT]) for mark in ({"weight": 1}, {"train": True}, {"weight": None})],
    ({"prompt": "def f():\n", "completion": "\n    return 1\n"}, [USER | {"content": "def f():"}, BOT | {"content": "    return 1"}]),
    ({"question": "Go on:", "answer": "\r\n\treturn 1"}, [USER | {"content": "Go on:"}, BOT | {"content": "\treturn 1"}]),
]  # fmt: skip
REFUSED = [
    (PLAIN | {"system": ["Be brief."]}, "system"),
    (PLAIN | {"system": "a", "system_prompt": "b"}, "system_prompt"),
    *[(PLAIN | {"history": history}, "history") for history in ("One? 1", [["One?"]], [["One?", None]])],
    ({"messages": [SYSTEM, USER, BOT], "system": "Be long."}, "system"),
    *[({"messages": [USER, BOT | mark]}, next(iter(mark))) for mark in ({"weight": 0.5}, {"weight": "0"}, {"train": "no"}, {"weight": -1}, {"reasoning_content": "hm"}, {"train_detail": [{"begin_offset": 0}]})],
]  # fmt: skip


def test_columns_and_marks_beside_the_text_are_honoured_or_named_with_their_row(tmp_path, capsys):
    for row, messages in HONOURED:
        assert public_rows.conversation_row(row, "x")["messages"] == messages
    for row, name in REFUSED:
        with pytest.raises(DataError, match=rf"\Ax.*{name}"):
            public_rows.conversation_row(row, "x")
    rows = [PLAIN | {"system": text, "category": "sums"} for text in ("a", "b", "b")]  # the same where all columns are
    assert len(list(public_rows.conversation_rows(rows, "x", Ledger("x")))) == 2
    list(public_rows.conversation_rows([PLAIN], "y", Ledger("y")))
    assert capsys.readouterr().err == "x: columns that are not read: category\n"
    row = {"output": "if x:\n    x = 3\n    print(x, 3, '3')", "system": "Be brief.", "history": [["One?", "1"]]}
    prepare("code", write(tmp_path / "x.jsonl", [row | {"instruction": f"{n}"} for n in range(30)]), tmp_path / "out")
    for made in rows_of(tmp_path / "out/programs.train.jsonl"):
        assert made["messages"][:3] == [SYSTEM, *EARLIER] and made["messages"][4]["content"] == row["output"]


def taught(example: conversations.Example) -> str:
    return chat.decode([t for t, on in zip(example.ids, example.loss_mask, strict=True) if on], BYTES)


def test_an_answer_of_weight_0_has_no_loss_wherever_it_is_read(tmp_path):
    turns = [USER, BOT | {"content": "silent", "weight": 0}, USER, BOT | {"content": "taught"}]
    foreign = [turns[0], {"from": "gpt", "value": "silent", "train": False}, *turns[2:]]
    for name, messages in (("raw", turns), ("train", foreign)):
        write(tmp_path / f"{name}.train.jsonl", [{"messages": messages}] * 30)
    unique = [{"messages": [USER | {"content": f"{i}?"}, *turns[1:]]} for i in range(30)]
    prepare("sft", write(tmp_path / "mine.jsonl", unique), tmp_path, "--neutral-share", 0)
    for tags in ("reserved", "text"):
        domains = conversations.load_domains(tmp_path, "train", BYTES, tags, 4096)
        assert {*domains} == {"raw", "train", "chat"}
        assert {taught(rows[0]) for rows in domains.values()} == {"taught\n<|end|>"}
    assert public_rows.conversation_row({"messages": [USER, BOT | {"weight": 0}]}, "x") == "no_answer"


# ------------------------------------------------------------------ codechat data


@pytest.mark.parametrize("kind, form", [("calls", "openai"), ("calls", "glaive"), ("sft", "sharegpt"), ("sft", "qwen")])
def test_fifty_rows_of_ones_own_are_ready_for_training(tmp_path, kind, form, capsys):
    text = json.dumps(FORMS[form])
    rows = [json.loads(text.replace("Oslo and Rome", f"Question {i}: Oslo and Rome")) for i in range(50)]
    source = write(tmp_path / "mine.jsonl", rows)
    prepare(kind, source, tmp_path, *(["--probes", 0, "--preview", 3] if kind == "calls" else []))
    parts = {split: rows_of(tmp_path / f"calls.{split}.jsonl") for split in ("train", "select", "test")}
    assert sum(map(len, parts.values())) == 50 and len(parts["train"]) >= 40
    for split, rows in parts.items():
        assert all(row["meta"]["split"] == split and row["meta"]["tools_present"] for row in rows)
    example = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 4096)["calls"][0]
    assert taught(example) == "".join(f"{m['content']}\n<|end|>" for m in EXPECTED if m["role"] == "assistant")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["sources"]["mine.jsonl"] == {"kept": 50, "dropped": {}, "skipped": {}}
    if kind == "calls":  # the preview shows conversations with their mask; problems hold what comes before the call
        out = capsys.readouterr().out
        assert out.count("\n--- calls-") + out.startswith("--- calls-") == 3
        assert f"[[{called('Oslo')}\n{called('Rome')}\n<|end|>]]" in out and "[[Be brief." not in out


def test_no_request_is_in_two_splits_where_rows_move_to_an_empty_one():
    rows = [{"id": str(i), "request": str(i % 20), "meta": {"split": "train"}} for i in range(60)]
    parts = synthetic.spread(rows, lambda row: row["request"])
    requests = [{row["request"] for row in part} for part in parts.values()]
    assert list(map(len, requests)) == [17, 2, 1] and len(set.union(*requests)) == 20  # a tenth of 20, then of 18
    assert [len(part) for part in parts.values()] == [51, 6, 3]
    assert synthetic.spread(rows[:9], lambda row: row["request"])["train"] == rows[:9]


def test_problems_hold_what_comes_before_the_first_call(tmp_path):
    source = write(tmp_path / "g.jsonl", [glaive(CALLED), glaive("I cannot.")])
    prepare("calls", source, tmp_path / "out", "--probes", 0)
    problems = [p for f in (tmp_path / "out").glob("funcall.*.jsonl") for p in rows_of(f)]
    golds = sorted((p["gold"] for p in problems), key=str)
    assert golds == [None, {"arguments": {"city": "Oslo"}, "name": "get_weather"}]
    assert all([m["role"] for m in p["messages"]] == ["system", "user"] for p in problems)


def test_columns_under_other_names(tmp_path):
    rows = [{"query": f"What is {i}?", "response": f"It is {i}.", "extra": i} for i in range(30)]
    source = write(tmp_path / "mine.jsonl", rows)
    prepare("sft", source, tmp_path / "out", "--columns", "question=query,answer=response", "--neutral-share", 0)
    made = [row for split in ("train", "select", "test") for row in rows_of(tmp_path / f"out/chat.{split}.jsonl")]
    texts = sorted(text for row in rows for text in (row["query"], row["response"]))
    assert sorted(m["content"] for row in made for m in row["messages"]) == texts
    with pytest.raises(DataError, match="row 1 has no column 'reply'.*query, response, extra"):
        prepare("sft", source, tmp_path / "other", "--columns", "answer=reply")
    with pytest.raises(ConfigError, match="OURS=THEIRS"):
        prepare("sft", source, tmp_path / "other", "--columns", "query")
    hidden = write(tmp_path / "hidden.jsonl", [{"query": "How many?", "response": "2 and 1.\n#### 3"}])
    for flags in ((), ("--columns", "question=query,answer=response")):
        with pytest.raises(DataError, match="GSM8K"):
            prepare("sft", hidden, tmp_path / "other", *flags)
