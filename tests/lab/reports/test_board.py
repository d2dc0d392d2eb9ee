"""The board: rows that are resumed, tables that give silence no score, published figures apart."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from jsonl import write
from raising import raising

from codechat import cli
from codechat.core.atomic_files import read_rows
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.evaluation.intervals import Interval
from codechat.runs import paths
from codechat_lab.instruments.board_settings import BoardConfig
from codechat_lab.reports import board
from codechat_lab.tasks.bfcl.task import WORDINGS, BfclTask

WORDS = (
    "board --ckpt new --source embedded --problems 1 --max-new-tokens 2 --out runs/drawn/b "
    "--wordings plain short"
).split()
ROWS = Path("runs/drawn/b/board/data/rows.jsonl")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders for which a notebook would be executed."""
    found: list[str] = []
    monkeypatch.setattr("codechat_lab.reports.build.build", lambda name, out: found.append(out))
    return found


def rows() -> list[dict[str, Any]]:
    return list(read_rows(paths.ROOT / ROWS))


def keys(some: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["model"], row["wording"], row["seed"], row["id"]) for row in some]


def test_the_command_writes_a_row_for_each_answer_and_goes_on_where_it_was_stopped(
    make_run: Any, built: list[str], capsys: Any
) -> None:
    make_run("new", block_size=256)
    assert cli.main(WORDS) == 0
    whole = rows()
    assert len(whole) == len(set(keys(whole)))
    assert {row["wording"] for row in whole} == {"plain", "short"}
    assert {row["right_is"] for row in whole} == {"call", "no call"}
    write(paths.ROOT / ROWS, whole[:3])
    assert cli.main(WORDS) == 0
    assert sorted(keys(rows())) == sorted(keys(whole))
    assert cli.main([*WORDS[:-1], "leaderboard"]) == 0
    assert len(rows()) == len(whole) * 3 // 2
    capsys.readouterr()
    assert cli.main([*WORDS, "--temperature", "0.5"]) == 2
    assert "another --out" in capsys.readouterr().err
    assert len(built) == 3


def test_answers_of_other_weights_under_a_name_are_not_kept_as_its_own(
    make_run: Any, built: list[str], capsys: Any
) -> None:
    make_run("new", block_size=256)
    assert cli.main(WORDS) == 0
    shutil.rmtree(paths.ROOT / "runs" / "new")
    make_run("new", block_size=256, depth=3)
    capsys.readouterr()
    assert cli.main(WORDS) == 2
    assert "holds answers of new@1 with the weights new@1-" in capsys.readouterr().err


def test_categories_that_silence_alone_solves_are_refused(
    make_run: Any, built: list[str], capsys: Any
) -> None:
    make_run("new", block_size=256)
    assert cli.main([*WORDS, "--categories", "irrelevance"]) == 2
    assert "no call is right" in capsys.readouterr().err
    assert not (paths.ROOT / ROWS).exists()


def test_a_wording_stands_behind_the_list_of_functions() -> None:
    for wording, text in WORDINGS.items():
        task = BfclTask("embedded", wording=wording)
        system = task.prompt(task.rows[0])[0]["content"]
        assert system.startswith("Functions:")
        assert text in system


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"wordings": ()}, "--wordings"),
        ({"seeds": (0, 1)}, "all draw the same"),
        ({"seeds": (-1,)}, "0 or more"),
    ],
)
def test_settings_that_measure_nothing_are_refused(words: dict[str, Any], said: str) -> None:
    with raising(ConfigError, said):
        BoardConfig(ckpt=("new",), **words)


def answers(model: str, correct: dict[str, bool], wording: str = "plain") -> list[dict[str, Any]]:
    """Rows of problems simple-0, irrelevance-0 and so on."""
    return [
        {
            "model": model,
            "wording": wording,
            "seed": 0,
            "id": id,
            "category": id.partition("-")[0],
            "right_is": "no call" if "irrelevance" in id else "call",
            "correct": right,
            "tier": "full" if right else "no_call",
            "completion": "",
        }
        for id, right in correct.items()
    ]


SILENT = {f"simple-{i}": False for i in range(10)} | {f"irrelevance-{i}": True for i in range(10)}
HALF = {id: int(id[-1]) < 5 for id in SILENT}


def load(tmp_path: Path, *parts: list[dict[str, Any]]) -> pd.DataFrame:
    write(tmp_path / "rows.jsonl", [row for part in parts for row in part])
    return board.read(tmp_path)


def test_a_silent_model_has_no_score(tmp_path: Path) -> None:
    table = board.table_of(load(tmp_path, answers("silent", SILENT), answers("half", HALF)))
    assert list(table) == ["half", "silent"]
    assert table["silent"]["no call"].value == 1
    assert table["silent"]["both"].value == 0
    assert table["half"]["both"].value == pytest.approx(0.5)


