"""CPU memory that is used again: the first write to a new page costs more than a message over gloo carries."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST, MOST = 1 << 16, 1 << 24  # bytes of a tensor here; the allocator keeps smaller ones, and larger ones are rare
IDLE = 1 << 26  # bytes that may wait for use


class _Block(NamedTuple):
    """Memory as a numpy array, and a reference to the last part of it that was given away."""

    memory: Any
    part: weakref.ref[Any]

    @property
    def is_free(self) -> bool:
        """Whether the last tensor here is gone, with all of its views."""
        return self.part() is None


class HostPool:
    """Blocks that are free when their tensors' storage is; from any thread."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # the last used comes last
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if not LEAST <= size <= MOST:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self._lock:
            memory = self._taken(size)
            # a storage holds the very object that it was made of
            part = memory[:size]
            self._blocks.append(_Block(memory, weakref.ref(part)))
        return torch.from_numpy(part).view(dtype).view(tuple(shape))

    def _taken(self, size: int) -> Any:
        """The memory of a free block, which is taken out; of a new one if none fits."""
        free = [block for block in self._blocks if block.is_free]
        fitting = [block.memory for block in free if size <= block.memory.size <= 2 * size]
        memory = fitting[-1] if fitting else torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
        kept, idle = [], 0
        for block in reversed(self._blocks):
            if block.memory is memory:
                continue
            if block.is_free and (idle := idle + block.memory.size) > IDLE:
                continue
            kept.append(block)
        self._blocks = kept[::-1]
        return memory
