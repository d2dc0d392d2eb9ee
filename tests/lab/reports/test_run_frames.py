"""Frames of runs: which runs a report may rest on, frozen rows that are those of the live runs,
comparisons over seeds, published figures apart."""

import json
import random
from itertools import product
from pathlib import Path

import freeze_rows
import pandas as pd
import pytest
from counterfactuals import SwapsConfig
from raising import raising

from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.registry import COMMANDS
from codechat.runs import paths
from codechat.runs.run import Run
from codechat_lab.reports import run_frames

EVALUATION = dict(
    task="funcall",
    data_dir="d",
    split=["test"],
    limit=9,
    n=8,
    ks=[1, 8],
    temperature=1.0,
    top_k=None,
    max_new_tokens=64,
    probe_examples=32,
)
TABLES = dict(
    pretrain=("runs", "metrics", "evals"),
    rl=("runs", "metrics", "samples"),
    evaluate=("runs", "evals", "per_problem", "samples"),
)
GAP = {"value": 0.1, "lo": 0.05, "hi": 0.15, "N": 60}


def evaluated(name: str, checkpoints: tuple[str, ...], **changed: object) -> str:
    """A finished evaluation with a row per checkpoint and split."""
    settings = EVALUATION | {"ckpt": list(checkpoints)} | changed
    with Run.create(name, settings, kind="evaluate") as run:
        for checkpoint in checkpoints:
            for split in settings["split"]:
                run.log_eval(1, {"checkpoint": checkpoint, "split": split, "pass@1": 0.5})
    return name


