"""How sure a median of few measurements is."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEVEL = 0.9  # of the intervals


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values that enclose the true median with probability `LEVEL`; the extremes if there are few."""
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while 2 * (outside + math.comb(n, k) / 2**n) <= 1 - LEVEL and k < n // 2:
        outside += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]
