"""One rank's view of a plan: its part of every head trade, and its steps, in which keys arrive and are attended to.

The rows of each tensor are numbered from 0::

    local rows      of this rank's q, k and v
        |           Trade: tokens are traded for heads
    inside rows     of all members of the trade, in position order, for this rank's share of the heads
        |           Step: sends and recvs
    buffer rows     the keys of all senders, in position order; a kernel reads them by tiles or segments
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from seqpar.facts.bands import Until, closed_pairs, sees_any
from seqpar.facts.segments import Segments, segments
from seqpar.facts.tiles import Tiles, tile_tables
from seqpar.facts.value import Ints, Memo, cached

Rows = slice | Ints  # rows of a tensor: a slice if consecutive, so that selecting them copies nothing


def as_rows(index: Ints) -> Rows:
    """Distinct row numbers in the given order, as a slice if they are consecutive and ascending."""
    if index.size == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    consecutive = last - first + 1 == index.size and (index[1:] > index[:-1]).all()
    return slice(first, last + 1) if consecutive else index


def count(rows: Rows) -> int:
    """The number of rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else int(rows.size)


@dataclass(frozen=True, eq=False)
class Trade:
    """One side (queries or keys) of trading tokens for heads among the ranks that share heads.

    local: this rank's local rows of the part, in position order. dest: member -> the inside rows of its tokens; inside,
    all members' rows are in position order. rows: number of inside rows.
    """

    local: Rows
    dest: Mapping[int, Rows]
    rows: int

    @cached_property
    def trivial(self) -> bool:
        """Whether the inside rows are the first local rows in their order, so that nothing is copied or sent."""
        return isinstance(self.local, slice) and self.local == slice(0, self.rows) and len(self.dest) == 1


class BandBounds(NamedTuple):
    """One band of a mask for the inside query rows: ``lo, hi`` [M], and ``until`` of keys by position."""

    lo: Ints
    hi: Ints
    until: Until | None


@dataclass(frozen=True, eq=False)
class Part(Memo):
    """The documents of one Ulysses width, inside the head trade of one rank.

    members: the ranks that share heads, with this one at ``share``. pos: key coordinates of the inside query rows,
    ascending. bands: their bounds in each band of the mask. keys: positions of the inside key rows, ascending.
    """

    width: int
    share: int
    members: range
    q: Trade
    kv: Trade
    pos: Ints
    bands: tuple[BandBounds, ...]
    keys: Ints
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def trivial(self) -> bool:
        """Whether nothing of the part is copied or sent by the head trade."""
        return self.q.trivial and self.kv.trivial

    @cached_property
    def blind(self) -> Ints:
        """Inside query rows that see no key at all."""
        sees = np.zeros(self.pos.size, bool)
        for lo, hi, until in self.bands:
            sees |= lo < hi if until is None else sees_any(until, lo, hi, self.pos)
        return np.flatnonzero(~sees)


@dataclass(frozen=True, eq=False)
class Entry:
    """Keys that enter this rank's node one step before they are used, and are forwarded to its other ranks from here.

    sends: peer -> inside key rows. recvs: peer -> rows of the entry, consecutive and in this order. place: the rows of
    the next step's buffer that the entry's rows fill; this rank sees all of them.
    """

    sends: Mapping[int, Rows]
    recvs: Mapping[int, Rows]
    place: Rows

    @property
    def rows(self) -> int:
        """Number of keys that enter through this rank."""
        return count(self.place)


