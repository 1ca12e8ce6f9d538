"""What only `LocalComm` promises: the rules of the strictest transport, live memory, delay, cycles."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from seqpar.comm import LocalComm, PeerError
from seqpar.testing import run_threads
from tests.comm import cases
from tests.comm.cases import tag


def test_one_rank_by_itself():
    cases.by_itself(LocalComm(), check="call")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "a", True])
@pytest.mark.parametrize("name", ["size", "node"])
def test_worlds_and_nodes_have_a_whole_number_of_ranks(name, wrong):
    with pytest.raises(ValueError, match=rf"LocalComm\.world: {name} must be an integer of at least 1, got {wrong!r}"):
        LocalComm.world(**{"size": 4, name: wrong})


def test_delay_changes_no_bit():
    at_once = run_threads(4, cases.bits, 3, 6)
    for delay in (0.005, 0.05):
        start = time.monotonic()
        late = run_threads(4, cases.bits, 3, 6, delay=delay)
        assert time.monotonic() - start >= 6 * delay
        assert all(torch.equal(a, b) for a, b in zip(at_once, late, strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_delayed_random_exchanges_equal_the_specification(seed):
    for wrong, counted, predicted, _ in run_threads(5, cases.sparse, seed, 8, delay=0.01):
        assert wrong == []
        assert counted == predicted


def test_a_read_before_the_wait_sees_nan_and_an_overwritten_source_arrives_overwritten():
    looked = threading.Barrier(2, timeout=60)

    def rank_main(comm):
        x, y = torch.ones(4), torch.zeros(4)
        work = comm.exchange({1 - comm.rank: [x]}, {1 - comm.rank: [y]}, tag=tag(0))
        early = y.clone()
        x.fill_(7.0)
        looked.wait()  # whoever waits delivers what is due
        work.wait()
        return early, y

    for early, late in run_threads(2, rank_main, delay=0.05):
        assert early.isnan().all()
        assert late.tolist() == [7.0] * 4


def test_messages_move_only_between_heads():
    """Rank 0's second exchange does not overtake its first, which waits for rank 2."""

    def rank_main(comm):
        x, y = torch.ones(1), torch.zeros(1)
        if comm.rank == 0:
            first = comm.exchange({}, {2: [torch.zeros(1)]}, tag=tag(0))
            second = comm.exchange({1: [x]}, {}, tag=tag(1))
            first.wait()
            second.wait()
        elif comm.rank == 1:
            work = comm.exchange({}, {0: [y]}, tag=tag(1))
            time.sleep(0.1)
            early = bool(y.isnan().all())
            opened.set()
            work.wait()
            return early, float(y)
        else:
            opened.wait(60)
            comm.exchange({0: [x]}, {}, tag=tag(0)).wait()

    opened = threading.Event()
    assert run_threads(3, rank_main)[1] == (True, 1.0)


@pytest.mark.parametrize("size", [2, 5])
def test_a_cycle_is_printed_at_once(size):
    """Every rank sends to the next before it receives from the one before, under tags that never meet."""

    def rank_main(comm):
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        sent = comm.exchange({after: [torch.ones(1)]}, {}, tag=tag(comm.rank))
        got = comm.exchange({}, {before: [torch.ones(1)]}, tag=tag(before))
        sent.wait()
        got.wait()

    with pytest.raises(PeerError, match="wait for each other in a cycle") as raised:
        run_threads(size, rank_main, timeout=800.0)  # the test's own limit is not much longer
    assert "waited" not in str(raised.value)
    for rank in range(size):
        assert f"rank {rank} in call {rank} phase 0 stage 0 with plan 5eed waits for rank {(rank + 1) % size}" in str(
            raised.value
        )


def test_the_chain_of_waits_is_followed_to_its_end():
    posted = threading.Barrier(2, timeout=60)

    def rank_main(comm):
        if comm.rank < 2:
            work = comm.exchange({}, {comm.rank + 1: [torch.zeros(1)]}, tag=tag(comm.rank))
            posted.wait()
            work.wait()

    with pytest.raises(PeerError, match="for rank 2, which has posted nothing more") as raised:
        run_threads(3, rank_main, timeout=0.5)
    assert "waited 0.5 s in call" in str(raised.value)


def test_an_exchange_and_an_agreement_that_wait_for_each_other_are_a_cycle():
    def rank_main(comm):
        if comm.rank == 0:
            comm.exchange({}, {1: [torch.zeros(2)]}, tag=tag(3)).wait()
        elif comm.rank == 1:
            comm.agree("attention", {})

    with pytest.raises(PeerError, match="cycle: ") as raised:
        run_threads(3, rank_main)
    assert "rank 0 in call 3 phase 0 stage 0 with plan 5eed waits for rank 1" in str(raised.value)
    assert "rank 1 in the agreement on attention waits for rank 0" in str(raised.value)


