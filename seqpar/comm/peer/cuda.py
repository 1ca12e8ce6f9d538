"""The operations of `PeerComm` on a CUDA device: memory that peers map, and work in stream order.

`PeerComm` uses a device through these few methods only, so that its tests can run on a model of one. An address is a
number; a word is four bytes of device memory at an address.

`Device` has the streams and the copies. Memory that peers map, and writes and waits for its words, are the methods that
`Cuda` adds, by `cudaIpc` and csrc/peer; another `Device` with these methods may take its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar import native
from seqpar.comm.protocol import DIMS


class Device:
    """A CUDA device of this process, without memory that peers map.

    Raises: NotImplementedError without CUDA or the extension for it, and on ROCm.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        if why := unusable():
            raise NotImplementedError(f"PeerComm: {why}; use GroupComm, which moves tensors with torch.distributed")
        self._ops = native.ops()
        wanted = torch.device("cuda" if device is None else device)
        if wanted.type != "cuda":
            raise ValueError(f"PeerComm: device={device!r}, expected a CUDA device")
        self.index = torch.cuda.current_device() if wanted.index is None else wanted.index
        self.device = torch.device("cuda", self.index)
        self.name = f"{self.device} ({torch.cuda.get_device_name(self.index)})"
        self.bus = str(self._ops.peer_bus(self.index))  # by which other processes know the device

    def stream(self, priority: int) -> Any:
        """A stream of our own: torch reuses the ones that it hands out. priority: below 0 comes first."""
        handle = self._ops.peer_stream(self.index, priority)
        return torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]

    def end(self, stream: Any) -> None:
        """Release a stream of `stream` once its work is done."""
        self._ops.peer_stream_end(self.index, stream.cuda_stream)

    def current(self) -> Any:
        """The stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def capturing(self) -> bool:
        """Whether this thread's launches become a graph."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, stream: Any) -> Any:
        """An event after all current work of a stream; ``query()`` returns whether it has happened."""
        return stream.record_event()

    def follow(self, stream: Any, event: Any) -> None:
        """Order a stream's next work after the event."""
        stream.wait_event(event)

    def push(self, stream: Any, at: int, strides: Sequence[int], source: Tensor) -> None:
        """In stream order: copy a tensor to an address with strides, by a copy engine if both sides are contiguous."""
        if source.is_contiguous() and list(strides) == row_major(source.shape):
            self._ops.peer_copy(self.index, stream.cuda_stream, at, source)
            return
        target = self._ops.peer_view(at, list(source.shape), list(strides), source.dtype, self.device)
        self.copy(stream, [target], [source])

    def copy(self, stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """In stream order: copy tensors into tensors of any strides, by one kernel."""
        with torch.cuda.stream(stream):
            copy_all(targets, sources)

    def used(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """Let freed memory of tensors be reused only after the work that the stream has at that time."""
        for tensor in tensors:
            tensor.record_stream(stream)

    def blank(self, stream: Any, poison: int, tensors: Sequence[Tensor]) -> None:
        """In stream order: if the word `poison` is set, set all bits of the tensors, NaN in floating point."""
        self._ops.peer_blank(self.index, stream.cuda_stream, poison, list(tensors))


class Cuda(Device):
    """A device whose memory is mapped by `cudaIpc`.

    signals: "driver" writes and waits for words by operations of the driver, which need no multiprocessor; "kernel" by
    kernels of one block; "auto" is "driver" if the driver has these operations and they keep data before words: see
    `order`.

    Raises: where `Device` does; NotImplementedError if the driver lacks the operations that `signals` needs.
    """

    def __init__(self, device: torch.device | str | int | None = None, *, signals: str = "auto") -> None:
        if signals not in ("auto", "driver", "kernel"):
            raise ValueError(f'PeerComm: signals={signals!r}, expected "auto", "driver" or "kernel"')
        super().__init__(device)
        if signals == "driver" and not self._ops.peer_driver_signals():
            raise NotImplementedError('PeerComm: the driver has no cuStreamBatchMemOp; give signals="kernel"')
        self._by_kernel = signals == "kernel" or not self._ops.peer_driver_signals()
        self._signals, self._flush = signals, False

    def allocate(self, size: int, words: int, value: int) -> int:
        """The address of `size` bytes; the first words hold `value`, the others zero."""
        return int(self._ops.peer_alloc(self.index, size, words, value))

    def free(self, at: int) -> None:
        """Free memory that no other process maps any more."""
        self._ops.peer_free(self.index, at)

    def export(self, at: int) -> list[int]:
        """A handle by which other processes map the memory."""
        return list(self._ops.peer_export(self.index, at))

    def map(self, handle: Sequence[int]) -> int:
        """This process's address of another process's memory."""
        return int(self._ops.peer_open(self.index, list(handle)))

    def unmap(self, at: int) -> None:
        """Unmap another process's memory."""
        self._ops.peer_close(self.index, at)

    def reach(self, device: int) -> None:
        """Make all memory of another device of this process accessible from this one."""
        self._ops.peer_reach(self.index, device)

    def order(self, others: Sequence[str]) -> None:
        """Choose how waits keep data before words. others: the `bus` of all devices that write to this one.

        A device may let writes of others pass each other. Over NVLink none passes an earlier one. Elsewhere, and for
        devices that this process does not see, the driver's waits flush them, or kernels wait, which acquire a word.

        Raises: NotImplementedError if the caller wants the driver's signals and its waits cannot flush.
        """
        if self._by_kernel or all([self._ops.peer_ordered(self.index, bus) for bus in dict.fromkeys(others)]):
            return
        self._flush = self._ops.peer_can_flush(self.index)
        if self._signals == "driver" and not self._flush:
            raise NotImplementedError(
                f"{self.name} cannot wait by the driver for what others write over PCIe, as it cannot flush remote "
                'writes; give signals="auto" or "kernel"'
            )
        self._by_kernel = not self._flush

    def read(self, at: int, words: int, stream: Any) -> list[int]:
        """The current words of this device; nothing else waits in `stream`."""
        return list(self._ops.peer_read(self.index, stream.cuda_stream, at, words))

    def write(self, stream: Any, words: Mapping[int, int]) -> None:
        """In stream order: write address -> value, unordered; a rank that sees one sees all earlier work."""
        at, values = list(words), list(words.values())
        self._ops.peer_write(self.index, stream.cuda_stream, self._by_kernel, at, values)

    def wait(self, stream: Any, words: Mapping[int, int], seconds: float, poison: int, heeds_poison: bool) -> None:
        """In stream order: wait until each word is at or past its value.

        A wait by kernel also ends after `seconds`, when it sets the word `poison`, and, if it heeds the poison, once
        that is set.
        """
        at, values = list(words), list(words.values())
        flush = self._flush and heeds_poison  # a wait for data; others are for room
        self._ops.peer_wait(
            self.index, stream.cuda_stream, self._by_kernel, flush, at, values, poison, heeds_poison, seconds
        )


def unusable() -> str | None:
    """Why no device of this machine can be used, or None."""
    if torch.version.hip is not None:
        return "ROCm is not supported"
    return native.without_cuda() or (None if torch.cuda.is_available() else "no CUDA device")


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in one launch; those of more than 6 dims are contiguous on both sides."""
    flat = [[x.view(-1) if x.dim() > DIMS else x for x in side] for side in (targets, sources)]
    none = [None] * len(targets)
    # inference mode may write both ordinary tensors and those created in inference mode
    with torch.inference_mode():
        native.ops().copy_(*flat, none, none)


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides
