"""`PeerComm` on a model of the device: the common suite, random schedules, and what must not be left out."""

from __future__ import annotations

import ctypes
import inspect
import os
import random
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from seqpar import native
from seqpar.comm import Comm, LocalComm, PeerComm, PeerError
from seqpar.comm.peer.cuda import Cuda
from seqpar.comm.peer.pool import DevicePool
from seqpar.comm.peer.signals import FIRST, LINE, WRAP, epoch, reached
from seqpar.testing import run_processes, run_threads
from tests.cases import OVER_RANKS
from tests.comm.cases import by_itself, collected, tag, until
from tests.comm.device import LIMIT, Model, Stream, on_model
from tests.comm.peer_cases import CHECKS, strided
from tests.comm.suite import Exchanges
from tests.ops.cases import Options, check

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")


def threads(size, fn, *args, timeout=120.0, **options):
    return run_threads(size, on_model, fn, args, timeout, options, timeout=timeout)


class TestThreads(Exchanges):
    size = 5
    crowd_size, crowd_tensors = 3, 80

    def run(self, size, fn, *args, timeout=120.0):
        return threads(size, fn, *args, timeout=timeout, delay=0.001)

    def test_is_a_comm(self):
        assert self.run(2, isinstance, Comm) == [True, True]


class TestProcesses(Exchanges):
    size = 3
    crowd_size, crowd_tensors = 2, 240

    def run(self, size, fn, *args, timeout=120.0):
        options = {"delay": 0.001}
        return run_processes(size, on_model, fn, args, timeout, options, comm="shm", timeout=timeout)


def schedule(comm, seed, steps=12):
    """All to all, one exchange ahead, on two streams of the rank, the host far ahead of both; what was received."""
    cuda = comm._channel.cuda
    draw, streams = random.Random(f"{seed} {comm.rank}"), [Stream(cuda), Stream(cuda)]
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    sent = [comm.empty((8, 3), torch.float64, cuda.device) for _ in range(2)]
    received = [{peer: comm.empty((8, 3), torch.float64, cuda.device) for peer in peers} for _ in range(2)]
    found, works = {}, {}

    def switch():
        stream = draw.choice(streams)
        cuda.follow(stream, cuda.record(cuda.current()))
        cuda.switch(stream)

    def note(n):
        found[n] = [received[n % 2][peer].flatten().tolist() for peer in peers]

    for n in range(steps + 1):
        if n < steps:
            switch()
            cuda.current().put(lambda n=n: sent[n % 2].fill_(100 * comm.rank + n))
            cuda.current().put(lambda n=n: [x.fill_(-2.0) for x in received[n % 2].values()])
            side = {peer: [sent[n % 2]] for peer in peers}
            works[n] = comm.exchange(side, {p: [x] for p, x in received[n % 2].items()}, tag=tag(n))
        if n > 0:
            switch()
            works.pop(n - 1).wait()
            cuda.current().put(lambda n=n: note(n - 1))
            cuda.current().put(lambda n=n: sent[(n - 1) % 2].fill_(-1.0))
    cuda.current().synchronize()
    comm.agree("all have looked", {})
    expected = {n: [[100.0 * peer + n] * 24 for peer in peers] for n in range(steps)}
    return [n for n in range(steps) if found.get(n) != expected[n]]


@pytest.mark.parametrize("seed", range(4))
def test_delays_between_any_two_operations_change_nothing(seed):
    assert threads(3, schedule, seed, delay=0.003, seed=seed, at_once=False) == [[], [], []]