@dataclass(frozen=True, eq=False)
class Step(Memo):
    """Keys that arrive together, and the messages of these keys and of their gradients.

    number: the step's place in the whole call, equal on all ranks. pos [N]: positions of the buffer's key rows,
    ascending. local: the buffer is the inside keys themselves. own: the rows of the inside keys in a gathered buffer.
    sends, recvs: peer -> rows; sends are rows of the inside keys or, if ``relay``, of the previous step's buffer; recvs
    are rows of this buffer. entry: keys that arrive with this step for the next one. spread: the previous step's entry;
    sends are rows of it then, and its keys are seen in this step.

    Backward, after the step is computed. grad_sends: peer -> rows of this buffer whose gradients leave. grad_recvs:
    peer -> inside key rows, or rows of ``spread``, that arriving gradients are added to; the sums in ``spread`` leave
    with the next step's gradients, to the owners of the keys. carry: the peer that sends its running sums for all
    ``carry_rows`` rows of the next step's buffer.

    first: the first step of its part. last: no later step brings this rank keys. ends: no rank has a later step.
    """

    part: Part
    number: int
    pos: Ints
    local: bool = False
    own: Rows | None = None
    relay: bool = False
    entry: Entry | None = None
    spread: Entry | None = None
    sends: Mapping[int, Rows] = field(default_factory=dict)
    recvs: Mapping[int, Rows] = field(default_factory=dict)
    grad_sends: Mapping[int, Rows] = field(default_factory=dict)
    grad_recvs: Mapping[int, Rows] = field(default_factory=dict)
    carry: int | None = None
    carry_rows: int = 0
    first: bool = False
    last: bool = False
    ends: bool = False
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def bands(self) -> tuple[StepBand, ...]:
        """The step in each band of the mask; a band's pairs are computed after the previous band's."""
        return tuple(StepBand.of(self.part.pos, bounds, self.pos) for bounds in self.part.bands)

    @cached_property
    def own_alone(self) -> bool:
        """Whether the buffer holds exactly the rank's own keys."""
        return self.local or (self.own is not None and count(self.own) == len(self.pos))

    @cached_property
    def moves(self) -> bool:
        """Whether this rank takes part in the exchange that brings the step's keys."""
        return bool(self.sends or self.recvs or (self.entry and (self.entry.sends or self.entry.recvs)))

    @property
    def area(self) -> int:
        """Number of pairs of a query and a key that this step computes."""
        return sum(band.area for band in self.bands)


@dataclass(frozen=True, eq=False)
class StepBand(Memo):
    """One band of a step: query row ``i`` sees key row ``j`` iff ``lo[i] <= pos[j] < hi[i]``, ``at[i] < until[j]``.

    at, lo, hi [M]: of the query rows. pos [N]: of the key rows. until [N]: None if it hides no pair.
    """

    at: Ints
    lo: Ints
    hi: Ints
    pos: Ints
    until: Ints | None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, at: Ints, bounds: BandBounds, pos: Ints) -> StepBand:
        """A band for keys at these positions."""
        until = None if bounds.until is None else bounds.until.of(pos)
        hides = until is not None and at.size > 0 and until.size > 0 and int(until.min()) <= int(at[-1])
        return cls(at, bounds.lo, bounds.hi, pos, until if hides else None)

    @cached
    def tiles(self, bm: int, bn: int) -> Tiles:
        """Tile tables of this band, for tiles of ``bm`` query rows and ``bn`` key rows; cached."""
        return tile_tables(self.lo, self.hi, self.pos, bm, bn, at=self.at, until=self.until)

    @property
    @cached
    def segments(self) -> Segments:
        """This band as contiguous rectangles, for kernels that know no positions; cached."""
        return segments(self.lo, self.hi, self.pos, at=self.at, until=self.until)

    @property
    @cached
    def area(self) -> int:
        """Number of pairs of a query and a key; cached."""
        first, stop = np.searchsorted(self.pos, self.lo), np.searchsorted(self.pos, self.hi)
        pairs = int(np.maximum(stop - first, 0).sum())
        return pairs if self.until is None else pairs - closed_pairs(first, stop, self.at, self.until)


def holder_at(owner: int, hop: int, groups: int, inner: int) -> int:
    """The group that holds an owner's keys after this many hops: ``inner - 1`` round the node, then one to the next.

    The hop between nodes keeps the place inside the node, so that every rank uses its own link.
    """
    node, place = divmod(owner, inner)
    outer, turn = divmod(hop, inner)
    return (node + outer) % (groups // inner) * inner + (place + turn - outer) % inner


def owner_at(holder: int, hop: int, groups: int, inner: int) -> int:
    """The group whose keys a group holds after this many hops: the inverse of `holder_at`."""
    node, place = divmod(holder, inner)
    outer, turn = divmod(hop, inner)
    return (node - outer) % (groups // inner) * inner + (place - turn + outer) % inner


def hops_to(holder: Ints | int, owner: Ints | int, groups: int, inner: int) -> Ints:
    """The hop after which a group holds an owner's keys."""
    (node, place), (home, own) = np.divmod(holder, inner), np.divmod(owner, inner)
    outer = (node - home) % (groups // inner)
    return outer * inner + (place - own + outer) % inner
