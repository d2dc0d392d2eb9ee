"""`codechat board`: models on the function calling leaderboard, with intervals.

    codechat board --ckpt released/nano released/mini --problems 50
    codechat board --endpoint http://127.0.0.1:8000 --wordings plain leaderboard
    codechat board --ckpt my/sft-s1 my/sft-s2 --problems 1000 --out runs/drawn/board-sft

It appends the answers that are missing to OUT/board/data/rows.jsonl, then writes the notebook
OUT/board.ipynb and its page. The same command goes on after an interruption; models, wordings and
seeds of later commands join the same board.

Every model is compared on the problems that all have answered. No number counts silence alone:
the share of right answers where no call is right stands beside that where a call is, and the one
number is their harmonic mean."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from codechat.core.errors import MissingFile
from codechat.evaluation.intervals import (
    Interval,
    bootstrap_interval,
    equal_interval,
    paired_bootstrap,
)
from codechat.evaluation.results import harmonic_mean
from codechat.runs import paths
from codechat_lab.instruments.board_settings import FIELDS, BoardConfig, read_answers
from codechat_lab.reports import build, run_frames
from codechat_lab.reports.style import GREY, OKABE_ITO, Plot, new_figure, outer_legend

RESAMPLES = 2000
# Column -> the categories of which it is the mean, each with the same weight, as on the
# published board.
COLUMNS = {
    "simple": ("simple", "simple_java", "simple_javascript"),
    "simple_python": ("simple",),
    "simple_java": ("simple_java",),
    "simple_javascript": ("simple_javascript",),
    "multiple": ("multiple",),
    "parallel": ("parallel",),
    "parallel_multiple": ("parallel_multiple",),
    "live_simple": ("live_simple",),
    "live_multiple": ("live_multiple",),
    "live_parallel": ("live_parallel",),
    "live_parallel_multiple": ("live_parallel_multiple",),
    "live_relevance": ("live_relevance",),
    # as in the published board's table of all; its table without live problems has the first alone
    "irrelevance": ("irrelevance", "live_irrelevance"),
    "not_live_irrelevance": ("irrelevance",),
    "live_irrelevance": ("live_irrelevance",),
}
CALLS, SILENCE = "call", "no call"
BOTH = "both"  # their harmonic mean


def write_board(cfg: BoardConfig) -> Path:
    """Measure what is missing, then write notebook and page; returns the page's path."""
    from codechat_lab.instruments.board import measure  # torch

    folder = paths.ROOT / cfg.out
    paths.check_outside(folder)
    measure(cfg, folder / "board" / "data")
    page = build.build("board", cfg.out)
    print(f"board: {page}")
    return page


def read(data: Path) -> pd.DataFrame:
    """The rows of a board, of the problems that every model has answered in every cell that it
    has. MissingFile where there are none, or none where a call is right: of silence alone nothing
    is shown."""
    path = data / "rows.jsonl"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; `codechat board` writes it")
    rows = pd.DataFrame(read_answers(path), columns=list(FIELDS))
    rows["correct"] = rows["correct"].astype(float)
    cells = rows.groupby(["model", "wording", "seed"])["id"].agg(set)
    common = set(rows["id"]).intersection(*cells)
    kept = rows[rows["id"].isin(common)]
    if not (kept["right_is"] == CALLS).any():
        raise MissingFile(
            f"{path} holds no problem with a right call that all models have answered; run the same `codechat board` "
            "again to its end"
        )
    return kept.drop_duplicates(["model", "wording", "seed", "id"])


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of wordings that every model has: a wording moves a model's shares, so models with
    other wordings do not compare. MissingFile where there is none."""
    wordings = [set(part) for _, part in rows.groupby("model")["wording"]]
    shared = set.intersection(*wordings)
    if not shared:
        raise MissingFile(
            "the models of this board share no wording; run `codechat board` with the same --wordings for all"
        )
    return rows[rows["wording"].isin(shared)]


def per_problem(rows: pd.DataFrame) -> pd.DataFrame:
    """(model, problem) with the mean over wordings and seeds."""
    keys = ["model", "id", "category", "right_is"]
    return rows.groupby(keys, sort=False, as_index=False)["correct"].mean()


def mean_of_parts(parts: Sequence[np.ndarray]) -> Interval:
    """Mean of the parts' means, with the percentile interval of a bootstrap within each part."""
    if len(parts) == 1:
        return bootstrap_interval(parts[0])
    every = np.concatenate(parts)
    if every.min() == every.max():
        return equal_interval(float(every[0]), every.size, (0.0, 1.0))
    rng = np.random.default_rng(0)
    means = [rng.choice(part, (RESAMPLES, part.size)).mean(axis=1) for part in parts]
    lo, hi = np.percentile(np.mean(means, axis=0), (2.5, 97.5))
    for part in parts:
        if part.min() == part.max():  # a bootstrap gives it no width
            value, low, high = equal_interval(float(part[0]), part.size, (0.0, 1.0))
            lo += (low - value) / len(parts)
            hi += (high - value) / len(parts)
    return Interval(float(np.mean([part.mean() for part in parts])), float(lo), float(hi))


