"""Sharded attention equals one device where keys end before the last query, as in trees; in float64 to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes, run_threads, seen_pairs
from tests.cases import ENDING, LAYOUTS, Case, any_cases, random_tree
from tests.ops.cases import (
    EACH,
    HEADS,
    OUT,
    Options,
    check,
    check_product,
    options_strategy,
    uses_strategy,
)


@settings(max_examples=150)
@given(any_cases(masks=ENDING), st.sampled_from(HEADS), options_strategy, uses_strategy, st.integers(0, 1000))
def test_any_plan_and_option_equals_one_device(case, heads, options, uses, seed) -> None:
    options = replace(options, alibi=False)
    check(case.plan(), heads, (6, 4), options, uses=uses, seed=seed)


COVERED = ENDING  # see conftest.py


def test_pairwise_cover_equals_one_device(point) -> None:
    options = Options(sinks=True, softcap=1.5, dropout=0.3)
    check(point[0].plan(), point[1], options=options, uses=(EACH, OUT)[point[0].seed % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mask", ENDING)
def test_full_product_equals_one_device(layout, transport, mask) -> None:
    check_product(layout, transport, mask)


@pytest.mark.parametrize("window", [0, 1, 4, None])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.sampled(3)
def test_windows_along_paths_equal_one_device(window, transport) -> None:
    mask = Mask.tree([5, 0, 7, 3, 1, 9, 4, 6], [-1, 0, 1, 2, 2, 0, -1, 6], window=(window, None))
    plan = Plan(mask, Layout.zigzag(mask.lengths, 4), transport=transport, stage_bytes=5 * 4096)
    check(plan, (6, 2), (6, 4), Options(softcap=2.0, sinks=True, dropout=0.3))


TREE = Mask.shared_prefix([(6, [3, 2]), (4, [1])])
SINKS = Mask([16], window=(3, None), sink_tokens=2)  # two bands
X = torch.ones(16, 2, 4, dtype=torch.float64)
CALLS = {
    "alibi_slopes": lambda x, *to: seqpar.attention(x, x, x, *to, alibi_slopes=torch.ones(2)),
    "linear_attention": lambda x, *to: recurrent.linear_attention(x, x, x, *to),
    "causal_conv1d": lambda x, *to: recurrent.causal_conv1d(x[:, 0], torch.ones(4, 3), None, *to),
    "state_scan": lambda x, *to: recurrent.state_scan(x[:2, :, :, None], x[:2, :, 0], *to),
    "describe": lambda x, plan, comm: recurrent.describe(plan, recurrent.RecurrentLayer(2, 4, 4)),
    "plot": lambda x, plan, comm: recurrent.plot(plan, recurrent.RecurrentLayer(2, 4, 4), "never.png"),
}


def refused(comm: Comm, plan: Plan, name: str) -> str:
    with pytest.raises(NotImplementedError) as error:
        CALLS[name](seqpar.shard(X.to(torch.float32), plan, comm.rank), plan, comm)
    assert comm.stats.bytes_sent == 0
    return str(error.value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("window", [None, 1, 0])
def test_what_trees_do_not_have_is_refused_on_all_ranks(name, window) -> None:
    plan = Plan(TREE.windowed((window, None)), Layout.contiguous(16, 2))
    if name == "alibi_slopes" and window == 0:  # a query sees itself alone
        return
    for error in run_threads(2, refused, plan, name):
        assert f"{name}: " in error and "Mask(tree, " in error


@pytest.mark.parametrize("name", [name for name in CALLS if name != "alibi_slopes"])
def test_recurrent_layers_refuse_several_bands_on_all_ranks(name) -> None:
    assert len(SINKS.bands) == 2
    for error in run_threads(2, refused, Plan(SINKS, Layout.contiguous(16, 2)), name):
        assert f"{name}: " in error and "has several bands" in error


@pytest.mark.parametrize("mask", ENDING)
@pytest.mark.parametrize("kernel", ["auto", "native", "blockwise", "reference"])
@pytest.mark.parametrize(("transport", "ulysses"), [("fetch", 1), ("ring", 1), ("gather", 2)])
@pytest.mark.sampled(10)
def test_kernels_of_the_cpu_equal_one_device(mask, kernel, transport, ulysses) -> None:
    case = Case(mask, "zigzag", transport, 4, ulysses, (300,), stage_bytes=9 * 4096, pads=True)
    options = Options(softcap=1.5, sinks=True, dropout=0.2, kernel=kernel)
    check(case.plan(), (4, 2), (16, 8), options, dtype=torch.float32)


@pytest.mark.parametrize("comm", ["gloo", "shm"])
@pytest.mark.sampled(2)
def test_trees_on_real_processes_equal_one_device(comm) -> None:
    case = Case("tree", "zigzag", "fetch", 3, 1, (41,), stage_bytes=5 * 4096)
    check(case.plan(), (6, 2), (8, 4), Options(), run=partial(run_processes, comm=comm))


@given(st.integers(1, 60), st.integers(0, 2**16))
def test_bounds_of_a_tree_are_those_of_its_definition(tokens, seed) -> None:
    lo, hi, until, seen = random_tree(tokens, np.random.default_rng(seed))
    mask = Mask.from_bounds(lo, hi, until=until)
    np.testing.assert_array_equal(seen_pairs(mask), seen)
    assert mask.area() == seen.sum()
