"""A call on its device: row numbers, once per stream; autocast; and ranges in a profiler's trace.

Autocast is as in torch's own attention: one rule for verbs, layers and models of other libraries.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from seqpar.plan import Rows
from seqpar.private import torch as torch_private

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


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on devices of this kind, None if it is off."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch knows no autocast of meta tensors
        return None
    return torch.get_autocast_dtype(kind)


def no_autocast(kind: str) -> AbstractContextManager[None]:
    """A context without autocast on devices of this kind: it would round products of the accumulation dtype."""
    return nullcontext() if autocast_dtype(kind) is None else torch.autocast(kind, enabled=False)


def autocast(x: Tensor) -> Tensor:
    """x as autocast casts attention's inputs: fp64 and non-floating tensors stay unchanged."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)


def autocasts(values: Sequence[Any]) -> list[Any]:
    """Tensors as `autocast` casts them; other values, which a verb has yet to check, are unchanged."""
    if not torch.compiler.is_compiling() and not torch_private.is_any_autocast_enabled():
        return list(values)
    return [autocast(x) if isinstance(x, Tensor) else x for x in values]


_NOTHING = nullcontext()


def profile_range(what: str, number: int) -> AbstractContextManager[Any]:
    """A range in the trace of an active profiler, named after the work and its step (or Ulysses width)."""
    # a record_function costs microseconds even without a profiler; the flag is global to all threads
    return profiler.record_function(f"seqpar {what} {number}") if torch_private.is_profiling() else _NOTHING
