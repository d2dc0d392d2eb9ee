"""Figures: what they say and draw and that they are the same each time."""

from collections.abc import Callable

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from codechat_lab.reports import plots, style

STEPS = np.arange(1, 41)
PRETRAINING = pd.DataFrame(
    dict(step=STEPS, tokens=1000 * STEPS, train_loss=8 - STEPS / 10 + 0.1 * np.sin(STEPS))
)
BITS = pd.DataFrame(dict(step=[0, 20, 40], val_bpb=[4.0, 3.0, 2.0]))
LOSSES = pd.DataFrame(
    {"step": [0, 1, 2], "heldout_loss/code": [3.0, 2.0, 1.5], "heldout_loss/calls": [3.0, 2, 1]}
)
RL = pd.DataFrame(
    dict(
        step=STEPS,
        reward_mean=0.6 + STEPS / 200,
        exact_match=0.4 + STEPS / 200,
        frac_zero_std_groups=0.3,
        weights_changed_bf16=0.1,
    )
)
SCORES = {
    "pass@1": [0.4, 0.5, 0.6],
    "pass@1/lo": [0.3, 0.4, 0.5],
    "pass@1/hi": [0.6, 0.7, 0.8],
    "reward_mean": [0.4, 0.5, 0.6],
    "reward_mean/lo": [0.3, 0.4, 0.5],
    "reward_mean/hi": [0.6, 0.7, 0.8],
}
RL_EVALS = pd.DataFrame({"step": [0, 20, 40], "n_samples": 8, "n_problems": 64} | SCORES)


def pretraining() -> Figure:
    return plots.pretraining("nano/pretrain", PRETRAINING, BITS)


def rl_progress() -> Figure:
    return plots.rl_progress("nano/rl", RL, RL_EVALS, "the reward rises")


def heldout_losses() -> Figure:
    return plots.heldout_losses("nano/sft", LOSSES)


def group_signal() -> Figure:
    return plots.group_signal("nano/rl", RL)


@pytest.mark.parametrize("figure", [pretraining, heldout_losses, rl_progress, group_signal])
def test_every_figure_states_a_finding(figure: Callable[[], Figure]) -> None:
    assert len(figure().get_suptitle()) > 15


def test_a_figure_drawn_again_has_the_same_bytes() -> None:
    assert pretraining()._repr_png_() == pretraining()._repr_png_()


def test_the_finding_of_pretraining_is_its_loss_in_bits() -> None:
    assert "4.00 to 2.00 bits" in pretraining().get_suptitle()


def test_the_finding_of_group_signal_is_the_share_of_groups_that_teach() -> None:
    assert "70% of groups" in group_signal().get_suptitle()


def test_the_finding_of_held_out_losses_names_the_domains_that_end_above_their_lowest() -> None:
    assert "no domain" in heldout_losses().get_suptitle()
    worse = LOSSES.assign(**{"heldout_loss/code": [3.0, 2.0, 2.5]})
    assert "code ends above" in plots.heldout_losses("nano/sft", worse).get_suptitle()


def test_the_bars_of_a_score_are_its_interval() -> None:
    (bars,) = rl_progress().axes[1].collections
    drawn = [segment[:, 1].tolist() for segment in bars.get_segments()]
    intervals = zip(SCORES["pass@1/lo"], SCORES["pass@1/hi"], strict=True)
    assert drawn == [pytest.approx(list(interval)) for interval in intervals]


def test_stages_have_colours_and_seeds_differ_by_dashes() -> None:
    assert style.colour_of("a/rl") == style.colour_of("b/rl-s1@20")
    assert style.colour_of("a/rl") != style.colour_of("a/sft")
    assert style.dash_of("a/rl") != style.dash_of("a/rl-s1")


def test_a_run_is_named_in_words() -> None:
    assert style.label_of_run("nano/v5-sft-s1@240") == "v5 SFT, seed 1, step 240"


def test_the_look_of_a_figure_stays_in_the_figure() -> None:
    before = dict(matplotlib.rcParams)
    fig, axes = style.new_figure("title", cols=2)
    style.finish(axes[0, 0], x="tokens", y=style.label_of("train_loss"))
    assert dict(matplotlib.rcParams) == before
    assert not axes[0, 1].spines["top"].get_visible()


def test_a_note_says_how_many_seeds_are_drawn() -> None:
    fig, axes = style.new_figure("title")
    note = style.seeds_note(["a/rl", "a/rl-s1"])
    style.finish(axes[0, 0], x="tokens", y=style.label_of("train_loss"), note=note)
    assert axes[0, 0].texts[0].get_text() == "n = 2 seeds, each drawn"
