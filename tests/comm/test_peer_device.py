"""`PeerComm` on a CUDA device: the common suite with ranks as threads and as processes, all of them on one device."""

from __future__ import annotations

import time

import pytest
import torch

from seqpar.comm.peer.cuda import Cuda, unusable
from seqpar.testing import run_processes, run_threads
from tests.comm.peer_cases import CHECKS, on_device, stalled, strided, was_let_go
from tests.comm.suite import Exchanges

pytestmark = pytest.mark.skipif(unusable() is not None, reason=unusable() or "")


class OnDevice(Exchanges):
    crowd_size, crowd_tensors = 2, 240

    def launched(self, size, fn, args, timeout, carried):
        raise NotImplementedError

    def run(self, size, fn, *args, timeout=60.0):
        return self.launched(size, fn, args, timeout, True)

    def test_any_strides(self):
        assert self.launched(2, strided, (), 60.0, False) == [([True] * 4, 4 * 24)] * 2

    def test_streams_that_are_late(self):
        late = CHECKS["late streams"]
        assert late.right(self.launched(self.size, late.case, (), 60.0, False))


class TestThreadsDriver(OnDevice):
    size, signals = 4, "driver"

    def launched(self, size, fn, args, timeout, carried):
        return run_threads(size, on_device, fn, args, timeout, self.signals, carried, timeout=timeout)

    def test_a_stream_that_stops_is_named_and_lets_the_others_go(self):
        assert was_let_go(self.launched(2, stalled, (), 1.0, False))


class TestThreadsKernels(TestThreadsDriver):
    signals = "kernel"


class TestTwoProcesses(OnDevice):
    size = 2

    def launched(self, size, fn, args, timeout, carried):
        return run_processes(size, on_device, fn, args, timeout, "driver", carried, comm="shm", timeout=timeout)


class TestFourProcesses(TestTwoProcesses):
    size = 4


def test_what_a_dead_comm_received_is_marked_element_by_element():
    cuda = Cuda()
    base = cuda.allocate(4096, 4, 0)
    stream = cuda.current()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn):
        whole = torch.zeros(5, 6, 7, device=cuda.device).to(dtype)
        views = [whole[::2, 1:4].permute(2, 0, 1), torch.zeros(3, device=cuda.device).to(dtype)]
        cuda.blank(stream, base, views)
        assert all(bool((view.float() == 0).all()) for view in views)
        cuda.write(stream, {base: 1})
        cuda.blank(stream, base, views)
        cuda.write(stream, {base: 0})
        assert all(bool(view.float().isnan().all()) for view in views)
        assert int(whole.float().isnan().sum()) == views[0].numel()
    many = [torch.zeros(2, device=cuda.device) for _ in range(40)]
    cuda.write(stream, {base: 1})
    cuda.blank(stream, base, many)
    assert bool(torch.cat(many).isnan().all())
    cuda.free(base)


@pytest.mark.parametrize("heeds_poison", [False, True])
def test_a_kernel_that_has_waited_too_long_marks_what_comes_after(heeds_poison):
    cuda = Cuda(signals="kernel")
    base, stream, x = cuda.allocate(4096, 0, 0), cuda.current(), torch.zeros(3, device="cuda")
    cuda.wait(stream, {base: 1}, 0.05, base + 64, heeds_poison)
    cuda.blank(stream, base + 64, [x])
    assert bool(x.isnan().all()) and cuda.read(base, 17, stream) == [0] * 16 + [1]
    cuda.free(base)


@pytest.mark.parametrize("signals", ["driver", "kernel"])
def test_words_are_written_and_waited_for_in_stream_order_and_wrap(signals):
    cuda = Cuda(signals=signals)
    base = cuda.allocate(4096, 8, (1 << 32) - 2)
    first, second, private = (cuda.stream(-1) for _ in range(3))
    assert cuda.read(base, 2, private) == [(1 << 32) - 2] * 2
    marks = torch.zeros(3, device=cuda.device)
    torch.cuda.synchronize()
    cuda.wait(second, {base: 1, base + 4: (1 << 32) - 2}, 60.0, base + 64, False)
    with torch.cuda.stream(second):
        marks.fill_(1.0)
    event = cuda.record(second)
    time.sleep(0.05)
    assert not event.query()
    cuda.write(first, {base: (1 << 32) - 1})
    time.sleep(0.05)
    assert not event.query()
    cuda.write(first, {base: 3})
    second.synchronize()
    assert marks.tolist() == [1.0] * 3
    cuda.free(base)
