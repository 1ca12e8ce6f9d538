"""Memory that peers may write, handed out in blocks that streams give back in their own time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar import native
from seqpar.comm.peer.cuda import row_major

ALIGNMENT = 256  # bytes: what copies and kernels like best
SPARE = 8  # one part in so many is not for those who can do without


class DevicePool:
    """Blocks of `size` bytes at address `at` of a device; from any thread.

    A block is free when the storage of its tensor is, and goes at once to whoever asks on the stream that had it. To
    another stream it goes once that one waits for all streams that had it: the one it was asked for on and those named
    by `used`. As with PyTorch's own allocator, a stream that nobody names must be done with the block by itself.
    """

    def __init__(self, cuda: Any, at: int, size: int) -> None:
        self._cuda, self.at, self.size = cuda, at, size
        self._ops = native.ops()
        self._number = self._ops.peer_pool(size)
        self._lock = threading.RLock()
        self._taken: dict[int, tuple[int, list[Any]]] = {}  # offset -> its end, and the streams that use it
        # what is free and streams may still use: begin, end, streams
        self._returned: list[tuple[int, int, list[Any]]] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype, stream: Any, *, spare: bool = False) -> Tensor | None:
        """Memory for what `stream` does next, not initialised; None if there is no free range of that size.

        spare: leave one part in `SPARE` of the pool to others.
        """
        count = torch.Size(shape).numel() * dtype.itemsize
        size = max(1, -(-count // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            self._collect()
            if spare and self._count() + size > self.size - self.size // SPARE:
                return None
            offset = self._ops.peer_take(self._number, size)
            if offset < 0:
                return None
            self._reuse(offset, offset + size, stream)
            self._taken[offset] = offset + size, [stream]
        strides = row_major(shape)
        return self._ops.peer_block(self._number, self.at, offset, list(shape), strides, dtype, self._cuda.device)

    def taken(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._collect()
            return self._count()

    def _count(self) -> int:
        return sum(end - offset for offset, (end, _) in self._taken.items())

    def owns(self, tensor: Tensor) -> bool:
        """Whether all elements of a tensor lie here."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr() - self.at
        return begin >= 0 and begin + (last + 1) * tensor.element_size() <= self.size

    def used(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """Say that a stream uses tensors that lie here."""
        with self._lock:
            for tensor in tensors:
                begin = tensor.data_ptr() - self.at
                for offset, (end, streams) in self._taken.items():
                    if offset <= begin < end and stream not in streams:
                        streams.append(stream)

    def close(self) -> None:
        """Forget the blocks; tensors that are left keep their memory's number and nothing else."""
        self._ops.peer_pool_close(self._number)

    def _collect(self) -> None:
        """Take back the blocks whose tensors are gone."""
        for offset in self._ops.peer_dropped(self._number):
            end, streams = self._taken.pop(offset)
            self._returned.append((offset, end, streams))
            self._ops.peer_give(self._number, offset)
            self._merge()

    def _merge(self) -> None:
        """Make one range of neighbours that the same streams may use."""
        merged: list[tuple[int, int, list[Any]]] = []
        for begin, end, streams in sorted(self._returned, key=lambda block: block[0]):
            low, high, others = merged[-1] if merged else (0, -1, [])
            if high == begin and len(others) == len(streams) and all(stream in others for stream in streams):
                merged[-1] = low, end, others
            else:
                merged.append((begin, end, streams))
        self._returned = merged

    def _reuse(self, begin: int, end: int, stream: Any) -> None:
        """Let a stream come after all that others do with a range; what is left of the ranges stays noted."""
        kept, before = [], []
        for low, high, streams in self._returned:
            if high <= begin or end <= low:
                kept.append((low, high, streams))
                continue
            before += [user for user in streams if user != stream and user not in before]
            kept += [(a, b, streams) for a, b in ((low, begin), (end, high)) if a < b]
        self._returned = kept
        for user in before:
            self._cuda.follow(stream, self._cuda.record(user))
