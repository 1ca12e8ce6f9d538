"""Counts of what recurrent layers pass between ranks under a layout, without listing who asks for what.

A rank receives what the runs before its last one in each document have left, from the ranks that hold them, and for
each run the rows before it (see `seqpar.plan.runs`)::

    document    | run 0 | run 1 | run 2 |
    rank        |   0   |   1   |   0   |      rank 1 receives run 0's state, rank 0 receives run 1's

With ``node=8``, only what passes between nodes of 8 consecutive ranks is counted; with 1, all that changes ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import edges, interval_of, summed
from seqpar.facts.value import Ints
from seqpar.plan.runs import DocumentRuns


class Counts(NamedTuple):
    """States, maps or rows that each rank sends and receives in forward, [ranks] each; backward swaps the two."""

    sent: Ints
    received: Ints

    def times(self, size: int) -> Counts:
        """The bytes, if each has that many."""
        return Counts(self.sent * size, self.received * size)

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(self.sent + other.sent, self.received + other.received)

    @property
    def swapped(self) -> Counts:
        """What gradients of the same items do."""
        return Counts(self.received, self.sent)

    @property
    def busiest(self) -> int:
        """The most that a rank sends or receives."""
        return int(max(self.sent.max(), self.received.max()))


def gathered(runs: DocumentRuns, node: int = 1) -> tuple[Counts, Counts]:
    """The states and the maps that ranks gather: those of `DocumentRuns.earlier_runs`; cached."""
    return runs.memo(("gathered", node), lambda: _gathered(runs.of_cut_documents, node))


def _gathered(runs: DocumentRuns, node: int) -> tuple[Counts, Counts]:
    rank, ranks, place = runs.rank, runs.ranks, runs.rank // node
    by_document, by_rank, by_place = (_Groups(runs.document * ranks + x) for x in (0, rank, place))
    final = by_rank.later(np.ones_like(rank)) == 0  # a rank's last run in a document
    received = np.where(final, by_document.earlier() - by_place.earlier(), 0)
    sent = by_document.later(final) - by_place.later(final)
    opening = final & (place[runs.first] != place)  # which get the state of the document's first run
    states = Counts(summed(rank, sent, ranks), summed(rank, received, ranks))
    maps = summed(rank, np.where(runs.opens, 0, sent), ranks), summed(rank, received - opening, ranks)
    return states, Counts(*maps)


class _Groups:
    """Runs by a key that some have in common."""

    def __init__(self, key: Ints) -> None:
        self.order = key.argsort(kind="stable")
        self.key = key[self.order]

    def earlier(self) -> Ints:
        """How many earlier runs have the same key, for each run."""
        return self._placed(np.arange(self.key.size) - self.key.searchsorted(self.key))

    def later(self, counted: NDArray[np.bool_] | Ints) -> Ints:
        """How many later runs of the same key are counted, for each run."""
        so_far = np.append(0, counted[self.order].cumsum())
        return self._placed(so_far[self.key.searchsorted(self.key, side="right")] - so_far[1:])

    def _placed(self, values: Ints) -> Ints:
        found = np.empty_like(values)
        found[self.order] = values
        return found


def chained(runs: DocumentRuns, node: int = 1) -> Counts:
    """The states that ranks pass on in a chain or a pipeline: one for each run but the last of its document; cached."""

    def count() -> Counts:
        passed = np.flatnonzero(~runs.closes)
        return _sent(runs.ranks, runs.rank[passed], runs.rank[passed + 1], np.ones_like(passed), node)

    return runs.memo(("chained", node), count)


def neighbours(runs: DocumentRuns, reach: int, node: int = 1) -> Counts:
    """The rows that ranks send and receive for the `reach` rows before their runs; cached."""

    def count() -> Counts:
        if (runs.count[~runs.closes] >= reach).all():  # each run lacks rows of the run before it alone
            return chained(runs, node).times(reach)
        asked = runs.rows_before(reach)
        return _sent(runs.ranks, asked.owner, asked.asking, np.ones_like(asked.item), node)

    return runs.memo(("neighbours", reach, node), count)


def relaid(runs: DocumentRuns, node: int = 1) -> Counts:
    """The rows that ranks send and receive to be in a contiguous layout; as many results come back. Cached."""

    def count() -> Counts:
        if node > 1:
            return _sent(runs.ranks, *stretches(runs), node)
        edge, rank = edges(runs.tokens), runs.rank
        stays = np.minimum(runs.start + runs.count, edge[rank + 1]) - np.maximum(runs.start, edge[rank])
        moved = runs.tokens - summed(rank, np.maximum(stays, 0), runs.ranks)
        return Counts(moved, moved)

    return runs.memo(("relaid rows", node), count)


def stretches(runs: DocumentRuns) -> tuple[Ints, Ints, Ints]:
    """Consecutive rows that go from one rank to one rank of a contiguous layout: the two, and how many rows."""
    edge = edges(runs.tokens)
    start = np.union1d(runs.start, edge[:-1])
    start = start[start < edge[-1]]
    return runs.rank[interval_of(start, runs.start)], interval_of(start, edge), np.diff(start, append=edge[-1])


def _sent(ranks: int, source: Ints, target: Ints, count: Ints, node: int) -> Counts:
    """What changes nodes."""
    count = count * (source // node != target // node)
    return Counts(summed(source, count, ranks), summed(target, count, ranks))