def make_stage(name: str, *, finish: bool = True) -> None:
    """A run with a few rows of every kind."""
    stage = name.rpartition("/")[2].partition("-")[0]
    run = Run.create(name, {"stage": stage, "ks": [1, 8]}, kind=stage)
    for step in (1, 2, 3):
        run.log(step, train_loss=1 / (3 * step), lr=1e-3)
        run.log_eval(step, {"pass@1": step / 7, "checkpoint": f"nano/rl@{step}", "split": "test"})
        run.log_samples(
            step,
            [
                {"problem": f"p{i}", "reward": i / 3, "completion": 'é\n<a> | "b`'}
                for i in range(30)
            ],
        )
    rows = [
        {"checkpoint": "a", "id": f"p{i}", "n": 8, "c": i % 9, "tiers": {"full": 8}}
        for i in range(60)
    ]
    (run.path / "per_problem.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finish:
        run.finish({"test: nano/rl@3 - nano/sft@3": GAP} if stage == "evaluate" else {})


@pytest.fixture
def recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with all stages finished and its data prepared; no rows came with the package."""
    monkeypatch.setattr(paths, "SHIPPED", home)
    for stage in freeze_rows.STAGES:
        make_stage(f"nano/{stage}")
    for data in freeze_rows.DATA:
        folder = home / "data" / "nano" / data
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"what": data, "kept": {"calls": 3}}))
    return home


def test_runs_are_compared_whatever_their_seed_and_only_if_they_were_evaluated_alike(
    home: Path,
) -> None:
    names = [
        evaluated("a/evaluate", ("a/rl@60",), seed=0),
        evaluated("b/evaluate", ("b/rl@40",), seed=1),
    ]
    assert list(run_frames.collect(names)["runs"]["run"]) == names
    changed = dict(temperature=0.7, n=4, split=["test_hard"], limit=None, data_dir="other")
    for setting, value in changed.items():
        other = evaluated(f"{setting}/evaluate", ("b/rl@40",), **{setting: value})
        with raising(RunError, "a/evaluate", other, setting, str(value), str(EVALUATION[setting])):
            run_frames.collect(["a/evaluate", other])
    for kind in run_frames.COMPARED.keys() - {"anatomy"}:  # which is written by a tool
        settings = SwapsConfig if kind == "swaps" else COMMANDS[kind].config_class
        assert set(run_frames.COMPARED[kind]) <= settings.__dataclass_fields__.keys(), kind


def test_no_checkpoint_may_be_chosen_on_test_and_none_trained_again_since(home: Path) -> None:
    evaluated("scores", ("a/sft@9", "a/rl@20", "a/rl@40"))
    with raising(RunError, "scores", "a/rl", "--split select"):
        run_frames.collect(["scores"])
    evaluated("curve", ("a/rl@20", "a/rl@40"), split=["select"])
    run_frames.collect(["curve"])
    with Run.create("a/rl", {}, kind="reinforce"):
        pass
    evaluated("a/choose", ("a/rl",), split=["select"], all_checkpoints=True)
    scores = evaluated("a/evaluate", ("a/rl@best", "gone"))
    run_frames.collect([scores])
    evaluated("a/rechoose", ("a/rl",), split=["test"], all_checkpoints=True)
    with pytest.raises(RunError, match="a/evaluate.* a/rechoose .*test"):
        run_frames.collect([scores])
    status = home / "runs" / "a" / "rl" / "status.json"
    status.write_text(
        json.dumps(json.loads(status.read_text()) | {"started": "2999-01-01T00:00:00+00:00"})
    )
    with raising(RunError, "a/evaluate", "a/rl", "2999"):
        run_frames.collect([scores])


def test_no_report_rests_on_runs_that_did_not_end_and_siblings_are_the_finished_seeds(
    home: Path,
) -> None:
    run = Run.create("nano/cut", {"a": 1}, kind="sft")
    with pytest.raises(RunError):
        run_frames.collect(["nano/cut"])
    run.stop("interrupted at step 3")
    with raising(RunError, "nano/cut", 3, "--resume"):
        run_frames.collect(["nano/cut"])
    with pytest.raises(MissingFile):
        run_frames.collect(["nano/nowhere"])
    for seed in ("", "-s2", "-s10"):
        Run.create(f"nano/evaluate{seed}", {}, kind="evaluate").finish()
    Run.create("nano/evaluate-s3", {}, kind="evaluate")
    names = [Run.open(run).name for run in run_frames.seeds_of("nano/evaluate")]
    assert names == ["nano/evaluate", "nano/evaluate-s2", "nano/evaluate-s10"]


def test_a_report_without_runs_draws_from_frozen_rows(
    home: Path, capsys: pytest.CaptureFixture
) -> None:
    name = evaluated("a/evaluate", ("a/rl@60",))
    data = home / "data"
    with pytest.raises(MissingFile):
        run_frames.gather([name], data, frozen=True)
    kept = run_frames.gather(
        [name],
        data,
        False,
        lambda frames: frames | {"samples": frames["samples"][:0]},
    )
    pd.testing.assert_frame_equal(
        run_frames.gather([name], data, frozen=True)["evals"], kept["evals"]
    )
    assert run_frames.gather(["gone/evaluate"], data, False)["evals"].equals(kept["evals"])
    assert "none of the runs is on this machine" in capsys.readouterr().out
    with pytest.raises(MissingFile):  # some of them are here: nothing old is mixed in
        run_frames.gather([name, "gone/evaluate"], data, False)
    large = kept | {"samples": pd.DataFrame([dict(run=name, completion="x" * 1_000_000)])}
    with pytest.raises(ConfigError):
        run_frames.freeze(large, home / "large")
    assert not (home / "large").exists()
    # what a report says must follow from its rows
    run_frames.headline({"gain": 0.0512345, "n": 3}, data)
    run_frames.gather([name], data, frozen=True)
    run_frames.headline({"gain": 0.0512349, "n": 3}, data)
    for numbers in (
        {"gain": 0.0513, "n": 3},
        {"gain": 0.05123},
        {"gain": 0.05123, "n": 3, "more": 1},
    ):
        with pytest.raises(RunError):
            run_frames.headline(numbers, data)
    run_frames.gather([name], data, False)  # new rows, new headline
    run_frames.headline({"gain": 0.9}, data)


def test_counts_of_several_samplings_are_frozen_as_one_row_a_problem(tmp_path: Path) -> None:
    """Read back they are the same rows in the same order, also where a run lacks a sampling or
    a problem its cluster."""
    samplings = (("x", "T=1", 4), ("x", "greedy", 1), ("y", "greedy", 1))
    order = product("xy", ("sft", "rl"), ("test", "test_hard"), samplings, range(3))
    rows = [
        dict(
            run=run,
            checkpoint=c,
            split=t,
            sampling=s,
            id=f"{t}-{i}",
            n=n,
            c=i % 2,
            cluster="a" if i else None,
        )
        for of, c, t, (run, s, n), i in order
        if run == of
    ]
    counts = pd.DataFrame(rows)
    some = pd.DataFrame({"run": ["x"]})
    frames = {"runs": some, "metrics": some, "evals": some, "per_problem": counts}
    found = run_frames.freeze(frames, tmp_path)["per_problem"][list(counts)]
    assert len((tmp_path / "per_problem.csv").read_text().splitlines()) == 1 + 2 * 2 * 2 * 3
    known = [
        frame.astype(object).where(frame.notna(), None).values.tolist() for frame in (found, counts)
    ]
    assert known[0] == known[1]


def test_the_frozen_rows_of_a_recipe_are_those_of_its_runs_and_of_other_seeds_the_result(
    recipe: Path,
) -> None:
    make_stage("nano/evaluate-s1")
    make_stage("nano/evaluate-s2", finish=False)
    freeze_rows.freeze("nano")
    for stage, tables in TABLES.items():
        for table in tables:
            live, kept = (
                run_frames.stage_rows(source, stage, table) for source in ("nano", "frozen")
            )
            pd.testing.assert_frame_equal(
                kept[list(live)],
                live,
                check_dtype=False,
                rtol=1e-6,
                obj=f"{stage} {table}",
            )
    for source in ("nano", "frozen"):
        for data in freeze_rows.DATA:
            assert run_frames.manifest(source, data) == {"what": data, "kept": {"calls": 3}}
        assert run_frames.settings(source, "sft") == {"stage": "sft", "ks": [1, 8]}
        found = run_frames.seeds(source)
        assert found["run"].to_list() == ["nano/evaluate", "nano/evaluate-s1"]
        assert found[["value", "lo", "hi", "N"]].to_dict("records") == [GAP, GAP]
    assert len(run_frames.stage_rows("frozen", "evaluate", "samples")) == 90, (
        "every sample: checkpoints can be paired"
    )


def test_nothing_is_frozen_from_runs_that_are_missing_or_not_finished(recipe: Path) -> None:
    (recipe / "data" / "nano" / "sft" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"manifest\.json"):
        freeze_rows.freeze("nano")
    with pytest.raises(MissingFile, match="other/pretrain"):
        freeze_rows.freeze("other")
    for stage in freeze_rows.STAGES:
        make_stage(f"other/{stage}", finish=stage != "sft")
    with pytest.raises(RunError, match="other/sft"):
        freeze_rows.freeze("other")
    assert not (recipe / "reports").exists()
    with pytest.raises(MissingFile):
        run_frames.stage_rows("frozen", "sft", "metrics")


def test_the_committed_rows_serve_every_stage() -> None:
    folder = run_frames.frozen_dir()
    assert folder.parent.parent == paths.SHIPPED
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 1_000_000
    for stage in freeze_rows.STAGES:
        assert run_frames.stage_rows("frozen", stage, "runs")["run"].iloc[0].endswith(f"/{stage}")
    assert all(run_frames.manifest("frozen", data) for data in freeze_rows.DATA)
    # published figures cannot be stacked under measured ones
    assert all(column.endswith(" (published)") for column in run_frames.published("rl_train"))


def test_seeds_are_pooled_by_the_bootstrap_over_seeds_and_problems() -> None:
    rng = random.Random(0)
    rows = []
    for seed, share in enumerate((0.1, 0.5, 0.9)):
        # the seeds share half of their problems or more
        for i in range(50 * seed, 50 * seed + 200):
            hits = dict(a=0, b=int(rng.random() < share))
            rows += [
                dict(run=f"s{seed}", checkpoint=c, split="test", id=str(i), n=1, c=hits[c])
                for c in hits
            ]
    found = run_frames.paired_gains({"per_problem": pd.DataFrame(rows)}, ["s0", "s1", "s2"], "test")
    assert [round(g.value, 1) for g in found.seeds] == [0.1, 0.5, 0.9]
    assert found.all.value == pytest.approx(sum(g.value for g in found.seeds) / 3)
    assert found.all.lo < 0.25 and found.all.hi > 0.75, (
        "the seeds differ by far more than their problems say"
    )
    assert max(g.hi - g.lo for g in found.seeds) < 0.15
    assert [*run_frames.gain_table({"x": found})["name"]] == [
        "x, seed 0",
        "x, seed 1",
        "x, seed 2",
        "x, 3 seeds",
    ]
    # the first and the last checkpoint are paired, on one split
    order = product((("sft", 0), ("mid", 0), ("rl", 1)), ("test", "select"), "0123")
    rows = [dict(run="e", checkpoint=c, split=s, id=i, n=2, c=hits) for (c, hits), s, i in order]
    frames = {"per_problem": pd.DataFrame(rows)}
    assert run_frames.paired_gains(frames, ["e"], "test").all.value == pytest.approx(0.5)
    assert run_frames.paired_gains(frames, ["e"], "test", k=2).seeds[0].value == 1
    with pytest.raises(MissingFile):
        run_frames.paired_gains(frames, ["other"], "test")


def test_strata_pool_their_seeds_and_draw_tools_together() -> None:
    solved = []
    evals = []
    for seed, step in ((0, 1), (0, 2), (1, 1), (1, 2)):
        run = dict(run=f"r/evaluate-s{seed}", checkpoint=f"m-s{seed}@{step}", sampling="greedy")
        evals.append(run | {"tool/named_right": 0.2 + 0.4 * seed, "tool/n": 8})
        for i in range(8):  # at step 1 one tool is always correct and one never
            solved.append(
                run | dict(n=1, id=f"p-0-tool-{i}", c=int(step == 2 or i < 4), cluster=f"t{i // 4}")
            )
    frames = dict(per_problem=pd.DataFrame(solved), evals=pd.DataFrame(evals))
    found = run_frames.strata_over_seeds(frames, ["r/evaluate-s0", "r/evaluate-s1"], ["tool"])
    assert list(found["checkpoint"]) == ["m-s0@1", "m-s0@2"]
    assert list(found["tool/pass@1"]) == [0.5, 1.0]
    first = found.iloc[0]  # two tools are drawn, not eight requests
    assert (first["tool/pass@1/lo"], first["tool/pass@1/hi"]) == (0.0, 1.0)
    assert first["tool/named_right"] == pytest.approx(0.4)
    assert first["tool/n"] == 8
