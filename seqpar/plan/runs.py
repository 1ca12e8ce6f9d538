"""Runs of documents: what recurrent layers pass from rank to rank.

A *document run* is a maximal stretch of consecutive positions of one document on one rank::

    positions    0         5         9             16
    documents    |    0    |    1    |      2      |
    ranks        | 0  | 1  |   1     |  1  |   0   |
    runs         | 0  | 1  |   2     |  3  |   4   |      ranks 0 1 1 1 0, documents 0 0 1 2 2

A recurrence enters a run with the state that the run before it, in the same document, has left. So a rank needs from
other ranks, if they hold an earlier part of a document: the rows just before each of its runs (`rows_before`), or what
earlier runs did to the state (`earlier_runs`). Nothing enters a document's first run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Runs, cut, edges, expand, interval_of, order_of, summed
from seqpar.facts.mask import Mask
from seqpar.facts.trees import Paths
from seqpar.facts.value import Ints, Memo, cached, frozen
from seqpar.plan.residence import Residence
from seqpar.plan.steps import Rows


def check_unbranched(what: str, mask: Mask) -> None:
    """Raise NotImplementedError unless the tokens of each document follow each other: for trees, and several bands."""
    if not mask.plain or mask.paths is not None:
        raise NotImplementedError(
            f"{what}: a state passes from token to token of a document, and {mask!r} is a tree or has several bands; "
            "give a plan of Mask(lengths), in which each path is a document"
        )


class Requests(NamedTuple):
    """Items that ranks get from their owners, sorted by asking rank, owner and item; no item twice for a rank.

    Items are positions, or numbers of runs.
    """

    asking: Ints
    owner: Ints
    item: Ints

    def arriving(self, rank: int) -> tuple[Ints, dict[int, Rows]]:
        """The items that a rank gets, in the order in which it keeps them; and by owner the places of its items."""
        asked = slice(*np.searchsorted(self.asking, [rank, rank + 1]).tolist())
        owners, first = np.unique(self.owner[asked], return_index=True)
        stops = np.append(first, asked.stop - asked.start)[1:].tolist()
        return self.item[asked], {
            owner: slice(start, stop) for owner, start, stop in zip(owners.tolist(), first.tolist(), stops, strict=True)
        }

    def leaving(self, rank: int) -> dict[int, Ints]:
        """The items that a rank sends, by asking rank."""
        sent = np.flatnonzero(self.owner == rank)
        asking, first = np.unique(self.asking[sent], return_index=True)
        return dict(zip(asking.tolist(), np.split(self.item[sent], first[1:])))


@dataclass(frozen=True, eq=False)
class DocumentRuns(Memo):
    """The document runs of all ranks, in position order, which is also the order inside each document.

    start, count: its first position and its rows. offsets: where documents start, and the end of the last.
    """

    start: Ints
    count: Ints
    rank: Ints
    document: Ints
    ranks: int
    offsets: Ints
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    @cached
    def of(residence: Residence) -> DocumentRuns:
        """The runs of a plan's queries; cached."""
        pieces, rank, document = residence.pieces("q")
        start, count = pieces.start, pieces.count
        if ((pieces.step > 1) & (count > 1)).any():  # in position order, a strided piece has runs of one row
            rank, document = (np.repeat(x, count) for x in (rank, document))
            start = expand(*pieces)
            order = order_of(start, residence.layout.total)
            start, rank, document = start[order], rank[order], document[order]
            count = np.ones_like(start)
        return DocumentRuns.of_pieces(start, count, rank, document, residence.layout.ranks, residence.mask.offsets)

    @classmethod
    def of_pieces(cls, start: Ints, count: Ints, rank: Ints, document: Ints, ranks: int, offsets: Ints) -> DocumentRuns:
        """The runs of pieces of consecutive positions, which are in position order."""
        first = np.flatnonzero(np.append(True, (np.diff(rank) != 0) | (np.diff(document) != 0)))
        if first.size < start.size:
            start, count, rank, document = start[first], np.add.reduceat(count, first), rank[first], document[first]
        start, count, rank, document = (frozen(x.astype(np.int64)) for x in (start, count, rank, document))
        return cls(start, count, rank, document, ranks, offsets)

    @property
    @cached
    def of_cut_documents(self) -> DocumentRuns:
        """The runs of documents that have several; cached."""
        several = ~(self.opens & self.closes)
        start, count, rank, document = (frozen(x[several]) for x in (self.start, self.count, self.rank, self.document))
        return DocumentRuns(start, count, rank, document, self.ranks, self.offsets)

    @property
    @cached
    def opens(self) -> NDArray[np.bool_]:
        """Whether each run is the first of its document; cached."""
        return self.start == self.offsets[self.document]

    @property
    @cached
    def closes(self) -> NDArray[np.bool_]:
        """Whether each run is the last of its document; cached."""
        return self.start + self.count == self.offsets[self.document + 1]

    @property
    def first(self) -> Ints:
        """The number of the first run of each run's document."""
        return np.searchsorted(self.document, self.document)

    @property
    def ordinal(self) -> Ints:
        """The place of each run among those of its document, from 0."""
        return np.arange(self.start.size) - self.first

    @property
    @cached
    def tokens(self) -> Ints:
        """Tokens that each rank holds; cached."""
        return frozen(summed(self.rank, self.count, self.ranks))

    @property
    @cached
    def leaving(self) -> Ints:
        """Rows of each rank in runs that others continue; cached."""
        return frozen(summed(self.rank, self.count * ~self.closes, self.ranks))

    @cached
    def relaid(self) -> DocumentRuns:
        """The runs of a contiguous layout with as many tokens on each rank; cached."""
        edge = edges(self.tokens)
        start = np.union1d(edge[:-1], self.offsets[:-1])
        start = start[start < edge[-1]]
        count, rank = np.diff(start, append=edge[-1]), interval_of(start, edge)
        start, count, rank, document = map(frozen, (start, count, rank, interval_of(start, self.offsets)))
        return DocumentRuns(start, count, rank, document, self.ranks, self.offsets)

    @cached
    def of_rank(self, rank: int) -> Ints:
        """The numbers of a rank's runs."""
        return frozen(np.flatnonzero(self.rank == rank))

    def owner(self, positions: Ints) -> Ints:
        """The ranks that hold these positions."""
        return self.rank[interval_of(positions, self.start)]

    @cached
    def rows_before(self, reach: int) -> Requests:
        """The rows that ranks lack of the `reach` rows before each of their runs; after each run if negative."""
        documents = self.document
        if reach > 0:
            lo, hi = np.maximum(self.start - reach, self.offsets[documents]), self.start
        else:
            lo = self.start + self.count
            hi = np.minimum(lo - reach, self.offsets[documents + 1])
        position = expand(lo, hi - lo)
        asking = np.repeat(self.rank, hi - lo)
        return _requests(asking, self.owner(position), position)

    def rows_above(self, paths: Paths, reach: int) -> Requests:
        """The rows that ranks lack of those `reach` places up the paths of their own rows, in trees."""
        piece, source = cut(Runs(self.start, self.count, np.ones_like(self.start)), paths.start)
        count = np.minimum(piece.count, reach)  # the rows after these are continued inside their piece
        above = paths.before(expand(piece.start, count), reach)
        asking, kept = np.repeat(self.rank[source], count), above >= 0
        return _requests(asking[kept], self.owner(above[kept]), above[kept])

    @cached
    def earlier_runs(self) -> Requests:
        """For each rank all runs of other ranks that come before one of its runs, in the same document."""
        pair = self.document * self.ranks + self.rank
        order = np.argsort(pair, kind="stable")
        last = order[np.append(np.diff(pair[order]) > 0, True)]  # of each rank in each document
        first = self.first[last]
        item = expand(first, last - first)
        asking = np.repeat(self.rank[last], last - first)
        return _requests(asking, self.rank[item], item)


