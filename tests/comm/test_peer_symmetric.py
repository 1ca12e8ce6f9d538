"""`bench.gpu.symmetric`: memory and waits of a `PeerComm` by stand-ins for torch's symmetric memory and a driver."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.gpu import symmetric
from bench.gpu.symmetric import SymmetricWords
from seqpar import native
from seqpar.comm import PeerComm, Tag
from seqpar.comm.peer.signals import reached
from seqpar.testing import run_processes
from tests.comm.device import Model, Stream

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")


class Memory:
    """What `torch.distributed._symmetric_memory` does, with files that processes map."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def mapped(self, path: str) -> torch.Tensor:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self.kept.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype == torch.uint8 and device.type == "cpu"
        file = os.memfd_create("symmetric")
        os.truncate(file, size + 64)
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        return self.mapped(self.path)[64:]  # a tensor need not start where its memory does

    def rendezvous(self, tensor: torch.Tensor, group: object) -> SimpleNamespace:
        paths: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(paths, self.path, group=group)
        every = [self.mapped(path) for path in paths]
        every[dist.get_rank()] = tensor
        own = tensor.data_ptr() - 64
        return SimpleNamespace(buffer_ptrs=[own if x is tensor else x.data_ptr() for x in every])


def write(stream: Stream, at: int, value: int, flags: int) -> tuple[int]:
    def store() -> None:
        ctypes.c_uint32.from_address(at).value = value

    stream.put(store)
    return (0,)


def wait(stream: Stream, at: int, value: int, flags: int) -> tuple[int]:
    def look() -> None:
        while not reached(ctypes.c_uint32.from_address(at).value, value):
            time.sleep(1e-4)

    stream.put(look)
    return (0,)


class OnModel(SymmetricWords, Model):
    order, read = Model.order, Model.read


MEMORY = Memory()
STAND_INS = {
    "symmetric": lambda: MEMORY,
    "driver": lambda: SimpleNamespace(cuStreamWriteValue32=write, cuStreamWaitValue32=wait),
}


def shifted(comm) -> None:
    """Messages go round, more than epochs have until they wrap; each rank finds those of the one before it."""
    device = OnModel(comm.rank, comm.size)
    device.group = dist.group.WORLD
    with mock.patch.multiple(symmetric, **STAND_INS):
        peer = PeerComm.over(comm, device, 1 << 20, 60.0)
        after, before = (peer.rank + 1) % peer.size, (peer.rank - 1) % peer.size
        for number in range(52):
            mine, got = torch.full((40, 3), 100 * peer.rank + number), peer.empty((40, 3), torch.int64, device.device)
            tag = Tag(1, peer.next_call(), 0, 0, "shift")
            peer.exchange({after: [mine]}, {before: [got]}, tag=tag).wait()
            assert bool((got == 100 * before + number).all())
        peer.close()


def test_messages_arrive_in_symmetric_memory() -> None:
    run_processes(2, shifted, comm="shm")


def test_ranks_of_one_process_and_a_missing_driver_are_refused(monkeypatch) -> None:
    with pytest.raises(RuntimeError, match="ranks that are processes"):
        SymmetricWords().reach(1)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NotImplementedError, match="cuda-bindings is not installed"):
        symmetric.driver()


def test_torch_has_the_names_that_it_uses() -> None:
    """Which a run on GPUs needs: `empty`, `rendezvous`, and the addresses of all ranks."""
    found = symmetric.symmetric()
    assert callable(found.empty) and callable(found.rendezvous)
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "buffer_ptrs")
