"""Figures: what they say and draw and that they are the same each time."""

import matplotlib
import numpy as np
import pandas as pd
import pytest

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
    name + end: [0.4 + off, 0.5 + off, 0.6 + off]
    for name in ("pass@1", "reward_mean")
    for end, off in (("", 0.0), ("/lo", -0.1), ("/hi", 0.2))
}
RL_EVALS = pd.DataFrame(dict(step=[0, 20, 40], n_samples=8, n_problems=64, **SCORES))


def test_every_figure_states_a_finding_that_follows_from_the_data() -> None:
    figures = [
        plots.pretraining("nano/pretrain", PRETRAINING, BITS),
        plots.heldout_losses("nano/sft", LOSSES),
        plots.rl_progress("nano/rl", RL, RL_EVALS, "the reward rises"),
        plots.group_signal("nano/rl", RL),
    ]
    assert all(len(figure.get_suptitle()) > 15 for figure in figures)
    assert (
        figures[0]._repr_png_()
        == plots.pretraining("nano/pretrain", PRETRAINING, BITS)._repr_png_()
    )
    assert "4.00 to 2.00 bits" in figures[0].get_suptitle()
    assert "70% of groups" in figures[3].get_suptitle()
    assert "no domain" in figures[1].get_suptitle()
    worse = LOSSES.assign(**{"heldout_loss/code": [3.0, 2.0, 2.5]})
    assert "code ends above" in plots.heldout_losses("nano/sft", worse).get_suptitle()
    (bars,) = figures[2].axes[1].collections
    drawn = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert drawn == [
        pytest.approx([row["pass@1/lo"], row["pass@1/hi"]]) for _, row in RL_EVALS.iterrows()
    ]


def test_seeds_share_a_colour_and_differ_by_dashes_and_the_look_stays_in_the_figure() -> None:
    before = dict(matplotlib.rcParams)
    fig, axes = style.new_figure("title", cols=2)
    style.finish(
        axes[0, 0],
        x="tokens",
        y=style.label_of("train_loss"),
        note=style.seeds_note(["a/rl", "a/rl-s1"]),
    )
    assert dict(matplotlib.rcParams) == before
    assert not axes[0, 1].spines["top"].get_visible()
    assert style.colour_of("a/rl") == style.colour_of("b/rl-s1@20") != style.colour_of("a/sft")
    assert style.dash_of("a/rl") != style.dash_of("a/rl-s1")
    assert style.label_of_run("nano/v5-sft-s1@240") == "v5 SFT, seed 1, step 240"
    assert axes[0, 0].texts[0].get_text() == "n = 2 seeds, each drawn"