def test_a_message_that_one_side_does_not_know_of():
    noticed = threading.Event()

    def rank_main(comm):
        x = torch.zeros(1)
        if comm.rank == 2:
            noticed.wait(60)  # until then rank 1 stays in the exchange
            return comm.exchange({1: [x]}, {0: [x]}, tag=tag(0)).wait()
        try:
            comm.exchange({1: [x], 2: [x]} if comm.rank == 0 else {}, {2: [x]} if comm.rank else {}, tag=tag(0)).wait()
        finally:
            noticed.set()

    with pytest.raises(PeerError, match=r"rank 0 sends \['float32\[1\]'\] to rank 1, which receives \[\]"):
        run_threads(3, rank_main)


def test_buffers_of_inference_mode_and_of_autograd():
    def rank_main(comm):
        other = 1 - comm.rank
        time.sleep(0.1 * comm.rank)  # rank 1 posts last and so delivers, also into the memory of rank 0
        with torch.inference_mode(comm.rank == 0):
            x, y = torch.full((2,), 3.0), torch.empty(2)
            comm.exchange({other: [x]}, {other: [y]}, tag=tag(0)).wait()
        z = torch.ones(2, requires_grad=True)
        w = torch.empty(2)
        comm.exchange({other: [z]}, {other: [w]}, tag=tag(1)).wait()
        return y.tolist(), w.tolist()

    assert run_threads(2, rank_main) == [([3.0, 3.0], [1.0, 1.0])] * 2


def test_exchanges_inside_backward():
    """Every rank's backward waits for another's."""

    class Rotate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            comm, dx = ctx.comm, torch.empty_like(dy)
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            comm.exchange({after: [dy]}, {before: [dx]}, tag=tag(0, 1)).wait()
            return dx, None

    def rank_main(comm):
        x = torch.ones(2, requires_grad=True)
        (Rotate.apply(x, comm) * comm.rank).sum().backward()
        return x.grad.tolist()

    assert run_threads(3, rank_main) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_wait_seconds_are_counted():
    def rank_main(comm):
        other = 1 - comm.rank
        work = comm.exchange({other: [torch.ones(1)]}, {other: [torch.empty(1)]}, tag=tag(0))
        start = time.perf_counter()
        work.wait()
        whole, seconds = time.perf_counter() - start, comm.stats.wait_seconds
        comm.stats.reset()
        return whole, seconds, comm.stats.wait_seconds, comm.stats.sent_to

    for whole, seconds, after_reset, sent_to in run_threads(2, rank_main, delay=0.05):
        assert 0 < seconds <= whole
        assert (after_reset, sent_to) == (0.0, {})


def test_run_threads_raises_the_first_failure_and_joins_the_others():
    seen = []

    def rank_main(comm):
        if comm.rank == 1:
            raise LookupError("rank one's own")
        try:
            comm.exchange({}, {1: [torch.zeros(1)]}, tag=tag(0)).wait()
        except PeerError as error:
            seen.append(str(error))
            raise

    with pytest.raises(LookupError, match="rank one's own"):
        run_threads(4, rank_main)
    assert len(seen) == 3
    assert all("root cause: rank 1: LookupError: rank one's own" in message for message in seen)
    assert run_threads(3, lambda comm, x: comm.rank + x, 10) == [10, 11, 12]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have cores on Linux")
@pytest.mark.parametrize(("threads", "shared"), [(1, True), (2, False)])
def test_ranks_of_one_threaded_torch_share_a_core_and_their_caller_keeps_its_own(threads, shared):
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(threads)
    try:
        of_ranks = run_threads(3, lambda comm: os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)
    assert os.sched_getaffinity(0) == cores
    if shared:
        assert len(of_ranks[0]) == 1 and of_ranks[0] <= cores and of_ranks == of_ranks[:1] * 3
    else:
        assert of_ranks == [cores] * 3


def test_what_is_raised_is_no_report_of_another_ranks_failure():
    reported = threading.Event()

    def rank_main(comm):
        if comm.rank == 0:
            reported.wait(60)
            raise KeyError("no such layer")
        try:
            raise PeerError("rank 0 is lost")
        finally:
            reported.set()

    with pytest.raises(KeyError, match="no such layer"):
        run_threads(2, rank_main)


def test_a_process_knows_whether_it_is_in_a_comm_of_processes() -> None:
    program = """
import gc, torch.distributed as dist
from seqpar import GroupComm
from seqpar.comm.failure import in_some_comm

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(in_some_comm())
comm = GroupComm()
print(in_some_comm())
del comm
gc.collect()
print(in_some_comm())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