def test_models_are_compared_on_the_problems_that_all_have_answered(tmp_path: Path) -> None:
    part = dict(list(SILENT.items())[5:15])
    frame = load(tmp_path, answers("silent", SILENT), answers("half", HALF, "short")[5:15])
    assert set(frame["id"]) == set(part)


def test_no_common_problem_is_one_line(tmp_path: Path) -> None:
    with raising(MissingFile, "again to its end"):
        load(tmp_path, answers("a", {"simple-0": True}), answers("b", {"simple-1": True}))
    with raising(MissingFile, "codechat board"):
        board.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name",
    [
        "right_is",
        "correct",
        "seed",
        "model",
    ],
)
def test_a_row_without_a_field_is_one_line(tmp_path: Path, name: str) -> None:
    rows = answers("a", HALF)
    rows[1][name] = None
    with raising(DataError, "row 2", name):
        load(tmp_path, rows)


def test_problems_that_silence_solves_are_no_board(tmp_path: Path) -> None:
    with raising(MissingFile, "right call"):
        load(tmp_path, answers("a", {"irrelevance-0": True}))


def test_names_that_are_numbers_stay_apart(tmp_path: Path) -> None:
    frame = load(tmp_path, answers("007", SILENT), answers("7", HALF))
    assert set(board.table_of(frame)) == {"007", "7"}


def test_differences_are_paired(tmp_path: Path) -> None:
    """Where both fail and pass on the same problems, the interval has hardly a width."""
    frame = load(tmp_path, answers("a", HALF), answers("b", HALF))
    (line,) = board.differences(frame).to_dict("records")
    assert line["difference"] == "b minus a"
    assert line["call"].startswith("+0.0 [")


def test_wordings_are_averaged_and_their_spread_is_named(tmp_path: Path) -> None:
    right = dict.fromkeys(SILENT, True)
    frame = load(tmp_path, answers("a", SILENT), answers("a", right, "short"))
    assert board.table_of(frame)["a"]["call"].value == pytest.approx(0.5)
    assert board.spread(frame, "wording")["a"].value == 1.0
    assert len(board.by_cell(frame)) == 2


def test_models_are_compared_on_the_wordings_that_all_have(tmp_path: Path) -> None:
    """A wording that only one model has moves nothing but its own row of cells."""
    right = dict.fromkeys(SILENT, True)
    frame = load(tmp_path, answers("a", HALF), answers("a", right, "short"), answers("b", HALF))
    assert board.table_of(frame)["a"]["call"] == board.table_of(frame)["b"]["call"]
    (line,) = board.differences(frame).to_dict("records")
    assert line["call"].startswith("+0.0 [")
    assert len(board.by_cell(frame)) == 3
    apart = load(tmp_path, answers("a", HALF, "short"), answers("b", HALF))
    with raising(MissingFile, "share no wording"):
        board.table_of(apart)


def test_simple_weighs_its_three_languages_alike(tmp_path: Path) -> None:
    languages = {f"simple-{i}": True for i in range(8)} | {"simple_java-0": False}
    frame = load(tmp_path, answers("a", languages))
    assert "simple" not in board.scores_of(frame), "published means are of all three"
    assert not board.counts_of(frame)["simple"]
    frame = load(tmp_path, answers("a", languages | {"simple_javascript-0": False}))
    assert board.scores_of(frame)["simple"].value == pytest.approx(1 / 3)
    assert board.counts_of(frame)["simple"] == 10


def test_irrelevance_is_the_mean_of_both_categories(tmp_path: Path) -> None:
    silent = {f"irrelevance-{i}": True for i in range(8)} | {"live_irrelevance-0": False}
    frame = load(tmp_path, answers("a", silent | {"simple-0": True}))
    assert board.scores_of(frame)["irrelevance"].value == pytest.approx(0.5)
    assert board.scores_of(frame)["not_live_irrelevance"].value == 1.0


def test_parts_of_equal_answers_are_not_certain() -> None:
    """A bootstrap of five right and five wrong answers, each part apart, has no width."""
    both = board.mean_of_parts([np.ones(5), np.zeros(5)])
    assert both.lo < 0.3
    assert both.hi > 0.7


def test_the_interval_of_the_harmonic_mean_covers_both_shares() -> None:
    both = board.both_of(Interval(0.5, 0.4, 0.6), Interval(0.5, 0.3, 0.7))
    assert both.lo < 0.35 < both.value == 0.5 < 0.64 < both.hi


def test_figures_and_published_rows_are_apart(tmp_path: Path) -> None:
    frame = load(tmp_path, answers("a", HALF))
    table = board.table_of(frame)
    assert not board.counts_of(frame)["simple"], "none of the columns has a published figure"
    drawn = board.figure(table, board.counts_of(frame))
    names = [tick.get_text() for tick in drawn.axes[0].get_yticklabels()]
    assert names[0] == "a"
    assert "FunctionGemma 270M" in names[1:]
    assert board.published()["source"].notna().all()
    assert board.silence_figure(table).axes