def out_of_order(comm, gate, what):
    """Rank 0 sends a 7 to rank 1, which then has it, each of them on a stream that is not where it was yet.

    What ought to wait for that opens the gate itself: it waits for ever, or has not waited. Without `what`, the host
    opens it. Returns what rank 1 had before and has afterwards.
    """
    cuda, other, found = comm._channel.cuda, 1 - comm.rank, []
    stream, copies = Stream(cuda), comm._channel.copies[other]
    cuda.switch(stream)
    x, y = (comm.empty((2,), torch.float32, cuda.device).fill_(-1.0) for _ in range(2))
    if comm.rank == 0:
        if what == "source is written":
            stream.put(gate.wait)
        stream.put(lambda: x.fill_(7.0))
        if what != "source is written":
            stream.synchronize()  # a copy that waits for no event must find a 7
        if what in ("bytes have arrived", "source was read"):
            copies.put(gate.wait)
        comm.exchange({1: [x]}, {}, tag=tag(0)).wait()
        stream.put(lambda: x.fill_(-2.0))
        opener = {"source was read": stream, "source is written": copies, "buffer is free": copies}.get(what)
    else:
        if what == "buffer is free":
            stream.put(gate.wait)
        stream.put(lambda: found.append(y.tolist()))
        comm.exchange({}, {0: [y]}, tag=tag(0)).wait()
        stream.put(lambda: found.append(y.tolist()))
        opener = stream if what == "bytes have arrived" else None
    if opener is not None:
        opener.put(gate.set)
    elif what is None:
        gate.set()
    for each in (stream, copies):
        each.synchronize()
    comm.agree("all streams are done", {})
    return found


# a wait, and what comes too early without it
WAITS = {
    ("arrival", "bytes have arrived"): [[-1.0] * 2, [-1.0] * 2],
    ("credit", "buffer is free"): [[7.0] * 2, [7.0] * 2],
    ("event", "buffer is free"): [[7.0] * 2, [7.0] * 2],
    ("event", "source is written"): [[-1.0] * 2, [-1.0] * 2],
    ("sent", "source was read"): [[-1.0] * 2, [-2.0] * 2],
}


@pytest.mark.parametrize(("missing", "what"), WAITS)
def test_a_wait_that_is_left_out_becomes_a_wrong_answer(missing, what):
    _, found = threads(2, out_of_order, threading.Event(), what, at_once=False, without=(missing,))
    assert found == WAITS[missing, what]


def test_nothing_comes_too_early_with_all_waits():
    assert threads(2, out_of_order, threading.Event(), None, at_once=False)[1] == [[-1.0] * 2, [7.0] * 2]


def test_epochs_wrap():
    assert epoch(-1) == FIRST and epoch(47) == 0 and epoch(100 + WRAP) == epoch(100)
    numbers = [-1, 0, 46, 47, 48, 1 << 31, WRAP - 1, WRAP + 5]
    for number in numbers:
        assert reached(epoch(number), epoch(number)) and reached(epoch(number + 1), epoch(number))
        assert reached(epoch(number + (1 << 30)), epoch(number))
        assert not reached(epoch(number - 1), epoch(number))

    def many(comm):
        x, y = torch.empty(2), comm.empty((2,), torch.float32, torch.device("cpu"))
        wrong = []
        for n in range(120):
            x.fill_(n + 0.5 * comm.rank)
            comm.exchange({1 - comm.rank: [x]}, {1 - comm.rank: [y]}, tag=tag(n)).wait()
            wrong += [n] if y.tolist() != [n + 0.5 * (1 - comm.rank)] * 2 else []
        channel = comm._channel
        words = channel.cuda.read(channel.base, channel.words.count, channel.private)
        return wrong, words[channel.words.arrival(1 - comm.rank) // 4]

    assert threads(2, many) == [([], epoch(119))] * 2
    assert epoch(119) < 100


@pytest.mark.parametrize("case", OVER_RANKS, ids=str)
@pytest.mark.sampled(3)
def test_attention_over_it_equals_one_device(case):
    run = partial(threads, delay=0.0003)
    check(case.plan(), (6, 2), (8, 4), Options(sinks=True, softcap=2.0), run=run)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if not check.on_device])
