"""Figures of runs that several notebooks and reports share: functions from DataFrames to a
`Figure`.

A metrics frame is what `Run.metrics()` returns (a row per logged step); an evaluation frame is
what `Run.evals()` returns. A title states the finding."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from codechat.evaluation import intervals
from codechat_lab.instruments import behaviour_probes
from codechat_lab.reports import style
from codechat_lab.reports.style import Plot, finish, new_figure


def pretraining(run: str, metrics: pd.DataFrame, evals: pd.DataFrame) -> Plot:
    """Left: training loss over tokens. Right: validation bits per byte."""
    known = metrics[metrics["tokens"].notna()]
    points = evals[evals["val_bpb"].notna()]
    bpb = points["val_bpb"]
    # evaluations count steps
    tokens = np.interp(points["step"], [0, *known["step"]], [0, *known["tokens"]])
    total = EngFormatter(sep="", places=1).format_data(metrics["tokens"].max())
    title = (
        f"{run}: {bpb.iloc[0]:.2f} to {bpb.iloc[-1]:.2f} bits "
        f"per byte of unseen code after {total} tokens"
    )
    fig, axes = new_figure(title, cols=2)
    left, right = axes[0]
    colour = style.colour_of(run)
    style.draw_smoothed(
        left, metrics["tokens"], metrics["train_loss"], colour=colour, label="training"
    )
    finish(left, x="tokens", y=style.label_of("train_loss"))
    right.plot(tokens, bpb, "o-", color=colour, markersize=4, linewidth=1.2)
    finish(right, x="tokens", y=style.label_of("val_bpb"), note=style.seeds_note([run]))
    return fig


def heldout_losses(run: str, evals: pd.DataFrame) -> Plot:
    """Held-out loss of each domain over the steps; the loss of a domain that is being
    overwritten rises."""
    losses = {
        column.partition("/")[2]: evals[column].dropna()
        for column in evals
        if column.startswith("heldout_loss/")
    }
    risen = [domain for domain, loss in losses.items() if loss.iloc[-1] > loss.min() * 1.02]
    finding = "no domain's held-out loss ends above its lowest"
    if risen:
        finding = f"{', '.join(risen)} ends above its lowest held-out loss"
    fig, axes = new_figure(f"{run}: {finding}")
    ax = axes[0, 0]
    # unreadable on white
    colours = [colour for name, colour in style.OKABE_ITO.items() if name != "yellow"]
    for (domain, loss), colour, marker in zip(losses.items(), colours, "os^Dv<>"):
        steps = evals["step"][loss.index]
        ax.plot(steps, loss, label=domain, marker=marker, markersize=4, color=colour, linewidth=1.4)
    finish(ax, x="step", y=style.label_of("heldout_loss/*"), note=style.seeds_note([run]))
    return fig


def rl_progress(run: str, metrics: pd.DataFrame, evals: pd.DataFrame, title: str) -> Plot:
    """Reward and exact match of the rollouts over RL steps; evaluations on held-out problems as
    points with 95 % intervals."""
    fig, axes = new_figure(title, cols=2, sharey=True)
    for ax, y, eval_y in zip(axes[0], ("reward_mean", "exact_match"), ("reward_mean", "pass@1")):
        style.draw_smoothed(
            ax, metrics["step"], metrics[y], colour=style.colour_of(run), label="rollouts"
        )
        rows = evals[evals[eval_y].notna()]
        first = rows.iloc[0]
        ax.errorbar(
            rows["step"],
            rows[eval_y],
            np.nan_to_num(style.errors_of(rows, eval_y)),
            label=f"validation (N={first['n_problems']:.0f}, n={first['n_samples']:.0f}, 95 %)",
            fmt="o",
            color=style.OKABE_ITO["black"],
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            capsize=2.5,
            linewidth=1.1,
            zorder=5,
        )
        ax.set_ylim(0, 1)
        finish(ax, x="step", y=style.label_of(y), loc="lower right")
    style.add_note(axes[0, 1], style.seeds_note([run]))
    return fig


def group_signal(run: str, metrics: pd.DataFrame) -> Plot:
    """Does the optimizer receive a signal? Left: share of groups with variance. Right: share of
    weights whose bf16 value changed."""
    live = 1 - metrics["frac_zero_std_groups"]
    moved = metrics["weights_changed_bf16"]
    title = (
        f"{run}: {live.mean():.0%} of groups have a gradient, a "
        f"step moves {moved.median():.1%} of weights"
    )
    fig, axes = new_figure(title, cols=2)
    left, right = axes[0]
    steps = metrics["step"]
    colour = style.colour_of(run)
    style.draw_smoothed(left, steps, live, colour=colour, label=run)
    for level, name in ((0.05, "DEAD below"), (0.25, "WEAK below")):
        left.axhline(level, color=style.GREY, linestyle="--", linewidth=0.9)
        left.text(steps.max(), level + 0.01, name, ha="right", fontsize=7, color=style.GREY)
    left.set_ylim(0, 1)
    finish(left, x="step", y="groups with variance (share)")
    style.draw_smoothed(right, steps, moved, colour=colour, label=run)
    right.set_ylim(bottom=0)
    note = style.seeds_note([run])
    finish(right, x="step", y=style.label_of("weights_changed_bf16"), note=note, legend=False)
    return fig


def tier_colours(count: int) -> list[Any]:
    """From worst to best: an ordered map that is read without colour vision."""
    return [matplotlib.colormaps["cividis"](x) for x in np.linspace(0, 1, count)]


def tiers_on_validation(
    evals: Mapping[str, pd.DataFrame], tiers: Sequence[str], title: str
) -> Plot:
    """Shares of the reward's tiers on the same validation problems at each evaluation, a panel
    per run, the worst tier at the bottom."""
    fig, axes = new_figure(title, cols=len(evals), size=(7.6, 3.4), sharey=True)
    for ax, (run, frame) in zip(axes[0], evals.items()):
        steps = [f"{step:g}" for step in frame["step"]]
        shares = frame.reindex(columns=[f"tier/{tier}" for tier in tiers]).fillna(0.0).to_numpy().T
        bottom = np.zeros(len(frame))
        for tier, colour, share in zip(tiers, tier_colours(len(tiers)), shares):
            ax.bar(steps, share, 0.85, bottom=bottom, color=colour, label=style.label_of_tier(tier))
            bottom = bottom + share
        ax.set_title(
            f"{style.label_of_run(run)}, N={int(frame['n_problems'].iloc[0])}",
            fontsize=8.5,
            loc="left",
        )
        finish(ax, x="step", y=None, legend=False)
    axes[0, 0].set_ylabel("answers to validation problems (share)")
    style.outer_legend(fig, axes[0, 0], "outside right center", reverse=True)
    return fig


def differences(rows: pd.DataFrame, title: str) -> Plot:
    """Differences of shares in percentage points with 95 % intervals, a line each. rows: name,
    value, lo, hi."""
    fig, axes = new_figure(title, size=(6.4, 1.2 + 0.3 * len(rows)))
    ax = axes[0, 0]
    points = 100 * rows[["value", "lo", "hi"]]
    value = points["value"]
    ax.errorbar(
        value,
        range(len(rows)),
        xerr=[value - points["lo"], points["hi"] - value],
        fmt="o",
        color=style.OKABE_ITO["black"],
        capsize=3,
        markersize=4.5,
        linewidth=1.2,
    )
    ax.axvline(0, color=style.GREY, linestyle="--", linewidth=0.9)
    ax.set_yticks(range(len(rows)), list(rows["name"]))
    ax.invert_yaxis()
    ax.grid(False)
    finish(ax, x="difference (percentage points), 95 % intervals", y=None)
    return fig


# Places of the cells: row = what is asked for, column = which tools are there; code has no
# column of unfitting tools.
GRID = {
    "tool_with_tools": (0, 0),
    "tool_with_other_tools": (0, 1),
    "tool_without_tools": (0, 2),
    "code_with_tools": (1, 0),
    "code_without_tools": (1, 2),
}


def cell_in_words(cell: str) -> str:
    """A cell of the probes: "tool requested, with other tools"."""
    requested, _, present = cell.partition("_")
    return f"{requested} requested, {present.replace('_', ' ')}"


def draw_behaviour(
    ax: Axes,
    cells: Mapping[tuple[int, int], tuple[Mapping[str, Any], str]],
    text: str,
    fontsize: float,
) -> None:
    """A map of the shares of expected behaviour. cells: (row, column) -> evaluation and probed
    cell; a cell that was not probed stays empty.

    text: a format of expected, p, lo, hi and n."""
    share = np.full([1 + max(sides) for sides in zip(*cells)], np.nan)
    for (row, column), (rates, cell) in cells.items():
        n = int(rates.get(f"probe/{cell}/n", 0))
        if not n:
            continue
        expected = behaviour_probes.EXPECTED[cell]
        p = rates[f"probe/{cell}/{expected}"]
        interval = intervals.wilson_interval(round(p * n), n)
        words = text.format(expected=expected, p=p, lo=interval.lo, hi=interval.hi, n=n)
        colour = "black" if p > 0.55 else "white"
        ax.text(column, row, words, color=colour, ha="center", va="center", fontsize=fontsize)
        share[row, column] = p
    ax.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.grid(False)
    ax.spines[:].set_visible(False)
