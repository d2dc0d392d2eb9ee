"""Estimates with 95 % intervals: pass@k, bootstrap over problems, over seeds and problems, Wilson.

The bootstrap resamples problems, not completions, because completions of one problem are not
independent."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    lo: float
    hi: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.lo:.3f}, {self.hi:.3f}]"

    def row(self, name: str) -> dict[str, float]:
        """The metrics NAME, NAME/lo and NAME/hi."""
        return {name: self.value, f"{name}/lo": self.lo, f"{name}/hi": self.hi}


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions is correct, from n samples with c correct
    ones: 1 - C(n-c, k) / C(n, k).

    Unbiased (Chen et al., 2021, arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, *, seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Interval:
    """Mean over problems with the percentile bootstrap interval (Efron, 1979). bounds: as of
    `equal_interval`."""
    x = np.asarray(values, dtype=np.float64)
    if x.min() == x.max():
        return equal_interval(float(x[0]), x.size, bounds)
    rng = np.random.default_rng(seed)
    means = [
        x[rng.integers(0, x.size, (r, x.size))].mean(axis=1) for r in _chunks(RESAMPLES, x.size)
    ]
    return _percentiles(float(x.mean()), means)


def equal_interval(value: float, n: int, bounds: tuple[float, float]) -> Interval:
    """The interval of n equal values, which a bootstrap would give no width: widened by
    Wilson's upper bound for 0 of n towards the bounds, the smallest and the largest possible
    value. nan if the value is outside the bounds."""
    low, high = bounds
    if not low <= value <= high:
        return Interval(value, math.nan, math.nan)
    u = wilson_interval(0, n).hi
    return Interval(value, value - u * (value - low), value + u * (high - value))


def paired_bootstrap(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, seed: int = 0
) -> Interval:
    """mean(b) - mean(a), values in [0, 1] of the same problems in the same order."""
    return bootstrap_interval(np.subtract(b, a, dtype=np.float64), seed=seed, bounds=(-1.0, 1.0))


def hierarchical_interval(
    values: Sequence[Sequence[float]] | np.ndarray,
    *,
    clusters: Sequence[object] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    bounds: tuple[float, float] = (-1.0, 1.0),
) -> Interval:
    """Mean of values (seeds, problems) with the percentile interval of a bootstrap over both;
    nan = a seed that lacks the problem. A resample draws seeds, and problems (or clusters of
    them) that all its seeds share."""
    x = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(x)
    names = range(x.shape[1]) if clusters is None else map(str, clusters)
    groups = np.unique(list(names), return_inverse=True)[1]
    n_groups = int(groups.max()) + 1
    if np.nanmin(x) == np.nanmax(x):
        return equal_interval(float(np.nanmax(x)), n_groups, bounds)
    sums = _by_group(np.where(known, x, 0), groups, n_groups)  # (seeds, groups)
    sizes = _by_group(known, groups, n_groups)  # (seeds, groups)
    rng = np.random.default_rng(seed)
    means = []
    for r in _chunks(resamples, n_groups):
        # (r, seeds) times that each is drawn
        of_seeds = rng.multinomial(len(x), np.full(len(x), 1 / len(x)), r)
        of_groups = rng.multinomial(n_groups, np.full(n_groups, 1 / n_groups), r)  # (r, groups)
        total = ((of_seeds @ sums) * of_groups).sum(1)
        count = ((of_seeds @ sizes) * of_groups).sum(1)
        means.append(total / np.maximum(count, 1))
    return _percentiles(float(np.nanmean(x)), means)


def _by_group(table: np.ndarray, groups: np.ndarray, n_groups: int) -> np.ndarray:
    """(seeds, groups): each row of (seeds, problems) summed within groups."""
    return np.stack([np.bincount(groups, row, n_groups) for row in table])


def _chunks(resamples: int, width: int) -> list[int]:
    """How many resamples are drawn at a time, in bounded memory."""
    rows = max(1, 2_000_000 // width)
    return [min(rows, resamples - at) for at in range(0, resamples, rows)]


def _percentiles(value: float, means: list[np.ndarray]) -> Interval:
    lo, hi = np.percentile(np.concatenate(means), (2.5, 97.5))
    return Interval(value, float(lo), float(hi))


def wilson_interval(successes: int, n: int) -> Interval:
    """A share with the score interval of Wilson (1927), which also holds at 0, at n and for
    small n."""
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    p = successes / n
    z = 1.959964  # 97.5 % of a normal distribution lie below it
    shrink = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    variance = p * (1 - p) / n + z * z / (4 * n * n)
    half = z / shrink * math.sqrt(variance)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def share_difference(a: tuple[int, int], b: tuple[int, int]) -> Interval:
    """Share b minus share a, each (successes, n), with its score interval (Newcombe 1998,
    method 10)."""
    x = wilson_interval(*a)
    y = wilson_interval(*b)
    difference = y.value - x.value
    below = math.hypot(y.value - y.lo, x.hi - x.value)
    above = math.hypot(y.hi - y.value, x.value - x.lo)
    return Interval(difference, difference - below, difference + above)
