"""Figures of runs: functions from DataFrames to a `Figure`.

A frame of metrics is what `Run.metrics()` gives (a row per logged step), a frame of evaluations what
`Run.evals()` gives. The title states the finding: each function writes one from the data unless it is given.
`style` says how everything looks.

Left out: interactive figures; bands over many seeds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from codechat.evaluation.behaviour_probes import BEHAVIOURS, CELLS, WANTED
from codechat.evaluation.intervals import wilson_interval
from codechat.reports.reward_plots import group_signal, pass_at_k, rl_progress, staircase, tier_flow, tier_histogram
from codechat.reports.style import (
    GREY,
    OKABE_ITO,
    Plot,
    change,
    colour_of,
    dash_of,
    draw_points,
    draw_smoothed,
    finish,
    label_of,
    new_figure,
    save,
    seeds_note,
)

__all__ = [
    "Plot",
    "behaviour_heat",
    "behaviour_over_training",
    "colour_of",
    "curves",
    "group_signal",
    "held_out",
    "pass_at_k",
    "pretraining",
    "rates",
    "rl_progress",
    "save",
    "staircase",
    "tier_flow",
    "tier_histogram",
]

BEHAVIOUR_COLOURS = {"call": OKABE_ITO["blue"], "code": OKABE_ITO["vermilion"], "neither": "#9a9a9a"}


def curves(
    metrics: Mapping[str, pd.DataFrame],
    y: str,
    *,
    x: str = "step",
    evals: Mapping[str, pd.DataFrame] | None = None,
    eval_y: str | None = None,
    baseline: tuple[str, float] | None = None,
    log_y: bool = False,
    title: str | None = None,
) -> Plot:
    """One metric of one or more runs: {run: metrics}. Evaluations of `eval_y` (default y) are drawn as
    points; baseline = (label, value)."""
    first = next(iter(metrics))
    fig, axes = new_figure(title or f"{first}: {change(metrics[first], y, 3)}")
    ax = axes[0, 0]
    for run, frame in metrics.items():
        draw_smoothed(ax, frame[x], frame[y], colour=colour_of(run), label=run, dash=dash_of(run))
        if evals and run in evals:
            draw_points(
                ax,
                with_tokens(evals[run], frame) if x == "tokens" else evals[run],
                eval_y or y,
                x=x,
                colour=colour_of(run),
                label=f"{run} {eval_y or y}",
            )
    if baseline:
        ax.axhline(baseline[1], color=GREY, linestyle="--", linewidth=1, label=baseline[0])
    if log_y:
        ax.set_yscale("log")
    finish(ax, x=x, y=label_of(y) + (", log scale" if log_y else ""), note=seeds_note(metrics))
    return fig


def with_tokens(evals: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """Evaluations with the tokens seen by their step, interpolated between logged steps."""
    known = metrics[metrics["tokens"].notna()]
    tokens = np.interp(evals["step"], [0, *known["step"]], [0, *known["tokens"]])
    return evals.assign(tokens=tokens)


def pretraining(run: str, metrics: pd.DataFrame, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Training loss over tokens on the left, validation bits per byte on the right."""
    points = with_tokens(evals[evals["val_bpb"].notna()], metrics)
    first, last = points["val_bpb"].iloc[0], points["val_bpb"].iloc[-1]
    total = EngFormatter(sep="", places=1).format_data(metrics["tokens"].max())
    fig, axes = new_figure(
        title or f"{run}: {first:.2f} to {last:.2f} bits per byte of unseen code after {total} tokens", cols=2
    )
    draw_smoothed(axes[0, 0], metrics["tokens"], metrics["train_loss"], colour=colour_of(run), label="training")
    finish(axes[0, 0], x="tokens", y=label_of("train_loss"))
    axes[0, 1].plot(points["tokens"], points["val_bpb"], "o-", color=colour_of(run), markersize=4, linewidth=1.2)
    finish(axes[0, 1], x="tokens", y=label_of("val_bpb"), note=seeds_note([run]))
    return fig


def rates(metrics: Mapping[str, pd.DataFrame], title: str | None = None) -> Plot:
    """Learning rate and throughput of each run over its steps, each run's steps as a share of its whole."""
    speeds = ", ".join(f"{run} {frame['tok_per_s'].median():,.0f}" for run, frame in metrics.items())
    fig, axes = new_figure(title or f"median tokens/s: {speeds}", cols=2)
    for ax, y in zip(axes[0], ("lr", "tok_per_s")):
        for run, frame in metrics.items():
            ax.plot(
                frame["step"] / frame["step"].max(),
                frame[y],
                dash_of(run),
                color=colour_of(run),
                linewidth=1.5,
                label=run,
            )
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.set_ylim(bottom=0)
        finish(ax, x="share of the run's steps", y=label_of(y))
    axes[0, 1].yaxis.set_major_formatter(EngFormatter(sep=""))
    return fig


