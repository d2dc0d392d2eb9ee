"""Figures of rewards: the staircase, rollouts and evaluations over steps, tiers, what carries a gradient,
pass@k.

They belong to `plots`, which hands them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from codechat.reports.style import (
    GREY,
    OKABE_ITO,
    Plot,
    change,
    colour_of,
    draw_points,
    draw_smoothed,
    finish,
    first_and_last,
    label_of,
    new_figure,
    seeds_note,
    span_of,
)


def rl_progress(run: str, metrics: pd.DataFrame, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Reward and exact match of the rollouts over RL steps, with the evaluations on held-out problems."""
    points = evals[evals["pass@1"].notna()] if "pass@1" in evals else evals[:0]
    default = f"{run}: {change(metrics, 'exact_match')} on rollouts"
    if len(points):
        default += f", {points['pass@1'].iloc[0]:.2f} to {points['pass@1'].iloc[-1]:.2f} on held-out problems"
    fig, axes = new_figure(title or default, cols=2, sharey=True)
    for ax, y, eval_y in zip(axes[0], ("reward_mean", "exact_match"), ("reward_mean", "pass@1")):
        draw_smoothed(ax, metrics["step"], metrics[y], colour=colour_of(run), label="rollouts")
        draw_points(ax, evals, eval_y, colour=OKABE_ITO["black"], label="select")
        ax.set_ylim(0, 1)
        finish(ax, x="step", y=label_of(y), loc="lower right")
    axes[0, 1].text(
        1.0,
        -0.15,
        seeds_note([run]),
        transform=axes[0, 1].transAxes,
        ha="right",
        va="top",
        fontsize=7.5,
        color=GREY,
    )
    return fig


def tier_flow(run: str, metrics: pd.DataFrame, tiers: Sequence[str], title: str | None = None) -> Plot:
    """Stacked shares of the reward's rungs over the steps, the worst at the bottom."""
    shares = pd.DataFrame({t: metrics[f"tier/{t}"] if f"tier/{t}" in metrics else 0.0 for t in tiers}).fillna(0.0)
    smooth = shares.ewm(span=span_of(len(shares))).mean()
    a, b = first_and_last(metrics, f"tier/{tiers[-1]}")
    fig, axes = new_figure(title or f"{run}: {tiers[-1]} goes from {a:.0%} to {b:.0%} of rollouts")
    ax = axes[0, 0]
    ax.stackplot(
        metrics["step"],
        *[smooth[t] for t in tiers],
        labels=tiers,
        colors=tier_colours(len(tiers)),
        linewidth=0,
    )
    ax.set_ylim(0, 1)
    ax.margins(x=0)
    finish(
        ax,
        x="step",
        y=f"{label_of('tier/*').replace('tier/* ', 'rollouts ')}, smoothed",
        note=seeds_note([run]),
        legend=False,
    )
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8, frameon=False)
    return fig


def tier_colours(count: int) -> list[Any]:
    """From worst to best: an ordered map that is read without colour vision."""
    return [matplotlib.colormaps["cividis"](x) for x in np.linspace(0, 1, count)]


def staircase(rungs: Mapping[str, tuple[float, float]], title: str | None = None) -> Plot:
    """Reward of each rung, (lowest, highest) from worst to best: a step for a fixed reward, a block for a
    range."""
    fig, axes = new_figure(title or f"a reward for each of {len(rungs)} rungs: partly right answers differ")
    ax, colours = axes[0, 0], tier_colours(len(rungs))
    for i, (name, (lo, hi)) in enumerate(rungs.items()):
        ax.bar(i, hi, color=colours[i], width=0.9, alpha=0.35 if hi > lo else 1)
        ax.bar(i, lo, color=colours[i], width=0.9)
        ax.text(i, hi + 0.02, f"{lo:.2f}" if lo == hi else f"{lo:.2f} to {hi:.2f}", ha="center", fontsize=8)
    ax.set_xticks(range(len(rungs)), [name.replace("_", "\n") for name in rungs])
    ax.set_ylim(0, 1.1)
    ax.set_ylabel("reward", fontsize=8.5)
    return fig


