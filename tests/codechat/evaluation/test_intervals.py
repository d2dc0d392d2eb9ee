"""pass@k and its intervals: over problems, over clusters, over seeds and problems."""

import itertools

import numpy as np
import pytest

from codechat.evaluation import intervals, results
from codechat.evaluation.intervals import bootstrap_interval, hierarchical_interval, wilson_interval


def test_pass_at_k_equals_enumeration() -> None:
    for n, c, k in ((5, 2, 1), (5, 2, 3), (6, 0, 4), (6, 6, 2), (7, 4, 7)):
        draws = list(itertools.combinations([i < c for i in range(n)], k))
        assert intervals.estimate_pass_at_k(n, c, k) == pytest.approx(
            sum(map(any, draws)) / len(draws)
        )


def test_bootstrap_interval_matches_the_normal_one_and_its_seed() -> None:
    values = np.random.default_rng(3).random(400) < 0.3
    found = bootstrap_interval(values, seed=1)
    half = 1.96 * values.std() / 20
    assert (found.lo, found.hi) == pytest.approx(
        (found.value - half, found.value + half), abs=0.005
    )
    assert found == bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_pairing_sees_a_small_gain_that_two_intervals_hide() -> None:
    a = (np.random.default_rng(0).random(400) < 0.5).astype(float)
    b = a.copy()
    b[np.flatnonzero(a == 0)[:16]] = 1  # the same problems, 16 more of them solved
    gain, lo, hi = intervals.paired_bootstrap(a, b)
    assert gain == pytest.approx(0.04)
    assert 0 < lo < gain < hi
    assert bootstrap_interval(b).lo < bootstrap_interval(a).hi
    back = intervals.paired_bootstrap(b, a)
    assert back == pytest.approx((-gain, -hi, -lo), abs=0.01)


def test_intervals_of_shares_by_hand() -> None:
    none = wilson_interval(0, 20)
    assert none.lo == 0
    assert none.hi == pytest.approx(0.1611, abs=1e-4)
    assert wilson_interval(20, 20).lo == pytest.approx(1 - none.hi)
    assert wilson_interval(50, 100) == pytest.approx((0.5, 0.4038, 0.5962), abs=1e-4)
    # Newcombe 1998, table II, row a, method 10
    gain = intervals.share_difference((48, 80), (56, 70))
    assert gain == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert intervals.share_difference((56, 70), (48, 80)) == pytest.approx(
        (-gain.value, -gain.hi, -gain.lo)
    )
    assert intervals.share_difference((0, 9), (0, 9)).lo < 0


def half(found) -> float:
    return (found.hi - found.lo) / 2


def test_it_covers_the_spread_of_problems_and_of_seeds() -> None:
    """Var = var(seed effects) / S + var(problem effects) / N; the bootstrap over S seeds sees
    (S - 1) / S of the first."""
    rng = np.random.default_rng(0)
    seeds = rng.normal(0, 0.3, (40, 1))
    problems = rng.normal(0, 1, (1, 400))
    of_seeds = seeds.var() / 40
    of_problems = problems.var() / 400
    both = hierarchical_interval(seeds + problems)
    assert half(both) == pytest.approx(1.96 * np.sqrt(of_seeds + of_problems), rel=0.05)
    assert half(hierarchical_interval(seeds + 0 * problems)) == pytest.approx(
        1.96 * np.sqrt(of_seeds), rel=0.05
    )
    same = hierarchical_interval(np.repeat(problems, 3, axis=0))
    assert half(same) == pytest.approx(1.96 * np.sqrt(of_problems), rel=0.05), (
        "equal seeds add nothing"
    )
    one = hierarchical_interval(problems / 9)
    plain = bootstrap_interval(problems[0] / 9)
    assert one.value == pytest.approx(plain.value)
    assert half(one) == pytest.approx(half(plain), rel=0.05)


def test_problems_of_one_tool_are_drawn_together() -> None:
    tools = np.repeat(np.arange(20), 30)
    # a tool is always right or always wrong
    x = np.repeat(np.random.default_rng(0).integers(0, 2, 20), 30)
    alone = hierarchical_interval([x])
    together = hierarchical_interval([x], clusters=list(tools))
    assert half(together) == pytest.approx(half(alone) * np.sqrt(30), rel=0.1)
    unequal = hierarchical_interval([[1.0] * 90 + [0.0] * 10], clusters=["a"] * 90 + ["b"] * 10)
    assert unequal.value == pytest.approx(0.9)
    assert (unequal.lo, unequal.hi) == (0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_equal_values_have_an_interval_that_narrows_with_their_number(value: float) -> None:
    few = bootstrap_interval([value] * 20)
    many = bootstrap_interval([value] * 2000)
    assert 0 <= few.lo <= many.lo <= value <= many.hi <= few.hi <= 1
    assert half(few) == pytest.approx(wilson_interval(0, 20).hi / 2)
    assert 0 < half(many) < 0.01


def test_seeds_with_other_problems_count_what_they_have() -> None:
    rng = np.random.default_rng(0)
    nan = np.nan
    x = rng.normal(0, 1, (2, 200))
    apart = np.concatenate(
        [np.where(np.arange(400) < 200, np.tile(row, 2), nan)[None] for row in x]
    )
    apart[1] = apart[1][::-1]  # no problem in common
    found = hierarchical_interval(apart)
    assert found.value == pytest.approx(x.mean())
    assert found.lo < found.value < found.hi
    assert hierarchical_interval([[1.0, nan], [nan, 1.0]]).value == 1


def test_the_mean_of_equal_values_has_the_range_of_the_task() -> None:
    for clusters in (0, 25):
        named = [{"cluster": f"tool {i % clusters}"} if clusters else {} for i in range(50)]
        problems = [dict(id=f"p{i}", **of) for i, of in enumerate(named)]
        share = wilson_interval(0, clusters or 50).hi
        best, worst = (results.mean_over(problems, [v] * 50, largest=4.0) for v in (4.0, 0.0))
        assert (best.lo, best.hi) == (4 - share * 4, 4)
        assert (worst.lo, worst.hi) == (0, share * 4)
        mixed = [i % 3 / 2 for i in range(50)]  # bounds play no part where values differ
        assert results.mean_over(problems, mixed, 3) == results.mean_over(
            problems, mixed, 3, largest=4.0
        )
