"""Every figure of runs and reports: functions from DataFrames to a `Figure`, by subject.

A metrics frame is what `Run.metrics()` returns (a row per logged step); an evaluation frame is what `Run.evals()` returns. A title states the finding;
most functions derive one from the data when none is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from codechat.evaluation.behaviour_probes import EXPECTED
from codechat.evaluation.intervals import wilson_interval
from codechat.reports.style import (
    GREY,
    OKABE_ITO,
    Plot,
    add_note,
    change,
    colour_of,
    draw_points,
    draw_smoothed,
    errors_of,
    finish,
    label_of,
    label_of_run,
    label_of_tier,
    new_figure,
    outer_legend,
    seeds_note,
)
from codechat.reports.style import save as save  # a notebook saves what it draws

SHAPE_COLOURS = {shape: OKABE_ITO[colour] for shape, colour in
                 dict(binary="black", fractional="sky", tiered="orange", staircase="green").items()}  # fmt: skip


# ---------------------------------------------------------------- training


def pretraining(run: str, metrics: pd.DataFrame, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Left: training loss over tokens. Right: validation bits per byte."""
    points, known = evals[evals["val_bpb"].notna()], metrics[metrics["tokens"].notna()]
    points = points.assign(tokens=np.interp(points["step"], [0, *known["step"]], [0, *known["tokens"]]))
    first, last = points["val_bpb"].iloc[0], points["val_bpb"].iloc[-1]
    total = EngFormatter(sep="", places=1).format_data(metrics["tokens"].max())
    default = f"{run}: {first:.2f} to {last:.2f} bits per byte of unseen code after {total} tokens"
    fig, axes = new_figure(title or default, cols=2)
    draw_smoothed(axes[0, 0], metrics["tokens"], metrics["train_loss"], colour=colour_of(run), label="training")
    finish(axes[0, 0], x="tokens", y=label_of("train_loss"))
    axes[0, 1].plot(points["tokens"], points["val_bpb"], "o-", color=colour_of(run), markersize=4, linewidth=1.2)
    finish(axes[0, 1], x="tokens", y=label_of("val_bpb"), note=seeds_note([run]))
    return fig


