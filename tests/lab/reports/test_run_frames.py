"""Frames of runs: which runs a report may rest on, frozen rows that are those of the live runs,
comparisons over seeds, published figures apart."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import freeze_rows
import jsonl
import pandas as pd
import pytest
from counterfactuals import SwapsConfig
from raising import raising

from codechat.core.errors import MissingFile, RunError
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


def evaluated(
    name: str, checkpoints: tuple[str, ...], changed: dict[str, object] | None = None
) -> str:
    """A finished evaluation with a row per checkpoint and split."""
    settings = EVALUATION | {"ckpt": list(checkpoints)} | (changed or {})
    with Run.create(name, settings, kind="evaluate") as run:
        for checkpoint in checkpoints:
            for split in settings["split"]:
                run.log_eval(1, {"checkpoint": checkpoint, "split": split, "pass@1": 0.5})
    return name


ON_SELECT = {"split": ["select"]}


SAMPLES = [{"problem": f"p{i}", "reward": i / 3, "completion": 'é\n<a> | "b`'} for i in range(30)]
COUNTS = [
    {"checkpoint": "a", "id": f"p{i}", "n": 8, "c": i % 9, "tiers": {"full": 8}} for i in range(60)
]


def make_stage(name: str, *, finish: bool = True) -> None:
    """A run with a few rows of every kind."""
    stage = name.rpartition("/")[2].partition("-")[0]
    run = Run.create(name, {"stage": stage, "ks": [1, 8]}, kind=stage)
    for step in (1, 2, 3):
        run.log(step, train_loss=1 / (3 * step), lr=1e-3)
        run.log_eval(step, {"pass@1": step / 7, "checkpoint": f"nano/rl@{step}", "split": "test"})
        run.log_samples(step, SAMPLES)
    jsonl.write(run.path / "per_problem.jsonl", COUNTS)
    if finish:
        run.finish({"test: nano/rl@3 - nano/sft@3": GAP} if stage == "evaluate" else {})


def prepare(root: Path) -> None:
    """All stages of a recipe finished and its data prepared."""
    for stage in freeze_rows.STAGES:
        make_stage(f"nano/{stage}")
    for data in freeze_rows.DATA:
        folder = root / "data" / "nano" / data
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"what": data, "kept": {"calls": 3}}))


@pytest.fixture
def recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a finished recipe; no rows came with the package."""
    monkeypatch.setattr(paths, "SHIPPED", home)
    prepare(home)
    return home


def test_runs_are_compared_whatever_their_seed() -> None:
    names = [
        evaluated("a/evaluate", ("a/rl@60",), {"seed": 0}),
        evaluated("b/evaluate", ("b/rl@40",), {"seed": 1}),
    ]
    assert list(run_frames.collect(names)["runs"]["run"]) == names


@pytest.mark.parametrize(
    "setting, value",
    [
        ("temperature", 0.7),
        ("n", 4),
        ("split", ["test_hard"]),
        ("limit", None),
        ("data_dir", "other"),
    ],
)
def test_runs_are_compared_only_if_they_were_evaluated_alike(setting: str, value: object) -> None:
    evaluated("a/evaluate", ("a/rl@60",))
    evaluated("b/evaluate", ("b/rl@40",), {setting: value})
    usual = str(EVALUATION[setting])
    with raising(RunError, "a/evaluate", "b/evaluate", setting, str(value), usual):
        run_frames.collect(["a/evaluate", "b/evaluate"])


# anatomy is written by a tool
@pytest.mark.parametrize("kind", sorted(run_frames.COMPARED.keys() - {"anatomy"}))
def test_the_settings_that_are_compared_are_settings_of_the_command(kind: str) -> None:
    settings = SwapsConfig if kind == "swaps" else COMMANDS[kind].config_class
    assert set(run_frames.COMPARED[kind]) <= settings.__dataclass_fields__.keys()


def test_several_checkpoints_of_a_run_are_not_evaluated_on_test() -> None:
    evaluated("scores", ("a/sft@9", "a/rl@20", "a/rl@40"))
    with raising(RunError, "scores", "a/rl", "--split select"):
        run_frames.collect(["scores"])


