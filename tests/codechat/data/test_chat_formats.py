"""Conversations in the forms of other projects: what they become, what is dropped, and what
training reads of them."""

import json
from pathlib import Path

import pytest
from jsonl import prepare, rows_of, write

from codechat.core.errors import ConfigError, DataError
from codechat.data import chat_formats, conversations, row_readers, sources, splits
from codechat.data.sources import Ledger
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat_lab.data import public_rows

# sets of ../shared/rows -> the function that their rows call
SHARED_SETS = [
    ("APIGen-MT", "get_weather"),
    ("ToolACE", "get_weather"),
    ("Toucan", "get_weather"),
    ("hermes-v1", "get_weather"),
    ("minimind", "get_weather"),
    ("mobile-actions", "get_weather"),
    ("xlam-60k", "get_weather"),
    ("legacy_function_call", "get_weather"),
    ("functions_column", "get_weather"),
    ("xlam-irrelevance", None),
    ("nested_null", "search"),
]
BYTES = tokenizer.load("bytes")
HERE = Path(__file__).parent
# one conversation in five forms
FORMS = json.loads((HERE / "forms.json").read_text(encoding="utf-8"))
OPENAI = FORMS["openai"]
GLAIVE = FORMS["glaive"]
OFFER = tool_lists.tools_prompt([OPENAI["tools"][0]["function"]])


def called(city: str) -> str:
    return tool_calls.format_call("get_weather", {"city": city})


