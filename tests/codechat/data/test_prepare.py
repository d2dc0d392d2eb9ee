"""`codechat data`: what each source becomes, what it refuses, and what it says about what it
left out."""

import ast
import contextlib
import hashlib
import io
import json
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonl import prepare as run
from jsonl import rows_of, write

from codechat.core.errors import DataError, UserError
from codechat.data import conversations, corpus, sources
from codechat.data.conversations import tools_style
from codechat.data.sources import Ledger
from codechat.data.splits import SPLITS
from codechat.text import tokenizer, tool_calls, tool_lists
from codechat_lab.data import prepared as prepared_files
from codechat_lab.data import public_rows, synthetic
from codechat_lab.instruments.behaviour_probes import CELLS, cell_of
from codechat_lab.tasks.coding.prepare import CodeConfig, program_of

BYTES = tokenizer.load("bytes")
SMALL = "--max-examples 60 --copies 30 --problems 40 --eval-examples 20 --probes 3".split()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedded code, chat and calls in one directory, small."""
    out = tmp_path_factory.mktemp("data") / "sft"
    run("sft", out, "--max-examples", 400)
    run("calls", out, *SMALL)
    return out


def all_rows(out: Path, domain: str) -> list[dict[str, Any]]:
    rows = []
    for split in SPLITS:
        rows += rows_of(out / f"{domain}.{split}.jsonl")
    return rows


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


def test_all_code_rows_are_written_in_one_split_or_another(prepared: Path) -> None:
    rows = all_rows(prepared, "code")
    assert len(rows) == 400
    assert {row["domain"] for row in rows} == {"code"}


def test_an_answer_of_code_is_the_function_that_the_question_names(prepared: Path) -> None:
    for row in all_rows(prepared, "code"):
        user, answer = [m["content"] for m in row["messages"] if m["role"] != "system"]
        (function,) = ast.parse(answer).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name in user
        assert ast.get_docstring(function) is None
        assert not function.decorator_list
        assert len(answer) <= synthetic.MAX_CODE_CHARS
        assert "<functioncall>" not in user + answer


def test_a_share_of_code_rows_has_a_neutral_prompt_and_another_has_tools(prepared: Path) -> None:
    rows = all_rows(prepared, "code")
    with_system = [row for row in rows if len(row["messages"]) == 3]
    for row in with_system:
        offers = "Functions:" in row["messages"][0]["content"]
        assert offers == row["meta"]["tools_present"]
    with_tools = sum(row["meta"]["tools_present"] for row in with_system)
    assert 0.09 < with_tools / len(rows) < 0.21
    assert 0.22 < (len(with_system) - with_tools) / len(rows) < 0.38


def contents(out: Path, domain: str, split: str) -> set[str]:
    return {json.dumps(row["messages"]) for row in rows_of(out / f"{domain}.{split}.jsonl")}


@pytest.mark.parametrize("domain", ["code", "chat", "calls"])
def test_no_conversation_of_training_is_held_out(prepared: Path, domain: str) -> None:
    train, select, test = [contents(prepared, domain, split) for split in SPLITS]
    assert train
    assert select
    assert test
    assert not train & (select | test)


def test_no_two_splits_share_an_answer_of_code(prepared: Path) -> None:
    train, select, test = [
        {row["messages"][-1]["content"] for row in rows_of(prepared / f"code.{split}.jsonl")}
        for split in SPLITS
    ]
    assert not train & (select | test)
    assert not select & test


def test_calls_come_with_problems_of_every_split(prepared: Path) -> None:
    n_train = len(rows_of(prepared / "funcall.train.jsonl"))
    assert abs(n_train - 40) <= 1, "the shares of strata are rounded"
    for split in ("select", "test", "test_hard"):
        assert len(rows_of(prepared / f"funcall.{split}.jsonl")) == 20


def test_a_problem_has_the_call_that_solves_it(prepared: Path) -> None:
    problem = rows_of(prepared / "funcall.train.jsonl")[0]
    assert {*problem} == {"id", "messages", "gold", "split", "meta"}
    assert {*problem["gold"]} == {"name", "arguments"}


@pytest.mark.parametrize("split", ["select", "test"])
def test_calls_come_with_probes_of_every_cell(prepared: Path, split: str) -> None:
    probes = rows_of(prepared / f"probes.{split}.jsonl")
    assert Counter(map(cell_of, probes)) == dict.fromkeys(CELLS, 3)


def test_no_probe_asks_what_training_asks(prepared: Path) -> None:
    trained = {row["messages"][-2]["content"] for row in rows_of(prepared / "code.train.jsonl")}
    probes = rows_of(prepared / "probes.select.jsonl")
    assert not trained & {probe["messages"][-1]["content"] for probe in probes}


def test_the_manifest_holds_both_commands(prepared: Path) -> None:
    manifest = manifest_of(prepared)
    assert set(manifest["domains"]) == {"code", "chat", "calls", "copy"}
    assert set(manifest["sources"]) == {"python files", "functions", "small talk", "toolbox"}


def test_the_manifest_counts_supervised_tokens_and_rows(prepared: Path) -> None:
    manifest = manifest_of(prepared)
    loaded = conversations.load_domains(prepared, "train", BYTES, "reserved", 4096)
    for domain, examples in loaded.items():
        supervised = sum(example.supervised for example in examples)
        assert manifest["domains"][domain]["supervised_tokens"] == supervised
    for name, entry in manifest["files"].items():
        assert entry["rows"] == len(rows_of(prepared / name))


def test_the_manifest_names_no_folder_of_this_machine(prepared: Path) -> None:
    text = (prepared / "manifest.json").read_text()
    assert str(Path.cwd()) not in text
    assert sys.prefix not in text


def test_preparing_again_in_another_order_gives_the_same_bytes(
    prepared: Path, tmp_path: Path
) -> None:
    run("calls", tmp_path / "x", *SMALL)
    run("sft", tmp_path / "x", "--max-examples", 400)
    for file in [*(tmp_path / "x").glob("*.jsonl"), tmp_path / "x" / "manifest.json"]:
        assert file.read_bytes() == (prepared / file.name).read_bytes()


def test_a_folder_whose_preparation_was_cut_short_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the training rows of one source would stand beside the held-out ones of another."""
    first, second = (
        write(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{name} {i}", "completion": f"{i}."} for i in range(40)],
        )
        for name in ("old", "new")
    )
    out = tmp_path / "out"
    run("sft", out, "--source", first)
    whole = prepared_files.write_atomic

    def cut(path: Path, text: str) -> None:
        if path.name == "chat.train.jsonl":
            raise KeyboardInterrupt
        whole(path, text)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(prepared_files, "write_atomic", cut)
        run("sft", out, "--source", second)
    with pytest.raises(DataError, match="out.*data sft.*again"):
        conversations.load_domains(out, "train", BYTES, "reserved", 4096)
    run("sft", out, "--source", second)
    assert conversations.load_domains(out, "train", BYTES, "reserved", 4096)
    assert "unfinished" not in manifest_of(out)


