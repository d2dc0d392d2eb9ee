"""When does a dense reward help? Figure, table and sentence of the rows of `codechat.labs.reward_starts`.

Only seeds with every run count, so that all rewards and starts rest on the same seeds. Intervals are hierarchical, over
seeds and problems; a gain over the binary reward is paired by seed and problem.

    python -m codechat.reports.dense_rewards        draw reports/dense_rewards.png from the committed rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from codechat.core.atomic_files import read_rows
from codechat.core.errors import DataError, MissingFile
from codechat.evaluation.intervals import Interval, estimate_pass_at_k, hierarchical_interval
from codechat.reports import frozen_rows, run_frames
from codechat.reports.plots import SHAPE_COLOURS
from codechat.reports.style import GREY, Plot, add_note, draw_published, finish, new_figure

Row = Mapping[str, Any]
STARTS, REFERENCE = ("base", "poor", "weak", "strong"), "binary"
MEASURES = {"greedy": "greedy", "pass@1": "T = 1"}


def frozen(path: Path | None = None, baseline: str = "mean") -> list[dict[str, Any]]:
    """The committed rows of one baseline. MissingFile if there are none."""
    path = path or frozen_rows.frozen_dir() / "thesis.jsonl"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; train it: python tools/reward_rows.py starts --out {path}")
    return [row for row in read_rows(path) if row["baseline"] == baseline]


def cells(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(start, reward) -> one row per seed, in the order of seeds; only seeds that have all of them. DataError if no seed has all."""
    found = {(row["seed"], row["start"], row["reward"]): row for row in rows}
    starts, rewards = ([n for n in names if any(n in key for key in found)] for names in (STARTS, SHAPE_COLOURS))
    whole = [(s, r) for s in starts for r in rewards]
    seeds = [seed for seed in sorted({key[0] for key in found}) if all((seed, *cell) in found for cell in whole)]
    if not seeds:
        raise DataError(f"{len(rows)} runs, and no seed has each of {starts} with each of {rewards}; train on")
    return {cell: [found[seed, *cell] for seed in seeds] for cell in whole}


def values(rows: Sequence[Row], when: str, measure: str) -> np.ndarray:
    """(seeds, problems) of "greedy", "pass@1" or "pass@8"; when: "before" or "after"."""
    if measure == "greedy":
        return np.array([row[when]["greedy"] for row in rows], dtype=float)
    k = int(measure.removeprefix("pass@"))
    return np.array([[estimate_pass_at_k(row["samples"], c, k) for c in row[when]["correct"]] for row in rows])


def score(rows: Sequence[Row], when: str, measure: str) -> Interval:
    return hierarchical_interval(values(rows, when, measure), bounds=(0.0, 1.0))


