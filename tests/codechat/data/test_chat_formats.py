"""Conversations in the forms of other projects: what they become, what is dropped, and what
training reads of them."""

import json
from pathlib import Path

import pytest
from jsonl import prepare, rows_of, write

from codechat.core.errors import ConfigError, DataError
from codechat.data import chat_formats, conversations, public_rows, row_readers, sources, splits
from codechat.data.sources import Ledger
from codechat.text import chat, tokenizer

# sets of ../shared/rows -> the function that their rows call
SHARED_SETS = [
    *(
        (name, "get_weather")
        for name in ("APIGen-MT", "ToolACE", "Toucan", "hermes-v1", "minimind", "mobile-actions")
    ),
    *((name, "get_weather") for name in ("xlam-60k", "legacy_function_call", "functions_column")),
    ("xlam-irrelevance", None),
    ("nested_null", "search"),
]
BYTES = tokenizer.load("bytes")
HERE = Path(__file__).parent
FORMS = json.loads(
    (HERE / "forms.json").read_text(encoding="utf-8")
)  # one conversation in five forms
OPENAI = FORMS["openai"]
GLAIVE = FORMS["glaive"]
OFFER = chat.tools_prompt([OPENAI["tools"][0]["function"]])


def called(city: str) -> str:
    return chat.format_call("get_weather", {"city": city})


EXPECTED = [
    {"role": "system", "content": f"Be brief.\n{OFFER}"},
    {"role": "user", "content": "Oslo and Rome?"},
    {"role": "assistant", "content": f"{called('Oslo')}\n{called('Rome')}"},
    {"role": "function", "content": "3"},
    {"role": "function", "content": "20"},
    {"role": "assistant", "content": "Oslo 3, Rome 20."},
]


def test_every_form_becomes_the_same_conversation():
    for form, row in FORMS.items():
        system, *turns = chat_formats.messages_of(row, "x")
        # the text of Hermes only explains its tags, that of glaive comes with the schemas
        assert turns == EXPECTED[1:]
        assert system["content"] == (
            OFFER if form in ("hermes", "glaive") else EXPECTED[0]["content"]
        )
    own = [
        {"role": "user", "content": " x "},
        {"role": "assistant", "content": f"Now {called('Oslo')}"},
    ]
    assert chat_formats.messages_of({"messages": own}, "x") == own
    prose = (
        GLAIVE["chat"]
        .replace("ASSISTANT: <", "ASSISTANT: Sure. <")
        .replace("Oslo 3", "A paint.\n\nA: no turn")
    )
    messages = chat_formats.messages_of(GLAIVE | {"chat": prose}, "x")
    assert messages[2]["content"] == f"Sure.\n{EXPECTED[2]['content']}"
    assert messages[-1]["content"].startswith("A paint.\n\nA: no turn")
    bare = chat_formats.messages_of(
        {"system": "SYSTEM: No functions.\n\n\n", "chat": "USER: a\n\n\nASSISTANT: b"}, "x"
    )
    assert [m["content"] for m in bare] == ["No functions.", "a", "b"]


