"""Counts of work and traffic for several candidates at once, as if each had its own copy of the batch.

A document on one group moves no key: its group computes all of its pairs. Only cut documents, mostly few, are visited
piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Runs, cut, interval_of, summed
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, cached, frozen
from seqpar.plan.counts import Tally, areas_of, counts_of, seen_again, whole_runs
from seqpar.planner.place import Placement


def tallies(mask: Mask, placed: Sequence[Placement], *, ranks: int, node: int) -> list[dict[int, Tally]]:
    """The counts of `tally` for several candidates: by rising width.

    node: in ranks; every width divides it. No query may see keys of another document.
    """
    pieces = _pieces(placed, ranks)
    moving = _moving(mask, pieces, node_of=_node_of(pieces, ranks, node) if node < ranks else None)
    counts = moving if pieces.torn.all() else _with_whole(mask, moving, pieces)
    return [{u: Tally(*(c[end - ranks // u : end] for c in counts)) for u, end in own.items()} for own in pieces.ends]


@cached
def areas(mask: Mask) -> Ints:
    """Attended pairs of each document's queries, int64 [documents]; cached."""
    if mask.spans_are_documents:
        s, n = mask.bands[0].spans, mask.lengths
        return frozen(n * (s.hi - s.lo) + (s.hi_step - s.lo_step) * (n * (n - 1) // 2))
    runs, document = whole_runs(mask)
    return frozen(summed(document, areas_of(mask, runs).sum(0), mask.lengths.size))


@cached
def again(mask: Mask) -> Ints:
    """Rows of each document, at least, once for every band after the first in which they see keys; cached."""
    if len(mask.bands) == 1:
        return np.zeros_like(mask.lengths)
    runs, document = whole_runs(mask)
    seen = np.zeros_like(runs.count)
    for band in mask.bands:
        if band.until is None:  # widths are linear and never negative, so only the first and last row may see nothing
            lo, hi, lo_step, hi_step = band.linear(runs.start)
            last = hi - lo + (runs.count - 1) * (hi_step - lo_step)
            inner = np.where((hi > lo) | (last > 0), runs.count - 2, 0)
            seen += np.where(runs.count > 1, inner + (hi > lo) + (last > 0), hi > lo)
    return frozen(summed(document, np.maximum(seen - runs.count, 0), mask.lengths.size))


@cached
def _seen_again(mask: Mask) -> Ints:
    """`Tally.again` of each document where one group holds it."""
    runs, document = whole_runs(mask)
    return frozen(summed(document, seen_again(runs, areas_of(mask, runs)), mask.lengths.size))


def _stretches(mask: Mask) -> Ints:
    """Number of stretches of each document on which its bounds are linear."""
    if mask.spans_are_documents:
        return np.ones_like(mask.lengths)
    return mask.memo("stretches", lambda: np.bincount(interval_of(mask.breaks, mask.offsets[:-1])))


class _Pieces(NamedTuple):
    """Pieces of the documents of all copies. Documents and groups are numbered copy by copy, groups width by width.

    document, start, count, group: of each piece. home: a group that holds rows of the document; torn: whether other
    groups do too. most: rows of each group's largest member. ends: for each copy the last group of each width, and one.
    """

    document: Ints
    start: Ints
    count: Ints  # type: ignore[assignment]  # tuple.count is not missed
    group: Ints
    home: Ints
    torn: NDArray[np.bool_]
    most: Ints
    ends: list[dict[int, int]]


def _pieces(placed: Sequence[Placement], ranks: int) -> _Pieces:
    """The pieces of several candidates."""
    widths: Ints = np.array([p.widths for p in placed])
    columns: list[Ints] = [np.concatenate(column) for column in zip(*(p.pieces for p in placed), strict=True)]
    document, start, count, rank = columns
    copies = np.arange(0, widths.size, widths.shape[1])
    document += copies.repeat([p.pieces.count.size for p in placed])
    first, groups = np.zeros(widths.shape, np.int64), 0
    ends: list[dict[int, int]] = []
    for own, p in zip(first, placed, strict=True):
        ends.append({})
        for width in sorted(set(p.widths.tolist())):
            own[p.widths == width] = groups
            groups += ranks // width
            ends[-1][width] = groups
    width_of: Ints = widths.ravel()[document]
    group: Ints = first.ravel()[document] + rank // width_of
    widest = int(widths.max())
    most = summed(group * widest + rank % width_of, count, groups * widest).reshape(groups, widest).max(1)
    home = np.zeros(widths.size, np.int64)
    home[document] = group
    torn = np.zeros(widths.size, np.bool_)
    torn[document[home[document] != group]] = True
    return _Pieces(document, start, count, group, home, torn, most, ends)


def _node_of(pieces: _Pieces, ranks: int, node: int) -> Ints:
    """The node of each group; copies share no node."""
    nodes = -(-ranks // node)
    return np.concatenate(
        [copy * nodes + np.arange(0, ranks, u) // node for copy, own in enumerate(pieces.ends) for u in own]
    )


def _moving(mask: Mask, pieces: _Pieces, *, node_of: Ints | None) -> Tally:
    """The counts of cut documents."""
    groups = pieces.most.size
    numbers = np.flatnonzero(pieces.torn)
    if not numbers.size:
        none = np.zeros(groups, np.int64)
        return Tally(*(none for _ in Tally._fields))._replace(most=pieces.most)
    batch = mask.pick(numbers % mask.lengths.size)
    chosen = np.flatnonzero(pieces.torn[pieces.document])
    nth = numbers.searchsorted(pieces.document[chosen])
    start = batch.offsets[nth] + pieces.start[chosen]
    order = start.argsort(kind="stable")
    start, group = start[order], pieces.group[chosen[order]]
    fresh = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    start, group = start[fresh], group[fresh]
    runs = Runs(start, np.concatenate([start[1:], [batch.tokens]]) - start, np.ones_like(start))
    piece, source = cut(runs, batch.breaks)
    document = interval_of(piece.start, batch.offsets[:-1])
    return counts_of(batch, piece, group[source], document, groups, node_of=node_of, forwarded=False, most=pieces.most)


def _with_whole(mask: Mask, counts: Tally, pieces: _Pieces) -> Tally:
    """The counts with the documents added that are whole on one group."""
    numbers = np.flatnonzero(~pieces.torn)
    own, home = numbers % mask.lengths.size, pieces.home[numbers]
    rows, near, stretches = (
        summed(home, values[own], counts.rows.size) for values in (mask.lengths, areas(mask), _stretches(mask))
    )
    counts = counts._replace(rows=counts.rows + rows, near=counts.near + near, pieces=counts.pieces + stretches)
    if len(mask.bands) == 1:
        return counts
    return counts._replace(again=counts.again + summed(home, _seen_again(mask)[own], counts.rows.size))
