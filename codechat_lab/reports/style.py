"""How figures look: size, colours, labels, and the parts that several figures share.

Axis labels come from METRICS, so a unit cannot be mistyped. A run name has one colour in every
figure; its seeds differ by dashes. Raw values are pale under their moving average, whose span
is in the legend. A note states the number of seeds."""

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import EngFormatter
from PIL import Image

from codechat.runs.run import unit_of

# in force while `new_figure` makes axes, never globally
LOOK = Path(__file__).with_name("codechat.mplstyle")
OKABE_ITO = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "black": "#000000",
    "yellow": "#F0E442",
}
SHAPE_COLOURS = {  # of rewards
    "binary": OKABE_ITO["black"],
    "fractional": OKABE_ITO["sky"],
    "tiered": OKABE_ITO["orange"],
    "staircase": OKABE_ITO["green"],
}
STAGES = {
    "pretrain": "blue",
    "sft": "orange",
    "rl": "green",
    "reinforce": "green",
    "grpo": "vermilion",
    "ppo": "purple",
    "base": "black",
}
# Runs named VERSION-STAGE and SIZE-BUDGET: one colour per version and per size.
FAMILIES = {
    "v1": "#56B4E9",
    "v2": "#8C510A",
    "v3": "#01665E",
    "v5": "#D55E00",
    "v6": "#AA4499",
    "v7": "#332288",
    "d2x32": "#DDAA33",
    "d2x64": "#44AA99",
    "d2x128": "#117733",
    "nano": "#0072B2",
    "d4x256": "#882255",
}
DASHES = ("-", "--", ":", "-.")
GREY = "#6b6b6b"
SUFFIX = re.compile(r"-s(\d+)$")
# What a reader calls the metrics that figures draw; any other keeps its name.
WORDS = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "val_bpb": "validation loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tok_per_s": "throughput",
    "mfu": "MFU",
    "reward_mean": "mean reward",
    "exact_match": "exact match",
    "heldout_loss/*": "held-out loss",
    "weights_changed_bf16": "bfloat16 weights changed",
    "tier/*": "rollouts",
}


