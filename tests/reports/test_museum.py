"""The museum: one notebook per finding, each shows its defect by name, and its claim rests on the defect."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import pytest

from codechat.labs import defects

ROOT = Path(__file__).resolve().parents[2]
MUSEUM = sorted((ROOT / "nbs_py").glob("2?_museum_*.py"))
SHOWS = {
    "F1": "stop-set",
    "F2": "stop-set",
    "F3": "bf16-weights",
    "F4": "quote-parser",
    "F5": "printed-reward",
    "F6": "train-on-test",
    "F7": "k1-drift",
    "F8": "silent-resume",
}
CHEAP = ("23_museum_quote_parser", "24_museum_printed_reward")


def test_each_finding_has_its_notebook_and_its_defect() -> None:
    assert [p.stem[:2] for p in MUSEUM] == [str(20 + i) for i in range(8)]
    assert {f: name for name, d in defects.DEFECTS.items() for f in d.findings} == SHOWS
    for path, name in zip(MUSEUM, SHOWS.values(), strict=True):
        text = path.read_text(encoding="utf-8")
        assert f'DEFECTS["{name}"]' in text and f'"{name}"' in text.replace(f'DEFECTS["{name}"]', ""), path.name
        assert set(re.findall(r'switched_on\("([\w-]+)"', text)) <= {name}, "a notebook shows one defect"
        assert "defects.on() == ()" in text.rpartition("# %%")[2], "and leaves none on"


def cells(name: str) -> list[str]:
    notebook = jupytext.reads((ROOT / "nbs_py" / f"{name}.py").read_text(encoding="utf-8"), fmt="py:percent")
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def run_all_but_last(name: str) -> dict[str, Any]:
    """Names that a notebook's cells bind, its last cell not run."""
    names: dict[str, Any] = {"__name__": "__main__", "display": lambda *shown: None}
    for number, source in enumerate(cells(name)[:-1]):
        exec(compile(source, f"<{name} cell {number}>", "exec"), names)
    return names


@contextlib.contextmanager
def nothing_is_switched(*names: str) -> Iterator[tuple[defects.Defect, ...]]:
    yield tuple(defects.DEFECTS[name] for name in names)


@pytest.mark.parametrize("name", CHEAP)
def test_without_its_defect_the_claim_of_a_notebook_does_not_hold(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(defects, "switched_on", nothing_is_switched)
    names = run_all_but_last(name)
    with pytest.raises(AssertionError):
        exec(compile(cells(name)[-1], f"<{name}, the claim>", "exec"), names)