def test_several_checkpoints_of_a_run_are_evaluated_on_select() -> None:
    evaluated("curve", ("a/rl@20", "a/rl@40"), ON_SELECT)
    run_frames.collect(["curve"])


@pytest.fixture
def chosen(home: Path) -> str:
    """An evaluation of the best checkpoint of a/rl, which was chosen on select."""
    Run.create("a/rl", {}, kind="reinforce").finish()
    evaluated("a/choose", ("a/rl",), ON_SELECT | {"all_checkpoints": True})
    return evaluated("a/evaluate", ("a/rl@best", "gone"))


def test_a_checkpoint_chosen_on_select_may_be_reported(chosen: str) -> None:
    run_frames.collect([chosen])


def test_no_checkpoint_may_be_chosen_on_test(chosen: str) -> None:
    evaluated("a/rechoose", ("a/rl",), {"split": ["test"], "all_checkpoints": True})
    with pytest.raises(RunError, match="a/evaluate.* a/rechoose .*test"):
        run_frames.collect([chosen])


def test_no_evaluation_of_a_run_that_was_trained_again_since_is_reported(
    home: Path, chosen: str
) -> None:
    path = home / "runs" / "a" / "rl" / "status.json"
    status = json.loads(path.read_text())
    path.write_text(json.dumps(status | {"started": "2999-01-01T00:00:00+00:00"}))
    with raising(RunError, "a/evaluate", "a/rl", "2999"):
        run_frames.collect([chosen])


def test_no_report_rests_on_a_run_that_runs() -> None:
    Run.create("nano/cut", {"a": 1}, kind="sft")
    with pytest.raises(RunError):
        run_frames.collect(["nano/cut"])


def test_no_report_rests_on_a_run_that_was_stopped() -> None:
    Run.create("nano/cut", {"a": 1}, kind="sft").stop("interrupted at step 3")
    with raising(RunError, "nano/cut", 3, "--resume"):
        run_frames.collect(["nano/cut"])


def test_a_run_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MissingFile):
        run_frames.collect(["nano/nowhere"])


def test_the_seeds_of_a_run_are_its_finished_siblings() -> None:
    for seed in ("", "-s2", "-s10"):
        Run.create(f"nano/evaluate{seed}", {}, kind="evaluate").finish()
    Run.create("nano/evaluate-s3", {}, kind="evaluate")
    names = [Run.open(run).name for run in run_frames.seeds_of("nano/evaluate")]
    assert names == ["nano/evaluate", "nano/evaluate-s2", "nano/evaluate-s10"]


NAME = "a/evaluate"


def without_samples(frames: run_frames.Frames) -> run_frames.Frames:
    return frames | {"samples": frames["samples"][:0]}


@pytest.fixture
def data(home: Path) -> Path:
    """A folder for frozen rows; there is a run."""
    evaluated(NAME, ("a/rl@60",))
    return home / "data"


@pytest.fixture
def kept(data: Path) -> run_frames.Frames:
    """The rows of the run, which are frozen."""
    return run_frames.gather([NAME], data, False, without_samples)


def test_rows_that_were_never_frozen_are_an_error(data: Path) -> None:
    with pytest.raises(MissingFile):
        run_frames.gather([NAME], data, frozen=True)


def test_frozen_rows_are_those_of_the_runs(data: Path, kept: run_frames.Frames) -> None:
    frozen = run_frames.gather([NAME], data, frozen=True)
    pd.testing.assert_frame_equal(frozen["evals"], kept["evals"])


def test_a_report_without_runs_draws_from_frozen_rows_and_says_so(
    data: Path, kept: run_frames.Frames, capsys: pytest.CaptureFixture
) -> None:
    found = run_frames.gather(["gone/evaluate"], data, False)
    assert found["evals"].equals(kept["evals"])
    assert "none of the runs is on this machine" in capsys.readouterr().out


def test_frozen_rows_are_not_mixed_with_those_of_some_of_the_runs(
    data: Path, kept: run_frames.Frames
) -> None:
    with pytest.raises(MissingFile):
        run_frames.gather([NAME, "gone/evaluate"], data, False)