FEW = "--max-examples 5 --problems 5 --eval-examples 5 --probes 0 --copies".split()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls with copies and lookups, code and chat, and a file of one's own."""
    out = tmp_path_factory.mktemp("first")
    run("calls", out, *FEW, 5, "--lookups", 5, "--tools-style", "described")
    run("sft", out, "--max-examples", 5)
    (out / "own.train.jsonl").write_text((out / "copy.train.jsonl").read_text())
    return out


@pytest.fixture(scope="module")
def again(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same directory after its calls were prepared again without copies and lookups."""
    out = tmp_path_factory.mktemp("again") / "data"
    shutil.copytree(first, out)
    run("calls", out, *FEW, 0)
    return out


@pytest.fixture
def directory(again: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(again, tmp_path / "data"))


def test_calls_prepared_again_leave_none_of_their_files_and_all_others(again: Path) -> None:
    left = {path.name for path in again.glob("*.jsonl")}
    assert not {name for name in left if name.startswith(("copy", "lookup"))}
    assert left == manifest_of(again)["files"].keys() | {"own.train.jsonl"}
    assert set(manifest_of(again)["domains"]) == {"code", "chat", "calls"}


def test_the_style_of_tools_is_that_of_the_last_calls(first: Path, again: Path) -> None:
    assert tools_style(first) == "described"
    assert tools_style(again) == "compact"
    assert "tools_style" not in manifest_of(again)


@pytest.fixture
def mixing(tmp_path: Path) -> Path:
    """A file of conversations that call a tool."""
    rows = []
    for n in range(60):
        call = {"role": "assistant", "content": tool_calls.format_call("mix", {"a": "red"})}
        asked = {"role": "user", "content": f"{n}"}
        rows.append({"messages": [asked, call, {"role": "assistant", "content": f"{n}."}]})
    return write(tmp_path / "mixing.jsonl", rows)


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


def test_rows_of_a_domain_that_another_command_wrote_are_refused(
    directory: Path, mixing: Path
) -> None:
    before = bytes_of(directory)
    with pytest.raises(
        DataError, match=r"calls.\w+.jsonl.*codechat data calls.*codechat data sft.*--out"
    ):
        run("sft", directory, "--source", mixing)
    assert bytes_of(directory) == before


def test_a_corpus_is_not_written_beside_conversations(directory: Path) -> None:
    before = bytes_of(directory)
    with pytest.raises(DataError, match="--out"):
        run("corpus", directory, "--max-tokens", "20000")
    assert bytes_of(directory) == before


def test_domains_of_ones_own_stand_beside_the_toolbox(directory: Path, mixing: Path) -> None:
    """For a mix with it; prepared again they replace themselves."""
    before = bytes_of(directory)
    values = manifest_of(directory)["values"]
    for domain in ("mine", "other", "mine"):
        run("calls", directory, "--source", mixing, "--domain", domain)
    manifest = manifest_of(directory)
    assert set(manifest["domains"]) == {"code", "chat", "calls", "mine", "other"}
    assert manifest["values"] == values
    for path, text in before.items():
        if path.suffix == ".jsonl":
            assert path.read_bytes() == text


SURROGATES = [
    {"instruction": f"Say {n}\ud83d.", "output": f"{n} \udc80\ud800 <é>"} for n in range(20)
]


@pytest.fixture
def with_surrogates(tmp_path: Path) -> Path:
    """What rows with halves of characters become."""
    source = write(tmp_path / "rows.jsonl", SURROGATES)
    run("sft", tmp_path / "out", "--source", source, "--preview", 2)
    return tmp_path / "out"


def test_lone_surrogates_are_kept_and_loaded(with_surrogates: Path) -> None:
    texts = set()
    for name in manifest_of(with_surrogates)["files"]:
        for row in rows_of(with_surrogates / name):
            texts |= {message["content"] for message in row["messages"]}
    assert {row["output"] for row in SURROGATES} <= texts
    assert conversations.load_domains(with_surrogates, "train", BYTES, "reserved", 4096)


def test_the_manifest_has_the_hash_of_each_file(with_surrogates: Path) -> None:
    for name, entry in manifest_of(with_surrogates)["files"].items():
        digest = hashlib.sha256((with_surrogates / name).read_bytes()).hexdigest()
        assert digest == entry["sha256"]


class Made(NamedTuple):
    """The folder of a corpus, and what its command printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A corpus of this machine's Python files."""
    folder = tmp_path_factory.mktemp("corpus")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run("corpus", folder, "--max-tokens", "300000")
    return Made(folder, printed.getvalue())


def test_an_embedded_corpus_has_the_tokens_that_were_asked_for(embedded: Made) -> None:
    manifest = corpus.read_manifest(embedded.folder)
    assert 300_000 <= manifest["train_tokens"] + manifest["val_tokens"]
    assert manifest["tokenizer"] == "bytes"
    assert set(manifest["sources"]) <= {"stdlib", "packages"}


def test_an_embedded_corpus_skips_tests_and_prints_what_it_skipped(embedded: Made) -> None:
    assert corpus.read_manifest(embedded.folder)["skipped"]["tests"] > 0
    assert "kept and dropped" in embedded.printed


def test_an_embedded_corpus_excludes_this_project(embedded: Made) -> None:
    tokens = corpus.open_corpus(embedded.folder, "train")[1][0]
    assert "class WindowLoader" not in BYTES.decode(tokens.tolist())


def test_conversations_are_not_written_beside_a_corpus(embedded: Made) -> None:
    with pytest.raises(DataError, match="--out"):
        run("calls", embedded.folder, "--max-examples", 5)


FUNCTION = '''def clamp(value, low=0, high=1):
    """Return value limited to the range from low to high.

    More words.
    """

    # keep the order
    return max(low, min(high, value))'''


METHOD = FUNCTION.replace("\n", "\n    ")
MODULE = f"{FUNCTION}\n\nclass A:\n    {METHOD}\n\n@cache\n{FUNCTION}\n"


def test_a_top_level_function_becomes_a_row_once() -> None:
    ledger = Ledger("functions")
    assert len(list(synthetic.code_rows([sources.Document(MODULE)], ledger))) == 1
    assert ledger.kept == 1
    assert ledger.skipped == {"duplicate": 1}


def test_a_function_is_asked_for_by_its_signature_and_its_first_sentence() -> None:
    (row,) = synthetic.code_rows([sources.Document(FUNCTION)], Ledger("functions"))
    asked = row["messages"][0]["content"]
    assert "`clamp(value, low=0, high=1)`" in asked
    assert "value limited to the range from low to high" in asked
    assert "More words" not in asked


def test_a_function_is_answered_by_its_source_without_its_docstring() -> None:
    (row,) = synthetic.code_rows([sources.Document(FUNCTION)], Ledger("functions"))
    assert row["messages"][1]["content"] == (
        "def clamp(value, low=0, high=1):\n"
        "    # keep the order\n"
        "    return max(low, min(high, value))"
    )


ALPACA = {
    "instruction": "Add two numbers.",
    "input": "1, 2",
    "output": "def add(a, b):\n    return a + b",
}


ANSWERS = rows_of(Path(__file__).with_name("answers.jsonl"))


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row["answer"])
def test_the_domain_of_an_instruction_follows_from_its_answer(row: dict[str, str]) -> None:
    assert public_rows.domain_of(row["answer"]) == row["domain"]


