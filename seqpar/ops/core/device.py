"""What a call needs on its device: row numbers and facts, once for each stream, and ranges in a profiler's trace."""

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
    """What a rank's steps need on its device: facts by the step's number, row numbers by their array's identity."""

    facts: Mapping[int, StepFacts]
    numbers: Mapping[int, Tensor]

    def rows(self, rows: Rows) -> slice | Tensor:
        """Rows of the plan as what indexes a tensor."""
        return rows if isinstance(rows, slice) else self.numbers[id(rows)]


def stream_of(device: torch.device) -> Hashable:
    """A device, and on CUDA the stream that work now goes to."""
    return (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else device


_NOTHING = nullcontext()


def profile_range(what: str, number: int) -> AbstractContextManager[Any]:
    """A range in the trace of a profiler, if one runs: what is done there, and for which step (or Ulysses width)."""
    # a record_function costs microseconds also where nothing records; the flag holds for all threads
    return profiler.record_function(f"seqpar {what} {number}") if profiler._is_profiler_enabled else _NOTHING
