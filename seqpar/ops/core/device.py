"""A call's data on its device: row numbers, once per stream; and ranges in a profiler's trace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from seqpar.plan import Rows
from seqpar.private.torch import is_profiling

Index = slice | Tensor  # rows of a tensor on a device


class Uploaded:
    """Row numbers of a plan on a device, by their array's id."""

    def __init__(self, numbers: Mapping[int, Tensor]) -> None:
        self.numbers = numbers

    def rows(self, rows: Rows) -> Index:
        """Rows of the plan as an index of tensors."""
        return rows if isinstance(rows, slice) else self.numbers[id(rows)]


def stream_of(device: torch.device) -> Hashable:
    """A device, and on CUDA also its current stream."""
    return (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else device


def current_device_of(x: Tensor) -> AbstractContextManager[None]:
    """A context in which a tensor's GPU, if it lies on one, is the current device, as kernels expect."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call, no-any-return]


_NOTHING = nullcontext()


def profile_range(what: str, number: int) -> AbstractContextManager[Any]:
    """A range in the trace of an active profiler, named after the work and its step (or Ulysses width)."""
    # a record_function costs microseconds even without a profiler; the flag is global to all threads
    return profiler.record_function(f"seqpar {what} {number}") if is_profiling() else _NOTHING