def test_instruction_rows_become_conversations(tmp_path: Path) -> None:
    greeting = {"instruction": "Say hi.", "input": "", "output": "Hi!"}
    path = write(tmp_path / "alpaca.jsonl", [ALPACA, {**ALPACA, "input": ""}, greeting])
    run("sft", tmp_path / "out", "--source", path, "--neutral-share", 0, "--negatives-share", 0)
    asked = set()
    for file in (tmp_path / "out").glob("*.jsonl"):
        asked |= {(row["domain"], row["messages"][0]["content"]) for row in rows_of(file)}
    assert asked == {
        ("code", "Add two numbers.\n\n1, 2"),
        ("code", "Add two numbers."),
        ("chat", "Say hi."),
    }


@pytest.fixture
def tenth_lost(tmp_path: Path) -> Path:
    """A file of which a tenth has no answer."""
    rows = [{**ALPACA, "instruction": f"Task {i}."} for i in range(18)]
    rows += [{**ALPACA, "output": ""}] * 2
    return write(tmp_path / "alpaca.jsonl", rows)


def test_a_loss_above_its_share_stops_the_source_and_writes_nothing(
    tenth_lost: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"alpaca.jsonl .*2 of 20 .*10.0%.*'no_answer'.* 5.0%"):
        run("sft", tmp_path / "out", "--source", tenth_lost)
    assert not (tmp_path / "out").exists()


