"""Memory that peers may write, in blocks that are freed in stream order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar import native
from seqpar.comm.peer.cuda import row_major

ALIGNMENT = 256  # bytes that suit copies and kernels


class DevicePool:
    """Blocks of `size` bytes at address `at` of a device; from any thread.

    A block is free when its tensors' storage is. The stream that used it gets it at once; another stream gets it after
    waiting for all streams that used it: the one that asked for it and those named by `used`. As with PyTorch's
    allocator, a stream that was not named must have finished with the block by itself.
    """

    def __init__(self, cuda: Any, at: int, size: int) -> None:
        self._cuda, self.at, self.size = cuda, at, size
        self._ops = native.ops()
        self._number = self._ops.peer_pool(size)
        self._lock = threading.RLock()
        self._taken: dict[int, tuple[int, list[Any]]] = {}  # offset -> its end, and the streams that use it
        # free ranges that streams may still use: begin, end, streams
        self._returned: list[tuple[int, int, list[Any]]] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> Tensor | None:
        """Uninitialised memory for the next work of `stream`; None if no free range is large enough."""
        count = torch.Size(shape).numel() * dtype.itemsize
        size = max(1, -(-count // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            self._collect()
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
            return sum(end - offset for offset, (end, _) in self._taken.items())

    def owns(self, tensor: Tensor) -> bool:
        """Whether all elements of a tensor are in this pool."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr() - self.at
        return begin >= 0 and begin + (last + 1) * tensor.element_size() <= self.size

    def used(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """Note that a stream uses tensors of this pool."""
        with self._lock:
            for tensor in tensors:
                begin = tensor.data_ptr() - self.at
                for offset, (end, streams) in self._taken.items():
                    if offset <= begin < end and stream not in streams:
                        streams.append(stream)

    def close(self) -> None:
        """Forget the blocks; remaining tensors keep only their address."""
        self._ops.peer_pool_close(self._number)

    def _collect(self) -> None:
        """Free the blocks whose tensors are gone."""
        for offset in self._ops.peer_dropped(self._number):
            end, streams = self._taken.pop(offset)
            self._returned.append((offset, end, streams))
            self._ops.peer_give(self._number, offset)
            self._merge()

    def _merge(self) -> None:
        """Merge neighbouring ranges that the same streams may use."""
        merged: list[tuple[int, int, list[Any]]] = []
        for begin, end, streams in sorted(self._returned, key=lambda block: block[0]):
            low, high, others = merged[-1] if merged else (0, -1, [])
            if high == begin and len(others) == len(streams) and all(stream in others for stream in streams):
                merged[-1] = low, end, others
            else:
                merged.append((begin, end, streams))
        self._returned = merged

    def _reuse(self, begin: int, end: int, stream: Any) -> None:
        """Order a stream after all other streams' work on a range; the rest of the ranges stays noted."""
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
