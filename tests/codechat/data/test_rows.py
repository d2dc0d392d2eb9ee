"""Rows of files: equal in every format, whatever the format adds to them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from jsonl import prepare, write

from codechat.core import registry
from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats, corpus_writer, sources
from codechat.tasks.base import SPLITS, Problem
from codechat.tasks.custom import RowsTask
from codechat_lab.tasks.funcall import FuncallTask

Rows = list[dict[str, Any]]


# rows whose objects have different fields, in three forms
ROWS = json.loads(Path(__file__).with_name("padded.json").read_text(encoding="utf-8"))
OPENAI = ROWS["openai"]
TOOLS = ROWS["openai"][-1]["tools"]
USER = {"role": "user", "content": "Q"}


def parquet(path: Path, rows: Rows) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def prepared(source: Path) -> dict[str, str]:
    out = source.with_suffix(".out")
    prepare("calls", out, "--source", source, "--probes", 0)
    return {file.name: file.read_text() for file in out.glob("*.jsonl")}


def golds(source: Path) -> Rows:
    task = FuncallTask(source)
    problems: list[Problem] = []
    for split in SPLITS:
        problems += task.problems(split)
    return [{"gold": problem.gold, "messages": problem.messages} for problem in problems]


def own_task(source: Path) -> list[Any]:
    class Own(RowsTask):
        rewards = {len: 1.0}  # noqa: RUF012

    return sorted(str(problem) for problem in Own(str(source)).rows)


READERS = {"openai": prepared, "problems": golds, "own": own_task}


@pytest.mark.parametrize("form", READERS)
def test_parquet_reads_as_jsonl_does_although_its_objects_are_padded_with_nulls(
    tmp_path: Path, form: str
) -> None:
    rows = ROWS[form]
    read = READERS[form]
    expected = read(write(tmp_path / "a.jsonl", rows))
    assert expected
    assert read(parquet(tmp_path / "b.jsonl", rows)) == expected


def test_conversations_of_a_parquet_file_hold_no_padding(tmp_path: Path) -> None:
    files = prepared(parquet(tmp_path / "b.jsonl", OPENAI))
    assert "null" not in files["calls.train.jsonl"]


class Hub:
    """Stands for `datasets`: whatever is asked for, it loads this file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, path: Path) -> None:
        import datasets

        self.load = datasets.load_dataset
        self.kind = kind
        self.path = path
        monkeypatch.setattr(sources, "probe_hub", lambda name: None)
        monkeypatch.setattr(datasets, "load_dataset", self.load_file)

    def load_file(self, path: str, split: str, streaming: bool) -> Any:
        return self.load(self.kind, data_files=str(self.path), split=split, streaming=streaming)


