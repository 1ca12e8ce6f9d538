"""States in a pipeline of blocks of heads: results, what is sent and when, and ranks that leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, PeerError
from seqpar.facts.mask import Mask
from seqpar.kernels.recurrent.native import NativeChunks
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.travel import layer_way, state_bytes
from seqpar.plan.travel_report import exchanges
from seqpar.plan.travel_work import LayerWork
from seqpar.testing import COMMS, relative_rms, run_processes, run_threads
from tests.cases import LAYOUTS, examples
from tests.comm.cases import impatient, until
from tests.ops.recurrent.cases import FAMILIES, Family, agrees, plan_of, plans, poisoned

HEADS = [(1, 1), (1, 4), (2, 4), (3, 3), (2, 8), (4, 8)]  # groups and heads


@contextmanager
def blocks(most: int) -> Iterator[None]:
    """Pipelines in as many blocks as heads allow, up to `most`."""
    allowed = LayerWork.blocks.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerWork, "blocks", property(lambda work: [max(n for n in allowed(work) if n <= most)]))
        yield


@pytest.mark.parametrize("most", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("decay", "beta"), [("scalar", False), ("channel", True)])
@pytest.mark.sampled(5)
def test_blocks_under_layouts(decay, beta, layout, most) -> None:
    with blocks(most):
        agrees(plan_of(layout, (1, 9, 2, 17), 3), Family(decay, beta, initial=True), travel="pipeline")


@examples(40)
@given(
    plans(), st.sampled_from([1, 2, 3, 8]), st.sampled_from(FAMILIES), st.booleans(), st.sampled_from(HEADS),
    st.sampled_from(["auto", "chunked", "reference"]), st.integers(0, 9),
)  # fmt: skip
def test_blocks_compute_what_one_device_does(plan, most, family, initial, heads, kernel, seed) -> None:
    decay, beta = family
    groups, count = heads
    with blocks(most):
        agrees(plan, Family(decay, beta, initial, 0.3, groups, count), seed=seed, kernel=kernel, travel="pipeline")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_three_documents_cut_at_every_place(decay, beta, ranks) -> None:
    for cut in range(13):
        for other in (cut, 12):
            shards = [np.zeros(0, int)] * ranks
            shards[0], shards[-1] = np.arange(cut), np.arange(cut, other)
            shards[ranks // 2] = np.concatenate([shards[ranks // 2], np.arange(other, 12)])
            plan = Plan(Mask((5, 3, 4)), seqpar.Layout(shards))
            with blocks(4):
                agrees(plan, Family(decay, beta, initial=cut % 2 == 0), travel="pipeline")


def test_documents_of_several_chunks_beside_whole_ones() -> None:
    with blocks(2):
        agrees(plan_of("blocks", (150, 70, 300), 2), Family("scalar", beta=True, unit=True), travel="pipeline")


def test_late_messages() -> None:
    def run(ranks, *arguments):
        return run_threads(ranks, *arguments, delay=0.002)

    with blocks(4):
        agrees(plan_of("zigzag", (9, 14), 3), Family("scalar", beta=True, initial=True), run, travel="pipeline")


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.sampled(2)
def test_many_heads_over_processes(comm) -> None:
    def run(ranks, *arguments):
        return run_processes(ranks, *arguments, comm=comm)

    family = Family("scalar", beta=True, initial=True, heads=16, dim=32, values=32, unit=True)
    plan = plan_of("contiguous", (700, 50), 3)
    layer = RecurrentLayer(16, 32, 32, 2, delta=True).bytes("float64", gates="float64", device="cpu", threads=2)
    assert layer_way(document_runs(plan), layer, "pipeline").blocks > 1
    agrees(plan, family, run, travel="pipeline")


def counted(comm: Comm, plan: Plan, family: Family) -> list[tuple[int, int, int]]:
    """Bytes sent and received, and exchanges, of forward and of backward."""
    rows = [poisoned(x, plan, comm.rank) for x in family.inputs(plan.mask)[:5]]
    counts = []

    def note() -> None:
        counts.append((comm.stats.bytes_sent, comm.stats.bytes_received, comm.stats.exchanges))
        comm.stats.reset()

    note()
    out = recurrent.linear_attention(*rows[:3], plan, comm, decay=rows[3], beta=rows[4], travel="pipeline")
    note()
    out.sum().backward()
    note()
    return counts[1:]


@examples(30)
@given(plans(), st.sampled_from([1, 2, 4]), st.sampled_from(FAMILIES))
def test_bytes_and_exchanges_are_what_is_predicted(plan, most, family) -> None:
    case = Family(*family)
    shape = RecurrentLayer(case.heads, case.dim, case.values, case.groups, decay=case.decay, delta=case.beta)
    layer = shape.bytes("float64", gates="float64", device="cpu")
    runs = document_runs(plan)
    with blocks(most):
        way = layer_way(runs, layer, "pipeline")
        expected, taken = state_bytes(runs, layer, way), exchanges(runs, way)
        results = run_threads(plan.ranks, counted, plan, case)
    for rank, ((sent, received, times), (sent_back, received_back, _)) in enumerate(results):
        assert (sent, received) == (expected.sent[rank], expected.received[rank]) == (received_back, sent_back)
        assert times == taken[rank] <= way.steps


def test_a_block_is_sent_before_the_next_one_is_computed(monkeypatch) -> None:
    plan, events = plan_of("contiguous", (32,), 2), []

    def noted(method):
        def call(*arguments):
            if threading.current_thread().name == "rank 0":
                events.append("compute")
            return method(*arguments)

        return call

    def on_rank(comm: Comm) -> None:
        post = comm.exchange
        monkeypatch.setattr(comm, "exchange", lambda *sides, tag: events.append("post") or post(*sides, tag=tag))
        counted(comm, plan, Family())

    for name in ("keep", "replay"):
        monkeypatch.setattr(NativeChunks, name, noted(getattr(NativeChunks, name)))
    with blocks(4):
        run_threads(2, lambda comm: counted(comm, plan, Family()) if comm.rank else on_rank(comm))
    # in backward rank 0 asks for the gradient of the next block before it computes one
    assert events == 4 * ["compute", "post"] + ["post"] + 3 * ["post", "compute"] + ["compute"]


def differently(comm: Comm, plan: Plan) -> list[list[Tensor]]:
    """Output and gradients of a plain call, under both kinds of checkpoint, and of the op that graphs call."""
    found = []
    for kind in ("plain", "checkpoint", "reentrant", "op"):
        mine = [poisoned(x, plan, comm.rank) for x in Family(beta=True).inputs(plan.mask)[:5]]

        def layer(q, k, v, decay, beta):
            return recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta, travel="pipeline")

        if kind == "op":
            out = torch.ops.seqpar.linear_attention(
                *mine, None, [seqpar.bind(plan, comm)], None, False, "auto", "pipeline", False, [True] * 5 + [False]
            )[0]
        else:
            out = layer(*mine) if kind == "plain" else checkpoint(layer, *mine, use_reentrant=kind == "reentrant")
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in mine)])
    return found


def test_checkpoints_and_graphs() -> None:
    with blocks(4):
        for plain, *others in run_threads(2, differently, plan_of("zigzag", (9, 7), 2)):
            for other in others:
                assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))


def partly(comm: Comm, plan: Plan, change: bool) -> tuple[Tensor, Tensor]:
    """out and the gradient of v, where the second document holds NaN or not."""
    rows = Family(beta=True).inputs(plan.mask)[:5]
    for x in rows if change else ():
        x[7] = torch.nan
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in rows]
    out = recurrent.linear_attention(*mine[:3], plan, comm, decay=mine[3], beta=mine[4], travel="pipeline")
    out.sum().backward()
    return out.detach(), mine[2].grad


def test_nan_of_another_document_changes_no_bit() -> None:
    plan = Plan(Mask((5, 6, 7)), seqpar.Layout.contiguous(18, 4))
    with blocks(4):
        found = [run_threads(4, partly, plan, change) for change in (False, True)]
    others = torch.ones(18, dtype=torch.bool)
    others[5:11] = False
    for rank, pairs in enumerate(zip(*found, strict=True)):
        kept = others[torch.from_numpy(plan.layout.positions(rank))]
        for clean, dirty in zip(*pairs, strict=True):
            assert torch.equal(clean[kept], dirty[kept])


def trained(comm: Comm, plan: Plan, frozen: str, normalize: bool) -> list[Tensor | None]:
    """Gradients where one input needs none, in 16 bits."""
    rows = [poisoned(x, plan, comm.rank) for x in Family(beta=True).inputs(plan.mask, dtype=torch.bfloat16)[:5]]
    names = ("q", "k", "v", "decay", "beta")
    rows[names.index(frozen)].requires_grad_(False)
    out = recurrent.linear_attention(
        *rows[:3], plan, comm, decay=rows[3], beta=rows[4], travel="pipeline", normalize=normalize
    )
    out.sum().backward()
    return [x.grad for x in rows]


@pytest.mark.parametrize("frozen", ["q", "k", "v", "decay", "beta"])
def test_inputs_that_need_no_gradient_get_none(frozen) -> None:
    plan = plan_of("contiguous", (9, 7), 2)
    with blocks(4):
        for grads in run_threads(2, trained, plan, frozen, True):
            for name, grad in zip(("q", "k", "v", "decay", "beta"), grads, strict=True):
                assert (grad is None) == (name == frozen)
                assert grad is None or (grad.dtype == torch.bfloat16 and grad.isfinite().all())


def shared(comm: Comm, plan: Plan, dtype: torch.dtype, travel: str) -> list[Tensor]:
    """The gradients of q and k, whose only head all heads of v read."""
    rows = [
        poisoned(x, plan, comm.rank) for x in Family(groups=1, heads=16).inputs(plan.mask, dtype=torch.bfloat16)[:4]
    ]
    mine = [x.detach().to(dtype).requires_grad_() for x in rows]
    out = recurrent.linear_attention(*mine[:3], plan, comm, decay=mine[3], travel=travel)
    out.sum().backward()
    return [x.grad.double() for x in mine[:2]]


def test_blocks_that_share_keys_add_up_their_gradients_in_the_dtype_of_sums() -> None:
    plan = Plan(Mask([60]), seqpar.Layout.contiguous(60, 2))
    with blocks(16):
        found = [run_threads(2, shared, plan, torch.float64, "gather")]
        found += [run_threads(2, shared, plan, torch.bfloat16, travel) for travel in ("gather", "pipeline")]
    exact, gathered, pipelined = (torch.cat([x for grads in ranks for x in grads]) for ranks in found)
    assert relative_rms(pipelined, exact) <= 1.05 * relative_rms(gathered, exact)


def left(comm: Comm, plan: Plan) -> str:
    """The error of a rank in backward, where the last one has gone."""
    rows = [poisoned(x, plan, comm.rank) for x in Family().inputs(plan.mask)[:4]]
    out = recurrent.linear_attention(*rows[:3], plan, comm, decay=rows[3], travel="pipeline")
    comm.agree("all have gone forward", {})
    if comm.rank == 2:
        return "gone"
    if comm.rank == 0:  # which is not to give up first because of a rank 1 that is only late
        until(lambda: 1 in comm._world.waits.waiting)  # type: ignore[attr-defined]
    impatient(comm, 1.0)
    with pytest.raises(PeerError) as error:
        out.sum().backward()
    return str(error.value)


def test_a_rank_that_has_gone_is_named() -> None:
    with blocks(4):
        first, second, _ = run_threads(3, left, plan_of("contiguous", (32,), 3))
    assert "linear_attention" in second and "rank 2" in second
    assert "rank 1" in first or "rank 2" in first