def heldout_losses(run: str, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Held-out loss of each domain over the steps; the loss of a domain that is being overwritten rises."""
    columns = [c for c in evals if c.startswith("heldout_loss/")]
    risen = [c.partition("/")[2] for c in columns if (v := evals[c].dropna()).iloc[-1] > v.min() * 1.02]
    finding = f"{', '.join(risen)} ends" if risen else "no domain's held-out loss ends"
    finding += " above its lowest held-out loss" if risen else " above its lowest"
    fig, axes = new_figure(title or f"{run}: {finding}")
    for column, colour, marker in zip(columns, [c for n, c in OKABE_ITO.items() if n != "yellow"], "os^Dv<>"):
        rows, name = evals[evals[column].notna()], column.partition("/")[2]
        style = dict(marker=marker, markersize=4, color=colour, linewidth=1.4)
        axes[0, 0].plot(rows["step"], rows[column], label=name, **style)
    finish(axes[0, 0], x="step", y=label_of("heldout_loss/*"), note=seeds_note([run]))
    return fig


# ---------------------------------------------------------------- rewards and tiers


def staircase(rewards: Mapping[str, tuple[float, float]], title: str | None = None) -> Plot:
    """Reward of each tier, (lowest, highest), from worst to best: a step for a fixed reward, a block for a range."""
    fig, axes = new_figure(title or f"a reward for each of {len(rewards)} tiers: partly correct answers differ")
    ax, colours = axes[0, 0], tier_colours(len(rewards))
    for i, (lo, hi) in enumerate(rewards.values()):
        ax.bar(i, hi, color=colours[i], width=0.9, alpha=0.35 if hi > lo else 1)
        ax.bar(i, lo, color=colours[i], width=0.9)
        ax.text(i, hi + 0.02, f"{lo:.2f}" if lo == hi else f"{lo:.2f} to {hi:.2f}", ha="center", fontsize=8)
    ax.set_xticks(range(len(rewards)), [name.replace("_", "\n") for name in rewards])
    ax.set_ylim(0, 1.1)
    ax.set_ylabel("reward", fontsize=8.5)
    return fig


def tier_colours(count: int) -> list[Any]:
    """From worst to best: an ordered map that is read without colour vision."""
    return [matplotlib.colormaps["cividis"](x) for x in np.linspace(0, 1, count)]


def tiers_on_validation(evals: Mapping[str, pd.DataFrame], tiers: Sequence[str], title: str) -> Plot:
    """Shares of the reward's tiers on the same validation problems at each evaluation, a panel per run, the worst tier
    at the bottom."""
    fig, axes = new_figure(title, cols=len(evals), size=(7.6, 3.4), sharey=True)
    for ax, (run, frame) in zip(axes[0], evals.items()):
        steps, bottom = [f"{step:g}" for step in frame["step"]], np.zeros(len(frame))
        for tier, colour in zip(tiers, tier_colours(len(tiers))):
            share = frame.get(f"tier/{tier}", pd.Series(0.0, index=frame.index)).fillna(0.0).to_numpy()
            ax.bar(steps, share, 0.85, bottom=bottom, color=colour, label=label_of_tier(tier))
            bottom = bottom + share
        ax.set_title(f"{label_of_run(run)}, N={int(frame['n_problems'].iloc[0])}", fontsize=8.5, loc="left")
        finish(ax, x="step", y="answers to validation problems (share)" if ax is axes[0, 0] else None, legend=False)
    outer_legend(fig, axes[0, 0], "outside right center", reverse=True)
    return fig


def stack_bars(ax: Axes, shares: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> None:
    """Horizontal bars, one beside the other; a share that is not known takes no room."""
    left = 0.0
    for name, values in shares.items():
        width = np.nan_to_num(np.array(values, dtype=float))
        ax.barh(range(len(width)), width, left=left, color=colours[name], label=name, height=0.75)
        left = left + width


# ---------------------------------------------------------------- RL over training


def rl_progress(run: str, metrics: pd.DataFrame, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Reward and exact match of the rollouts over RL steps, with the evaluations on held-out problems."""
    points = evals[evals["pass@1"].notna()] if "pass@1" in evals else evals[:0]
    default = f"{run}: {change(metrics, 'exact_match')} on rollouts"
    if len(points):
        default += f", {points['pass@1'].iloc[0]:.2f} to {points['pass@1'].iloc[-1]:.2f} on held-out problems"
    fig, axes = new_figure(title or default, cols=2, sharey=True)
    for ax, y, eval_y in zip(axes[0], ("reward_mean", "exact_match"), ("reward_mean", "pass@1")):
        draw_smoothed(ax, metrics["step"], metrics[y], colour=colour_of(run), label="rollouts")
        draw_points(ax, evals, eval_y, colour=OKABE_ITO["black"], label="validation")
        ax.set_ylim(0, 1)
        finish(ax, x="step", y=label_of(y), loc="lower right")
    add_note(axes[0, 1], seeds_note([run]))
    return fig


def group_signal(run: str, metrics: pd.DataFrame, title: str | None = None) -> Plot:
    """Does the optimizer receive a signal? Left: share of groups with variance. Right: share of weights whose bf16
    value changed."""
    live = metrics.assign(live=1 - metrics["frac_zero_std_groups"])
    moved = metrics["weights_changed_bf16"].median()
    default = f"{run}: {live['live'].mean():.0%} of groups have a gradient, a step moves {moved:.1%} of weights"
    fig, axes = new_figure(title or default, cols=2)
    draw_smoothed(axes[0, 0], live["step"], live["live"], colour=colour_of(run), label=run)
    for level, name in ((0.05, "DEAD below"), (0.25, "WEAK below")):
        axes[0, 0].axhline(level, color=GREY, linestyle="--", linewidth=0.9)
        axes[0, 0].text(live["step"].max(), level + 0.01, name, ha="right", fontsize=7, color=GREY)
    axes[0, 0].set_ylim(0, 1)
    finish(axes[0, 0], x="step", y="groups with variance (share)")
    draw_smoothed(axes[0, 1], metrics["step"], metrics["weights_changed_bf16"], colour=colour_of(run), label=run)
    axes[0, 1].set_ylim(bottom=0)
    finish(axes[0, 1], x="step", y=label_of("weights_changed_bf16"), note=seeds_note([run]), legend=False)
    return fig


# ---------------------------------------------------------------- evaluation


def pass_at_k(rows: pd.DataFrame, ks: Sequence[int], title: str | None = None) -> Plot:
    """Bars of pass@k with 95 % intervals: a panel per k, a group per split, a bar per checkpoint.

    rows: evaluations with checkpoint, split, n_problems, n_samples, temperature, and pass@k with /lo and /hi."""
    names, splits = list(dict.fromkeys(rows["checkpoint"])), list(dict.fromkeys(rows["split"]))
    fig, axes = new_figure(title or _pass_finding(rows, names, splits), cols=len(ks), sharey=True)
    counts, width = rows.groupby("split")["n_problems"].max(), 0.8 / len(names)
    for ax, k in zip(axes[0], ks):
        for i, name in enumerate(names):
            part = rows[rows["checkpoint"] == name].set_index("split").reindex(splits)
            at = np.arange(len(splits)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            error = dict(yerr=errors_of(part, f"pass@{k}"), capsize=3, error_kw=dict(linewidth=1))
            ax.bar(at, part[f"pass@{k}"], width, color=_bar_colour(name, names), label=name, **error)
            for x, value, top in zip(at, part[f"pass@{k}"], part[f"pass@{k}/hi"]):
                ax.text(x, top + 0.015, f"{value:.2f}", ha="center", fontsize=7.5)
        ax.set_xticks(range(len(splits)), [f"{s}\nN={int(counts[s])}" for s in splits])
        ax.set_title(f"pass@{k}", fontsize=9, loc="left")
        ax.set_ylim(0, 1.08)
    axes[0, 0].set_ylabel("share of problems", fontsize=8.5)
    n, temperature = int(rows["n_samples"].iloc[0]), rows["temperature"].iloc[0]
    note = f"n={n} samples, temperature {temperature:g}, 95 % intervals"
    outer_legend(fig, axes[0, -1], "outside lower center", ncols=len(names), title=note, title_fontsize=7.5)
    return fig


def _bar_colour(name: str, names: Sequence[str]) -> str:
    """The run's colour; earlier checkpoints of one run are paler."""
    same = [n for n in names if n.partition("@")[0] == name.partition("@")[0]]
    rgb = np.array(matplotlib.colors.to_rgb(colour_of(name)))
    return matplotlib.colors.to_hex(1 - (1 - rgb) * (0.4 + 0.6 * (same.index(name) + 1) / len(same)))


def _pass_finding(rows: pd.DataFrame, names: Sequence[str], splits: Sequence[str]) -> str:
    """pass@1 of the first and the last checkpoint on the split that is quoted."""
    split = "test" if "test" in splits else splits[0]
    scores = rows[rows["split"] == split].drop_duplicates("checkpoint").set_index("checkpoint")["pass@1"]
    if len(names) == 1:
        return f"{names[0]}: pass@1 {scores[names[0]]:.2f} on {split}"
    return f"pass@1 on {split}: {names[0]} {scores[names[0]]:.2f}, {names[-1]} {scores[names[-1]]:.2f}"


def strata(rows: pd.DataFrame, kinds: Mapping[str, str], title: str) -> Plot:
    """pass@1 of each stratum with 95 % intervals: a panel per checkpoint, a line per stratum, filled greedy, hollow at temperature 1.

    rows: evaluations with checkpoint, sampling, and STRATUM/pass@1 with /lo, /hi and STRATUM/n. kinds: {stratum: words}, from the top."""
    names = list(dict.fromkeys(rows["checkpoint"]))
    fig, axes = new_figure(title, cols=len(names), size=(8.6, 1.4 + 0.32 * len(kinds)), sharey=True)
    for ax, name in zip(axes[0], names):
        parts = rows[rows["checkpoint"] == name].groupby("sampling", sort=False)
        for shift, (sampling, part) in zip((-0.12, 0.12), parts):
            own = [part.dropna(subset=f"{stratum}/n").iloc[0] for stratum in kinds]
            ends = [[100 * row[f"{k}/pass@1{end}"] for row, k in zip(own, kinds)] for end in ("", "/lo", "/hi")]
            value, lo, hi = np.array(ends)
            look = dict(fmt="o", color=colour_of(name), capsize=2, markersize=4.5, linewidth=1, label=sampling)
            fill = colour_of(name) if sampling == "greedy" else "none"
            error = [(value - lo).clip(0), (hi - value).clip(0)]
            ax.errorbar(value, np.arange(len(kinds)) + shift, xerr=error, markerfacecolor=fill, **look)
        ax.set_title(label_of_run(name), fontsize=9, loc="left")
        ax.set_xlim(-2, 102)
        ax.set_xlabel("correct (%)", fontsize=8.5)
    counts = {k: int(rows[f"{k}/n"].dropna().iloc[0]) for k in kinds}
    axes[0, 0].set_yticks(range(len(kinds)), [f"{words}, N={counts[k]}" for k, words in kinds.items()])
    axes[0, 0].invert_yaxis()
    about = "95 % intervals over tools and seeds"
    outer_legend(fig, axes[0, -1], "outside lower center", ncols=2, title=about, title_fontsize=7.5)
    return fig


def differences(rows: pd.DataFrame, title: str) -> Plot:
    """Differences of shares in percentage points with 95 % intervals, a line each. rows: name, value, lo, hi."""
    fig, axes = new_figure(title, size=(6.4, 1.2 + 0.3 * len(rows)))
    ax, points = axes[0, 0], 100 * rows[["value", "lo", "hi"]]
    error = [points["value"] - points["lo"], points["hi"] - points["value"]]
    style = dict(fmt="o", color=OKABE_ITO["black"], capsize=3, markersize=4.5, linewidth=1.2)
    ax.errorbar(points["value"], range(len(rows)), xerr=error, **style)
    ax.axvline(0, color=GREY, linestyle="--", linewidth=0.9)
    ax.set_yticks(range(len(rows)), list(rows["name"]))
    ax.invert_yaxis()
    ax.grid(False)
    finish(ax, x="difference (percentage points), 95 % intervals", y=None)
    return fig


# ---------------------------------------------------------------- behaviour probes

# Places of the cells: row = what is asked for, column = which tools are there; code has no column of unfitting tools.
GRID = {"tool_with_tools": (0, 0), "tool_with_other_tools": (0, 1), "tool_without_tools": (0, 2),
         "code_with_tools": (1, 0), "code_without_tools": (1, 2)}  # fmt: skip


def cell_in_words(cell: str) -> str:
    asked, _, present = cell.partition("_")
    return f"{asked} requested, {present.replace('_', ' ')}"


def write_share(ax: Axes, row: Mapping[str, Any], cell: str, at: tuple[int, int], text: str, fontsize: float) -> float:
    """Write the share of expected behaviour into place (row, column) and return it; nan where the cell was not
    probed."""
    if not row.get(f"probe/{cell}/n", 0) > 0:
        return np.nan
    n, p = int(row[f"probe/{cell}/n"]), row[f"probe/{cell}/{EXPECTED[cell]}"]
    shown, colour = wilson_interval(round(p * n), n), "black" if p > 0.55 else "white"
    words = text.format(expected=EXPECTED[cell], p=p, lo=shown.lo, hi=shown.hi, n=n)
    ax.text(at[1], at[0], words, ha="center", va="center", fontsize=fontsize, color=colour)
    return p


def finish_heat(ax: Axes, share: np.ndarray) -> None:
    ax.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.grid(False)
    ax.spines[:].set_visible(False)
