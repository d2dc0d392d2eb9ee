"""Figures of the reports on pretraining, on the staircase, and on the specialist: functions from DataFrames to a `Figure`, as in `plots`.

A measured run has its own colour (`style.colour_of`); what others published is drawn by `style.draw_published` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, PercentFormatter

from codechat.evaluation.behaviour_probes import CELLS, WANTED
from codechat.evaluation.intervals import wilson_interval
from codechat.labs.scaling_law import Law
from codechat.reports.reward_plots import tier_colours
from codechat.reports.style import (
    GREY,
    OKABE_ITO,
    Plot,
    colour_of,
    dash_of,
    draw_published,
    draw_smoothed,
    finish,
    label_of,
    new_figure,
    seeds_note,
    span_of,
)

SHAPE_COLOURS = {
    "binary": OKABE_ITO["black"],
    "fractional": OKABE_ITO["sky"],
    "tiered": OKABE_ITO["orange"],
    "staircase": OKABE_ITO["green"],
}
PART_COLOURS = {
    "prose": "#cccccc",
    "tag": OKABE_ITO["sky"],
    "form": "#9a9a9a",
    "name": OKABE_ITO["orange"],
    "arguments": OKABE_ITO["green"],
    "end": OKABE_ITO["purple"],
}
OUTCOME_COLOURS = {"follows": OKABE_ITO["blue"], "other": "#cccccc", "ignores": OKABE_ITO["vermilion"]}


# ---------------------------------------------------------------- pretraining


def training_panels(run: str, metrics: pd.DataFrame, title: str | None = None) -> Plot:
    """Learning rate, gradient norm, throughput and MFU over tokens."""
    default = f"{run}: median {metrics['tok_per_s'].median():,.0f} tokens/s, {metrics['mfu'].median():.0%} of the measured peak"
    fig, axes = new_figure(title or default, 2, 2, size=(7.2, 4.6))
    for ax, y in zip(axes.flat, ("lr", "grad_norm", "tok_per_s", "mfu")):
        ax.plot(metrics["tokens"], metrics[y], color=colour_of(run), linewidth=1.5)
        if y == "grad_norm":
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1 if y == "mfu" else None)
        finish(ax, x="tokens", y=label_of(y) + (", log scale" if y == "grad_norm" else ""))
    axes[1, 0].yaxis.set_major_formatter(EngFormatter(sep=""))
    return fig


def beside_published(
    run: str, metrics: pd.DataFrame, published: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str
) -> Plot:
    """Training loss of a run over tokens, and published points {label: (tokens, loss)}: shapes compare, levels do not."""
    fig, axes = new_figure(title)
    ax = axes[0, 0]
    draw_smoothed(ax, metrics["tokens"], metrics["train_loss"], colour=colour_of(run), label=f"{run}, measured")
    for (label, (tokens, loss)), marker in zip(published.items(), ("x", "o")):
        draw_published(ax, tokens, loss, label, marker=marker, line=":")
    ax.set_xscale("log")
    finish(ax, x="tokens", y=label_of("train_loss"))
    ax.set_xlabel("tokens, log scale", fontsize=8.5)
    return fig


def iso_flops(points: pd.DataFrame, law: Law, title: str) -> Plot:
    """Loss over parameters, a line per budget through the law's values. points: run, budget, n, d, loss."""
    fig, axes = new_figure(title)
    ax = axes[0, 0]
    for (budget, rows), marker, dash in zip(points.groupby("budget", sort=False), "os^", ("--", ":", "-.")):
        rows = rows.sort_values("n")
        ax.plot(
            rows["n"],
            law.predict(rows["n"].to_numpy(), rows["d"].to_numpy()),
            dash,
            color=GREY,
            linewidth=1.2,
            label=f"law at {budget:.0e} FLOPs",
        )
        for row in rows.itertuples():
            ax.plot(row.n, row.loss, marker, color=colour_of(row.run), markersize=6)
            ax.annotate(
                f"{row.run.rpartition('/')[2].rpartition('-')[0]}, {EngFormatter(sep='', places=1).format_data(row.d)}",
                (row.n, row.loss),
                fontsize=6.5,
                xytext=(5, 4),
                textcoords="offset points",
                color=GREY,
            )
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(points["n"]))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(EngFormatter(sep="", places=1))
    finish(ax, x="parameters, log scale (beside each point: its size and tokens)", y=label_of("val_loss"))
    return fig


