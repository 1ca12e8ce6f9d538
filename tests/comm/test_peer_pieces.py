"""`PeerComm` with a pool that is far too small: messages come in pieces, and results stay outside the pool."""

from __future__ import annotations

import logging
import random
import threading
from functools import partial

import pytest
import torch

import seqpar
from seqpar import native
from seqpar.comm import PeerComm, PeerError
from seqpar.comm.peer.pieces import box, cut, lane_bytes
from seqpar.ops.move.switch import switch
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum
from tests.cases import OVER_RANKS
from tests.comm.cases import tag
from tests.comm.device import LIMIT, Stream, on_model
from tests.comm.peer_cases import CHECKS
from tests.comm.test_peer import schedule, threads
from tests.ops.cases import Options, check

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")

SMALL = {"pool_bytes": 1}  # of which a piece gets 256 bytes, the least there is


@pytest.mark.parametrize("shape", [(1,), (1000,), (7, 5), (3, 1, 130), (2, 3, 4, 5), (1, 1, 9), (33, 257)])
@pytest.mark.parametrize("most", [8, 24, 256, 1 << 20])
def test_pieces_are_boxes_that_make_up_the_tensor(shape, most):
    x = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    strided = torch.empty((*shape, 2), dtype=x.dtype)[..., 0].copy_(x)
    pieces = cut(shape, x.dtype, most)
    assert all(8 * elements <= most for _, elements in pieces)
    for source in (x, strided):
        assert torch.cat([box(source, *piece).flatten() for piece in pieces]).equal(x.flatten())
    assert len(pieces) <= 1 + 2 * max(1, 8 * x.numel() // most)


def test_the_room_for_pieces_is_an_eighth_and_never_nothing():
    assert lane_bytes(1, 7) == 256 and lane_bytes(1 << 20, 0) == 1 << 16
    assert 2 * 7 * lane_bytes(1 << 29, 7) <= 1 << 26 < 2 * 7 * (lane_bytes(1 << 29, 7) + 256)


def mixed(comm):
    """Messages between two ranks, whole and in pieces, of any strides and dims; what is wrong, and what was staged."""
    other, device = 1 - comm.rank, comm._channel.cuda.device
    x = torch.arange(700.0, dtype=torch.float64, device=device).reshape(7, 10, 10) + 1000 * comm.rank
    deep = torch.full((2,) * 8, comm.rank, dtype=torch.int16, device=device)
    sends = [x.permute(2, 0, 1), x[:2, ::2, 1:3], deep, x[0, 0, 0], x[::3, 1:]]
    recvs = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in sends]
    recvs[0] = torch.empty(10, 10, 7, dtype=x.dtype, device=device).permute(0, 2, 1)
    recvs[1] = comm.empty((2, 5, 2), x.dtype, device)
    assert comm._channel.pool.owns(recvs[1])
    comm.exchange({other: sends}, {other: recvs}, tag=tag(0)).wait()
    comm._channel.cuda.current().synchronize()
    wrong = [n for n, (a, b) in enumerate(zip(recvs, sends)) if not a.equal(b - 1000 * comm.rank + 1000 * other)]
    return [n for n in wrong if n != 2 or not bool((recvs[2] == other).all())], comm.stats.staged_bytes


def test_messages_of_any_strides_come_whole_or_in_pieces():
    staged = 700 * 8 + 256 * 2 + 8 + 3 * 9 * 10 * 8
    assert threads(2, mixed, delay=0.001, pool_bytes=512) == [([], staged)] * 2


@pytest.mark.parametrize("name", ["random exchanges", "many messages", "adjoint"])
def test_checks_pass_without_room(name):
    assert CHECKS[name].right(threads(4, CHECKS[name].case, *CHECKS[name].arguments, **SMALL))


@pytest.mark.parametrize("seed", range(2))
def test_delays_between_any_two_operations_change_nothing(seed):
    assert threads(3, schedule, seed, delay=0.002, seed=seed, at_once=False, **SMALL) == [[], [], []]


def ahead(comm, steps=6):
    """Exchanges of different sizes one ahead, some for one peer alone; the steps whose data were wrong."""
    draw, peers = random.Random(1), [peer for peer in range(comm.size) if peer != comm.rank]
    works, wrong = {}, []
    for n in range(steps + 1):
        if n < steps:
            rows = {(a, b): draw.choice((0, 1, 40, 300)) for a in range(comm.size) for b in range(comm.size)}
            sends = {p: [torch.full((rows[comm.rank, p],), 10.0 * comm.rank + n)] for p in peers}
            recvs = {p: [torch.full((rows[p, comm.rank],), -1.0)] for p in peers}
            works[n] = comm.exchange(sends, recvs, tag=tag(n)), recvs
        if n > 0:
            work, recvs = works.pop(n - 1)
            work.wait()
            wrong += [n - 1 for p, (x,) in recvs.items() if not bool((x == 10.0 * p + n - 1).all())]
    return wrong


@pytest.mark.exhaustive
def test_processes_exchange_in_pieces():
    options = {"delay": 0.0003, **SMALL}
    assert run_processes(3, on_model, ahead, (), 60.0, options, comm="shm", timeout=60.0) == [[]] * 3


@pytest.mark.parametrize("case", [OVER_RANKS[n] for n in (1, 4, 5, 7)], ids=str)
@pytest.mark.sampled(2)
def test_attention_without_room_equals_one_device(case):
    run = partial(threads, delay=0.0001, **SMALL)
    check(case.plan(), (6, 2), (8, 4), Options(sinks=True), run=run)


