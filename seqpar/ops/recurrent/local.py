"""What a rank's call of `linear_attention` takes from a plan: its rows and runs as kernels take them, and ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.intervals import edges, expand
from seqpar.facts.value import Ints, Memo, cached
from seqpar.kernels.recurrent import RecurrentKernel
from seqpar.ops.core.device import stream_of
from seqpar.ops.move.relayout import row_numbers
from seqpar.ops.recurrent.rows import rank_runs
from seqpar.plan import Plan
from seqpar.plan.steps import Rows, as_rows


@dataclass(frozen=True, eq=False)
class LocalRuns(Memo):
    """One rank's rows and runs, for a recurrence.

    order: local rows in position order, None if those are all rows in their own order. counts, documents: of the runs.
    opens, closes: runs that are the first or the last of their document. exported: runs that are not the last.
    """

    order: Ints | None
    counts: Ints
    documents: Ints
    opens: Ints
    closes: Ints
    exported: Ints
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    @cached
    def of(plan: Plan, rank: int) -> LocalRuns:
        """A rank's side of a plan; cached."""
        own = rank_runs(plan, rank)
        exported = np.flatnonzero(~own.closes)
        order = own.local(own.positions)
        in_order = order.size == plan.rows(rank) and (order == np.arange(order.size)).all()
        return LocalRuns(
            None if in_order else order,
            own.counts,
            own.documents,
            np.flatnonzero(own.opens),
            np.flatnonzero(own.closes),
            exported,
        )

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
        """order, opens, their documents, closes and exported on a device, uploaded once per stream."""

        def make() -> tuple[Tensor | None, ...]:
            arrays = [self.opens, self.documents[self.opens], self.closes, self.exported]
            *numbers, order = row_numbers([*arrays, self.opens[:0] if self.order is None else self.order], device)
            return None if self.order is None else order, *numbers

        return self.memo(stream_of(device), make)  # type: ignore[no-any-return]

    def rows_of(self, runs: Ints) -> Rows:
        """The local rows of some runs, in their order."""
        rows = expand(edges(self.counts)[runs], self.counts[runs])
        rows = rows if self.order is None else self.order[rows]
        return as_rows(rows) if (np.diff(rows) == 1).all() else rows

    def tables(self, kernel: RecurrentKernel, device: torch.device) -> Any:
        """A kernel's tables of the runs on a device, uploaded once per stream."""

        def make() -> Any:
            with torch.inference_mode(False):  # they outlive the caller's mode
                return kernel.tables(self.counts, self.exported, device)

        return self.memo((kernel.name, stream_of(device)), make)
