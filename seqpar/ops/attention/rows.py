"""The rows that a rank's steps read and write: their numbers, and a step's exchanges as indices on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from seqpar.facts.value import Ints
from seqpar.kernels import StepFacts
from seqpar.ops.core.device import Index, Uploaded
from seqpar.plan import Rows, Step, StepBand
from seqpar.plan.steps import count

Received = tuple[Mapping[int, slice], Ints | None]

FAR = 1 << 24  # elements between two rows, from which on Triton's kernels refuse them (`check_rows`)


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
            rows.append(step.part.blind)
            for trade in (step.part.q, step.part.kv):
                rows += [trade.local, *trade.dest.values()]
        yield from (x for x in rows if isinstance(x, np.ndarray) and x.size)


class SharedRows(NamedTuple):
    """Rows that go to several peers, in one message."""

    rows: Index
    peers: list[int]


class SummedRows(NamedTuple):
    """Rows to which arriving ones are added."""

    rows: Index
    count: int


@dataclass(frozen=True, eq=False)
class StepRows:
    """The exchanges of a step, as indices on a device: the fields of `seqpar.plan.Step` and of its entries.

    sends, recvs: of keys, which arrive in memory of ``arriving`` rows and move to ``places`` of the buffer, unless they
    arrive in it. entering: the sends of the step's entry. own, spread: rows of the buffer for own keys and for those of
    the previous step's entry. grad_sends, grad_recvs: of gradients. returning: of own keys that left as that entry, to
    which gradients return one step later.
    """

    sends: list[SharedRows]
    recvs: Mapping[int, slice]
    arriving: int
    places: Index | None
    entering: list[SharedRows]
    own: Index | None
    spread: Index | None
    grad_sends: Mapping[int, Index]
    grad_recvs: Mapping[int, SummedRows]
    returning: Mapping[int, SummedRows]


def step_rows(step: Step, at: Callable[[Rows], Index]) -> StepRows:
    """The exchanges of a step. at: the index of rows."""
    recvs, places = received_keys(step) if step.recvs else ({}, None)
    entry, spread = step.entry, step.spread

    def added(by_peer: Mapping[int, Rows]) -> dict[int, SummedRows]:
        return {peer: SummedRows(at(rows), count(rows)) for peer, rows in by_peer.items()}

    return StepRows(
        sends=_shared(step.sends, at),
        recvs=recvs,
        arriving=len(step.pos if places is None else places),
        places=None if places is None else at(places),
        entering=[] if entry is None else _shared(entry.sends, at),
        own=None if step.own is None else at(step.own),
        spread=None if spread is None else at(spread.place),
        grad_sends={peer: at(rows) for peer, rows in step.grad_sends.items()},
        grad_recvs=added(step.grad_recvs),
        returning={} if spread is None else added(spread.sends),
    )


def _shared(by_peer: Mapping[int, Rows], at: Callable[[Rows], Index]) -> list[SharedRows]:
    """Peers with the same rows share a message."""
    found: dict[object, SharedRows] = {}
    for peer, rows in by_peer.items():
        key = (rows.start, rows.stop) if isinstance(rows, slice) else id(rows)
        found.setdefault(key, SharedRows(at(rows), [])).peers.append(peer)
    return list(found.values())


class UploadedSteps(Uploaded):
    """The row numbers of a rank's steps on a device, and by the step's number its bands' facts and its exchanges."""

    def __init__(
        self, numbers: Mapping[int, Tensor], steps: Iterable[Step], facts: Callable[[StepBand], StepFacts]
    ) -> None:
        super().__init__(numbers)
        self.facts = {step.number: [facts(band) for band in step.bands] for step in steps}
        self.steps = {step.number: step_rows(step, self.rows) for step in steps}


def take(x: Tensor, rows: Index) -> Tensor:
    """Rows of x: a view for a slice, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def leading(x: Tensor, count: int, dim: int = 0) -> Tensor:
    """The first elements of x along a dim; x itself if they are all, since a view takes the host microseconds."""
    return x if x.shape[dim] == count else x.narrow(dim, 0, count)


def near(x: Tensor) -> Tensor:
    """A tensor [rows, heads, dim], copied if its rows lie too far apart for offsets of 32 bits inside a tile."""
    return x if x.stride(0) < FAR or x.shape[0] < 2 else x.contiguous()
