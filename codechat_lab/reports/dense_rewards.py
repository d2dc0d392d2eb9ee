"""When does a dense reward help? Table and figure of the rows of
`codechat_lab.instruments.reward_starts`.

Intervals are hierarchical, over seeds and problems; a gain over the binary reward is paired by
seed and problem."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from codechat.core.atomic_files import read_rows
from codechat.evaluation.intervals import Interval, estimate_pass_at_k, hierarchical_interval
from codechat_lab.reports import run_frames
from codechat_lab.reports.style import GREY, SHAPE_COLOURS, Plot, errors_of, finish, new_figure

Row = Mapping[str, Any]
REFERENCE = "binary"


def frozen(baseline: str = "mean") -> list[dict[str, Any]]:
    """The committed rows of one baseline; `python tools/reward_rows.py starts` trains them."""
    return [
        row
        for row in read_rows(run_frames.frozen_dir() / "thesis.jsonl")
        if row["baseline"] == baseline
    ]


def cells(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(start, reward) -> one row per seed, in the order of seeds."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault((row["start"], row["reward"]), []).append(row)
    return found


def values(rows: Sequence[Row], when: str, measure: str) -> np.ndarray:
    """(seeds, problems) of "greedy", "pass@1" or "pass@8"; when: "before" or "after"."""
    if measure == "greedy":
        return np.array([row[when]["greedy"] for row in rows], dtype=float)
    k = int(measure.removeprefix("pass@"))
    samples = np.array([[row["samples"]] for row in rows])
    correct = np.array([row[when]["correct"] for row in rows])
    return np.vectorize(estimate_pass_at_k, otypes=[float])(samples, correct, k)


def score(rows: Sequence[Row], when: str, measure: str) -> Interval:
    return hierarchical_interval(values(rows, when, measure), bounds=(0.0, 1.0))


def gain(rows: Sequence[Row], reference: Sequence[Row], measure: str = "pass@1") -> Interval:
    """What the runs score above the reference after RL, paired by seed and problem."""
    return hierarchical_interval(
        values(rows, "after", measure) - values(reference, "after", measure)
    )


def live_share(rows: Sequence[Row]) -> float:
    """Groups with variance, mean over all updates and seeds."""
    return float(np.mean([np.mean(row["curve"]["live"]) for row in rows]))


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per start and reward: exact match before and after, pass@8, exact match of the
    worst seed, the gain over the binary reward, groups with variance over all updates."""
    found = cells(rows)
    parts = []
    for (start, reward), runs in found.items():
        row: dict[str, Any] = {
            "start": start,
            "reward": reward,
            "seeds": len(runs),
            "live": live_share(runs),
        }
        for measure in ("greedy", "pass@1", f"pass@{runs[0]['samples']}"):
            row[f"{measure} before"] = score(runs, "before", measure).value
            row |= score(runs, "after", measure).row(measure)
        row["worst seed"] = float(values(runs, "after", "pass@1").mean(1).min())
        if reward != REFERENCE:
            row |= gain(runs, found[start, REFERENCE]).row("gain")
        parts.append(row)
    return pd.DataFrame(parts)


def figure(rows: Sequence[Row]) -> Plot:
    """Exact match after RL, greedy and at T = 1, and groups with variance: a point per start
    and reward, side by side."""
    found = table(rows)
    above = (found["gain/lo"] > 0).sum()
    title = (
        f"{above} of {found['gain'].count()} rewards with partial credit end above the binary one, "
        "though more groups teach"
    )
    fig, axes = new_figure(title, cols=3, size=(9.6, 3.4), sharey=True)
    greedy, sampled, live = axes[0]
    before = found.drop_duplicates("start")
    places = np.arange(len(before))
    for ax, measure in ((greedy, "greedy"), (sampled, "pass@1")):
        ax.plot(
            places, before[f"{measure} before"], "_", color=GREY, markersize=22, label="before RL"
        )
    for i, (reward, runs) in enumerate(found.groupby("reward", sort=False)):
        at = places + 0.17 * (i - 1.5)
        colour = SHAPE_COLOURS[reward]
        for ax, measure in ((greedy, "greedy"), (sampled, "pass@1")):
            ax.errorbar(
                at,
                runs[measure],
                errors_of(runs, measure),
                label=reward,
                fmt="o",
                color=colour,
                markersize=4.5,
                capsize=2.5,
                elinewidth=1.4,
            )
        live.plot(at, runs["live"], "o", color=colour, markersize=4.5)
    ticks = [
        f"{start}\n{rate:.1%}" for start, rate in zip(before["start"], before["pass@1 before"])
    ]
    for ax, label in zip(
        axes[0], ("exact match, greedy", "exact match, T = 1", "groups with variance, all updates")
    ):
        ax.set_xticks(places, ticks)
        ax.set_ylim(-0.02, 1.02)
        x = "start of RL, and its exact match at T = 1"
        finish(ax, x=x, y=label, loc="upper left", legend=ax is greedy)
    return fig
