"""Rows of files: equal in every format, whatever the format adds to them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from jsonl import prepare, write

from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats, public_rows, sources
from codechat.tasks.base import SPLITS
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
    return [
        {"gold": p.gold, "messages": p.messages} for split in SPLITS for p in task.problems(split)
    ]


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
    assert (
        "null" not in json.dumps(expected.get("calls.train.jsonl"))
        if isinstance(expected, dict)
        else True
    )


def test_rows_of_the_hub_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(sources, "probe_hub", lambda name: None)
    for rows in (OPENAI, ROWS["problems"]):
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
        monkeypatch.setattr(datasets, "load_dataset", lambda path, stream=stream, **how: stream)
        assert list(sources.rows_of("owner/name")) == list(
            sources.local_rows(parquet(tmp_path / "x", rows))
        )
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


# rows of which `datasets` makes cells of JSON, timestamps, or structs with a field of nothing
# but nulls
WRITTEN = {
    "objects whose keys differ": [
        asked(FIND, {"filter": {"owner": None}}),
        asked(CONVERT, {"amount": 3}),
    ]
    * 3,
    "xLAM as objects": [
        {
            "query": f"Q{n}",
            "answers": [
                {"name": "find", "arguments": {"filter": {"n": n} if n % 2 else {"x": None}}}
            ],
        }
        | {"tools": [FIND]}
        for n in range(6)
    ],
    "dates": [{"question": f"Day {n}?", "answer": f"2024-05-0{n + 1}"} for n in range(6)],
    "days with times": [
        {"question": f"Day {n}?", "answer": f"2024-05-01T10:00:0{n}"} for n in range(6)
    ],
    "numbers": [{"question": f"{n} + 1?", "input": n / 2, "answer": n + 1} for n in range(6)],
}


@pytest.mark.parametrize("form", WRITTEN)
def test_what_datasets_writes_or_streams_reads_as_the_jsonl_that_it_was_given(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    file = write(tmp_path / "a.jsonl", WRITTEN[form])
    expected = said(sources.local_rows(file))
    assert all(isinstance(messages, list) for messages in expected)
    load = datasets.load_dataset
    table = load("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    table.to_parquet(str(tmp_path / "b.parquet"))
    assert said(sources.local_rows(tmp_path / "b.parquet")) == expected
    monkeypatch.setattr(sources, "probe_hub", lambda name: None)
    for kind, path in (("json", file), ("parquet", tmp_path / "b.parquet")):

        def from_files(path: str, kind: str = kind, files: str = str(path), **how: Any) -> Any:
            return load(kind, data_files=files, **how)

        monkeypatch.setattr(datasets, "load_dataset", from_files)
        assert said(sources.rows_of("owner/name")) == expected


def test_nulls_that_no_padding_made_stay_where_the_hub_has_json_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of one set of keys become structs, in which no field is padding."""
    import datasets

    rows = [
        {
            "query": "Q",
            "answers": [{"name": "find", "arguments": {"filter": {"owner": None, "n": 1}}}],
        }
    ] * 3
    file = write(tmp_path / "a.jsonl", [row | {"tools": [FIND]} for row in rows])
    load = datasets.load_dataset
    monkeypatch.setattr(sources, "probe_hub", lambda name: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, **how: load("json", data_files=str(file), **how)
    )
    assert said(sources.rows_of("owner/name")) == said(sources.local_rows(file))
    assert '"owner": null' in said(sources.local_rows(file))[0][-1]["content"]


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