def tier_histogram(row: Mapping[str, Any], tiers: Sequence[str], title: str | None = None) -> Plot:
    """Shares of the rungs in one diagnosis or evaluation, from its row, worst to best."""
    shares = [float(row[f"tier/{t}"]) for t in tiers]
    counts = f"N={int(row['n_problems'])}, n={int(row['n_samples'])}, temperature {row['temperature']:g}"
    verdict = f"{row['verdict']}: " if isinstance(row.get("verdict"), str) else ""
    fig, axes = new_figure(title or f"{verdict}{shares[-1]:.0%} of completions are right, {counts}")
    ax = axes[0, 0]
    ax.barh(range(len(tiers)), shares, color=tier_colours(len(tiers)), height=0.8)
    for i, share in enumerate(shares):
        ax.text(share + 0.01, i, f"{share:.1%}", va="center", fontsize=8)
    ax.set_yticks(range(len(tiers)), tiers)
    ax.set_xlim(0, 1)
    ax.grid(False)
    finish(ax, x="completions (share)", y=None, legend=False)
    return fig


def group_signal(run: str, metrics: pd.DataFrame, title: str | None = None) -> Plot:
    """Share of groups with a gradient and share of weights whose bf16 value each step changed: is the
    optimiser told anything?"""
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


def pass_at_k(rows: pd.DataFrame, ks: Sequence[int], title: str | None = None) -> Plot:
    """Bars of pass@k with 95 % intervals: a panel per k, a group per split, a bar per checkpoint. rows:
    evaluations with checkpoint, split, n_problems, n_samples, temperature and pass@k with /lo and /hi."""
    names, splits = list(dict.fromkeys(rows["checkpoint"])), list(dict.fromkeys(rows["split"]))
    fig, axes = new_figure(title or pass_finding(rows, names, splits), cols=len(ks), sharey=True)
    for ax, k in zip(axes[0], ks):
        for i, name in enumerate(names):
            part = rows[rows["checkpoint"] == name].set_index("split").reindex(splits)
            at = np.arange(len(splits)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            error = np.abs(part[[f"pass@{k}/lo", f"pass@{k}/hi"]].to_numpy().T - part[f"pass@{k}"].to_numpy())
            ax.bar(
                at,
                part[f"pass@{k}"],
                0.8 / len(names),
                yerr=error,
                color=bar_colour(name, names),
                capsize=3,
                error_kw=dict(linewidth=1),
                label=name,
            )
            for x, value, top in zip(at, part[f"pass@{k}"], part[f"pass@{k}/hi"]):
                ax.text(x, top + 0.015, f"{value:.2f}", ha="center", fontsize=7.5)
        counts = rows.groupby("split")["n_problems"].max()
        ax.set_xticks(range(len(splits)), [f"{s}\nN={int(counts[s])}" for s in splits])
        ax.set_title(f"pass@{k}", fontsize=9, loc="left")
        ax.set_ylim(0, 1.08)
    axes[0, 0].set_ylabel("share of problems", fontsize=8.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    n, temperature = int(rows["n_samples"].iloc[0]), rows["temperature"].iloc[0]
    note = f"n={n} samples, temperature {temperature:g}, 95 % intervals over problems"
    fig.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(names),
        fontsize=8,
        frameon=False,
        title=note,
        title_fontsize=7.5,
    )
    return fig


def bar_colour(name: str, names: Sequence[str]) -> str:
    """The run's colour; checkpoints of one run get paler with age."""
    same = [n for n in names if n.partition("@")[0] == name.partition("@")[0]]
    rgb = np.array(matplotlib.colors.to_rgb(colour_of(name)))
    return matplotlib.colors.to_hex(1 - (1 - rgb) * (0.4 + 0.6 * (same.index(name) + 1) / len(same)))


def pass_finding(rows: pd.DataFrame, names: Sequence[str], splits: Sequence[str]) -> str:
    """pass@1 of the first and the last checkpoint on the split that is quoted."""
    split = "test" if "test" in splits else splits[0]
    values = [
        rows[(rows["checkpoint"] == n) & (rows["split"] == split)]["pass@1"].iloc[0] for n in (names[0], names[-1])
    ]
    if len(names) == 1:
        return f"{names[0]}: pass@1 {values[0]:.2f} on {split}"
    return f"pass@1 on {split}: {names[0]} {values[0]:.2f}, {names[-1]} {values[1]:.2f}"
