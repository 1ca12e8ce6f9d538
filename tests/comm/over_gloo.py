"""A backend like NCCL's that gloo carries: batches, few dtypes, and waits that only an abort ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NCCL_TYPES = (
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip


class Batch:
    """The work of a batch. It never completes if its backend is stuck."""

    def __init__(self, works: list[Any], stuck: bool) -> None:
        self._works, self._stuck = works, stuck

    def wait(self) -> None:
        for work in [] if self._stuck else self._works:
            work.wait()

    def is_completed(self) -> bool:
        return not self._stuck and all(work.is_completed() for work in self._works)


class OverGloo:
    """The methods of torch's NCCL backend that a comm calls.

    peers: that a message was posted to or from. ended: set by `abort`, as the kernels that wait for a rank end by it,
    after `before_end`.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._batch, self.stuck = gloo, None, False
        self.peers: set[int] = set()
        self.ended, self.calls = threading.Event(), []
        self.before_end: Callable[[], object] = lambda: None

    def _start_coalescing(self) -> None:
        assert self._batch is None, "a batch is open"
        self._batch: list[Any] | None = []

    def _end_coalescing(self) -> Batch:
        works, self._batch = self._batch, None
        assert works is not None
        return Batch(works, self.stuck)

    def send(self, tensors: list[Tensor], peer: int, number: int) -> None:
        self._post(self._gloo.send, tensors, peer, number)

    def recv(self, tensors: list[Tensor], peer: int, number: int) -> None:
        self._post(self._gloo.recv, tensors, peer, number)

    def _post(self, way: Any, tensors: list[Tensor], peer: int, number: int) -> None:
        assert self._batch is not None and len(tensors) == 1 and tensors[0].numel()
        if tensors[0].dtype not in NCCL_TYPES:
            raise TypeError(f"Unconvertible NCCL type {tensors[0].dtype}")
        self.peers.add(peer)
        if not self.stuck:
            self._batch.append(way(tensors, peer, number))

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self._gloo.allreduce(tensors)

    def _reduce_scatter_base(self, out: Tensor, flat: Tensor) -> Any:
        assert flat.dtype in NCCL_TYPES and flat.numel() == out.numel() * self._gloo.size()
        total = flat.clone()
        work = self._gloo.allreduce([total])
        work.wait()
        out.copy_(total.view(self._gloo.size(), -1)[self._gloo.rank()])
        return Batch([work], self.stuck)

    def _allgather_base(self, flat: Tensor, own: Tensor) -> Any:
        return Batch([self._gloo._allgather_base(flat, own.clone())], self.stuck)

    def _group_start(self) -> None:
        self.calls.append("group")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append("abort")
        self.before_end()
        self.ended.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")