def test_a_long_run_has_a_bounded_number_of_rows_and_keeps_its_last_and_its_rare_values(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_frames, "CURVE_ROWS", 10)
    evaluated(NAME, ("a/rl@60",))
    rows = [{"step": i, "loss": 1 / i} | ({"kl": i} if i == 57 else {}) for i in range(1, 98)]
    jsonl.write(paths.find_run(NAME) / "metrics.jsonl", rows)
    metrics = run_frames.collect([NAME])["metrics"]
    assert len(metrics) == 10
    assert metrics["step"].is_monotonic_increasing and metrics["step"].iloc[-1] == 97
    assert metrics["kl"].dropna().tolist() == [57]
    assert metrics["step"][metrics["kl"].notna()].item() >= 57


HEADLINE = {"gain": 0.0512345, "n": 3}


def test_a_headline_that_follows_from_the_frozen_rows_may_be_said_again(
    data: Path, kept: run_frames.Frames
) -> None:
    """But for what another machine rounds otherwise."""
    run_frames.headline(HEADLINE, data)
    run_frames.gather([NAME], data, frozen=True)
    run_frames.headline({"gain": 0.0512349, "n": 3}, data)


@pytest.mark.parametrize(
    "numbers",
    [{"gain": 0.0513, "n": 3}, {"gain": 0.05123}, {"gain": 0.05123, "n": 3, "more": 1}],
    ids=["other", "fewer", "more"],
)
def test_a_headline_that_does_not_follow_from_the_frozen_rows_is_refused(
    numbers: dict[str, float], data: Path, kept: run_frames.Frames
) -> None:
    run_frames.headline(HEADLINE, data)
    run_frames.gather([NAME], data, frozen=True)
    with pytest.raises(RunError):
        run_frames.headline(numbers, data)


def test_new_rows_have_a_new_headline(data: Path, kept: run_frames.Frames) -> None:
    run_frames.headline(HEADLINE, data)
    run_frames.gather([NAME], data, False)
    run_frames.headline({"gain": 0.9}, data)


def counts_of(run: str, sampling: str, n: int) -> list[dict[str, Any]]:
    """Rows of three problems, two checkpoints and two splits; the first problem has no cluster."""
    return [
        {
            "run": run,
            "checkpoint": checkpoint,
            "split": split,
            "sampling": sampling,
            "id": f"{split}-{i}",
            "n": n,
            "c": i % 2,
            "cluster": "a" if i else None,
        }
        for checkpoint, split, i in product(("sft", "rl"), ("test", "test_hard"), range(3))
    ]


