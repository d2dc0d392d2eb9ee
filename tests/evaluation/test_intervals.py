"""The bootstrap over seeds and problems."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from codechat.evaluation import results
from codechat.evaluation.intervals import bootstrap_interval, hierarchical_interval, wilson_interval


def half(found) -> float:
    return (found.hi - found.lo) / 2


def test_one_seed_gives_the_bootstrap_over_problems() -> None:
    x = np.random.default_rng(0).integers(0, 2, 300)
    one, plain = hierarchical_interval([x]), bootstrap_interval(x)
    assert one.value == pytest.approx(plain.value) and half(one) == pytest.approx(half(plain), rel=0.05)


def test_it_covers_the_spread_of_problems_and_of_seeds() -> None:
    """Var = var(seed effects) / S + var(problem effects) / N; the bootstrap over S seeds sees (S - 1) / S of the first."""
    rng = np.random.default_rng(0)
    seeds, problems = rng.normal(0, 0.3, (40, 1)), rng.normal(0, 1, (1, 400))
    of_seeds, of_problems = seeds.var() / 40, problems.var() / 400
    both = hierarchical_interval(seeds + problems)
    assert half(both) == pytest.approx(1.96 * np.sqrt(of_seeds + of_problems), rel=0.05)
    assert half(hierarchical_interval(seeds + 0 * problems)) == pytest.approx(1.96 * np.sqrt(of_seeds), rel=0.05)
    same = hierarchical_interval(np.repeat(problems, 3, axis=0))
    assert half(same) == pytest.approx(1.96 * np.sqrt(of_problems), rel=0.05), "equal seeds add nothing"


def test_problems_of_one_tool_are_drawn_together() -> None:
    tools = np.repeat(np.arange(20), 30)
    x = np.repeat(np.random.default_rng(0).integers(0, 2, 20), 30)  # a tool is always right or always wrong
    alone, together = hierarchical_interval([x]), hierarchical_interval([x], clusters=list(tools))
    assert half(together) == pytest.approx(half(alone) * np.sqrt(30), rel=0.1)
    unequal = hierarchical_interval([[1.0] * 90 + [0.0] * 10], clusters=["a"] * 90 + ["b"] * 10)
    assert unequal.value == pytest.approx(0.9) and (unequal.lo, unequal.hi) == (0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_equal_values_have_an_interval_that_narrows_with_their_number(value: float) -> None:
    few, many = bootstrap_interval([value] * 20), bootstrap_interval([value] * 2000)
    assert 0 <= few.lo <= many.lo <= value <= many.hi <= few.hi <= 1
    assert half(few) == pytest.approx(wilson_interval(0, 20).hi / 2) and 0 < half(many) < 0.01


def test_seeds_with_other_problems_count_what_they_have() -> None:
    rng, nan = np.random.default_rng(0), np.nan
    x = rng.normal(0, 1, (2, 200))
    apart = np.concatenate([np.where(np.arange(400) < 200, np.tile(row, 2), nan)[None] for row in x])
    apart[1] = apart[1][::-1]  # no problem in common
    found = hierarchical_interval(apart)
    assert found.value == pytest.approx(x.mean()) and found.lo < found.value < found.hi
    assert hierarchical_interval([[1.0, nan], [nan, 1.0]]).value == 1


def test_requests_for_one_tool_are_not_independent() -> None:
    def problems(clusters: int) -> list[results.ProblemResult]:
        return [
            results.ProblemResult(f"p{i}", 1, i % 5 % 2, 0.0, Counter(), cluster=f"tool {i % 5}" if clusters else "")
            for i in range(100)
        ]

    alone, together = (results._pass_at_1(problems(clusters)) for clusters in (0, 5))
    assert alone.value == together.value == 0.4
    assert together.hi - together.lo > 3 * (alone.hi - alone.lo)
    assert problems(5)[3].row()["cluster"] == "tool 3" and "cluster" not in problems(0)[3].row()


@pytest.mark.parametrize("cluster", ["", "tool"])
def test_the_mean_of_equal_values_has_the_range_of_the_task(cluster: str) -> None:
    problems = [
        results.ProblemResult(f"p{i}", 1, 1, 4.0, Counter(), cluster=cluster and f"tool {i % 25}") for i in range(50)
    ]
    share = wilson_interval(0, 25 if cluster else 50).hi
    best, worst = (results.mean_over(problems, [v] * 50, largest=4.0) for v in (4.0, 0.0))
    assert (best.lo, best.hi) == (4 - share * 4, 4) and (worst.lo, worst.hi) == (0, share * 4)
    mixed = [i % 3 / 2 for i in range(50)]  # bounds play no part where values differ
    assert results.mean_over(problems, mixed, 3) == results.mean_over(problems, mixed, 3, largest=4.0)