def _requests(asking: Ints, owner: Ints, item: Ints) -> Requests:
    """Requests without those that a rank makes of itself, or twice."""
    kept = asking != owner
    columns = np.stack([asking[kept], owner[kept], item[kept]])
    columns = columns[:, np.lexsort(columns[::-1])]
    if columns.shape[1]:
        columns = columns[:, np.append(True, (np.diff(columns) != 0).any(0))]
    return Requests(*map(frozen, columns))


@dataclass(frozen=True, eq=False)
class RankRuns:
    """One rank's document runs, in position order.

    positions: of its rows, ascending. order: its local rows in that order. numbers: of its runs among those of all
    ranks. counts: rows of each. opens, closes: whether a run is the first or the last of its document.
    """

    positions: Ints
    order: Rows
    numbers: Ints
    counts: Ints
    documents: Ints
    opens: NDArray[np.bool_]
    closes: NDArray[np.bool_]

    @classmethod
    def of(cls, runs: DocumentRuns, positions: Ints, rank: int) -> RankRuns:
        """The runs of a rank that holds these positions, in local row order."""
        ascending = (positions[1:] > positions[:-1]).all()
        order: Rows = slice(0, positions.size) if ascending else np.argsort(positions)
        own = runs.of_rank(rank)
        columns = (runs.count[own], runs.document[own], runs.opens[own], runs.closes[own])
        return cls(positions[order], order, own, *columns)

    @property
    def starts(self) -> Ints:
        """The first row of each run, counted in position order, and the end of the last run."""
        return edges(self.counts)

    def local(self, positions: Ints) -> Ints:
        """The local rows of some of the rank's positions."""
        at = np.searchsorted(self.positions, positions)
        return at if isinstance(self.order, slice) else self.order[at]


@dataclass(frozen=True, eq=False)
class FoldOrder:
    """The order in which a rank folds states into those that enter its runs, once it has all earlier ones.

    levels: the t-th runs of all documents that need them, as numbers among the rank's own runs and then the arrived
    ones. Documents with more levels come first, so each level continues a prefix of the one before. entered: for each
    own run the row, in all levels one after another, whose state enters it; -1 for a document's first run.
    """

    levels: list[Ints]
    entered: Ints

    @classmethod
    def of(cls, runs: DocumentRuns, rank: int) -> FoldOrder:
        """The order of a rank."""
        own, (arrived, _) = runs.of_rank(rank), runs.earlier_runs().arriving(rank)
        known = np.concatenate([own, arrived])
        order = np.argsort(known)
        first = runs.first[own]
        final = np.flatnonzero(np.append(np.diff(runs.document[own]) > 0, True)[: own.size])
        depth = own[final] - first[final]
        longest = np.argsort(-depth, kind="stable")
        begin, depth = first[final][longest], depth[longest]
        levels = []
        for level in range(int(depth.max(initial=0))):
            needed = begin[depth > level] + level
            levels.append(order[np.searchsorted(known[order], needed)])
        place = np.empty_like(longest)
        place[longest] = np.arange(longest.size)
        nth = np.repeat(place, np.diff(np.append(-1, final)))
        before = np.concatenate([[0], np.cumsum([level.size for level in levels], dtype=np.int64)])
        ordinal = own - first
        return cls(levels, np.where(ordinal > 0, before[np.maximum(ordinal - 1, 0)] + nth, -1))
