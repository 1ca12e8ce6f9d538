"""Sharded attention equals one device: outputs, lse and all gradients, over everything a plan can be.

In float64 to 1e-10 against the dense oracle, on inputs whose pad rows hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar import attention
from seqpar.comm import Comm, LocalComm, shm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import KERNELS
from seqpar.ops.attention import heads as heads_traded
from seqpar.ops.attention import schedule
from seqpar.ops.attention.call import PHASES, Call, Phase
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes, run_threads
from tests.cases import LAYOUTS, LENGTHS, MASKS, OVER_RANKS, Case, any_cases, examples, make_layout
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


@examples(180)
@given(
    any_cases(), st.sampled_from(HEADS), st.sampled_from([(8, 8), (6, 4), (1, 3)]), options_strategy, uses_strategy,
    st.integers(0, 1000), st.booleans(),
)  # fmt: skip
def test_any_plan_and_option_equals_one_device(case, heads, dims, options, uses, seed, direct) -> None:
    run = partial(run_threads, direct=direct)
    check(case.plan(), heads, dims, options, uses=uses, seed=seed, run=run)


COVERED = MASKS  # see conftest.py


def test_pairwise_cover_equals_one_device(point) -> None:
    check(point[0].plan(), point[1], uses=(EACH, OUT)[point[0].seed % 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mask", MASKS)
def test_full_product_equals_one_device(layout, transport, mask) -> None:
    check_product(layout, transport, mask)


@pytest.mark.parametrize("comm", ["gloo", "shm"])
@pytest.mark.parametrize("case", OVER_RANKS, ids=str)
@pytest.mark.sampled(7)
def test_real_processes_equal_one_device(case, comm) -> None:
    if comm == "shm" and (why := shm.missing()):
        pytest.skip(why)
    plan = case.plan()
    assert case.node is None or any(step.spread and step.spread.rows for step in plan.steps(0) + plan.steps(1))
    check(plan, (6, 2), (8, 4), Options(sinks=True, softcap=2.0), MIXED, run=partial(run_processes, comm=comm))


def test_the_key_heads_of_a_share_without_any_enter_no_node() -> None:
    plan = Case("full", "contiguous", "fetch", 8, 2, (24,), stage_bytes=2 * 4096, node=4).plan()
    assert any(step.spread and step.spread.rows for step in plan.steps(0))
    check(plan, (1, 1), (4, 4))


def test_widths_per_document_leave_whole_documents_alone() -> None:
    lengths = (4, 4, 4, 4, 12)
    case = Case("packed", "contiguous", "fetch", 4, 1, lengths)
    plan = Plan(case.plan().mask, case.plan().layout, ulysses=[4, 4, 4, 4, 2])
    alone = plan.degrees == 1
    assert alone.any() and not alone.all()
    assert (plan.widths[alone] == 1).all() and (plan.widths[~alone] > 1).all()
    check(plan)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_queries_or_of_keys_alone(causal, transport) -> None:
    mask = Mask([3, 0, 7, 5, 0, 0], kv_lengths=[0, 4, 9, 2, 6, 0], causal=causal)
    for layout, keys in (("zigzag", "zigzag"), ("contiguous", "striped")):
        rng = np.random.default_rng(0)
        rows, columns = make_layout(layout, [15], 4, rng), make_layout(keys, [21], 4, rng)
        for ulysses in (1, 4, [4, 1, 2, 4, 2]):
            plan = Plan(mask, rows, kv_layout=columns, ulysses=ulysses, transport=transport)
            check(plan, (4, 2))
        assert plan.degrees.tolist()[1::3] == [0, 0] and plan.describe()


def stripe(x: Tensor, rank: int) -> Tensor:
    return x[:, rank::2]


def ends(x: Tensor, rank: int) -> Tensor:
    return torch.cat([x.chunk(4, 1)[rank], x.chunk(4, 1)[3 - rank]], 1)


def piece(x: Tensor, rank: int) -> Tensor:
    return x.chunk(2, 1)[rank]


@pytest.mark.parametrize(
    ("cut", "layout"),
    [
        (piece, Layout.blocked([16] * 3, 2)),
        (ends, Layout.zigzag([16] * 3, 2)),
        (stripe, Layout.striped(48, 2)),
    ],
)
def test_samples_that_other_packages_cut_are_rows_of_the_layouts_of_docs_migration(cut, layout) -> None:
    """[B, S / ranks, H, D] of ring-flash-attention, yunchang and context_parallel, under ``Mask([S] * B)``."""
    q, k, v = torch.randn(3, 3, 16, 4, 8, dtype=torch.float64)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    whole = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    plan = Plan(Mask([16] * 3), layout, transport="ring")

    def rank(comm: Comm) -> Tensor:
        return attention(*(cut(x, comm.rank).flatten(0, 1) for x in (q, k, v)), plan, comm).unflatten(0, (3, 8))

    for number, out in enumerate(run_threads(2, rank)):
        torch.testing.assert_close(out, cut(whole, number), rtol=0, atol=1e-12)


@pytest.mark.parametrize("transport", ["fetch", "ring", "double_ring"])
@pytest.mark.parametrize(("edges", "busy"), [((0, 5, 9, 16, 20), []), ((0, 5, 9, 12, 20), [2, 3])])
def test_a_rank_whose_keys_nobody_else_sees_makes_no_schedule(
    monkeypatch: pytest.MonkeyPatch, transport: str, edges: tuple[int, ...], busy: list[int]
) -> None:
    """Documents of 5, 4, 7 and 4 tokens; where the third is on two ranks these two exchange keys, forward and back."""
    edge = np.array(edges)
    layout = Layout.from_pieces(edge[:-1], np.diff(edge), np.arange(4), 4)
    scheduled: list[int] = []

    class Counted(schedule.KeyExchange):
        def __init__(self, call: Call, *more: Any) -> None:
            scheduled.append(call.comm.rank)
            super().__init__(call, *more)

    monkeypatch.setattr(schedule, "KeyExchange", Counted)
    # stages of one row: whoever sees most keys has most steps, and all ranks count them
    plan = Plan(Mask([5, 4, 7, 4]), layout, transport=transport, stage_bytes=1)
    check(plan, uses=OUT)
    assert sorted(scheduled) == sorted(2 * busy)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_widths_rise_in_forward_and_fall_in_backward(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """So the smaller message is the one that nothing hides: the output on its way back, its gradient on its way in."""
    computed: dict[int, list[list[int]]] = {rank: [] for rank in range(4)}
    posted: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(4)}
    walk, post = schedule.walk, heads_traded.post

    def noted(exchange: Any, inside: Any) -> Iterator[Any]:
        computed[exchange.comm.rank].append(widths := [])
        for step, *tensors in walk(exchange, inside):
            widths.append(step.part.width)
            yield step, *tensors

    def note(comm: Any, sends: Any, recvs: Any, tag: Any) -> Any:
        if tag.phase < PHASES:  # not of the second backward
            posted[comm.rank].append((Phase(tag.phase).name, tag.stage))
        return post(comm, sends, recvs, tag)

    monkeypatch.setattr(schedule, "walk", noted)
    monkeypatch.setattr(heads_traded, "post", note)
    plan = Plan(Mask([8, 9, 7]), Layout.zigzag([8, 9, 7], 4), ulysses=[1, 2, 4], transport=transport)
    check(plan, heads=(8, 4))
    for rank in range(4):
        forward, back = computed[rank][:2]
        assert forward == sorted(forward) and back == forward[::-1] and set(back) == {1, 2, 4}
        order = [("ENTER", 2), ("ENTER", 4), ("LEAVE", 2), ("LEAVE", 4)]
        order += [("BACK_ENTER", 4), ("BACK_ENTER", 2), ("BACK_LEAVE", 4), ("BACK_LEAVE", 2)]
        assert posted[rank] == order


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("ranks", "ulysses", "heads"), [(4, 2, (1, 1)), (6, 2, (1, 1)), (8, 4, (3, 1)), (8, 4, (2, 1))]
)
@pytest.mark.sampled(3)
def test_shares_without_heads_under_a_transport_equal_one_device(transport, ranks, ulysses, heads) -> None:
    check(Case("packed", "zigzag", transport, ranks, ulysses, LENGTHS[1], stage_bytes=4096).plan(), heads)


def test_kernels_run_where_their_tensors_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is made the current one once for a call, and not for every launch."""
    entered: list[Tensor] = []
    current: list[Tensor] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        entered.append(x)
        current.append(x)
        yield
        current.pop()

    def watched(run: Callable[..., None]) -> Callable[..., None]:
        def inside(*arguments: Any) -> None:
            assert len(current) == 1
            run(*arguments)

        return inside

    kernel = next(kernel for kernel in KERNELS if kernel.name == "reference")
    for name in ("forward", "backward"):
        monkeypatch.setattr(kernel, name, watched(getattr(kernel, name)))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    q, k, v = (torch.rand(8, 2, 4, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, Plan(Mask([8]), Layout.contiguous(8, 1)), LocalComm(), kernel="reference")
    out.sum().backward()
    assert [x.shape for x in entered] == [q.shape, out.shape]