def gain(rows: Sequence[Row], reference: Sequence[Row], measure: str = "pass@1") -> Interval:
    """What the runs end above the reference's, paired by seed and problem."""
    return hierarchical_interval(values(rows, "after", measure) - values(reference, "after", measure))


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per start and reward: exact match before and after, pass@8, exact match of the worst seed, the gain over the
    binary reward, groups with variance over all updates."""
    found, made = cells(rows), []
    for (start, reward), mine in found.items():
        k = mine[0]["samples"]
        row: dict[str, Any] = dict(start=start, reward=reward, seeds=len(mine))
        for measure in ("greedy", "pass@1", f"pass@{k}"):
            row |= {f"{measure} before": score(mine, "before", measure).value}
            row |= score(mine, "after", measure).row(measure)
        row["worst seed"] = float(values(mine, "after", "pass@1").mean(1).min())
        if reward != REFERENCE and (start, REFERENCE) in found:
            row |= gain(mine, found[start, REFERENCE]).row("gain")
        made.append(row | dict(live=live_share(mine), seconds=float(np.mean([r["seconds"] for r in mine]))))
    return pd.DataFrame(made)


def live_share(rows: Sequence[Row]) -> float:
    """Groups with variance, mean over all updates and seeds."""
    return float(np.mean([np.mean(row["curve"]["live"]) for row in rows]))


def finding(rows: Sequence[Row]) -> str:
    """One sentence: what the staircase gains over the binary reward from each start, in points of exact match at T = 1."""
    found, parts = cells(rows), []
    for start in dict.fromkeys(start for start, _ in found):
        mine, reference = found[start, "staircase"], found[start, REFERENCE]
        g, began = gain(mine, reference), score(mine, "before", "pass@1").value
        parts.append(f"{100 * g.value:+.1f} points [{100 * g.lo:+.1f}, {100 * g.hi:+.1f}] from {began:.1%}")
    return f"Staircase against binary reward, exact match: {', '.join(parts)}"


# ---------------------------------------------------------------- figure


def figure(rows: Sequence[Row], title: str = "") -> Plot:
    """Final exact match, greedy and at T = 1, and groups with variance, over the start's exact match at T = 1: a point per reward and start, a little
    apart so that intervals can be told; pale lines only join what belongs together."""
    found = cells(rows)
    starts, rewards = (list(dict.fromkeys(names)) for names in zip(*found))
    first = [found[start, rewards[0]] for start in starts]
    fig, axes = new_figure(title or finding(rows), cols=3, size=(9.6, 3.4))
    x = _place([values(runs, "before", "pass@1").mean() for runs in first])
    for ax, (measure, label) in zip(axes[0], MEASURES.items()):
        begun = [values(runs, "before", measure).mean() for runs in first]
        look = dict(color=GREY, marker="_", markersize=16, linestyle="none", markeredgewidth=1.6)
        ax.plot(x, begun, label="at the start" if measure == "greedy" else None, **look)
        for i, reward in enumerate(rewards):
            at, name = x + 0.016 * (i - (len(rewards) - 1) / 2), reward if measure == "greedy" else None
            ends = [score(found[start, reward], "after", measure) for start in starts]
            y, error = [e.value for e in ends], np.array([(e.value - e.lo, e.hi - e.value) for e in ends]).T
            look = dict(color=SHAPE_COLOURS[reward], marker="o", markersize=4.5, linestyle="none", elinewidth=1.4)
            ax.errorbar(at, y, error, label=name, capsize=2.5, **look)
            ax.plot(at, y, color=SHAPE_COLOURS[reward], linewidth=0.8, alpha=0.35)
        _finish(ax, f"final exact match ({label})")
    _draw_published(axes[0, 1])
    axes[0, 1].legend(fontsize=7.5, frameon=False, loc="upper left")
    for reward in rewards:
        live = [live_share(found[start, reward]) for start in starts]
        axes[0, 2].plot(x, live, "o-", color=SHAPE_COLOURS[reward], markersize=4.5, linewidth=1.4)
    _finish(axes[0, 2], "groups with variance, all updates")
    seeds, row = len(first[0]), rows[0]
    about = f"{seeds} seed{'s' * (seeds > 1)}, {len(row['after']['greedy'])} held-out requests, 95 %"
    add_note(axes[0, 2], f"{row['weights']:,} weights, {row['steps']} updates; {about}")
    axes[0, 2].texts[-1].set_position((1.0, -0.2))
    return fig


def _place(shares: Sequence[float]) -> np.ndarray:
    """The root of a share: starts that are hardly ever correct lie apart."""
    return np.sqrt(np.asarray(shares, dtype=float))


def _finish(ax: Axes, y: str) -> None:
    ticks = (0, 0.01, 0.1, 0.3, 0.6, 1)
    ax.set_xlim(-0.06, 1.03)
    ax.set_ylim(-0.02, 1.02)
    ax.set_xticks(_place(ticks), [f"{tick:g}" for tick in ticks])
    finish(ax, x="exact match at the start (T = 1, root scale)", y=y, loc="upper left")


def _draw_published(ax: Axes) -> None:
    """Where the 8B runs lie: function calls v5 and v6, first and last evaluation; programs, whose reward stayed 0."""
    evals = run_frames.published("rl_eval")
    evals = evals[evals["n (published)"] == 120]
    runs = [run["pass_at_1 (published)"] for _, run in evals.groupby("run_name (published)")]
    draw_published(ax, _place([run.iloc[0] for run in runs]), [run.iloc[-1] for run in runs], "8B, calls v5, v6", "s")
    began = run_frames.published("mbpp_diagnosis")["pass_at_1 (published)"].max()
    ended = run_frames.published("mbpp_rl")["reward_mean (published)"].max()
    draw_published(ax, _place([began]), [ended], "8B, programs", "D")


def first_updates(rows: Sequence[Row], start: str, title: str) -> Plot:
    """Curves of one start over the updates, by reward: exact match of the training rollouts, and groups with variance."""
    found = cells(rows)
    fig, axes = new_figure(title, cols=2, size=(6.4, 3.0))
    for (where, reward), mine in found.items():
        if where != start:
            continue
        for ax, name in zip(axes[0], ("exact", "live")):
            curve = np.mean([row["curve"][name] for row in mine], axis=0)
            x = np.linspace(0, mine[0]["steps"], len(curve) + 1)[1:]
            ax.plot(x, curve, color=SHAPE_COLOURS[reward], linewidth=1.4, label=reward)
    for ax, y in zip(axes[0], ("exact match of rollouts", "groups with variance")):
        ax.set_ylim(-0.02, 1.02)
        finish(ax, x="update", y=y, legend=ax is axes[0, 0])
    return fig


def main(argv: list[str] | None = None) -> None:
    """`python -m codechat.reports.dense_rewards`."""
    rows, path = frozen(), frozen_rows.frozen_dir().parent / "dense_rewards.png"
    path.write_bytes(figure(rows)._repr_png_()[0])
    print(f"{path}: {finding(rows)}")


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