@pytest.mark.parametrize("form", ["openai", "problems"])
def test_rows_of_the_hub_are_those_of_the_file(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    stream = datasets.Dataset.from_list(ROWS[form]).to_iterable_dataset()
    monkeypatch.setattr(sources, "probe_hub", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split, streaming: stream)
    expected = list(sources.local_rows(parquet(tmp_path / "x", ROWS[form])))
    assert list(sources.rows_of("owner/name")) == expected


def test_a_file_that_is_not_there_is_an_error_and_no_name_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        list(sources.rows_of(str(tmp_path / "absent.jsonl")))


def said(rows: Any) -> list[Any]:
    return [chat_formats.messages_of(row, "x") for row in rows]


FIND = {
    "name": "find",
    "description": "d",
    "parameters": {"type": "object", "properties": {"filter": {"type": "object"}}},
}
CONVERT = {
    "name": "convert",
    "description": "d",
    "parameters": {"type": "object", "properties": {"amount": {"type": "number"}}},
}


def asked(tool: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": tool["name"], "arguments": arguments},
    }
    return {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [tool],
    }


def xlam(query: str, filter: dict[str, Any]) -> dict[str, Any]:
    answer = {"name": "find", "arguments": {"filter": filter}}
    return {"query": query, "answers": [answer], "tools": [FIND]}


DIFFERENT = [asked(FIND, {"filter": {"owner": None}}), asked(CONVERT, {"amount": 3})]
# rows of which `datasets` makes cells of JSON, timestamps, or structs with a field of nothing
# but nulls
WRITTEN = {
    "objects whose keys differ": DIFFERENT * 3,
    "xLAM as objects": [xlam(f"Q{n}", {"n": n} if n % 2 else {"x": None}) for n in range(6)],
    "dates": [{"question": f"Day {n}?", "answer": f"2024-05-0{n + 1}"} for n in range(6)],
    "days with times": [
        {"question": f"Day {n}?", "answer": f"2024-05-01T10:00:0{n}"} for n in range(6)
    ],
    "numbers": [{"question": f"{n} + 1?", "input": n / 2, "answer": n + 1} for n in range(6)],
}


@pytest.fixture(scope="module", params=WRITTEN)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file, each of whose rows has messages."""
    path = write(tmp_path_factory.mktemp("given") / "a.jsonl", WRITTEN[request.param])
    assert all(isinstance(messages, list) for messages in said(sources.local_rows(path)))
    return path


@pytest.fixture(scope="module")
def written(given: Path) -> Path:
    """The parquet file that `datasets` makes of it."""
    import datasets

    cache = str(given.with_name("cache"))
    table = datasets.load_dataset("json", data_files=str(given), split="train", cache_dir=cache)
    table.to_parquet(str(given.with_suffix(".parquet")))
    return given.with_suffix(".parquet")


def test_what_datasets_writes_reads_as_the_jsonl_that_it_was_given(
    given: Path, written: Path
) -> None:
    assert said(sources.local_rows(written)) == said(sources.local_rows(given))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_what_datasets_streams_reads_as_the_jsonl_that_it_was_given(
    kind: str, given: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(monkeypatch, kind, given if kind == "json" else written)
    assert said(sources.rows_of("owner/name")) == said(sources.local_rows(given))


def test_nulls_that_no_padding_made_stay_where_the_hub_has_json_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of one set of keys become structs, in which no field is padding."""
    file = write(tmp_path / "a.jsonl", [xlam("Q", {"owner": None, "n": 1})] * 3)
    Hub(monkeypatch, "json", file)
    expected = said(sources.local_rows(file))
    assert said(sources.rows_of("owner/name")) == expected
    assert '"owner": null' in expected[0][-1]["content"]


def test_the_entries_of_a_map_are_not_padded(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table({"a": pyarrow.array([[("x", None), ("y", "1")]], type=kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert list(sources.local_rows(tmp_path / "a.parquet")) == [{"a": {"x": None, "y": "1"}}]


NULL_SCHEMAS = [
    (None, "f()"),
    ({"type": "object", "properties": None, "required": None}, "f()"),
    (
        {"properties": {"a": None, "b": {"type": "string", "enum": None, "description": None}}},
        "f(b?: string)",
    ),
    ({"properties": {"a": {"type": "array", "items": None}}, "required": ["a"]}, "f(a: array)"),
]


@pytest.mark.parametrize("schema, line", NULL_SCHEMAS)
def test_nulls_in_a_schema_are_absent_fields(schema: dict[str, Any] | None, line: str) -> None:
    tools = [{"name": "f", "description": None, "parameters": schema}]
    row = {"messages": OPENAI[0]["messages"], "tools": tools}
    assert chat_formats.messages_of(row, "x")[0]["content"].endswith(f"\n{line}")
    assert "null" not in chat_formats.messages_of(row, "x", "json")[0]["content"]


@pytest.mark.parametrize("schema, line", NULL_SCHEMAS)
def test_nulls_in_a_schema_of_glaive_are_absent_fields(
    schema: dict[str, Any] | None, line: str
) -> None:
    tool = {"name": "f", "description": None, "parameters": schema}
    talk = "USER: a\n\n\nASSISTANT: b <|endoftext|>"
    row = {"system": f"SYSTEM: {json.dumps(tool)}", "chat": talk}
    assert chat_formats.messages_of(row, "x")[0]["content"].endswith(f"\n{line}")


def test_a_null_argument_stays_where_a_row_says_it_in_words() -> None:
    arguments = '{"amount": 1, "currency": null}'
    call = {"id": "a", "function": {"name": "convert", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"messages": [USER, answer], "tools": TOOLS}
    assert chat_formats.messages_of(row, "x")[-1]["content"].endswith(f"{arguments}}}")


@pytest.mark.parametrize("style", ["compact", "json"])
def test_rows_with_the_padding_of_datasets_read_as_those_without(style: str) -> None:
    padded = pyarrow.Table.from_pylist(OPENAI).to_pylist()
    assert "null" in json.dumps(padded)
    for row, bare in zip(padded, OPENAI, strict=True):
        expected = chat_formats.messages_of(bare, "x", style)
        assert chat_formats.messages_of(row, "x", style) == expected


PAIRS = [{"question": "why", "answer": "so, there"}, {"question": "é", "answer": "\u2028"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in PAIRS)
MARK = "\ufeff"
FORMATS = {
    "plain.jsonl": LINES,
    "mark.jsonl": MARK + LINES,
    "gaps.jsonl": LINES.replace("\n", "\n \n"),
    "list.json": MARK + json.dumps(PAIRS),
    "lines.json": MARK + LINES,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FORMATS[name])
    assert list(sources.local_rows(tmp_path / name)) == PAIRS


def test_parquet_gives_the_rows_that_it_was_made_of(tmp_path: Path) -> None:
    assert list(sources.local_rows(parquet(tmp_path / "a", PAIRS))) == PAIRS


def test_a_directory_gives_the_rows_of_all_its_files(tmp_path: Path) -> None:
    for name in ("plain.jsonl", "mark.jsonl", "gaps.jsonl"):
        (tmp_path / name).write_text(FORMATS[name])
    parquet(tmp_path / "a", PAIRS)
    assert list(sources.local_rows(tmp_path)) == PAIRS * 4


@pytest.fixture
def several_kinds(tmp_path: Path) -> Rows:
    """The rows of a csv, a json, a jsonl and a parquet file in one directory with others."""
    rows = [{"question": name, "answer": "1"} for name in "abcd"]
    (tmp_path / "a.csv").write_text("question,answer\na,1\n")
    (tmp_path / "b.json").write_text(json.dumps(rows[1:2]))
    write(tmp_path / "c.jsonl", rows[2:3])
    parquet(tmp_path / "d", rows[3:])
    for beside in ("dataset_info.json", "README.md", ".cache", "notes.txt"):
        (tmp_path / beside).write_text("{}")
    return rows


def test_a_directory_with_files_of_several_kinds_is_read_whole(
    several_kinds: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(sources.local_rows(tmp_path)) == several_kinds
    assert capsys.readouterr().err == f"{tmp_path}: not read: notes.txt\n"


def test_a_compressed_file_in_a_directory_is_not_passed_over(
    several_kinds: Rows, tmp_path: Path
) -> None:
    (tmp_path / "e.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"e\.jsonl\.gz, which is compressed"):
        list(sources.local_rows(tmp_path))


def texts_in(folder: Path) -> list[str]:
    documents = corpus_writer.path_documents(folder, sources.Ledger("x"))
    return [document.text for document in documents]


def test_without_the_laboratory_texts_are_read_and_stderr_says_what_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "INSTRUMENTS", {})
    write(tmp_path / "a.jsonl", [{"code": "import pathlib\n"}])
    assert texts_in(tmp_path) == ["import pathlib\n"]
    assert "rows are not compared with benchmarks" in capsys.readouterr().err


@pytest.fixture
def with_texts(tmp_path: Path) -> Path:
    """A directory with a text in a json and one in a csv file."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "print(1)\n"}]))
    (tmp_path / "b.csv").write_text('text\n"print(2, 3)"\n')
    return tmp_path


def test_a_corpus_is_read_from_a_directory_of_json_and_csv_files(with_texts: Path) -> None:
    assert texts_in(with_texts) == ["print(1)\n", "print(2, 3)"]


def test_json_and_csv_files_beside_programs_are_no_corpus(with_texts: Path) -> None:
    (with_texts / "main.py").write_text("print(4)\n")
    assert texts_in(with_texts) == ["print(4)\n"]


def test_a_csv_field_may_be_as_long_as_a_book(tmp_path: Path) -> None:
    text = "word, " * 40_000
    (tmp_path / "a.csv").write_text(f'question,answer\nQ,"{text}"\n')
    assert list(sources.local_rows(tmp_path / "a.csv")) == [{"question": "Q", "answer": text}]


CSV = {
    "a comma without quotation marks": (
        "q,a\n1,2\nGreet,Hello, you\n",
        ":3 has 3 fields and the first line 2",
    ),
    "a field too few": ("q,a\n1\n", ":2 has 1 fields"),
    "a quotation mark that is not closed": ('q,a\n1,"2\n3,4\n', "not csv"),
    "text behind a quotation mark": ('q,a\n1,"2" and\n', ":2 is not csv"),
    "two columns of one name": ("q,q\n1,2\n", "two columns of one name"),
}


@pytest.mark.parametrize("fault", CSV)
def test_a_csv_line_that_lost_its_form_is_named(fault: str, tmp_path: Path) -> None:
    text, message = CSV[fault]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=rf"\A.*a\.csv.*{message}.*\Z"):
        list(sources.local_rows(tmp_path / "a.csv"))


DAMAGED = {
    "cut.jsonl": b'{"a": 1}\n{"a": ',
    "list.jsonl": b'{"a": 1}\n[1]\n',
    "empty.jsonl": b"\xef\xbb\xbf\n\n",
    "latin.jsonl": b'{"a": "\xe9"}\n',
    "deep.jsonl": b"[" * 100_000,
    "not.parquet": b"PAR1 nothing",
    "scalar.json": b"[1, 2]",
    "cut.json": b'[{"a": 1}, ',
    "rows.xml": b"<a/>",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line_with_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(DAMAGED[name])
    with pytest.raises(DataError, match=rf"\A.*{name}.*\Z"):
        list(sources.local_rows(tmp_path / name))


SEARCH = {
    "name": "search",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {
            "filter": {
                "type": "object",
                "properties": {
                    "owner": {"type": ["string", "null"]},
                    "city": {"type": "string"},
                },
                "required": ["owner"],
            },
            "day": {"type": ["string", "null"]},
        },
    },
}


def searching(city: str, owner: str | None) -> dict[str, Any]:
    """A row whose call has a null for a day, and one for an owner that is not known."""
    arguments = {"filter": {"owner": owner, "city": city}, "day": None}
    call = {"name": "search", "arguments": arguments}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    asked = {"role": "user", "content": f"{city}?"}
    return {"messages": [asked, answer], "tools": json.dumps([SEARCH])}


def test_a_required_argument_that_is_null_in_every_row_is_no_padding(tmp_path: Path) -> None:
    rows = [searching("Oslo", None), searching("Rome", "Ann"), searching("Lima", None)]
    arguments = []
    for messages in said(sources.local_rows(parquet(tmp_path / "a", rows))):
        call = json.loads(messages[2]["content"].partition(" ")[2])
        arguments.append(call["arguments"])
    assert arguments == [
        {"filter": {"owner": None, "city": "Oslo"}},
        {"filter": {"owner": "Ann", "city": "Rome"}},
        {"filter": {"owner": None, "city": "Lima"}},
    ]


INSTRUCTION = {"instruction": "Two?", "output": "2"}


def test_a_json_file_may_be_one_object_over_several_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(INSTRUCTION, indent=1))
    assert list(sources.local_rows(tmp_path / "a.json")) == [INSTRUCTION]


def test_a_json_file_may_be_one_object_a_line(tmp_path: Path) -> None:
    line = json.dumps(INSTRUCTION)
    (tmp_path / "a.json").write_text(f"{line}\n{line}\n")
    assert list(sources.local_rows(tmp_path / "a.json")) == [INSTRUCTION] * 2


def test_a_folder_of_arrow_files_is_told_how_to_become_rows(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    (tmp_path / "train" / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="no rows in .*to_parquet"):
        list(sources.local_rows(tmp_path))


def test_a_list_in_a_jsonl_file_is_told_where_it_belongs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(OPENAI))
    with pytest.raises(DataError, match=r"rows.jsonl:1 is a list;.*one object a line.*\.json"):
        list(sources.local_rows(path))
