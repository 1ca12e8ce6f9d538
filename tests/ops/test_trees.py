"""Sharded attention equals one device where keys end before the last query, as in trees; in float64 to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.facts.mask import Mask
from seqpar.plan import TRANSPORTS
from seqpar.testing import run_processes, seen_pairs
from tests.cases import ENDING, LAYOUTS, Case, any_cases, random_tree
from tests.ops.cases import HEADS, Options, check, options_strategy, uses_strategy


@settings(max_examples=100)
@given(
    any_cases(), st.sampled_from(ENDING), st.sampled_from(HEADS), options_strategy, uses_strategy, st.integers(0, 1000)
)
def test_any_plan_and_option_equals_one_device(case, mask, heads, options, uses, seed) -> None:
    options = replace(options, alibi=False)
    check(replace(case, mask=mask).plan(), heads, (6, 4), options, uses=uses, seed=seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("ranks", "ulysses"), [(1, 1), (3, 1), (4, 2), (4, 4)])
def test_trees_under_layouts_and_transports_equal_one_device(layout, transport, ranks, ulysses) -> None:
    case = Case("tree", layout, transport, ranks, ulysses, (41,), ranks, stage_bytes=5 * 4096, pads=True)
    check(case.plan(), (6, 2), (6, 4), Options(sinks=True, dropout=0.3))


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_trees_on_real_processes_equal_one_device(comm) -> None:
    case = Case("tree", "zigzag", "fetch", 3, 1, (41,), stage_bytes=5 * 4096)
    check(case.plan(), (6, 2), (8, 4), Options(), run=partial(run_processes, comm=comm))


@given(st.integers(1, 60), st.integers(0, 2**16))
def test_bounds_of_a_tree_are_those_of_its_definition(tokens, seed) -> None:
    lo, hi, until, seen = random_tree(tokens, np.random.default_rng(seed))
    mask = Mask.from_bounds(lo, hi, until=until)
    np.testing.assert_array_equal(seen_pairs(mask), seen)
    assert mask.area() == seen.sum()