def train(comm, layers):
    """Layers that keep results of all verbs, and their backward: what of the pool is in use after each, and x, grad."""
    layout = seqpar.Layout.zigzag([48, 80], comm.size)
    plan = seqpar.Plan(seqpar.Mask([48, 80]), layout, ulysses=2, transport="ring")
    end_to_end = seqpar.Layout.contiguous(128, comm.size)
    whole = torch.linspace(-1, 1, 128 * 8 * 4, dtype=torch.float64).view(128, 8, 4).sin()
    first = x = seqpar.shard(whole, plan, comm.rank).requires_grad_()
    taken = []
    for _ in range(layers):
        x = x + seqpar.attention(x, x, x, plan, comm)
        x = seqpar.relayout(x, comm, src=plan.layout, dst=end_to_end).sin()  # saves what it is given
        x = seqpar.relayout(x, comm, src=end_to_end, dst=plan.layout)
        x = x + all_sum(x, comm).sin()
        x = switch(switch(x, comm, split_dim=1, concat_dim=0), comm, split_dim=0, concat_dim=1)
        taken.append(comm._channel.pool.taken() if isinstance(comm, PeerComm) else 0)
    x.square().sum().backward()
    if isinstance(comm, PeerComm):
        taken.append(comm._channel.pool.taken())
        assert not comm._channel.cramped
    return taken, x.detach(), first.grad


def test_results_and_saved_tensors_leave_the_pool_as_it_was():
    layers = 4
    expected = run_threads(4, train, layers)
    for (taken, *tensors), (_, *others) in zip(threads(4, train, layers, pool_bytes=1 << 16), expected, strict=True):
        assert taken == [0] * (layers + 1)
        assert all(a.equal(b) for a, b in zip(tensors, others, strict=True))


def test_the_first_message_in_pieces_says_how_to_avoid_it(caplog):
    def rank_main(comm):
        for n in range(2):
            x = torch.zeros(100)
            comm.exchange({1 - comm.rank: [x]}, {1 - comm.rank: [x.clone()]}, tag=tag(n)).wait()

    with caplog.at_level(logging.WARNING, "seqpar.comm"):
        threads(2, rank_main, **SMALL)
    assert len(caplog.messages) == 2
    assert "has no room for the 400 that call 0 " in caplog.messages[0] and "larger pool_bytes" in caplog.messages[0]


def overwritten(comm, gate, all_come):
    """Rank 0 sends three pieces while rank 1's landing stream is held up before it copies the first one.

    all_come: the stream is held up until they all have come, as the third one does without the wait for its place.
    """
    cuda, channel, other = comm._channel.cuda, comm._channel, 1 - comm.rank
    x = torch.arange(96.0, dtype=torch.float64)
    y = torch.full_like(x, -1.0)
    if comm.rank == 1:
        channel.landing.put(gate.wait)
    work = comm.exchange({1: [x]} if comm.rank == 0 else {}, {0: [y]} if comm.rank == 1 else {}, tag=tag(0))
    if comm.rank == 0:
        work.wait()
        stream = Stream(cuda)
        cuda.follow(stream, cuda.record(channel.copies[other]))
        if not all_come:  # with its wait the third piece never comes before the gate is open
            threading.Timer(0.2, gate.set).start()
        stream.synchronize()
        gate.set()
    else:
        work.wait()
        cuda.current().synchronize()
    comm.agree("afterwards", {})
    return y.equal(x) if comm.rank == 1 else None


@pytest.mark.parametrize(("without", "right"), [((), True), (("lane",), False)])
def test_a_piece_waits_until_its_place_was_copied_out(without, right):
    found = threads(2, overwritten, threading.Event(), not right, at_once=False, without=without, **SMALL)
    assert found[1] is right


def test_a_rank_that_fails_between_pieces_is_named():
    def rank_main(comm):
        x = torch.zeros(10_000)
        if comm.rank == 1:
            comm.exchange({}, {0: [x]}, tag=tag(0))  # dropped
            return None
        with pytest.raises(PeerError) as raised:
            comm.exchange({1: [x]}, {}, tag=tag(0)).wait()
        return str(raised.value)

    assert "dropped the work of call 0" in threads(2, rank_main, **SMALL)[0]


def test_pieces_that_never_come_are_marked():
    gate = threading.Event()

    def rank_main(comm):
        channel, y = comm._channel, torch.zeros(100)
        if comm.rank == 1:
            channel.copies[0].put(lambda: gate.wait(LIMIT))
            comm.exchange({0: [torch.ones(100)]}, {}, tag=tag(0)).wait()
            assert gate.wait(LIMIT)
            return None
        channel.monitor._timeout = 0.3
        comm.exchange({}, {1: [y]}, tag=tag(0)).wait()
        channel.cuda.current().synchronize()
        gate.set()
        return bool(y.isnan().all())

    assert threads(2, rank_main, at_once=False, **SMALL)[0]


def test_memory_to_keep_is_outside_the_pool():
    def rank_main(comm):
        device = comm._channel.cuda.device
        kept, short = (comm.empty((4,), torch.float32, device, kept=kept) for kept in (True, False))
        return [comm._channel.pool.owns(x) for x in (kept, short)]

    assert run_threads(2, on_model, rank_main, (), 60.0, {}, timeout=60.0) == [[False, True]] * 2
