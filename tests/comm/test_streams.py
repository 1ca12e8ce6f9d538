"""`LocalComm` on CUDA, ranks on streams of their own: no copy runs too early, and no memory is used again too early.

Streams are simulated, since most machines have no GPU: each knows the operations that come before what is put on it
next, so that two uses of the same memory in no order, one of them a write, fail at once. The tensors lie on the CPU.
What a device really does with the same program is the last test.
"""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.comm import Comm, local
from seqpar.testing import run_threads
from tests.comm.cases import tag

LOCK = threading.Lock()  # of all that threads share here


class Stream:
    """What comes before the next operation; an event is what came before it."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.past: frozenset[int] = frozenset()

    def record_event(self) -> frozenset[int]:
        return self.past

    def wait_event(self, event: frozenset[int]) -> None:
        with LOCK:
            self.past |= event


class Device(threading.local):
    """The streams of a device, of which every thread has a current one, and all uses of its memory."""

    def __init__(self, uses: dict[int, list[tuple[int, bool]]], numbers: Iterator[int]) -> None:
        self.uses, self.numbers, self.current = uses, numbers, Stream()

    def use(self, memory: Tensor, *, write: bool) -> None:
        with LOCK:
            earlier = self.uses.setdefault(memory.data_ptr(), [])
            for number, wrote in earlier:
                assert not (write or wrote) or number in self.current.past, "two uses of memory are in no order"
            number = next(self.numbers)
            earlier.append((number, write))
            self.current.past |= {number}

    def switch(self, stream: Stream) -> None:
        """Go on on another stream, after all that was put on this one."""
        stream.wait_event(self.current.record_event())
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Watched(TorchDispatchMode):
    """Tells the device what uses which memory."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("fill_", "copy_"):
            self.device.use(args[0], write=True)
        if name in ("clone", "copy_"):
            self.device.use(args[name == "copy_"], write=False)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch) -> Device:
    found = Device({}, itertools.count())
    monkeypatch.setattr(local, "_stream", lambda tensors: found.current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def exchanges(comm: Comm, device: Device, seed: int, memory: list[Tensor]) -> list[list[float]]:
    """All to all, again and again, one exchange ahead, every call on one of two streams of the rank."""
    draw, streams = random.Random(f"{seed} {comm.rank}"), [Stream(), Stream()]
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    sent = torch.empty(2, 4).unbind()
    received = [{peer: torch.empty(4) for peer in peers} for _ in range(2)]
    memory += [*sent, *(x for each in received for x in each.values())]  # alive, so that an address is one tensor
    works, found = {}, []
    with Watched(device):
        for n in range(7):
            if n < 6:
                device.switch(draw.choice(streams))
                sent[n % 2].fill_(10 * comm.rank + n)
                arriving = {peer: [x] for peer, x in received[n % 2].items()}
                works[n] = comm.exchange({peer: [sent[n % 2]] for peer in peers}, arriving, tag=tag(n))
            if n > 0:
                device.switch(draw.choice(streams))
                works.pop(n - 1).wait()
                sent[(n - 1) % 2].fill_(-1.0)
                found.append([float(received[(n - 1) % 2][peer].clone()[0]) for peer in peers])
    return found


@pytest.mark.parametrize("delay", [0.0, 0.003])
@pytest.mark.parametrize("seed", range(3))
def test_every_copy_has_its_place(device, seed, delay) -> None:
    results = run_threads(3, exchanges, device, seed, [], delay=delay)
    assert results == [[[10 * peer + n for peer in range(3) if peer != rank] for n in range(6)] for rank in range(3)]


def test_a_stream_that_does_not_wait_is_noticed(device, monkeypatch) -> None:
    monkeypatch.setattr(Device, "switch", lambda self, stream: None)  # one stream a rank
    run_threads(3, exchanges, device, 0, [])
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError, match="in no order"):
        run_threads(3, exchanges, device, 0, [])


def test_an_exchange_in_a_graph_under_capture_is_refused(device, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def rank_main(comm: Comm) -> Tensor:
        x = torch.ones(3)
        with pytest.raises(NotImplementedError, match="in a CUDA graph under capture"):
            comm.exchange({1 - comm.rank: [torch.zeros(3)]}, {1 - comm.rank: [x]}, tag=tag(0))
        comm.agree("afterwards", {})
        return x

    assert all(x.eq(1).all() for x in run_threads(2, rank_main)), "nothing was received"


def test_memory_is_held_until_the_wait(device) -> None:
    """What a stream frees it may use again at once, and a copy is on its way on another one."""
    arrived = threading.Event()

    def rank_main(comm: Comm) -> list[bool] | None:
        if comm.rank == 1:
            comm.exchange({}, {0: [torch.empty(3)]}, tag=tag(0)).wait()
            arrived.set()
            return None
        array = np.ones(3, np.float32)
        owner = weakref.ref(array)
        sent = torch.from_numpy(array)
        work = comm.exchange({1: [sent]}, {}, tag=tag(0))
        del array, sent
        arrived.wait(60)
        held = [owner() is not None]
        work.wait()
        return [*held, owner() is not None]

    assert run_threads(2, rank_main)[0] == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("delay", [0.0, 0.003])
def test_ranks_on_streams_of_a_device(delay) -> None:
    def rank_main(comm: Comm) -> list[list[float]]:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        found = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for n in range(20):
                torch.cuda._sleep(100_000 * ((n + comm.rank) % 3))
                sent = torch.full((1 << 20,), 100.0 * comm.rank + n, device="cuda")
                received = torch.empty_like(sent)
                work = comm.exchange({after: [sent]}, {before: [received]}, tag=tag(n))
                if n % 2:
                    del sent  # and its memory is asked for again
                other = torch.full((1 << 20,), -1.0, device="cuda")
                work.wait()
                if not n % 2:
                    sent.fill_(-1.0)
                found.append(torch.stack([received.min(), received.max(), other.max()]))
            return torch.stack(found).tolist()

    for rank, found in enumerate(run_threads(4, rank_main, delay=delay)):
        value = 100.0 * ((rank - 1) % 4)
        assert found == [[value + n, value + n, -1.0] for n in range(20)]