@pytest.fixture
def frozen_counts(tmp_path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Counts of two samplings of a run and of one of another; and as they are read back."""
    rows = [*counts_of("x", "T=1", 4), *counts_of("x", "greedy", 1), *counts_of("y", "greedy", 1)]
    # as an evaluation writes them: a checkpoint's and a split's samplings together
    rows.sort(key=lambda row: (row["run"], row["checkpoint"] == "rl", row["split"]))
    counts = pd.DataFrame(rows)
    some = pd.DataFrame({"run": ["x"]})
    frames = {"runs": some, "metrics": some, "evals": some, "per_problem": counts}
    return counts, run_frames.freeze(frames, tmp_path)["per_problem"]


def test_counts_of_several_samplings_are_frozen_as_one_row_a_problem(
    frozen_counts: tuple[pd.DataFrame, pd.DataFrame], tmp_path: Path
) -> None:
    lines = (tmp_path / "per_problem.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 2 * 3


def test_frozen_counts_are_read_back_in_their_order(
    frozen_counts: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    """Also where a run lacks a sampling or a problem its cluster."""
    counts, found = frozen_counts
    assert values(found[list(counts)]) == values(counts)


def values(frame: pd.DataFrame) -> list[list[Any]]:
    """Rows with None for what is missing."""
    return frame.astype(object).where(frame.notna(), None).values.tolist()


@pytest.fixture(scope="module")
def frozen_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a finished recipe whose rows are frozen, with those of another seed and
    without those of one that runs."""
    root = tmp_path_factory.mktemp("frozen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        patch.setattr(paths, "SHIPPED", root)
        prepare(root)
        make_stage("nano/evaluate-s1")
        make_stage("nano/evaluate-s2", finish=False)
        freeze_rows.freeze("nano")
    return root


@pytest.fixture
def frozen(frozen_root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's runs and frozen rows are found."""
    monkeypatch.setattr(paths, "ROOT", frozen_root)
    monkeypatch.setattr(paths, "SHIPPED", frozen_root)


@pytest.mark.parametrize(
    "stage, table", [(stage, table) for stage in TABLES for table in TABLES[stage]]
)
def test_the_frozen_rows_of_a_recipe_are_those_of_its_runs(
    stage: str, table: str, frozen: None
) -> None:
    live = run_frames.stage_rows("nano", stage, table)
    kept = run_frames.stage_rows("frozen", stage, table)
    pd.testing.assert_frame_equal(kept[list(live)], live, check_dtype=False, rtol=1e-6)


SOURCES = pytest.mark.parametrize("source", ["nano", "frozen"])


@SOURCES
def test_a_recipe_and_its_frozen_rows_have_manifests_and_settings(
    source: str, frozen: None
) -> None:
    for data in freeze_rows.DATA:
        assert run_frames.manifest(source, data) == {"what": data, "kept": {"calls": 3}}
    assert run_frames.settings(source, "sft") == {"stage": "sft", "ks": [1, 8]}


@SOURCES
def test_a_recipe_and_its_frozen_rows_have_the_results_of_other_finished_seeds(
    source: str, frozen: None
) -> None:
    found = run_frames.seeds(source)
    assert found["run"].to_list() == ["nano/evaluate", "nano/evaluate-s1"]
    assert found[["value", "lo", "hi", "N"]].to_dict("records") == [GAP, GAP]


def test_every_sample_of_an_evaluation_is_frozen_so_that_checkpoints_can_be_paired(
    frozen: None,
) -> None:
    assert len(run_frames.stage_rows("frozen", "evaluate", "samples")) == 90


def test_nothing_is_frozen_without_the_manifest_of_the_data(recipe: Path) -> None:
    (recipe / "data" / "nano" / "sft" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"manifest\.json"):
        freeze_rows.freeze("nano")
    assert not (recipe / "reports").exists()


def test_nothing_is_frozen_from_runs_that_are_missing(recipe: Path) -> None:
    with pytest.raises(MissingFile, match="other/pretrain"):
        freeze_rows.freeze("other")
    assert not (recipe / "reports").exists()


def test_nothing_is_frozen_from_runs_that_are_not_finished(recipe: Path) -> None:
    for stage in freeze_rows.STAGES:
        make_stage(f"other/{stage}", finish=stage != "sft")
    with pytest.raises(RunError, match="other/sft"):
        freeze_rows.freeze("other")
    assert not (recipe / "reports").exists()


def test_frozen_rows_that_are_not_there_are_an_error(recipe: Path) -> None:
    with pytest.raises(MissingFile):
        run_frames.stage_rows("frozen", "sft", "metrics")


@pytest.mark.parametrize("stage", freeze_rows.STAGES)
def test_the_committed_rows_serve_every_stage(stage: str) -> None:
    assert run_frames.stage_rows("frozen", stage, "runs")["run"].iloc[0].endswith(f"/{stage}")


@pytest.mark.parametrize("data", freeze_rows.DATA)
def test_the_committed_rows_have_the_manifest_of_every_data(data: str) -> None:
    assert run_frames.manifest("frozen", data)


def test_the_committed_rows_come_with_the_package_and_are_small() -> None:
    folder = run_frames.frozen_dir()
    assert folder.parent.parent == paths.SHIPPED
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 1_000_000


def test_published_figures_cannot_be_stacked_under_measured_ones() -> None:
    published = run_frames.published("rl_train")
    assert all(column.endswith(" (published)") for column in published)


SEEDS = ["s0", "s1", "s2"]
GAINS = (0.1, 0.5, 0.9)


def count(run: str, checkpoint: str, split: str, id: object, n: int, c: int) -> dict[str, Any]:
    """A row of a problem's counts: c of n samples are correct."""
    return {"run": run, "checkpoint": checkpoint, "split": split, "id": str(id), "n": n, "c": c}


@pytest.fixture(scope="module")
def pooled() -> run_frames.Gains:
    """Three seeds that differ by far more than their problems say and share half of these or
    more: from nothing right at a to 0.1, 0.5 and 0.9 at b."""
    rng = random.Random(0)
    rows = []
    for seed, (run, gain) in enumerate(zip(SEEDS, GAINS, strict=True)):
        for i in range(50 * seed, 50 * seed + 200):
            rows.append(count(run, "a", "test", i, 1, 0))
            rows.append(count(run, "b", "test", i, 1, int(rng.random() < gain)))
    return run_frames.paired_gains({"per_problem": pd.DataFrame(rows)}, SEEDS, "test")


def test_the_gain_over_seeds_is_the_mean_of_theirs(pooled: run_frames.Gains) -> None:
    assert tuple(round(gain.value, 1) for gain in pooled.seeds) == GAINS
    assert pooled.all.value == pytest.approx(sum(gain.value for gain in pooled.seeds) / 3)


def test_the_interval_over_seeds_holds_their_difference(pooled: run_frames.Gains) -> None:
    """A bootstrap over seeds and problems; one over problems alone would be narrow."""
    assert max(gain.hi - gain.lo for gain in pooled.seeds) < 0.15
    assert pooled.all.lo < 0.25
    assert pooled.all.hi > 0.75


def test_a_table_of_gains_has_a_row_for_each_seed_and_one_for_all(
    pooled: run_frames.Gains,
) -> None:
    names = list(run_frames.gain_table({"x": pooled})["name"])
    assert names == ["x, seed 0", "x, seed 1", "x, seed 2", "x, 3 seeds"]


@pytest.fixture
def three_checkpoints() -> run_frames.Frames:
    """Of which only the last is ever right, in one of two samples, on two splits."""
    rows = [
        count("e", checkpoint, split, i, 2, correct)
        for checkpoint, correct in (("sft", 0), ("mid", 0), ("rl", 1))
        for split in ("test", "select")
        for i in range(4)
    ]
    return {"per_problem": pd.DataFrame(rows)}


@pytest.mark.parametrize("k, gain", [(1, 0.5), (2, 1.0)])
def test_the_first_and_the_last_checkpoint_are_paired(
    k: int, gain: float, three_checkpoints: run_frames.Frames
) -> None:
    found = run_frames.paired_gains(three_checkpoints, ["e"], "test", k=k)
    assert found.all.value == pytest.approx(gain)
    assert found.seeds[0].value == pytest.approx(gain)


def test_a_run_without_counts_cannot_be_paired(three_checkpoints: run_frames.Frames) -> None:
    with pytest.raises(MissingFile):
        run_frames.paired_gains(three_checkpoints, ["other"], "test")


@pytest.fixture(scope="module")
def strata() -> pd.DataFrame:
    """The table of two seeds with two checkpoints. Eight requests use two tools: at step 1 one
    tool is always correct and one never, at step 2 both are."""
    solved = []
    evals = []
    for seed, step in product((0, 1), (1, 2)):
        run = {
            "run": f"r/evaluate-s{seed}",
            "checkpoint": f"m-s{seed}@{step}",
            "sampling": "greedy",
        }
        evals.append(run | {"tool/named_right": 0.2 + 0.4 * seed, "tool/n": 8})
        for i in range(8):
            request = {"n": 1, "id": f"p-0-tool-{i}", "cluster": f"t{i // 4}"}
            solved.append(run | request | {"c": int(step == 2 or i < 4)})
    frames = {"per_problem": pd.DataFrame(solved), "evals": pd.DataFrame(evals)}
    runs = ["r/evaluate-s0", "r/evaluate-s1"]
    return run_frames.strata_over_seeds(frames, runs, ["tool"])


def test_strata_pool_their_seeds(strata: pd.DataFrame) -> None:
    assert list(strata["checkpoint"]) == ["m-s0@1", "m-s0@2"]
    assert list(strata["tool/pass@1"]) == [0.5, 1.0]


def test_the_interval_of_a_stratum_draws_the_requests_of_a_tool_together(
    strata: pd.DataFrame,
) -> None:
    """Two tools are drawn, not eight requests."""
    assert strata["tool/pass@1/lo"][0] == 0.0
    assert strata["tool/pass@1/hi"][0] == 1.0


def test_other_columns_of_a_stratum_are_means_over_seeds(strata: pd.DataFrame) -> None:
    assert strata["tool/named_right"][0] == pytest.approx(0.4)
    assert strata["tool/n"][0] == 8
