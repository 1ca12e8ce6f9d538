"""States in a pipeline of blocks of heads: results, what is sent and when, and ranks that leave."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, PeerError
from seqpar.facts.mask import Mask
from seqpar.kernels.recurrent.native import NativeChunks
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.travel import layer_way
from seqpar.testing import COMMS, relative_rms, run_processes, run_threads
from tests.comm.cases import impatient, until
from tests.ops.recurrent.cases import (
    Family,
    agrees,
    blocks,
    plan_of,
    poisoned,
)


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