@pytest.mark.sampled(3)
def test_checks_of_the_device_pass_on_its_model(name, size):
    assert CHECKS[name].right(threads(size, CHECKS[name].case, *CHECKS[name].arguments, delay=0.0003))


def test_any_strides_and_the_bytes_that_were_staged():
    assert threads(2, strided, delay=0.001) == [([True] * 4, 4 * 24)] * 2


def test_a_block_goes_to_another_stream_after_those_that_had_it():
    cuda = Model(at_once=False)
    pool = DevicePool(cuda, cuda.allocate(4096, 0, 0), 4096)
    first, second, third = (Stream(cuda) for _ in range(3))
    gate = threading.Event()
    x = pool.take((3, 5), torch.float32, first)
    assert pool.owns(x) and pool.owns(x.t()) and not pool.owns(torch.empty(3)) and x.stride() == (5, 1)
    at = x.data_ptr()
    pool.used([x[1:]], second)
    second.put(gate.wait)
    del x
    same = pool.take((15,), torch.float32, first)
    waiting = first.event()
    assert same.data_ptr() == at
    time.sleep(0.05)
    assert not waiting.query(), "the first stream had to wait for the second"
    gate.set()
    waiting.synchronize()
    del same
    again = pool.take((1,), torch.float32, first)
    first.put(lambda: time.sleep(0.05))
    late = first.event()
    del again
    assert pool.take((1,), torch.float32, third).data_ptr() == at
    third.synchronize()
    assert late.query()
    assert pool.take((4097,), torch.uint8, first) is None
    pool.close()


def test_ranges_that_were_given_back_become_one_again():
    cuda = Model()
    pool, stream = DevicePool(cuda, cuda.allocate(1 << 16, 0, 0), 1 << 16), Stream(cuda)
    blocks = [pool.take((256,), torch.uint8, stream) for _ in range(64)]
    assert pool.taken() == 1 << 14
    for parity in (0, 1):
        blocks[parity::2] = [None] * 32
        assert pool.taken() == (1 - parity) * (1 << 13)
    assert [(begin, end) for begin, end, _ in pool._returned] == [(0, 1 << 14)]
    pool.close()


def test_a_thread_that_waits_for_a_peer_does_not_hold_up_others():
    over = threading.Event()

    def rank_main(comm):
        x, y = torch.ones(4), torch.empty(4)
        if comm.rank == 1:
            comm.agree("the other thread was free", {})
            assert over.wait(LIMIT)  # a comm that nobody holds any more would be the cause
            return
        work = comm.exchange({}, {1: [y]}, tag=tag(0))
        failed = []

        def wait():
            try:
                work.wait()
            except PeerError as error:
                failed.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        later = comm.exchange({1: [x]}, {}, tag=tag(1))
        assert waiting.is_alive()
        comm.agree("the other thread was free", {})
        comm.abort("enough")
        over.set()
        waiting.join()
        with pytest.raises(PeerError):
            later.wait()
        assert "enough" in failed[0]

    threads(2, rank_main)