def law_residuals(points: pd.DataFrame, residuals: Mapping[str, Sequence[float]], title: str) -> Plot:
    """Measured minus predicted loss of each point, a bar per way of predicting it."""
    fig, axes = new_figure(title)
    ax, at = axes[0, 0], np.arange(len(points))
    for i, ((name, values), alpha) in enumerate(zip(residuals.items(), (1.0, 0.45))):
        ax.bar(at + (i - 0.5) * 0.38, values, 0.38, color=[colour_of(r) for r in points["run"]], alpha=alpha)
        ax.plot([], [], "s", color=GREY, alpha=alpha, label=name)
    ax.axhline(0, color=GREY, linewidth=0.9)
    ax.set_xticks(at, [r.rpartition("/")[2].replace("-", "\n") for r in points["run"]])
    finish(ax, x="run", y="measured minus law (nats/token)")
    return fig


# ---------------------------------------------------------------- the staircase


def tier_flows(metrics: Mapping[str, pd.DataFrame], tiers: Sequence[str], title: str) -> Plot:
    """Stacked shares of the rungs over RL steps, a panel per run, the worst at the bottom."""
    fig, axes = new_figure(title, cols=len(metrics), size=(7.6, 3.4), sharey=True)
    for ax, (run, frame) in zip(axes[0], metrics.items()):
        shares = pd.DataFrame({t: frame[f"tier/{t}"] if f"tier/{t}" in frame else 0.0 for t in tiers}).fillna(0.0)
        smooth = shares.ewm(span=span_of(len(shares))).mean()
        ax.stackplot(
            frame["step"], *[smooth[t] for t in tiers], labels=tiers, colors=tier_colours(len(tiers)), linewidth=0
        )
        ax.margins(x=0)
        ax.set_ylim(0, 1)
        ax.set_title(run, fontsize=8.5, loc="left")
        finish(ax, x="step", y="rollouts (share), smoothed" if ax is axes[0, 0] else None, legend=False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8, frameon=False)
    return fig


def shapes(rows: pd.DataFrame, title: str) -> Plot:
    """Groups with variance, and variance within groups, by shape of the reward and checkpoint, on the same rollouts of each."""
    fig, axes = new_figure(title, cols=2)
    names = list(dict.fromkeys(rows["checkpoint"]))
    for ax, y, label in zip(
        axes[0], ("live", "group_variance"), ("groups with variance (share)", "variance within a group (reward²)")
    ):
        for i, shape in enumerate(SHAPE_COLOURS):
            mine = rows[rows["shape"] == shape].set_index("checkpoint").reindex(names)
            values = mine["effective_groups"] / mine["n_problems"] if y == "live" else mine[y]
            ax.bar(np.arange(len(names)) + (i - 1.5) * 0.2, values, 0.2, color=SHAPE_COLOURS[shape], label=shape)
        ax.set_xticks(range(len(names)), names)
        finish(ax, x="checkpoint", y=label, legend=ax is axes[0, 0])
    axes[0, 0].set_ylim(0, 1.25)
    counts = rows.iloc[0]
    axes[0, 1].text(
        1,
        -0.15,
        f"{int(counts['n_problems'])} groups of {int(counts['n_samples'])}",
        transform=axes[0, 1].transAxes,
        ha="right",
        va="top",
        fontsize=7.5,
        color=GREY,
    )
    return fig


def pulls(rows: pd.DataFrame, tiers: Sequence[str], title: str) -> Plot:
    """Which rungs each shape pushes up and down: summed advantage of a rung over the summed size of all. rows: one checkpoint's."""
    fig, axes = new_figure(title)
    ax = axes[0, 0]
    for i, (shape, colour) in enumerate(SHAPE_COLOURS.items()):
        row = rows[rows["shape"] == shape].iloc[0]
        ax.bar(
            np.arange(len(tiers)) + (i - 1.5) * 0.2, [row[f"pull/{t}"] for t in tiers], 0.2, color=colour, label=shape
        )
    ax.axhline(0, color=GREY, linewidth=0.9)
    row = rows.iloc[0]
    ax.set_xticks(range(len(tiers)), [f"{t}\n{row[f'tier/{t}']:.0%}" for t in tiers])
    finish(ax, x="rung, and its share of the rollouts", y="share of all advantage", loc="upper left")
    return fig


