"""Figures: what they say and draw and that they are the same each time."""

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from codechat.evaluation.intervals import bootstrap_interval
from codechat.reports import plots, style
from codechat.runs import paths
from codechat.runs.run import Run
from codechat.tasks.funcall import TIERS


def make_runs(rng: np.random.Generator) -> None:
    for stage, height in (("pretrain", 8), ("sft", 5)):
        with Run.create(f"nano/{stage}", {"lr": 1}, kind=stage) as run:
            for step in range(0, 41, 10):
                losses = {"heldout_loss/calls": 5 - step / 10, "heldout_loss/code": 4 - step / 40}
                bits = {"val_loss": 8 - step / 10, "val_bpb": 4 - step / 20}
                run.log_eval(step, bits if stage == "pretrain" else losses)
            for step in range(1, 41):
                loss = height - step / 10 + rng.normal(0, 0.1)
                run.log(step, tokens=step * 1000, train_loss=loss, lr=1e-3, tok_per_s=9000 + step)
    with Run.create("nano/rl", {"lr": 3}, kind="reinforce") as run:
        for step in range(0, 41, 20):
            hits = rng.random(64) < 0.4 + step / 200
            scores = bootstrap_interval(hits).row("pass@1") | bootstrap_interval(0.5 + hits / 2).row("reward_mean")
            run.log_eval(step, {"n_samples": 8, "n_problems": 64, "temperature": 1.0} | scores)
        for step in range(1, 41):
            share = {"reward_mean": 0.6 + step / 200, "exact_match": 0.4 + step / 200, "frac_zero_std_groups": 0.3}
            run.log(step, share | {"weights_changed_bf16": 0.1})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with finished runs."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", folder)
        make_runs(np.random.default_rng(0))
    return folder


@pytest.fixture(autouse=True)
def in_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ROOT", root)


def frames_of(stage: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    run = Run.open(f"nano/{stage}")
    return run.metrics(), run.evals()


def test_every_figure_states_a_finding_that_follows_from_the_data() -> None:
    (pre, pre_evals), (_, sft_evals), (rl, rl_evals) = map(frames_of, ("pretrain", "sft", "rl"))
    figures = [
        plots.pretraining("nano/pretrain", pre, pre_evals),
        plots.heldout_losses("nano/sft", sft_evals),
        plots.rl_progress("nano/rl", rl, rl_evals, "the reward rises"),
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
