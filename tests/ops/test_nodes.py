"""Attention over nodes equals one device, sends what was predicted, and holds two stages and two entries."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar import Layout, Mask, Plan
from seqpar.comm import Comm, shm
from seqpar.ops.attention.call import Phase
from seqpar.testing import run_processes, run_threads
from tests.cases import Case, node_cases
from tests.ops.cases import HEADS, LENGTHS, Options, check, options_strategy
from tests.ops.recorded import DTYPES, assert_same_bits, counted, recorded, step


@settings(max_examples=40)
@given(
    node_cases(), st.sampled_from(HEADS), st.sampled_from([(8, 8), (1, 3)]), options_strategy, st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_any_plan_over_nodes_equals_one_device(case, heads, dims, options, with_lse, direct) -> None:
    check(case.plan(), heads, dims, options, with_lse, case.seed, run=partial(run_threads, direct=direct))


@pytest.mark.parametrize("stage_bytes", [4096, 5 * 4096, 64 << 20])
@pytest.mark.parametrize(
    ("ranks", "node", "ulysses"),
    [(4, 2, 1), (6, 2, 1), (6, 3, 1), (8, 2, 2), (8, 4, 1), (8, 4, 2), (12, 3, 1), (12, 4, 2), (12, 4, 4)],
)
@pytest.mark.parametrize(("mask", "layout"), [("causal", "zigzag"), ("window", "lopsided"), ("packed", "contiguous")])
def test_nodes_of_any_size_equal_one_device(ranks, node, ulysses, stage_bytes, mask, layout) -> None:
    case = Case(mask, layout, "fetch", ranks, ulysses, (31, 22, 40), 7, stage_bytes=stage_bytes, pads=True, node=node)
    check(case.plan(), (6, 2), (4, 3))


@settings(max_examples=40)
@given(
    node_cases(max_ranks=8), st.sampled_from(HEADS), st.sampled_from(list(DTYPES)), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_bytes_over_nodes_counted_equal_bytes_predicted(case, heads, dtype, with_lse, kv_grads, direct) -> None:
    plan = case.plan()
    shape = dict(heads=heads[0], kv_heads=heads[1], dim=8, v_dim=4, dtype=dtype, return_lse=with_lse, kv_grads=kv_grads)
    ranks = run_threads(plan.ranks, counted, plan, heads, (8, 4), dtype, with_lse, kv_grads, direct=direct)
    for rank, sent in enumerate(ranks):
        for backward in (False, True):
            got = {peer: n for peer, n in sorted(sent[backward].items()) if n}
            assert got == plan.traffic(rank, backward=backward, **shape), f"rank {rank}, backward={backward}"


def test_each_key_and_each_gradient_crosses_once() -> None:
    """All of 8 ranks see all keys: each of two nodes gets the other's keys, and gives back as many sums."""
    n, heads, dims = 48, (2, 2), (4, 4)
    plan = Plan(Mask([n], causal=False), Layout.striped(n, 8), node=4)
    sent = run_threads(8, counted, plan, heads, dims, "bfloat16", False)
    crossing = [[sum(b for p, b in s[i].items() if p // 4 != r // 4) for r, s in enumerate(sent)] for i in (0, 1)]
    row = heads[1] * sum(dims)
    assert sum(crossing[0]) == n * row * 2
    assert sum(crossing[1]) == n * row * (2 + 4), "keys again, in bfloat16, and gradients, in float32"


@pytest.mark.parametrize("layout", ["contiguous", "striped", "arbitrary"])
def test_two_stages_and_two_entries_are_held(layout) -> None:
    rows, heads, dims = 3, (4, 2), (4, 4)
    row_bytes = heads[1] * sum(dims) * 8
    case = Case("full", layout, "fetch", 6, 1, (61,), stage_bytes=rows * row_bytes + 5, node=3)
    for recorder in run_threads(6, recorded, case.plan(), heads, dims):
        assert len(recorder.posted(Phase.KEYS)) >= 8
        flat = [b for b in recorder.buffers if b.dim() == 1]
        # forward and backward
        assert len(flat) <= 2 * (2 + 2)
        assert all(b.nbytes <= rows * row_bytes for b in flat)


SLOW = (
    Case("full", "striped", "fetch", 4, 1, (9, 2, 12), stage_bytes=3 * 4096, node=2),
    Case("packed", "contiguous", "fetch", 6, 1, (9, 2, 12), stage_bytes=3 * 4096, node=3),
    Case("causal", "zigzag", "fetch", 8, 2, (29,), stage_bytes=2 * 4096, node=4),
    Case("packed", "arbitrary", "fetch", 8, 1, (14, 20), mixed=True, seed=5, stage_bytes=4096, node=4),
)


def measured(comm: Comm, plan: Plan) -> list[torch.Tensor]:
    return step(comm, plan, (6, 2), (4, 4), 3, torch.float32)


@pytest.mark.parametrize("case", SLOW, ids=lambda c: f"{c.mask}-{c.layout}-P{c.ranks}-U{c.ulysses}")
@pytest.mark.parametrize("direct", [True, False])
def test_a_slow_transport_changes_no_bit(case, direct) -> None:
    plan = case.plan()
    prompt = run_threads(case.ranks, measured, plan, direct=direct)
    assert_same_bits(prompt, run_threads(case.ranks, measured, plan, delay=0.02, direct=direct))


@settings(max_examples=25)
@given(node_cases(max_ranks=8), st.sampled_from(HEADS))
def test_twice_gives_the_same_bits(case, heads) -> None:
    plan = case.plan()
    arguments = (plan, heads, (4, 6), 1, torch.float32)
    assert_same_bits(*(run_threads(plan.ranks, step, *arguments, delay=delay) for delay in (0.0, 1e-4)))


PROCESSES = (
    Case("packed", "zigzag", "fetch", 4, 1, LENGTHS[1], stage_bytes=4096, node=2, pads=True),
    Case("window", "striped", "fetch", 4, 1, LENGTHS[0], stage_bytes=5 * 4096, node=2),
)


@pytest.mark.parametrize("case", PROCESSES, ids=lambda c: c.mask)
@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_real_processes_over_nodes_equal_one_device(case, comm) -> None:
    if comm == "shm" and shm.missing() is not None:
        pytest.skip(shm.missing() or "")
    assert any(s.spread and s.spread.rows for r in range(4) for s in case.plan().steps(r))
    check(case.plan(), (6, 2), (8, 4), Options(sinks=True, softcap=2.0), run=partial(run_processes, comm=comm))


def test_the_key_heads_of_a_share_without_any_enter_no_node() -> None:
    plan = Case("full", "contiguous", "fetch", 8, 2, (24,), stage_bytes=2 * 4096, node=4).plan()
    assert any(s.spread and s.spread.rows for s in plan.steps(0))
    check(plan, (1, 1), (4, 4))


def test_keys_without_gradients_enter_and_nothing_leaves() -> None:
    plan = Case("full", "striped", "fetch", 4, 1, (32,), stage_bytes=4 * 4096, node=2).plan()
    sent = run_threads(4, counted, plan, (2, 2), (4, 4), "float32", True, False)
    assert [s[0] for s in sent] == [s[1] for s in sent]
    assert np.all([sum(s[0].values()) > 0 for s in sent])
