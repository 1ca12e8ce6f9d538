"""Sharded attention equals one device where queries see several intervals of keys; in float64 to 1e-10."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import Score, call_spec, choose
from seqpar.kernels.preference import VENDORS, explain
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes
from tests.cases import LAYOUTS, SEVERAL, Case, any_cases
from tests.ops.cases import (
    EACH,
    HEADS,
    MIXED,
    OUT,
    Options,
    check,
    check_product,
    options_strategy,
    uses_strategy,
)


@settings(max_examples=150)
@given(any_cases(masks=SEVERAL), st.sampled_from(HEADS), options_strategy, uses_strategy, st.integers(0, 1000))
def test_any_plan_and_option_equals_one_device(case, heads, options, uses, seed) -> None:
    check(case.plan(), heads, (6, 4), options, uses=uses, seed=seed)


COVERED = SEVERAL  # see conftest.py


def test_pairwise_cover_equals_one_device(point) -> None:
    options = Options(sinks=True, softcap=1.5, dropout=0.3)
    check(point[0].plan(), point[1], options=options, uses=(EACH, OUT)[point[0].seed % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mask", SEVERAL)
def test_full_product_equals_one_device(layout, transport, mask) -> None:
    check_product(layout, transport, mask)


@pytest.mark.parametrize("mask", SEVERAL)
@pytest.mark.parametrize("kernel", ["auto", "native", "blockwise", "reference"])
@pytest.mark.parametrize(("transport", "ranks", "ulysses"), [("fetch", 4, 1), ("ring", 3, 1), ("gather", 1, 1)])
@pytest.mark.sampled(5)
def test_kernels_of_the_cpu_equal_one_device(mask, kernel, transport, ranks, ulysses) -> None:
    case = Case(mask, "zigzag", transport, ranks, ulysses, (150, 33, 70), stage_bytes=9 * 4096, pads=True)
    options = Options(softcap=1.5, sinks=True, dropout=0.2, kernel=kernel)
    check(case.plan(), (4, 2), (16, 8), options, MIXED, dtype=torch.float32)


@pytest.mark.parametrize("comm", ["gloo", "shm"])
@pytest.mark.sampled(2)
def test_unions_on_real_processes_equal_one_device(comm) -> None:
    case = Case("union", "zigzag", "fetch", 3, 1, (41,), stage_bytes=5 * 4096)
    assert len(case.plan().mask.bands) > 1
    check(case.plan(), (6, 2), (8, 4), Options(sinks=True), run=partial(run_processes, comm=comm))


@pytest.mark.parametrize("tree", [Mask.tree([9, 4, 7, 3], [-1, 0, 1, 0]), Mask.shared_prefix([(11, [5, 3, 4])])])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trees_with_other_masks_equal_one_device(tree, transport) -> None:
    mask = tree | Mask.blocks(np.eye(6, dtype=bool), 4, tokens=23, kv_tokens=23)
    assert mask.has_until and len(mask.bands) > 1
    plan = Plan(mask, Layout.striped(23, 4, block=2), transport=transport, stage_bytes=3 * 4096, ulysses=2)
    check(plan, (6, 2), (6, 4), Options(sinks=True, dropout=0.3))


def test_frames_of_a_video_equal_one_device() -> None:
    start = 6 * np.arange(7)
    frames = np.stack([start, start + 6], 1)
    mask = Mask.from_slices(frames, np.stack([0 * start, start + 6], 1), ["full"] * 7)
    assert len(mask.bands) == 1
    sparse = mask | Mask.from_slices(frames[:3], frames[4:], ["full"] * 3)
    for seen in (mask, sparse):
        check(Plan(seen, Layout.zigzag(seen.lengths, 4)), (6, 2), options=Options(softcap=2.0, sinks=True))


def test_several_bands_merge_even_on_one_rank() -> None:
    """Results of bands are merged, so that "auto" takes no kernel which rounds a part."""
    for sinks in (0, 2):
        plan = Plan(Mask([40], window=(5, None), sink_tokens=sinks), Layout.contiguous(40, 1))
        assert plan.merges == (sinks > 0)
        x = torch.zeros(40, 2, 16)
        call = call_spec(x, x, x, Score(0.25), grads=True, deterministic=True, merges=plan.merges)
        rounding = {kernel.name for kernel in VENDORS if kernel.accuracy_loss(call)}
        assert (choose("auto", call).name not in rounding) and bool(rounding) == plan.merges, explain(call)
        check(plan, options=Options(sinks=True, dropout=0.3))