def test_a_loss_above_its_share_prints_the_table(
    tenth_lost: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(DataError):
        run("sft", tmp_path / "out", "--source", tenth_lost)
    printed = capsys.readouterr().out
    assert "no_answer" in printed
    assert "10.00%" in printed
    assert "5.00%" in printed


def test_a_loss_within_its_share_is_counted(tenth_lost: Path, tmp_path: Path) -> None:
    run("sft", tmp_path / "out", "--source", tenth_lost, "--max-lost", 0.2)
    counts = {"kept": 18, "dropped": {"no_answer": 2}, "skipped": {}}
    assert manifest_of(tmp_path / "out")["sources"]["alpaca.jsonl"] == counts


BENCHMARKS = rows_of(Path(__file__).with_name("benchmarks.jsonl"))


@pytest.mark.parametrize("case", BENCHMARKS, ids=lambda case: case["benchmark"])
def test_evaluation_data_is_never_written_as_training_data(
    case: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "x.jsonl", [case["row"]])
    with pytest.raises(DataError, match=rf"x.jsonl, row 1,.*{case['benchmark']}"):
        run(case["kind"], tmp_path / "out", "--source", path)
    assert not list(tmp_path.glob("out/*"))


QUESTION = (  # of GSM8K's test split
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
    "every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. How much in "
    "dollars does she make every day at the farmers' market?"
)
SOLUTION = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


N_FORMS = len(Path(__file__).with_name("gsm8k_forms.jsonl").read_text().splitlines())


def forms_of(question: str, answer: str) -> list[dict[str, Any]]:
    """A question and its answer in every form of rows, each with the command that reads it."""
    text = Path(__file__).with_name("gsm8k_forms.jsonl").read_text()
    text = text.replace("QUESTION", json.dumps(question)[1:-1])
    text = text.replace("ANSWER", json.dumps(answer)[1:-1])
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("form", range(N_FORMS))
@pytest.mark.parametrize(
    "answer",
    [SOLUTION, "She sells 9 eggs for $2 each.\nThe answer is 18."],
    ids=["its answer", "another answer"],
)
def test_a_question_of_gsm8k_is_not_written_as_training_data_in_any_form(
    form: int, answer: str, tmp_path: Path
) -> None:
    case = forms_of(QUESTION, answer)[form]
    path = write(tmp_path / "x.jsonl", [case["row"]])
    with pytest.raises(DataError, match=r"x.jsonl, row 1,.*GSM8K"):
        run(case["kind"], tmp_path / "out", "--source", path, "--max-lost", 1)


@pytest.mark.parametrize("form", range(N_FORMS))
def test_a_row_of_gsm8k_is_known_by_the_form_of_its_answer_alone(form: int) -> None:
    row = forms_of("How many?", SOLUTION)[form]["row"]
    assert "GSM8K" in str(public_rows.evaluation_set(row))


def test_a_question_of_gsm8ks_test_split_is_not_written_for_reasoning(tmp_path: Path) -> None:
    rows = write(tmp_path / "mine.jsonl", [{"question": QUESTION, "answer": SOLUTION}])
    with pytest.raises(DataError, match="test split of GSM8K"):
        run("reasoning", tmp_path / "out", "--source", rows)


@pytest.mark.parametrize("source", ["texts", "texts/sums.txt"], ids=["folder", "file"])
def test_a_question_of_gsm8ks_test_split_is_not_written_in_a_corpus(
    source: str, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "sums.txt").write_text(f"Sums.\n\n1) {QUESTION}\n18\n")
    with pytest.raises(DataError, match="test split of GSM8K"):
        run("corpus", tmp_path / "out", "--source", tmp_path / source)


@pytest.mark.parametrize("split, known", [("test", True), ("train", False)])
def test_every_question_of_the_test_split_is_known_and_none_of_training(
    split: str, known: bool, shared_data: Path
) -> None:
    for row in sources.local_rows(shared_data / "gsm8k" / f"{split}.jsonl"):
        talk = {"messages": [{"role": "user", "content": row["question"]}]}
        assert bool(public_rows.evaluation_set(talk)) == known


@pytest.mark.parametrize(
    "text",
    ["# A\n\n#### 3. Third\nwords", "#### Steps\n1. Go", "The answer is 3.", "#### 12 monkeys"],
)
def test_an_answer_that_only_looks_like_one_of_gsm8k_is_no_evaluation_data(text: str) -> None:
    talk = {"messages": [{"role": "assistant", "content": text}]}
    assert public_rows.evaluation_set(talk) is None
    assert public_rows.evaluation_set({"question": "Why?", "answer": text}) is None


class Twin(NamedTuple):
    """A request that is repeated with other tools."""

    number: int
    tools: list[str]
    answer: str


TOOLS = [
    {"name": name, "description": f"Does {name}.", "parameters": {}}
    for name in ("mix", "cut", "add", "far")
]
# By the remainder of a request's number by three: mix is called from a list of three; it is
# called, and nothing else is offered; nothing is called.
OFFERED = {0: TOOLS[:3], 1: TOOLS[:1], 2: TOOLS[3:]}


@pytest.fixture(scope="module")
def twinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty requests, each with a twin where it has one."""
    folder = tmp_path_factory.mktemp("twins")
    rows = []
    for n in range(60):
        answer = f"No {n}." if n % 3 == 2 else tool_calls.format_call("mix", {"n": n})
        turns = [
            {"role": "user", "content": f"request {n}"},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"messages": turns, "tools": OFFERED[n % 3]})
    flags = "--twins 1 --tools-style described --probes 0".split()
    run("calls", folder / "out", "--source", write(folder / "rows.jsonl", rows), *flags)
    return folder / "out"


def test_conversations_longer_than_max_chars_are_skipped_and_counted(tmp_path: Path) -> None:
    tool = {"name": "mix", "description": "Mixes.", "parameters": {}}
    rows = []
    for size in (10, 20, 3000):
        turns = [
            {"role": "user", "content": "x" * size},
            {"role": "assistant", "content": tool_calls.format_call("mix", {"n": size})},
        ]
        rows.append({"messages": turns, "tools": [tool]})
    source = write(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    run("calls", out, "--source", source, "--max-chars", 1000, "--probes", 0)
    counts = json.loads((out / "manifest.json").read_text())["sources"]["rows.jsonl"]
    assert counts == {"kept": 2, "dropped": {}, "skipped": {"too_long": 1}}
    found = [row for file in out.glob("calls.*.jsonl") for row in rows_of(file)]
    assert {len(row["messages"][1]["content"]) for row in found} == {10, 20}


@pytest.fixture
def twins(twinned: Path) -> list[Twin]:
    found = []
    for row in all_rows(twinned, "calls"):
        if row["id"].endswith("-twin"):
            system, asked, *_, answer = row["messages"]
            number = int(asked["content"].split()[1])
            names = tool_lists.offered_names(system["content"])
            found.append(Twin(number, list(names), answer["content"]))
    return found


def test_a_twin_is_offered_no_function_that_its_request_calls(twins: list[Twin]) -> None:
    assert not any("mix" in twin.tools for twin in twins)


def test_a_twin_is_declined(twins: list[Twin]) -> None:
    assert {twin.answer for twin in twins} == {tool_calls.DECLINE}


def test_only_a_request_with_a_call_has_a_twin_and_that_has_some_tool(
    twins: list[Twin],
) -> None:
    """The other tools of its list, or a foreign one beside them or alone."""
    shapes = {(twin.number % 3, len(twin.tools)) for twin in twins}
    assert shapes == {(0, 2), (0, 3), (1, 1)}


def test_a_request_has_one_twin(twinned: Path, twins: list[Twin]) -> None:
    assert len({twin.number for twin in twins}) == len(twins)
    assert len(all_rows(twinned, "calls")) == 60 + len(twins)


@pytest.fixture
def mute_server() -> Iterator[str]:
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("url", ["mute", "http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_without_a_network_the_hub_fails_within_seconds_and_names_the_other_sources(
    url: str, mute_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_dataset  # noqa: F401  (its import takes seconds)
    from huggingface_hub import constants

    endpoint = mute_server if url == "mute" else url
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"{endpoint}.*parquet or jsonl file.*embedded"):
        run("calls", tmp_path / "out", "--source", "hub")
    assert time.monotonic() - began < sources.PROBE_S + 3
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glaive_v2_en_300.jsonl", "glaive_format_short.jsonl"])
def test_real_calls_are_read_without_a_loss(name: str, shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "function_calling" / name
    run("calls", tmp_path, "--source", source, "--probes", 0, "--max-examples", 400)
    (counts,) = manifest_of(tmp_path)["sources"].values()
    assert counts["kept"] > 200
    assert counts["dropped"] == {}
    loaded = conversations.load_domains(tmp_path, "train", tokenizer.load("gpt2"), "text", 8192)
    assert len(loaded["calls"]) > 150


@pytest.mark.slow
def test_real_instructions_are_read(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "instruct" / "gpteacher_codegen_4535.jsonl"
    run("sft", tmp_path, "--source", source)
    assert manifest_of(tmp_path)["domains"]["code"]["conversations"] > 500


@pytest.mark.slow
def test_real_programs_are_read(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "python_code/python_small.parquet"
    run("corpus", tmp_path, "--source", source, "--max-examples", 300)
    assert corpus.read_manifest(tmp_path)["kept"] > 250


@pytest.mark.slow
def test_a_real_text_is_read_whole(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "tinyshakespeare/input.txt"
    run("corpus", tmp_path, "--source", source, "--val-share", 0.1)
    manifest = corpus.read_manifest(tmp_path)
    assert manifest["train_bytes"] + manifest["val_bytes"] == 1_115_394
    windows = corpus.val_windows(tmp_path, 256, batch=64)
    targets = sum(int((targets >= 0).sum()) for _, targets, _ in windows)
    assert targets == manifest["val_tokens"] - 1


def counts_of(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `codechat data sft` kept and lost of a file of these rows."""
    source = write(tmp_path / "mine.jsonl", rows)
    run("sft", tmp_path / "out", "--source", source, "--neutral-share", 0)
    return manifest_of(tmp_path / "out")["sources"]["mine.jsonl"]


@pytest.mark.parametrize(
    "no, yes", [(False, True), (0, 1), (0.0, 1.0), ("False", "True"), ("0", "1")]
)
def test_answers_with_the_label_false_are_skipped_and_counted(
    no: object, yes: object, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = [
        {"prompt": f"Say {n}", "completion": f"word {n}", "label": yes if n % 3 else no}
        for n in range(30)
    ]
    counts = {"kept": 20, "dropped": {}, "skipped": {"label_false": 10}}
    assert counts_of(tmp_path, rows) == counts
    assert "label_false" in capsys.readouterr().out


def test_labels_of_a_csv_file_are_text(tmp_path: Path) -> None:
    lines = [f"Say {n},word {n},{n % 3 > 0}" for n in range(30)]
    (tmp_path / "kto.csv").write_text("\n".join(["prompt,completion,label", *lines]) + "\n")
    run("sft", tmp_path / "out", "--source", tmp_path / "kto.csv", "--neutral-share", 0)
    skipped = manifest_of(tmp_path / "out")["sources"]["kto.csv"]["skipped"]
    assert skipped == {"label_false": 10}


def test_pairs_of_preferences_are_counted_by_their_name(tmp_path: Path) -> None:
    pair = {
        "messages": [{"role": "user", "content": "Two?"}],
        "chosen_response": {"role": "assistant", "content": "2"},
        "rejected_response": {"role": "assistant", "content": "3"},
    }
    source = write(tmp_path / "pairs.jsonl", [pair] * 3)
    with pytest.raises(
        DataError, match="lost 3 of 3 rows .* to 'preference_pair' .*codechat preference"
    ):
        run("calls", tmp_path / "out", "--source", source)


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
def test_a_row_in_another_form_is_counted_by_name_and_the_others_are_kept(
    reason: str, turn: dict[str, Any], tmp_path: Path
) -> None:
    rows = []
    for n in range(30):
        asked = {"role": "user", "content": f"{n} and 1?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"{n + 1}"}]})
    rows[3]["messages"].insert(1, turn)
    assert counts_of(tmp_path, rows) == {"kept": 29, "dropped": {reason: 1}, "skipped": {}}


def test_too_many_rows_in_another_form_are_an_error_that_says_what_is_required(
    tmp_path: Path,
) -> None:
    turns = [{"from": "User", "value": "Two?"}, {"from": "Chatbot", "value": "2"}]
    with pytest.raises(
        DataError,
        match="lost 3 of 3 rows .* to 'unknown_role' .*role 'User' is unknown; required is one",
    ):
        counts_of(tmp_path, [{"conversations": turns}] * 3)


def test_reasoning_in_tags_makes_no_answer_another_language(tmp_path: Path) -> None:
    rows = []
    for n in range(30):
        for answer in ("It is cold.", "```python\nprint(5)\n```"):
            text = f"<think>\nLook: {{x}}\n</think>\n\n{answer}"
            rows.append({"instruction": f"{n} {answer}?", "output": text})
    assert counts_of(tmp_path, rows) == {"kept": 60, "dropped": {}, "skipped": {}}


@pytest.mark.parametrize("value", [0, False, 7, [1]])
def test_a_program_whose_input_is_no_text_is_lost_by_name(value: object) -> None:
    row = {"instruction": "Print whether it is even.", "input": value, "output": "print(1)"}
    assert program_of(row, CodeConfig()) == "no_request"
