"""Rows for several peers, side by side in one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from seqpar.facts.value import Ints
from seqpar.plan import Rows, Step
from seqpar.plan.steps import count


@dataclass(frozen=True, eq=False)
class Parcels:
    """Rows for several peers, side by side: ``rows`` of a tensor fill a buffer, in which each peer has the rows ``of``.

    Peers with the same rows share them. rows: None if the tensor itself is the buffer, as each peer's rows in it are
    consecutive. count: rows of the buffer that any peer has.
    """

    rows: Rows | None
    of: Mapping[int, slice]
    count: int


def parcels(by_peer: Mapping[int, Rows], *, copied: bool = False) -> Parcels:
    """The parcels of each peer's rows. copied: in a separate buffer, even if the rows are consecutive."""
    consecutive = {peer: rows for peer, rows in by_peer.items() if isinstance(rows, slice)}
    if not copied and len(consecutive) == len(by_peer):
        return Parcels(None, consecutive, sum(map(count, consecutive.values())))
    places: dict[object, slice] = {}
    pieces: list[Rows] = []
    of = {}
    total = 0
    for peer, rows in by_peer.items():
        key = (rows.start, rows.stop) if isinstance(rows, slice) else id(rows)
        if key not in places:
            places[key] = slice(total, total + count(rows))
            pieces.append(rows)
            total += count(rows)
        of[peer] = places[key]
    if len(pieces) == 1:
        return Parcels(pieces[0], of, total)
    numbers = [np.arange(piece.start, piece.stop) if isinstance(piece, slice) else piece for piece in pieces]
    return Parcels(np.concatenate(numbers) if numbers else slice(0, 0), of, total)


def sent_keys(steps: Sequence[Step], n: int) -> Parcels:
    """The keys sent for step n: rows of the inside keys, or of the previous step's buffer as received."""
    step = steps[n]
    copied = step.spread is None and not relays(steps, n)
    return step.memo("sent keys", lambda: parcels(step.sends, copied=copied))  # type: ignore[no-any-return]


def relays(steps: Sequence[Step], n: int) -> bool:
    """Whether the keys sent for step n were received for the step before."""
    return steps[n].relay and not steps[n - 1].local


def received_keys(step: Step) -> Parcels:
    """The keys received for a step: rows of its buffer."""
    return step.memo("received keys", lambda: parcels(step.recvs))  # type: ignore[no-any-return]


def entering_keys(step: Step) -> Parcels:
    """The keys sent with a step's keys to enter other nodes: rows of the inside keys."""
    sends = {} if step.entry is None else step.entry.sends
    return step.memo("entering keys", lambda: parcels(sends, copied=True))  # type: ignore[no-any-return]


def sent_grads(step: Step) -> Parcels:
    """The gradients of a step that are sent: rows of its buffer."""
    return step.memo("sent grads", lambda: parcels(step.grad_sends))  # type: ignore[no-any-return]


def numbers(steps: Sequence[Step]) -> Iterator[Ints]:
    """All arrays of row numbers with which a rank's steps index tensors."""
    for n, step in enumerate(steps):
        rows: list[Rows | None] = [step.own, *step.grad_recvs.values()]
        rows += [sent_keys(steps, n).rows, received_keys(step).rows, sent_grads(step).rows]
        if step.entry is not None:
            rows += [step.entry.place, entering_keys(step).rows, *step.entry.sends.values()]
        if step.first:
            for trade in (step.part.q, step.part.kv):
                rows += [trade.local, *trade.dest.values()]
        yield from (x for x in rows if isinstance(x, np.ndarray))


def take(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Rows of x: a view for a slice, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
