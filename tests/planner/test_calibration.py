"""Fits find the coefficients that made the measurements, judge themselves on unseen ones, and refuse nonsense."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.planner import AttentionCost, Link
from seqpar.planner.calibration import (
    AttentionTiming,
    ExchangeTiming,
    LinearTiming,
    fit_attention,
    fit_linear,
    fit_link,
    nonnegative,
)

TRUE = AttentionCost(rate=4e11, backward_rate=3e11, piece=2e-6, query_pairs=130.0, key_pairs=55.0, stage=1e-4)


def calls(attention: AttentionCost, seed: int, count: int, noise: float = 0.0) -> list[AttentionTiming]:
    """Calls of random shapes, as long as the model says, give or take noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        pieces, steps = int(rng.integers(1, 40)), int(rng.integers(1, 6))
        queries, keys = int(rng.integers(500, 8000)), int(rng.integers(0, 20_000))
        area = queries * float(rng.integers(100, 5000))
        row = AttentionTiming(512.0, area, queries, keys, pieces, steps, backward=index % 2 == 1, seconds=1.0)
        rows.append(replace(row, seconds=row.predicted(attention) * (1 + noise * rng.uniform(-1, 1))))
    return rows


coefficients = st.builds(
    AttentionCost,
    rate=st.floats(1e10, 1e15),
    backward_rate=st.floats(1e10, 1e15),
    piece=st.sampled_from([0.0, 1e-6, 1e-4]),
    query_pairs=st.sampled_from([0.0, 50.0, 500.0]),
    key_pairs=st.sampled_from([0.0, 50.0, 500.0]),
    stage=st.sampled_from([0.0, 1e-5, 1e-3]),
).filter(lambda a: 0.2 < a.rate / a.backward_rate < 5)


@settings(max_examples=25, deadline=None)
@given(coefficients, st.integers(0, 1000))
@pytest.mark.exhaustive
def test_exact_calls_are_predicted_exactly(true: AttentionCost, seed: int) -> None:
    fit = fit_attention(calls(true, seed, 24), calls(true, seed + 1, 8))
    assert fit.error < 1e-4
    assert fit.value.rate / fit.value.backward_rate == pytest.approx(true.rate / true.backward_rate, rel=1e-2)


def test_coefficients_come_back_through_noise() -> None:
    fit = fit_attention(calls(TRUE, 0, 60, noise=0.04), calls(TRUE, 1, 20, noise=0.04))
    assert 0 < fit.error < 0.04
    assert max(map(abs, fit.errors)) < 0.08
    assert fit.value.rate == pytest.approx(TRUE.rate, rel=0.03)
    assert fit.value.backward_rate == pytest.approx(TRUE.backward_rate, rel=0.03)
    assert fit.value.query_pairs == pytest.approx(TRUE.query_pairs, rel=0.3)


def test_a_link_comes_back() -> None:
    true = Link(latency=3e-5, bandwidth=4e10)
    rows = [ExchangeTiming(size, true.seconds(size)) for size in (1e4, 1e6, 1e7, 1e8)]
    fit = fit_link(rows, [ExchangeTiming(3e6, true.seconds(3e6))])
    assert fit.value.latency == pytest.approx(true.latency)
    assert fit.value.bandwidth == pytest.approx(true.bandwidth)
    assert fit.error < 1e-9


def test_a_rate_comes_back() -> None:
    fit = fit_linear([LinearTiming(1e9, 0.011), LinearTiming(4e9, 0.039)], [LinearTiming(2e9, 0.02)])
    assert fit.value == pytest.approx(1e11, rel=0.03)
    assert fit.error == pytest.approx(abs(2e9 / fit.value / 0.02 - 1))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_nonnegative_is_a_minimum(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, columns)), rng.normal(size=12)
    x, left = nonnegative(a, b, "test")
    rest = a @ x - b
    assert (x >= 0).all()
    assert left == pytest.approx(rest @ rest)
    # Karush-Kuhn-Tucker: no slope along a used column, none downwards along an unused one.
    slope = a.T @ rest
    assert np.abs(slope[x > 0]).max(initial=0) < 1e-9
    assert slope[x == 0].min(initial=0) > -1e-9


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="attention: 6 unknowns need at least as many rows.*got 5 and 8"):
        fit_attention(calls(TRUE, 0, 5), calls(TRUE, 1, 8))
    with pytest.raises(ValueError, match="link: .*an unseen one to judge by, got 2 and 0"):
        fit_link([ExchangeTiming(1e4, 1.0), ExchangeTiming(1e6, 2.0)], [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_measurements_that_cannot_be_are_refused(value: float) -> None:
    rows = calls(TRUE, 0, 20)
    with pytest.raises(ValueError, match="facts must be finite"):
        fit_attention([replace(rows[0], seconds=value), *rows[1:]], rows)
    with pytest.raises(ValueError, match="facts must be finite"):
        fit_attention(rows, [replace(rows[0], area=value)])
    with pytest.raises(ValueError, match="seconds positive"):
        fit_linear([LinearTiming(1e9, 0.0)], [LinearTiming(1e9, 1.0)])


def test_a_fit_that_says_nothing_is_refused() -> None:
    wrong = [replace(row, seconds=2 * row.seconds) for row in calls(TRUE, 1, 8)]
    with pytest.raises(ValueError, match="attention: the fit is off by 50% on unseen rows, more than 25%"):
        fit_attention(calls(TRUE, 0, 24), wrong)


def test_rows_that_do_not_differ_enough_are_refused() -> None:
    rows = [replace(row, keys=2 * row.queries) for row in calls(TRUE, 0, 20)]
    with pytest.raises(ValueError, match="do not determine its 5 coefficients; vary them more"):
        fit_attention(rows, rows)
    with pytest.raises(ValueError, match="forward and backward, got only one of them"):
        fit_attention([replace(row, backward=False) for row in calls(TRUE, 0, 20)], rows)


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="no slower for more bytes"):
        fit_link([ExchangeTiming(size, 1 / (1 + size)) for size in (1.0, 2.0, 3.0)], [ExchangeTiming(2.0, 0.3)])
    flat = [replace(row, seconds=row.steps * 1.0) for row in calls(TRUE, 0, 20)]
    with pytest.raises(ValueError, match="no slower for more pairs"):
        fit_attention(flat, flat)
