"""`codechat data`: what each source becomes, what it refuses, and what it says about what it
left out."""

import ast
import hashlib
import json
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from jsonl import prepare as run
from jsonl import rows_of, write

from codechat.core.errors import DataError, UserError
from codechat.data import conversations, corpus, public_rows, sources
from codechat.data.conversations import tools_style
from codechat.data.sources import Ledger
from codechat.data.splits import SPLITS
from codechat.text import chat, tokenizer
from codechat_lab.data import synthetic
from codechat_lab.instruments.behaviour_probes import CELLS, cell_of
from codechat_lab.tasks.coding.prepare import CodeConfig, program_of

BYTES = tokenizer.load("bytes")
SMALL = (
    "--max-examples",
    60,
    "--copies",
    30,
    "--problems",
    40,
    "--eval-examples",
    20,
    "--probes",
    3,
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Embedded code, chat and calls in one directory, small."""
    out = tmp_path_factory.mktemp("data") / "sft"
    run("sft", out, "--max-examples", 400)
    run("calls", out, *SMALL)
    return out


def test_code_questions_are_functions_and_a_share_has_neutral_prompts_or_tools(prepared):
    rows = [r for split in SPLITS for r in rows_of(prepared / f"code.{split}.jsonl")]
    assert len(rows) == 400
    assert {r["domain"] for r in rows} == {"code"}
    for row in rows:
        user, answer = (m["content"] for m in row["messages"] if m["role"] != "system")
        (function,) = ast.parse(answer).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name in user
        assert ast.get_docstring(function) is None
        assert not function.decorator_list
        assert len(answer) <= synthetic.MAX_CODE_CHARS
        assert "<functioncall>" not in user + answer
    systems = [
        (r["meta"]["tools_present"], r["messages"][0]["content"])
        for r in rows
        if len(r["messages"]) == 3
    ]
    assert all(("Functions:" in text) == tools for tools, text in systems)
    assert 0.09 < sum(tools for tools, _ in systems) / len(rows) < 0.21
    assert 0.22 < sum(not tools for tools, _ in systems) / len(rows) < 0.38


def test_splits_share_nothing_and_calls_come_with_problems_and_probes_of_every_cell(prepared):
    for domain in ("code", "chat", "calls"):
        asked = {
            s: {json.dumps(r["messages"]) for r in rows_of(prepared / f"{domain}.{s}.jsonl")}
            for s in SPLITS
        }
        assert all(asked.values())
        assert not asked["train"] & (asked["select"] | asked["test"])
    code = {
        s: {r["messages"][-1]["content"] for r in rows_of(prepared / f"code.{s}.jsonl")}
        for s in SPLITS
    }
    assert not code["train"] & (code["select"] | code["test"])
    assert not code["select"] & code["test"]
    sizes = {s: len(rows_of(prepared / f"funcall.{s}.jsonl")) for s in (*SPLITS, "test_hard")}
    # the shares of strata are rounded
    assert abs(sizes.pop("train") - 40) <= 1
    assert {*sizes.values()} == {20}
    problem = rows_of(prepared / "funcall.train.jsonl")[0]
    assert {*problem} == {"id", "messages", "gold", "split", "meta"}
    assert {*problem["gold"]} == {"name", "arguments"}
    for split in ("select", "test"):
        assert Counter(map(cell_of, rows_of(prepared / f"probes.{split}.jsonl"))) == dict.fromkeys(
            CELLS, 3
        )
    trained = {r["messages"][-2]["content"] for r in rows_of(prepared / "code.train.jsonl")}
    assert not trained & {
        p["messages"][-1]["content"] for p in rows_of(prepared / "probes.select.jsonl")
    }


def manifest_of(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def test_the_manifest_holds_both_commands_and_preparing_again_gives_the_same_bytes(
    prepared, tmp_path
):
    manifest = manifest_of(prepared)
    assert set(manifest["domains"]) == {"code", "chat", "calls", "copy"}
    assert set(manifest["sources"]) == {"python files", "functions", "small talk", "toolbox"}
    for domain, examples in conversations.load_domains(
        prepared, "train", BYTES, "reserved", 4096
    ).items():
        assert manifest["domains"][domain]["supervised_tokens"] == sum(
            e.supervised for e in examples
        )
    for name, entry in manifest["files"].items():
        assert entry["rows"] == len(rows_of(prepared / name))
    assert str(Path.cwd()) not in json.dumps(manifest)
    assert sys.prefix not in json.dumps(manifest)
    run("calls", tmp_path / "x", *SMALL)
    run("sft", tmp_path / "x", "--max-examples", 400)
    for file in [*(tmp_path / "x").glob("*.jsonl"), tmp_path / "x" / "manifest.json"]:
        assert file.read_bytes() == (prepared / file.name).read_bytes()


FEW = ("--max-examples", 5, "--problems", 5, "--eval-examples", 5, "--probes", 0, "--copies")


def test_commands_share_a_directory_and_each_replaces_its_files_alone(tmp_path):
    run("calls", tmp_path, *FEW, 5, "--lookups", 5, "--tools-style", "described")
    run("sft", tmp_path, "--max-examples", 5)
    assert tools_style(tmp_path) == "described"
    (tmp_path / "own.train.jsonl").write_text((tmp_path / "copy.train.jsonl").read_text())
    run("calls", tmp_path, *FEW, 0)
    manifest = manifest_of(tmp_path)
    left = {path.name for path in tmp_path.glob("*.jsonl")}
    assert not {name for name in left if name.startswith(("copy", "lookup"))}
    assert left == manifest["files"].keys() | {"own.train.jsonl"}
    assert set(manifest["domains"]) == {"code", "chat", "calls"}
    assert tools_style(tmp_path) == "compact"
    assert "tools_style" not in manifest
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    call = {"role": "assistant", "content": chat.format_call("mix", {"a": "red"})}
    rows = [
        [{"role": "user", "content": f"{n}"}, call, {"role": "assistant", "content": f"{n}."}]
        for n in range(60)
    ]
    source = write(tmp_path.with_suffix(".jsonl"), [{"messages": row} for row in rows])
    with pytest.raises(
        DataError, match=r"calls.\w+.jsonl.*codechat data calls.*codechat data sft.*--out"
    ):
        run("sft", tmp_path, "--source", source)
    with pytest.raises(DataError, match="--out"):
        run("corpus", tmp_path, "--max-tokens", "20000")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    values = manifest_of(tmp_path)["values"]
    for domain in ("mine", "other", "mine"):  # beside the toolbox's, for a mix with it
        run("calls", tmp_path, "--source", source, "--domain", domain)
    manifest = manifest_of(tmp_path)
    assert set(manifest["domains"]) == {"code", "chat", "calls", "mine", "other"}
    assert manifest["values"] == values
    assert all(
        path.read_bytes() == text for path, text in before.items() if path.suffix == ".jsonl"
    )


def test_lone_surrogates_are_kept_and_the_manifest_has_the_hash_of_each_file(tmp_path):
    rows = [
        {"instruction": f"Say {n}\ud83d.", "output": f"{n} \udc80\ud800 <é>"} for n in range(20)
    ]
    run("sft", tmp_path / "out", "--source", write(tmp_path / "rows.jsonl", rows), "--preview", 2)
    files = manifest_of(tmp_path / "out")["files"]
    texts = {
        m["content"]
        for name in files
        for r in rows_of(tmp_path / "out" / name)
        for m in r["messages"]
    }
    assert {row["output"] for row in rows} <= texts
    for name, entry in files.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == entry["sha256"]
    assert conversations.load_domains(tmp_path / "out", "train", BYTES, "reserved", 4096)


def test_an_embedded_corpus_is_made_within_its_limit_and_excludes_this_project(tmp_path, capsys):
    run("corpus", tmp_path, "--max-tokens", "300000")
    manifest = corpus.read_manifest(tmp_path)
    assert 300_000 <= manifest["train_tokens"] + manifest["val_tokens"]
    assert manifest["tokenizer"] == "bytes"
    assert set(manifest["sources"]) <= {"stdlib", "packages"}
    assert manifest["skipped"]["tests"] > 0
    assert "kept and dropped" in capsys.readouterr().out
    assert "class WindowLoader" not in BYTES.decode(
        corpus.open_corpus(tmp_path, "train")[1][0].tolist()
    )
    with pytest.raises(DataError, match="--out"):
        run("calls", tmp_path, "--max-examples", 5)


FUNCTION = '''def clamp(value, low=0, high=1):
    """Return value limited to the range from low to high.

    More words.
    """

    # keep the order
    return max(low, min(high, value))'''


def test_a_top_level_function_becomes_a_request_and_its_own_source_once():
    text = (
        FUNCTION
        + "\n\nclass A:\n"
        + "    "
        + FUNCTION.replace("\n", "\n    ")
        + "\n\n@cache\n"
        + FUNCTION
        + "\n"
    )
    ledger = Ledger("functions")
    (row,) = synthetic.code_rows([sources.Document(text)], ledger)
    assert ledger.kept == 1
    assert ledger.skipped == {"duplicate": 1}
    user, answer = (m["content"] for m in row["messages"])
    assert "`clamp(value, low=0, high=1)`" in user
    assert "value limited to the range from low to high" in user
    assert "More words" not in user
    assert answer == (
        "def clamp(value, low=0, high=1):\n    # keep the "
        "order\n    return max(low, min(high, value))"
    )


ALPACA = {
    "instruction": "Add two numbers.",
    "input": "1, 2",
    "output": "def add(a, b):\n    return a + b",
}


def test_instruction_rows_become_conversations_whose_domain_follows_from_the_answer(tmp_path):
    for row in rows_of(Path(__file__).with_name("answers.jsonl")):
        assert public_rows.domain_of(row["answer"]) == row["domain"], row
    rows = [
        ALPACA,
        {**ALPACA, "input": ""},
        {"instruction": "Say hi.", "input": "", "output": "Hi!"},
    ]
    path = write(tmp_path / "alpaca.jsonl", rows)
    run("sft", tmp_path / "out", "--source", path, "--neutral-share", 0, "--negatives-share", 0)
    made = [r for f in (tmp_path / "out").glob("*.jsonl") for r in rows_of(f)]
    asked = {(r["domain"], r["messages"][0]["content"]) for r in made}
    assert asked == {
        ("code", "Add two numbers.\n\n1, 2"),
        ("code", "Add two numbers."),
        ("chat", "Say hi."),
    }


def test_a_loss_above_its_share_stops_the_source_prints_the_table_and_writes_nothing(
    tmp_path, capsys
):
    rows = [{**ALPACA, "instruction": f"Task {i}."} for i in range(18)] + [
        {**ALPACA, "output": ""}
    ] * 2
    path = write(tmp_path / "alpaca.jsonl", rows)
    with pytest.raises(DataError, match=r"alpaca.jsonl .*2 of 20 .*10.0%.*'no_answer'.* 5.0%"):
        run("sft", tmp_path / "out", "--source", path)
    printed = capsys.readouterr().out
    assert "no_answer" in printed
    assert "10.00%" in printed
    assert "5.00%" in printed
    assert not (tmp_path / "out").exists()
    run("sft", tmp_path / "out", "--source", path, "--max-lost", 0.2)
    counts = {"kept": 18, "dropped": {"no_answer": 2}, "skipped": {}}
    assert manifest_of(tmp_path / "out")["sources"]["alpaca.jsonl"] == counts


def test_evaluation_data_is_never_written_as_training_data(tmp_path):
    for kind, row, benchmark in map(
        dict.values, rows_of(Path(__file__).with_name("benchmarks.jsonl"))
    ):
        path = write(tmp_path / "x.jsonl", [row])
        with pytest.raises(DataError, match=rf"x.jsonl, row 1,.*{benchmark}"):
            run(kind, tmp_path / "out", "--source", path)
        assert not list(tmp_path.glob("out/*"))


QUESTION = (  # of GSM8K's test split
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
    "every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. How much in "
    "dollars does she make every day at the farmers' market?"
)
SOLUTION = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


def forms_of(question: str, answer: str) -> list[tuple[str, dict]]:
    text = Path(__file__).with_name("gsm8k_forms.jsonl").read_text()
    for mark, words in (("QUESTION", question), ("ANSWER", answer)):
        text = text.replace(mark, json.dumps(words)[1:-1])
    return [tuple(json.loads(line).values()) for line in text.splitlines()]


def test_gsm8k_is_not_written_as_training_data_in_any_form(tmp_path):
    for answer in (SOLUTION, "She sells 9 eggs for $2 each.\nThe answer is 18."):
        for kind, row in forms_of(QUESTION, answer):
            path = write(tmp_path / "x.jsonl", [row])
            with pytest.raises(DataError, match=r"x.jsonl, row 1,.*GSM8K"):
                run(kind, tmp_path / "out", "--source", path, "--max-lost", 1)
    for _, row in forms_of("How many?", SOLUTION):  # known by the form of its answer alone
        assert "GSM8K" in str(public_rows.evaluation_set(row))
    rows = write(tmp_path / "mine.jsonl", [{"question": QUESTION, "answer": SOLUTION}])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "sums.txt").write_text(f"Sums.\n\n1) {QUESTION}\n18\n")
    for kind, source in (
        ("reasoning", rows),
        ("corpus", tmp_path / "texts"),
        ("corpus", tmp_path / "texts/sums.txt"),
    ):
        with pytest.raises(DataError, match="test split of GSM8K"):
            run(kind, tmp_path / "out", "--source", source)


def test_every_question_of_the_test_split_is_known_and_nothing_else(shared_data):
    for split, known in (("test", True), ("train", False)):
        for row in sources.local_rows(shared_data / "gsm8k" / f"{split}.jsonl"):
            talk = {"messages": [{"role": "user", "content": row["question"]}]}
            assert bool(public_rows.evaluation_set(talk)) == known
    for text in (
        "# A\n\n#### 3. Third\nwords",
        "#### Steps\n1. Go",
        "The answer is 3.",
        "#### 12 monkeys",
    ):
        assert (
            public_rows.evaluation_set({"messages": [{"role": "assistant", "content": text}]})
            is None
        )
        assert public_rows.evaluation_set({"question": "Why?", "answer": text}) is None


def test_a_twin_repeats_a_request_without_the_functions_that_it_calls(tmp_path):
    tools = [
        {"name": name, "description": f"Does {name}.", "parameters": {}}
        for name in ("mix", "cut", "add", "far")
    ]
    rows = []
    for n in range(
        60
        # called from a list of three; called, and nothing else is offered; a list that is not called
    ):
        answer = f"No {n}." if n % 3 == 2 else chat.format_call("mix", {"n": n})
        turns = [
            {"role": "user", "content": f"request {n}"},
            {"role": "assistant", "content": answer},
        ]
        rows.append(
            {
                "messages": turns,
                "tools": tools[:1] if n % 3 == 1 else tools[:3] if n % 3 == 0 else tools[3:],
            }
        )
    source = write(tmp_path / "rows.jsonl", rows)
    run(
        "calls",
        tmp_path / "out",
        "--source",
        source,
        "--twins",
        1,
        "--tools-style",
        "described",
        "--probes",
        0,
    )
    found = [row for split in SPLITS for row in rows_of(tmp_path / "out" / f"calls.{split}.jsonl")]
    twins = {
        row["messages"][1]["content"]: row["messages"]
        for row in found
        if row["id"].endswith("-twin")
    }
    lists = [
        (int(asked.split()[1]) % 3, chat.offered_names(system["content"]))
        for asked, (system, *_) in twins.items()
    ]
    assert {(kind, len(names)) for kind, names in lists} == {(0, 2), (0, 3), (1, 1)}
    assert len(found) - 60 == len(twins)
    assert not any("mix" in names for _, names in lists)
    assert {t[-1]["content"] for t in twins.values()} == {chat.DECLINE}


def test_without_a_network_the_hub_fails_within_seconds_and_names_the_other_sources(
    tmp_path, monkeypatch
):
    from datasets import load_dataset  # noqa: F401  (its import takes seconds)
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as mute:  # it takes connections and never answers
        for url in (
            f"http://127.0.0.1:{mute.getsockname()[1]}",
            "http://127.0.0.1:9",
            "http://no-such-host.invalid",
        ):
            monkeypatch.setattr(constants, "ENDPOINT", url)
            began = time.monotonic()
            with pytest.raises(UserError, match=f"{url}.*parquet or jsonl file.*embedded"):
                run("calls", tmp_path / "out", "--source", "hub")
            assert time.monotonic() - began < sources.PROBE_S + 3
            assert not list(tmp_path.glob("out/*"))


@pytest.mark.slow
def test_real_samples_are_read(shared_data, tmp_path):
    for name in ("glaive_v2_en_300.jsonl", "glaive_format_short.jsonl"):
        source = shared_data / "function_calling" / name
        out = tmp_path / name
        run("calls", out, "--source", source, "--probes", 0, "--max-examples", 400)
        (counts,) = manifest_of(out)["sources"].values()
        assert counts["kept"] > 200
        assert counts["dropped"] == {}
        loaded = conversations.load_domains(out, "train", tokenizer.load("gpt2"), "text", 8192)
        assert len(loaded["calls"]) > 150
    run(
        "sft",
        tmp_path / "sft",
        "--source",
        shared_data / "instruct" / "gpteacher_codegen_4535.jsonl",
    )
    assert manifest_of(tmp_path / "sft")["domains"]["code"]["conversations"] > 500
    python = shared_data / "python_code/python_small.parquet"
    shakespeare = shared_data / "tinyshakespeare/input.txt"
    run("corpus", tmp_path / "c", "--source", python, "--max-examples", 300)
    assert corpus.read_manifest(tmp_path / "c")["kept"] > 250
    run("corpus", tmp_path / "shake", "--source", shakespeare, "--val-share", 0.1)
    manifest = corpus.read_manifest(tmp_path / "shake")
    assert manifest["train_bytes"] + manifest["val_bytes"] == 1_115_394
    windows = corpus.val_windows(tmp_path / "shake", 256, batch=64)
    assert sum(int((targets >= 0).sum()) for _, targets, _ in windows) == manifest["val_tokens"] - 1


@pytest.mark.parametrize(
    "no, yes", [(False, True), (0, 1), (0.0, 1.0), ("False", "True"), ("0", "1")]
)
def test_answers_with_the_label_false_are_skipped_and_counted(no, yes, tmp_path, capsys):
    rows = [
        {"prompt": f"Say {n}", "completion": f"word {n}", "label": yes if n % 3 else no}
        for n in range(30)
    ]
    run(
        "sft",
        tmp_path / "out",
        "--source",
        write(tmp_path / "kto.jsonl", rows),
        "--neutral-share",
        0,
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"]["kto.jsonl"] == {
        "kept": 20,
        "dropped": {},
        "skipped": {"label_false": 10},
    }
    assert "label_false" in capsys.readouterr().out


def test_labels_of_a_csv_file_are_text(tmp_path):
    lines = [f"Say {n},word {n},{n % 3 > 0}" for n in range(30)]
    (tmp_path / "kto.csv").write_text("\n".join(["prompt,completion,label", *lines]) + "\n")
    run("sft", tmp_path / "out", "--source", tmp_path / "kto.csv", "--neutral-share", 0)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"]["kto.csv"]["skipped"] == {"label_false": 10}


def test_pairs_of_preferences_are_counted_by_their_name(tmp_path):
    pair = {
        "messages": [{"role": "user", "content": "Two?"}],
        "chosen_response": {"role": "assistant", "content": "2"},
    }
    rows = [pair | {"rejected_response": {"role": "assistant", "content": "3"}}] * 3
    with pytest.raises(
        DataError, match="lost 3 of 3 rows .* to 'preference_pair' .*codechat preference"
    ):
        run("calls", tmp_path / "out", "--source", write(tmp_path / "pairs.jsonl", rows))


@pytest.mark.parametrize(
    "reason, turn",
    [
        ("unknown_role", {"role": "narrator", "content": "2"}),
        ("content_not_text", {"role": "assistant", "content": {"a": 1}}),
        ("content_not_text", {"role": "user", "content": None}),
        ("message_form", {"type": "function_call", "name": "f", "arguments": "{}"}),
        ("weight_form", {"role": "assistant", "content": "2", "weight": "no"}),
        (
            "message_has (toolCalls)",
            {"role": "assistant", "content": "2", "toolCalls": [{"name": "f"}]},
        ),
    ],
)
def test_a_row_in_another_form_is_counted_by_name_and_the_others_are_kept(tmp_path, reason, turn):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} and 1?"},
                {"role": "assistant", "content": f"{n + 1}"},
            ]
        }
        for n in range(30)
    ]
    rows[3] = {"messages": [rows[3]["messages"][0], turn, rows[3]["messages"][1]]}
    run(
        "sft",
        tmp_path / "out",
        "--source",
        write(tmp_path / "mine.jsonl", rows),
        "--neutral-share",
        0,
    )
    counted = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]["mine.jsonl"]
    assert counted == {"kept": 29, "dropped": {reason: 1}, "skipped": {}}


def test_too_many_rows_in_another_form_are_an_error_that_says_what_is_required(tmp_path):
    rows = [
        {"conversations": [{"from": "User", "value": "Two?"}, {"from": "Chatbot", "value": "2"}]}
    ] * 3
    with pytest.raises(
        DataError,
        match="lost 3 of 3 rows .* to 'unknown_role' .*role 'User' is unknown; required is one",
    ):
        run("sft", tmp_path / "out", "--source", write(tmp_path / "mine.jsonl", rows))


def test_reasoning_in_tags_makes_no_answer_another_language(tmp_path):
    answers = {"chat": "It is cold.", "code": "```python\nprint(5)\n```"}
    rows = [
        {"instruction": f"{n} {domain}?", "output": f"<think>\nLook: {{x}}\n</think>\n\n{answer}"}
        for n in range(30)
        for domain, answer in answers.items()
    ]
    run(
        "sft",
        tmp_path / "out",
        "--source",
        write(tmp_path / "mine.jsonl", rows),
        "--neutral-share",
        0,
    )
    counted = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]["mine.jsonl"]
    assert counted == {"kept": 60, "dropped": {}, "skipped": {}}


@pytest.mark.parametrize("value", [0, False, 7, [1]])
def test_a_program_whose_input_is_no_text_is_lost_by_name(value):
    row = {"instruction": "Print whether it is even.", "input": value, "output": "print(1)"}
    assert program_of(row, CodeConfig()) == "no_request"