def parts(rows: Mapping[str, Mapping[str, float]], title: str, x: str) -> Plot:
    """Stacked bars of the shares of a call's parts, a bar per name."""
    fig, axes = new_figure(title, size=(6.4, 1.5 + 0.36 * len(rows)))
    ax, left = axes[0, 0], np.zeros(len(rows))
    for part, colour in PART_COLOURS.items():
        width = np.nan_to_num(np.array([float(row.get(f"part/{part}", 0)) for row in rows.values()]))
        ax.barh(range(len(rows)), width, left=left, color=colour, label=part, height=0.75)
        left += width
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.grid(False)
    finish(ax, x=x, y=None, legend=False)
    fig.legend(
        *ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(PART_COLOURS), fontsize=8, frameon=False
    )
    return fig


def precision(rows: pd.DataFrame, title: str) -> Plot:
    """Share of bfloat16 values changed by a few updates, with and without float32 masters, by learning rate."""
    fig, axes = new_figure(title)
    ax, rates = axes[0, 0], list(dict.fromkeys(rows["lr"]))
    for i, (name, colour) in enumerate(
        (("float32 masters", OKABE_ITO["blue"]), ("bfloat16 only", OKABE_ITO["vermilion"]))
    ):
        mine = rows[rows["weights"] == name].set_index("lr").reindex(rates)
        ax.bar(np.arange(len(rates)) + (i - 0.5) * 0.4, mine["changed"], 0.4, color=colour, label=name)
        for at, value in enumerate(mine["changed"]):
            ax.text(at + (i - 0.5) * 0.4, value + 0.01, f"{value:.2%}", ha="center", fontsize=7.5)
    ax.set_xticks(range(len(rates)), [f"learning rate {r:g}" for r in rates])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    finish(ax, x=f"{int(rows['updates'].iloc[0])} AdamW updates on the same rollouts", y="bfloat16 values changed")
    return fig


def saturation(metrics: Mapping[str, pd.DataFrame], evals: Mapping[str, pd.DataFrame], title: str) -> Plot:
    """Left: pass@1 on held-out problems over RL steps, with intervals, a line per seed. Right: groups with a gradient."""
    fig, axes = new_figure(title, cols=2, size=(7.2, 3.6), sharey=True)
    for i, (run, frame) in enumerate(evals.items()):
        rows = frame[frame["pass@1"].notna()]
        error = np.abs(rows[["pass@1/lo", "pass@1/hi"]].to_numpy().T - rows["pass@1"].to_numpy())
        axes[0, 0].errorbar(
            rows["step"] + 0.6 * i,
            rows["pass@1"],
            error,
            fmt="o" + dash_of(run),
            color=colour_of(run),
            capsize=2.5,
            markersize=4,
            linewidth=1.2,
            label=run,
        )
    for run, frame in metrics.items():
        draw_smoothed(
            axes[0, 1],
            frame["step"],
            1 - frame["frac_zero_std_groups"],
            colour=colour_of(run),
            label=run,
            dash=dash_of(run),
        )
    axes[0, 0].set_ylim(0, 1)
    finish(axes[0, 0], x="step", y="pass@1 on select (share)", loc="lower right")
    finish(axes[0, 1], x="step", y="groups with variance (share)", note=seeds_note(metrics), legend=False)
    return fig


def gains(rows: pd.DataFrame, title: str) -> Plot:
    """Differences with 95 % intervals, a line each. rows: name, value, lo, hi."""
    fig, axes = new_figure(title, size=(6.4, 1.2 + 0.3 * len(rows)))
    ax = axes[0, 0]
    error = [rows["value"] - rows["lo"], rows["hi"] - rows["value"]]
    ax.errorbar(
        rows["value"],
        range(len(rows)),
        xerr=error,
        fmt="o",
        color=OKABE_ITO["black"],
        capsize=3,
        markersize=4.5,
        linewidth=1.2,
    )
    ax.axvline(0, color=GREY, linestyle="--", linewidth=0.9)
    ax.set_yticks(range(len(rows)), list(rows["name"]))
    ax.invert_yaxis()
    ax.grid(False)
    finish(ax, x="RL minus SFT (share), 95 %", y=None)
    return fig


def published_points(points: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, title: str) -> Plot:
    """Published figures alone {label: (x, y)}, on [0, 1]."""
    fig, axes = new_figure(title, size=(6.4, 2.9))
    for (label, (at, values)), marker in zip(points.items(), "xos^"):
        draw_published(axes[0, 0], at, values, label, marker=marker, line=":")
    axes[0, 0].set_ylim(0, 1)
    finish(axes[0, 0], x=x, y=y, loc="lower right")
    return fig


# ---------------------------------------------------------------- the specialist

_SHORT = {
    "tool_with_tools": "tool asked,\ntools there",
    "tool_with_other_tools": "tool asked,\nother tools",
    "tool_without_tools": "tool asked,\nno tools",
    "code_with_tools": "code asked,\ntools there",
    "code_without_tools": "code asked,\nno tools",
}