EXPECTED = [
    {"role": "system", "content": f"Be brief.\n{OFFER}"},
    {"role": "user", "content": "Oslo and Rome?"},
    {"role": "assistant", "content": f"{called('Oslo')}\n{called('Rome')}"},
    {"role": "function", "content": "3"},
    {"role": "function", "content": "20"},
    {"role": "assistant", "content": "Oslo 3, Rome 20."},
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_conversation(form):
    system, *turns = chat_formats.messages_of(FORMS[form], "x")
    assert turns == EXPECTED[1:]
    # the text of Hermes only explains its tags, that of glaive comes with the schemas
    expected = OFFER if form in ("hermes", "glaive") else EXPECTED[0]["content"]
    assert system["content"] == expected


def test_messages_in_our_own_form_stay_as_they_are():
    own = [
        {"role": "user", "content": " x "},
        {"role": "assistant", "content": f"Now {called('Oslo')}"},
    ]
    assert chat_formats.messages_of({"messages": own}, "x") == own


def test_prose_of_glaive_stays_before_its_call_and_marks_within_it_begin_no_turn():
    prose = GLAIVE["chat"].replace("ASSISTANT: <", "ASSISTANT: Sure. <")
    prose = prose.replace("Oslo 3", "A paint.\n\nA: no turn")
    messages = chat_formats.messages_of(GLAIVE | {"chat": prose}, "x")
    assert messages[2]["content"] == f"Sure.\n{EXPECTED[2]['content']}"
    assert messages[-1]["content"].startswith("A paint.\n\nA: no turn")


def test_a_row_of_glaive_may_have_no_functions():
    row = {"system": "SYSTEM: No functions.\n\n\n", "chat": "USER: a\n\n\nASSISTANT: b"}
    messages = chat_formats.messages_of(row, "x")
    assert [m["content"] for m in messages] == ["No functions.", "a", "b"]


CALLS = json.dumps(
    [{"name": "get_weather", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
)


def tool_set(ground_truth, turns=EXPECTED[1:2]):
    """A row of a set that has tools, a request and the expected calls as JSON texts."""
    return {
        "question": json.dumps(turns),
        "functions": json.dumps([tool["function"] for tool in OPENAI["tools"]]),
        "ground_truth": ground_truth,
        "source": "a set",
    }


@pytest.mark.parametrize(
    ("ground_truth", "answer"), [(CALLS, EXPECTED[2]["content"]), ("[]", row_readers.NO_CALL)]
)
def test_tool_sets_are_read_and_a_request_without_a_call_is_declined(ground_truth, answer):
    offer = {"role": "system", "content": OFFER}
    said = {"role": "assistant", "content": answer}
    messages = chat_formats.messages_of(tool_set(ground_truth), "x")
    assert messages == [offer, EXPECTED[1], said]


def test_a_tool_set_with_a_broken_answer_is_a_bad_row():
    assert chat_formats.messages_of(tool_set("[{"), "x") == "bad_row"


def test_calls_that_a_tool_set_writes_in_fences_are_read():
    turns = [
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": "Sure."},
        {"role": "assistant", "content": f"```{CALLS}```"},
        {"role": "function", "content": "fog"},
        {"role": "user", "content": "x"},
    ]
    _, _, answer, *_ = chat_formats.messages_of(tool_set(CALLS, turns), "x")
    assert answer["content"] == f"Sure.\n{EXPECTED[2]['content']}"


def glaive(answer: str) -> dict:
    return GLAIVE | {"chat": f"USER: Oslo?\n\n\nASSISTANT: {answer} <|endoftext|>"}


@pytest.mark.parametrize(
    "text", [f"```{CALLS}```", '[get_weather(city="Oslo"), get_weather(city="Rome")]']
)
def test_a_glaive_answer_that_is_nothing_but_calls_is_calls(text):
    answer = chat_formats.messages_of(glaive(text), "x")[-1]["content"]
    assert answer == EXPECTED[2]["content"]


@pytest.mark.parametrize(
    "text", ['```json\n{"name": "Ann", "age": 3}\n```', f"As you asked: {CALLS}", "[1, 2]", "[]"]
)
def test_other_json_in_a_glaive_answer_is_prose(text):
    assert chat_formats.messages_of(glaive(text), "x")[-1]["content"] == text


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
    read = enumerate(sources.local_rows(shared_rows / f"{name}.jsonl"))
    rows = [row | {"id": number} for number, row in read]
    kept = list(public_rows.conversation_rows(rows, name, ledger))
    assert ledger.kept + ledger.skipped["duplicate"] == len(rows)
    assert not ledger.lost
    assert all(row["meta"]["tools_present"] for row in kept)
    golds = [public_rows.call_problem(row)["gold"] or {} for row in kept]
    assert {gold.get("name") for gold in golds} == {called}


USER = {"role": "user", "content": "Two?"}
BOT = {"role": "assistant", "content": "2"}
PLAIN = {"instruction": "Two?", "input": "", "output": "2"}


BESIDE = rows_of(HERE / "beside.jsonl")


@pytest.mark.parametrize("line", [line for line in BESIDE if "messages" in line])
def test_columns_and_marks_beside_the_text_are_honoured(line):
    assert public_rows.conversation_row(line["row"], "x")["messages"] == line["messages"]


@pytest.mark.parametrize("line", [line for line in BESIDE if "messages" not in line])
def test_columns_and_marks_that_cannot_be_honoured_are_named_with_their_row(line):
    with pytest.raises(DataError, match=rf"\Ax.*{line['refused']}"):
        public_rows.conversation_row(line["row"], "x")


def test_rows_are_the_same_where_all_columns_are():
    rows = [PLAIN | {"system": text, "category": "sums"} for text in ("a", "b", "b")]
    assert len(list(public_rows.conversation_rows(rows, "x", Ledger("x")))) == 2


CALLS_BARE = {
    "messages": [
        {"role": "user", "content": "Rain in Oslo?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "function": {"name": "rain", "arguments": {"city": "Oslo"}}}
            ],
        },
    ]
}
RAIN = {
    "name": "rain",
    "description": "Rain of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_rows_that_call_and_offer_no_tools_are_counted_in_a_warning(capsys):
    rows = list(public_rows.conversation_rows([CALLS_BARE, PLAIN], "x", Ledger("x")))
    public_rows.warn_of_calls(rows, "x", "add tools")
    assert capsys.readouterr().err.startswith("x: 1 of 2 rows call functions and offer none;")
    public_rows.warn_of_calls(rows[1:], "x", "add tools")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("rain", {"city": "Oslo"}, ""),
        ("snow", {"city": "Oslo"}, "there is no function 'snow'"),
        ("rain", {"city": 5}, "rain: city: 5 is not of type 'string'"),
    ],
)
def test_rows_that_call_what_their_tools_do_not_allow_are_counted(capsys, name, arguments, fault):
    call = {"id": "a", "function": {"name": name, "arguments": arguments}}
    asked, _ = CALLS_BARE["messages"]
    row = {"messages": [asked, {"role": "assistant", "tool_calls": [call]}], "tools": [RAIN]}
    rows = list(public_rows.conversation_rows([row, PLAIN], "x", Ledger("x")))
    public_rows.warn_of_calls(rows, "x", "add tools")
    said = capsys.readouterr().err
    assert (f"x: 1 of 2 rows call what their tools do not allow (the first: {fault})" in said) == (
        bool(fault)
    )


def test_rows_that_offer_no_tools_get_those_given():
    row = public_rows.conversation_row(CALLS_BARE, "x", tools=[RAIN])
    assert row["meta"]["tools_present"]
    assert "Rain of a city." in row["messages"][0]["content"]
    own = CALLS_BARE | {"tools": [RAIN | {"description": "Own."}]}
    assert "Own." in public_rows.conversation_row(own, "x", tools=[RAIN])["messages"][0]["content"]


def test_a_call_of_none_of_the_tools_given_loses_the_row():
    other = RAIN | {"name": "wind"}
    found = public_rows.conversation_row(CALLS_BARE, "x", tools=[other])
    assert found == "function_not_offered (rain)"


def test_columns_that_are_not_read_are_named(capsys):
    row = PLAIN | {"system": "a", "category": "sums"}
    list(public_rows.conversation_rows([row], "x", Ledger("x")))
    list(public_rows.conversation_rows([PLAIN], "y", Ledger("y")))
    assert capsys.readouterr().err == "x: columns that are not read: category\n"


def test_programs_keep_their_system_text_and_their_history(tmp_path):
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
    """The text that carries loss."""
    tokens = zip(example.ids, example.loss_mask, strict=True)
    return chat.decode([token for token, on in tokens if on], BYTES)


@pytest.mark.parametrize("tags", ["reserved", "text"])
def test_an_answer_of_weight_0_has_no_loss_wherever_it_is_read(tags, tmp_path):
    turns = [USER, BOT | {"content": "silent", "weight": 0}, USER, BOT | {"content": "taught"}]
    foreign = [turns[0], {"from": "gpt", "value": "silent", "train": False}, *turns[2:]]
    write(tmp_path / "raw.train.jsonl", [{"messages": turns}] * 30)
    write(tmp_path / "train.train.jsonl", [{"messages": foreign}] * 30)
    unique = [{"messages": [USER | {"content": f"{i}?"}, *turns[1:]]} for i in range(30)]
    source = write(tmp_path / "mine.jsonl", unique)
    prepare("sft", tmp_path, "--source", source, "--neutral-share", 0)
    domains = conversations.load_domains(tmp_path, "train", BYTES, tags, 4096)
    assert {*domains} == {"raw", "train", "chat"}
    assert {taught(rows[0]) for rows in domains.values()} == {"taught\n<|end|>"}


def test_a_row_whose_only_answer_has_weight_0_is_lost():
    row = {"messages": [USER, BOT | {"weight": 0}]}
    assert public_rows.conversation_row(row, "x") == "no_answer"


def own_rows(form, n=50):
    """A conversation in some form, with n different requests."""
    text = json.dumps(FORMS[form])
    return [
        json.loads(text.replace("Oslo and Rome", f"Question {i}: Oslo and Rome")) for i in range(n)
    ]


@pytest.fixture
def made(kind, form, tmp_path):
    """The folder that `codechat data` writes of fifty rows."""
    flags = ["--probes", 0, "--preview", 3] if kind == "calls" else []
    source = write(tmp_path / "mine.jsonl", own_rows(form))
    prepare(kind, tmp_path, "--source", source, *flags)
    return tmp_path


KINDS_AND_FORMS = pytest.mark.parametrize(
    "kind, form", [("calls", "openai"), ("calls", "glaive"), ("sft", "sharegpt"), ("sft", "qwen")]
)


@KINDS_AND_FORMS
def test_fifty_rows_of_ones_own_are_split(made):
    parts = {split: rows_of(made / f"calls.{split}.jsonl") for split in ("train", "select", "test")}
    assert sum(map(len, parts.values())) == 50
    assert len(parts["train"]) >= 40
    for split, rows in parts.items():
        assert {row["meta"]["split"] for row in rows} == {split}
        assert all(row["meta"]["tools_present"] for row in rows)


@KINDS_AND_FORMS
def test_fifty_rows_of_ones_own_teach_their_answers(made):
    example = conversations.load_domains(made, "train", BYTES, "reserved", 4096)["calls"][0]
    answers = [m["content"] for m in EXPECTED if m["role"] == "assistant"]
    assert taught(example) == "".join(f"{answer}\n<|end|>" for answer in answers)


@KINDS_AND_FORMS
def test_fifty_rows_of_ones_own_are_counted_in_the_manifest(made):
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["sources"]["mine.jsonl"] == {"kept": 50, "dropped": {}, "skipped": {}}


@pytest.mark.parametrize("kind, form", [("calls", "openai"), ("calls", "glaive")])
def test_a_preview_shows_conversations_with_their_mask(capsys, made):
    out = "\n" + capsys.readouterr().out
    assert out.count("\n--- calls-") == 3
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


def test_few_rows_all_stay_in_train():
    rows = [{"id": str(i), "request": str(i), "meta": {"split": "train"}} for i in range(9)]
    assert splits.spread(rows, lambda row: row["request"])["train"] == rows


def test_problems_hold_what_comes_before_the_first_call(tmp_path):
    source = write(tmp_path / "g.jsonl", [glaive(called("Oslo")), glaive("I cannot.")])
    prepare("calls", tmp_path / "out", "--source", source, "--probes", 0)
    problems = [row for file in (tmp_path / "out").glob("funcall.*.jsonl") for row in rows_of(file)]
    golds = sorted((problem["gold"] for problem in problems), key=str)
    assert golds == [None, {"arguments": {"city": "Oslo"}, "name": "get_weather"}]
    for problem in problems:
        assert [m["role"] for m in problem["messages"]] == ["system", "user"]


RENAMED = ("--columns", "question=query,answer=response")


@pytest.fixture
def renamed(tmp_path):
    """A file of 30 rows whose columns have other names."""
    rows = [{"query": f"What is {i}?", "response": f"It is {i}.", "extra": i} for i in range(30)]
    return write(tmp_path / "mine.jsonl", rows)


def test_columns_under_other_names(renamed, tmp_path):
    prepare("sft", tmp_path / "out", "--source", renamed, *RENAMED, "--neutral-share", 0)
    found = []
    for split in ("train", "select", "test"):
        for row in rows_of(tmp_path / f"out/chat.{split}.jsonl"):
            found += [message["content"] for message in row["messages"]]
    given = [text for row in rows_of(renamed) for text in (row["query"], row["response"])]
    assert sorted(found) == sorted(given)


def test_a_column_that_is_not_there_is_named_with_those_that_are(renamed, tmp_path):
    with pytest.raises(DataError, match="row 1 has no column 'reply'.*query, response, extra"):
        prepare("sft", tmp_path / "out", "--source", renamed, "--columns", "answer=reply")


def test_names_of_columns_are_pairs(renamed, tmp_path):
    with pytest.raises(ConfigError, match="OURS=THEIRS"):
        prepare("sft", tmp_path / "out", "--source", renamed, "--columns", "query")


@pytest.mark.parametrize("flags", [(), RENAMED])
def test_gsm8k_is_refused_whatever_the_names_of_its_columns(flags, tmp_path):
    row = {"query": "How many?", "response": "2 and 1.\n#### 3"}
    source = write(tmp_path / "hidden.jsonl", [row])
    with pytest.raises(DataError, match="GSM8K"):
        prepare("sft", tmp_path / "out", "--source", source, *flags)
