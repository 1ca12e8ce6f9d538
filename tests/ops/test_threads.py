"""One thread of a rank at a time is inside a comm; which thread it is does not matter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm, LocalComm, PeerError
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import dense_attention, run_threads
from seqpar.train import sync_gradients
from tests.comm.cases import until
from tests.ops.cases import inputs

PLAN = Plan(Mask([9, 5]), Layout.striped(14, 2))


def shards(comm: Comm, plan: Plan = PLAN) -> list[Tensor]:
    return [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in inputs(plan, (4, 4), (4, 4), 0)[:3]]


CALLS: dict[str, Callable[[Comm], object]] = {
    "attention": lambda comm: seqpar.attention(*shards(comm), PLAN, comm),
    "switch": lambda comm: seqpar.switch(torch.zeros(2, 4), comm, split_dim=1, concat_dim=0),
    "unshard": lambda comm: seqpar.unshard(torch.zeros(7), PLAN, comm),
    "sync_gradients": lambda comm: sync_gradients([torch.zeros(2)], comm),
}


@pytest.mark.parametrize("second", CALLS)
def test_a_call_of_another_thread_is_refused_while_one_runs(second) -> None:
    mine, other = LocalComm.world(2)
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        first = thread.submit(CALLS["attention"], mine)
        until(lambda: mine.entry.inside[0] == "attention" or first.done())
        with pytest.raises(RuntimeError, match=f"{second} in thread .* while thread 'loader_0' is inside attention"):
            CALLS[second](mine)
        with pytest.raises(PeerError, match="one order on every rank"):
            first.result()
    with pytest.raises(PeerError, match=f"rank 0: {second} in thread"):
        CALLS["attention"](other)


def test_a_call_of_another_thread_is_refused_while_a_kernel_computes(monkeypatch) -> None:
    """The agreement may be over by then, or not needed any more."""
    inside, done = threading.Semaphore(0), threading.Event()

    def slow(*_: object) -> None:
        inside.release()
        assert done.wait(60)

    monkeypatch.setattr("seqpar.kernels.blockwise.Blockwise.forward", slow)
    with ThreadPoolExecutor(2) as threads:
        comms = LocalComm.world(2)
        calls = [threads.submit(lambda c: seqpar.attention(*shards(c), PLAN, c, kernel="blockwise"), c) for c in comms]
        assert all(inside.acquire(timeout=60) for _ in comms)
        with pytest.raises(RuntimeError, match="while thread .* is inside attention, call 0"):
            CALLS["switch"](comms[0])
        done.set()
    for comm, call in zip(comms, calls, strict=True):
        assert isinstance(call.exception(), (PeerError, type(None)))  # none if all had arrived that it needed
        with pytest.raises(PeerError, match="rank 0: switch in thread"):
            CALLS["attention"](comm)


def test_threads_may_follow_each_other() -> None:
    """A backward in a thread of its own, as autograd's for CUDA, and the next forward in another."""

    def rank(comm: Comm) -> list[Tensor]:
        mine = shards(comm)

        def step() -> None:
            out = seqpar.attention(*mine, PLAN, comm)
            with ThreadPoolExecutor(1) as another:
                another.submit(out.sum().backward).result()

        step()
        with ThreadPoolExecutor(1) as another:
            another.submit(step).result()
        return [x.grad for x in mine]

    whole = [x.requires_grad_() for x in inputs(PLAN, (4, 4), (4, 4), 0)[:3]]
    expected = torch.autograd.grad(dense_attention(*whole, PLAN.mask)[0].sum(), whole)
    for r, grads in enumerate(run_threads(2, rank)):
        for x, y in zip(grads, expected, strict=True):
            torch.testing.assert_close(x, 2 * y[torch.from_numpy(PLAN.layout.positions(r))])


def test_a_rank_by_itself_may_be_used_by_any_threads_at_once() -> None:
    plan, comm = Plan(Mask([9, 5]), Layout.contiguous(14, 1)), LocalComm()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: seqpar.attention(*shards(comm, plan), plan, comm), range(32)))
    assert all(torch.equal(x, found[0]) for x in found)