def behaviour_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Plot:
    """Share of wanted behaviour, a line per checkpoint, a column per cell, with its interval; a cell that was not probed stays empty."""
    fig, axes = new_figure(title, size=(7.2, 1.3 + 0.42 * len(rows)))
    ax, share = axes[0, 0], np.full((len(rows), len(CELLS)), np.nan)
    for i, row in enumerate(rows.values()):
        for j, cell in enumerate(CELLS):
            if not row.get(f"probe/{cell}/n", 0) > 0:
                continue
            n, p = int(row[f"probe/{cell}/n"]), row[f"probe/{cell}/{WANTED[cell]}"]
            share[i, j], interval = p, wilson_interval(round(p * n), n)
            ax.text(
                j,
                i,
                f"{p:.0%} [{interval.lo:.0%}, {interval.hi:.0%}]",
                ha="center",
                va="center",
                fontsize=7.5,
                color="black" if p > 0.55 else "white",
            )
    ax.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(len(CELLS)), [f"{_SHORT[c]}:\n{WANTED[c]} wanted" for c in CELLS], fontsize=7)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return fig


def wanted_over_training(evals: Mapping[str, pd.DataFrame], title: str) -> Plot:
    """Share of wanted behaviour over the steps of each run, a panel per cell, a line per run."""
    fig, axes = new_figure(title, 2, 3, size=(7.6, 4.6), sharey=True)
    for ax, cell in zip(axes.flat, CELLS):
        for run, frame in evals.items():
            name = f"probe/{cell}/{WANTED[cell]}"
            rows = frame[frame[name].notna()] if name in frame else frame[:0]
            ax.plot(
                rows["step"],
                rows[name] if len(rows) else [],
                "o-",
                color=colour_of(run),
                markersize=3,
                linewidth=1.3,
                label=run,
            )
        ax.set_title(f"{_SHORT[cell]}: {WANTED[cell]} wanted".replace("\n", " "), fontsize=7, loc="left")
        finish(ax, x="step", y="share" if ax in axes[:, 0] else None, legend=False)
    axes[0, 0].set_ylim(-0.03, 1.03)
    axes[1, 2].set_axis_off()
    axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", fontsize=8, frameon=False)
    return fig


def domain_losses(
    rows: Mapping[str, Mapping[str, Any]], domains: Sequence[str], metric: str, label: str, title: str
) -> Plot:
    """Held-out loss of each domain, a group of bars per domain, a bar per checkpoint."""
    fig, axes = new_figure(title, size=(7.2, 3.4))
    ax, width = axes[0, 0], 0.85 / len(rows)
    for i, (name, row) in enumerate(rows.items()):
        late = "rl" in name.rpartition("/")[2]
        ax.bar(
            np.arange(len(domains)) + (i - (len(rows) - 1) / 2) * width,
            [row.get(f"{metric}/{d}", np.nan) for d in domains],
            width,
            color=colour_of(name),
            alpha=1.0 if late else 0.5,
            label=name,
        )
    ax.set_xticks(range(len(domains)), list(domains))
    finish(ax, x="domain", y=label, legend=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center", fontsize=7.5, frameon=False)
    return fig


def swap_outcomes(rows: pd.DataFrame, swaps: Sequence[str], title: str) -> Plot:
    """What answers did after each swap, stacked, a panel per swap and a bar per checkpoint, n of the cases that count beside it."""
    names = list(dict.fromkeys(rows["checkpoint"]))
    fig, axes = new_figure(title, cols=len(swaps), size=(8.6, 1.6 + 0.3 * len(names)), sharey=True)
    for ax, swap in zip(axes[0], swaps):
        mine, left = rows[rows["swap"] == swap].set_index("checkpoint").reindex(names), np.zeros(len(names))
        for outcome, colour in OUTCOME_COLOURS.items():
            width = (mine[outcome] if outcome in mine else pd.Series(0.0, index=names)).fillna(0).to_numpy(dtype=float)
            ax.barh(range(len(names)), width, left=left, color=colour, label=outcome, height=0.75)
            left += width
        for i, n in enumerate(mine["n"]):
            ax.text(1.03, i, f"n={int(n)}" if n == n else "", va="center", fontsize=6.5, color=GREY)
        ax.set_title(swap, fontsize=8, loc="left")
        ax.set_xlim(0, 1)
        ax.set_xticks((0, 0.5, 1), ("0", "½", "1"))
        ax.grid(False)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return fig
