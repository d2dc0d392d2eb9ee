"""Figures and reports: what a figure says, that it is the same each time, and that a report rests on finished
runs."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from raising import raising

from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.evaluation.behaviour_probes import BEHAVIOURS, CELLS, EXPECTED
from codechat.evaluation.intervals import bootstrap_interval
from codechat.reports import build, html, notebooks, plots, run_frames
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


def draw(name: str) -> plots.Plot:
    """One figure of each kind, from the runs of `root`."""
    (pre, pre_evals), (sft, sft_evals), (rl, rl_evals) = map(frames_of, ("pretrain", "sft", "rl"))
    scores = frames_of("evaluate")[1]
    return {
        "pretraining": lambda: plots.pretraining("nano/pretrain", pre, pre_evals),
        "held_out": lambda: plots.heldout_losses("nano/sft", sft_evals),
        "rl": lambda: plots.rl_progress("nano/rl", rl, rl_evals),
        "staircase": lambda: plots.staircase({"none": (0, 0), "partial": (0.5, 0.9), "full": (1, 1)}),
        "signal": lambda: plots.group_signal("nano/rl", rl),
        "pass": lambda: plots.pass_at_k(scores, (1, 8)),
    }[name]()


KINDS = "pretraining held_out rl staircase signal pass".split()


@pytest.fixture(scope="module")
def figures(root: Path) -> dict[str, plots.Plot]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", root)
        return {name: draw(name) for name in KINDS}


# ---------------------------------------------------------------- figures


def test_every_figure_states_a_finding(figures: dict[str, plots.Plot]) -> None:
    assert {name: f.get_suptitle() for name, f in figures.items() if len(f.get_suptitle()) < 15} == {}


def test_a_saved_figure_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("rl", "pass"):  # lines and error bars
        first, second = (plots.save(draw(name), name, tmp_path / folder) and tmp_path / folder for folder in "ab")
        svg = (first / f"{name}.svg").read_bytes()
        assert svg == (second / f"{name}.svg").read_bytes() and b"<dc:date>" not in svg
        assert (first / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_titles_follow_the_data(figures: dict[str, plots.Plot]) -> None:
    assert "no domain" in figures["held_out"].get_suptitle()
    worse = pd.DataFrame({"step": [0, 1, 2], "heldout_loss/code": [3.0, 2.0, 2.5], "heldout_loss/calls": [3.0, 2, 1]})
    assert "code ends above" in plots.heldout_losses("nano/sft", worse).get_suptitle()


def test_evaluations_are_points_with_their_intervals(figures: dict[str, plots.Plot]) -> None:
    evals = frames_of("rl")[1]
    (bars,) = figures["rl"].axes[1].collections
    drawn = [tuple(np.round(s[:, 1], 6)) for s in bars.get_segments()]
    assert drawn == [tuple(np.round(r, 6)) for r in evals[["pass@1/lo", "pass@1/hi"]].to_numpy()]


def test_tiers_of_evaluations_are_stacked_to_one() -> None:
    evals = frames_of("rl")[1].assign(**{f"tier/{t}": 1 / len(TIERS) for t in TIERS})
    (ax,) = plots.tiers_on_validation({"nano/rl": evals}, TIERS, "tiers").axes
    tops = {}
    for bar in ax.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
    assert len(tops) == len(evals) and list(tops.values()) == pytest.approx([1.0] * len(evals))


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


def test_freezing_more_than_a_megabyte_raises_and_writes_nothing(tmp_path: Path) -> None:
    frames = run_frames.collect(["nano/rl"])
    frames["metrics"] = pd.concat([frames["metrics"]] * 300)
    with pytest.raises(ConfigError, match="1,000,000"):
        run_frames.freeze(frames, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_unfinished_runs_raise() -> None:
    run = Run.create("nano/cut", {"a": 1}, kind="sft")
    with pytest.raises(RunError, match="nano/cut"):
        run_frames.collect(["nano/pretrain", "nano/cut"])
    run.stop("interrupted at step 3")
    with raising(RunError, "nano/cut", 3, "--resume"):
        run_frames.collect(["nano/cut"])
    with pytest.raises(MissingFile):
        run_frames.collect(["nano/nowhere"])


def test_an_evaluation_of_weights_that_were_trained_again_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)

    def make(name: str, kind: str, hour: int, **config: object) -> None:
        with Run.create(name, config, kind=kind, overwrite=True) as run:
            run.log_eval(1, {"val_loss": 1.0})
        status = json.loads((run.path / "status.json").read_text())
        status["started"] = f"2026-01-01T{hour:02}:00:00+00:00"
        (run.path / "status.json").write_text(json.dumps(status))

    make("policy", "sft", 1)
    make("scores", "evaluate", 2, ckpt=["policy@best", "gone"])
    assert list(run_frames.collect(["scores"])["runs"]["run"]) == ["scores"]
    make("policy", "sft", 3)
    with pytest.raises(RunError, match="scores .* policy"):
        run_frames.collect(["scores"])


def test_siblings_are_the_finished_seeds() -> None:
    names = [run_frames.name_of(run) for run in run_frames.seeds_of("nano/evaluate")]
    assert names == ["nano/evaluate", "nano/evaluate-s1"]


def test_a_page_escapes_outputs_and_needs_nothing_else(tmp_path: Path) -> None:
    cells = [
        nbformat.v4.new_markdown_cell("# A `claim` holds\n\n<script>alert(1)</script>"),
        nbformat.v4.new_code_cell("print(1)"),
    ]
    cells[1].metadata["tags"] = ["headline"]
    cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="<i>1</i>\n"),
                        nbformat.v4.new_output("stream", name="stderr", text="50%|#####")]  # fmt: skip
    path = tmp_path / "x.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    text = html.write_page(path).read_text()
    assert "<script" not in text and "<i>" not in text and "50%" not in text and "&lt;i&gt;1" in text
    assert "<title>A claim holds</title>" in text and "viewport" in text and "prefers-color-scheme: dark" in text
    assert "http" not in text
    index = html.write_index(tmp_path / "reports" / "index.html", [path]).read_text()
    assert 'href="../x.html"' in index and "&lt;i&gt;1" in index


@pytest.fixture
def template(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The project's own template and parameters, over the runs of this test."""
    source = notebooks.SHIPPED
    monkeypatch.setattr(paths, "SHIPPED", root)
    for folder, name in (("nbs_py", "90_nano_report.py"), ("reports", "nano.yaml"), (".", "jupytext.toml")):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text((source / folder / name).read_text())
    return {"runs": str(root / "runs" / "nano")}