def test_a_stream_that_waited_is_done_before_its_memory_is_used_again():
    def rank_main(comm):
        cuda, other, gate, begun = comm._channel.cuda, 1 - comm.rank, threading.Event(), threading.Event()
        first, second = Stream(cuda), Stream(cuda)
        cuda.switch(first)
        x, y = torch.ones(4), comm.empty((4,), torch.float32, cuda.device)
        work = comm.exchange({other: [x]}, {other: [y]}, tag=tag(0))
        cuda.switch(second)
        work.wait()
        second.put(lambda: (begun.set(), gate.wait()))
        begun.wait()  # the model holds a tensor until it is done with it
        at, first_again = y.data_ptr(), first.event()
        del y, work
        cuda.switch(first)
        y = comm.empty((4,), torch.float32, cuda.device)
        after = first.event()
        first_again.synchronize()
        assert y.data_ptr() == at and not after.query()
        gate.set()
        after.synchronize()
        comm.agree("afterwards", {})

    threads(2, rank_main, at_once=False)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_source_goes_to_nobody_before_it_was_copied(pooled):
    def rank_main(comm):
        cuda, other, gate = comm._channel.cuda, 1 - comm.rank, threading.Event()
        first, second = Stream(cuda), Stream(cuda)
        cuda.switch(first)
        memory, y = (ctypes.c_float * 4)(), torch.empty(4)
        alive = weakref.ref(memory)
        x = comm.empty((4,), y.dtype, cuda.device) if pooled else torch.frombuffer(memory, dtype=y.dtype)
        x.fill_(comm.rank)
        at = x.data_ptr()
        comm._channel.copies[other].put(gate.wait)
        work = comm.exchange({other: [x]}, {other: [y]}, tag=tag(0))
        cuda.switch(second)
        work.wait()
        del x, work, memory
        cuda.switch(first)
        if pooled:
            x = comm.empty((4,), torch.float32, cuda.device)
            assert x.data_ptr() == at
            first.put(lambda: x.fill_(-1.0))
            assert not first.event().query()
        else:
            assert alive() is not None
        gate.set()
        second.synchronize()
        first.synchronize()
        comm.agree("afterwards", {})
        return y.tolist()

    assert threads(2, rank_main, at_once=False) == [[1.0] * 4, [0.0] * 4]


def test_tensors_elsewhere_and_graphs_are_refused():
    def rank_main(comm):
        x, found = torch.zeros(2, device="meta"), []
        try:
            comm.exchange({1 - comm.rank: [x]}, {}, tag=tag(0))
        except ValueError as error:
            found.append(str(error))
        comm._channel.cuda.capturing = lambda: True
        try:
            comm.exchange({1 - comm.rank: [torch.zeros(2)]}, {}, tag=tag(0))
        except NotImplementedError as error:
            found.append(str(error))
        comm.agree("afterwards", {})
        return found

    for rank, (elsewhere, captured) in enumerate(threads(2, rank_main)):
        assert f"tensors on ['meta']; expected all of them on cpu, the device of rank {rank}'s PeerComm" in elsewhere
        assert "in a CUDA graph under capture" in captured


def agrees_meanwhile(comm, elements, early):
    """Rank `early` agrees while the other one waits for their exchange, and then agrees too: what rank 0 receives."""
    x, y = torch.full((elements,), 3.0), torch.zeros(elements)
    sides = ({}, {1: [y]}) if comm.rank == 0 else ({0: [x]}, {})
    if comm.rank != early:
        time.sleep(0.2)  # the other one is agreeing
    work = comm.exchange(*sides, tag=tag(0))
    if comm.rank != early:
        work.wait()
    comm.agree("meanwhile", {"elements": elements})
    work.wait()
    return y.unique().tolist()


@pytest.mark.parametrize("run", [run_threads, partial(run_processes, comm="shm")], ids=["threads", "processes"])
@pytest.mark.parametrize("elements", [10, 3000])  # at once, and in pieces
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.sampled(2)
def test_an_exchange_goes_on_while_a_rank_agrees(run, elements, early):
    options = {"pool_bytes": 4096}
    assert run(2, on_model, agrees_meanwhile, (elements, early), 30.0, options) == [[3.0], [0.0]]


def opened(control, unreachable):
    """What the constructor raises where rank 0 cannot reach others; the comm beside it goes on."""
    options = {"unreachable": unreachable if control.rank == 0 else ()}
    try:
        on_model(control, lambda comm: None, (), 120.0, options)
    except NotImplementedError as error:
        control.agree("afterwards", {})
        return str(error)


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_peers_that_cannot_map_each_other_are_named_on_every_rank(run):
    (message,) = {*run(3, opened, (2,))}
    assert "model:0 of rank 0 cannot map model:2 of rank 2: cuda" in message
    assert "CUDA error 217, peer access is not supported; use GroupComm, which over NCCL" in message


