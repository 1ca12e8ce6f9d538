"""`PeerComm` with other memory and waits: torch's symmetric memory, and the driver's operations by cuda-bindings.

    torchrun --nproc-per-node 8 -m bench.gpu.nccl --slice layers --symmetric

It has not run on a GPU. torch allocates by `cuMemCreate`, so ranks need not see all GPUs, and a domain of NVLink may
span nodes; neither nvcc nor csrc/peer is needed for it. `torch.distributed._symmetric_memory` is private in torch 2.13,
which is why the package does not use it. Streams and copies stay those of `Device`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from seqpar.comm import PeerComm, ShmComm
from seqpar.comm.peer.cuda import Device
from seqpar.comm.peer.memory import agreed

WORD = 1 << 32


def symmetric() -> Any:
    """torch's module of symmetric memory."""
    return import_module("torch.distributed._symmetric_memory")


def driver() -> Any:
    """The driver's functions. Raises: NotImplementedError without cuda-bindings."""
    try:
        from cuda.bindings import driver as found
    except ImportError:
        raise NotImplementedError(
            "PeerComm: cuda-bindings is not installed, which writes and waits for words"
        ) from None
    return found


class SymmetricWords:
    """The methods of a device that `seqpar.comm.peer.cuda.Cuda` adds to `Device`. group: the comm's ranks in order."""

    group: Any
    device: torch.device
    _buffer: torch.Tensor

    def allocate(self, size: int, words: int, value: int) -> int:
        """The address of `size` bytes; the first words hold `value`, the others zero."""
        self._driver = driver()
        self._buffer = symmetric().empty(size, dtype=torch.uint8, device=self.device).zero_()
        self._buffer[: 4 * words].view(torch.int32).fill_(value if value < WORD // 2 else value - WORD)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._buffer.data_ptr()

    def export(self, at: int) -> list[int]:
        """This rank, by which others find the memory. A collective: all ranks map it here."""
        self._handle = symmetric().rendezvous(self._buffer, self.group)
        rank = self.group.rank()
        self._offset = at - self._handle.buffer_ptrs[rank]
        return [rank]

    def map(self, handle: Sequence[int]) -> int:
        """This process's address of another process's memory."""
        return int(self._handle.buffer_ptrs[handle[0]] + self._offset)

    def unmap(self, at: int) -> None:
        """torch unmaps it along with the own memory."""

    def free(self, at: int) -> None:
        """Free memory that no other process uses any more."""
        del self._buffer, self._handle

    def reach(self, device: int) -> None:
        """Refuse ranks of one process, which torch does not share memory among."""
        raise RuntimeError("symmetric memory is for ranks that are processes")

    def read(self, at: int, words: int, stream: Any) -> list[int]:
        """The current words of this device; nothing else waits in `stream`."""
        with torch.cuda.stream(stream):
            begin = at - self._buffer.data_ptr()
            return [value % WORD for value in self._buffer[begin : begin + 4 * words].view(torch.int32).tolist()]

    def write(self, stream: Any, words: Mapping[int, int]) -> None:
        """In stream order: write address -> value, after a fence of the whole system."""
        for at, value in words.items():
            _checked(self._driver.cuStreamWriteValue32(stream.cuda_stream, at, value % WORD, 0))

    def wait(self, stream: Any, words: Mapping[int, int], seconds: float, poison: int, heeds_poison: bool) -> None:
        """In stream order: wait until each word is at or past its value. The host releases a wait that lasts."""
        for at, value in words.items():
            _checked(self._driver.cuStreamWaitValue32(stream.cuda_stream, at, value % WORD, 0))  # 0: at or past it


class SymmetricCuda(SymmetricWords, Device):
    """A CUDA device of this process with symmetric memory."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = dist.group.WORLD if group is None else group

    def order(self, others: Sequence[str]) -> None:
        """Refuse devices whose writes may pass each other. Raises: NotImplementedError."""
        if not all(self._ops.peer_ordered(self.index, bus) for bus in dict.fromkeys(others)):
            raise NotImplementedError(f"{self.name}: symmetric memory is tried over NVLink alone")


def peer_comm(pool_bytes: int, timeout: float = 600.0) -> PeerComm:
    """A `PeerComm` of all processes with symmetric memory. A collective; raises as `PeerComm`."""
    control = ShmComm(timeout=timeout)
    with agreed(control):
        device = SymmetricCuda()
    return PeerComm.over(control, device, pool_bytes, timeout)


def _checked(results: Sequence[Any]) -> None:
    if int(results[0]):
        raise RuntimeError(f"the driver refuses an operation of a stream: {results[0]}")
