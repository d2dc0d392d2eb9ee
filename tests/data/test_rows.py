"""Rows of files: equal in every format, whatever the format adds to them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from jsonl import prepare, write

from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats, sources
from codechat.tasks.base import SPLITS
from codechat.tasks.custom import RowsTask
from codechat.tasks.funcall import FuncallTask

Rows = list[dict[str, Any]]


# rows whose objects have different fields, in three forms
ROWS = json.loads(Path(__file__).with_name("padded.json").read_text(encoding="utf-8"))
OPENAI, TOOLS = ROWS["openai"], ROWS["openai"][-1]["tools"]
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
    return [{"gold": p.gold, "messages": p.messages} for split in SPLITS for p in task.problems(split)]


def own_task(source: Path) -> list[Any]:
    class Own(RowsTask):
        rewards = {len: 1.0}  # noqa: RUF012

    return sorted(str(problem) for problem in Own(str(source)).rows)


READERS = {"openai": prepared, "problems": golds, "own": own_task}


@pytest.mark.parametrize("form", READERS)
def test_parquet_reads_as_jsonl_does_although_its_objects_are_padded_with_nulls(tmp_path: Path, form: str) -> None:
    rows, read = ROWS[form], READERS[form]
    expected = read(write(tmp_path / "a.jsonl", rows))
    assert expected and read(parquet(tmp_path / "b.jsonl", rows)) == expected
    assert "null" not in json.dumps(expected.get("calls.train.jsonl")) if isinstance(expected, dict) else True


def test_rows_of_the_hub_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(sources, "probe_hub", lambda name: None)
    for rows in (OPENAI, ROWS["problems"]):
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
        monkeypatch.setattr(datasets, "load_dataset", lambda path, stream=stream, **how: stream)
        assert list(sources.rows_of("owner/name")) == list(sources.local_rows(parquet(tmp_path / "x", rows)))
    with pytest.raises(MissingFile):
        list(sources.rows_of(str(tmp_path / "absent.jsonl")))


NULL_SCHEMAS = [
    (None, "f()"),
    ({"type": "object", "properties": None, "required": None}, "f()"),
    ({"properties": {"a": None, "b": {"type": "string", "enum": None, "description": None}}}, "f(b?: string)"),
    ({"properties": {"a": {"type": "array", "items": None}}, "required": ["a"]}, "f(a: array)"),
]


def test_nulls_in_a_schema_are_absent_fields_and_a_null_argument_stays_where_a_row_says_it_in_words() -> None:
    for schema, line in NULL_SCHEMAS:
        tools = [{"name": "f", "description": None, "parameters": schema}]
        row = {"messages": OPENAI[0]["messages"], "tools": tools}
        assert chat_formats.messages_of(row, "x")[0]["content"].endswith(f"\n{line}")
        assert "null" not in chat_formats.messages_of(row, "x", "json")[0]["content"]
        glaive = {"system": f"SYSTEM: {json.dumps(tools[0])}", "chat": "USER: a\n\n\nASSISTANT: b <|endoftext|>"}
        assert chat_formats.messages_of(glaive, "x")[0]["content"].endswith(f"\n{line}")
    call = {"id": "a", "function": {"name": "convert", "arguments": '{"amount": 1, "currency": null}'}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": TOOLS}
    assert chat_formats.messages_of(row, "x")[-1]["content"].endswith('{"amount": 1, "currency": null}}')
    padded = pyarrow.Table.from_pylist(OPENAI).to_pylist()  # as `datasets` writes its padded objects to json
    assert "null" in json.dumps(padded)
    for row, bare in zip(padded, OPENAI):
        for style in ("compact", "json"):
            assert chat_formats.messages_of(row, "x", style) == chat_formats.messages_of(bare, "x", style)


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
