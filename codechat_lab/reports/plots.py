"""Figures of runs that several notebooks and reports share: functions from DataFrames to a `Figure`.

A metrics frame is what `Run.metrics()` returns (a row per logged step); an evaluation frame is what `Run.evals()`
returns. A title states the finding."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from codechat.evaluation import behaviour_probes, intervals
from codechat_lab.reports import style
from codechat_lab.reports.style import Plot, finish, new_figure


def pretraining(run: str, metrics: pd.DataFrame, evals: pd.DataFrame) -> Plot:
    """Left: training loss over tokens. Right: validation bits per byte."""
    points = evals[evals["val_bpb"].notna()]
    known = metrics[metrics["tokens"].notna()]
    points = points.assign(tokens=np.interp(points["step"], [0, *known["step"]], [0, *known["tokens"]]))
    first = points["val_bpb"].iloc[0]
    last = points["val_bpb"].iloc[-1]
    total = EngFormatter(sep="", places=1).format_data(metrics["tokens"].max())
    title = f"{run}: {first:.2f} to {last:.2f} bits per byte of unseen code after {total} tokens"
    fig, axes = new_figure(title, cols=2)
    style.draw_smoothed(
        axes[0, 0],
        metrics["tokens"],
        metrics["train_loss"],
        colour=style.colour_of(run),
        label="training",
    )
    finish(axes[0, 0], x="tokens", y=style.label_of("train_loss"))
    axes[0, 1].plot(
        points["tokens"],
        points["val_bpb"],
        "o-",
        color=style.colour_of(run),
        markersize=4,
        linewidth=1.2,
    )
    finish(axes[0, 1], x="tokens", y=style.label_of("val_bpb"), note=style.seeds_note([run]))
    return fig


def heldout_losses(run: str, evals: pd.DataFrame) -> Plot:
    """Held-out loss of each domain over the steps; the loss of a domain that is being overwritten rises."""
    columns = [c for c in evals if c.startswith("heldout_loss/")]
    risen = [c.partition("/")[2] for c in columns if (v := evals[c].dropna()).iloc[-1] > v.min() * 1.02]
    said = (
        ", ".join(risen) + " ends above its lowest held-out loss"
        if risen
        else "no domain's held-out loss ends above its lowest"
    )
    fig, axes = new_figure(f"{run}: {said}")
    for column, colour, marker in zip(columns, [c for n, c in style.OKABE_ITO.items() if n != "yellow"], "os^Dv<>"):
        rows = evals[evals[column].notna()]
        name = column.partition("/")[2]
        look = dict(marker=marker, markersize=4, color=colour, linewidth=1.4)
        axes[0, 0].plot(rows["step"], rows[column], label=name, **look)
    finish(
        axes[0, 0],
        x="step",
        y=style.label_of("heldout_loss/*"),
        note=style.seeds_note([run]),
    )
    return fig


def rl_progress(run: str, metrics: pd.DataFrame, evals: pd.DataFrame, title: str) -> Plot:
    """Reward and exact match of the rollouts over RL steps; evaluations on held-out problems as points with 95 %
    intervals."""
    fig, axes = new_figure(title, cols=2, sharey=True)
    look = dict(
        fmt="o",
        color=style.OKABE_ITO["black"],
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )
    for ax, y, eval_y in zip(axes[0], ("reward_mean", "exact_match"), ("reward_mean", "pass@1")):
        style.draw_smoothed(
            ax,
            metrics["step"],
            metrics[y],
            colour=style.colour_of(run),
            label="rollouts",
        )
        rows = evals[evals[eval_y].notna()]
        how = f"N={rows['n_problems'].iloc[-1]:.0f}, n={rows['n_samples'].iloc[-1]:.0f}, 95 %"
        errors = np.nan_to_num(style.errors_of(rows, eval_y))
        label = f"validation ({how})"
        ax.errorbar(
            rows["step"],
            rows[eval_y],
            errors,
            capsize=2.5,
            linewidth=1.1,
            zorder=5,
            label=label,
            **look,
        )
        ax.set_ylim(0, 1)
        finish(ax, x="step", y=style.label_of(y), loc="lower right")
    style.add_note(axes[0, 1], style.seeds_note([run]))
    return fig


def group_signal(run: str, metrics: pd.DataFrame) -> Plot:
    """Does the optimizer receive a signal? Left: share of groups with variance. Right: share of weights whose bf16
    value changed."""
    live = metrics.assign(live=1 - metrics["frac_zero_std_groups"])
    moved = metrics["weights_changed_bf16"].median()
    title = f"{run}: {live['live'].mean():.0%} of groups have a gradient, a step moves {moved:.1%} of weights"
    fig, axes = new_figure(title, cols=2)
    style.draw_smoothed(
        axes[0, 0],
        live["step"],
        live["live"],
        colour=style.colour_of(run),
        label=run,
    )
    for level, name in ((0.05, "DEAD below"), (0.25, "WEAK below")):
        axes[0, 0].axhline(level, color=style.GREY, linestyle="--", linewidth=0.9)
        axes[0, 0].text(
            live["step"].max(),
            level + 0.01,
            name,
            ha="right",
            fontsize=7,
            color=style.GREY,
        )
    axes[0, 0].set_ylim(0, 1)
    finish(axes[0, 0], x="step", y="groups with variance (share)")
    style.draw_smoothed(
        axes[0, 1],
        metrics["step"],
        metrics["weights_changed_bf16"],
        colour=style.colour_of(run),
        label=run,
    )
    axes[0, 1].set_ylim(bottom=0)
    finish(
        axes[0, 1],
        x="step",
        y=style.label_of("weights_changed_bf16"),
        note=style.seeds_note([run]),
        legend=False,
    )
    return fig


def tier_colours(count: int) -> list[Any]:
    """From worst to best: an ordered map that is read without colour vision."""
    return [matplotlib.colormaps["cividis"](x) for x in np.linspace(0, 1, count)]


def tiers_on_validation(evals: Mapping[str, pd.DataFrame], tiers: Sequence[str], title: str) -> Plot:
    """Shares of the reward's tiers on the same validation problems at each evaluation, a panel per run, the worst
    tier at the bottom."""
    fig, axes = new_figure(title, cols=len(evals), size=(7.6, 3.4), sharey=True)
    for ax, (run, frame) in zip(axes[0], evals.items()):
        steps = [f"{step:g}" for step in frame["step"]]
        bottom = np.zeros(len(frame))
        for tier, colour in zip(tiers, tier_colours(len(tiers))):
            share = frame.get(f"tier/{tier}", pd.Series(0.0, index=frame.index)).fillna(0.0).to_numpy()
            ax.bar(steps, share, 0.85, bottom=bottom, color=colour, label=style.label_of_tier(tier))
            bottom = bottom + share
        ax.set_title(f"{style.label_of_run(run)}, N={int(frame['n_problems'].iloc[0])}", fontsize=8.5, loc="left")
        finish(
            ax,
            x="step",
            y="answers to validation problems (share)" if ax is axes[0, 0] else None,
            legend=False,
        )
    style.outer_legend(fig, axes[0, 0], "outside right center", reverse=True)
    return fig


def differences(rows: pd.DataFrame, title: str) -> Plot:
    """Differences of shares in percentage points with 95 % intervals, a line each. rows: name, value, lo, hi."""
    fig, axes = new_figure(title, size=(6.4, 1.2 + 0.3 * len(rows)))
    ax = axes[0, 0]
    points = 100 * rows[["value", "lo", "hi"]]
    error = [points["value"] - points["lo"], points["hi"] - points["value"]]
    look = dict(fmt="o", color=style.OKABE_ITO["black"], capsize=3, markersize=4.5, linewidth=1.2)
    ax.errorbar(points["value"], range(len(rows)), xerr=error, **look)
    ax.axvline(0, color=style.GREY, linestyle="--", linewidth=0.9)
    ax.set_yticks(range(len(rows)), list(rows["name"]))
    ax.invert_yaxis()
    ax.grid(False)
    finish(ax, x="difference (percentage points), 95 % intervals", y=None)
    return fig


# Places of the cells: row = what is asked for, column = which tools are there; code has no column of unfitting tools.
GRID = {
    "tool_with_tools": (0, 0),
    "tool_with_other_tools": (0, 1),
    "tool_without_tools": (0, 2),
    "code_with_tools": (1, 0),
    "code_without_tools": (1, 2),
}


def cell_in_words(cell: str) -> str:
    asked, _, present = cell.partition("_")
    return f"{asked} requested, {present.replace('_', ' ')}"


def draw_behaviour(
    ax: Axes,
    cells: Mapping[tuple[int, int], tuple[Mapping[str, Any], str]],
    text: str,
    fontsize: float,
) -> None:
    """A map of the shares of expected behaviour. cells: (row, column) -> evaluation and probed cell; one that was
    not probed stays empty.

    text: a format of expected, p, lo, hi and n."""
    share = np.full([1 + max(sides) for sides in zip(*cells)], np.nan)
    for at, (row, cell) in cells.items():
        if row.get(f"probe/{cell}/n", 0) > 0:
            n = int(row[f"probe/{cell}/n"])
            expected = behaviour_probes.EXPECTED[cell]
            p = row[f"probe/{cell}/{expected}"]
            shown = intervals.wilson_interval(round(p * n), n)
            look = dict(ha="center", va="center", fontsize=fontsize)
            words = text.format(expected=expected, p=p, lo=shown.lo, hi=shown.hi, n=n)
            ax.text(at[1], at[0], words, color="black" if p > 0.55 else "white", **look)
            share[at] = p
    ax.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.grid(False)
    ax.spines[:].set_visible(False)
