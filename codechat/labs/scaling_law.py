"""A scaling law of loss over model size and tokens, L = E + A / N^a + B / D^b (arXiv:2203.15556, eq. 2), and which
parameters the points identify.

    law = fit(n, d, loss)          # sizes, tokens and losses of P training runs, arrays (P,)
    law.predict(n, d), law.residuals, law.region["a"]

Given a, b and E the law is linear in A and B, so the fit searches a grid of the three: no start values, no local minima.
`region` holds the range of each parameter among the fits that are not significantly worse than the best (F test of one
parameter, 95 %); one whose range touches the end of its grid is not identified. Deviation from the source: squared error
of the loss instead of the Huber loss of its logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codechat.core.errors import DataError

EXPONENTS = np.round(np.arange(0.05, 1.501, 0.05), 2)
FLOORS = 41  # values of E from 0 to the smallest loss
# Square of Student's t at 95 %, by degrees of freedom.
T_SQUARED = (161.4, 18.51, 10.13, 7.709, 6.608, 5.987, 5.591, 5.318, 5.117, 4.965)


@dataclass(frozen=True)
class Law:
    """E, A, B in nats per token, A and B at n0, d0 (geometric means). residuals: (P,) measured minus fitted."""

    E: float
    A: float
    B: float
    a: float
    b: float
    n0: float
    d0: float
    residuals: np.ndarray
    region: dict[str, tuple[float, float]]
    identified: tuple[str, ...]

    def predict(self, n: np.ndarray | float, d: np.ndarray | float) -> np.ndarray:
        """Loss of models of n parameters after d tokens."""
        return self.E + self.A * (np.asarray(n) / self.n0) ** -self.a + self.B * (np.asarray(d) / self.d0) ** -self.b

    @property
    def rmse(self) -> float:
        return float(np.sqrt(np.mean(self.residuals**2)))


def fit(n: np.ndarray, d: np.ndarray, loss: np.ndarray, *, floor: bool = True, size: bool = True) -> Law:
    """The law through points (P,), more than it has parameters. floor=False: E = 0; size=False: A = 0."""
    n, d, loss = (np.asarray(x, dtype=float) for x in (n, d, loss))
    free = 2 + floor + 2 * size  # B and b; E; A and a
    if not len(n) == len(d) == len(loss) or len(n) <= free:
        got = f"{len(n)} sizes, {len(d)} token counts, {len(loss)} losses"
        raise DataError(f"{got} for a law of {free} parameters; at least {free + 1} points are required")
    n0, d0 = float(np.exp(np.log(n).mean())), float(np.exp(np.log(d).mean()))
    E = np.linspace(0, loss.min(), FLOORS, endpoint=False) if floor else np.zeros(1)
    a, b = (EXPONENTS if size else EXPONENTS[:1]), EXPONENTS
    x, y = (n / n0) ** -a[:, None], (d / d0) ** -b[:, None]  # (len(a), P), (len(b), P)
    x = x if size else np.zeros_like(x)
    rest = loss - E[:, None]  # (len(E), P)
    A, B = _two_columns(x[:, None, None], y[None, :, None], rest[None, None])  # (len(a), len(b), len(E))
    errors = ((rest[None, None] - A[..., None] * x[:, None, None] - B[..., None] * y[None, :, None]) ** 2).sum(-1)
    i, j, k = np.unravel_index(errors.argmin(), errors.shape)
    best = dict(E=E[k], A=A[i, j, k], B=B[i, j, k], a=a[i], b=b[j])
    left = len(n) - free
    inside = errors <= errors.min() * (1 + T_SQUARED[min(left, len(T_SQUARED)) - 1] / left) + 1e-12
    grids = dict(E=E, A=A, B=B, a=a[:, None, None], b=b[:, None])
    near = {name: np.broadcast_to(grid, errors.shape)[inside] for name, grid in grids.items()}
    region = {name: (float(values.min()), float(values.max())) for name, values in near.items()}
    exponents, terms = (EXPONENTS[0], EXPONENTS[-1]), (0.0, np.inf)
    ends = dict(a=exponents, b=exponents, E=(E[0], E[-1]), A=terms, B=terms)
    fixed = ([] if floor else ["E"]) + ([] if size else ["A", "a"])
    free_of_ends = (p for p, (lo, hi) in region.items() if p not in fixed and lo > ends[p][0] and hi < ends[p][1])
    residuals = loss - best["E"] - best["A"] * x[i] - best["B"] * y[j]
    values = {k: float(v) for k, v in best.items()}
    return Law(**values, n0=n0, d0=d0, residuals=residuals, region=region, identified=tuple(free_of_ends))


def _two_columns(x: np.ndarray, y: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of r by A x + B y over the last axis, A and B at least 0."""
    xx, yy, xy, xr, yr = ((u * v).sum(-1) for u, v in ((x, x), (y, y), (x, y), (x, r), (y, r)))
    det = xx * yy - xy**2
    with np.errstate(divide="ignore", invalid="ignore"):
        A, B = (np.where(det > 1e-12, top / det, -1.0) for top in (yy * xr - xy * yr, xx * yr - xy * xr))
        alone_x, alone_y = (np.where(uu > 0, np.maximum(ur / uu, 0), 0.0) for uu, ur in ((xx, xr), (yy, yr)))
    gain_x, gain_y = alone_x * xr, alone_y * yr  # squared error that each column removes alone
    inner, only_x = (A >= 0) & (B >= 0), gain_x > gain_y
    return np.where(inner, A, np.where(only_x, alone_x, 0.0)), np.where(inner, B, np.where(only_x, 0.0, alone_y))


def leave_one_out_errors(n: np.ndarray, d: np.ndarray, loss: np.ndarray, **kind: bool) -> np.ndarray:
    """(P,) each point's loss minus the prediction of the law through the other points."""
    n, d, loss = (np.asarray(x, dtype=float) for x in (n, d, loss))
    at = np.arange(len(n))
    return np.array([loss[i] - fit(n[at != i], d[at != i], loss[at != i], **kind).predict(n[i], d[i]) for i in at])
