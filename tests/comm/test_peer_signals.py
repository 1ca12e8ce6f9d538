"""How the streams of a `PeerComm` signal on devices that are joined in different ways; the driver is a stub."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from seqpar import native
from seqpar.comm.peer import cuda
from seqpar.comm.peer.comm import PeerComm
from seqpar.testing import run_threads
from tests.comm.device import LIMIT, Model
from tests.comm.peer_cases import stressed
from tests.comm.test_peer import threads

STREAM, OTHERS = SimpleNamespace(cuda_stream=7), ["0000:00:00.0", "0000:01:00.0", "0000:01:00.0"]


class Driver:
    """The operators of the extension. nvlink: it joins the devices; flush: waits can; able: the driver can signal."""

    def __init__(self, *, nvlink, flush, able=True):
        self.nvlink, self.flush, self.able, self.waits, self.asked = nvlink, flush, able, [], []

    def peer_driver_signals(self):
        return self.able

    def peer_bus(self, index):
        return f"0000:0{index}:00.0"

    def peer_ordered(self, index, bus):
        self.asked.append(bus)
        return self.nvlink or bus == self.peer_bus(index)

    def peer_can_flush(self, index):
        return self.flush

    def peer_wait(self, index, stream, by_kernel, flush, words, values, poison, heeds_poison, seconds):
        assert (index, stream, words, values) == (0, 7, [64], [3])
        self.waits.append("kernel" if by_kernel else "flush" if flush else "plain")


@pytest.fixture
def device(monkeypatch):
    """A function: the driver, and a device of it that has looked at the others."""
    monkeypatch.setattr(cuda, "unusable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a device")

    def opened(signals="auto", **facts):
        driver = Driver(**facts)
        monkeypatch.setattr(native, "ops", lambda: driver)
        made = cuda.Cuda("cuda:0", signals=signals)
        made.order(OTHERS)
        return driver, made

    return opened


@pytest.mark.parametrize("signals", ["auto", "driver"])
@pytest.mark.parametrize(("nvlink", "expected"), [(True, "plain"), (False, "flush")])
def test_waits_for_data_flush_where_nvlink_does_not_keep_the_order(device, signals, nvlink, expected):
    driver, made = device(signals, nvlink=nvlink, flush=True)
    for heeds_poison in (True, False):
        made.wait(STREAM, {64: 3}, 1.0, 0, heeds_poison)
    assert driver.waits == [expected, "plain"], "a wait for room guards no data"
    assert driver.asked == OTHERS[:2], "each device is looked at once"


@pytest.mark.parametrize(
    ("wanted", "flush", "able"), [("auto", False, True), ("kernel", True, True), ("auto", True, False)]
)
def test_kernels_wait_where_the_driver_cannot_or_is_not_wanted(device, wanted, flush, able):
    driver, made = device(wanted, nvlink=False, flush=flush, able=able)
    made.wait(STREAM, {64: 3}, 1.0, 0, True)
    assert driver.waits == ["kernel"]


def test_the_drivers_signals_are_refused_where_they_might_pass_data(device):
    with pytest.raises(NotImplementedError, match='cuda:0 .* cannot flush remote writes; give signals="auto" or'):
        device("driver", nvlink=False, flush=False)
    assert device("driver", nvlink=True, flush=False)


def test_the_check_of_small_messages_sees_a_flag_that_comes_before_its_data():
    looked = threading.Event()

    def late(comm):
        if comm.rank == 0:
            comm._channel.copies[1].put(lambda: looked.wait(LIMIT))
        else:
            exchange, calls = comm.exchange, itertools.count()

            def noted(*sides, tag):
                if next(calls):  # what the exchange before brought was looked at
                    looked.set()
                return exchange(*sides, tag=tag)

            comm.exchange = noted
        return stressed(comm, 12)

    (_, exchanges), (wrong, _) = threads(2, late, without=("arrival",))
    assert wrong > 0 and exchanges == 6


class Unordered(Model):
    """A device that cannot keep the order of what rank 0 writes."""

    def order(self, others):
        if self.index == 1:
            raise NotImplementedError("model:1 cannot wait by the driver")


def test_a_rank_that_cannot_keep_the_order_is_named_on_every_rank():
    def rank_main(control):
        with pytest.raises(NotImplementedError, match="PeerComm: model:1 cannot wait by the driver"):
            PeerComm.over(control, Unordered(control.rank, control.size), 1 << 16, 60.0)
        control.agree("afterwards", {})

    run_threads(3, rank_main)