def test_tool_sets_are_read_and_a_request_without_a_call_is_declined():
    functions = json.dumps([tool["function"] for tool in OPENAI["tools"]])
    question = json.dumps([{"role": "user", "content": "Oslo and Rome?"}])
    calls = json.dumps(
        [{"name": "get_weather", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
    )
    for truth, answer in ((calls, EXPECTED[2]["content"]), ("[]", row_readers.NO_CALL)):
        row = {
            "question": question,
            "functions": functions,
            "ground_truth": truth,
            "source": "a set",
        }
        offer = {"role": "system", "content": OFFER}
        said = {"role": "assistant", "content": answer}
        assert chat_formats.messages_of(row, "x") == [offer, EXPECTED[1], said]
    assert chat_formats.messages_of(row | {"ground_truth": "[{"}, "x") == "bad_row"
    before = [
        ("user", "Both?"),
        ("assistant", "Sure."),
        ("assistant", f"```{calls}```"),
        ("function", "fog"),
        ("user", "x"),
    ]
    asked = json.dumps([{"role": role, "content": text} for role, text in before])
    _, _, answer, *_ = chat_formats.messages_of(
        row | {"question": asked, "ground_truth": calls}, "x"
    )
    assert (
        answer["content"] == f"Sure.\n{EXPECTED[2]['content']}"
    )  # calls that a set writes in fences


def glaive(answer: str) -> dict:
    return GLAIVE | {"chat": f"USER: Oslo?\n\n\nASSISTANT: {answer} <|endoftext|>"}


def test_rows_that_cannot_be_taught_give_a_reason():
    for line in rows_of(HERE / "unusable.jsonl"):
        assert chat_formats.messages_of(line["row"], "x") == line["reason"], line


PUBLIC = rows_of(HERE / "public_forms.jsonl")


@pytest.mark.parametrize("case", PUBLIC, ids=[case["form"] for case in PUBLIC])
def test_rows_of_a_public_set_keep_their_calls_and_offer_their_tools(case):
    assert chat_formats.messages_of(case["row"], "x") == case["messages"]


@pytest.mark.parametrize("name, called", SHARED_SETS)
def test_the_sample_of_a_public_set_is_kept_whole_with_its_call(name, called, shared_rows):
    ledger = Ledger(name)
    rows = [
        row | {"id": number}
        for number, row in enumerate(sources.local_rows(shared_rows / f"{name}.jsonl"))
    ]
    kept = list(public_rows.conversation_rows(rows, name, ledger))
    assert ledger.kept + ledger.skipped["duplicate"] == len(rows)
    assert not ledger.lost
    assert all(row["meta"]["tools_present"] for row in kept)
    golds = {(public_rows.call_problem(row)["gold"] or {}).get("name") for row in kept}
    assert golds == {called}


USER = {"role": "user", "content": "Two?"}
BOT = {"role": "assistant", "content": "2"}
PLAIN = {"instruction": "Two?", "input": "", "output": "2"}


def test_columns_and_marks_beside_the_text_are_honoured_or_named_with_their_row(tmp_path, capsys):
    for line in rows_of(HERE / "beside.jsonl"):
        if "messages" in line:
            assert public_rows.conversation_row(line["row"], "x")["messages"] == line["messages"], (
                line
            )
            continue
        with pytest.raises(DataError, match=rf"\Ax.*{line['refused']}"):
            public_rows.conversation_row(line["row"], "x")
    rows = [
        PLAIN | {"system": text, "category": "sums"} for text in ("a", "b", "b")
    ]  # the same where all columns are
    assert len(list(public_rows.conversation_rows(rows, "x", Ledger("x")))) == 2
    list(public_rows.conversation_rows([PLAIN], "y", Ledger("y")))
    assert capsys.readouterr().err == "x: columns that are not read: category\n"
    row = {
        "output": "if x:\n    x = 3\n    print(x, 3, '3')",
        "system": "Be brief.",
        "history": [["One?", "1"]],
    }
    source = write(tmp_path / "x.jsonl", [row | {"instruction": f"{n}"} for n in range(30)])
    prepare("code", tmp_path / "out", "--source", source)
    for made in rows_of(tmp_path / "out/programs.train.jsonl"):
        assert [m["content"] for m in made["messages"][:3]] == ["Be brief.", "One?", "1"]
        assert made["messages"][4]["content"] == row["output"]


def taught(example: conversations.Example) -> str:
    return chat.decode(
        [t for t, on in zip(example.ids, example.loss_mask, strict=True) if on], BYTES
    )


def test_an_answer_of_weight_0_has_no_loss_wherever_it_is_read(tmp_path):
    turns = [USER, BOT | {"content": "silent", "weight": 0}, USER, BOT | {"content": "taught"}]
    foreign = [turns[0], {"from": "gpt", "value": "silent", "train": False}, *turns[2:]]
    for name, messages in (("raw", turns), ("train", foreign)):
        write(tmp_path / f"{name}.train.jsonl", [{"messages": messages}] * 30)
    unique = [{"messages": [USER | {"content": f"{i}?"}, *turns[1:]]} for i in range(30)]
    prepare(
        "sft",
        tmp_path,
        "--source",
        write(tmp_path / "mine.jsonl", unique),
        "--neutral-share",
        0,
    )
    for tags in ("reserved", "text"):
        domains = conversations.load_domains(tmp_path, "train", BYTES, tags, 4096)
        assert {*domains} == {"raw", "train", "chat"}
        assert {taught(rows[0]) for rows in domains.values()} == {"taught\n<|end|>"}
    assert (
        public_rows.conversation_row({"messages": [USER, BOT | {"weight": 0}]}, "x") == "no_answer"
    )


@pytest.mark.parametrize(
    "kind, form", [("calls", "openai"), ("calls", "glaive"), ("sft", "sharegpt"), ("sft", "qwen")]
)
def test_fifty_rows_of_ones_own_are_ready_for_training(tmp_path, kind, form, capsys):
    text = json.dumps(FORMS[form])
    rows = [
        json.loads(text.replace("Oslo and Rome", f"Question {i}: Oslo and Rome")) for i in range(50)
    ]
    source = write(tmp_path / "mine.jsonl", rows)
    prepare(
        kind,
        tmp_path,
        "--source",
        source,
        *(["--probes", 0, "--preview", 3] if kind == "calls" else []),
    )
    parts = {
        split: rows_of(tmp_path / f"calls.{split}.jsonl") for split in ("train", "select", "test")
    }
    assert sum(map(len, parts.values())) == 50
    assert len(parts["train"]) >= 40
    for split, rows in parts.items():
        assert all(row["meta"]["split"] == split and row["meta"]["tools_present"] for row in rows)
    example = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 4096)["calls"][0]
    assert taught(example) == "".join(
        f"{m['content']}\n<|end|>" for m in EXPECTED if m["role"] == "assistant"
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["sources"]["mine.jsonl"] == {"kept": 50, "dropped": {}, "skipped": {}}
    if (
        kind == "calls"
    ):  # the preview shows conversations with their mask; problems hold what comes before the call
        out = capsys.readouterr().out
        assert out.count("\n--- calls-") + out.startswith("--- calls-") == 3
        assert f"[[{called('Oslo')}\n{called('Rome')}\n<|end|>]]" in out
        assert "[[Be brief." not in out


def test_no_request_is_in_two_splits_where_rows_move_to_an_empty_one():
    rows = [{"id": str(i), "request": str(i % 20), "meta": {"split": "train"}} for i in range(60)]
    parts = splits.spread(rows, lambda row: row["request"])
    requests = [{row["request"] for row in part} for part in parts.values()]
    # a tenth of 20, then of 18
    assert list(map(len, requests)) == [17, 2, 1]
    assert len(set.union(*requests)) == 20
    assert [len(part) for part in parts.values()] == [51, 6, 3]
    assert splits.spread(rows[:9], lambda row: row["request"])["train"] == rows[:9]


def test_problems_hold_what_comes_before_the_first_call(tmp_path):
    source = write(tmp_path / "g.jsonl", [glaive(called("Oslo")), glaive("I cannot.")])
    prepare("calls", tmp_path / "out", "--source", source, "--probes", 0)
    problems = [p for f in (tmp_path / "out").glob("funcall.*.jsonl") for p in rows_of(f)]
    golds = sorted((p["gold"] for p in problems), key=str)
    assert golds == [None, {"arguments": {"city": "Oslo"}, "name": "get_weather"}]
    assert all([m["role"] for m in p["messages"]] == ["system", "user"] for p in problems)


def test_columns_under_other_names(tmp_path):
    rows = [{"query": f"What is {i}?", "response": f"It is {i}.", "extra": i} for i in range(30)]
    source = write(tmp_path / "mine.jsonl", rows)
    flags = ("--source", source, "--columns", "question=query,answer=response")
    prepare("sft", tmp_path / "out", *flags, "--neutral-share", 0)
    made = [
        row
        for split in ("train", "select", "test")
        for row in rows_of(tmp_path / f"out/chat.{split}.jsonl")
    ]
    texts = sorted(text for row in rows for text in (row["query"], row["response"]))
    assert sorted(m["content"] for row in made for m in row["messages"]) == texts
    with pytest.raises(DataError, match="row 1 has no column 'reply'.*query, response, extra"):
        prepare("sft", tmp_path / "other", "--source", source, "--columns", "answer=reply")
    with pytest.raises(ConfigError, match="OURS=THEIRS"):
        prepare("sft", tmp_path / "other", "--source", source, "--columns", "query")
    hidden = write(
        tmp_path / "hidden.jsonl", [{"query": "How many?", "response": "2 and 1.\n#### 3"}]
    )
    for flags in ((), ("--columns", "question=query,answer=response")):
        with pytest.raises(DataError, match="GSM8K"):
            prepare("sft", tmp_path / "other", "--source", hidden, *flags)
