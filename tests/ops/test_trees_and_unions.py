"""Sharded attention equals one device where keys end early, as in trees, and where queries see several intervals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import Score, call_spec, choose
from seqpar.kernels.preference import VENDORS, explain
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes, run_threads
from tests.cases import ENDING, LAYOUTS, SEVERAL, Case, any_cases, examples
from tests.ops.cases import EACH, HEADS, MIXED, OUT, Options, check, check_product, options_strategy, uses_strategy

COVERED = (*ENDING, *SEVERAL)  # see conftest.py


@pytest.mark.parametrize("masks", [ENDING, SEVERAL], ids=["ending", "several"])
@examples(150)
@given(st.data(), st.sampled_from(HEADS), options_strategy, uses_strategy, st.integers(0, 1000))
def test_any_plan_and_option_equals_one_device(masks, data, heads, options, uses, seed) -> None:
    case = data.draw(any_cases(masks=masks))
    options = replace(options, alibi=False) if masks is ENDING else options
    check(case.plan(), heads, (6, 4), options, uses=uses, seed=seed)


def test_pairwise_cover_equals_one_device(point) -> None:
    options = Options(sinks=True, softcap=1.5, dropout=0.3)
    check(point[0].plan(), point[1], options=options, uses=(EACH, OUT)[point[0].seed % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mask", COVERED)
def test_full_product_equals_one_device(layout, transport, mask) -> None:
    check_product(layout, transport, mask)


@pytest.mark.parametrize("mask", COVERED)
@pytest.mark.parametrize("kernel", ["auto", "native", "blockwise", "reference"])
@pytest.mark.parametrize(("transport", "ranks", "ulysses"), [("fetch", 4, 1), ("ring", 3, 1), ("gather", 4, 2)])
@pytest.mark.sampled(8)
def test_kernels_of_the_cpu_equal_one_device(mask, kernel, transport, ranks, ulysses) -> None:
    case = Case(mask, "zigzag", transport, ranks, ulysses, (150, 33, 70), stage_bytes=9 * 4096, pads=True)
    options = Options(softcap=1.5, sinks=True, dropout=0.2, kernel=kernel)
    check(case.plan(), (4, 2), (16, 8), options, MIXED, dtype=torch.float32)


@pytest.mark.parametrize(("mask", "comm"), [("tree", "gloo"), ("union", "shm")])
def test_real_processes_equal_one_device(mask, comm) -> None:
    case = Case(mask, "zigzag", "fetch", 3, 1, (41,), stage_bytes=5 * 4096)
    check(case.plan(), (6, 2), (8, 4), Options(sinks=True), run=partial(run_processes, comm=comm))


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
