"""`state_scan`: the states that enter all runs, and what moves for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.travel import state_bytes, state_way
from seqpar.testing import run_threads
from tests.cases import examples
from tests.ops.recurrent.cases import plan_of, plans

H, K, V = 4, 3, 2


def scanned(
    comm: Comm, plan: Plan, states: Tensor, maps: Tensor, grad: Tensor, travel: str
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
    own = torch.from_numpy(recurrent.runs(plan, comm.rank).numbers.copy())
    mine = [x[own].clone().requires_grad_() for x in (states, maps)]
    counts = []

    def note() -> None:
        counts.append((comm.stats.bytes_sent, comm.stats.bytes_received, comm.stats.exchanges))
        comm.stats.reset()

    note()
    entered = recurrent.state_scan(*mine, plan, comm, travel=travel)
    note()
    entered.backward(grad[own].mT.contiguous().mT)  # of any strides
    note()
    return entered.detach(), mine[0].grad, mine[1].grad, counts[1:]


DECAYS = {(H,): "scalar", (H, K): "channel", (H, K, K): "none"}  # by the shape of a map: a matrix is a delta rule's


@examples(60)
@given(plans(), st.sampled_from(list(DECAYS)), st.sampled_from(["auto", "gather", "chain"]))
def test_states_and_gradients_are_those_of_one_process_and_bytes_those_predicted(plan, shape, travel) -> None:
    table, g = document_runs(plan), torch.Generator().manual_seed(0)
    count = len(table.start)
    states, grad = (torch.randn(count, H, K, V, dtype=torch.float64, generator=g) for _ in range(2))
    maps = torch.randn(count, *shape, dtype=torch.float64, generator=g)
    maps[torch.from_numpy(table.opens)] = torch.inf  # never used
    leaves = [x.clone().requires_grad_() for x in (states, maps)]
    rows: list[Tensor] = []
    for n, opens in enumerate(table.opens.tolist()):
        if opens:
            rows.append(torch.zeros(H, K, V, dtype=torch.float64))
        elif table.opens[n - 1]:
            rows.append(leaves[0][n - 1])
        else:
            own = leaves[1][n - 1]
            mapped = own @ rows[-1] if len(shape) == 3 else own.exp().view(H, -1, 1) * rows[-1]
            rows.append(leaves[0][n - 1] + mapped)
    expected = torch.stack(rows)
    if expected.requires_grad:
        expected.backward(grad)
    expected_grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    layer = RecurrentLayer(H, K, V, decay=DECAYS[shape], delta=len(shape) == 3).bytes("float64")
    way = state_way(table, layer, travel)
    predicted = state_bytes(table, layer, way)
    results = run_threads(plan.ranks, scanned, plan, states, maps, grad, travel)
    for rank, (entered, *grads, (forward, backward)) in enumerate(results):
        own = torch.from_numpy(table.of_rank(rank).copy())
        torch.testing.assert_close(entered, expected.detach()[own], rtol=1e-10, atol=1e-10)
        for got, want in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(got, want[own], rtol=1e-10, atol=1e-10)
        sent, received = int(predicted.sent[rank]), int(predicted.received[rank])
        assert forward[:2] == (sent, received) and backward[:2] == (received, sent)
        assert max(forward[2], backward[2]) <= way.steps
    if way.travel == "gather":
        asked = table.earlier_runs()
        mapped = (~table.opens[asked.item]).sum()
        assert predicted.sent.sum() == 8 * (asked.item.size * H * K * V + mapped * maps[0].numel())


def test_a_chain_takes_the_steps_of_its_plan() -> None:
    plan = plan_of("contiguous", (32,), 4)
    layer = RecurrentLayer(H, K, V, decay="none", delta=True).bytes("float64")
    runs = document_runs(plan)
    for latency_free, blocks in ((layer, 1), (layer._replace(state=1 << 30), 4)):
        way = state_way(runs, latency_free, "chain")
        assert (way.blocks, way.steps) == (blocks, 3 + blocks - 1)
    states, maps = torch.rand(4, 1024, 64, 64), torch.zeros(4, 1024)
    way = state_way(runs, RecurrentLayer(1024, 64, 64).bytes("float32"), "chain")
    assert way.blocks > 1
    results = run_threads(4, scanned, plan, states, maps, states, "chain")
    # a rank takes part when it receives or sends a block
    assert [counts[0][2] for *_, counts in results] == [way.blocks, way.blocks + 1, way.blocks + 1, way.blocks]
    totals = states.cumsum(0)
    for rank, (entered, *_) in enumerate(results):
        torch.testing.assert_close(entered[0], totals[rank - 1] if rank else torch.zeros_like(totals[0]))


def test_only_earlier_runs_of_the_same_document_are_asked_for() -> None:
    # rank 0: rows 0-4; rank 1: rows 5-9; rank 2: rows 10-14; documents 0-2, 3-11, 12-14
    asked = document_runs(plan_of("contiguous", (3, 9, 3), 3)).earlier_runs()
    assert list(zip(asked.asking.tolist(), asked.owner.tolist(), asked.item.tolist(), strict=True)) == [
        (1, 0, 1), (2, 0, 1), (2, 1, 2),
    ]  # fmt: skip


def misfit(comm: Comm, plan: Plan, states: list[int], maps: list[int]) -> str:
    good = torch.zeros(1, H, K, V), torch.zeros(1, H)
    mine = (torch.zeros(states), torch.zeros(maps)) if comm.rank == 0 else good
    with pytest.raises(ValueError) as error:
        recurrent.state_scan(*mine, plan, comm)
    assert comm.stats.bytes_sent == 0
    return str(error.value)


@pytest.mark.parametrize(
    ("states", "maps", "text"),
    [
        ([2, H, K, V], [2, H], "must be floating [1 runs, heads, keys, values]"),
        ([1, H, K], [1, H], "must be floating [1 runs, heads, keys, values]"),
        ([1, H, K, V], [1, K], "maps must be floating of shape [1, 4], [1, 4, 3] or [1, 4, 3, 3]"),
    ],
)
def test_states_that_do_not_fit_are_an_error_on_all_ranks(states, maps, text) -> None:
    plan = Plan(seqpar.Mask([14]), seqpar.Layout.contiguous(14, 2))
    assert all(text in error for error in run_threads(2, misfit, plan, states, maps))