def held_out(run: str, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Held-out loss of each domain over the steps; a domain that is being overwritten rises."""
    columns = [c for c in evals if c.startswith("heldout_loss/")]
    risen = [c.partition("/")[2] for c in columns if (v := evals[c].dropna()).iloc[-1] > v.min() * 1.02]
    default = (
        f"{', '.join(risen)} ends above its lowest held-out loss"
        if risen
        else "no domain's held-out loss ends above its lowest"
    )
    fig, axes = new_figure(title or f"{run}: {default}")
    ax = axes[0, 0]
    for column, colour, marker in zip(columns, [c for n, c in OKABE_ITO.items() if n != "yellow"], "os^Dv<>"):
        rows = evals[evals[column].notna()]
        ax.plot(
            rows["step"],
            rows[column],
            marker=marker,
            markersize=4,
            color=colour,
            linewidth=1.4,
            label=column.partition("/")[2],
        )
    finish(ax, x="step", y=label_of("heldout_loss/*").replace("/* ", " "), note=seeds_note([run]))
    return fig


# ---------------------------------------------------------------- behaviour


# Cells by row (what is asked for) and column (which tools are there); code has no column of unfitting tools.
_GRID = {"tool_with_tools": (0, 0), "tool_with_other_tools": (0, 1), "tool_without_tools": (0, 2),
         "code_with_tools": (1, 0), "code_without_tools": (1, 2)}  # fmt: skip


def behaviour_over_training(run: str, evals: pd.DataFrame, title: str | None = None) -> Plot:
    """Small charts, asked x tools present: shares of call, code and neither over the steps with Wilson
    bands."""
    fig, axes = new_figure(
        title or f"{run}: {behaviour_finding(evals)}", 2, 3, size=(7.6, 4.6), sharex=True, sharey=True
    )
    for cell in CELLS:
        _draw_cell(axes[_GRID[cell]], evals, cell)
        axes[_GRID[cell]].set_title(f"{_in_words(cell)}: {WANTED[cell]} wanted", fontsize=7.5, loc="left")
    axes[1, 1].set_axis_off()
    axes[0, 0].set_ylim(-0.03, 1.03)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of completions", fontsize=8.5)
    for ax in axes[1]:
        ax.set_xlabel("optimizer step", fontsize=8.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for line in legend.get_lines():
        line.set_linewidth(1.6)
    return fig


def _in_words(cell: str) -> str:
    asked, _, present = cell.partition("_")
    return f"{asked} asked, {present.replace('_', ' ')}"


def _draw_cell(ax: Axes, evals: pd.DataFrame, cell: str) -> None:
    if f"probe/{cell}/n" not in evals:
        return
    rows = evals[evals[f"probe/{cell}/n"].notna()]
    n = rows[f"probe/{cell}/n"].astype(int)
    for which in BEHAVIOURS:
        share = rows[f"probe/{cell}/{which}"]
        bands = [wilson_interval(round(p * k), k) for p, k in zip(share, n)]
        wanted = which == WANTED[cell]
        ax.fill_between(
            rows["step"],
            [b.lo for b in bands],
            [b.hi for b in bands],
            color=BEHAVIOUR_COLOURS[which],
            alpha=0.15,
            linewidth=0,
        )
        ax.plot(
            rows["step"],
            share,
            "o-",
            color=BEHAVIOUR_COLOURS[which],
            linewidth=2.0 if wanted else 1.1,
            markersize=4 if wanted else 2.5,
            label=which,
        )
    ax.text(
        0.98,
        0.5,
        f"n={n.iloc[-1]}, 95 % bands",
        transform=ax.transAxes,
        ha="right",
        va="center",
        fontsize=7,
        color=GREY,
    )


def behaviour_finding(evals: pd.DataFrame) -> str:
    """The shares of wanted behaviour at the last evaluation, in words."""
    shares = {c: evals[f"probe/{c}/{WANTED[c]}"].dropna() for c in CELLS if f"probe/{c}/{WANTED[c]}" in evals}
    if not shares:
        return "no behaviour probes"
    worst = min(shares, key=lambda c: shares[c].iloc[-1])
    return f"wanted behaviour is rarest ({shares[worst].iloc[-1]:.0%}): {_in_words(worst)}"


def behaviour_heat(rows: Mapping[str, Mapping[str, float]], title: str | None = None) -> Plot:
    """The behaviour matrix of each checkpoint {name: evaluation row}: share of completions that behave as
    wanted, its interval and n; a cell that was not probed stays empty."""
    fig, axes = new_figure(
        title or "share of completions that behave as wanted", rows=len(rows), size=(6.4, 0.7 + 1.7 * len(rows))
    )
    for ax, (name, row) in zip(axes[:, 0], rows.items()):
        share = np.full((2, 3), np.nan)
        for cell, at in _GRID.items():
            if not row.get(f"probe/{cell}/n", 0) > 0:
                continue
            n, p = int(row[f"probe/{cell}/n"]), row[f"probe/{cell}/{WANTED[cell]}"]
            share[at], interval = p, wilson_interval(round(p * n), n)
            ax.text(
                at[1],
                at[0],
                f"{WANTED[cell]} {p:.0%}\n[{interval.lo:.0%}, {interval.hi:.0%}] n={n}",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if p > 0.55 else "white",
            )
        ax.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        ax.set_xticks((0, 1, 2), ("with tools", "with other tools", "without tools"))
        ax.set_yticks((0, 1), ("tool\nasked", "code\nasked"))
        ax.set_title(name, fontsize=9, loc="left")
        ax.grid(False)
        ax.spines[:].set_visible(False)
    return fig
