"""Short requests for well-known programs: every program does what it should, and none is what the natural requests ask for."""

from __future__ import annotations

import tomllib
from pathlib import Path

from codechat.core.config import parse
from codechat.data import conversations
from codechat.evaluation import contamination
from codechat.tasks.coding import prepare
from codechat.tasks.natural import read_requests


def test_every_program_does_what_it_should(tmp_path: Path) -> None:
    programs = tomllib.loads(Path(prepare.__file__).with_name("short_programs.toml").read_text())["program"]
    scope = {"path": str(tmp_path / "file.txt")}
    for program in programs:
        exec(program["code"], scope)
    assert len(programs) >= 70 and [p["holds"] for p in programs if not eval(p["holds"], scope)] == []


def test_requests_are_new_to_the_natural_ones_and_to_other_splits() -> None:
    rows = list(prepare.short_rows())
    known = contamination.search(read_requests(), [(m["content"], True) for r in rows for m in r["messages"]])
    assert set(known) == {"code-01"}  # "write quicksort" itself
    by_split = {
        s: {r["messages"][0]["content"] for r in rows if r["meta"]["split"] == s} for s in ("train", "select", "test")
    }
    assert len(rows) == sum(map(len, by_split.values())) and min(map(len, by_split.values())) > 50
    assert len({r["id"] for r in rows}) == len(rows)


def test_the_data_stage_writes_them_where_requested(tmp_path: Path) -> None:
    words = ["--tokenizer", "bytes", "--max-examples", "20"]
    plain = prepare.prepare_sft(parse(prepare.SftConfig, [*words, "--out", str(tmp_path / "plain")]))
    manifest = prepare.prepare_sft(parse(prepare.SftConfig, [*words, "--short", "--out", str(tmp_path / "short")]))
    assert "short" in manifest["domains"] and "short" not in plain["domains"]
    rows = list(conversations.read(tmp_path / "short" / "short.train.jsonl"))
    assert all(row["messages"][-1]["content"].startswith(("def ", "class ")) for row in rows)
    assert {row["meta"]["tools_present"] for row in rows} == {True, False}  # code is code, whatever is on offer
