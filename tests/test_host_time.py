"""`bench/host_time.py` and the files that measurements write."""

from __future__ import annotations

import numpy as np
import pytest

from bench import host_time


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_ratio_is_found_within_its_interval(factor: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(10.0, 0.3, 24)
    middle, low, high = host_time.ratio(old.tolist(), (old * factor * rng.normal(1.0, 0.02, 24)).tolist())
    assert low < factor < high and middle == pytest.approx(factor, abs=0.02)
    assert (low > host_time.BEGINS) == (factor == 1.1)