def both_of(calls: Interval, silence: Interval) -> Interval:
    """The harmonic mean of two shares; its interval goes from both lower ends to both upper ends,
    which is wider than it must be."""
    return Interval(*(harmonic_mean(pair) for pair in zip(calls, silence, strict=True)))


def scores_of(rows: pd.DataFrame) -> dict[str, Interval]:
    """Column -> share right, of the rows of one model; also CALLS, SILENCE and BOTH."""
    problems = per_problem(rows)
    found: dict[str, Interval] = {}
    for right_is in (CALLS, SILENCE):
        values = problems.loc[problems["right_is"] == right_is, "correct"].to_numpy()
        if values.size:
            found[right_is] = bootstrap_interval(values)
    if len(found) == 2:
        found[BOTH] = both_of(found[CALLS], found[SILENCE])
    by_category = {name: part["correct"].to_numpy() for name, part in problems.groupby("category")}
    for column, categories in COLUMNS.items():
        # a mean of some of them would stand beside published means of all
        if all(name in by_category for name in categories):
            parts = [by_category[name] for name in categories]
            found[column] = mean_of_parts(parts)
    return found


def table_of(rows: pd.DataFrame) -> dict[str, dict[str, Interval]]:
    """Model -> its scores, the best harmonic mean first."""
    by_model = compared(rows).groupby("model", sort=False)
    models = {model: scores_of(part) for model, part in by_model}
    order = sorted(models, key=lambda model: -models[model].get(BOTH, Interval(0, 0, 0)).value)
    return {model: models[model] for model in order}


def counts_of(rows: pd.DataFrame) -> dict[str, int]:
    """Column -> its number of problems."""
    problems = rows.drop_duplicates("id")
    found = {name: int((problems["right_is"] == name).sum()) for name in (CALLS, SILENCE)}
    present = set(problems["category"])
    for column, categories in COLUMNS.items():
        found[column] = 0
        if present.issuperset(categories):
            some = problems["category"].isin(categories)
            found[column] = int(some.sum())
    return found


def in_words(interval: Interval) -> str:
    """In percent."""
    return f"{100 * interval.value:.1f} [{100 * interval.lo:.0f}, {100 * interval.hi:.0f}]"


def frame_of(table: Mapping[str, Mapping[str, Interval]], columns: Sequence[str]) -> pd.DataFrame:
    """A row for each model, a text for each column."""
    rows = []
    for model, scores in table.items():
        cells = {name: in_words(scores[name]) if name in scores else "" for name in columns}
        rows.append({"model": model} | cells)
    return pd.DataFrame(rows)


