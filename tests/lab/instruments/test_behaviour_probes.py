"""Behaviour probes: what a completion does, and how often it is what was requested."""

from pathlib import Path
from typing import Any

import pytest
from contracts import write_rows
from shapes import toy as toy_shape

from codechat.core.errors import DataError
from codechat.models.gpt import GPT
from codechat.text import tokenizer
from codechat_lab.instruments import behaviour_probes


def test_behaviour_of_a_completion() -> None:
    for expected, texts in dict(
        call=(
            '<functioncall> {"name": "add", "arguments": {"a": 1}}',
            "Sure. <functioncall> {broken",
        ),
        code=(
            "def add(a, b):\n    return a + b",
            "Here:\n```python\nx = 1\n```",
            "import math\nprint(math.pi)",
        ),
        neither=("A class of problems, from which we import nothing, is defined below.", ""),
    ).items():
        assert set(map(behaviour_probes.behaviour, texts)) == {expected}


def probes() -> list[dict[str, Any]]:
    """Two of each cell."""
    asked = [
        dict(
            messages=[dict(role="user", content="x" * i)],
            asked="code" if i % 2 else "tool",
            tools_present=i < 4,
        )
        for i in range(8)
    ]
    return asked + [asked[0] | dict(suitable=False)] * 2


def test_the_first_probes_of_each_cell_are_read(tmp_path: Path) -> None:
    path = tmp_path / "probes.select.jsonl"
    write_rows(path, [*probes(), *probes()])
    assert behaviour_probes.read_probes(path, 2).rows == probes()


def test_a_row_that_is_no_probe_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "probes.select.jsonl"
    write_rows(path, [*probes(), {"asked": "dance"}])
    with pytest.raises(DataError, match="line 11"):
        behaviour_probes.read_probes(path, 3)


def test_probes_are_counted_by_cell() -> None:
    tok = tokenizer.load("bytes")
    model = GPT(toy_shape(tok.n_vocab), seed=0)
    matrix = behaviour_probes.Probes(probes()).measure(model, tok, "reserved")
    assert [counts.total() for counts in matrix.counts.values()] == [2, 2, 2, 2, 2]
    row = matrix.metrics()
    for cell, counts in matrix.counts.items():
        assert row[f"probe/{cell}/call"] == counts["call"] / 2
        assert row[f"probe/{cell}/n"] == 2
