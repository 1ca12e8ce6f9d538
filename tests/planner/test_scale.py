"""Batches of more ticks than 64 bits hold are planned in longer ticks: bounds, plans and forecasts stay right."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Mask
from seqpar.plan.counts import load_of
from seqpar.planner import Hardware, Link, ModelShape, plan_batch, plan_step
from seqpar.planner.bound import weights_for, whole_ticks
from seqpar.planner.cost import Weights
from seqpar.planner.problem import layers_of
from tests.cases import examples

H100 = Hardware.preset("h100")
# links that one peer fills, however many ranks
VAST = dataclasses.replace(H100, memory=1 << 60, inside=Link(H100.inside.latency, H100.inside.bandwidth))
LLAMA = ModelShape.preset("llama-8b")
TOKENS = (1 << 31) - 1  # the most that kernels number


def seconds_of_all(lengths: list[int], model: ModelShape, machine: Hardware) -> float:
    """Seconds of causal attention and linear layers of whole documents on one rank, in floating point alone."""
    a, pairs = machine.attention, sum(float(n) * (n + 1) / 2 for n in lengths)
    rows = float(sum(lengths)) * a.query_pairs
    forward = model.pair_flops * model.layers * (pairs + rows)
    again = model.recompute in ("attention", "full")
    linear = (3 + (model.recompute == "full")) * model.linear_flops + 3 * model.head_flops
    computing = (1 + again) * forward / a.rate + 2.5 * forward / a.backward_rate
    return computing + linear * float(sum(lengths)) / machine.linear_rate


@pytest.mark.parametrize(
    ("lengths", "ranks", "most"),
    [
        ([10**6] * 100, 2048, 0.01),
        ([10**6] * 150, 2048, 0.011),
        ([2 * 10**7], 2048, 0.01),
        ([2 * 10**7] + [10**6] * 20 + [1000] * 5000, 1024, 0.01),
        ([4 * 10**7], 2048, 0.01),
        ([3 * 10**7] + [4000] * 4000, 512, 0.01),
        ([10**8], 4096, 0.01),
        ([TOKENS], 8, 0.01),
    ],
    ids=["100 x 1M", "150 x 1M", "20M", "20M and shorter", "40M", "30M and short", "100M", "int32"],
)
def test_large_batches_have_balanced_plans_and_bounds(lengths: list[int], ranks: int, most: float) -> None:
    # only the one that no machine of today holds needs more memory
    machine = VAST if sum(lengths) == TOKENS else Hardware.preset("h100")
    plan = plan_batch(lengths, ranks, hardware=machine)
    forecast, area = plan.forecast, load_of(plan).area
    assert forecast.least == pytest.approx(seconds_of_all(lengths, forecast.model, machine) / ranks, rel=1e-3)
    assert forecast.least <= forecast.seconds <= (1 + most) * forecast.least
    assert area.max() / area.mean() < 1.01 and area.sum() == pytest.approx(plan.mask.area())


def test_tokens_that_kernels_do_not_number_are_refused_before_planning() -> None:
    for planner in (plan_batch, plan_step):
        for tokens in (TOKENS + 1, 1 << 40, 1 << 61):
            with pytest.raises(NotImplementedError, match=f"int32, .* {tokens} .*; split"):
                planner([tokens], 8, hardware=VAST)
    # a step is split anyway
    parts = plan_step([TOKENS, 5, TOKENS, 7], 8, hardware=VAST)
    assert sorted(m.plan.mask.tokens for m in parts) in ([5 + 7, TOKENS, TOKENS], [5, 7, TOKENS, TOKENS])


LINKS = st.sampled_from([1.0, 1e-3, 1e-6])


@st.composite
def huge(draw) -> list[int]:
    """Documents of millions of tokens among short ones, below what kernels number."""
    lengths = draw(st.lists(st.integers(10**6, 10**9), min_size=1, max_size=6))
    while sum(lengths) > TOKENS - 10**6:
        lengths = [n // 2 for n in lengths]
    short = draw(st.lists(st.integers(1, 5000), max_size=30))
    return draw(st.permutations(lengths + short))


@examples(15)
@given(
    huge(), st.sampled_from([1, 2, 7, 8, 24, 64, 512]), LINKS, st.sampled_from(["llama-8b", "deepseek-v3", "tiny"]),
    st.sampled_from([(None,), (None, 4096)]), st.booleans(),
)  # fmt: skip
def test_forecasts_of_huge_batches_are_no_less_than_bounds(lengths, ranks, slower, model, windows, full) -> None:
    links = {n: Link(x.latency, x.bandwidth * slower) for n, x in (("inside", VAST.inside), ("across", VAST.across))}
    machine = dataclasses.replace(VAST, **links)
    shape = dataclasses.replace(ModelShape.preset(model), windows=windows)
    masks = Mask(lengths, causal=False) if full else None
    plan = plan_batch(lengths, ranks, model=shape, hardware=machine, masks=masks)
    forecast = plan.forecast
    assert 0 < forecast.least <= forecast.seconds < math.inf
    # slow links are exposed, and what is fetched over them in several stages is merged
    assert forecast.imbalance < 0.5 and (slower < 1 or forecast.gap < 0.1)
    assert all((seconds >= 0).all() for seconds in forecast.phases.values())
    assert load_of(plan).area.sum() == pytest.approx(plan.mask.area())


def test_ticks_are_as_fine_as_64_bits_allow() -> None:
    finest = Weights.of(LLAMA, VAST)
    for documents in (1, 50, 80):
        layers = layers_of(np.full(documents, 10**6), None, LLAMA)
        assert weights_for(layers, LLAMA, VAST, stage_bytes=1 << 20) == finest
    layers = layers_of(np.full(200, 10**6), None, LLAMA)
    coarse = weights_for(layers, LLAMA, VAST, stage_bytes=1 << 20)
    assert finest.second < coarse.second <= 32 * finest.second
    whole = whole_ticks(layers, finest) * finest.second
    pairs = coarse.both.pair * (layers[0][0].area() >> coarse.area)
    rows = (coarse.row + coarse.label + 32 * coarse.both.query) * layers[0][0].tokens
    # what a row costs is rounded, which is nothing beside its attention
    assert coarse.second * (rows + 32 * pairs) == pytest.approx(whole)


@pytest.mark.parametrize("field", ["rate", "backward_rate"])
def test_directions_may_differ_as_far_as_machines_may(field: str) -> None:
    attention = dataclasses.replace(VAST.attention, **{field: 1.0})
    machine = dataclasses.replace(VAST, attention=attention)
    for ranks in (1, 3, 16):
        forecast = plan_batch([9000, 700, 50, 4000], ranks, model="tiny", hardware=machine).forecast
        assert 0 < forecast.least <= forecast.seconds < 1.5 * forecast.least
