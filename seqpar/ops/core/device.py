"""A call's data on its device: row numbers and facts, once per stream; and ranges in a profiler's trace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from seqpar.kernels import StepFacts
from seqpar.plan import Rows


@dataclass(frozen=True, eq=False)
class Uploaded:
    """Data of a rank's steps on its device: facts by the step's number, row numbers by their array's id."""

    facts: Mapping[int, StepFacts]
    numbers: Mapping[int, Tensor]

    def rows(self, rows: Rows) -> slice | Tensor:
        """Rows of the plan as an index of tensors."""
        return rows if isinstance(rows, slice) else self.numbers[id(rows)]


def stream_of(device: torch.device) -> Hashable:
    """A device, and on CUDA also its current stream."""
    return (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else device


_NOTHING = nullcontext()


def profile_range(what: str, number: int) -> AbstractContextManager[Any]:
    """A range in the trace of an active profiler, named after the work and its step (or Ulysses width)."""
    # a record_function costs microseconds even without a profiler; the flag is global to all threads
    return profiler.record_function(f"seqpar {what} {number}") if profiler._is_profiler_enabled else _NOTHING
