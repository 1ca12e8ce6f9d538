"""The rows that a rank's steps read and write: which of them travel together, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from seqpar.facts.value import Ints
from seqpar.plan import Rows, Step
from seqpar.plan.steps import count

Received = tuple[Mapping[int, slice], Ints | None]


def received_keys(step: Step) -> Received:
    """The consecutive rows in which the keys of each peer arrive; and the rows of the buffer where they all belong.

    Without numbers they arrive in the buffer itself, since each peer's rows of it are consecutive.
    """
    return step.memo("received keys", lambda: _received(step.recvs))  # type: ignore[no-any-return]


def _received(recvs: Mapping[int, Rows]) -> Received:
    if all(isinstance(rows, slice) for rows in recvs.values()):
        return recvs, None  # type: ignore[return-value]
    numbers = [np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows for rows in recvs.values()]
    ends = np.cumsum([len(rows) for rows in numbers]).tolist()
    return {peer: slice(end - count(recvs[peer]), end) for peer, end in zip(recvs, ends, strict=True)}, np.concatenate(
        numbers
    )


def numbers(steps: Sequence[Step]) -> Iterator[Ints]:
    """All arrays of row numbers with which a rank's steps index tensors."""
    for step in steps:
        rows: list[Rows | None] = [step.own, received_keys(step)[1]]
        rows += [*step.sends.values(), *step.grad_sends.values(), *step.grad_recvs.values()]
        if step.entry is not None:
            rows += [step.entry.place, *step.entry.sends.values()]
        if step.first:
            for trade in (step.part.q, step.part.kv):
                rows += [trade.local, *trade.dest.values()]
        yield from (x for x in rows if isinstance(x, np.ndarray))


def take(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Rows of x: a view for a slice, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