class Plot(Figure):
    """A Figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        """The image in 96 colours, which keep notebooks with many figures small, and its title
        as alternative text."""
        drawn = io.BytesIO()
        small = io.BytesIO()
        # without the version, the same bytes
        self.savefig(drawn, format="png", dpi=100, metadata={"Software": None})
        # The default method merges colours of small areas, such as a legend's, with others.
        few = (
            Image.open(drawn)
            .convert("RGB")
            .quantize(96, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        )
        few.save(small, format="png", optimize=True)
        return small.getvalue(), {"alt": self.get_suptitle()}


def new_figure(
    title: str, rows: int = 1, cols: int = 1, size: tuple[float, float] = (6.4, 3.6), **grid: Any
) -> tuple[Plot, np.ndarray]:
    """An empty figure and its axes (rows, cols)."""
    with matplotlib.style.context(LOOK):
        fig = Plot(figsize=size)
        FigureCanvasAgg(fig)
        axes = fig.subplots(rows, cols, squeeze=False, **grid)
        fig.suptitle(title, x=0.01, ha="left", wrap=True)
    return fig, axes


def colour_of(run: str) -> str:
    """The colour of a run name, the same in every figure and for every seed of the run."""
    stage = SUFFIX.sub("", run.partition("@")[0]).rpartition("/")[2]
    if stage in STAGES:
        return OKABE_ITO[STAGES[stage]]
    family = stage.partition("-")[0]
    if family in FAMILIES and family != stage:
        return FAMILIES[family]
    # yellow on white cannot be read
    colours = [c for name, c in OKABE_ITO.items() if name not in ("black", "yellow")]
    return colours[crc32(stage.encode()) % len(colours)]


def dash_of(run: str) -> str:
    """Line style of a run: solid for the first seed, dashed for further ones."""
    seed = SUFFIX.search(run)
    return DASHES[int(seed[1]) % len(DASHES)] if seed else DASHES[0]


def label_of(name: str) -> str:
    """An axis label: the metric in words, and its unit from METRICS."""
    unit = unit_of(name)
    words = WORDS.get(name, name)
    return f"{words} ({unit})" if unit else words


def label_of_run(ref: str) -> str:
    """A run or checkpoint in words: "nano/v5-sft@240" is "v5 SFT, step 240", "nano/rl-s1" is
    "RL, seed 1"."""
    name, _, step = ref.rpartition("/")[2].partition("@")
    seed = SUFFIX.search(name)
    words = [{"sft": "SFT", "rl": "RL"}.get(word, word) for word in SUFFIX.sub("", name).split("-")]
    if seed:
        words[-1] += f", seed {seed[1]}"
    if step:
        words[-1] += f", step {step}"
    return " ".join(words)


def label_of_tier(tier: str) -> str:
    """A rung of the reward in words: "bad JSON"."""
    return tier.replace("_", " ").replace("json", "JSON")


def seeds_note(runs: Iterable[str]) -> str:
    """The number of seeds behind the curves: each run and its -sN siblings."""
    stems = [SUFFIX.sub("", run) for run in runs]
    most = max(map(stems.count, stems), default=0)
    plural = "s" if most > 1 else ""
    drawn = ", each drawn" if most == 2 else ""
    return f"n = {most} seed{plural}{drawn}"


def draw_published(
    ax: Axes,
    x: Iterable[float],
    y: Iterable[float],
    label: str,
    marker: str = "x",
) -> None:
    """Published figures, in a style that measured ones never have: hollow black marks,
    "(published)" in the label."""
    ax.plot(
        list(x),
        list(y),
        label=f"{label} (published)",
        marker=marker,
        linestyle="none",
        color="black",
        markerfacecolor="none",
        markersize=5.5,
        linewidth=0.9,
        alpha=0.75,
        zorder=4,
    )


def draw_smoothed(
    ax: Axes,
    x: pd.Series,
    y: pd.Series,
    *,
    colour: str,
    label: str,
    dash: str = "-",
) -> None:
    """Raw values at alpha 0.25 under their exponential moving average; a series of fewer than
    10 values as it is."""
    known = y.notna() & x.notna()
    x = x[known]
    y = y[known]
    if len(y) < 10:
        ax.plot(x, y, dash, color=colour, linewidth=1.6, label=label)
        return
    span = span_of(len(y))
    ax.plot(x, y, color=colour, linewidth=0.9, alpha=0.25)
    ax.plot(
        x,
        y.ewm(span=span).mean(),
        dash,
        color=colour,
        linewidth=1.7,
        label=f"{label} (EMA, span {span})",
    )


def span_of(rows: int) -> int:
    """Span of the moving average of so many rows, short enough to follow a curve that falls
    fast."""
    return min(20, max(3, rows // 10))


def errors_of(rows: pd.DataFrame, y: str) -> np.ndarray:
    """(2, N) distances of y/lo and y/hi from y."""
    return np.abs(rows[[f"{y}/lo", f"{y}/hi"]].to_numpy().T - rows[y].to_numpy())


def stack_bars(ax: Axes, shares: dict[str, Iterable[float]], colours: dict[str, str]) -> None:
    """Horizontal bars, one beside the other; NaN takes no room."""
    left = 0.0
    for name, values in shares.items():
        width = np.nan_to_num(np.array(values, dtype=float))
        ax.barh(range(len(width)), width, left=left, color=colours[name], label=name, height=0.75)
        left = left + width


def finish(
    ax: Axes, *, x: str, y: str | None, note: str = "", legend: bool = True, **legend_options: Any
) -> None:
    """Axis labels, a legend if anything is labelled, and a note such as "n = 1 seed"."""
    ax.set_xlabel({"step": "optimizer step"}.get(x, x))
    if x == "tokens":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if y:
        ax.set_ylabel(y)
    add_note(ax, note)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7.5, frameon=False, **legend_options)


def add_note(ax: Axes, text: str) -> None:
    """A small text below the right end of the x axis."""
    ax.text(
        1.0, -0.15, text, transform=ax.transAxes, ha="right", va="top", fontsize=7.5, color=GREY
    )


def outer_legend(
    fig: Figure, ax: Axes, loc: Any, *, reverse: bool = False, **options: Any
) -> Legend:
    """A legend of the labels of `ax` outside all axes; reverse: as in a stack, the top first."""
    handles, labels = ax.get_legend_handles_labels()
    return fig.legend(
        handles, labels, loc=loc, reverse=reverse, fontsize=8, frameon=False, **options
    )


def first_and_last(frame: pd.DataFrame, y: str) -> tuple[float, float]:
    """Mean of the first and of the last tenth (at least one row) of a series."""
    values = frame[y].dropna()
    tenth = max(1, len(values) // 10)
    return float(values[:tenth].mean()), float(values[-tenth:].mean())
