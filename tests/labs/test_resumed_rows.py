"""Rows of finished runs: what is missing is trained, once, and a file holds rows of one setting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raising

from codechat.core.errors import ConfigError
from codechat.labs.resumed_rows import Row, thinned, train_missing

PLAN = [(0, "a"), (0, "b"), (1, "a")]


@pytest.fixture
def lab(tmp_path: Path) -> Callable[..., tuple[list[Row], list[Any]]]:
    """lab(settings, plan): the rows, and the runs that were trained for them."""

    def run(settings: str = "abc", plan: list[Any] = PLAN) -> tuple[list[Row], list[Any]]:
        trained: list[Any] = []

        def train(seed: int, arm: str) -> Row:
            trained.append((seed, arm))
            return dict(seed=seed, arm=arm, settings=settings, score=len(trained))

        how = dict(name_of=lambda row: (row["seed"], row["arm"]), train=train, summary=lambda row: f"done {row['arm']}")
        return train_missing(tmp_path / "new/rows.jsonl", settings, plan, **how), trained

    return run


def test_a_second_start_trains_what_the_file_does_not_have(lab: Any, tmp_path: Path, capsys: Any) -> None:
    first, trained = lab(plan=PLAN[:2])
    assert trained == PLAN[:2] and capsys.readouterr().out == "done a\ndone b\n"
    rows, trained = lab()
    assert trained == PLAN[2:] and rows[:2] == first and len(rows) == 3
    lines = (tmp_path / "new/rows.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == rows
    assert lab(plan=PLAN[1:2]) == ([rows[1]], [])  # the rows of the plan, though the file has more


def test_a_row_that_a_kill_cut_is_trained_again(lab: Any, tmp_path: Path) -> None:
    rows, _ = lab()
    path = tmp_path / "new/rows.jsonl"
    path.write_text(path.read_text()[:-20])
    again, trained = lab()
    assert trained == PLAN[2:] and again[:2] == rows[:2]
    assert list(map(json.loads, path.read_text().splitlines())) == again


def test_rows_of_other_settings_stay_apart(lab: Any, tmp_path: Path) -> None:
    lab()
    before = (tmp_path / "new/rows.jsonl").read_bytes()
    with raising(ConfigError, "abc", "other", "--out"):
        lab("other")
    assert (tmp_path / "new/rows.jsonl").read_bytes() == before


def test_a_thinned_curve_has_means_and_keeps_a_shorter_last_part() -> None:
    assert thinned([1, 2, 3, 4, 5], 2) == [1.5, 3.5, 5]
