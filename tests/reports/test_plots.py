"""Figures and reports: what a figure says, that it is the same each time, and that a report rests on finished
runs."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from raising import raising

from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.evaluation.behaviour_probes import BEHAVIOURS, CELLS, EXPECTED
from codechat.evaluation.intervals import bootstrap_interval
from codechat.reports import build, plots, run_frames, style
from codechat.runs import paths
from codechat.runs.run import Run
from codechat.tasks.funcall.staircase import TIERS

STAGES = ("pretrain", "sft", "diagnose", "rl", "evaluate")


def probed(share: float, n: int = 20) -> dict[str, float]:
    """A row of behaviour probes in which `share` of each cell behaves as wanted and the rest does nothing."""
    row: dict[str, float] = {}
    for cell in CELLS:
        row |= dict.fromkeys((f"probe/{cell}/{b}" for b in BEHAVIOURS), 0.0)
        row |= {f"probe/{cell}/neither": 1 - share, f"probe/{cell}/n": n}
        row[f"probe/{cell}/{EXPECTED[cell]}"] = 1.0 if EXPECTED[cell] == "neither" else share
    return row


def with_interval(name: str, values: np.ndarray) -> dict[str, float]:
    found = bootstrap_interval(values)
    return {name: found.value, f"{name}/lo": found.lo, f"{name}/hi": found.hi}


def tier_row(full: float) -> dict[str, float]:
    return {f"tier/{t}": full if t == "full" else (1 - full) / (len(TIERS) - 1) for t in TIERS}


def make_training_runs(rng: np.random.Generator) -> None:
    for stage, height in (("pretrain", 8), ("sft", 5)):
        with Run.create(f"nano/{stage}", {"lr": 1}, kind=stage) as run:
            for step in range(0, 41, 10):
                losses = {"heldout_loss/calls": 5 - step / 10, "heldout_loss/code": 4 - step / 40} | probed(step / 50)
                bits = {"val_loss": 8 - step / 10, "val_bpb": 4 - step / 20}
                run.log_eval(step, bits if stage == "pretrain" else losses)
            for step in range(1, 41):
                loss = height - step / 10 + rng.normal(0, 0.1)
                run.log(step, tokens=step * 1000, train_loss=loss, lr=1e-3, tok_per_s=9000 + step)


def make_rl_runs(rng: np.random.Generator) -> None:
    counts = {"n_samples": 8, "n_problems": 64, "temperature": 1.0}
    with Run.create("nano/diagnose", {"groups": 64}, kind="diagnose") as run:
        verdict = {"verdict": "LIVE", "remedy": "go ahead with RL", "effective_groups": 50}
        run.log_eval(40, verdict | counts | tier_row(0.4))
    with Run.create("nano/rl", {"lr": 3}, kind="reinforce") as run:
        for step in range(0, 41, 20):
            hits = rng.random(64) < 0.4 + step / 200
            scores = with_interval("pass@1", hits) | with_interval("reward_mean", 0.5 + hits / 2)
            run.log_eval(step, counts | scores | tier_row(float(hits.mean())))
        for step in range(1, 41):
            share = 0.4 + step / 200
            row = {"reward_mean": share + 0.2, "exact_match": share, "frac_zero_std_groups": 0.3}
            run.log(step, row | {"weights_changed_bf16": 0.1} | tier_row(share))


STRATA = {
    "test": ("call", "chain_1", "chain_2", "unfitting", "no_tools", "code"),
    "test_hard": ("phrasing", "renamed", "tool"),
}
NAMED = ("no_call", "unreadable", "not_offered", "other", "right")


def by_stratum(split: str, skill: float) -> dict[str, float]:
    row: dict[str, float] = {}
    for stratum in STRATA[split]:
        row |= {f"{stratum}/n": 10, f"{stratum}/pass@1": skill}
        row |= {f"{stratum}/pass@1/lo": skill - 0.1, f"{stratum}/pass@1/hi": skill + 0.1}
        row |= {f"{stratum}/named_{what}": 0.2 for what in NAMED}
    return row


def make_evaluation(rng: np.random.Generator, suffix: str = "") -> None:
    text = 'a | b `c` <functioncall> {"name": "f"}\n<script>'
    with Run.create(f"nano/evaluate{suffix}", {"n": 8}, kind="evaluate") as run:
        rows = []
        for checkpoint, step, skill in ((f"nano/sft{suffix}@40", 40, 0.4), (f"nano/rl{suffix}@20", 20, 0.6)):
            for split, strata in STRATA.items():
                correct = rng.binomial(8, skill, 50)
                scores = with_interval("pass@1", correct / 8) | with_interval("pass@8", correct > 0)
                where = {"checkpoint": checkpoint, "split": split, "sampling": "greedy"}
                counts = {"n_samples": 8, "n_problems": 50, "temperature": 1.0}
                run.log_eval(step, where | counts | by_stratum(split, skill) | scores | probed(skill))
                for i, c in enumerate(correct.tolist()):
                    about = {
                        "id": f"reading-{split}-0-{strata[i % len(strata)]}-{i}",
                        "cluster": f"tool {i % 9}",
                        "n": 8,
                    }
                    rows.append(where | about | {"c": c, "reward_mean": c / 8, "tiers": {"full": c}})
                run.log_samples(step, [where | {"tier": "full", "request": "do", "completion": text}])
        (run.path / "per_problem.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with finished runs of every stage, made with the library's own Run."""
    folder, rng = tmp_path_factory.mktemp("project"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", folder)
        make_training_runs(rng)
        make_rl_runs(rng)
        make_evaluation(rng)
        make_evaluation(rng, "-s1")
    return folder


@pytest.fixture(autouse=True)
def in_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ROOT", root)


def frames_of(stage: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    run = Run.open(f"nano/{stage}")
    return run.metrics(), run.evals()


# ---------------------------------------------------------------- figures


def test_every_figure_states_a_finding_that_follows_from_the_data() -> None:
    (pre, pre_evals), (_, sft_evals), (rl, rl_evals) = map(frames_of, ("pretrain", "sft", "rl"))
    figures = [
        plots.pretraining("nano/pretrain", pre, pre_evals),
        plots.heldout_losses("nano/sft", sft_evals),
        plots.rl_progress("nano/rl", rl, rl_evals),
        plots.group_signal("nano/rl", rl),
    ]
    assert all(len(figure.get_suptitle()) > 15 for figure in figures)
    assert figures[0]._repr_png_() == plots.pretraining("nano/pretrain", pre, pre_evals)._repr_png_()
    assert "no domain" in figures[1].get_suptitle()
    worse = pd.DataFrame({"step": [0, 1, 2], "heldout_loss/code": [3.0, 2.0, 2.5], "heldout_loss/calls": [3.0, 2, 1]})
    assert "code ends above" in plots.heldout_losses("nano/sft", worse).get_suptitle()
    (bars,) = figures[2].axes[1].collections
    drawn = [tuple(np.round(s[:, 1], 6)) for s in bars.get_segments()]
    assert drawn == [tuple(np.round(r, 6)) for r in rl_evals[["pass@1/lo", "pass@1/hi"]].to_numpy()]


def test_tiers_of_evaluations_are_stacked_to_one() -> None:
    evals = frames_of("rl")[1].assign(**{f"tier/{t}": 1 / len(TIERS) for t in TIERS})
    (ax,) = plots.tiers_on_validation({"nano/rl": evals}, TIERS, "tiers").axes
    tops = {}
    for bar in ax.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
    assert len(tops) == len(evals) and list(tops.values()) == pytest.approx([1.0] * len(evals))


def test_seeds_share_a_colour_and_differ_by_dashes_and_the_look_stays_in_the_figure() -> None:
    before = dict(matplotlib.rcParams)
    fig, axes = style.new_figure("title", cols=2)
    style.finish(axes[0, 0], x="tokens", y=style.label_of("train_loss"), note=style.seeds_note(["a/rl", "a/rl-s1"]))
    assert dict(matplotlib.rcParams) == before and not axes[0, 1].spines["top"].get_visible()
    assert style.colour_of("a/rl") == style.colour_of("b/rl-s1@20") != style.colour_of("a/sft")
    assert style.dash_of("a/rl") != style.dash_of("a/rl-s1")
    assert style.label_of_run("nano/v5-sft-s1@240") == "v5 SFT, seed 1, step 240"
    assert axes[0, 0].texts[0].get_text() == "n = 2 seeds, each drawn"


# ---------------------------------------------------------------- reports


def test_frames_of_runs_are_frozen_and_read_back_as_they_were(tmp_path: Path) -> None:
    frames = run_frames.collect([f"nano/{s}" for s in STAGES])
    kept = run_frames.freeze(frames, tmp_path)
    for name, frame in run_frames.load_frozen(tmp_path).items():
        pd.testing.assert_frame_equal(frame, kept[name])
        assert list(frame) == list(frames[name]) and len(frame) == len(frames[name]), name
    original, frozen = (run_frames.rows_of(f["metrics"], "nano/pretrain") for f in (frames, kept))
    pd.testing.assert_frame_equal(original, frozen, check_dtype=False, rtol=1e-7)
    assert list(frozen) == ["run", "step", "tokens", "train_loss", "lr", "tok_per_s"]
    assert kept["per_problem"]["tiers"].iloc[0] == frames["per_problem"]["tiers"].iloc[0]


def test_more_than_a_megabyte_is_not_frozen_and_no_report_rests_on_runs_that_did_not_end(tmp_path: Path) -> None:
    frames = run_frames.collect(["nano/rl"])
    frames["metrics"] = pd.concat([frames["metrics"]] * 300)
    with pytest.raises(ConfigError):
        run_frames.freeze(frames, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    run = Run.create("nano/cut", {"a": 1}, kind="sft")
    with pytest.raises(RunError):
        run_frames.collect(["nano/pretrain", "nano/cut"])
    run.stop("interrupted at step 3")
    with raising(RunError, "nano/cut", 3, "--resume"):
        run_frames.collect(["nano/cut"])
    with pytest.raises(MissingFile):
        run_frames.collect(["nano/nowhere"])


def test_siblings_are_the_finished_seeds() -> None:
    names = [Run.open(run).name for run in run_frames.seeds_of("nano/evaluate")]
    assert names == ["nano/evaluate", "nano/evaluate-s1"]


@pytest.mark.slow
def test_the_nano_report_is_executed_frozen_and_listed_and_a_report_that_fails_says_where(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The project's own template over the runs of this test."""
    (root / "nbs_py").mkdir()
    for name in ("nbs_py/90_nano_report.py", "jupytext.toml"):
        (root / name).write_text((paths.SHIPPED / name).read_text())
    cut = '# %% tags=["parameters"]\nout = ""\n\n# %%\nraise KeyError("no such run")\n'
    (root / "nbs_py" / "91_cut_report.py").write_text(cut)
    monkeypatch.setattr(paths, "SHIPPED", root)
    monkeypatch.setattr(build, "templates", lambda: {"nano": "90_nano_report", "cut": "91_cut_report"})
    out = root / "runs" / "nano" / "report"
    page = build.build("nano", out, {"runs": str(root / "runs" / "nano")}).read_text()
    assert page.count("<img") == 7 and "data:image/png;base64" in page and "Traceback" not in page
    files = [root / "runs" / "nano" / f"evaluate{suffix}" / "per_problem.jsonl" for suffix in ("", "-s1")]
    rows = [json.loads(line) for file in files for line in file.open()]
    known = [row["c"] / 8 for row in rows if "/sft" in row["checkpoint"] and "-call-" in row["id"]]
    assert f"After SFT the model calls {sum(known) / len(known):.0%}" in page
    assert "RL adds +" in page and "2 seeds, paired by problem" in page
    assert {p.name for p in (out / "nano").iterdir()} == {"data", "strata.png"}
    assert sum(p.stat().st_size for p in (out / "nano" / "data").iterdir()) < run_frames.MAX_BYTES
    index = build.index()
    assert index == root / "reports" / "index.html"
    assert 'href="../runs/nano/report/nano.html"' in index.read_text() and index.read_text().count("<img") == 1
    with pytest.raises(RunError, match="cut.*3 of 3.*KeyError: 'no such run'"):
        build.build("cut", root / "cut")
    assert (root / "cut" / "cut.ipynb").is_file() and not (root / "cut" / "cut.html").exists()