def refusals(control):
    found = []
    for options in ({}, {"device": "cpu"}, {"signals": "smoke"}):
        try:
            PeerComm(**options)
        except (NotImplementedError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_constructor_says_so():
    for found in run_processes(2, refusals):
        assert found[0].startswith("NotImplementedError: PeerComm: ") and "GroupComm" in found[0]
        assert "signals='smoke'" in found[2]


def test_rocm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotImplementedError, match="PeerComm: ROCm is not supported; use GroupComm"):
        Cuda()


def test_one_rank_by_itself():
    def rank_main(comm):
        by_itself(comm, check="call")
        x = comm.empty((3,), torch.float32, comm._channel.cuda.device)
        assert comm._channel.pool.owns(x)
        comm.abort("for a reason")
        with pytest.raises(PeerError, match="for a reason"):
            comm.check()
        assert not comm._channel.pool.owns(comm.empty((3,), torch.float32, x.device))

    threads(1, rank_main)
    with pytest.raises(ValueError, match="pool_bytes=0, expected an integer from 1 to"):
        PeerComm.over(LocalComm(), Model(), 0, 1.0)


def test_close_gives_the_memory_back_and_says_so():
    def rank_main(comm):
        x = torch.ones(2)
        comm.exchange({1 - comm.rank: [x]}, {1 - comm.rank: [x.clone()]}, tag=tag(0)).wait()
        with pytest.raises(ValueError, match="closed with it; close that comm, on all ranks"):
            comm.sub([0, 1]).close()
        comm.close()
        comm.close()
        with pytest.raises(PeerError, match="the comm is closed"):
            comm.check()
        assert comm.empty((2,), x.dtype, x.device).shape == (2,)

    threads(2, rank_main)


def test_the_model_has_the_methods_of_the_device():
    def methods(of):
        found = inspect.getmembers(of, inspect.isfunction)
        return {n: list(inspect.signature(f).parameters) for n, f in found if not n.startswith("_")}

    model = methods(Model)
    assert model.pop("switch")
    assert model == methods(Cuda)


def another(comm):
    return type(comm)(timeout=120.0)


def of_a_model(comm):
    return PeerComm.over(another(comm), Model(comm.rank, comm.size), 1 << 16, 120.0)


@pytest.mark.parametrize(("kind", "make"), [("gloo", another), ("shm", another), ("shm", of_a_model)])
def test_a_comm_is_collected_in_silence_with_a_work_that_nobody_waited_for(kind, make):
    assert run_processes(2, collected, make, comm=kind) == [[], []]


@pytest.mark.parametrize(("case", "says"), [("dies", "whose process has ended"), ("closes", "which closed its comm")])
def test_a_rank_that_is_gone_is_named(tmp_path, case, says):
    with pytest.raises(RuntimeError):
        run_processes(3, on_model, gone, (tmp_path, case), 120.0, {}, comm="shm", timeout=120.0)
    for rank in (0, 2):
        assert f"lost rank 1, {says}" in (tmp_path / str(rank)).read_text()


def gone(comm, folder, case):
    """Rank 1 ends, or drops its comm, while the others wait for it."""
    try:
        comm.agree("before", {})  # which a rank may still be in when another one notices
        if comm.rank == 1 and case == "dies":
            os._exit(3)
        if comm.rank == 1:
            comm._channel.end()
            return until(lambda: all((folder / other).exists() and (folder / other).read_text() for other in "02"))
        comm.exchange({}, {1: [torch.zeros(4)]}, tag=tag(9)).wait()
    except PeerError as error:
        (folder / str(comm.rank)).write_text(str(error))
        raise


