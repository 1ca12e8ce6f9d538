"""The facts of one rank: its part of every head trade, and the steps in which keys arrive and queries meet them.

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
from typing import Any

import numpy as np

from seqpar.facts.tiles import Segments, Tiles, segments, tile_tables
from seqpar.facts.value import Ints, Memo

Rows = slice | Ints  # rows of a tensor: a slice where they are consecutive, so that taking them copies nothing


def as_rows(index: Ints) -> Rows:
    """Ascending row numbers, as a slice if they are consecutive."""
    if index.size == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == index.size else index


def count(rows: Rows) -> int:
    """How many rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else int(rows.size)


@dataclass(frozen=True, eq=False)
class Trade:
    """One side (queries or keys) of trading tokens for heads among the ranks that share heads.

    local: this rank's local rows of the part, in position order. dest: member -> the rows that its tokens take inside,
    where all members' rows lie in position order. rows: how many there are inside.
    """

    local: Rows
    dest: Mapping[int, Rows]
    rows: int

    @property
    def trivial(self) -> bool:
        """Whether the inside rows are the first local rows as they lie, so that nothing is copied or sent."""
        return isinstance(self.local, slice) and self.local == slice(0, self.rows) and len(self.dest) == 1


@dataclass(frozen=True, eq=False)
class Part(Memo):
    """The documents of one Ulysses width, seen inside the head trade of one rank.

    members: the ranks that share heads, this one at ``share``. pos, lo, hi: of the inside query rows, ascending
    positions in key coordinates and bounds. keys: positions of the inside key rows, ascending.
    """

    width: int
    share: int
    members: range
    q: Trade
    kv: Trade
    pos: Ints
    lo: Ints
    hi: Ints
    keys: Ints
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def trivial(self) -> bool:
        """Whether nothing of the part is copied or sent on the way in and out."""
        return self.q.trivial and self.kv.trivial

    @property
    def blind(self) -> Ints:
        """Inside query rows that see no key at all."""
        return self.memo("blind", lambda: np.flatnonzero(self.lo >= self.hi))


@dataclass(frozen=True, eq=False)
class Entry:
    """Keys that come with one step, for the next: into this rank's node through this rank, and into others' from here.

    sends: peer -> inside key rows. recvs: peer -> rows of the entry, consecutive and in this order. place: the rows of
    the next step's buffer that the entry's rows take, since this rank sees all of them.
    """

    sends: Mapping[int, Rows]
    recvs: Mapping[int, Rows]
    place: Rows

    @property
    def rows(self) -> int:
        """How many enter through this rank."""
        return count(self.place)


@dataclass(frozen=True, eq=False)
class Step(Memo):
    """Keys that arrive together, and what happens to them and to their gradients.

    number: the step's place in the whole call, equal on all ranks. pos [N]: positions of the buffer's key rows,
    ascending. local: the buffer is the inside keys themselves. own: where the inside keys lie in a gathered buffer.
    sends, recvs: peer -> rows; what is sent lies in the inside keys, or, if ``relay``, in the buffer of the step
    before; what is received goes to rows of this buffer. entry: keys that arrive with this step's, for the next step.
    spread: the entry of the step before; what is sent lies there then, and what entered is seen in this step.

    Backward, after the step is computed: grad_sends: peer -> rows of this buffer whose gradients leave; grad_recvs:
    peer -> inside key rows, or rows of ``spread``, to which arriving gradients are added; the sums of ``spread`` leave
    with the next step's gradients, to where its keys came from. carry: the peer whose sums over the ranks before this
    one arrive for all ``carry_rows`` rows of the next step's buffer.

    first: whether it is the first step of its part. last: whether no later one brings this rank keys. ends: whether
    no rank has a later one.
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

    def tiles(self, bm: int, bn: int) -> Tiles:
        """Tile tables of this step for tiles of ``bm`` query rows and ``bn`` key rows; made once."""
        p = self.part
        return self.memo(("tiles", bm, bn), lambda: tile_tables(p.lo, p.hi, self.pos, bm, bn))

    @property
    def moves(self) -> bool:
        """Whether this rank takes part in the exchange that brings the step's keys."""
        return bool(self.sends or self.recvs or (self.entry and (self.entry.sends or self.entry.recvs)))

    @property
    def segments(self) -> Segments:
        """This step as contiguous rectangles, for kernels that know no positions; made once."""
        return self.memo("segments", lambda: segments(self.part.lo, self.part.hi, self.pos))

    @property
    def area(self) -> int:
        """Pairs of a query and a key that this step computes."""
        return self.memo("area", self._area)

    def _area(self) -> int:
        first = np.searchsorted(self.pos, self.part.lo)
        return int(np.maximum(np.searchsorted(self.pos, self.part.hi) - first, 0).sum())
