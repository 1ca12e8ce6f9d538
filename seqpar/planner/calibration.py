"""A machine's coefficients from measurements: least squares of relative errors, no coefficient negative.

Every model here is a sum of terms; a term is a property of the run (pieces, operations, bytes) times a coefficient. A
fit is judged on rows that it was not fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.planner.hardware import BACKWARD, AttentionCost, Link

LIMIT = 0.25  # mean error on unseen rows above which a fit is rejected
Floats = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class AttentionTiming:
    """A measured attention call on one rank, forward or backward; fields as in `AttentionCost.seconds`."""

    flops: float
    area: float
    queries: float
    keys: float
    pieces: float
    steps: float
    backward: bool
    seconds: float

    def predicted(self, attention: AttentionCost) -> float:
        """Seconds of this call by the model."""
        facts = {k: v for k, v in asdict(self).items() if k not in ("flops", "seconds")}
        return attention.seconds(self.flops, **facts)


@dataclass(frozen=True)
class LinearTiming:
    """Measured linear layers: operations and seconds, forward and backward together."""

    flops: float
    seconds: float


@dataclass(frozen=True)
class ExchangeTiming:
    """A measured exchange: bytes that a rank sent while it received the same number, and seconds."""

    size: float
    seconds: float


@dataclass(frozen=True)
class Fit(Generic[T]):
    """A fitted value. error: mean over unseen rows of |predicted - measured| / measured; errors: with sign, by row."""

    value: T
    error: float
    errors: tuple[float, ...]


def fit_attention(rows: Sequence[AttentionTiming], unseen: Sequence[AttentionTiming]) -> Fit[AttentionCost]:
    """Attention's coefficients from forward and backward calls.

    Raises: ValueError as `require_observations` and `nonnegative`.

    Forward and backward share a row's cost in pairs. The ratio of their rates is searched; for a given ratio the rest
    is linear.
    """
    require_observations("attention", rows, unseen, unknowns=6)
    if {row.backward for row in rows} != {False, True}:
        raise ValueError("attention: measure forward and backward, got only one of them")
    terms = np.array([[r.steps, r.pieces, *(r.flops * np.array([r.area, r.queries, r.keys]))] for r in rows], float)
    seconds = np.array([row.seconds for row in rows])
    backward = np.array([row.backward for row in rows])

    def solved(ratio: float) -> tuple[Floats, float]:
        scaled = terms.copy()
        scaled[backward, 2:] *= BACKWARD * ratio
        return nonnegative(scaled / seconds[:, None], np.ones(len(rows)), "attention")

    ratio = math.exp(_lowest(lambda x: solved(math.exp(x))[1], math.log(0.1), math.log(10.0)))
    stage, piece, pair, query, key = (float(x) for x in solved(ratio)[0])
    if pair <= 0:
        raise ValueError("attention: the measured calls are no slower for more pairs; measure longer documents")
    value = AttentionCost(
        rate=1 / pair, backward_rate=1 / (pair * ratio), piece=piece, query_pairs=query / pair, key_pairs=key / pair,
        stage=stage,
    )  # fmt: skip
    return judged("attention", value, [row.predicted(value) for row in unseen], unseen)


def fit_linear(rows: Sequence[LinearTiming], unseen: Sequence[LinearTiming]) -> Fit[float]:
    """Operations per second of linear layers. Raises: ValueError as `require_observations`."""
    require_observations("linear layers", rows, unseen, unknowns=1)
    terms = np.array([[row.flops / row.seconds] for row in rows])
    rate = 1 / float(nonnegative(terms, np.ones(len(rows)), "linear layers")[0][0])
    return judged("linear layers", rate, [row.flops / rate for row in unseen], unseen)


def fit_link(rows: Sequence[ExchangeTiming], unseen: Sequence[ExchangeTiming], *, what: str = "link") -> Fit[Link]:
    """A link from exchanges of several sizes. Raises: ValueError as `require_observations` and `nonnegative`."""
    require_observations(what, rows, unseen, unknowns=2)
    terms = np.array([[1 / row.seconds, row.size / row.seconds] for row in rows])
    latency, byte = (float(x) for x in nonnegative(terms, np.ones(len(rows)), what)[0])
    if byte <= 0:
        raise ValueError(f"{what}: the measured exchanges are no slower for more bytes; measure larger ones")
    value = Link(latency=latency, bandwidth=1 / byte)
    return judged(what, value, [value.seconds(row.size) for row in unseen], unseen)


def require_observations(what: str, rows: Sequence[Any], unseen: Sequence[Any], *, unknowns: int) -> None:
    """Raise ValueError for too few rows, negative or infinite fields, or seconds that are not positive."""
    if len(rows) < unknowns or not unseen:
        raise ValueError(
            f"{what}: {unknowns} unknowns need at least as many rows and an unseen one to judge by, "
            f"got {len(rows)} and {len(unseen)}"
        )
    for row in (*rows, *unseen):
        if not all(math.isfinite(x) and x >= 0 for x in asdict(row).values()) or row.seconds <= 0:
            raise ValueError(f"{what}: facts must be finite and at least 0, seconds positive, got {row}")


def judged(what: str, value: T, predicted: Sequence[float], unseen: Sequence[Any]) -> Fit[T]:
    """The fit with its errors on unseen rows. Raises ValueError if their mean is above `LIMIT`."""
    errors = tuple(p / row.seconds - 1 for p, row in zip(predicted, unseen, strict=True))
    error = sum(map(abs, errors)) / len(errors)
    if error > LIMIT:
        raise ValueError(
            f"{what}: the fit is off by {error:.0%} on unseen rows, more than {LIMIT:.0%}: {value}; "
            "measure again on an idle machine"
        )
    return Fit(value, error, errors)


def nonnegative(terms: ArrayLike, target: ArrayLike, what: str) -> tuple[Floats, float]:
    """(x, |terms x - target|^2) with the least sum of squares over all x >= 0.

    The minimum is an ordinary least-squares solution over some subset of the columns. There are few columns, so all
    subsets are tried. Raises: ValueError if the rows do not determine the columns.
    """
    a, b = np.asarray(terms, np.float64), np.asarray(target, np.float64)
    columns = a.shape[1]
    scale = np.linalg.norm(a, axis=0)
    scaled = a / np.where(scale > 0, scale, 1.0)
    if np.linalg.matrix_rank(scaled, tol=1e-6) < columns:
        raise ValueError(f"{what}: the measured rows do not determine its {columns} coefficients; vary them more")
    best, least = np.zeros(columns), float(b @ b)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = scaled[:, chosen]
            x = np.linalg.lstsq(part, b, rcond=None)[0]
            rest = part @ x - b
            left = float(rest @ rest)
            if (x >= 0).all() and left < least:
                best, least = np.zeros(columns), left
                best[list(chosen)] = x / scale[list(chosen)]
    return best, least


def _lowest(of: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function: the best point of a grid, then of finer ones between its neighbours."""
    for _ in range(8):
        grid = np.linspace(low, high, 25)
        at = int(np.argmin([of(float(x)) for x in grid]))
        low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    return (low + high) / 2
