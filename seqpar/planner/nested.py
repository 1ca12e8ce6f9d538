"""Documents that are never cut into fetched parts: each goes to ranks that share its heads, or to one rank.

Attention and rows are balanced separately. A document gives the same attention to each rank of its group, so the
largest go first to the least loaded ranks (Graham 1969, Bounds on multiprocessing timing anomalies). Documents on all
ranks give every rank the same attention, however uneven its rows of them: these rows fill what the others leave::

    rank 0   A A A D Z          A by two ranks, B, C and D by one, Z by all
    rank 1   A A A Z Z
    rank 2   B B B B Z
    rank 3   C C Z Z Z

No key is fetched. Tokens of Z are traded for heads while the other documents are computed, whose tokens are traded back
while Z is computed; only Z's way back is exposed, and in backward, which runs the other way round, Z's way in. So Z
should be short, but take as long to compute as the others take to travel. All decisions use integers; ties go by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqpar.facts.intervals import summed
from seqpar.facts.value import Ints
from seqpar.planner.groups import least_loaded
from seqpar.planner.place import Documents, Pieces, Placement


class Nest(NamedTuple):
    """A candidate.

    all, more, some: how many documents, by falling attention, have the largest width, the second and the third: on
    eight ranks 8, 4 and 2. rows: the weight of a row when balancing attention, in 64ths of its ticks.
    """

    all: int
    more: int
    some: int
    rows: int


def nested(batch: Documents, ranks: int, *, room: Ints, nests: Sequence[Nest], uneven: bool = False) -> list[Placement]:
    """The placements of the candidates, without duplicates; all ranks may share heads.

    uneven: balance whole costs, for ranks with room for more rows than the mean.
    """
    attention = batch.ticks - batch.row * batch.lengths
    order = (-attention).argsort(kind="stable")
    widths = [width for width in range(ranks, 1, -1) if ranks % width == 0][:3]
    made: dict[tuple[int, ...], Placement] = {}
    for nest in nests:
        rows = 64 if uneven else nest.rows
        edge = [min(sum(nest[:nth]), order.size) for nth in range(len(widths) + 1)]
        key = (rows, *edge)
        if key not in made:
            nesting = _Nesting(batch, attention, room, batch.row * rows // 64)
            for width, first, stop in zip(widths, edge[:-1], edge[1:], strict=True):
                nesting.share(order[first:stop], width)
            made[key] = nesting.filled(order[edge[-1] :], uneven=uneven)
    return list(made.values())


def all_whole(batch: Documents, ranks: int, *, room: Ints) -> list[Placement]:
    """Every document on one rank, the longest first to the rank with fewest ticks, or with fewest rows.

    Nothing is exchanged, and rows are uneven. A rule that leaves a document without a rank gives no placement.
    """
    order = (-batch.lengths).argsort(kind="stable")
    lengths, placed = batch.lengths[order], []
    for extra in (batch.ticks[order], lengths):
        rank = least_loaded(lengths, extra, [0] * ranks, room.tolist())
        if (rank >= 0).all():
            level = int(summed(rank, batch.ticks[order], ranks).max())
            placed.append(Placement(Pieces(order, np.zeros_like(order), lengths, rank), np.ones_like(order), level))
    return placed


class _Nesting:
    """The ranks while documents are placed: attention and rows so far (load), free rows (left).

    row: ticks that a row counts when attention is balanced.
    """

    def __init__(self, batch: Documents, attention: Ints, room: Ints, row: int) -> None:
        self.batch, self.attention, self.room = batch, attention, room
        self.extra = attention + row * batch.lengths
        self.left, self.load = room.tolist(), [0] * room.size
        self.widths = np.ones(batch.lengths.size, np.int64)
        self.last: list[int] = []
        self.pieces: list[tuple[int, int, int, int]] = []

    def share(self, documents: Ints, width: int) -> None:
        """Give documents to groups of this width; to all ranks if no group has the rows, or the width is all."""
        self.widths[documents] = width
        ranks = len(self.left)
        groups = [range(at, at + width) for at in range(0, ranks, width)] if width < ranks else []
        for document in documents.tolist():
            length = int(self.batch.lengths[document])
            fits = [group for group in groups if min(self.left[rank] for rank in group) * width >= length]
            if not fits:
                self.last.append(document)
                continue
            group = min(fits, key=lambda group: sum(self.load[rank] for rank in group))
            self._cut(document, [1] * width, group)
            for rank in group:
                self.load[rank] += int(self.extra[document]) // width

    def _cut(self, document: int, parts: list[int], group: range) -> None:
        """Divide a document's rows over a group in proportion to ``parts``."""
        length, total = int(self.batch.lengths[document]), sum(parts)
        so_far = start = 0
        for part, rank in zip(parts, group, strict=True):
            so_far += part
            stop = length * so_far // total
            if stop > start:
                self.pieces.append((document, start, stop - start, rank))
                self.left[rank] -= stop - start
            start = stop

    def _missing(self, rows: int) -> list[int]:
        """How many of the rows bring each rank closest to the same load; its free rows, if they do not fit there."""
        so_far = level = 0
        for nth, load in enumerate(sorted(self.load), 1):
            if nth > 1 and load >= level:
                break
            so_far += load
            level = (so_far + self.batch.row * rows) // nth
        parts = [max(0, level - load) // self.batch.row for load in self.load]
        # rounded down, so that all rows are up to one more for each rank
        fits = any(parts) and all(part + len(parts) <= left for part, left in zip(parts, self.left, strict=True))
        return parts if fits else self.left.copy()

    def filled(self, documents: Ints, *, uneven: bool) -> Placement:
        """The placement, after adding these documents on one rank each and those of all ranks.

        Rows of the latter fill the room of the ranks, or bring all to the same load.
        """
        lengths = self.batch.lengths[documents]
        chosen = least_loaded(lengths, self.extra[documents], self.load, self.left)
        whole = chosen >= 0
        self.last += documents[~whole].tolist()
        self.widths[self.last] = len(self.left)
        for document in self.last:
            left = self.left.copy()
            parts = self._missing(int(self.batch.lengths[document])) if uneven else left
            self._cut(document, parts, range(len(left)))
            self.load = [x + self.batch.row * (a - b) for x, a, b in zip(self.load, left, self.left, strict=True)]
        cut = Pieces(*np.array(self.pieces, np.int64).reshape(-1, 4).T)
        own = Pieces(documents[whole], np.zeros_like(documents[whole]), lengths[whole], chosen[whole])
        pieces = Pieces(*(np.concatenate(parts) for parts in zip(own, cut, strict=True)))
        busy = summed(pieces.rank, (self.attention // self.widths)[pieces.document], len(self.left))
        return Placement(pieces, self.widths, int(busy.max()) + self.batch.row * int(self.room.max()))