def stalled(comm, launched, gave_up, *copied):
    """Rank 1's stream stops before it posts; its host does not. Rank 0 is let go: NaN till late data, and a reason."""
    cuda, channel, other, gate = comm._channel.cuda, comm._channel, 1 - comm.rank, threading.Event()
    x, y = torch.full((4,), 1.0 + comm.rank), comm.empty((4,), torch.float32, cuda.device).fill_(-1.0)
    comm.exchange({other: [x]}, {other: [y]}, tag=tag(0)).wait()
    cuda.current().synchronize()
    if comm.rank == 1:
        cuda.current().put(gate.wait)
        cuda.current().put(lambda: y.fill_(-3.0))
    later = x + 10.0
    comm.exchange({other: [later]}, {other: [y]}, tag=tag(1)).wait()
    event = cuda.record(cuda.current())
    if comm.rank == 1:
        assert not event.query(), "the host waited for a stream"
        launched.set()
        assert gave_up.wait(LIMIT) and channel.cause is not None
        assert y.tolist() == [1.0] * 4, "rank 0 wrote where this stream had not been"
        gate.set()
    else:
        assert launched.wait(LIMIT)
        channel.monitor._timeout = 0.3
        stream = Stream(cuda)
        until(lambda: all(cuda.read(base + channel.words.poison, 1, stream) == [1] for base in channel.bases))
        gave_up.set()
    cuda.current().synchronize()
    channel.copies[other].synchronize()
    copied[comm.rank].set()
    assert copied[other].wait(LIMIT)
    # the other rank's copy came before the mark, or after it and brought what it should
    assert cuda.blanked == 1 and (y.isnan().all() or y.tolist() == [11.0 + other] * 4)
    with pytest.raises(PeerError) as raised:
        comm.check()
    for verb in (lambda: comm.exchange({other: [x]}, {}, tag=tag(2)), lambda: comm.agree("x", {})):
        with pytest.raises(PeerError):
            verb()
    return str(raised.value)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_stream_that_stops_is_named_and_lets_the_others_go(kernels):
    events = (threading.Event() for _ in range(4))
    messages = threads(2, stalled, *events, at_once=False, kernels=kernels)
    assert "waited 0.3 s in call 1 phase 0 stage 0 with plan 5eed for ranks [1]: " in messages[0]
    for message in messages:
        assert "for ranks [1]: what rank 1 sends, " in message and "slot" not in message and "epoch" not in message
        assert " did not arrive; the comm is dead; give the comm a longer timeout" in message
    assert "root cause: rank 0" in messages[1]


def test_a_kernel_that_has_waited_too_long_marks_what_comes_after():
    cuda = Model(kernels=True)
    base, x = cuda.allocate(4096, 1, 0), torch.zeros(3)
    word, poison = base, base + 3 * LINE
    cuda.write(Stream(cuda), {word: 1})
    cuda.current().synchronize()
    stream = cuda.current()
    cuda.promised[word] = 2
    cuda.wait(stream, {word: 2}, 0.05, poison, False)
    cuda.blank(stream, poison, [x])
    assert x.isnan().all() and cuda.read(poison, 1, stream) == [1]


def test_a_copy_without_credit_is_let_go_after_another_timeout():
    gate, launched = threading.Event(), threading.Event()

    def rank_main(comm):
        cuda, channel, other, opened = comm._channel.cuda, comm._channel, 1 - comm.rank, []
        x, y = torch.ones(4), comm.empty((4,), torch.float32, cuda.device)
        if comm.rank == 1:
            cuda.current().put(lambda: opened.append(gate.wait(LIMIT)))
        comm.exchange({other: [x]}, {other: [y]}, tag=tag(0)).wait()
        if comm.rank == 1:
            launched.set()
            cuda.current().synchronize()
            return opened
        assert launched.wait(LIMIT)
        channel.timeout = channel.monitor._timeout = 0.3
        channel.copies[1].synchronize()
        gate.set()

    assert threads(2, rank_main, at_once=False)[1] == [True]
