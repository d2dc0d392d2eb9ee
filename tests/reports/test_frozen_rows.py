"""Frozen rows: the frames that live runs give, small, and nothing from runs that are not finished."""

from __future__ import annotations

import json
from pathlib import Path

import freeze_rows
import pandas as pd
import pytest

from codechat.core.errors import MissingFile, RunError
from codechat.reports import run_frames
from codechat.runs import paths
from codechat.runs.run import Run

TABLES = {
    "pretrain": ("runs", "metrics", "evals"),
    "rl": ("runs", "metrics", "samples"),
    "evaluate": ("runs", "evals", "per_problem", "samples"),
}
GAP = {"value": 0.1, "lo": 0.05, "hi": 0.15, "N": 60}


def make_run(name: str, *, finish: bool = True) -> None:
    """A run with a few rows of every kind."""
    stage = name.rpartition("/")[2].partition("-")[0]
    run = Run.create(name, {"stage": stage, "ks": [1, 8]}, kind=stage)
    for step in (1, 2, 3):
        run.log(step, train_loss=1 / (3 * step), lr=1e-3)
        run.log_eval(step, {"pass@1": step / 7, "checkpoint": f"nano/rl@{step}", "split": "test"})
        samples = [{"problem": f"p{i}", "reward": i / 3, "completion": "é\n"} for i in range(30)]
        run.log_samples(step, samples)
    rows = [{"checkpoint": "a", "id": f"p{i}", "n": 8, "c": i % 9, "tiers": {"full": 8}} for i in range(60)]
    (run.path / "per_problem.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finish:
        run.finish({"test: nano/rl@3 - nano/sft@3": GAP} if stage == "evaluate" else {})


@pytest.fixture
def recipe(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with all stages finished and its data prepared; no rows came with the package."""
    monkeypatch.setattr(paths, "SHIPPED", runs_root)
    for stage in freeze_rows.STAGES:
        make_run(f"nano/{stage}")
    for data in freeze_rows.DATA:
        folder = runs_root / "data" / "nano" / data
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"what": data, "kept": {"calls": 3}}))
    return runs_root


def test_frozen_rows_are_those_of_the_live_runs(recipe: Path) -> None:
    freeze_rows.freeze("nano")
    for stage, tables in TABLES.items():
        for table in tables:
            live, kept = run_frames.stage_rows("nano", stage, table), run_frames.stage_rows("frozen", stage, table)
            where = f"{stage} {table}"
            pd.testing.assert_frame_equal(kept[list(live)], live, check_dtype=False, rtol=1e-6, obj=where)
    for source in ("nano", "frozen"):
        for data in freeze_rows.DATA:
            assert run_frames.manifest(source, data) == {"what": data, "kept": {"calls": 3}}
        assert run_frames.settings(source, "sft") == {"stage": "sft", "ks": [1, 8]}
    assert len(run_frames.stage_rows("frozen", "evaluate", "samples")) == 90, "every sample: checkpoints can be paired"


def test_of_other_seeds_the_result_is_kept_and_nothing_else(recipe: Path) -> None:
    make_run("nano/evaluate-s1")
    make_run("nano/evaluate-s2", finish=False)
    freeze_rows.freeze("nano")
    for source in ("nano", "frozen"):
        found = run_frames.seeds(source)
        assert found["run"].to_list() == ["nano/evaluate", "nano/evaluate-s1"]
        assert found[["value", "lo", "hi", "N"]].to_dict("records") == [GAP, GAP]
    assert set(run_frames.stage_rows("frozen", "evaluate", "evals")["run"]) == {"nano/evaluate"}


def test_nothing_is_frozen_from_runs_that_are_missing_or_not_finished(recipe: Path) -> None:
    (recipe / "data" / "nano" / "sft" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"manifest\.json"):
        freeze_rows.freeze("nano")
    with pytest.raises(MissingFile, match="other/pretrain"):
        freeze_rows.freeze("other")
    for stage in freeze_rows.STAGES:
        make_run(f"other/{stage}", finish=stage != "sft")
    with pytest.raises(RunError, match="other/sft"):
        freeze_rows.freeze("other")
    assert not (recipe / "reports").exists()
    with pytest.raises(MissingFile):
        run_frames.stage_rows("frozen", "sft", "metrics")


def test_the_committed_rows_serve_every_stage() -> None:
    folder = run_frames.frozen_dir()
    assert folder.parent.parent == paths.SHIPPED
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    for stage in freeze_rows.STAGES:
        assert run_frames.stage_rows("frozen", stage, "runs")["run"].iloc[0].endswith(f"/{stage}")
    for data in freeze_rows.DATA:
        assert run_frames.manifest("frozen", data)
