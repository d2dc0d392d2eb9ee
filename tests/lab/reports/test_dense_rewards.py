"""Rows of rewards from several starts: which seeds count, gains in closed form, the figure, and
the committed rows."""

import math
from typing import Any

from codechat.evaluation.intervals import equal_interval
from codechat_lab.instruments.reward_starts import SHAPES, STARTS
from codechat_lab.reports import dense_rewards


def row(seed: int, start: str, reward: str, before: list[int], after: list[int]) -> dict[str, Any]:
    """A run of four samples per problem, whose greedy answer is exact where a sample is."""
    return {
        "before": {"greedy": [int(count > 0) for count in before], "correct": before},
        "after": {"greedy": [int(count > 0) for count in after], "correct": after},
        "seed": seed,
        "start": start,
        "reward": reward,
        "samples": 4,
        "curve": {"live": [1.0, 0.5]},
    }


AFTER = {"binary": [0, 0, 4, 0], "staircase": [0, 0, 4, 4]}
ROWS = [
    row(seed, start, reward, [0, 0, 2, 0], AFTER[reward])
    for seed in (0, 1)
    for start in ("base", "weak")
    for reward in AFTER
]


def of_base(reward: str) -> Any:
    """The row of the table for a reward from the base model."""
    return dense_rewards.table(ROWS).set_index(["start", "reward"]).loc["base", reward]


def test_the_rates_of_the_table_in_closed_form() -> None:
    binary = of_base("binary")
    stairs = of_base("staircase")
    assert (binary["pass@1 before"], binary["pass@1"], stairs["pass@1"]) == (0.125, 0.25, 0.5)
    assert (binary["greedy before"], binary["pass@4 before"], stairs["pass@4"]) == (0.25, 0.25, 0.5)


def test_the_gain_of_a_reward_is_over_the_binary_one() -> None:
    stairs = of_base("staircase")
    assert math.isnan(of_base("binary")["gain"])
    assert (stairs["gain"], stairs["live"], stairs["worst seed"]) == (0.25, 0.75, 0.5)
    assert stairs["gain/lo"] <= 0.25 <= stairs["gain/hi"]
    assert stairs["seeds"] == 2


def test_gains_are_paired_by_seed_and_problem() -> None:
    """Seeds that differ by far more than the rewards leave the gain's interval at its value."""
    binary = [row(seed, "weak", "", [0] * 2, [3 * seed] * 2) for seed in (0, 1)]
    stairs = [row(seed, "weak", "", [0] * 2, [3 * seed + 1] * 2) for seed in (0, 1)]
    # equal differences
    found = dense_rewards.gain(stairs, binary)
    by_hand = equal_interval(0.25, 2, (-1.0, 1.0))
    assert (found.value, found.lo, found.hi) == (by_hand.value, by_hand.lo, by_hand.hi)


def test_the_figure_shows_each_reward_at_each_start() -> None:
    fig = dense_rewards.figure(ROWS)
    greedy, warm, live = fig.axes
    shown = set(greedy.get_legend_handles_labels()[1])
    assert fig.get_suptitle().startswith("0 of 2 ")
    assert shown >= {"binary", "staircase"}
    ends = [line.get_ydata().tolist() for line in warm.lines if line.get_marker() == "o"]
    assert ends == [[0.25, 0.25], [0.5, 0.5]]
    assert len(live.lines) == 2


def test_committed_rows_are_of_one_setting() -> None:
    rows = dense_rewards.frozen()
    assert len({(row["settings"], row["steps"], row["weights"]) for row in rows}) == 1


def test_committed_rows_have_every_reward_from_every_start_with_every_seed() -> None:
    rows = dense_rewards.frozen()
    found = dense_rewards.cells(rows)
    assert {*found} == {(start, reward) for start in STARTS for reward in SHAPES}
    for runs in found.values():
        assert len(runs) == len(rows) / len(found)
        assert len({run["seed"] for run in runs}) == len(runs)


def test_committed_rows_have_every_problem() -> None:
    for run in dense_rewards.frozen():
        assert len(run["after"]["correct"]) == len(run["before"]["greedy"]) >= 128