def test_nulls_in_a_schema_are_absent_fields_and_a_null_argument_stays_where_a_row_says_it_in_words() -> (
    None
):
    for schema, line in NULL_SCHEMAS:
        tools = [{"name": "f", "description": None, "parameters": schema}]
        row = {"messages": OPENAI[0]["messages"], "tools": tools}
        assert chat_formats.messages_of(row, "x")[0]["content"].endswith(f"\n{line}")
        assert "null" not in chat_formats.messages_of(row, "x", "json")[0]["content"]
        glaive = {
            "system": f"SYSTEM: {json.dumps(tools[0])}",
            "chat": "USER: a\n\n\nASSISTANT: b <|endoftext|>",
        }
        assert chat_formats.messages_of(glaive, "x")[0]["content"].endswith(f"\n{line}")
    call = {
        "id": "a",
        "function": {"name": "convert", "arguments": '{"amount": 1, "currency": null}'},
    }
    row = {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": TOOLS,
    }
    assert chat_formats.messages_of(row, "x")[-1]["content"].endswith(
        '{"amount": 1, "currency": null}}'
    )
    # as `datasets` writes its padded objects to json
    padded = pyarrow.Table.from_pylist(OPENAI).to_pylist()
    assert "null" in json.dumps(padded)
    for row, bare in zip(padded, OPENAI):
        for style in ("compact", "json"):
            assert chat_formats.messages_of(row, "x", style) == chat_formats.messages_of(
                bare, "x", style
            )


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"question": "why", "answer": "so, there"}, {"question": "é", "answer": "\u2028"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    mark = "\ufeff"
    (tmp_path / "plain.jsonl").write_text(text)
    (tmp_path / "mark.jsonl").write_text(mark + text)
    (tmp_path / "gaps.jsonl").write_text(text.replace("\n", "\n \n"))
    (tmp_path / "list.json").write_text(mark + json.dumps(rows))
    (tmp_path / "lines.json").write_text(mark + text)
    parquet(tmp_path / "a", rows)
    for file in tmp_path.iterdir():
        assert list(sources.local_rows(file)) == rows, file.name
    (tmp_path / "list.json").unlink(), (tmp_path / "lines.json").unlink()
    assert list(sources.local_rows(tmp_path)) == rows * 4


def test_a_directory_with_files_of_several_kinds_is_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": name, "answer": "1"} for name in "abcd"]
    (tmp_path / "a.csv").write_text("question,answer\na,1\n")
    (tmp_path / "b.json").write_text(json.dumps(rows[1:2]))
    write(tmp_path / "c.jsonl", rows[2:3])
    parquet(tmp_path / "d", rows[3:])
    for beside in ("dataset_info.json", "README.md", ".cache", "notes.txt"):
        (tmp_path / beside).write_text("{}")
    assert list(sources.local_rows(tmp_path)) == rows
    assert capsys.readouterr().err == f"{tmp_path}: not read: notes.txt\n"
    (tmp_path / "e.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"e\.jsonl\.gz, which is compressed"):
        list(sources.local_rows(tmp_path))


def test_a_corpus_is_read_from_a_directory_of_json_and_csv_files_but_not_beside_programs(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "print(1)\n"}]))
    (tmp_path / "b.csv").write_text('text\n"print(2, 3)"\n')

    def texts() -> list[str]:
        return [
            document.text for document in public_rows.path_documents(tmp_path, sources.Ledger("x"))
        ]

    assert texts() == ["print(1)\n", "print(2, 3)"]
    (tmp_path / "main.py").write_text("print(4)\n")
    assert texts() == ["print(4)\n"]


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


def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path) -> None:
    for name, data in DAMAGED.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"\A.*{name}.*\Z"):
            list(sources.local_rows(tmp_path / name))


def test_a_required_argument_that_is_null_in_every_row_is_no_padding(tmp_path: Path) -> None:
    owner = {"type": ["string", "null"]}
    filters = {
        "type": "object",
        "properties": {"owner": owner, "city": {"type": "string"}},
        "required": ["owner"],
    }
    ticket = {
        "type": "object",
        "properties": {"filter": filters, "day": {"type": ["string", "null"]}},
    }
    tools = [{"name": "search", "description": "", "parameters": ticket}]
    rows = []
    for city, found in (("Oslo", None), ("Rome", "Ann"), ("Lima", None)):
        call = {
            "name": "search",
            "arguments": {"filter": {"owner": found, "city": city}, "day": None},
        }
        answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        rows.append(
            {"messages": [USER | {"content": f"{city}?"}, answer], "tools": json.dumps(tools)}
        )
    read = [
        chat_formats.messages_of(row, "x")[2]["content"]
        for row in sources.local_rows(parquet(tmp_path / "a", rows))
    ]
    assert [json.loads(text.partition(" ")[2])["arguments"] for text in read] == [
        {"filter": {"owner": None, "city": "Oslo"}},
        {"filter": {"owner": "Ann", "city": "Rome"}},
        {"filter": {"owner": None, "city": "Lima"}},
    ]


def test_a_json_file_may_be_one_object_over_several_lines(tmp_path: Path) -> None:
    row = {"instruction": "Two?", "output": "2"}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(row, indent=1))
    assert list(sources.local_rows(path)) == [row]
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert list(sources.local_rows(path)) == [row, row]


def test_a_folder_of_arrow_files_is_told_how_to_become_rows(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    (tmp_path / "train" / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="no rows in .*to_parquet"):
        list(sources.local_rows(tmp_path))