@pytest.mark.slow
def test_the_nano_report_is_executed_frozen_and_listed(root: Path, template: dict[str, object]) -> None:
    out = root / "runs" / "nano" / "report"
    page = build.build("nano", out, template).read_text()
    assert page.count("<img") == 7 and "data:image/png;base64" in page and "Traceback" not in page
    files = [root / "runs" / "nano" / f"evaluate{suffix}" / "per_problem.jsonl" for suffix in ("", "-s1")]
    rows = [json.loads(line) for file in files for line in file.open()]
    known = [row["c"] / 8 for row in rows if "/sft" in row["checkpoint"] and "-call-" in row["id"]]
    assert f"After SFT the model calls {sum(known) / len(known):.0%}" in page
    assert "RL adds +" in page and "2 seeds, paired by problem" in page
    assert {p.name for p in (out / "nano").iterdir()} == {"data", "figures"}
    assert len(list((out / "nano" / "figures").glob("*.svg"))) == 7
    assert sum(p.stat().st_size for p in (out / "nano" / "data").iterdir()) < run_frames.MAX_BYTES
    index = build.index()
    assert index == root / "reports" / "index.html"
    assert 'href="../runs/nano/report/nano.html"' in index.read_text() and index.read_text().count("<img") == 1


@pytest.mark.slow
def test_a_report_that_fails_says_where_and_why(root: Path, template: dict[str, object], tmp_path: Path) -> None:
    (root / "nbs_py" / "91_cut_report.py").write_text(
        '# %% tags=["parameters"]\nout = ""\n\n# %%\nraise KeyError("no such run")\n'
    )
    (root / "reports" / "cut.yaml").write_text("{}\n")
    with pytest.raises(RunError, match="cut.*3 of 3.*KeyError: 'no such run'"):
        build.build("cut", tmp_path)
    assert (tmp_path / "cut.ipynb").is_file() and not (tmp_path / "cut.html").exists()
