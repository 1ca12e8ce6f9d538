"""Ways of travel: all return what one device does, send what was predicted, and choose alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.mask import Mask
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel import LATENCY, halo_bytes, halo_way, layer_way, state_bytes, state_way
from seqpar.plan.travel_counts import chained, gathered, neighbours, relaid
from seqpar.testing import run_threads
from tests.cases import examples
from tests.ops.recurrent.cases import (
    WAYS,
    Family,
    agrees,
    plans,
    poisoned,
)


def test_a_striped_layout_moves_rows_unasked() -> None:
    family = Family("scalar", beta=True, initial=True, dim=16, values=16, unit=True)
    plan = Plan(Mask((700, 324)), seqpar.Layout.striped(1024, 2), rows=513)
    layer = RecurrentLayer(4, 16, 16, 2, delta=True).bytes("float64", gates="float64")
    assert layer_way(document_runs(plan), layer).travel == "rows"
    agrees(plan, family)


def test_a_chain_s_bytes_do_not_grow_with_earlier_runs() -> None:
    for ranks in (2, 8, 64):
        runs = document_runs(Plan(Mask([1 << 16]), seqpar.Layout.contiguous(1 << 16, ranks)))
        assert chained(runs).busiest == 1
        states, maps = gathered(runs)
        assert (states.busiest, maps.busiest) == (ranks - 1, max(ranks - 2, 0))


@examples(40)
@given(plans(), st.integers(1, 4), st.integers(1, 3))
def test_what_passes_between_nodes_is_counted_as_it_is_asked_for(plan, node, reach) -> None:
    runs = document_runs(plan)
    earlier, before = runs.earlier_runs(), runs.rows_before(reach)
    mapped = ~runs.opens[earlier.item]
    here, there = (recurrent_rank(x) for x in (runs, runs.relaid()))
    row, passed = np.arange(plan.mask.tokens), np.flatnonzero(~runs.closes)
    for counts, source, target in (
        (gathered(runs, node)[0], earlier.owner, earlier.asking),
        (gathered(runs, node)[1], earlier.owner[mapped], earlier.asking[mapped]),
        (neighbours(runs, reach, node), before.owner, before.asking),
        (chained(runs, node), runs.rank[passed], runs.rank[passed + 1]),
        (relaid(runs, node), here[row], there[row]),
    ):
        far = source // node != target // node
        assert counts.sent.tolist() == np.bincount(source[far], minlength=plan.ranks).tolist()
        assert counts.received.tolist() == np.bincount(target[far], minlength=plan.ranks).tolist()


def recurrent_rank(runs: DocumentRuns) -> np.ndarray:
    """The rank of each row."""
    return np.repeat(runs.rank, runs.count)


def filtered(comm: Comm, plan: Plan, x: Tensor, weight: Tensor, travel: str) -> tuple[Tensor, Tensor, Tensor, int]:
    mine, filters = poisoned(x, plan, comm.rank), weight.clone().requires_grad_()
    y = recurrent.causal_conv1d(mine, filters, None, plan, comm, activation="silu", travel=travel)
    sent = comm.stats.bytes_sent
    (y * seqpar.shard(x, plan, comm.rank)).sum().backward()
    return y.detach(), mine.grad, filters.grad, sent


@examples(30)
@given(plans(), st.integers(1, 5))
def test_a_convolution_of_relaid_rows_is_the_same(plan, taps) -> None:
    g = torch.Generator().manual_seed(taps)
    x = torch.randn(plan.mask.tokens, 3, dtype=torch.float64, generator=g)
    weight, runs = torch.randn(3, taps, dtype=torch.float64, generator=g), document_runs(plan)
    found = []
    for travel in ("halo", "rows"):
        results = run_threads(plan.ranks, filtered, plan, x, weight, travel)
        layer = RecurrentLayer(taps=taps, channels=3).bytes("float64")
        expected = halo_bytes(runs, layer, halo_way(runs, taps - 1, 24, travel))
        assert [sent for *_, sent in results] == expected.sent.tolist()
        found.append([*(x for y, dx, *_ in results for x in (y, dx)), sum(dw for *_, dw, _ in results)])
    for of_halo, of_rows in zip(*found, strict=True):
        torch.testing.assert_close(of_halo, of_rows, rtol=1e-10, atol=1e-10)


def narrow(comm: Comm, plan: Plan, dtype: torch.dtype, travel: str) -> list[tuple[int, int]]:
    x = torch.ones(plan.rows(comm.rank), 6, dtype=dtype).requires_grad_()
    y = recurrent.causal_conv1d(x, torch.ones(6, 4, dtype=dtype), None, plan, comm, travel=travel)
    counts = [(comm.stats.bytes_sent, comm.stats.bytes_received)]
    comm.stats.reset()
    y.sum().backward()
    return [*counts, (comm.stats.bytes_sent, comm.stats.bytes_received)]


@examples(20)
@given(plans(), st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from(["auto", "halo", "rows"]))
def test_gradients_of_rows_before_runs_travel_in_the_dtype_of_sums(plan, dtype, travel) -> None:
    layer, runs = RecurrentLayer(taps=4, channels=6).bytes(str(dtype)), document_runs(plan)
    way = halo_way(runs, layer.reach, layer.tap, travel)
    expected = [halo_bytes(runs, layer, way, backward=backward) for backward in (False, True)]
    for rank, counts in enumerate(run_threads(plan.ranks, narrow, plan, dtype, travel)):
        assert counts == [(int(both.sent[rank]), int(both.received[rank])) for both in expected]


def test_the_cheapest_way_is_chosen() -> None:
    def way(layout: seqpar.Layout, **shape: object) -> str:
        runs = document_runs(Plan(Mask([layout.total]), layout))
        layer = RecurrentLayer(32, 128, 128, **shape).bytes()
        ways = {travel: layer_way(runs, layer, travel).cost for travel in WAYS}
        chosen = layer_way(runs, layer)
        assert chosen.cost == min(ways.values())
        return chosen.travel

    tokens = 1 << 17
    assert way(seqpar.Layout.contiguous(tokens, 2)) == "gather"
    assert way(seqpar.Layout.contiguous(tokens, 64)) == "chain"
    assert way(seqpar.Layout.contiguous(tokens, 8), delta=True) == "chain"
    assert way(seqpar.Layout.zigzag([tokens], 4)) == "gather"
    assert way(seqpar.Layout.striped(tokens, 8)) == "rows"
    assert way(seqpar.Layout.striped(tokens, 8, block=64)) == "rows"
    runs = document_runs(Plan(Mask([tokens]), seqpar.Layout.striped(tokens, 8)))
    assert halo_way(runs, 3, 24576).travel == "rows"
    assert halo_way(runs.relaid(), 3, 24576).travel == "halo"


def test_documents_that_no_two_ranks_share_send_nothing() -> None:
    layout = seqpar.Layout([np.arange(9), np.arange(9, 28)])
    runs = document_runs(Plan(Mask((9, 9, 5, 5)), layout))
    layer = RecurrentLayer(4, 8, 8).bytes()
    for travel in ("auto", "gather", "chain"):
        way = layer_way(runs, layer, travel)
        assert (way.steps, way.cost) == (0, 0) and not state_bytes(runs, layer, way).busiest
    assert relaid(runs).busiest == 0 and layer_way(runs, layer, "rows").steps == 0
    assert halo_way(runs, 3, 8).steps == 0


def test_costs_are_bytes_of_the_busiest_rank_and_a_latency_per_exchange() -> None:
    runs = document_runs(Plan(Mask([64]), seqpar.Layout.contiguous(64, 4)))
    layer = RecurrentLayer(2, 4, 4, delta=True).bytes("float32")
    assert (layer.state, layer.map) == (2 * 4 * 4 * 4, 2 * 4 * 4 * 4)
    given = layer._replace(work=None)  # states that nobody has to compute
    assert state_way(runs, given, "gather").cost == LATENCY + 3 * layer.state + 2 * layer.map
    assert state_way(runs, given, "chain")[1:4] == (1, 3, 3 * LATENCY + layer.state + 2 * layer.state)


def test_costs_of_computing_states_twice_and_of_waiting_for_them() -> None:
    runs = document_runs(Plan(Mask([64 << 10]), seqpar.Layout.contiguous(64 << 10, 4)))
    for beta, more in ((False, 2), (True, 1)):  # of a run's work: half for its state, and as much again for its map
        layer = RecurrentLayer(8, 128, 128, delta=beta).bytes("float32", device="cpu")
        work = layer.work
        row = 2 * (6 * 128 * 128 + 4 * 64 * 256) / 100
        assert (work.width, work.row, work.leave) == (1, -(-row // 1), work.row // more)
        for travel in ("gather", "chain"):
            given = state_way(runs, layer._replace(work=None), travel).cost
            assert state_way(runs, layer, travel).cost == given + (16 << 10) * 8 * work.leave
        way = layer_way(runs, layer, "pipeline")
        hop = (16 << 10) * work.row + LATENCY + layer.state // 8
        assert way[:4] == ("pipeline", 8, 24, 3 * hop + 7 * LATENCY + layer.state)
        assert layer_way(runs, layer) == way


def test_a_pipeline_s_blocks_have_whole_groups_or_parts_of_one() -> None:
    allowed = {
        (12, 12): [1, 2, 3, 4, 6, 12],
        (12, 1): [1, 2, 3, 4, 6, 12],
        (12, 4): [1, 2, 4, 12],
        (12, 6): [1, 2, 3, 6, 12],
    }
    for (heads, groups), blocks in allowed.items():
        assert RecurrentLayer(heads, 8, 8, groups).bytes().work.blocks == blocks


def test_a_pipeline_has_no_blocks_for_heads_that_are_computed_at_once() -> None:
    runs = document_runs(Plan(Mask([64 << 10]), seqpar.Layout.contiguous(64 << 10, 4)))
    for device, threads, blocks in (("cpu", 1, 8), ("cpu", 4, 2), ("cpu", 8, 1), ("cuda", 1, 1)):
        layer = RecurrentLayer(8, 128, 128, delta=True).bytes(device=device, threads=threads)
        assert layer_way(runs, layer, "pipeline").blocks == blocks


def test_a_convolution_alone_passes_no_states() -> None:
    runs = document_runs(Plan(Mask([64]), seqpar.Layout.contiguous(64, 4)))
    layer = RecurrentLayer.short_convolution(8, taps=3).bytes()
    for travel in ("auto", *WAYS):
        way = layer_way(runs, layer, travel)
        assert (way.steps, way.cost, way.inside) == (0, 0, None)
    assert halo_way(runs, layer.reach, layer.tap).steps == 1


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"gates": "bool"}, {"dtype": None}, {"device": "tpu"}, {"threads": 0}]
)
def test_dtypes_and_devices_that_no_layer_has_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be"):
        RecurrentLayer(4, 8, 8).bytes(**wrong)
    assert RecurrentLayer(4, 8, 8).bytes(torch.bfloat16) == RecurrentLayer(4, 8, 8).bytes()


@pytest.mark.parametrize("travel", WAYS)
def test_ranks_with_gradients_of_different_tensors_get_theirs_or_an_error(travel: str) -> None:
    """Where rows move, gradients of a rank's rows come from another rank."""
    tokens, draw = 16, torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(tokens, 2, 4, dtype=torch.float64, generator=draw) for _ in range(4))

    def gradient(comm: Comm, plan: Plan, by_rank: list[int]) -> Tensor:
        own = [seqpar.shard(x, plan, comm.rank) for x in (q, k, v)]
        x = own[by_rank[comm.rank]].requires_grad_()
        out = recurrent.linear_attention(*own, plan, comm, travel=travel)
        (out * seqpar.shard(w, plan, comm.rank)).sum().backward()
        return x.grad

    plan, alone = (
        Plan(Mask([tokens]), seqpar.Layout.striped(tokens, 2)),
        Plan(Mask([tokens]), seqpar.Layout.contiguous(tokens, 1)),
    )
    if travel == "rows":
        with pytest.raises(ValueError, match="ranks differ in requires grad"):
            run_threads(2, gradient, plan, [1, 2])
    else:
        for rank, found in enumerate(run_threads(2, gradient, plan, [1, 2])):
            assert torch.allclose(found, gradient(seqpar.LocalComm(), alone, [1 + rank])[rank::2], rtol=0, atol=1e-12)
    both = torch.stack(run_threads(2, gradient, plan, [1, 1]), 1).flatten(0, 1)
    assert torch.allclose(both, gradient(seqpar.LocalComm(), alone, [1]), rtol=0, atol=1e-12)