def turned(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """A column for each model, which fits a page, and one for what was a column."""
    return frame.set_index("model").T.rename_axis(what).rename_axis(None, axis=1).reset_index()


def differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Each model minus the best one of `table_of`, paired by problem, in points."""
    best, *others = table_of(rows)
    problems = per_problem(compared(rows))
    found = []
    for model in others:
        line: dict[str, Any] = {"difference": f"{model} minus {best}"}
        for right_is in (CALLS, SILENCE):
            part = problems[problems["right_is"] == right_is]
            values = part.pivot(index="id", columns="model", values="correct")
            if len(values):
                gap = paired_bootstrap(values[best].to_numpy(), values[model].to_numpy())
                line[right_is] = (
                    f"{100 * gap.value:+.1f} [{100 * gap.lo:+.0f}, {100 * gap.hi:+.0f}]"
                )
        found.append(line)
    return pd.DataFrame(found, columns=["difference", CALLS, SILENCE])


def by_cell(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, wording and seed."""
    found = []
    for (model, wording, seed), part in rows.groupby(["model", "wording", "seed"], sort=False):
        scores = scores_of(part)
        words = {name: in_words(scores[name]) for name in (CALLS, SILENCE, BOTH) if name in scores}
        found.append({"model": model, "wording": wording, "seed": seed} | words)
    columns = ["model", "wording", "seed", CALLS, SILENCE, BOTH]
    return pd.DataFrame(found, columns=columns)


def spread(rows: pd.DataFrame, over: str) -> dict[str, Interval]:
    """Model -> share of right calls of the best minus that of the worst of the wordings or seeds,
    paired by problem. The choice of the two makes the difference larger than chance would."""
    found = {}
    for model, part in rows[rows["right_is"] == CALLS].groupby("model"):
        values = part.groupby(["id", over])["correct"].mean().unstack(over)
        means = values.mean()
        worst = values[means.idxmin()]
        best = values[means.idxmax()]
        found[str(model)] = paired_bootstrap(worst.to_numpy(), best.to_numpy())
    return found


def errors_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Model -> share of its answers on each rung, in percent."""
    counts = rows.groupby(["model", "tier"]).size().unstack(fill_value=0)
    return (100 * counts.div(counts.sum(axis=1), axis=0)).reset_index()


def published() -> pd.DataFrame:
    """Rows of reports/published/bfcl.csv, in percent."""
    frame = run_frames.published("bfcl")
    return frame.rename(columns=lambda name: name.removesuffix(" (published)"))


def figure(table: Mapping[str, Mapping[str, Interval]], counts: Mapping[str, int]) -> Plot:
    """A panel for each column that has a published figure, or where the board has none, for each
    column: our models with intervals, published ones hollow."""
    others = published()
    shown = [name for name in COLUMNS if counts.get(name)]
    columns = [name for name in shown if name in others]
    if not columns:
        columns = shown
    names = [*table, *others["model"]]
    size = (2.0 + 1.35 * len(columns), 1.5 + 0.26 * len(names))
    fig, axes = new_figure(
        "Share of right answers (%): ours with 95 % intervals, published ones hollow",
        cols=len(columns),
        size=size,
        sharey=True,
    )
    for ax, column in zip(axes[0], columns):
        for place, scores in enumerate(table.values()):
            if column in scores:
                value, lo, hi = (100 * x for x in scores[column])
                ax.errorbar(
                    value,
                    place,
                    xerr=[[max(0.0, value - lo)], [max(0.0, hi - value)]],
                    fmt="o",
                    markersize=4.5,
                    capsize=2,
                    color=OKABE_ITO["blue"],
                    label="measured here" if not place else None,
                )
        ax.plot(
            others[column] if column in others else [np.nan] * len(others),
            np.arange(len(table), len(names)),
            "D",
            markersize=4.5,
            markerfacecolor="none",
            color=GREY,
            label="published, not measured here",
        )
        ax.set_title(f"{column.replace('_', ' ')}\nN={counts[column]}", fontsize=7.5, loc="left")
        ax.set(xlim=(-4, 104))
        ax.axhline(len(table) - 0.5, color=GREY, linewidth=0.6)
    axes[0, 0].set_yticks(range(len(names)), names, fontsize=7.5)
    axes[0, 0].invert_yaxis()
    outer_legend(fig, axes[0, 0], "outside lower center", ncols=2)
    return fig


def silence_figure(table: Mapping[str, Mapping[str, Interval]]) -> Plot:
    """Right where a call is right over right where none is; lines of equal harmonic mean."""
    fig, axes = new_figure("Calls beside silence", size=(5.2, 4.2))
    ax = axes[0, 0]
    x = np.linspace(0.5, 100, 400)
    for level in (20, 40, 60, 80):
        with np.errstate(divide="ignore"):
            y = level * x / (2 * x - level)
        known = (y > 0) & (y <= 100)
        ax.plot(x[known], y[known], color=GREY, linewidth=0.5, alpha=0.6)
        ax.annotate(f"{level}", (100, level * 100 / (200 - level)), fontsize=6.5, color=GREY)
    colours = [colour for name, colour in OKABE_ITO.items() if name != "yellow"]
    for number, (model, scores) in enumerate(table.items()):
        if BOTH in scores:
            silence = scores[SILENCE]
            calls = scores[CALLS]
            ax.errorbar(
                100 * silence.value,
                100 * calls.value,
                xerr=[[100 * (silence.value - silence.lo)], [100 * (silence.hi - silence.value)]],
                yerr=[[100 * (calls.value - calls.lo)], [100 * (calls.hi - calls.value)]],
                fmt="o",
                markersize=5,
                capsize=2,
                color=colours[number % len(colours)],
                label=model,
            )
    ax.set(
        xlim=(0, 104),
        ylim=(0, 104),
        xlabel="right where no call is right (%)",
        ylabel="right where a call is right (%)",
    )
    if ax.containers:
        ax.legend(fontsize=7, frameon=False)
    return fig
